"""A rating data set in memory: dense indices, parallel arrays, titles and genres of items."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import DataError

__all__ = ["UNKNOWN_GENRE", "Dataset", "describe"]

UNKNOWN_GENRE = "unknown"
"""Genre of an item for which the source names none, so that every item has an owner."""

_DAY_S = 86_400
_HISTOGRAM_VALUES = 20
"""Most distinct ratings for which the histogram counts values instead of ranges."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set: interactions of ``U`` users with ``I`` items, one row each, no pair twice.

    Parameters
    ----------
    name : str
        Short name, for reports.
    users, items : tuple of str
        External keys; position is the dense index that the arrays below use.
    user, item : ndarray of int32, shape (N,)
        Dense indices of each interaction.
    rating : ndarray of float32, shape (N,)
        Finite; 1 throughout where the source has no ratings.
    time : ndarray of int64, shape (N,), or None
        Seconds since 1970-01-01 UTC.
    genres : tuple of str
        Names of the columns of ``item_genres``.
    item_genres : ndarray of bool, shape (I, G), or None
    item_titles : tuple of str, length I, or None
    notes : tuple of str
        Changes and assumptions made by reading, one sentence each.

    Raises
    ------
    DataError
        An array of the wrong type or length, an index out of range, a rating that is not finite, a key or a
        (user, item) pair that occurs twice.
    """

    name: str
    users: tuple[str, ...]
    items: tuple[str, ...]
    user: NDArray[np.int32]
    item: NDArray[np.int32]
    rating: NDArray[np.float32]
    time: NDArray[np.int64] | None = None
    genres: tuple[str, ...] = ()
    item_genres: NDArray[np.bool_] | None = None
    item_titles: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_arrays()
        self._check_keys("users", self.users, "user", self.user)
        self._check_keys("items", self.items, "item", self.item)
        finite = np.isfinite(self.rating)
        if not finite.all():
            row = int(np.argmin(finite))
            raise DataError(f"{self.name}: rating[{row}] is {self.rating[row]}; expected a finite number")
        self._check_pairs()
        self._check_item_facts()

    def __len__(self) -> int:
        """Return the number of interactions."""
        return len(self.user)

    def positive(self, threshold: float) -> NDArray[np.bool_]:
        """Mark the interactions that count as positive: rated ``threshold`` or better.

        Parameters
        ----------
        threshold : float
            Lowest positive rating (3 in DRIFT's experiments, 6.1.2).

        Returns
        -------
        ndarray of bool, shape (N,)
        """
        return np.asarray(self.rating >= threshold)

    def _check_arrays(self) -> None:
        expected: dict[str, tuple[NDArray[Any], type]] = {
            "user": (self.user, np.int32),
            "item": (self.item, np.int32),
            "rating": (self.rating, np.float32),
        }
        if self.time is not None:
            expected["time"] = (self.time, np.int64)
        for name, (array, dtype) in expected.items():
            if array.dtype != dtype or array.shape != (len(self.user),):
                raise DataError(
                    f"{self.name}: {name} is {array.dtype} of shape {array.shape}; "
                    f"expected {np.dtype(dtype)} of shape ({len(self.user)},)"
                )

    def _check_keys(
        self, plural: str, keys: tuple[str, ...], singular: str, index: NDArray[np.int32]
    ) -> None:
        if len(set(keys)) != len(keys):
            raise DataError(f"{self.name}: {plural} holds a key twice; expected every key once")
        if len(index) and (index.min() < 0 or index.max() >= len(keys)):
            wrong = int(index.min() if index.min() < 0 else index.max())
            raise DataError(f"{self.name}: {singular} index {wrong}; expected 0 to {len(keys) - 1}")

    def _check_pairs(self) -> None:
        pairs = np.sort(self.user.astype(np.int64) * max(len(self.items), 1) + self.item)
        repeated = pairs[1:][pairs[1:] == pairs[:-1]]
        if len(repeated):
            user, item = divmod(int(repeated[0]), len(self.items))
            raise DataError(
                f"{self.name}: user {self.users[user]!r} and item {self.items[item]!r} occur together in two "
                "rows; expected every pair once"
            )

    def _check_item_facts(self) -> None:
        shape = (len(self.items), len(self.genres))
        if self.item_genres is None:
            if self.genres:
                raise DataError(f"{self.name}: {len(self.genres)} genres are named but item_genres is None")
        elif self.item_genres.dtype != np.bool_ or self.item_genres.shape != shape:
            raise DataError(
                f"{self.name}: item_genres is {self.item_genres.dtype} of shape {self.item_genres.shape}; "
                f"expected bool of shape {shape}"
            )
        if self.item_titles is not None and len(self.item_titles) != len(self.items):
            raise DataError(
                f"{self.name}: {len(self.item_titles)} titles for {len(self.items)} items; expected one each"
            )


def describe(dataset: Dataset) -> dict[str, Any]:
    """Summarise a data set, as ``coterie data describe`` prints it.

    Parameters
    ----------
    dataset : Dataset

    Returns
    -------
    dict
        JSON-ready. ``name``, ``users``, ``items``, ``interactions``; ``sparsity``, the share of (user, item)
        pairs without an interaction; ``time_span``, None or ``first``/``last`` (ISO 8601, UTC) and ``days``;
        ``ratings``, a histogram; ``genres``, interactions per genre; ``missing``, what the data cannot do and
        why; ``notes``.
    """
    pairs = len(dataset.users) * len(dataset.items)
    return {
        "name": dataset.name,
        "users": len(dataset.users),
        "items": len(dataset.items),
        "interactions": len(dataset),
        "sparsity": 1.0 - len(dataset) / pairs if pairs else 1.0,
        "time_span": _time_span(dataset),
        "ratings": _rating_histogram(dataset.rating),
        "genres": _genre_counts(dataset),
        "missing": _missing(dataset),
        "notes": list(dataset.notes),
    }


def _time_span(dataset: Dataset) -> dict[str, Any] | None:
    if dataset.time is None or not len(dataset):
        return None
    first, last = int(dataset.time.min()), int(dataset.time.max())
    return {
        "first": f"{np.datetime64(first, 's')}Z",
        "last": f"{np.datetime64(last, 's')}Z",
        "days": round((last - first) / _DAY_S, 1),
    }


def _rating_histogram(rating: NDArray[np.float32]) -> dict[str, int]:
    values, counts = np.unique(rating, return_counts=True)
    if len(values) <= _HISTOGRAM_VALUES:
        return {f"{value:g}": int(count) for value, count in zip(values, counts, strict=True)}
    binned, edges = np.histogram(rating, bins=_HISTOGRAM_VALUES // 2)
    return {
        f"{low:g} to {high:g}": int(count) for low, high, count in zip(edges, edges[1:], binned, strict=False)
    }


def _genre_counts(dataset: Dataset) -> dict[str, int]:
    if dataset.item_genres is None:
        return {}
    per_item = np.bincount(dataset.item, minlength=len(dataset.items))
    return dict(zip(dataset.genres, (per_item @ dataset.item_genres).tolist(), strict=True))


def _missing(dataset: Dataset) -> list[str]:
    missing = []
    if dataset.time is None:
        missing.append("no timestamps: no temporal split; a random one is possible")
    if dataset.item_genres is None:
        missing.append("no genres: no owner per genre; items can be dealt to a given number of owners")
    if dataset.item_titles is None:
        missing.append("no titles: items are shown by their keys")
    if len(dataset) and dataset.rating.min() == dataset.rating.max():
        missing.append("all ratings are equal: no negative interactions, so no blocks for DRIFT")
    if len(dataset) and (lowest := float(dataset.rating.min())) < 0:
        below = float(np.mean(dataset.rating < 0))
        missing.append(
            f"no positive scale: {below:.1%} of the ratings are below 0, the lowest {lowest:g}; data.rating_range "
            "declares the range that is meant, and data.positive_from what counts as a like"
        )
    return missing
