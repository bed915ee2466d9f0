"""DRIFT's shielded form: its mathematics in one process."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from coterie.systems.drift.blocks import Block, BlockBuilder, Stream
from coterie.systems.drift.mathematics import Rows, gradients, initial, wanted
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.drift.shielded import HeldRows, initial_row, run_shielded, visit, visit_all

SETTINGS = DriftSettings(dim=4, rate=0.3, ridge=1e-2)


def rows_of(rng, count):
    return rng.normal(0, 0.5, (count, 4)).astype(np.float32)


contributions = st.lists(
    st.tuples(st.integers(0, 6), st.sets(st.integers(0, 9), min_size=1)), min_size=1, max_size=30
)


@given(contributions, st.integers(1, 5))
def test_what_is_released_and_what_is_held_is_all_that_was_added_and_rows_of_few_users_stay(given, k_min):
    held, total, users = HeldRows(10, 4), np.zeros((10, 4)), {}
    rng = np.random.default_rng(0)
    for user, items in given:
        index = np.array(sorted(items))
        gradient = rows_of(rng, len(index))
        held.add(user, index, gradient)
        total[index] += gradient
        for item in items:
            users.setdefault(item, set()).add(user)
    released = held.release(k_min)
    assert set(released.items.tolist()) == {item for item, who in users.items() if len(who) >= k_min}
    assert all(len(who) >= k_min for who in released.contributors)
    out = np.zeros((10, 4))
    out[released.items] = released.gradient
    assert_allclose(out + held.gradient, total, atol=1e-5)
    assert not held.gradient[released.items].any()
    assert len(held) == len(users) - len(released.items)


@given(contributions, st.integers(1, 5))
def test_what_is_put_back_is_held_as_if_it_had_never_left(given, k_min):
    held, same = HeldRows(10, 4), HeldRows(10, 4)
    rng = np.random.default_rng(1)
    for user, items in given:
        index = np.array(sorted(items))
        gradient = rows_of(rng, len(index))
        held.add(user, index, gradient)
        same.add(user, index, gradient)
    held.put_back(held.release(k_min))
    assert_array_equal(held.gradient, same.gradient)
    assert held.contributors == same.contributors


def test_one_user_who_comes_often_is_one_user():
    held = HeldRows(3, 4)
    for _ in range(10):
        held.add(7, np.array([1]), np.ones((1, 4), np.float32))
    assert not len(held.release(2).items)
    held.add(8, np.array([1]), np.ones((1, 4), np.float32))
    assert_array_equal(held.release(2).gradient, np.full((1, 4), 11, np.float32))


def test_rows_for_items_that_come_later_begin_at_zero():
    held = HeldRows(1, 4)
    held.add(0, np.array([0]), np.ones((1, 4), np.float32))
    held.grow(3)
    held.add(0, np.array([2]), np.ones((1, 4), np.float32))
    assert_array_equal(held.gradient, np.array([[1] * 4, [0] * 4, [1] * 4], np.float32))


def test_a_visit_moves_the_row_from_block_to_block_and_leaves_the_items_alone():
    rng = np.random.default_rng(2)
    Psi, row = rows_of(rng, 6), rows_of(rng, 1)[0]
    blocks = [Block(3, (0, 1), (2,)), Block(3, (2,), (4, 5))]
    before = Psi.copy()
    made = visit(blocks, row, Psi, SETTINGS)
    moving, expected, loss = row.copy(), np.zeros((6, 4), np.float32), 0.0
    for block in blocks:
        users, items = wanted([block])
        update = gradients([block], Rows(users, items, moving[None], Psi[items]), SETTINGS.ridge)
        expected[items] += update.item_gradient
        moving -= np.float32(SETTINGS.rate) * update.user_gradient[0]
        loss += update.loss
    assert_allclose(row + made.step, moving, atol=1e-6)
    assert_allclose(made.gradient, expected[made.items], atol=1e-6)
    assert_array_equal(made.items, [0, 1, 2, 4, 5])
    assert (made.blocks, made.loss) == (2, pytest.approx(loss))
    assert_array_equal(Psi, before)


def test_a_visit_without_blocks_changes_nothing():
    made = visit([], np.ones(4, np.float32), np.ones((2, 4), np.float32), SETTINGS)
    assert not made.step.any()
    assert (made.blocks, made.loss, len(made.items)) == (0, 0.0, 0)


def test_closing_one_users_block_leaves_the_others_open():
    builder, both = BlockBuilder(), BlockBuilder()
    for one in (builder, both):
        for user in (0, 1):
            one.extend(user, np.array([1, 2]), np.array([False, True]))
    assert builder.close(0) == [Block(0, (1,), (2,))]
    assert builder.close(0) == builder.close(9) == []
    assert builder.flush() == [Block(1, (1,), (2,))]
    assert len(both.flush()) == 2


def test_a_users_first_row_is_drawn_from_its_own_number_like_any_row_of_upsilon():
    settings = DriftSettings(dim=64)
    rows = np.stack([initial_row(key, settings) for key in range(200)])
    assert_array_equal(rows[3], initial_row(3, settings))
    assert len(np.unique(rows[:, 0])) == 200
    assert rows.std() == pytest.approx(initial(200, 1, settings, 0)[0].std(), rel=0.05)
    assert initial_row(1, DriftSettings(dim=4, item_bias=True))[-1] == 1


def stream(seed, users=30, items=12, length=900):
    """Return interactions in which even users like even items, and odd users odd ones."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, users, length), rng.integers(0, items, length)
    return Stream(user.astype(np.int32), item.astype(np.int32), (user + item) % 2 == 0)


@pytest.mark.parametrize("unseen", ["none", "own"])
def test_users_who_visit_an_owner_together_learn_what_they_learn_one_by_one(unseen):
    settings = DriftSettings(dim=4, rate=0.3, unseen=unseen, item_bias=unseen == "own")
    blocks = {
        3: [Block(3, (0, 1), (2,), (6, 7)), Block(3, (4,), (2, 5), (7, 1))],
        1: [Block(1, (2,), (0,), (8,))],
        6: [Block(6, (9,), (8, 0), (1, 1)), Block(6, (1,), (2,), (3,)), Block(6, (3,), (4,), (9,))],
    }
    if unseen == "none":
        blocks = {user: [block._replace(unseen=()) for block in own] for user, own in blocks.items()}
    apart, Psi = initial(7, 10, settings, 0)
    together, one_by_one, at_once = apart.copy(), HeldRows(10, 4), HeldRows(10, 4)
    losses = []
    for user, own in blocks.items():
        made = visit(own, apart[user], Psi, settings)
        one_by_one.add(user, made.items, made.gradient, made.recorded)
        apart[user] += made.step
        losses.append(made.loss)
    loss, count = visit_all(blocks, together, Psi, at_once, settings)
    assert loss == pytest.approx(sum(losses))
    assert count == 6
    assert_allclose(together, apart, rtol=1e-5)
    assert not np.array_equal(together, initial(7, 10, settings, 0)[0])
    assert_allclose(at_once.gradient, one_by_one.gradient, rtol=1e-5, atol=1e-7)
    assert at_once.contributors == one_by_one.contributors


def test_training_tells_what_users_like_and_ends_with_few_rows_held():
    losses = []
    Upsilon, Psi, held = run_shielded(
        [stream(0)], 30, 12, DriftSettings(dim=4), epochs=8, seed=0, window=10,
        on_epoch=lambda _epoch, _Upsilon, _Psi, loss: losses.append(loss),
    )  # fmt: skip
    scores = Upsilon @ Psi.T
    liked = (np.arange(30)[:, None] + np.arange(12)) % 2 == 0
    assert np.mean(scores[liked]) > np.mean(scores[~liked]) + 1
    assert losses[-1] < losses[0] / 3
    assert held <= 12


def test_no_row_moves_while_fewer_users_than_the_floor_are_behind_it():
    _, Psi, held = run_shielded([stream(0, users=4)], 4, 12, DriftSettings(dim=4), epochs=2, seed=0, k_min=5)
    assert_array_equal(Psi, initial(4, 12, DriftSettings(dim=4), 0)[1])
    assert held == 12
