import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.evaluation import paired_difference


def rows(seeds: int, users: int, shift: float, rng: np.random.Generator) -> tuple[list, list]:
    first = [rng.normal(size=users) for _ in range(seeds)]
    return first, [one + shift + 0.3 * rng.normal(size=users) for one in first]


def test_the_interval_over_users_is_that_of_the_t_distribution_on_plain_data() -> None:
    from scipy import stats

    first, second = rows(1, 800, 0.05, np.random.default_rng(1))
    found = paired_difference(first, second)
    low, high = stats.ttest_1samp(first[0] - second[0], 0).confidence_interval(0.95)
    assert found.mean == pytest.approx((first[0] - second[0]).mean())
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.001)


def test_a_user_counts_once_however_many_seeds_repeat_it() -> None:
    # Five copies of one seed are no more evidence about other users than one.
    first, second = rows(1, 400, 0.1, np.random.default_rng(2))
    once, often = paired_difference(first, second), paired_difference(first * 5, second * 5)
    assert often.mean == pytest.approx(once.mean)
    assert often.high - often.low == pytest.approx(once.high - once.low, rel=0.05)


def test_seeds_that_differ_widen_the_interval_with_seeds_only() -> None:
    rng = np.random.default_rng(3)
    first, second = rows(4, 500, 0.0, rng)
    second = [one + shift for one, shift in zip(second, (-0.4, -0.2, 0.2, 0.4), strict=True)]
    found = paired_difference(first, second)
    assert found.high_with_seeds - found.low_with_seeds > 3 * (found.high - found.low)
    assert found.low_with_seeds < found.low < found.mean < found.high < found.high_with_seeds


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(4)
    covered = 0
    for trial in range(200):
        first, second = rows(2, 60, 0.2, rng)
        found = paired_difference(first, second, resamples=400, confidence=0.9, seed=trial)
        covered += found.low <= -0.2 <= found.high
    assert 0.83 <= covered / 200 <= 0.96


def test_the_same_seed_gives_the_same_interval() -> None:
    first, second = rows(2, 50, 0.1, np.random.default_rng(5))
    assert paired_difference(first, second, seed=7) == paired_difference(first, second, seed=7)
    assert paired_difference(first, second, seed=7).low != paired_difference(first, second, seed=8).low


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 12))
def test_what_one_row_lacks_is_not_compared(seed: int, seeds: int, users: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = rows(seeds, users, 0.5, rng)
    for one in (*first, *second):
        one[rng.random(users) < 0.3] = np.nan
    pairs = np.array(first) - np.array(second)
    if np.isnan(pairs).all():
        with pytest.raises(ValueError, match="no user has a value in both rows"):
            paired_difference(first, second, resamples=50)
        return
    found = paired_difference(first, second, resamples=50)
    assert found.mean == pytest.approx(np.nanmean(pairs))
    assert (found.users, found.seeds) == (int((~np.isnan(pairs)).any(axis=0).sum()), seeds)
    assert found.low <= found.high


def test_resamples_are_the_same_in_one_piece_or_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = rows(3, 40, 0.1, np.random.default_rng(6))
    monkeypatch.setattr("coterie.evaluation.paired._ELEMENTS_AT_ONCE", 40 * 7)
    found = paired_difference(first, second, resamples=2000)
    monkeypatch.undo()
    whole = paired_difference(first, second, resamples=2000)
    # The draws interleave differently, so only the statistics agree.
    assert (found.low, found.high) == pytest.approx((whole.low, whole.high), abs=0.02)


@pytest.mark.parametrize(
    ("first", "second", "options", "message"),
    [
        ([], [], {}, "one array"),
        ([np.zeros(3)], [np.zeros(4)], {}, r"\(3,\).*\(4,\)"),
        ([np.zeros(3)], [np.zeros(3)] * 2, {}, "expected the same"),
        ([np.zeros(3)], [np.zeros(3)], {"confidence": 1.0}, "confidence 1.0"),
        ([np.zeros(3)], [np.zeros(3)], {"resamples": 0}, "resamples 0"),
    ],
)
def test_rows_that_do_not_fit_each_other_are_refused(
    first: list, second: list, options: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        paired_difference(first, second, **options)
