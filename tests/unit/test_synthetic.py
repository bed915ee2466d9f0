from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data import Dataset, SyntheticSpec, generate, temporal
from coterie.errors import DataError
from coterie.evaluation import headline, popularity, random_scores, ranking


def bayesian_ranking(data: Dataset, train: np.ndarray, epochs: int = 15) -> np.ndarray:
    """Learn a factor model by pairs of a positive and a random item; the scores (U, I)."""
    rng = np.random.default_rng(0)
    users = rng.normal(0, 0.1, (len(data.users), 16))
    items = rng.normal(0, 0.1, (len(data.items), 16))
    positives = np.flatnonzero(train & data.positive(3))
    for _ in range(epochs):
        for batch in np.array_split(rng.permutation(positives), max(1, len(positives) // 256)):
            u, i, j = data.user[batch], data.item[batch], rng.integers(0, len(items), len(batch))
            difference = items[i] - items[j]
            doubt = 1 / (1 + np.exp((users[u] * difference).sum(axis=1, keepdims=True)))
            step = 0.1 * doubt * users[u]
            np.add.at(users, u, 0.1 * doubt * difference)
            np.add.at(items, i, step)
            np.add.at(items, j, -step)
    return np.asarray(users @ items.T)


def test_learning_beats_popularity_and_popularity_beats_chance_over_unseen_items() -> None:
    data = generate(SyntheticSpec())
    shape = (len(data.users), len(data.items))
    split = temporal(data)
    train = ~split.test
    candidates = np.ones(shape, bool)
    candidates[data.user[train], data.item[train]] = False
    relevant = np.zeros(shape, bool)
    hits = split.test & data.positive(3)
    relevant[data.user[hits], data.item[hits]] = True

    def ndcg(scores: np.ndarray) -> float:
        return headline(ranking(np.broadcast_to(scores, shape), relevant, candidates))["ndcg@10"]

    chance = ndcg(random_scores(*shape, seed=0))
    popular = ndcg(popularity(data.item[train], data.positive(3)[train], shape[1]))
    learned = ndcg(bayesian_ranking(data, train))
    assert popular > 2 * chance
    assert learned > 2 * popular


@pytest.mark.parametrize("seed", range(3))
def test_seven_ratings_in_ten_are_positive_and_all_five_stars_occur(seed: int) -> None:
    data = generate(SyntheticSpec(seed=seed))
    assert data.positive(3).mean() == pytest.approx(0.7, abs=0.001)
    assert np.unique(data.rating).tolist() == [1, 2, 3, 4, 5]


def test_the_same_spec_gives_the_same_data_and_another_seed_other_data() -> None:
    one, two, other = (generate(SyntheticSpec(seed=seed)) for seed in (3, 3, 4))
    assert one.time is not None
    assert two.time is not None
    for left, right in (
        (one.user, two.user),
        (one.item, two.item),
        (one.rating, two.rating),
        (one.time, two.time),
    ):
        np.testing.assert_array_equal(left, right)
    assert not np.array_equal(one.item, other.item)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_spec_yields_exactly_what_it_asks_for(data: st.DataObject) -> None:
    users = data.draw(st.integers(1, 40))
    items = data.draw(st.integers(2, 60))
    spec = SyntheticSpec(
        users=users,
        items=items,
        interactions=data.draw(st.integers(users, users * items // 2)),
        genres=data.draw(st.integers(1, min(items, 8))),
        dim=data.draw(st.integers(1, 9)),
        seed=data.draw(st.integers(0, 2**32)),
    )
    made = generate(spec)  # a repeated pair would be refused by Dataset
    assert (len(made.users), len(made.items), len(made)) == (users, items, spec.interactions)
    assert np.bincount(made.user, minlength=users).min() >= 1
    assert set(np.unique(made.rating)) <= {1, 2, 3, 4, 5}
    assert made.item_genres is not None
    per_item = made.item_genres.sum(axis=1)
    assert per_item.min() >= 1
    assert per_item.max() <= 3
    assert made.item_genres.any(axis=0).all()
    assert made.time is not None
    assert (np.diff(made.time) >= 0).all()


def test_popularity_has_a_long_tail() -> None:
    counts = np.sort(np.bincount(generate(SyntheticSpec()).item))[::-1]
    assert counts[:40].sum() > 1.8 * counts.sum() / 10


def test_a_user_interacts_in_sessions() -> None:
    data = generate(SyntheticSpec())
    assert data.time is not None
    order = np.lexsort((data.time, data.user))
    gaps = np.diff(data.time[order])[np.diff(data.user[order]) == 0]
    assert (gaps > 0).all()
    assert 0.8 < (gaps < 3600).mean() < 0.95
    assert (gaps > 86_400).mean() > 0.05


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"users": 0}, "0 users; expected at least 1"),
        ({"genres": 401}, "401 genres for 400 items"),
        ({"interactions": 299}, "expected 300 to 60000"),
        ({"interactions": 60_001}, "expected 300 to 60000"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        SyntheticSpec(**change)
