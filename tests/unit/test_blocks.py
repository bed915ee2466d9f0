from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.systems.drift.blocks import Block, BlockBuilder

INTERACTIONS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.booleans()), max_size=80)


def fed(interactions: list[tuple[int, int, bool]]) -> tuple[BlockBuilder, list[Block]]:
    builder = BlockBuilder()
    blocks = [block for each in interactions if (block := builder.add(*each)) is not None]
    return builder, blocks


def as_printed(
    items: list[tuple[int, bool]],
) -> tuple[list[tuple[list[int], list[int]]], tuple[list[int], list[int]]]:
    """Alg. 2 for one user, read on the whole history: a block ends where a negative follows a positive."""
    ends = [at for at in range(1, len(items)) if items[at - 1][1] and not items[at][1]]
    parts = []
    for first, last in zip([0, *ends], [*ends, len(items)], strict=True):
        run = items[first:last]
        parts.append(([i for i, liked in run if not liked], [i for i, liked in run if liked]))
    return parts[:-1], parts[-1]


def test_a_negative_after_a_positive_completes_the_block_and_opens_the_next() -> None:
    builder, blocks = fed([(7, 1, False), (7, 2, False), (7, 3, True), (7, 4, True)])
    assert blocks == []
    assert builder.add(7, 5, False) == Block(7, negatives=(1, 2), positives=(3, 4))
    assert builder.add(7, 6, True) is None
    assert builder.add(7, 8, False) == Block(7, negatives=(5,), positives=(6,))


def test_a_block_without_negatives_is_dropped_and_counted() -> None:
    builder, blocks = fed([(0, 1, True), (0, 2, False), (0, 3, True), (0, 4, False)])
    assert blocks == [Block(0, (2,), (3,))]
    assert builder.dropped == 1


def test_users_do_not_share_a_block() -> None:
    _, blocks = fed([(0, 1, False), (1, 2, True), (0, 3, True), (1, 4, False), (0, 5, False)])
    assert blocks == [Block(0, (1,), (3,))]


def test_an_item_that_comes_twice_is_kept_twice() -> None:
    _, blocks = fed([(0, 1, False), (0, 1, False), (0, 2, True), (0, 2, True), (0, 1, False)])
    assert blocks == [Block(0, (1, 1), (2, 2))]


def test_flush_closes_trailing_blocks_with_both_parts_in_order_of_first_appearance() -> None:
    builder, _ = fed([(5, 0, False), (2, 1, False), (9, 2, True), (4, 3, False), (2, 4, True), (5, 5, True)])
    assert builder.flush() == [Block(5, (0,), (5,)), Block(2, (1,), (4,))]
    assert builder.flush() == []


def test_flush_leaves_a_block_with_one_part_open() -> None:
    builder, _ = fed([(0, 1, False)])
    assert builder.flush() == []
    builder.add(0, 2, True)
    assert builder.flush() == [Block(0, (1,), (2,))]


def test_arrays_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one shape"):
        BlockBuilder().extend(0, np.arange(3), np.ones(2, bool))


def test_extend_gives_plain_integers() -> None:
    [block] = BlockBuilder().extend(0, np.array([1, 2, 3], np.uint32), np.array([False, True, False]))
    assert [type(item) for item in block.negatives + block.positives] == [int, int]


@given(INTERACTIONS)
def test_blocks_are_those_of_the_whole_history_read_at_once(
    interactions: list[tuple[int, int, bool]],
) -> None:
    builder, blocks = fed(interactions)
    trailing = builder.flush()
    dropped = 0
    users = list(dict.fromkeys(user for user, _, _ in interactions))
    expected_trailing = []
    for user in users:
        complete, (negatives, positives) = as_printed([(i, p) for u, i, p in interactions if u == user])
        kept = [Block(user, tuple(eta), tuple(pi)) for eta, pi in complete if eta]
        dropped += len(complete) - len(kept)
        assert [block for block in blocks if block.user == user] == kept
        if negatives and positives:
            expected_trailing.append(Block(user, tuple(negatives), tuple(positives)))
    assert trailing == expected_trailing
    assert builder.dropped == dropped


@given(INTERACTIONS, st.data())
def test_extend_does_what_add_does_however_the_sequence_is_cut(
    interactions: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    one_by_one, blocks = fed(interactions)
    batched, found = BlockBuilder(), []
    at = 0
    while at < len(interactions):
        user = interactions[at][0]
        same = next(
            (k for k in range(at, len(interactions)) if interactions[k][0] != user), len(interactions)
        )
        end = data.draw(st.integers(at + 1, same))
        found += batched.extend(
            user,
            np.array([item for _, item, _ in interactions[at:end]], np.int32),
            np.array([liked for _, _, liked in interactions[at:end]], bool),
        )
        at = end
    assert found == blocks
    assert batched.dropped == one_by_one.dropped
    assert batched.flush() == one_by_one.flush()


@given(INTERACTIONS)
def test_no_interaction_is_lost_or_invented(interactions: list[tuple[int, int, bool]]) -> None:
    builder, blocks = fed(
        [(user, 10 * at + item, liked) for at, (user, item, liked) in enumerate(interactions)]
    )
    blocks += builder.flush()
    liked_items = {10 * at + item for at, (_, item, liked) in enumerate(interactions) if liked}
    seen = [item for block in blocks for item in block.negatives + block.positives]
    assert len(seen) == len(set(seen))
    assert {item for block in blocks for item in block.positives} <= liked_items
    assert not {item for block in blocks for item in block.negatives} & liked_items
