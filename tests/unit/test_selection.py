import numpy as np
import pytest

from coterie.data import SyntheticSpec, generate, leave_last_out
from coterie.evaluation import LeaveOneOut, from_table, headline
from coterie.evaluation.leave_one_out import CHOOSE_BY
from coterie.evaluation.selection import Selection, best_of, better

DATA = generate(SyntheticSpec(users=30, items=80, interactions=500))


def holdout(validation: bool = True) -> LeaveOneOut:
    part = leave_last_out(DATA, validation=validation).part
    return LeaveOneOut.sampled(DATA.users, DATA.items, DATA.user, DATA.item, part, seed=0, count=40)


def better_for(held: np.ndarray, how_many: int, seed: int) -> np.ndarray:
    """Scores by chance in which the held-out item of the first so many users leads."""
    scores = np.random.default_rng(seed).random((30, 80))
    scores[np.arange(how_many), held[:how_many]] = 2
    return scores


def test_the_version_that_counts_is_the_best_on_validation_and_not_on_test() -> None:
    hold = holdout()
    versions = [better_for(hold.validation, n, seed) for seed, n in enumerate((2, 20, 10))]
    versions.append(better_for(hold.test, 30, 9))  # perfect on the test items
    selection = Selection(hold)
    for step, scores in enumerate(versions, start=1):
        selection.see(step, *from_table(scores), train_loss=0.5)
    assert selection.since_best == 2
    trained = selection.trained(secure_sum="clear")
    assert trained.history[trained.best]["step"] == 2
    assert [entry["train_loss"] for entry in trained.history] == [0.5] * 4
    assert trained.facts == {"secure_sum": "clear"}
    expected = hold.measure(*from_table(versions[1]))
    assert trained.metrics == headline(expected)
    assert trained.per_user is not None
    for name, values in expected.items():
        np.testing.assert_array_equal(trained.per_user[name], values)
        assert trained.users[name] == 30


def test_all_items_are_scored_for_the_best_so_far_only() -> None:
    hold = holdout()
    asked = []
    selection = Selection(hold)
    for step, count in enumerate((5, 1, 20)):
        scores = better_for(hold.validation, count, step)
        candidates, everything = from_table(scores)
        selection.see(step, candidates, lambda users, s=step, e=everything: asked.append(s) or e(users))
    assert asked == [0, 2]


def test_without_validation_data_the_last_version_counts() -> None:
    hold = holdout(validation=False)
    selection = Selection(hold)
    for step in range(3):
        selection.see(step, *from_table(better_for(hold.test, 30 - 10 * step, step)))
    trained = selection.trained()
    assert trained.best == 2
    assert CHOOSE_BY not in trained.metrics


def test_among_equal_versions_the_first_counts() -> None:
    history = [{"metrics": {"a": value}} for value in (0.1, 0.3, 0.3)]
    assert best_of(history, "a") == 1


def test_of_errors_the_lowest_counts_and_of_all_else_the_highest() -> None:
    for metric, best in (("validation_rmse", 2), ("mae", 2), ("validation_ndcg@10", 0)):
        history = [{"metrics": {metric: value}} for value in (0.9, 0.5, 0.3, 0.3)]
        assert best_of(history, metric) == best
        assert better(metric, 0.3, 0.9) is (best == 2)
        assert not better(metric, 0.3, 0.3)


def test_a_model_that_was_never_measured_has_no_outcome() -> None:
    with pytest.raises(ValueError, match="no version was measured"):
        Selection(holdout()).trained()
