"""Records of Paillier keys: who made a key, who checked it, and when nobody may encrypt under it."""

from dataclasses import replace

import pytest

from coterie.crypto.custody import countersign_record, sign_record
from coterie.crypto.key_record import (
    Countersignature,
    KeyFields,
    KeyTerms,
    check_epoch,
    countersigners_needed,
)
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CryptoError

from ..custody import ROSTER_KEY, TERMS, held, ids, people, roster
from ..paillier_keys import key

FOUR = people(4)
RUN = "a-run"


def record_of(holders=FOUR[:3], *, generator=0, countersigners=(1, 2), run=RUN, epoch=1):
    secrets = held(run, epoch)
    record = sign_record(holders[generator], secrets, ids(holders))
    for one in countersigners:
        record = record.with_countersignature(countersign_record(holders[one], secrets, record))
    return record


def verify(record, *, on=FOUR[:3], run=RUN, revoked=(), terms=TERMS, key=ROSTER_KEY, complete=True):
    listed = roster(on)
    return record.verify(
        listed, key, run=run, now=listed.issued + 1, revoked=revoked, terms=terms, complete=complete
    )


def refused(record, **how):
    with pytest.raises(VerificationError) as failed:
        verify(record, **how)
    return failed.value


def test_a_key_signed_by_its_generator_and_two_others_holds():
    record = record_of()
    public = verify(record)
    assert public == held().public
    assert (record.generator, record.key_id) == (FOUR[0].participant_id, public.key_id)


@pytest.mark.parametrize(("eligible", "needed"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (1000, 2)])
def test_two_others_must_countersign_or_all_where_there_are_fewer(eligible, needed):
    assert countersigners_needed(eligible) == needed


def test_one_countersignature_is_enough_on_a_roster_of_two_and_too_few_on_one_of_three():
    two = FOUR[:2]
    verify(record_of(two, countersigners=(1,)), on=two)
    error = refused(record_of(countersigners=(1,)))
    assert error.reason is Reason.NOT_COUNTERSIGNED
    assert "1 other holders countersigned the key of epoch 1, expected 2" in error.message
    verify(record_of(countersigners=()), complete=False)


def test_a_generator_cannot_make_do_with_fewer_holders_than_the_roster_asks_for():
    assert refused(record_of(FOUR[:2], countersigners=(1,)), on=FOUR).reason is Reason.TOO_FEW
    assert refused(record_of(FOUR[:1], countersigners=())).reason is Reason.TOO_FEW


def test_everybody_who_holds_the_secret_must_be_on_the_roster():
    error = refused(record_of(FOUR), on=FOUR[:3])
    assert error.reason is Reason.NOT_LISTED
    assert FOUR[3].participant_id.hex()[:16] in error.message


def test_a_key_of_which_a_holder_is_revoked_is_refused_and_one_without_it_holds():
    gone = FOUR[2].participant_id
    error = refused(record_of(), revoked={gone})
    assert error.reason is Reason.REVOKED
    assert gone.hex()[:16] in error.message
    verify(record_of(FOUR[:2], countersigners=(1,)), revoked={gone})


def test_a_roster_of_somebody_else_makes_no_key_good():
    assert refused(record_of(), key=bytes(32)).reason is Reason.BAD_SIGNATURE


def test_a_forged_countersignature_is_refused():
    record = record_of()
    first, second = record.countersignatures
    # Another holder's signature under this one's name.
    forged = replace(
        record, countersignatures=(first, Countersignature(second.signing_public, first.signature))
    )
    assert refused(forged).reason is Reason.BAD_COUNTERSIGNATURE
    # That of somebody who is no holder.
    outsider = Countersignature(
        FOUR[3].signing_public, FOUR[3].sign("paillier-countersignature", *record.countersigned_fields())
    )
    assert refused(record.with_countersignature(outsider)).reason is Reason.NOT_LISTED
    # The generator counts once.
    generator = Countersignature(
        FOUR[0].signing_public, FOUR[0].sign("paillier-countersignature", *record.countersigned_fields())
    )
    assert refused(record.with_countersignature(generator)).reason is Reason.NOT_LISTED
    # So does everybody else.
    assert refused(replace(record, countersignatures=(first, first))).reason is Reason.MALFORMED


@pytest.mark.parametrize(
    "change",
    [{"epoch": 2}, {"signature": bytes(64)}, {"generator_public": FOUR[1].signing_public}],
)
def test_nothing_that_the_generator_signed_can_be_changed(change):
    assert refused(replace(record_of(), **change)).reason is Reason.BAD_SIGNATURE


def test_neither_the_key_nor_the_holders_can_be_exchanged():
    record = record_of(FOUR)
    fields = KeyFields.of(key("other").public)._replace(run=RUN)
    assert refused(replace(record, key=fields), on=FOUR).reason is Reason.BAD_SIGNATURE
    fewer = replace(record, holders=record.holders[:3], countersignatures=record.countersignatures[:1])
    assert refused(fewer, on=FOUR).reason is Reason.BAD_SIGNATURE


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epoch": 0}, "epoch 0"),
        ({"holders": ids(FOUR[2::-1])}, "not ascending"),
        ({"holders": (*ids(FOUR[:3]), FOUR[2].participant_id)}, "not ascending, or come twice"),
        ({"holders": ids(FOUR[1:])}, "generator who is not one"),
        ({"holders": ()}, "0 holders"),
        ({"signature": b""}, "signature of 0 bytes"),
        ({"generator_public": b""}, "generator"),
    ],
)
def test_a_record_of_another_form_is_refused(change, said):
    error = refused(replace(record_of(), **change))
    assert (error.reason, said in error.message) == (Reason.MALFORMED, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bits": 1040}, "1024 bits, and 1040 are declared"),
        ({"bits": 1008}, "and 1008 are declared"),
        ({"bits": 1001}, "multiple of 16"),
        ({"modulus": b""}, "0 bits"),
        ({"modulus": bytes(1) + bytes([255]) * 127}, "1016 bits"),
        ({"set_public": bytes(31)}, "31 bytes"),
        ({"base": bytes(5)}, "base of 5 bytes"),
    ],
)
def test_a_key_of_another_length_than_it_declares_is_refused(change, said):
    fields = record_of().key._replace(**change)
    error = refused(replace(record_of(), key=fields))
    assert (error.reason, said in error.message) == (Reason.MALFORMED, True)


def test_a_key_that_is_not_what_the_run_asks_for_is_refused():
    assert "expected a key of 3072" in refused(record_of(), terms=KeyTerms()).message
    assert "expected a subgroup key" in refused(record_of(), terms=TERMS._replace(subgroup=True)).message
    with pytest.raises(CryptoError, match="1024 bits, expected a multiple of 16 from 2048"):
        verify(record_of(), terms=KeyTerms(bits=1024))


def test_a_key_of_another_run_is_refused():
    assert refused(record_of(run="b-run")).reason is Reason.WRONG_RUN


def test_an_epoch_never_goes_back_and_has_one_key():
    for new in ((2, b"other"), (1, b"key")):
        check_epoch(*new, 1, b"key")
    for new in ((1, b"other"), (0, b"key")):
        with pytest.raises(VerificationError) as failed:
            check_epoch(*new, 1, b"key")
        assert failed.value.reason is Reason.OLD_EPOCH


def test_the_id_of_a_record_is_that_of_its_key():
    for secret in (key(), key(subgroup=True)):
        assert KeyFields.of(secret.public).key_id == secret.public.key_id


def test_the_order_in_which_holders_countersign_leaves_no_trace():
    assert record_of(FOUR, countersigners=(3, 1, 2)) == record_of(FOUR, countersigners=(1, 2, 3))
    assert record_of().without_countersignatures() == record_of(countersigners=())
