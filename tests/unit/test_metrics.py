import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import RunError
from coterie.evaluation import metrics, pair_loss, ranking
from coterie.evaluation.metrics import descending

from ..other_metrics import ranx


def plainly(
    scores: np.ndarray, relevant: np.ndarray, candidates: np.ndarray, k: int
) -> dict[str, list[float]]:
    """Rank user by user, item by item, from the definitions."""
    out: dict[str, list[float]] = {
        f"{name}@{k}": [] for name in ("map", "ndcg", "precision", "recall", "hit_ratio", "ndcg_printed")
    }
    for row in range(len(scores)):
        items = [i for i in range(scores.shape[1]) if candidates[row, i]]
        total = sum(bool(relevant[row, i]) for i in items)
        if not total:
            for values in out.values():
                values.append(math.nan)
            continue
        items.sort(key=lambda i: (-scores[row, i], bool(relevant[row, i])))
        rel = [int(relevant[row, i]) for i in items[:k]]
        precisions = [sum(rel[: i + 1]) / (i + 1) for i in range(len(rel))]
        dcg = sum(r / math.log2(i + 2) for i, r in enumerate(rel))
        ideal = sum(1 / math.log2(i + 2) for i in range(min(k, total)))
        printed = sum(2.0 ** (r - 1) / math.log2(i + 2) for i, r in enumerate(rel))
        out[f"map@{k}"].append(sum(p * r for p, r in zip(precisions, rel, strict=True)) / min(k, total))
        out[f"ndcg@{k}"].append(dcg / ideal)
        out[f"precision@{k}"].append(sum(rel) / k)
        out[f"recall@{k}"].append(sum(rel) / total)
        out[f"hit_ratio@{k}"].append(float(any(rel)))
        out[f"ndcg_printed@{k}"].append(printed / sum(1 / math.log2(i + 2) for i in range(k)))
    return out


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_metric_equals_its_definition_with_ties_and_gaps(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    shape = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 30))
    levels = data.draw(st.integers(1, 12))
    scores = (rng.integers(-levels, levels + 1, shape) / 4).astype(np.float32)
    scores[rng.random(shape) < 0.1] = -0.0
    relevant = rng.random(shape) < data.draw(st.floats(0, 1))
    candidates = rng.random(shape) < data.draw(st.floats(0, 1))
    k = data.draw(st.integers(1, 12))
    ours = ranking(scores, relevant, candidates, k)
    for key, values in plainly(scores, relevant, candidates, k).items():
        np.testing.assert_allclose(ours[key], values, rtol=1e-12, err_msg=key)


def test_metrics_equal_those_of_an_independent_library() -> None:
    library = ranx()
    rng = np.random.default_rng(5)
    users, items, k = 40, 120, 10
    # Distinct scores: how the library breaks ties is its own affair.
    scores = rng.permuted(np.tile(np.arange(items, dtype=np.float32), (users, 1)), axis=1) - 50
    relevant = rng.random((users, items)) < rng.uniform(0.02, 0.3, (users, 1))
    candidates = rng.random((users, items)) < 0.7
    relevant[np.arange(users), candidates.argmax(axis=1)] = True
    wanted = relevant & candidates
    names = [f"{user:02d}" for user in range(users)]  # their order by name is that of the rows
    qrels = library.Qrels(
        {name: {str(i): 1 for i in np.flatnonzero(wanted[u])} for u, name in enumerate(names)}
    )
    ranked = [{str(i): float(scores[u, i]) for i in np.flatnonzero(candidates[u])} for u in range(users)]
    run = library.Run(dict(zip(names, ranked, strict=True)))
    theirs = library.evaluate(
        qrels,
        run,
        ["map@10", "ndcg@10", "precision@10", "recall@10", "hit_rate@10"],
        return_mean=False,
        make_comparable=True,
    )
    ours = ranking(scores, relevant, candidates, k)
    total = wanted.sum(axis=1)
    for key in ("ndcg@10", "precision@10", "recall@10"):
        np.testing.assert_allclose(ours[key], theirs[key], err_msg=key)
    np.testing.assert_allclose(ours["hit_ratio@10"], theirs["hit_rate@10"])
    # The library divides by all relevant items, DRIFT's MAP at 10 by those that fit into ten ranks.
    assert (total > k).any()
    np.testing.assert_allclose(ours["map@10"] * np.minimum(total, k) / total, theirs["map@10"])


def test_equal_scores_count_against_the_model() -> None:
    relevant = np.zeros((1, 50), bool)
    relevant[0, 0] = True
    result = ranking(np.zeros((1, 50), np.float32), relevant, np.ones((1, 50), bool))
    assert result["hit_ratio@10"][0] == 0
    assert result["ndcg@10"][0] == 0


def test_a_perfect_ranking_has_one_everywhere_that_ten_relevant_items_allow() -> None:
    scores = -np.arange(30, dtype=np.float32)[None]
    result = ranking(scores, scores > -10, np.ones((1, 30), bool))
    assert {key: float(value[0]) for key, value in result.items()} == pytest.approx(
        dict.fromkeys(result, 1.0), rel=1e-12
    )


def test_the_printed_ndcg_gives_half_a_point_to_what_is_not_relevant() -> None:
    scores = -np.arange(30, dtype=np.float32)[None]
    result = ranking(scores, scores < -20, np.ones((1, 30), bool))
    assert result["ndcg@10"][0] == 0
    assert result["ndcg_printed@10"][0] == pytest.approx(0.5)


def test_users_without_a_relevant_candidate_have_no_metrics() -> None:
    scores = np.ones((3, 4), np.float32)
    relevant = np.array([[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]], bool)
    candidates = np.array([[1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]], bool)
    for key, value in ranking(scores, relevant, candidates).items():
        assert np.isnan(value).tolist() == [False, True, True], key


def test_users_ranked_in_several_passes_get_the_same_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    scores = rng.random((23, 40), dtype=np.float32)
    relevant, candidates = rng.random((2, 23, 40)) < 0.5
    at_once = ranking(scores, relevant, candidates)
    monkeypatch.setattr("coterie.evaluation.metrics._ELEMENTS_AT_ONCE", 100)
    for key, value in ranking(scores, relevant, candidates).items():
        np.testing.assert_array_equal(value, at_once[key])


def test_few_candidates_of_many_items_get_the_metrics_of_the_whole_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    scores = rng.integers(-3, 3, (40, 300)).astype(np.float32)
    candidates = rng.random(scores.shape) < 0.05
    candidates[3] = False
    relevant = rng.random(scores.shape) < 0.3
    few = ranking(scores, relevant, candidates)
    monkeypatch.setattr(metrics, "_FEW", 10**9)
    whole = ranking(scores, relevant, candidates)
    assert few.keys() == whole.keys()
    for name, values in few.items():
        np.testing.assert_array_equal(values, whole[name])


def test_scores_shared_by_all_users_may_be_broadcast() -> None:
    relevant = np.eye(3, 5, dtype=bool)
    scores = np.broadcast_to(np.array([5, 4, 3, 2, 1], np.float64), (3, 5))
    result = ranking(scores, relevant, np.ones((3, 5), bool), k=2)
    assert result["hit_ratio@2"].tolist() == [1, 1, 0]


def test_a_diverged_model_is_told_apart_from_a_bad_one() -> None:
    scores = np.zeros((2, 3), np.float32)
    scores[1, 2] = np.nan
    everything = np.ones((2, 3), bool)
    with pytest.raises(RunError, match="score of user 1 for item 2 is nan"):
        ranking(scores, everything, everything)
    everything[1, 2] = False  # what is not ranked may be anything
    assert np.isfinite(ranking(scores, everything, everything)["ndcg@10"]).all()


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one shape \(n, I\)"):
        ranking(np.zeros((1, 3), np.float32), np.zeros((1, 2), bool), np.zeros((1, 3), bool))
    with pytest.raises(ValueError, match=r"expected one shape \(n, I\)"):
        pair_loss(np.zeros((1, 3), np.float32), np.zeros((1, 2), bool), np.zeros((1, 3), bool))
    with pytest.raises(ValueError, match="k is 0"):
        ranking(np.zeros((1, 3), np.float32), np.zeros((1, 3), bool), np.zeros((1, 3), bool), k=0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.1, 300))
def test_the_pair_loss_is_the_mean_over_all_pairs(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.normal(scale=scale, size=(4, 9))
    positive = rng.random((4, 9)) < 0.4
    negative = ~positive & (rng.random((4, 9)) < 0.6)
    for user, loss in enumerate(pair_loss(scores, positive, negative)):
        pairs = [
            math.log1p(math.exp(-abs(d))) + max(-d, 0.0)
            for d in (
                scores[user, i] - scores[user, j]
                for i in np.flatnonzero(positive[user])
                for j in np.flatnonzero(negative[user])
            )
        ]
        assert loss == pytest.approx(sum(pairs) / len(pairs)) if pairs else math.isnan(loss)


def test_the_pair_loss_does_not_overflow() -> None:
    scores = np.array([[-1e30, 1e30]], np.float32)
    flags = np.array([[True, False]])
    assert pair_loss(scores, flags, ~flags)[0] == pytest.approx(2e30)
    assert pair_loss(scores, ~flags, flags)[0] == 0


def test_a_long_history_is_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    scores, positive = rng.normal(size=(2, 60)), rng.random((2, 60)) < 0.5
    whole = pair_loss(scores, positive, ~positive)
    monkeypatch.setattr("coterie.evaluation.metrics._ELEMENTS_AT_ONCE", 64)
    np.testing.assert_allclose(pair_loss(scores, positive, ~positive), whole)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=20))
def test_numbers_of_a_descending_order_compare_as_the_scores_do_the_other_way_round(scores):
    given_scores = np.array([*scores, 0.0, -0.0], np.float32)
    found = descending(given_scores)
    for one in (np.less, np.equal):
        np.testing.assert_array_equal(
            one(found[:, None], found), one(given_scores[None, :], given_scores[:, None])
        )
    assert (found >= -(2**31)).all()
    assert (found < 2**31).all()
