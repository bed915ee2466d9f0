"""Blocks of interactions: items that one user passed over, then items that it liked (DRIFT, 3.3, Alg. 2)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Block", "BlockBuilder", "Stream"]


class Block(NamedTuple):
    """Complete block of one user; both parts hold item indices in the order of the interactions.

    Parameters
    ----------
    user : int
    negatives : tuple of int
        The paper's eta, at least one unless unseen items are drawn too. An item that came twice is there twice.
    positives : tuple of int
        The paper's Pi, at least one.
    unseen : tuple of int
        Unseen items drawn for one pass (`coterie.systems.drift.unseen`), equally many for each positive and in the
        order of the positives; not in the paper.
    """

    user: int
    negatives: tuple[int, ...]
    positives: tuple[int, ...]
    unseen: tuple[int, ...] = ()


class Stream(NamedTuple):
    """Interactions in the order in which one owner receives them.

    Parameters
    ----------
    user : ndarray of int32, shape (N,)
    item : ndarray of int32, shape (N,)
    positive : ndarray of bool, shape (N,)
    """

    user: NDArray[np.int32]
    item: NDArray[np.int32]
    positive: NDArray[np.bool_]


class BlockBuilder:
    """Builds one owner's blocks, for all its users at once (Alg. 2).

    Blocks depend on the sequence of interactions alone: the same sequence gives the same blocks, however it is
    cut into calls.

    Parameters
    ----------
    keep_all : bool
        Whether blocks without a negative are kept, because their positives are paired with unseen items.

    Attributes
    ----------
    dropped : int
        Blocks that were completed without a negative, because the user's first interaction was positive, and not
        kept. They have no pair to learn from.
    """

    def __init__(self, *, keep_all: bool = False) -> None:
        self.dropped = 0
        self._keep_all = keep_all
        # (eta, Pi) of each user's open block; the keys stay, in order of first appearance.
        self._open: dict[int, tuple[list[int], list[int]]] = {}

    def add(self, user: int, item: int, positive: bool) -> Block | None:
        """Take one interaction, and return the block that it completes.

        Parameters
        ----------
        user, item : int
        positive : bool

        Returns
        -------
        Block or None
            The block that this interaction completed, if any; the interaction itself opens the next one.
        """
        completed = self._take(user, (item,), (positive,))
        return completed[0] if completed else None

    def extend(self, user: int, items: NDArray[np.integer], positive: NDArray[np.bool_]) -> list[Block]:
        """Take several interactions of one user, as `add` does for each, but faster.

        Parameters
        ----------
        user : int
        items : ndarray of integers, shape (n,)
        positive : ndarray of bool, shape (n,)

        Returns
        -------
        list of Block
            In the order they were completed.

        Raises
        ------
        ValueError
            Arrays of different length.
        """
        if items.shape != positive.shape or items.ndim != 1:
            raise ValueError(f"items {items.shape}, positive {positive.shape}; expected one shape (n,)")
        return self._take(user, items.tolist(), positive.tolist())

    def flush(self) -> list[Block]:
        """Close the open blocks that would be kept, as at the end of a run.

        Other open blocks stay open: later interactions can still complete them.

        Returns
        -------
        list of Block
            In the order in which their users first appeared.
        """
        trailing = [
            Block(user, tuple(negatives), tuple(positives))
            for user, (negatives, positives) in self._open.items()
            if self._kept(negatives, positives)
        ]
        for block in trailing:
            self._open[block.user] = ([], [])
        return trailing

    def close(self, user: int) -> list[Block]:
        """Close one user's open block when it would be kept, as `flush` does for all.

        Returns
        -------
        list of Block
            One, or none.
        """
        negatives, positives = self._open.get(user, ([], []))
        if not self._kept(negatives, positives):
            return []
        self._open[user] = ([], [])
        return [Block(user, tuple(negatives), tuple(positives))]

    def _kept(self, negatives: list[int], positives: list[int]) -> bool:
        return bool(positives) and (self._keep_all or bool(negatives))

    def _take(self, user: int, items: Iterable[int], liked: Iterable[bool]) -> list[Block]:
        completed: list[Block] = []
        negatives, positives = self._open.setdefault(user, ([], []))
        for item, positive in zip(items, liked, strict=True):
            if positive:
                positives.append(item)
            elif not positives:
                negatives.append(item)
            else:
                if self._kept(negatives, positives):
                    completed.append(Block(user, tuple(negatives), tuple(positives)))
                else:
                    self.dropped += 1
                negatives, positives = [item], []
        self._open[user] = (negatives, positives)
        return completed
