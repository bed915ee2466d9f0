"""DRIFT's published form in one process, without network: owners and orchestrator act in turn.

Its results are the standard for the real federation: the same mathematics at the least cost and without staleness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from coterie.systems.drift.blocks import Block, BlockBuilder, Stream
from coterie.systems.drift.mathematics import initial, owner_order, step
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.drift.unseen import drawing

__all__ = ["EpochDone", "run_in_process"]

EpochDone = Callable[[int, NDArray[np.float32], NDArray[np.float32], float], None]
"""Called after each pass with its number (from 1), Upsilon, Psi (both change later: copy to keep) and the
mean loss of the pass's blocks, each at the rows that it was trained on."""

_Chunk = Sequence[Block]


def run_in_process(
    streams: Sequence[Stream],
    n_users: int,
    n_items: int,
    settings: DriftSettings,
    *,
    epochs: int,
    seed: int,
    holdings: Sequence[NDArray[np.integer]] | None = None,
    on_epoch: EpochDone | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Train DRIFT's published form over several owners in one process.

    In the first pass each owner takes its interactions as they come and makes an update whenever ``theta``
    blocks are saved; when all have received everything, the blocks that remain follow, the trailing ones
    included. In a later pass each owner goes over its stored blocks in the order of `owner_order`. Owners
    take turns, one update each; owners that have finished are passed over.

    Parameters
    ----------
    streams : sequence of Stream
        One per owner; the position is the owner's slot.
    n_users, n_items : int
        Rows of the factors.
    settings : DriftSettings
    epochs : int
        Passes, the first one included.
    seed : int
        At least 0.
    holdings : sequence of ndarray of integers, optional
        Items of each owner, from which unseen items are drawn; unless given, those in its stream.
    on_epoch : EpochDone, optional

    Returns
    -------
    Upsilon : ndarray of float32, shape (n_users, d)
    Psi : ndarray of float32, shape (n_items, d)
    """
    Upsilon, Psi = initial(n_users, n_items, settings, seed)
    taken = [_intake(stream, settings) for stream in streams]
    draw = drawing(streams, n_items, settings, seed, holdings)
    stored = [completed + remaining for completed, remaining in taken]
    for epoch in range(1, epochs + 1):
        if epoch == 1:
            passes = [[completed for completed, _ in taken], [remaining for _, remaining in taken]]
        else:
            passes = [
                [
                    [blocks[index] for index in owner_order(seed, owner, epoch, len(blocks))]
                    for owner, blocks in enumerate(stored)
                ]
            ]
        loss, count = 0.0, 0
        for owners in passes:
            drawn = [[draw[owner](block, epoch) for block in blocks] for owner, blocks in enumerate(owners)]
            for chunk in _in_turn(drawn, settings.theta):
                update = step(Upsilon, Psi, chunk, settings)
                loss += update.loss
                count += update.blocks
        if on_epoch is not None:
            on_epoch(epoch, Upsilon, Psi, loss / count if count else float("nan"))
    return Upsilon, Psi


def _intake(stream: Stream, settings: DriftSettings) -> tuple[list[Block], list[Block]]:
    """Return the blocks trained on while interactions arrive, and the blocks left until the end."""
    builder = BlockBuilder(keep_all=settings.pairs_unseen)
    interactions = zip(stream.user.tolist(), stream.item.tolist(), stream.positive.tolist(), strict=True)
    blocks = [block for interaction in interactions if (block := builder.add(*interaction)) is not None]
    full = len(blocks) - len(blocks) % settings.theta
    return blocks[:full], blocks[full:] + builder.flush()


def _in_turn(owners: Sequence[_Chunk], theta: int) -> Iterator[_Chunk]:
    """Yield ``theta`` blocks of each owner in turn, fewer at an owner's end."""
    chunked = [[blocks[at : at + theta] for at in range(0, len(blocks), theta)] for blocks in owners]
    for turn in zip_longest(*chunked, fillvalue=()):
        yield from (chunk for chunk in turn if chunk)
