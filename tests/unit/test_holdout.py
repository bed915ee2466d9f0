from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.evaluation.holdout import TEST, TRAIN, VALIDATION, Holdout, headline, sums
from coterie.evaluation.metrics import pair_loss, ranking

K = 3


def hold(n_users: int, n_items: int, rows: list[tuple[int, int, bool, int]]) -> Holdout:
    columns = list(zip(*rows, strict=True)) if rows else [(), (), (), ()]
    return Holdout(
        n_users,
        n_items,
        np.array(columns[0], np.int64),
        np.array(columns[1], np.int64),
        np.array(columns[2], bool),
        np.array(columns[3], np.int64),
    )


@st.composite
def holdouts(draw: st.DrawFn) -> tuple[Holdout, np.ndarray]:
    """Draw interactions in parts, each item once per user, and scores without ties."""
    n_users, n_items = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = [
        (user, int(item), bool(rng.random() < 0.5), int(rng.integers(0, draw(st.sampled_from([2, 3])))))
        for user in range(n_users)
        for item in rng.choice(n_items, rng.integers(0, n_items + 1), replace=False)
    ]
    rng.shuffle(rows)
    scores = rng.permutation(n_users * n_items).reshape(n_users, n_items) / 7.0
    return hold(n_users, n_items, [(int(u), int(i), bool(p), int(s)) for u, i, p, s in rows]), scores


def plainly(holdout: Holdout, scores: np.ndarray, user: int) -> dict[str, float]:
    """Measure one user by the definitions, with sets."""
    own = [
        (int(i), bool(p), int(s))
        for u, i, p, s in zip(holdout.user, holdout.item, holdout.positive, holdout.part, strict=True)
        if u == user
    ]
    of = {part: {item for item, _, s in own if s == part} for part in (TRAIN, VALIDATION, TEST)}
    liked = {part: {item for item, p, s in own if p and s == part} for part in (TRAIN, VALIDATION, TEST)}
    everything = set(range(holdout.n_items))

    def flags(items: set[int]) -> np.ndarray:
        return np.array([[item in items for item in range(holdout.n_items)]])

    def ranked(part: int, candidates: set[int], pattern: str) -> dict[str, float]:
        found = ranking(scores[[user]], flags(liked[part]), flags(candidates), K)
        return {pattern.format(*name.split("@")): float(values[0]) for name, values in found.items()}

    expected = {
        **ranked(TEST, everything - of[TRAIN] - of[VALIDATION], "{0}@{1}"),
        **ranked(TEST, of[TEST], "{0}_test_items@{1}"),
        "test_loss": float(pair_loss(scores[[user]], flags(liked[TEST]), flags(of[TEST] - liked[TEST]))[0]),
    }
    if (holdout.part == VALIDATION).any():
        expected |= ranked(VALIDATION, everything - of[TRAIN], "validation_{0}@{1}")
        expected |= ranked(VALIDATION, of[VALIDATION], "validation_{0}_items@{1}")
    return expected


@settings(max_examples=100)
@given(holdouts())
def test_every_figure_is_what_its_definition_says_user_by_user(case: tuple[Holdout, np.ndarray]) -> None:
    holdout, scores = case
    measured = holdout.measure(lambda chosen: scores[chosen], K)
    for user in range(holdout.n_users):
        expected = plainly(holdout, scores, user)
        assert measured.keys() == expected.keys()
        for name, value in expected.items():
            assert measured[name][user] == pytest.approx(value, rel=1e-6, nan_ok=True), name


@given(holdouts(), st.integers(1, 4))
def test_it_does_not_matter_how_many_users_are_scored_at_once(
    case: tuple[Holdout, np.ndarray], at_once: int
) -> None:
    holdout, scores = case
    asked: list[list[int]] = []

    def scored(chosen: np.ndarray) -> np.ndarray:
        asked.append(chosen.tolist())
        return scores[chosen]

    whole = holdout.measure(lambda chosen: scores[chosen], K)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coterie.evaluation.holdout._USERS_AT_ONCE", at_once)
        parts = holdout.measure(scored, K)
    assert [user for chosen in asked for user in chosen] == list(range(holdout.n_users))
    assert max(map(len, asked)) <= at_once
    # Without a single validation row in the first batch its figures would be shorter than the others'.
    assert {name: len(values) for name, values in parts.items()} == dict.fromkeys(whole, holdout.n_users)
    for name, values in whole.items():
        np.testing.assert_allclose(parts[name], values, err_msg=name)


def test_what_was_seen_in_training_is_not_ranked() -> None:
    # Item 0 has the best score and was seen; item 1 is the test item.
    holdout = hold(1, 3, [(0, 0, True, TRAIN), (0, 1, True, TEST)])
    measured = holdout.measure(lambda _: np.array([[3.0, 2.0, 1.0]]), K)
    assert measured["ndcg@3"][0] == 1.0


def test_a_user_with_nothing_to_measure_has_no_figure_and_is_not_counted() -> None:
    holdout = hold(3, 4, [(0, 0, True, TEST), (0, 1, False, TEST), (2, 2, True, TRAIN)])
    measured = holdout.measure(lambda chosen: np.tile([4.0, 3.0, 2.0, 1.0], (len(chosen), 1)), K)
    assert np.isnan(measured["map@3"]).tolist() == [False, True, True]
    names, table = sums(measured)
    assert dict(zip(names, table[:, 1].tolist(), strict=True))["map@3"] == 1
    assert headline(measured)["map@3"] == 1.0


FIGURES = st.dictionaries(
    st.sampled_from(["map@10", "ndcg@10", "test_loss"]),
    st.lists(st.one_of(st.just(math.nan), st.integers(-8, 8).map(float)), min_size=4, max_size=4),
)


@given(FIGURES, FIGURES)
def test_sums_of_hosts_add_up_to_the_sums_of_all_users(
    first: dict[str, list[float]], second: dict[str, list[float]]
) -> None:
    second = {name: second.get(name, [math.nan] * 4) for name in first}
    tables = []
    for figures in (first, second, {name: first[name] + second[name] for name in first}):
        names, table = sums({name: np.array(values) for name, values in figures.items()})
        assert (table.dtype, table.shape) == (np.float64, (len(names), 2))
        tables.append(dict(zip(names, table, strict=True)))
    for name, row in tables[2].items():
        assert (tables[0][name] + tables[1][name]).tolist() == row.tolist()


@given(FIGURES)
def test_a_headline_is_the_mean_over_the_users_that_have_the_figure(figures: dict[str, list[float]]) -> None:
    found = headline({name: np.array(values) for name, values in figures.items()})
    for name, values in figures.items():
        known = [value for value in values if not math.isnan(value)]
        if known:
            assert found[name] == pytest.approx(sum(known) / len(known))
        else:
            assert name not in found
