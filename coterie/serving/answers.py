"""Answers to requests for recommendations, whichever protocol they came by.

A request's vector or history is in memory while it is answered, and nowhere else: nothing is stored or logged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.data.own_ratings import SHOWN, OwnRatings
from coterie.errors import ConfigError, CoterieError, DataError
from coterie.evaluation.unseen import best_unseen
from coterie.launch.saved_model import SavedModel

__all__ = ["ModelAnswers", "ServedUser", "ServingLimits", "SuggestedItems"]


_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class ServingLimits:
    """Limits of one request.

    Attributes
    ----------
    users, items, history : int
        Most users of a request, items of an answer, and items of a history.
    request_bytes : int
        Most bytes of a request.
    """

    users: int = 256
    items: int = 1000
    history: int = 10_000
    request_bytes: int = 4 << 20


@dataclass(frozen=True)
class ServedUser:
    """One user of a request, with a vector or a history.

    Attributes
    ----------
    vector : sequence of float, optional
    history : sequence of (str, float or None), optional
        Items with their ratings, None where there is none.
    exclude : sequence of str
        Items that are not recommended, beside those of the history.
    """

    vector: Sequence[float] | None = None
    history: Sequence[tuple[str, float | None]] | None = None
    exclude: Sequence[str] = ()


@dataclass(frozen=True)
class SuggestedItems:
    """The best items for one user, best first; ``unknown`` are items of the history that the model does not have."""

    items: tuple[str, ...]
    scores: tuple[float, ...]
    unknown: tuple[str, ...] = ()


class ModelAnswers:
    """Answers by one model; used from several threads at once.

    Parameters
    ----------
    model : SavedModel
    limits : ServingLimits, optional
    """

    def __init__(self, model: SavedModel, limits: ServingLimits | None = None) -> None:
        self.model = model
        self.limits = limits or ServingLimits()
        self.vector_length = model.vector_length
        self.ratings = model.rating_range
        self._place = {key: at for at, key in enumerate(model.items)}

    def recommend(self, users: Sequence[ServedUser], k: int = 10) -> list[SuggestedItems]:
        """Return the ``k`` best items for each of some users.

        Raises
        ------
        DataError
            A request over a limit, or one of a user that cannot be answered; the message names the user by place.
        ConfigError
            A vector or a history, where the model's system takes none.
        """
        self._check(users, k)
        known: dict[int, OwnRatings] = {}
        vectors: dict[int, Sequence[float]] = {}
        for place, user in enumerate(users):
            try:
                if (user.vector is None) == (user.history is None):
                    raise DataError(
                        "both vector and history; expected one of them"
                        if user.vector is not None
                        else "neither vector nor history; expected one of them"
                    )
                if user.vector is not None:
                    vectors[place] = self._vector(user.vector)
                else:
                    known[place] = self._history(user.history or ())
            except CoterieError as error:
                # What the model has not at all, and what a request got wrong, are told apart.
                kind = ConfigError if isinstance(error, ConfigError) else DataError
                raise kind(f"user {place}: {error.message}", hint=error.hint) from error
        scores: dict[int, NDArray[np.float32]] = {}
        # Sums of numbers that are finite each may be infinite.
        with np.errstate(over="ignore", invalid="ignore"):
            if vectors:
                table = np.array(list(vectors.values()), np.float32)
                scores |= zip(vectors, self.model.scores_of_vectors(table), strict=True)
            if known:
                scores |= zip(known, self.model.scores_of_histories(list(known.values())), strict=True)
        for place in sorted(scores):
            if not np.isfinite(scores[place]).all():
                what = "vector" if place in vectors else "history"
                raise DataError(
                    f"user {place}: values of the {what} are so large that scores are no finite numbers"
                )
        return [self._answer(user, scores[place], known.get(place), k) for place, user in enumerate(users)]

    def _check(self, users: Sequence[ServedUser], k: int) -> None:
        limits = self.limits
        if not 1 <= len(users) <= limits.users:
            raise DataError(f"{len(users)} users in one request; expected 1 to {limits.users}")
        if not 1 <= k <= limits.items:
            raise DataError(f"k is {k}; expected 1 to {limits.items}")

    def _vector(self, vector: Sequence[float]) -> Sequence[float]:
        if not self.vector_length:
            raise ConfigError(
                f"users of {self.model.system} keep no vector: scores follow from a user's items",
                hint="send a history" if self.model.takes_histories else None,
            )
        if len(vector) != self.vector_length:
            raise DataError(f"a vector of {len(vector)} values; expected {self.vector_length}")
        # As 64 bits first: a conversion to 32 that overflows warns.
        if not (np.abs(np.array(vector, np.float64)) <= _LARGEST).all():
            raise DataError("the vector holds a value that is no finite number of 32 bits")
        return vector

    def _history(self, history: Sequence[tuple[str, float | None]]) -> OwnRatings:
        self.model.require_histories()
        if len(history) > self.limits.history:
            raise DataError(f"a history of {len(history)} items; expected at most {self.limits.history}")
        last: dict[int, float] = {}
        unknown: dict[str, None] = {}
        for item, rating in history:
            if rating is not None:
                self._check_rating(item, rating)
            if (place := self._place.get(item)) is None:
                unknown[item] = None
            else:
                # The last one of an item counts.
                last[place] = math.nan if rating is None else float(rating)
        if not last:
            named = ", ".join(map(repr, list(unknown)[:SHOWN])) or "none"
            raise DataError(
                f"no item of the history is one of the model's {len(self._place)}: {named}",
                hint=f"items are named as {', '.join(map(repr, self.model.items[:3]))}",
            )
        item_of = np.array(sorted(last), np.int64)
        found = OwnRatings(item_of, np.array([last[one] for one in item_of.tolist()]), tuple(unknown), 0)
        if self.ratings is not None and np.isnan(found.rating).all():
            low, high = self.ratings
            raise DataError(
                "the history has no rating of an item that is known; this model learns from ratings",
                hint=f"ratings from {low:g} to {high:g}",
            )
        return found

    def _check_rating(self, item: str, rating: float) -> None:
        low, high = self.ratings or (-math.inf, math.inf)
        if not abs(rating) <= _LARGEST or not low <= rating <= high:
            expected = "a finite number of 32 bits" if self.ratings is None else f"{low:g} to {high:g}"
            raise DataError(f"rating {rating:g} of item {item!r}; expected {expected}")

    def _answer(
        self, user: ServedUser, scores: NDArray[np.float32], known: OwnRatings | None, k: int
    ) -> SuggestedItems:
        seen = {self._place[item] for item in user.exclude if item in self._place}
        if known is not None:
            seen |= set(known.item.tolist())
        items, values = best_unseen(self.model.items, scores, seen, k)
        return SuggestedItems(tuple(items), tuple(values), () if known is None else known.unknown[:SHOWN])
