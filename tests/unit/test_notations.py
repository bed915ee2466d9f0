"""Notations of lists of item numbers: what is written is read back, and what is no list is not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.privacy.canaries import CanaryKit
from coterie.privacy.notations import bitmaps, lists_in, lists_in_text, numbers_in, of_run, runs, varints

ITEMS = 240
OWN = [3, 17, 58, 99, 120, 131, 140, 177, 200, 214, 222, 239]


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<u4", ">u4", "<i8", ">i8"])
@given(numbers=st.lists(st.integers(0, ITEMS - 1), min_size=2, max_size=40, unique=True))
@settings(max_examples=30)
def test_arrays_of_any_order_and_width_are_read_back(dtype, numbers):
    assert numbers in list(lists_in(np.array(numbers, dtype).tobytes(), ITEMS))


@given(numbers=st.lists(st.integers(0, 5000), min_size=2, max_size=40, unique=True))
@settings(max_examples=50)
def test_varints_are_read_back(numbers):
    written = b"".join(
        bytes([number]) if number < 128 else bytes([number & 127 | 128, number >> 7]) for number in numbers
    )
    assert numbers in list(lists_in(written, 5001))


@pytest.mark.parametrize("order", ["little", "big"])
def test_bitmaps_and_arrays_with_an_entry_for_each_item_are_read_back(order):
    mask = np.zeros(ITEMS, np.uint8)
    mask[OWN] = 1
    assert OWN in list(lists_in(np.packbits(mask, bitorder=order).tobytes(), ITEMS))
    for dtype in ("u1", "<u4", "<f4", "<f8"):
        assert OWN in list(lists_in(mask.astype(dtype).tobytes(), ITEMS))


def test_fields_that_cannot_be_lists_of_items_yield_none():
    assert list(lists_in(b"", ITEMS)) == list(lists_in(b"\x07", ITEMS)) == []
    # Numbers that repeat, or are beyond the catalogue.
    assert list(lists_in(np.array([5, 5, 9], "<u4").tobytes(), ITEMS)) == []
    assert list(lists_in(np.array([5, 70_000, 9], "<u4").tobytes(), ITEMS)) == []
    assert list(lists_in(b"\xff" * 32, 200)) == []


def test_numbers_in_a_text_are_whole_numbers_of_their_own():
    assert numbers_in(b'x{item="17"} 3.0 0.5 1e3 v93 12345678901 {"n": 40}') == [17, 3, 1, 3, 93, 40]


def test_lists_in_a_text_are_separated_by_punctuation_or_share_a_line():
    assert [17, 93, 4] in list(lists_in_text(b"items: [17, 93, 4] of host"))
    assert [17, 93, 4] in list(lists_in_text(b"user 17-93-4 came"))
    assert [17, 93, 4] in list(lists_in_text(b"item 17 and item 93 and item 4"))
    assert list(lists_in_text(b"17\n93\n4")) == []


def test_the_patterns_of_a_list_are_eight_bytes_or_more():
    patterns = [*varints(OWN), *bitmaps(OWN, ITEMS)]
    for run in runs(OWN):
        patterns += of_run(run)
    assert min(map(len, patterns)) >= 8
    assert len(patterns) > 100


def test_bitmaps_of_few_items_are_left_out_because_they_occur_by_chance():
    assert list(bitmaps([1, 2, 3], 30)) == []
    assert len(list(bitmaps(OWN, ITEMS))) == 3


@pytest.mark.parametrize(
    "leak",
    [
        np.array(OWN[2:6], "<u2").tobytes(),
        np.array(OWN[2:6], ">u2").tobytes(),
        np.array(OWN[2:6], ">u4").tobytes(),
        np.array(OWN[2:6], ">i8").tobytes(),
        b"58, 99, 120, 131",
        b"58-99-120-131",
        np.packbits(np.isin(np.arange(ITEMS), OWN), bitorder="little").tobytes(),
        np.isin(np.arange(ITEMS), OWN).tobytes(),
        np.array(OWN[2:6], "<u2").tobytes().hex().encode(),
    ],
)
def test_a_planted_list_is_found_in_other_bytes_in_every_notation(leak):
    kit = CanaryKit(0)
    kit.item_lists(OWN, ["client/host-0"], n_items=ITEMS)
    noise = np.random.default_rng(1).bytes(4000)
    assert kit.search(noise + leak + noise) == {"history"}
    assert kit.search(noise + noise) == set()


def test_a_clean_search_of_random_and_of_counted_bytes_finds_nothing():
    kit = CanaryKit(0)
    rng = np.random.default_rng(2)
    for _ in range(20):
        kit.item_lists(rng.choice(ITEMS, 12, replace=False), ["client/host-0"], n_items=ITEMS)
    assert kit.search(rng.bytes(8 << 20)) == set()
    for dtype in ("<u2", "<u4", "<i8"):
        assert kit.search(np.arange(ITEMS, dtype=dtype).tobytes()) == set()
    text = b"\n".join(str(number).encode() for number in range(ITEMS))
    assert kit.search(text) == set()
