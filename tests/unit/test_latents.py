"""Pseudo meta-latents: weights, combinations under encryption, codes, conditions; against arithmetic in clear."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.crypto.clocks import CLOCK_SKEW_S
from coterie.crypto.latent_codes import (
    Moments,
    condition_number,
    encode_latent,
    latents_of_sums,
    rescaled,
)
from coterie.crypto.latent_terms import FRACTION_BITS, LatentRecord, LatentTerms, sign_latent_record
from coterie.crypto.latent_weights import (
    LatentCombination,
    draw_combinations,
    seeded,
    weight_matrix,
    weight_range,
)
from coterie.crypto.paillier import Packing, decrypt_vector, encrypt
from coterie.crypto.paillier.combination import combine
from coterie.crypto.paillier.obfuscators import Mode
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CryptoError

from ..custody import people
from ..latents import CLOSES, EXPIRY, TERMS, key_record, signed_set
from ..paillier_keys import BITS, key, obfuscators

PACKING = TERMS.packing(BITS)


def encrypted(latent, terms=TERMS, mode=Mode.PUBLIC, **which):
    packing = terms.packing(BITS)
    codes = encode_latent(np.asarray(latent, np.float64), terms)
    return encrypt(codes, packing, obfuscators(mode, **which))


def cloud(key_users=200, dimension=TERMS.dimension, seed=0):
    return np.random.default_rng(seed).normal(0.1, 0.3, (key_users, dimension))


# --- weights


@pytest.mark.parametrize("members", [3, 5, 10])
def test_weights_are_between_half_and_one_and_a_half_times_the_mean_and_sum_to_the_total(members):
    least, most = weight_range(members)
    for one in draw_combinations(60, members, 50):
        assert len(set(one.members)) == len(one.weights) == members
        assert sum(one.weights) == 1 << FRACTION_BITS
        assert least <= min(one.weights)
        assert max(one.weights) <= most


def test_an_experiment_draws_the_same_again_for_each_epoch_and_nothing_else_does():
    once, again, other = (draw_combinations(60, 5, 20, seeded(7, epoch)) for epoch in (1, 1, 2))
    assert once == again != other
    assert draw_combinations(60, 5, 20, seeded(8, 1)) != once
    assert draw_combinations(60, 5, 20) != draw_combinations(60, 5, 20)


def test_of_five_members_each_has_from_a_tenth_to_three_tenths():
    least, most = weight_range(5)
    assert least / 2**16 == pytest.approx(0.1, abs=1e-4)
    assert most / 2**16 == pytest.approx(0.3, abs=1e-4)


def test_the_weight_matrix_has_full_row_rank_and_as_many_combinations_as_key_users_are_possible():
    # Of 300 key users in as many combinations of 2, about 40 are in none that is drawn at first.
    for key_users, members, count in ((200, 5, 64), (30, 5, 30), (300, 2, 300), (3, 3, 3)):
        drawn = draw_combinations(key_users, members, count)
        assert np.linalg.matrix_rank(weight_matrix(drawn, key_users)) == count


def test_combinations_that_depend_on_each_other_are_drawn_again(monkeypatch):
    from coterie.crypto import latent_weights

    drawn = iter([LatentCombination((0, 1, 2), (21845, 21845, 21846))] * 2)
    honest = latent_weights._combination

    def first_twice_the_same(source, key_users, members):
        return next(drawn, None) or honest(source, key_users, members)

    monkeypatch.setattr(latent_weights, "_combination", first_twice_the_same)
    found = draw_combinations(40, 3, 2)
    assert found[0] != found[1]
    assert np.linalg.matrix_rank(weight_matrix(found, 40)) == 2


def test_key_users_are_in_combinations_about_equally_often():
    counts = np.zeros(50)
    for _ in range(20):
        for one in draw_combinations(50, 5, 50):
            counts[list(one.members)] += 1
    # 5,000 places for 50 users; five standard deviations.
    assert (abs(counts - 100) < 50).all()


@pytest.mark.parametrize(("key_users", "members", "count"), [(4, 5, 1), (20, 1, 5), (20, 5, 21), (20, 5, 0)])
def test_more_combinations_or_members_than_key_users_are_refused(key_users, members, count):
    with pytest.raises(CryptoError, match="expected at least 2 members, and as many key users"):
        draw_combinations(key_users, members, count)


# --- combination under encryption


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 45), st.sampled_from([3, 5, 10]))
def test_a_combination_decrypts_to_the_same_integers_as_arithmetic_in_clear(seed, dimension, members):
    terms = TERMS._replace(dimension=dimension)
    rows = np.random.default_rng(seed).normal(0, 2, (members, dimension))
    (one,) = draw_combinations(members, members, 1)
    vectors = [encrypted(rows[at], terms) for at in one.members]
    found = decrypt_vector(combine(vectors, one.weights, obfuscators(Mode.PUBLIC)), key())
    codes = np.array([encode_latent(rows[at], terms) for at in one.members], np.int64)
    assert found.tolist() == (np.array(one.weights) @ codes).tolist()
    means = weight_matrix([one], members)[0] @ np.clip(rows, -4, 4)
    assert latents_of_sums(found, terms) == pytest.approx(means, abs=4 / 2**22)


def test_largest_and_least_codes_do_not_run_into_the_next_slot():
    rows = np.array([[100, -100, 100, 0], [100, -100, -100, 0], [100, -100, 100, 0]])
    vectors = [encrypted(row, TERMS._replace(dimension=4)) for row in rows]
    found = decrypt_vector(combine(vectors, (20000, 20000, 25536), obfuscators(Mode.PUBLIC)), key())
    values = latents_of_sums(found, TERMS)
    assert values == pytest.approx([4, -4, 4 * (45536 - 20000) / 65536, 0], abs=1e-6)


def test_a_combination_is_obfuscated_anew_each_time():
    vectors = [encrypted(row) for row in cloud(3)]
    first, second = (combine(vectors, (20000, 20000, 25536), obfuscators(Mode.PUBLIC)) for _ in range(2))
    assert first.residues != second.residues
    assert decrypt_vector(first, key()).tolist() == decrypt_vector(second, key()).tolist()


def test_modes_of_a_combination_are_those_of_a_sum():
    rows = cloud(3)
    of = [encrypted(row, mode=Mode.SUBGROUP, subgroup=True) for row in rows]
    both = (Mode.SUBGROUP, obfuscators(Mode.SUBGROUP)), (Mode.PUBLIC, obfuscators(Mode.PUBLIC, subgroup=True))
    for mode, source in both:
        found = combine(of, (20000, 20000, 25536), source)
        assert found.mode is mode
        assert (
            decrypt_vector(found, key(subgroup=True)).tolist()
            == (
                np.array([20000, 20000, 25536])
                @ np.array([encode_latent(row, TERMS) for row in rows], np.int64)
            ).tolist()
        )


def test_what_does_not_belong_together_is_not_combined():
    one, source = encrypted(cloud(1)[0]), obfuscators(Mode.PUBLIC)
    with pytest.raises(CryptoError, match="1 weights for 2 vectors"):
        combine([one, one], (1,), source)
    with pytest.raises(CryptoError, match="none negative"):
        combine([one, one], (3, -1), source)
    with pytest.raises(CryptoError, match="room for 1 to 65536"):
        combine([one, one], (1 << 16, 1), source)
    with pytest.raises(VerificationError) as failed:
        combine([one, encrypted(cloud(1)[0], name="two")], (1, 1), source)
    assert failed.value.reason is Reason.WRONG_KEY
    short = encrypted(cloud(1)[0][:4], TERMS._replace(dimension=4))
    with pytest.raises(VerificationError) as failed:
        combine([one, short], (1, 1), source)
    assert failed.value.reason is Reason.MALFORMED


# --- codes and conditions


def test_slots_are_forty_bits():
    assert LatentTerms(20, 64, 64, 100, 4000).packing(3072) == Packing(3072, 24, 1 << 16)
    assert TERMS.packing(3072).slot_bits == 40


def test_codes_are_rounded_clipped_and_centred():
    terms = TERMS._replace(dimension=5, bits=8, bound=1000)
    assert encode_latent(np.array([0, 1, -1, 7, 1 / 254]), terms).tolist() == [128, 255, 1, 255, 128]


@pytest.mark.parametrize("values", [[1.0] * 3, [float("nan")] * TERMS.dimension])
def test_a_latent_vector_of_another_length_or_not_finite_is_refused(values):
    with pytest.raises(CryptoError, match="a latent vector"):
        encode_latent(np.array(values), TERMS)


def published(latents, count, members=5):
    """Return pseudo meta-latents computed in clear, and their weights."""
    weights = weight_matrix(draw_combinations(len(latents), members, count), len(latents))
    return weights @ latents, weights


@pytest.mark.parametrize("count", [10, 64])
def test_conditions_of_published_latents_hold(count):
    # Weights come from the operating system: one set of combinations in 16 has a cosine above .9, so that it is
    # the median of 15 sets which is asked for.
    latents = cloud(dimension=20)
    centre = latents.mean(axis=0)
    moments = Moments.of_sums(latents.sum(axis=0), (latents**2).sum(axis=0), len(latents))
    shrinkages, conditions, largest = [], [], []
    for _ in range(15):
        found, _weights = published(latents, count)
        assert np.linalg.matrix_rank(found) == min(count, 20)
        wide = rescaled(found, moments)
        assert wide.mean(axis=0) == pytest.approx(centre)
        assert wide.std(axis=0) == pytest.approx(latents.std(axis=0))
        shrinkages.append(found.std(axis=0).mean() / latents.std(axis=0).mean())
        conditions.append(condition_number(wide))
        # No pseudo meta-latent points where a key user does.
        own, made = latents - centre, wide - wide.mean(axis=0)
        cosines = (made @ own.T) / np.outer(np.linalg.norm(made, axis=1), np.linalg.norm(own, axis=1))
        largest.append(cosines.max())
    assert np.median(shrinkages) == pytest.approx(0.45, abs=0.05)
    assert np.median(largest) < 0.9
    if count > 20:
        assert np.median(conditions) < 10


def test_condition_numbers_of_clouds_that_are_known():
    corners = np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]], float)
    assert condition_number(corners * [3, 1]) == pytest.approx(1)
    assert condition_number(np.array([[1, 1], [-1, -1], [1, 1.0]])) > 1e6
    assert condition_number(np.ones((3, 2))) == float("inf")


def test_a_coordinate_without_spread_stays_at_the_mean_of_key_users():
    moments = Moments(np.array([0.5, 1.0]), np.array([4.0, 9.0]))
    assert rescaled(np.array([[1.0, 2.0], [1.0, 4.0]]), moments).tolist() == [[0.5, -2.0], [0.5, 4.0]]


def test_moments_without_users_are_refused():
    with pytest.raises(CryptoError, match="moments of 0 key users"):
        Moments.of_sums(np.zeros(2), np.zeros(2), 0)


# --- records


def test_a_record_that_a_holder_signed_is_accepted():
    record, keys, _ = signed_set()
    record.verify(keys, CLOSES)


@pytest.mark.parametrize(
    "change",
    [
        {"run": "another"},
        {"epoch": 2},
        {"key_id": bytes(32)},
        {"terms": TERMS._replace(bound=5000)},
        {"closes": CLOSES + 1},
        {"expiry": EXPIRY + 1},
        {"signature": bytes(64)},
    ],
)
def test_a_record_that_was_changed_is_refused(change):
    record, keys, _ = signed_set()
    with pytest.raises(VerificationError) as failed:
        replace(record, **change).verify(keys, CLOSES)
    assert failed.value.reason is Reason.BAD_SIGNATURE


def test_a_record_for_another_run_or_key_of_a_stranger_or_expired_is_refused():
    record, keys, holders = signed_set()
    stranger = next(one for one in people(4, "stranger") if one not in holders)
    cases = (
        (record, key_record("another-run"), CLOSES, Reason.WRONG_RUN),
        (record, key_record(epoch=2), CLOSES, Reason.WRONG_KEY),
        (sign_latent_record(stranger, keys, TERMS, CLOSES, EXPIRY), keys, CLOSES, Reason.NOT_LISTED),
        (record, keys, EXPIRY + CLOCK_SKEW_S, Reason.EXPIRED),
    )
    for one, about, now, reason in cases:
        with pytest.raises(VerificationError) as failed:
            one.verify(about, now)
        assert failed.value.reason is reason


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dimension": 0}, "dimension is 0, expected 1 to 4096"),
        ({"members": 2}, "members is 2, expected 3 to 100"),
        ({"combinations": 4097, "least": 4097, "most": 5000}, "combinations is 4097"),
        ({"combinations": 25}, "least is 24, expected 25 to 40"),
        ({"least": 19, "combinations": 5}, "least is 19, expected 20"),
        ({"least": 41}, "least is 41, expected 24 to 40"),
        ({"bits": 32}, "bits is 32, expected 8 to 31"),
        ({"bound": 0}, "bound is 0"),
        (
            {"dimension": 4096, "combinations": 300, "least": 300, "most": 300},
            "300 pseudo meta-latents of 4096 values",
        ),
    ],
)
def test_terms_out_of_range_are_refused_with_what_is_expected(change, named):
    with pytest.raises(VerificationError, match=named):
        TERMS._replace(**change).check()


def test_a_set_that_expires_before_it_closes_is_refused():
    _, keys, holders = signed_set()
    with pytest.raises(VerificationError, match="expected Unix seconds in this order"):
        sign_latent_record(holders[0], keys, TERMS, EXPIRY, CLOSES)


def test_a_record_with_a_key_of_another_length_is_refused():
    record, _, _ = signed_set()
    with pytest.raises(VerificationError, match="has another length"):
        LatentRecord(
            *(getattr(record, name) for name in record.__dataclass_fields__ if name != "signature"), b""
        ).check()
