"""Unseen items that a data owner draws for its blocks, so that liked items are compared with items of no record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.systems.drift.blocks import Block, Stream
from coterie.systems.drift.settings import DriftSettings

__all__ = ["UnseenItems", "drawing"]

_UNSEEN = 8
"""First element of the key under which unseen items are drawn; other draws of DRIFT have lower ones."""

_TRIES = 8
"""Draws from a whole pool, of which what the user has seen is rejected, before the unseen items are listed."""


class UnseenItems:
    """Unseen items of one owner's users, drawn anew for each block and pass.

    A draw depends on the seed, the owner, the user, the pass, the block and the user's records that have come, and on
    nothing else: neither on the order of blocks nor on which of them are drawn in one call.

    Parameters
    ----------
    settings : DriftSettings
    seed : int
        Seed of the run, at least 0.
    owner : int
        Slot of the owner, at least 0; that of a central model is 0.
    """

    def __init__(self, settings: DriftSettings, seed: int, owner: int) -> None:
        self._each = settings.unseen_each if settings.pairs_unseen else 0
        self._seed = seed
        self._owner = owner
        self._seen: dict[int, set[int]] = {}

    def see(self, user: int, items: Iterable[int]) -> None:
        """Take items of a user's records, which are not drawn for it from now on; those of its blocks among them."""
        if self._each:
            self._seen.setdefault(user, set()).update(items)

    def recorded(self, user: int, items: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return, bool (n,), of which items the user has a record; all of them where nothing is drawn."""
        known = self._seen.get(user, set())
        return np.array([not self._each or item in known for item in items.tolist()], bool)

    def draw(self, block: Block, pool: NDArray[np.integer], epoch: int) -> Block:
        """Return a block with ``unseen_each`` items for each positive; as it is where the user has seen the whole pool.

        Parameters
        ----------
        block : Block
        pool : ndarray of integers, shape (n,)
            Items to draw from, at least one and none twice: the owner's, or all.
        epoch : int
            Number of the pass, from 1.
        """
        if not self._each:
            return block
        # A user's blocks at an owner differ in their first positive, unless the item came twice.
        key = (_UNSEEN, self._owner, epoch, block.user, block.positives[0])
        rng = np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=key))
        known, needed = self._seen.get(block.user, set()), self._each * len(block.positives)
        found: list[int] = []
        for _ in range(_TRIES):
            drawn = pool[rng.integers(len(pool), size=needed - len(found))].tolist()
            found += [item for item in drawn if item not in known]
            if len(found) == needed:
                return block._replace(unseen=tuple(found))
        # The user has seen most of the pool, so that it pays to list the others.
        others = [item for item in pool.tolist() if item not in known]
        if not others:
            return block
        found += [others[place] for place in rng.integers(len(others), size=needed - len(found)).tolist()]
        return block._replace(unseen=tuple(found))


def drawing(
    streams: Sequence[Stream],
    n_items: int,
    settings: DriftSettings,
    seed: int,
    holdings: Sequence[NDArray[np.integer]] | None = None,
) -> list[Callable[[Block, int], Block]]:
    """Return for each owner of a run in one process the function that draws a block's unseen items in a pass.

    Parameters
    ----------
    streams : sequence of Stream
        One per owner; every record in them counts as seen from the first pass on.
    n_items : int
    settings : DriftSettings
    seed : int
    holdings : sequence of ndarray of integers, optional
        Items of each owner; unless given, those in its stream.

    Returns
    -------
    list of callable
        ``(block, epoch) -> Block``.
    """
    return [
        _of(stream, settings, seed, owner, np.arange(n_items) if settings.unseen == "all" else items)
        for owner, (stream, items) in enumerate(
            zip(streams, holdings or [np.unique(one.item) for one in streams], strict=True)
        )
    ]


def _of(
    stream: Stream, settings: DriftSettings, seed: int, owner: int, pool: NDArray[np.integer]
) -> Callable[[Block, int], Block]:
    unseen = UnseenItems(settings, seed, owner)
    for user, item in zip(stream.user.tolist(), stream.item.tolist(), strict=True):
        unseen.see(user, (item,))
    return lambda block, epoch: unseen.draw(block, pool, epoch)
