"""SAROS, the centralised form of DRIFT (Burashnikova et al., 2021), the reference in tables of DRIFT.

Blocks, loss, unseen items and step are those of DRIFT, with one owner that holds every item, one update per block, and
the users one after another.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.systems.drift.blocks import Block, BlockBuilder, Stream
from coterie.systems.drift.mathematics import initial, step
from coterie.systems.drift.sequential import EpochDone
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.drift.unseen import drawing

__all__ = ["train", "user_order"]

_USER_ORDER = 3
"""First element of the key under which user orders are drawn; DRIFT has 0 to 2."""


def train(
    stream: Stream,
    n_users: int,
    n_items: int,
    settings: DriftSettings,
    *,
    epochs: int,
    seed: int,
    on_epoch: EpochDone | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Train SAROS on all interactions in one place.

    Parameters
    ----------
    stream : Stream
        All users' interactions; each user's in the order of time.
    n_users, n_items : int
        Rows of the factors.
    settings : DriftSettings
        Its ``theta`` is not used: one block makes an update. The initial factors are those of DRIFT under the
        same settings and seed.
    epochs : int
        Passes over the blocks; each takes the users in the order of `user_order` and a user's blocks by time.
    seed : int
        At least 0.
    on_epoch : callable, optional
        As for `coterie.systems.drift.sequential.run_in_process`.

    Returns
    -------
    Upsilon : ndarray of float32, shape (n_users, d)
    Psi : ndarray of float32, shape (n_items, d)
    """
    settings = settings.model_copy(update={"theta": 1})
    Upsilon, Psi = initial(n_users, n_items, settings, seed)
    by_user = _blocks_by_user(stream, settings)
    # The one owner has every item, so "own" and "all" are the same.
    (draw,) = drawing([stream], n_items, settings, seed, [np.arange(n_items)])
    for epoch in range(1, epochs + 1):
        loss, count = 0.0, 0
        for index in user_order(seed, epoch, len(by_user)):
            for block in by_user[index]:
                loss += step(Upsilon, Psi, [draw(block, epoch)], settings).loss
                count += 1
        if on_epoch is not None:
            on_epoch(epoch, Upsilon, Psi, loss / count if count else float("nan"))
    return Upsilon, Psi


def user_order(seed: int, epoch: int, n: int) -> NDArray[np.int64]:
    """Draw the order in which a pass takes the users.

    Parameters
    ----------
    seed : int
        At least 0.
    epoch : int
        From 1.
    n : int
        Number of users with a block, in order of their first interaction.

    Returns
    -------
    ndarray of int64, shape (n,)
        A permutation.
    """
    key = np.random.SeedSequence(seed, spawn_key=(_USER_ORDER, epoch))
    return np.random.default_rng(key).permutation(n)


def _blocks_by_user(stream: Stream, settings: DriftSettings) -> list[list[Block]]:
    builder = BlockBuilder(keep_all=settings.pairs_unseen)
    by_user: dict[int, list[Block]] = {user: [] for user in stream.user.tolist()}
    for user, item, positive in zip(
        stream.user.tolist(), stream.item.tolist(), stream.positive.tolist(), strict=True
    ):
        if (block := builder.add(user, item, positive)) is not None:
            by_user[user].append(block)
    for block in builder.flush():
        by_user[block.user].append(block)
    return [blocks for blocks in by_user.values() if blocks]
