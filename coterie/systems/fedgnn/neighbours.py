"""What users of a host know of their anonymous neighbours, and when they publish and ask.

A user publishes at most ``tags`` of its items, chosen once by its own number, with its embedding: in the pass before
``neighbours_after`` for the first time, then every ``refresh`` passes.  It asks in the pass after each publication,
when everybody who takes part has published.  With ``rotate_every`` the graph key is replaced before the first
publication after so many passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.crypto.graph_key import GraphTerms
from coterie.rounds.sides import Arrays
from coterie.systems.fedgnn.settings import FedGnnSettings

__all__ = ["KnownNeighbours", "published_items"]

_SHARE = 9
"""First element of the key of the draw of published items; local steps have lower ones."""

_COUNT, _MET, _PUBLISHED = range(3)
"""Columns of ``met``: neighbours that a user has; one more than the pass in which it last asked and last published."""


def published_items(
    items: NDArray[np.integer], key: int, n_items: int, most: int, seed: int
) -> NDArray[np.integer]:
    """Return the items that a user publishes, ascending; an item more changes at most one of them.

    Parameters
    ----------
    items : ndarray of int
        Items that the user rated.
    key : int
        The user's own number.
    n_items, most : int
        Items of the catalogue, and most items that are published.
    seed : int
        Seed of the run.
    """
    if len(items) <= most:
        return np.sort(items)
    order = np.random.default_rng(np.random.SeedSequence(int(key), spawn_key=(_SHARE, seed))).random(n_items)
    chosen: NDArray[np.integer] = np.sort(items[np.argsort(order[items], kind="stable")[:most]])
    return chosen


class KnownNeighbours:
    """Neighbours of a host's users, in private arrays that the host keeps.

    Parameters
    ----------
    settings : FedGnnSettings
    arrays : dict
        Private arrays, changed in place: ``neighbours``, float32 (users, M, K), and ``met``, int32 (users, 3).
    """

    def __init__(self, settings: FedGnnSettings, arrays: Arrays) -> None:
        self._settings = settings
        self._embeddings = arrays["neighbours"]
        self._met = arrays["met"]

    @staticmethod
    def initial(settings: FedGnnSettings, users: int) -> Arrays:
        """Return the arrays of users who have not asked yet."""
        shape = users, settings.neighbours, settings.factors
        return {"neighbours": np.zeros(shape, np.float32), "met": np.zeros((users, 3), np.int32)}

    @property
    def terms(self) -> GraphTerms:
        """Terms of the run's graph."""
        return self._settings.graph_terms

    def of(self, index: NDArray[np.intp]) -> tuple[NDArray[np.float32], NDArray[np.integer]]:
        """Return embeddings of some users' neighbours, and how many each has."""
        return self._embeddings[index], self._met[index, _COUNT]

    def due(self, pass_number: int, users: Sequence[int]) -> list[int]:
        """Return which of some users have to publish in a pass."""
        last = self._last(pass_number, self._settings.neighbours_after - 1)
        return [user for user in users if self._met[user, _PUBLISHED] <= last]

    def curious(self, pass_number: int, users: Sequence[int]) -> list[int]:
        """Return which of some users, all of whom have published, have to ask in a pass."""
        last = self._last(pass_number, self._settings.neighbours_after)
        return [user for user in users if self._met[user, _PUBLISHED] > 0 and self._met[user, _MET] <= last]

    def epoch(self, pass_number: int) -> int:
        """Return the lowest epoch of the graph key in a pass, from 1."""
        every, refresh = self._settings.rotate_every, self._settings.refresh
        published = max(pass_number - (self._settings.neighbours_after - 1), 0) // refresh
        return 1 if not every else 1 + published * refresh // every

    def _last(self, pass_number: int, first: int) -> int:
        """Return the last pass up to this one in which something is due that is due first in another; else -1."""
        if pass_number < first:
            return -1
        return pass_number - (pass_number - first) % self._settings.refresh

    def published(self, pass_number: int, user: int) -> None:
        """Note that a user has published."""
        self._met[user, _PUBLISHED] = pass_number + 1

    def take(self, pass_number: int, user: int, found: Sequence[NDArray[np.float32]]) -> None:
        """Note what a user was answered; in the order of their bytes, neighbours are the same in every run."""
        kept = sorted(found, key=lambda one: one.tobytes())[: self._settings.neighbours]
        self._embeddings[user] = 0
        for place, embedding in enumerate(kept):
            self._embeddings[user, place] = embedding
        self._met[user, _COUNT], self._met[user, _MET] = len(kept), pass_number + 1

    def has_any(self, index: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return whether each of some users has a neighbour, 1 or 0."""
        found: NDArray[np.float64] = (self._met[index, _COUNT] > 0).astype(np.float64)
        return found

    def current(self, passes: int, index: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return whether each of some users was answered when it last should have been, after some passes; 1 or 0."""
        last = self._last(passes - 1, self._settings.neighbours_after)
        found: NDArray[np.float64] = (self._met[index, _MET] > last).astype(np.float64)
        return found
