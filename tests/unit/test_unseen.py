"""Pairs with unseen items: loss and gradient beside a loop over pairs, draws, settings, both rankings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from coterie.config.run import RunSettings
from coterie.errors import ConfigError, DataError
from coterie.evaluation.holdout import TEST, TRAIN, VALIDATION, Holdout, headline
from coterie.launch.preflight import check_run
from coterie.studies.run_data import load, make_feed
from coterie.systems.drift.blocks import Block, BlockBuilder, Stream
from coterie.systems.drift.central import train
from coterie.systems.drift.mathematics import Rows, learned, wanted
from coterie.systems.drift.rankings import measure
from coterie.systems.drift.sequential import run_in_process
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.drift.shielded import HeldRows, run_shielded, visit
from coterie.systems.drift.unseen import UnseenItems
from coterie.wire.v1.orchestrator_pb2 import RunPlan

ITEM = st.integers(0, 11)


@st.composite
def drawn_block(draw: st.DrawFn) -> Block:
    positives = draw(st.lists(ITEM, min_size=1, max_size=4))
    each = draw(st.integers(0, 3))
    return Block(
        draw(st.integers(0, 4)),
        tuple(draw(st.lists(ITEM, max_size=4))),
        tuple(positives),
        tuple(draw(st.lists(ITEM, min_size=each * len(positives), max_size=each * len(positives)))),
    )


BLOCKS = st.lists(drawn_block(), min_size=1, max_size=5)
BIAS = st.booleans()


def settings_of(**given: Any) -> DriftSettings:
    return DriftSettings.model_validate(
        {"unseen": "own", "dim": 4, "ridge": 0.05, "seen_weight": 0.3, **given}
    )


def rows_for(blocks: list[Block], settings: DriftSettings) -> Rows:
    rng = np.random.default_rng(0)
    users, items = wanted(blocks)
    user_rows, item_rows = (rng.normal(size=(len(ids), settings.dim)) for ids in (users, items))
    if settings.item_bias:
        user_rows[:, -1] = 1
    return Rows(users, items, user_rows, item_rows)


def one_by_one(blocks: list[Block], rows: Rows, settings: DriftSettings) -> float:
    """The loss, pair by pair and record by record."""
    users, items = rows.users.tolist(), rows.items.tolist()
    free = settings.dim - settings.item_bias
    total = 0.0
    for block in blocks:
        v = rows.user_rows[users.index(block.user)][:free]

        def pair(i: int, j: int, v: np.ndarray = v) -> float:
            above, below = (rows.item_rows[items.index(one)][:free] for one in (i, j))
            penalty = float(v @ v + above @ above + below @ below)
            return math.log1p(math.exp(-float(v @ (above - below)))) + settings.ridge * penalty

        each = len(block.unseen) // len(block.positives)
        for place, i in enumerate(block.positives):
            for others, weight in (
                (block.negatives, settings.seen_weight),
                (block.unseen[place * each : (place + 1) * each], 1.0),
            ):
                total += sum(weight * pair(i, j) for j in others) / max(len(others), 1)
        if settings.item_bias:
            signed = [(i, 1) for i in block.positives] + [(j, -1) for j in block.negatives]
            for item, sign in signed:
                odds = float(rows.item_rows[items.index(item), -1])
                total += math.log1p(math.exp(-sign * odds))
    return total


@given(BLOCKS, BIAS)
def test_loss_and_gradient_are_those_of_a_loop_over_pairs_and_records(
    blocks: list[Block], item_bias: bool
) -> None:
    settings = settings_of(item_bias=item_bias)
    rows = rows_for(blocks, settings)
    update = learned(blocks, rows, settings)
    assert update.loss == pytest.approx(one_by_one(blocks, rows, settings))
    assert update.pairs == sum(len(b.positives) * len(b.negatives) + len(b.unseen) for b in blocks)
    for table, found in (("user_rows", update.user_gradient), ("item_rows", update.item_gradient)):
        values = getattr(rows, table)
        for place in np.ndindex(values.shape):
            if item_bias and table == "user_rows" and place[1] == settings.dim - 1:
                assert found[place] == 0
                continue
            sides = []
            for nudge in (1e-6, -1e-6):
                moved = values.copy()
                moved[place] += nudge
                sides.append(one_by_one(blocks, replace(rows, **{table: moved}), settings))
            assert found[place] == pytest.approx((sides[0] - sides[1]) / 2e-6, abs=1e-6)


def test_a_block_without_a_liked_item_is_an_error() -> None:
    settings = settings_of()
    block = Block(0, (1,), ())
    with pytest.raises(ValueError, match="at least one positive"):
        learned([block], rows_for([block], settings), settings)


# --- blocks and draws --------------------------------------------------------------------------------------------


def test_blocks_without_negatives_are_kept_and_blocks_without_positives_are_not() -> None:
    builder = BlockBuilder(keep_all=True)
    done = builder.extend(3, np.array([1, 2, 5]), np.array([True, True, False]))
    assert done == [Block(3, (), (1, 2))]
    assert builder.flush() == []
    builder.add(3, 6, True)
    builder.add(4, 7, True)
    assert builder.close(3) == [Block(3, (5,), (6,))]
    assert builder.flush() == [Block(4, (), (7,))]
    assert builder.dropped == 0


def a_drawer(seed: int = 0, owner: int = 0, **given: Any) -> UnseenItems:
    drawer = UnseenItems(settings_of(**given), seed, owner)
    drawer.see(2, [0, 1, 2, 3])
    drawer.see(5, [4, 7, 8, 9])
    return drawer


POOL = np.arange(0, 400, 2)
SOME = [Block(2, (0,), (2, 1)), Block(2, (), (3,)), Block(5, (7,), (9, 4, 8))]


def test_unseen_items_are_from_the_pool_and_in_no_record_of_the_user() -> None:
    few = np.array([0, 1, 2, 3, 7, 9, 50, 60])
    for epoch in range(1, 20):
        for block in SOME:
            drawn = a_drawer().draw(block, few, epoch)
            assert drawn[:3] == block[:3]
            assert len(drawn.unseen) == 4 * len(block.positives)
            assert set(drawn.unseen) <= ({7, 9, 50, 60} if block.user == 2 else {0, 1, 2, 3, 50, 60})


def test_where_the_user_has_seen_every_item_nothing_is_drawn() -> None:
    assert a_drawer().draw(SOME[1], np.array([0, 1, 2, 3]), 1) == SOME[1]


def test_draws_depend_on_the_block_and_not_on_what_is_drawn_before_or_elsewhere() -> None:
    together = a_drawer()
    forwards = [together.draw(block, POOL, 3) for block in SOME]
    backwards = [together.draw(block, POOL, 3) for block in reversed(SOME)]
    alone = [a_drawer().draw(block, POOL, 3) for block in SOME]
    assert forwards == backwards[::-1] == alone


def test_another_pass_owner_user_or_seed_draws_other_items() -> None:
    block = SOME[2]
    draws = {
        a_drawer().draw(block, POOL, 1).unseen,
        a_drawer().draw(block, POOL, 2).unseen,
        a_drawer(owner=1).draw(block, POOL, 1).unseen,
        a_drawer(seed=1).draw(block, POOL, 1).unseen,
        a_drawer().draw(block._replace(user=6), POOL, 1).unseen,
        a_drawer().draw(block._replace(positives=(4, 9, 8)), POOL, 1).unseen,
    }
    assert len(draws) == 6


def test_gradients_are_equal_to_the_bit_whichever_blocks_are_drawn_in_one_call() -> None:
    settings = settings_of()
    drawn = [a_drawer().draw(block, POOL, 1) for block in SOME]
    again = [a_drawer().draw(block, POOL, 1) for block in reversed(SOME)][::-1]
    for one, other in zip(drawn, again, strict=True):
        first, second = (learned([block], rows_for(drawn, settings), settings) for block in (one, other))
        np.testing.assert_array_equal(first.item_gradient, second.item_gradient)
        np.testing.assert_array_equal(first.user_gradient, second.user_gradient)


# --- settings ----------------------------------------------------------------------------------------------------


def test_rows_of_other_owners_are_for_the_shielded_form_only() -> None:
    with pytest.raises(ValidationError, match="rows of other owners' items; expected unseen 'own', or form"):
        DriftSettings(unseen="all")
    assert DriftSettings(unseen="all", form="shielded").pairs_unseen


@pytest.mark.parametrize("form", ["published", "shielded"])
def test_a_plan_carries_the_settings_of_unseen_items(form: Literal["published", "shielded"]) -> None:
    made = settings_of(form=form, ridge=0.5, rate=0.25, item_bias=True, bias_weights=(0.0, 3.0))
    plan = RunPlan(form=form)
    made.fill(plan)
    assert DriftSettings.from_plan(plan) == made
    assert DriftSettings(form=form).for_plan().count("unseen") == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"unseen":"all"}', "other owners' items"),
        ('{"unseen":"some"}', "unseen"),
        ('{"unseen":"own","k_min":5}', "unknown k_min"),
        ('{"unseen":"own","unseen_each":0}', "unseen_each"),
        ("[]", "expected an object"),
    ],
)
def test_a_plan_with_other_settings_is_refused(text: str, why: str) -> None:
    plan = RunPlan(form="published", settings=text)
    DriftSettings().fill(plan)
    plan.settings = text
    with pytest.raises(ConfigError, match=why):
        DriftSettings.from_plan(plan)


# --- data without dislikes ---------------------------------------------------------------------------------------


def of_likes_only(**drift: Any) -> RunSettings:
    return RunSettings.model_validate(
        {
            "system": "drift",
            "data": {
                "synthetic": {"users": 40, "items": 60, "interactions": 1100},
                "positive_from": 0.5,
            },
            "drift": drift,
        }
    )


def test_data_without_dislikes_is_refused_before_a_run_that_would_learn_nothing() -> None:
    settings = of_likes_only()
    with pytest.raises(
        DataError, match=r"interactions of synthetic are liked at data\.positive_from 0\.5"
    ) as e:
        make_feed(settings, load(settings), 0)
    assert "drift.unseen = 'own'" in str(e.value.hint)
    found = {one.check: one for one in check_run(settings)}
    assert found["split"].status == "fail"


def test_with_unseen_items_data_without_dislikes_is_learned_from() -> None:
    settings = of_likes_only(unseen="own")
    assert make_feed(settings, load(settings), 0).positive.all()


def kinds(users: int = 30, items: int = 40, each: int = 12) -> tuple[Stream, np.ndarray, np.ndarray]:
    """Users and items of two kinds; a user has records of items of its own kind only, all liked."""
    rng = np.random.default_rng(0)
    own = [np.arange(user % 2, items, 2) for user in range(users)]
    chosen = np.stack([rng.permutation(one)[:each] for one in own])
    user = np.repeat(np.arange(users), each).astype(np.int32)
    stream = Stream(user, chosen.ravel().astype(np.int32), np.ones(users * each, bool))
    likes = (np.arange(users)[:, None] % 2) == (np.arange(items) % 2)
    unseen = np.ones((users, items), bool)
    unseen[user, stream.item] = False
    return stream, likes, unseen


@pytest.mark.parametrize("form", ["published", "shielded", "central"])
def test_from_likes_alone_every_form_learns_which_unseen_items_a_user_would_choose(form: str) -> None:
    stream, likes, unseen = kinds()
    half = stream.item < 20
    streams = [Stream(*(column[mask] for column in stream)) for mask in (half, ~half)]
    settings = DriftSettings(unseen="own", dim=4, rate=0.1)
    if form == "central":
        Upsilon, Psi = train(stream, 30, 40, settings, epochs=15, seed=0)
    elif form == "published":
        Upsilon, Psi = run_in_process(streams, 30, 40, settings, epochs=15, seed=0)
    else:
        Upsilon, Psi, _ = run_shielded(streams, 30, 40, settings, epochs=15, seed=0, k_min=2, window=5)
    right = [
        float((scores[liked & open_][:, None] > scores[~liked & open_]).mean())
        for scores, liked, open_ in zip(Upsilon @ Psi.T, likes, unseen, strict=True)
    ]
    assert np.mean(right) > 0.9


def test_users_for_whom_an_item_was_only_drawn_do_not_count_as_users_behind_its_row() -> None:
    held, settings = HeldRows(12, 4), settings_of(form="shielded")
    row, Psi = np.ones(4, np.float32), np.ones((12, 4), np.float32)
    blocks = [Block(0, (), (1,), (2, 3)), Block(1, (2,), (1,), (5, 3)), Block(2, (), (2,), (1, 3))]
    total = np.zeros((12, 4), np.float32)
    for block in blocks:
        made = visit([block], row, Psi, settings)
        held.add(block.user, made.items, made.gradient, made.recorded)
        total[made.items] += made.gradient
    # Users 0 and 1 have a record of item 1, users 1 and 2 of item 2, and nobody of items 3 and 5.
    released = held.release(2)
    assert released.items.tolist() == [1, 2]
    np.testing.assert_array_equal(released.gradient, total[[1, 2]])
    np.testing.assert_array_equal(held.gradient[[3, 5]], total[[3, 5]])
    assert not len(held.release(1).items)
    assert len(held) == 2
    drawer = a_drawer()
    assert drawer.recorded(2, np.array([0, 4, 3])).tolist() == [True, False, True]


# --- two rankings ------------------------------------------------------------------------------------------------


def test_each_ranking_takes_the_weight_that_is_best_on_its_own_validation_part() -> None:
    # Users choose items 0 to 5 and like the odd ones among them.  The factors know the first, the log-odds the second.
    item = np.tile(np.arange(6), 3)
    user = np.repeat(np.arange(3), 6)
    part = np.tile([TRAIN, TRAIN, VALIDATION, VALIDATION, TEST, TEST], 3)
    holdout = Holdout(3, 12, user, item, item % 2 == 1, part)
    Psi = np.zeros((12, 2), np.float32)
    Psi[:, 0] = np.arange(12) < 6
    # Items that nobody chose have the best odds.
    Psi[:, 1] = np.where(np.arange(12) < 6, np.arange(12) % 2, 5)
    Psi[3, 0] = Psi[5, 0] = 0.9
    rows = np.ones((3, 2), np.float32)
    settings = DriftSettings(unseen="own", item_bias=True, dim=2, bias_weights=(0.0, 1.0))
    ranked = measure(holdout, rows, Psi, settings)
    assert (ranked.unseen, ranked.items) == (0.0, 1.0)
    found = headline(ranked.metrics)
    assert found["ndcg_test_items@10"] == found["validation_ndcg_items@10"] == 1.0
    alone = measure(holdout, rows, Psi, settings.model_copy(update={"bias_weights": (0.0,)}))
    assert found["ndcg@10"] == headline(alone.metrics)["ndcg@10"]
    assert headline(alone.metrics)["ndcg_test_items@10"] < 1.0


def test_without_log_odds_scores_are_used_as_they_are() -> None:
    stream, likes, _ = kinds(users=6)
    part = np.tile([TRAIN, VALIDATION, TEST], len(stream.item) // 3)
    holdout = Holdout(6, 40, stream.user, stream.item, likes[stream.user, stream.item], part)
    rng = np.random.default_rng(1)
    rows, Psi = rng.normal(size=(6, 3)).astype(np.float32), rng.normal(size=(40, 3)).astype(np.float32)
    plain = holdout.measure(lambda chosen: rows[chosen] @ Psi.T)
    for settings in (DriftSettings(dim=3, item_bias=True), DriftSettings(dim=3, unseen="own")):
        ranked = measure(holdout, rows, Psi, settings)
        for name, values in plain.items():
            np.testing.assert_array_equal(ranked.metrics[name], values)
