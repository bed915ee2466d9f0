"""Sequences that share their beginning: a longer one costs what it adds, and no shorter one ever changes."""

from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coterie.rounds.population import Ids
from coterie.rounds.prefix import Prefix


@given(st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(0, 9), max_size=4)), max_size=8))
def test_every_sequence_stays_as_it_was_whatever_is_made_from_it(
    changes: list[tuple[int, list[int]]],
) -> None:
    made: list[tuple[Prefix[int], Ids, list[int]]] = [(Prefix(array("I")), Ids(b"", 0), [])]
    for which, more in changes:
        numbers, ids, values = made[which % len(made)]
        packed = b"".join(bytes([one]) * 32 for one in more)
        made.append((numbers.extended(more), ids.extended(packed), [*values, *more]))
        made.append((numbers.first(which), ids.first(which), values[:which]))
    for numbers, ids, values in made:
        named = [bytes([one]) * 32 for one in values]
        assert (list(numbers), list(ids)) == (values, named)
        assert (numbers, ids, ids.packed) == (values, named, b"".join(named))
        assert (numbers[1:], numbers[::-1], ids[1:]) == (values[1:], values[::-1], named[1:])
        assert (numbers[-1:], ids[-1:]) == (values[-1:], named[-1:])
        assert np.asarray(numbers).tolist() == values


def test_a_longer_sequence_shares_the_items_of_the_shorter_one() -> None:
    first = Prefix(["a", "b"])
    longer = first.extended(["c"])
    assert longer._kept is first._kept
    ids = Ids(bytes(32)).extended(bytes(32))
    assert ids.extended(bytes(32))._packed is ids._packed
