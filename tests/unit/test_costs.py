"""The page on costs says how long contributions are: its formulas beside messages of runs, and its examples."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from coterie.config.run import RunSettings
from coterie.crypto.paillier.packing import Packing
from coterie.secure_sum.graph import graph_fields
from coterie.secure_sum.protocol import Step
from coterie.systems.registry import systems

from .test_message_lengths import Lengths, lengths, settings_of

__all__ = ["lengths"]

PAGE = (Path(__file__).parents[2] / "docs" / "costs.md").read_text(encoding="utf-8")
CELLS = [
    [cell.strip() for cell in line[1:-1].split("|")] for line in PAGE.splitlines() if line.startswith("|")
]
VALUES = {
    name.strip("`"): formula
    for name, formula in (row for row in CELLS if len(row) == 2)
    if re.fullmatch(r"[\dna ()+/]+", formula)
}
HEADERS = 200
"""Bytes that the page leaves out of each contribution."""

Measure = Callable[[RunSettings], tuple[Lengths, Any]]


def values(system: str, items: int, attributes: int = 0) -> int:
    """Return the values of a contribution by the page's formula."""
    formula = re.sub(r"(?<=[\dn]) (?=[na(])", " * ", VALUES[system])
    allowed = {"n": items, "a": attributes}
    return int(eval(formula, {"__builtins__": {}}, allowed))


def slots(bits: int, users: int) -> int:
    """Return the values in a ciphertext by the page's formula."""
    guard = (users - 1).bit_length()
    return (bits - 100 - guard) // (16 + guard)


def steps(found: Lengths) -> dict[Step, int]:
    """Return the bytes of a member in each step of a round of training; the first member's are a few fewer."""
    return {step: sent[-1][1] for (purpose, step), sent in found.items() if purpose == "train"}


@pytest.mark.parametrize("system", sorted(VALUES))
def test_a_contribution_in_clear_has_four_bytes_for_each_value(lengths: Measure, system: str) -> None:
    settings = settings_of(system, "clear")
    found, feed = lengths(settings)
    items = len(feed.dataset.items)
    attributes = 10 if system == "fedmvmf" else 0
    sent = steps(found)[Step.SUBMIT]
    assert 0 <= sent - 4 * values(system, items, attributes) < HEADERS


def test_masks_add_what_the_page_says(lengths: Measure) -> None:
    found, feed = lengths(settings_of("fcf", "masked"))
    neighbours = graph_fields(20).degree
    expected = 4 * values("fcf", len(feed.dataset.items)) + 500 + 128 * neighbours
    assert sum(steps(found).values()) == pytest.approx(expected, abs=HEADERS)


def test_ciphertexts_have_as_many_values_as_the_page_says(lengths: Measure) -> None:
    settings = settings_of("fcf", "encrypted")
    found, feed = lengths(settings)
    bits = settings.encryption.bits
    ciphertexts = ceil(values("fcf", len(feed.dataset.items)) / slots(bits, 20))
    assert 0 <= steps(found)[Step.SUBMIT] - ciphertexts * bits // 4 < HEADERS
    for key_bits in (2048, 3072, 4096):
        for users in (2, 50, 943, 6040):
            assert slots(key_bits, users) == Packing(key_bits, 16, users).slots


def test_the_examples_follow_from_the_formulas() -> None:
    (neighbours,) = map(int, re.findall(r"`masked`, k = (\d+) \|", PAGE))
    assert neighbours == graph_fields(943).degree
    rows = [row for row in CELLS if len(row) == 4 and row[1].endswith("kB")]
    assert len(rows) == 5
    for name, *shown in rows:
        count = values(name.strip("`"), 1682)
        whole = 4 * count, 4 * count + 500 + 128 * neighbours, ceil(count / slots(3072, 943)) * 768
        assert shown == [f"{one / 1000:,.0f} kB" for one in whole], name


def test_every_system_in_rounds_has_a_formula() -> None:
    assert set(VALUES) == {name for name, system in systems().items() if system.in_rounds}
