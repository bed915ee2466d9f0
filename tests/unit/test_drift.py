from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from coterie.config.run import RunSettings
from coterie.errors import ConfigError, DataError
from coterie.systems.drift.blocks import BlockBuilder, Stream
from coterie.systems.drift.mathematics import (
    Block,
    NamedBlocks,
    Rows,
    Update,
    apply,
    check,
    fetch,
    gradients,
    initial,
    initial_item_rows,
    initial_user_rows,
    learned_in_turn,
    owner_order,
    score,
    step,
    wanted,
)
from coterie.systems.drift.sequential import run_in_process
from coterie.systems.drift.settings import DriftSettings
from coterie.wire.v1.orchestrator_pb2 import RunPlan

ITEM = st.integers(0, 11)
BLOCK = st.builds(
    Block,
    st.integers(0, 4),
    st.lists(ITEM, min_size=1, max_size=4).map(tuple),
    st.lists(ITEM, min_size=1, max_size=5).map(tuple),
    unseen=st.just(()),
)
BLOCKS = st.lists(BLOCK, min_size=1, max_size=7)
RIDGE = st.sampled_from([0.0, 1e-3, 0.1])

SOME_BLOCKS = [Block(3, (1, 4), (2, 7, 9)), Block(1, (4,), (1,)), Block(3, (2, 2, 5), (9, 0))]


class Wide(DriftSettings):
    """Factors far from zero."""

    init_scale: ClassVar[float] = 0.5


def rows_for(blocks: list[Block], dim: int = 4, seed: int = 0, *, item_bias: bool = False) -> Rows:
    """Rows in double precision, for comparisons with finite differences."""
    rng = np.random.default_rng(seed)
    users, items = wanted(blocks)
    user_rows, item_rows = rng.normal(size=(len(users), dim)), rng.normal(size=(len(items), dim))
    if item_bias:
        user_rows[:, -1] = 1
    return Rows(users, items, user_rows, item_rows)


def printed_loss(blocks: list[Block], rows: Rows, ridge: float, *, item_bias: bool = False) -> float:
    """3.4 and 6.1.2, pair by pair."""
    users, items = rows.users.tolist(), rows.items.tolist()
    total = 0.0
    for block in blocks:
        v = rows.user_rows[users.index(block.user)]
        free = v[:-1] if item_bias else v
        pairs = []
        for i in block.positives:
            for j in block.negatives:
                above, below = rows.item_rows[items.index(i)], rows.item_rows[items.index(j)]
                w = float(v @ (above - below))
                penalty = float(free @ free + above @ above + below @ below)
                pairs.append(math.log1p(math.exp(-w)) + ridge * penalty)
        total += sum(pairs) / len(pairs)
    return total


def pair_by_pair(blocks: list[Block], rows: Rows, ridge: float) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of Alg. 3 with the sign and the mean of 3.4."""
    users, items = rows.users.tolist(), rows.items.tolist()
    for_users, for_items = np.zeros_like(rows.user_rows), np.zeros_like(rows.item_rows)
    for block in blocks:
        u = users.index(block.user)
        share = 1 / (len(block.positives) * len(block.negatives))
        for positive in block.positives:
            for negative in block.negatives:
                i, j = items.index(positive), items.index(negative)
                v, above, below = rows.user_rows[u], rows.item_rows[i], rows.item_rows[j]
                g = 1 - 1 / (1 + np.exp(-v @ (above - below)))
                for_users[u] += share * (-g * (above - below) + 2 * ridge * v)
                for_items[i] += share * (-g * v + 2 * ridge * above)
                for_items[j] += share * (g * v + 2 * ridge * below)
    return for_users, for_items


def numerical(blocks: list[Block], rows: Rows, ridge: float, table: str, *, item_bias: bool) -> np.ndarray:
    values = getattr(rows, table)
    slope = np.zeros_like(values)
    for place in np.ndindex(values.shape):
        sides = []
        for nudge in (1e-6, -1e-6):
            moved = values.copy()
            moved[place] += nudge
            sides.append(printed_loss(blocks, replace(rows, **{table: moved}), ridge, item_bias=item_bias))
        slope[place] = (sides[0] - sides[1]) / 2e-6
    return slope


def planted(
    seed: int = 0, users: int = 30, items: int = 40, each: int = 30
) -> tuple[Stream, np.ndarray, np.ndarray]:
    """Two kinds of users, two kinds of items; a user likes the items of its kind."""
    rng = np.random.default_rng(seed)
    likes = (np.arange(users)[:, None] % 2) == (np.arange(items) % 2)
    seen = np.stack([rng.permutation(items)[:each] for _ in range(users)])
    user, item = np.repeat(np.arange(users), each), seen.ravel()
    order = rng.permutation(len(user))
    user, item = user[order], item[order]
    unseen = np.ones((users, items), bool)
    unseen[user, item] = False
    return Stream(user.astype(np.int32), item.astype(np.int32), likes[user, item]), likes, unseen


def by_owner(stream: Stream, owners: int) -> list[Stream]:
    """Deal the items: owner k holds those whose number divided by two leaves k."""
    holder = stream.item // 2 % owners
    return [Stream(*(column[holder == owner] for column in stream)) for owner in range(owners)]


def ordered_pairs(scores: np.ndarray, likes: np.ndarray, unseen: np.ndarray) -> float:
    """Share of (liked, not liked) unseen pairs in the right order; 0.5 at random."""
    right, total = 0, 0
    for row, liked, open_ in zip(scores, likes, unseen, strict=True):
        above, below = row[liked & open_], row[~liked & open_]
        right += int((above[:, None] > below).sum())
        total += above.size * below.size
    return right / total


def test_wanted_lists_every_id_once_in_ascending_order() -> None:
    users, items = wanted(SOME_BLOCKS)
    assert users.tolist() == [1, 3]
    assert items.tolist() == [0, 1, 2, 4, 5, 7, 9]
    assert users.dtype == items.dtype == np.int32


@settings(max_examples=25, deadline=None)
@given(BLOCKS, RIDGE, st.booleans())
def test_the_loss_and_its_gradient_are_those_of_the_printed_loss(
    blocks: list[Block], ridge: float, item_bias: bool
) -> None:
    rows = rows_for(blocks, dim=3, item_bias=item_bias)
    update = gradients(blocks, rows, ridge, item_bias=item_bias)
    assert update.loss == pytest.approx(printed_loss(blocks, rows, ridge, item_bias=item_bias))
    expected = numerical(blocks, rows, ridge, "user_rows", item_bias=item_bias)
    if item_bias:
        expected[:, -1] = 0
    np.testing.assert_allclose(update.user_gradient, expected, atol=1e-7)
    expected = numerical(blocks, rows, ridge, "item_rows", item_bias=item_bias)
    np.testing.assert_allclose(update.item_gradient, expected, atol=1e-7)


@settings(deadline=None)
@given(BLOCKS, RIDGE)
def test_the_gradient_is_that_of_a_loop_over_pairs(blocks: list[Block], ridge: float) -> None:
    rows = rows_for(blocks)
    update = gradients(blocks, rows, ridge)
    for_users, for_items = pair_by_pair(blocks, rows, ridge)
    np.testing.assert_allclose(update.user_gradient, for_users, atol=1e-12)
    np.testing.assert_allclose(update.item_gradient, for_items, atol=1e-12)
    assert update.blocks == len(blocks)
    assert update.pairs == sum(len(block.positives) * len(block.negatives) for block in blocks)


@settings(deadline=None)
@given(BLOCKS, st.booleans())
def test_a_batch_is_the_sum_of_its_blocks(blocks: list[Block], item_bias: bool) -> None:
    rows = rows_for(blocks, item_bias=item_bias)
    batch = gradients(blocks, rows, 0.01, item_bias=item_bias)
    alone = [gradients([block], rows, 0.01, item_bias=item_bias) for block in blocks]
    np.testing.assert_allclose(batch.user_gradient, sum(each.user_gradient for each in alone), atol=1e-12)
    np.testing.assert_allclose(batch.item_gradient, sum(each.item_gradient for each in alone), atol=1e-12)
    assert batch.loss == pytest.approx(sum(each.loss for each in alone))


@settings(deadline=None)
@given(
    st.lists(BLOCKS, min_size=1, max_size=4),
    st.sampled_from([{}, {"item_bias": True}, {"unseen": "own"}, {"unseen": "own", "item_bias": True}]),
)
def test_updates_in_turn_are_those_of_a_model_that_each_is_applied_to(
    updates: list[list[Block]], changes: dict[str, object]
) -> None:
    options = Wide(dim=4, rate=0.5, ridge=0.01, **changes)
    Upsilon, Psi = initial(5, 12, options, 0)
    named = [NamedBlocks(blocks, *wanted(blocks)) for blocks in updates]
    rows = fetch(Upsilon, Psi, *wanted(block for blocks in updates for block in blocks))
    before = rows.user_rows.copy(), rows.item_rows.copy()
    for found, blocks in zip(learned_in_turn(named, rows, options), updates, strict=True):
        expected = step(Upsilon, Psi, blocks, options)
        for name in ("users", "items", "user_gradient", "item_gradient"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        assert (found.loss, found.blocks, found.pairs) == (expected.loss, expected.blocks, expected.pairs)
    np.testing.assert_array_equal(rows.user_rows, before[0])
    np.testing.assert_array_equal(rows.item_rows, before[1])


def test_rows_that_no_block_names_have_no_gradient() -> None:
    rng = np.random.default_rng(0)
    Upsilon, Psi = rng.normal(size=(6, 4)), rng.normal(size=(12, 4))
    everything = fetch(Upsilon, Psi, np.arange(6, dtype=np.int32), np.arange(12, dtype=np.int32))
    update = gradients(SOME_BLOCKS, everything, 0.1)
    users, items = wanted(SOME_BLOCKS)
    exact = gradients(SOME_BLOCKS, fetch(Upsilon, Psi, users, items), 0.1)
    np.testing.assert_allclose(update.user_gradient[users], exact.user_gradient)
    np.testing.assert_allclose(update.item_gradient[items], exact.item_gradient)
    assert not np.delete(update.user_gradient, users, axis=0).any()
    assert not np.delete(update.item_gradient, items, axis=0).any()


def test_factors_in_single_precision_stay_so() -> None:
    Upsilon, Psi = initial(5, 12, DriftSettings(), 0)
    update = gradients(SOME_BLOCKS, fetch(Upsilon, Psi, *wanted(SOME_BLOCKS)), 1e-3)
    assert update.user_gradient.dtype == update.item_gradient.dtype == np.float32
    apply(Upsilon, Psi, update, 0.2)
    assert Upsilon.dtype == Psi.dtype == np.float32


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_far_from_zero_do_not_overflow(sign: int) -> None:
    rows = Rows(
        np.array([0], np.int32),
        np.array([0, 1], np.int32),
        np.array([[1.0]], np.float32),
        np.array([[-5000.0 * sign], [5000.0 * sign]], np.float32),
    )
    with np.errstate(over="raise", invalid="raise"):
        update = gradients([Block(0, negatives=(0,), positives=(1,))], rows, 0.0)
    assert update.loss == pytest.approx(0 if sign > 0 else 10_000)
    np.testing.assert_allclose(update.item_gradient, [[0.0], [0.0]] if sign > 0 else [[1.0], [-1.0]])


def test_a_step_raises_the_positives_over_the_negatives() -> None:
    block = Block(0, negatives=(0, 1), positives=(2, 3))
    Upsilon, Psi = initial(1, 4, Wide(), 1)
    before = score(Upsilon, Psi)[0]
    step(Upsilon, Psi, [block], DriftSettings(rate=0.1, ridge=0))
    gained = score(Upsilon, Psi)[0] - before
    assert gained[2:].min() > gained[:2].max()


def test_a_step_lowers_the_loss() -> None:
    Upsilon, Psi = initial(5, 12, Wide(), 1)
    rows = fetch(Upsilon, Psi, *wanted(SOME_BLOCKS))
    update = gradients(SOME_BLOCKS, rows, 1e-3)
    apply(Upsilon, Psi, update, 0.05)
    after = gradients(SOME_BLOCKS, fetch(Upsilon, Psi, update.users, update.items), 1e-3)
    assert after.loss < update.loss


def test_fetched_rows_do_not_change_with_the_model() -> None:
    Upsilon, Psi = initial(5, 12, DriftSettings(), 0)
    rows = fetch(Upsilon, Psi, *wanted(SOME_BLOCKS))
    kept = rows.user_rows.copy()
    Upsilon += 1
    np.testing.assert_array_equal(rows.user_rows, kept)


@pytest.mark.parametrize("blocks", [[], [Block(0, (), (1,))], [Block(0, (1,), (2,)), Block(0, (1,), ())]])
def test_no_block_or_a_block_without_a_pair_is_refused(blocks: list[Block]) -> None:
    rows = Rows(
        np.array([0], np.int32),
        np.arange(3, dtype=np.int32),
        np.ones((1, 2), np.float32),
        np.ones((3, 2), np.float32),
    )
    with pytest.raises(ValueError, match="at least one block"):
        gradients(blocks, rows, 0.0)


@pytest.mark.parametrize(
    ("block", "what"),
    [
        (Block(2, (1,), (2,)), "user 2"),
        (Block(1, (1,), (3,)), "item 3"),
        (Block(1, (9,), (2,)), "item 9"),
    ],
)
def test_a_row_that_was_not_fetched_is_named(block: Block, what: str) -> None:
    rows = rows_for([Block(1, (1,), (2,)), Block(5, (4,), (2,))])
    with pytest.raises(DataError, match=f"no row of {what},"):
        gradients([block], rows, 0.0)


def test_the_first_rows_do_not_depend_on_how_many_are_drawn() -> None:
    for options in (DriftSettings(dim=7), DriftSettings(dim=7, item_bias=True)):
        for draw in (initial_user_rows, initial_item_rows):
            np.testing.assert_array_equal(draw(50, options, 3)[:13], draw(13, options, 3))


def test_initial_rows_have_the_scale_asked_for_and_differ_by_seed_and_table() -> None:
    options = Wide(dim=20)
    Upsilon, Psi = initial(400, 400, options, 0)
    assert Upsilon.std() == pytest.approx(0.5, rel=0.05)
    assert Upsilon.dtype == Psi.dtype == np.float32
    assert not np.array_equal(Upsilon, Psi)
    assert not np.array_equal(Psi, initial_item_rows(400, options, 1))
    np.testing.assert_array_equal(Psi, initial_item_rows(400, options, 0))


def test_an_item_bias_starts_at_zero_and_the_users_coordinate_stays_one() -> None:
    options = DriftSettings(dim=5, item_bias=True, rate=0.5, ridge=0.01)
    Upsilon, Psi = initial(5, 12, options, 0)
    assert not Psi[:, -1].any()
    for _ in range(20):
        step(Upsilon, Psi, SOME_BLOCKS, options)
    np.testing.assert_array_equal(Upsilon[:, -1], np.ones(5, np.float32))
    assert np.count_nonzero(Psi[:, -1]) == len(wanted(SOME_BLOCKS)[1])


@pytest.mark.parametrize(
    "wrong",
    [
        {"dim": 0},
        {"dim": 1, "item_bias": True},
        {"theta": 0},
        {"rate": 0.0},
        {"rate": math.nan},
        {"ridge": -1.0},
        {"rate": math.inf},
        {"ridge": math.inf},
        {"init_scale": 0.0},
        {"local_updates": 0},
        {"local_updates": 65},
    ],
)
def test_settings_out_of_range_are_refused_and_named(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        DriftSettings(**wrong)


def planned(settings: DriftSettings, /, **changes: object) -> RunPlan:
    """Return a plan that carries settings, with fields changed afterwards."""
    plan = RunPlan(form=settings.form)
    settings.fill(plan)
    for name, value in changes.items():
        setattr(plan, name, value)
    return plan


@pytest.mark.parametrize(
    "settings",
    [
        DriftSettings(),
        DriftSettings(dim=5, rate=0.5, ridge=0.25, theta=3, item_bias=True, epochs=2, max_staleness=7),
        DriftSettings(local_updates=8),
        DriftSettings(local_updates=2, unseen="own"),
        DriftSettings(
            form="shielded", k_min=7, window=3, window_s=2.5, join_s=1, window_bound=8, window_bits=20
        ),
    ],
)
def test_settings_that_a_plan_carries_are_those_that_were_written(settings: DriftSettings) -> None:
    found = DriftSettings.from_plan(planned(settings))
    # A plan has single precision.
    single = {name: float(np.float32(getattr(settings, name))) for name in ("rate", "ridge")}
    assert found == settings.model_copy(update=single)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dim": 0}, "dim"),
        ({"dim": 1, "item_bias": True}, "dim is 1; expected at least 2"),
        ({"theta": 0}, "theta"),
        ({"epochs": 0}, "epochs"),
        ({"rate": 0.0}, "rate"),
        ({"rate": math.nan}, "rate"),
        ({"rate": math.inf}, "rate"),
        ({"ridge": -1.0}, "ridge"),
        ({"form": ""}, "form"),
        ({"settings": '{"local_updates":0}'}, "local_updates"),
        ({"settings": '{"local_updates":65}'}, "local_updates"),
        ({"settings": '{"local_updates":1.5}'}, "local_updates"),
        ({"settings": '{"local_update":2}'}, "unknown local_update"),
        ({"settings": '{"local_updates":2}', "form": "shielded"}, "unknown local_updates"),
    ],
)
def test_a_plan_out_of_range_is_refused_and_the_setting_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DriftSettings.from_plan(planned(DriftSettings(), **changes))


def test_a_plan_of_the_published_form_says_local_updates_where_they_are_several() -> None:
    assert DriftSettings().for_plan() == ""
    assert DriftSettings(local_updates=8).for_plan() == '{"local_updates":8}'


def test_local_updates_are_for_the_published_form_only() -> None:
    with pytest.raises(ValidationError, match=r"drift.local_updates is for the published form of DRIFT only"):
        RunSettings.model_validate({"drift": {"form": "shielded", "local_updates": 2}})


def test_a_plan_of_the_shielded_form_has_these_bytes() -> None:
    assert DriftSettings(form="shielded").for_plan() == (
        '{"bits":24,"bound":64.0,"join_s":10.0,"k_min":5,"window":128,"window_s":10.0}'
    )


def good_update() -> Update:
    return Update(
        users=np.array([0, 2], np.int32),
        items=np.array([1, 3, 4], np.int32),
        user_gradient=np.zeros((2, 16), np.float32),
        item_gradient=np.zeros((3, 16), np.float32),
        loss=1.0,
        blocks=2,
        pairs=3,
    )


def test_a_computed_update_passes_the_check() -> None:
    for options in (DriftSettings(), DriftSettings(item_bias=True)):
        Upsilon, Psi = initial(5, 12, options, 0)
        check(step(Upsilon, Psi, SOME_BLOCKS, options), options, 5, 12)


NOT_FINITE = np.zeros((3, 16), np.float32)
NOT_FINITE[1, 5] = np.nan


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"users": np.array([0, 3], np.int32)}, "user ids from 0 to 3; expected 0 to 2"),
        ({"items": np.array([-1, 3, 4], np.int32)}, "item ids from -1 to 4"),
        ({"items": np.array([1, 3, 3], np.int32)}, "not ascending"),
        ({"users": np.array([2, 0], np.int32)}, "not ascending"),
        ({"users": np.array([0.0, 2.0])}, "expected integers"),
        ({"user_gradient": np.zeros((2, 15), np.float32)}, r"expected \(2, 16\)"),
        ({"item_gradient": np.zeros((2, 16), np.float32)}, r"expected \(3, 16\)"),
        ({"item_gradient": NOT_FINITE}, "gradient of item 3 holds NaN"),
        ({"user_gradient": np.full((2, 16), np.inf, np.float32)}, "gradient of user 0 holds"),
        ({"loss": math.nan}, "the loss is nan"),
        ({"blocks": 0}, "0 blocks"),
        ({"pairs": 1}, "2 blocks with 1 pairs"),
    ],
)
def test_an_update_that_must_not_reach_the_model_is_refused(changed: dict[str, object], message: str) -> None:
    check(good_update(), DriftSettings(), 3, 5)
    with pytest.raises(DataError, match=message):
        check(replace(good_update(), **changed), DriftSettings(), 3, 5)


def test_an_update_that_moves_the_fixed_coordinate_is_refused() -> None:
    update = good_update()
    update.user_gradient[1, -1] = 1e-6
    check(update, DriftSettings(), 3, 5)
    with pytest.raises(DataError, match="fixed to 1"):
        check(update, DriftSettings(item_bias=True), 3, 5)


def test_the_order_of_a_pass_is_a_permutation_of_its_own_for_each_owner_and_epoch() -> None:
    order = owner_order(3, 1, 2, 100)
    assert sorted(order.tolist()) == list(range(100))
    np.testing.assert_array_equal(order, owner_order(3, 1, 2, 100))
    for other in ((4, 1, 2), (3, 2, 2), (3, 1, 3), (3, 2, 1)):
        assert not np.array_equal(order, owner_order(*other, 100))


def test_the_federation_learns_a_planted_taste() -> None:
    stream, likes, unseen = planted()
    options = DriftSettings(dim=8, rate=0.3)
    Upsilon, Psi = run_in_process(by_owner(stream, 3), 30, 40, options, epochs=8, seed=0)
    assert ordered_pairs(score(Upsilon, Psi), likes, unseen) > 0.9
    assert 0.3 < ordered_pairs(score(*initial(30, 40, options, 0)), likes, unseen) < 0.7


def test_the_federation_in_one_process_is_the_same_for_the_same_seed() -> None:
    stream, _, _ = planted()
    first, again, other = (
        run_in_process(by_owner(stream, 2), 30, 40, DriftSettings(), epochs=2, seed=seed)
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])
    assert not np.array_equal(first[1], other[1])


def test_owners_take_turns_and_trailing_blocks_come_last() -> None:
    def interactions(*triples: tuple[int, int, bool]) -> Stream:
        user, item, positive = zip(*triples, strict=True)
        return Stream(np.array(user, np.int32), np.array(item, np.int32), np.array(positive))

    def alternating(user: int, first: int, count: int) -> list[tuple[int, int, bool]]:
        return [(user, first + at, at % 2 == 1) for at in range(count)]

    # Owner 0 completes blocks (0,1), (2,3), (4,5) and leaves (6,7); owner 1 completes (8,9) and leaves (10,11).
    streams = [interactions(*alternating(0, 0, 8)), interactions(*alternating(1, 8, 4))]
    blocks = [Block(0 if k < 8 else 1, (k,), (k + 1,)) for k in range(0, 12, 2)]
    options = Wide(theta=2, rate=0.5)
    seen: list[float] = []
    Upsilon, Psi = run_in_process(
        streams, 2, 12, options, epochs=1, seed=4, on_epoch=lambda *done: seen.append(done[3])
    )

    by_hand = initial(2, 12, options, 4)
    # Two blocks in the intake; then what is left of each owner, in turn.
    chunks = [blocks[0:2], blocks[2:4], blocks[4:6]]
    losses = [step(*by_hand, chunk, options).loss for chunk in chunks]
    np.testing.assert_array_equal(Upsilon, by_hand[0])
    np.testing.assert_array_equal(Psi, by_hand[1])
    assert seen == [pytest.approx(sum(losses) / 6)]


def test_a_later_pass_takes_every_stored_block_once_in_the_owners_order() -> None:
    stream, _, _ = planted(users=1, items=40, each=40)
    options = Wide(theta=3, rate=0.5)
    kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def keep(epoch: int, Upsilon: np.ndarray, Psi: np.ndarray, loss: float) -> None:
        kept[epoch] = Upsilon.copy(), Psi.copy()

    run_in_process([stream], 1, 40, options, epochs=2, seed=9, on_epoch=keep)
    builder = BlockBuilder()
    stored = builder.extend(0, stream.item, stream.positive) + builder.flush()
    order = owner_order(9, 0, 2, len(stored)).tolist()
    Upsilon, Psi = (array.copy() for array in kept[1])
    for at in range(0, len(order), 3):
        step(Upsilon, Psi, [stored[index] for index in order[at : at + 3]], options)
    np.testing.assert_array_equal(Upsilon, kept[2][0])
    np.testing.assert_array_equal(Psi, kept[2][1])


def test_owners_without_blocks_change_nothing() -> None:
    nothing = Stream(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, bool))
    losses: list[float] = []
    Upsilon, Psi = run_in_process(
        [nothing, nothing],
        2,
        3,
        DriftSettings(),
        epochs=2,
        seed=0,
        on_epoch=lambda *done: losses.append(done[3]),
    )
    untouched = initial(2, 3, DriftSettings(), 0)
    np.testing.assert_array_equal(Upsilon, untouched[0])
    np.testing.assert_array_equal(Psi, untouched[1])
    assert np.isnan(losses).all()
    assert len(losses) == 2
