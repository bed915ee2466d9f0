"""Sealed versions of a model: who holds the key opens them as what they are, and nothing else opens."""

import pytest

from coterie.crypto.sealed_model import agreement, open_model, seal_model
from coterie.crypto.verification import VerificationError
from tests.simulation.rig.sums import held_by_all

HELD = held_by_all()


def test_a_version_opens_for_who_holds_the_key():
    sealed = seal_model(HELD, "run", 3, b"arrays")
    assert open_model(HELD, "run", 3, sealed) == b"arrays"
    assert b"arrays" not in sealed


def test_two_seals_of_one_version_differ():
    assert seal_model(HELD, "run", 3, b"arrays") != seal_model(HELD, "run", 3, b"arrays")


@pytest.mark.parametrize(
    ("run", "round_", "change"),
    [
        ("other", 3, lambda sealed: sealed),
        ("run", 4, lambda sealed: sealed),
        ("run", 3, lambda sealed: sealed[:-1]),
        ("run", 3, lambda sealed: bytes([sealed[0] ^ 1]) + sealed[1:]),
        ("run", 3, lambda sealed: sealed[:20] + bytes([sealed[20] ^ 1]) + sealed[21:]),
        ("run", 3, lambda sealed: b""),
    ],
)
def test_a_version_of_another_run_or_round_or_an_altered_one_does_not_open(run, round_, change):
    sealed = change(seal_model(HELD, "run", 3, b"arrays"))
    with pytest.raises(VerificationError):
        open_model(HELD, run, round_, sealed)


def test_another_keys_holders_open_nothing_and_agree_with_nobody():
    other = type(HELD).generate("run", HELD.epoch, terms())
    sealed = seal_model(HELD, "run", 3, b"arrays")
    with pytest.raises(VerificationError):
        open_model(other, "run", 3, sealed)
    assert agreement(HELD, bytes(32), b"made") != agreement(other, bytes(32), b"made")


def test_holders_agree_only_on_the_same_parts_of_the_same_sum():
    same = agreement(HELD, bytes(32), b"given", b"made")
    assert same == agreement(HELD, bytes(32), b"given", b"made")
    assert len(same) == 32
    others = [
        agreement(HELD, b"\1" * 32, b"given", b"made"),
        agreement(HELD, bytes(32), b"given", b"Made"),
        agreement(HELD, bytes(32), b"givenmade", b""),
    ]
    assert same not in others


def test_what_is_derived_for_one_purpose_is_not_that_of_another():
    assert HELD.derived("model-key") != HELD.derived("model-agreement")


def terms():
    from coterie.crypto.key_record import KeyTerms

    return KeyTerms(bits=HELD.public.bits, comparison=True)
