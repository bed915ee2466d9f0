"""Packing: slots that never run into each other, against integers put together by hand."""

import numpy as np
import pytest
from gmpy2 import mpz
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.crypto.paillier.packing import Packing
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CryptoError


@st.composite
def packings(draw):
    """Any packing with room for a slot."""
    return Packing(
        draw(st.sampled_from([256, 512, 1024, 3072])), draw(st.integers(2, 31)), draw(st.integers(1, 1 << 20))
    )


@st.composite
def packed(draw, most_addends=1):
    """A packing and codes of so many addends, often at their bounds."""
    packing = draw(packings())
    addends = draw(st.integers(1, min(most_addends, packing.addends)))
    most = addends * (2**packing.code_bits - 1)
    count = draw(st.integers(0, 3 * packing.slots + 1))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    codes = rng.integers(0, most, count, np.uint64, endpoint=True)
    codes[rng.random(count) < draw(st.sampled_from([0, 0.5, 1]))] = draw(st.sampled_from([0, 1, most]))
    return packing, codes, addends


def by_hand(packing: Packing, codes) -> list[int]:
    """Return plaintexts as the book has them, slot by slot."""
    w, slots = packing.slot_bits, packing.slots
    return [
        sum(int(code) << (w * place) for place, code in enumerate(codes[start : start + slots]))
        for start in range(0, len(codes), slots)
    ]


@pytest.mark.parametrize(
    ("code_bits", "addends", "slot_bits", "slots"),
    [(16, 32, 21, 141), (24, 256, 32, 92), (24, 16384, 38, 77), (16, 1, 16, 185), (16, 17, 21, 141)],
)
def test_slots_at_3072_bits(code_bits: int, addends: int, slot_bits: int, slots: int) -> None:
    packing = Packing(3072, code_bits, addends)
    assert (packing.slot_bits, packing.slots) == (slot_bits, slots)


def test_an_update_of_fedneumf_takes_318_ciphertexts() -> None:
    assert Packing(3072, 16, 32).ciphertexts(44_824) == 318


@given(packed(most_addends=50))
def test_what_is_packed_is_what_the_book_says_and_comes_back(case) -> None:
    packing, codes, addends = case
    plaintexts = packing.pack(codes, addends)
    assert plaintexts == by_hand(packing, codes)
    assert packing.fits(plaintexts)
    assert packing.unpack(plaintexts, len(codes), addends).tolist() == codes.tolist()


@given(packings(), st.data())
def test_the_largest_sum_fills_its_slots_and_no_other(packing: Packing, data) -> None:
    """As many addends as there is room for, each with the largest codes."""
    count = data.draw(st.integers(1, 2 * packing.slots))
    most = 2**packing.code_bits - 1
    plaintexts = packing.pack(np.full(count, most))
    total = [plaintext * packing.addends for plaintext in plaintexts]
    assert max(total) < 2 ** (packing.key_bits - 100 - packing.guard_bits)
    found = packing.unpack(total, count, packing.addends)
    assert set(found.tolist()) == {most * packing.addends}


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=30), st.integers(2, 7), st.integers(0, 2**32))
def test_sums_of_plaintexts_are_sums_of_codes(codes, addends: int, seed: int) -> None:
    packing, rng = Packing(256, 16, 7), np.random.default_rng(seed)
    vectors = [
        np.array(codes, np.uint32),
        *rng.integers(0, 2**16, (addends - 1, len(codes)), dtype=np.uint32),
    ]
    plaintexts = [packing.pack(vector) for vector in vectors]
    found = packing.unpack([sum(column) for column in zip(*plaintexts, strict=True)], len(codes), addends)
    assert found.tolist() == np.sum(vectors, axis=0, dtype=np.int64).tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_any_type_of_integers_is_packed_alike(dtype) -> None:
    packing, codes = Packing(256, 7, 4), np.array([0, 1, 127, 64], dtype)
    assert packing.pack(codes) == by_hand(packing, codes)


@pytest.mark.parametrize(
    "codes",
    [
        np.array([1, 2**16]),
        np.array([-1, 3]),
        np.array([2**63], np.uint64),
        np.array([0.5, 1.0]),
        np.array([True]),
        np.array([[1, 2]]),
        np.array(7),
    ],
)
def test_codes_that_would_leave_their_slot_are_refused(codes) -> None:
    with pytest.raises(CryptoError, match="code"):
        Packing(1024, 16, 32).pack(codes)


def test_several_users_codes_have_a_bound_of_their_own() -> None:
    packing = Packing(1024, 16, 32)
    most = 3 * (2**16 - 1)
    packing.pack(np.array([most]), addends=3)
    with pytest.raises(CryptoError, match="above 196605"):
        packing.pack(np.array([most + 1]), addends=3)


@pytest.mark.parametrize("addends", [0, -1, 33])
def test_more_addends_than_there_is_room_for_are_refused(addends: int) -> None:
    packing = Packing(1024, 16, 32)
    with pytest.raises(CryptoError, match=f"{addends} addends, this packing has room for 1 to 32"):
        packing.pack(np.array([1]), addends)
    with pytest.raises(CryptoError, match=f"{addends} addends"):
        packing.unpack([mpz(1)], 1, addends)


@pytest.mark.parametrize(
    "values", [(1024, 1, 1), (1024, 32, 1), (1024, 16, 0), (1024, 16, 2**32), (1024, 31, 2**26), (112, 16, 1)]
)
def test_packings_without_room_are_refused(values) -> None:
    with pytest.raises(CryptoError):
        Packing(*values)


def test_a_sum_that_none_of_the_vectors_can_give_is_refused() -> None:
    packing = Packing(1024, 16, 32)
    w, slots = packing.slot_bits, packing.slots
    (right,) = packing.pack(np.arange(5))
    packing.unpack([right], 5, 1)
    for wrong in (
        right + (1 << (w * 2 + 16)),  # a code of 17 bits, though it fits the slot
        right + (1 << (w * 5)),  # behind the last value
        right + (1 << (w * slots)),  # above the slots
        right + (1 << (packing.key_bits - 1)),
    ):
        with pytest.raises(VerificationError) as caught:
            packing.unpack([wrong], 5, 1)
        assert caught.value.reason is Reason.MALFORMED
    assert not packing.fits([right, right + (1 << (w * slots))])
    # Of two vectors the first may be a sum.
    packing.unpack([right + (1 << (w * 2 + 16))], 5, 2)


@pytest.mark.parametrize(("number", "count"), [(1, 200), (2, 5), (0, 1)])
def test_plaintexts_of_another_number_are_refused(number: int, count: int) -> None:
    with pytest.raises(CryptoError, match=f"{number} plaintexts for {count} values"):
        Packing(1024, 16, 32).unpack([mpz(0)] * number, count, 1)


@settings(max_examples=30)
@given(packed())
def test_part_of_the_plaintexts_gives_the_values_that_are_in_them(case) -> None:
    """So that several clients can decrypt a vector together."""
    packing, codes, _ = case
    plaintexts = packing.pack(codes)
    half = len(plaintexts) // 2
    border = min(half * packing.slots, len(codes))
    first = packing.unpack(plaintexts[:half], border, 1)
    second = packing.unpack(plaintexts[half:], len(codes) - border, 1)
    assert [*first, *second] == codes.tolist()
