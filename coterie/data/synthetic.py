"""Generator of seeded data sets with tastes, genres, popularity and sessions, as real rating logs have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.data.attributes import AttributeTable, beside, in_order, one_of
from coterie.data.dataset import Dataset
from coterie.errors import DataError

__all__ = ["SyntheticSpec", "generate", "generate_user_attributes"]

_GENRES_PER_ITEM = (0.5, 0.35, 0.15)
"""Probability that an item has one, two or three genres."""
_TASTE_CONCENTRATION = 0.3
"""Dirichlet parameter of a user's genres: below 1, most users care for a few."""
_GENRE_SKEW = 0.6
_POPULARITY_SKEW = 0.8
"""Exponents of the power laws over genres and over items."""
_POPULARITY_SHIFT = 10
"""Flattens the very head of the item law, as in rating logs."""
_CHOICE = 1.6
"""Weight of affinity in what a user consumes, against the logarithm of popularity."""
_ACTIVITY_SPREAD = 0.6
"""Standard deviation of the logarithm of a user's number of interactions."""
_REGIONS = ("north", "east", "south", "west")
_UNTOLD = 0.05
"""Share of the users whose crowd is missing."""
_LOWEST, _HIGHEST = 1, 5
_POSITIVE_SHARE, _POSITIVE = 0.7, 3
"""Share of the ratings that are positive, and the lowest rating that is."""
_RATING_TASTE, _RATING_USER, _RATING_ITEM, _RATING_NOISE = 1.0, 0.3, 0.5, 0.4
"""Approximate standard deviations of the parts of a rating, in stars."""
_FIRST_DAY = 1_577_836_800
"""First day of the interactions, 2020-01-01 UTC, Unix seconds."""
_DAY_S = 86_400
_SESSION_LENGTH = 8
_WITHIN_SESSION_S, _BETWEEN_SESSIONS_S = 60.0, 5.0 * _DAY_S
_USERS_AT_ONCE = 1024
"""Users whose affinities with all items are in memory together."""


@dataclass(frozen=True)
class SyntheticSpec:
    """The sizes and the seed of a generated data set.

    Parameters
    ----------
    users, items, interactions : int
        Exact numbers; the average user has at most half of the items.
    genres : int
        At most ``items``; every genre has an item.
    dim : int
        Length of the latent factors.
    seed : int
    name : str

    Raises
    ------
    DataError
        Numbers that do not go together.
    """

    users: int = 300
    items: int = 400
    interactions: int = 24_000
    genres: int = 6
    dim: int = 8
    seed: int = 0
    name: str = "synthetic"

    def __post_init__(self) -> None:
        for field in ("users", "items", "interactions", "genres", "dim"):
            if getattr(self, field) < 1:
                raise DataError(f"synthetic data with {getattr(self, field)} {field}; expected at least 1")
        if self.genres > self.items:
            raise DataError(f"{self.genres} genres for {self.items} items; expected at most one per item")
        if not self.users <= self.interactions <= self.users * self.items // 2:
            raise DataError(
                f"{self.interactions} interactions of {self.users} users with {self.items} items; "
                f"expected {self.users} to {self.users * self.items // 2}"
            )


def generate(spec: SyntheticSpec) -> Dataset:
    """Generate a data set; the same spec gives the same one.

    Genres have centroids in the latent space, an item lies near the mean of its one to three genres, a user
    near a mixture of a few. Users consume what suits them and what is popular, in sessions, and rate from 1
    to 5 by how it suits them, by their own mildness, by the item's quality, and by chance: 70% of the
    ratings are 3 or better. The rows are in order of time.

    Parameters
    ----------
    spec : SyntheticSpec

    Returns
    -------
    Dataset
        Data set with times, titles and genres; no pair twice.
    """
    rng = np.random.default_rng(spec.seed)
    item_genres, centroids, item_factor, taste = _world(spec, rng)
    user_factor = _unit(taste @ centroids + 0.35 * _unit(rng.normal(size=(spec.users, spec.dim))))
    popularity = -_POPULARITY_SKEW * np.log(rng.permutation(spec.items) + _POPULARITY_SHIFT)
    quality = _RATING_ITEM * rng.normal(size=spec.items)
    mildness = _RATING_USER * rng.normal(size=spec.users)
    counts = _activity(spec, rng)

    items, ratings = [], []
    for first in range(0, spec.users, _USERS_AT_ONCE):
        rows = slice(first, first + _USERS_AT_ONCE)
        # A cosine of `dim` dimensions has variance 1 / dim: this brings it near 1.
        affinity = np.sqrt(spec.dim) * (user_factor[rows] @ item_factor.T)
        chosen = _choices(affinity, popularity, counts[rows], rng)
        row = np.repeat(np.arange(len(affinity)), counts[rows])
        stars = _RATING_TASTE * affinity[row, chosen] + mildness[rows][row] + quality[chosen]
        items.append(chosen)
        ratings.append(stars + _RATING_NOISE * rng.normal(size=len(chosen)))
    user = np.repeat(np.arange(spec.users), counts).astype(np.int32)
    item = np.concatenate(items).astype(np.int32)
    stars = np.concatenate(ratings)
    # Half a star below is where rounding makes the lowest positive rating.
    stars += _POSITIVE - 0.5 - np.quantile(stars, 1 - _POSITIVE_SHARE)
    rating = np.clip(np.rint(stars), _LOWEST, _HIGHEST).astype(np.float32)
    time = _times(counts, rng)
    order = np.argsort(time, kind="stable")
    return Dataset(
        name=spec.name,
        users=_user_keys(spec),
        items=tuple(f"i{index + 1}" for index in range(spec.items)),
        user=user[order],
        item=item[order],
        rating=rating[order],
        time=time[order],
        genres=tuple(f"Genre {index + 1}" for index in range(spec.genres)),
        item_genres=item_genres,
        item_titles=tuple(f"Item {index + 1}" for index in range(spec.items)),
    )


def _user_keys(spec: SyntheticSpec) -> tuple[str, ...]:
    return tuple(f"u{index + 1}" for index in range(spec.users))


def generate_user_attributes(spec: SyntheticSpec, users: Sequence[str] | None = None) -> AttributeTable:
    """Generate attributes of the users of the data set that has the same spec.

    Parameters
    ----------
    spec : SyntheticSpec
    users : sequence of str, optional
        Keys of the users to return, in this order; by default all of the data set.

    Returns
    -------
    AttributeTable
        ``crowd: ...``, one for each genre: a user is in the crowd of a genre with the probability that its own taste
        gives the genre.  ``region: ...``, four that say nothing of taste.  About one in 20 users has told no
        crowd.
    """
    taste = _world(spec, np.random.default_rng(spec.seed))[3]
    # A generator of their own, so that attributes do not change the data set of a seed.
    rng = np.random.default_rng(np.random.SeedSequence(spec.seed, spawn_key=(1,)))
    crowd = (np.log(np.maximum(taste, 1e-12)) + rng.gumbel(size=taste.shape)).argmax(axis=1)
    crowd[rng.random(spec.users) < _UNTOLD] = -1
    region = rng.integers(0, len(_REGIONS), spec.users)
    crowds = [f"Genre {index + 1}" for index in range(spec.genres)]
    told = beside(one_of("crowd", crowds, crowd), one_of("region", _REGIONS, region))
    if users is None:
        return told
    return in_order(users, {key: row for row, key in enumerate(_user_keys(spec))}, told)


def _world(
    spec: SyntheticSpec, rng: np.random.Generator
) -> tuple[NDArray[np.bool_], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return genres of items (I, G), centroids of genres (G, d), factors of items (I, d), tastes of users (U, G)."""
    item_genres = _item_genres(spec, rng)
    centroids = _unit(rng.normal(size=(spec.genres, spec.dim)))
    item_factor = _unit(
        (item_genres @ centroids) / item_genres.sum(axis=1, keepdims=True)
        + 0.35 * _unit(rng.normal(size=(spec.items, spec.dim)))
    )
    taste = rng.dirichlet(np.full(spec.genres, _TASTE_CONCENTRATION), size=spec.users)
    return item_genres, centroids, item_factor, taste


def _item_genres(spec: SyntheticSpec, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Draw one to three genres per item, the first genres more often; (I, G)."""
    most = min(len(_GENRES_PER_ITEM), spec.genres)
    probability = np.array(_GENRES_PER_ITEM[:most]) / sum(_GENRES_PER_ITEM[:most])
    wanted = rng.choice(np.arange(1, most + 1), size=spec.items, p=probability)
    score = -_GENRE_SKEW * np.log(np.arange(1, spec.genres + 1)) + rng.gumbel(size=(spec.items, spec.genres))
    # One item of each genre is certain.
    score[rng.permutation(spec.items)[: spec.genres], np.arange(spec.genres)] = np.inf
    rank = np.argsort(np.argsort(-score, axis=1), axis=1)
    return np.asarray(rank < wanted[:, None])


def _activity(spec: SyntheticSpec, rng: np.random.Generator) -> NDArray[np.int64]:
    """Divide the interactions among the users, log-normally; (U,), sums to ``spec.interactions``."""
    average = spec.interactions // spec.users
    low, high = max(1, average // 4), spec.items
    weight = rng.lognormal(sigma=_ACTIVITY_SPREAD, size=spec.users)
    spare = spec.interactions - low * spec.users
    counts: NDArray[np.int64] = np.minimum(low + np.floor(weight / weight.sum() * spare), high).astype(
        np.int64
    )
    while (short := spec.interactions - int(counts.sum())) > 0:
        room = np.flatnonzero(counts < high)
        counts[rng.choice(room, size=min(short, len(room)), replace=False)] += 1
    return counts


def _choices(
    affinity: NDArray[np.float64],
    popularity: NDArray[np.float64],
    counts: NDArray[np.int64],
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Draw ``counts[u]`` different items per user, in the order in which they are consumed.

    The largest of ``log weight + Gumbel noise`` are a weighted sample without replacement.
    """
    key = popularity + _CHOICE * affinity + rng.gumbel(size=affinity.shape)
    best = np.argsort(-key, axis=1)
    taken = np.arange(affinity.shape[1]) < counts[:, None]
    # The order of the keys is the order of preference; a history is not, so it is shuffled.
    shuffled = np.argsort(np.where(taken, rng.random(affinity.shape), np.inf), axis=1)
    return np.asarray(np.take_along_axis(best, shuffled, axis=1)[taken])


def _times(counts: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw seconds, increasing within each user, in sessions; (N,), users one after the other."""
    total = int(counts.sum())
    between = rng.random(total) < 1 / _SESSION_LENGTH
    pause = rng.exponential(np.where(between, _BETWEEN_SESSIONS_S, _WITHIN_SESSION_S))
    start = _FIRST_DAY + rng.uniform(0, 365 * _DAY_S, size=len(counts))
    elapsed = np.cumsum(1 + np.floor(pause))
    first = np.cumsum(counts) - counts
    return np.asarray(np.floor(np.repeat(start - elapsed[first], counts) + elapsed), dtype=np.int64)


def _unit(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))
