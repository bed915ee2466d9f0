r"""Mathematics of DRIFT, a federated recommender with implicit feedback (Nommay, 2022).

The score of item :math:`i` for user :math:`u` is :math:`v_u \cdot \psi_i` (3.2). A data owner learns from
*blocks*: the items :math:`\eta` that a user passed over, then the items :math:`\Pi` that it liked. For
:math:`w = v_u \cdot (\psi_i - \psi_j)`, the loss of a block is the mean over its pairs (3.4)

.. math::
    L = \frac{1}{|\Pi| |\eta|} \sum_{i \in \Pi} \sum_{j \in \eta}
        -\log \sigma(w) + \lambda (|v_u|^2 + |\psi_i|^2 + |\psi_j|^2)

whose last term is the ridge of 6.1.2. Three readings differ from the print: the gradient of
:math:`-\log \sigma(w)` is :math:`-(1 - \sigma(w)) \nabla w` (the printed one in 4.2 lost its sign), Alg. 3
gets the positive item first, and its sums are divided by the number of pairs, as the loss says.

With unseen items (``DriftSettings.unseen``, not in the paper) a block's loss is the sum over its positives :math:`i` of

.. math::
    \beta \frac{1}{|\eta|} \sum_{j \in \eta} l(i, j) + \frac{1}{|J_i|} \sum_{j \in J_i} l(i, j)

where :math:`l` is the loss of a pair as above, :math:`\beta` is ``seen_weight`` and :math:`J_i` are the items drawn for
:math:`i` (`coterie.systems.drift.unseen`).  It is a sum over positives and no mean, because a block without negatives
may hold all of a user's history, which would make one step.  With an item bias :math:`b_i`, the last coordinate, pairs
are scored without it, and :math:`\sum -\log \sigma(\pm b_i)` over the block's records makes it the log-odds of being
liked.

In one exchange of an owner with the orchestrator, `wanted` says which rows to ask for, `learned_in_turn` turns them
into `Update`\ s, one or several, and the orchestrator runs `check` and `apply`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import DataError
from coterie.systems.drift.blocks import Block, BlockBuilder
from coterie.systems.drift.settings import DriftSettings

__all__ = [
    "Block",
    "BlockBuilder",
    "NamedBlocks",
    "Rows",
    "Update",
    "apply",
    "check",
    "fetch",
    "gradients",
    "initial",
    "initial_item_rows",
    "initial_user_rows",
    "learned",
    "learned_in_turn",
    "owner_order",
    "score",
    "step",
    "wanted",
]

_USER_ROWS, _ITEM_ROWS, _OWNER_ORDER = 0, 1, 2
"""First element of the key under which each use of the seed draws."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Factors of some users and items, as the orchestrator sends them to an owner.

    Parameters
    ----------
    users : ndarray of int32, shape (m,)
        Ascending, none twice.
    items : ndarray of int32, shape (n,)
        Ascending, none twice.
    user_rows : ndarray of float32, shape (m, d)
    item_rows : ndarray of float32, shape (n, d)
    """

    users: NDArray[np.int32]
    items: NDArray[np.int32]
    user_rows: NDArray[np.float32]
    item_rows: NDArray[np.float32]


class NamedBlocks(NamedTuple):
    """The blocks of one update, and the ids of their rows as `wanted` returns them."""

    blocks: Sequence[Block]
    users: NDArray[np.int32]
    items: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Update:
    """Gradient of the loss of some blocks, as an owner sends it to the orchestrator.

    Parameters
    ----------
    users : ndarray of int32, shape (m,)
        Ascending, none twice.
    items : ndarray of int32, shape (n,)
        Ascending, none twice.
    user_gradient : ndarray of float32, shape (m, d)
    item_gradient : ndarray of float32, shape (n, d)
    loss : float
        Sum over the blocks of each block's loss, ridge included.
    blocks : int
    pairs : int
        Pairs in all blocks.
    """

    users: NDArray[np.int32]
    items: NDArray[np.int32]
    user_gradient: NDArray[np.float32]
    item_gradient: NDArray[np.float32]
    loss: float
    blocks: int
    pairs: int


def wanted(blocks: Iterable[Block]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the users and items whose rows an owner needs for these blocks (3.3, step 3).

    Parameters
    ----------
    blocks : iterable of Block

    Returns
    -------
    users : ndarray of int32, shape (m,)
        Ascending, none twice.
    items : ndarray of int32, shape (n,)
        Ascending, none twice.
    """
    users: set[int] = set()
    items: set[int] = set()
    for block in blocks:
        users.add(block.user)
        items.update(block.negatives)
        items.update(block.positives)
        items.update(block.unseen)
    # For the few ids of an update, a set is several times faster than numpy.unique.
    return np.array(sorted(users), np.int32), np.array(sorted(items), np.int32)


def gradients(blocks: Sequence[Block], rows: Rows, ridge: float, *, item_bias: bool = False) -> Update:
    r"""Return the gradient of the sum of the blocks' losses, all at the same rows (3.4, 4.2, Alg. 3).

    The pairs reach the factors only through the scores :math:`S = V \Psi^T`. So the pairs give :math:`G`, the
    derivative of the loss by each score, and the gradients are :math:`G \Psi` and :math:`G^T V`: no
    difference :math:`\psi_i - \psi_j` is ever formed.

    Parameters
    ----------
    blocks : sequence of Block
        At least one.
    rows : Rows
        Rows of all their users and items; others have a gradient of zero.
    ridge : float
        :math:`\lambda`.
    item_bias : bool
        The last coordinate of the users is the constant 1: it has no gradient and no ridge.

    Returns
    -------
    Update
        Ids and precision are those of ``rows``.

    Raises
    ------
    ValueError
        No block, or one without a pair.
    DataError
        A user or item has no row.
    """
    positives = np.array([len(block.positives) for block in blocks], np.intp)
    negatives = np.array([len(block.negatives) for block in blocks], np.intp)
    pairs = positives * negatives
    if not pairs.size or not pairs.all():
        raise ValueError("expected at least one block, and in each at least one negative and one positive")

    m, n = len(rows.users), len(rows.items)
    user = _positions(rows.users, [block.user for block in blocks], "user")
    liked = _positions(rows.items, [item for block in blocks for item in block.positives], "item")
    passed = _positions(rows.items, [item for block in blocks for item in block.negatives], "item")
    # An entry of S is named by its position in the flat array.
    above, below = n * user.repeat(positives) + liked, n * user.repeat(negatives) + passed

    # All pairs, block by block, positive by positive: `i` and `j` are the entries of S whose difference is w.
    facing = negatives.repeat(positives)
    i = above.repeat(facing)
    j = below[_facing(negatives, positives, facing)]
    weight = (1.0 / pairs).repeat(pairs)

    user_gradient, item_gradient, pair_loss = _of_pairs(rows.user_rows, rows.item_rows, i, j, weight)

    # In the mean over a block's pairs, a user counts once and an item as its share of its part.
    shares = np.concatenate([(1.0 / positives).repeat(positives), (1.0 / negatives).repeat(negatives)])
    user_ridge = ridge * np.bincount(user, minlength=m)
    item_ridge = ridge * np.bincount(np.concatenate([liked, passed]), shares, n)
    penalty = _penalise(user_gradient, rows.user_rows, user_ridge)
    penalty += _penalise(item_gradient, rows.item_rows, item_ridge)
    if item_bias:
        user_gradient[:, -1] = 0
        penalty -= float(user_ridge.sum())  # the ridge of the constant 1
    return Update(
        users=rows.users,
        items=rows.items,
        user_gradient=user_gradient,
        item_gradient=item_gradient,
        loss=float(pair_loss + penalty),
        blocks=len(blocks),
        pairs=int(pairs.sum()),
    )


def learned(blocks: Sequence[Block], rows: Rows, settings: DriftSettings) -> Update:
    """Return the gradient of the loss that the settings ask for: the paper's, or the one with unseen items.

    Parameters
    ----------
    blocks : sequence of Block
        At least one; with unseen items, after `coterie.systems.drift.unseen.UnseenItems.draw`.
    rows : Rows
        Rows of all their users and items.
    settings : DriftSettings

    Raises
    ------
    ValueError, DataError
        As `gradients`; with unseen items a block needs a positive only.
    """
    if not settings.pairs_unseen:
        return gradients(blocks, rows, settings.ridge, item_bias=settings.item_bias)
    return _with_unseen(blocks, rows, settings)


def learned_in_turn(updates: Sequence[NamedBlocks], rows: Rows, settings: DriftSettings) -> list[Update]:
    """Return an owner's next updates, each computed on the rows as the updates before it leave them.

    The result is that of `learned` and `apply` for one after the other, bit for bit; ``rows`` stays as it is.

    Parameters
    ----------
    updates : sequence of NamedBlocks
        The blocks of each update, as for `learned`, at least one.
    rows : Rows
        Rows of all their users and items.
    settings : DriftSettings

    Returns
    -------
    list of Update
        One for each, over the rows of its own blocks.

    Raises
    ------
    ValueError, DataError
        As `learned`.
    """
    if len(updates) == 1:
        return [learned(updates[0].blocks, rows, settings)]
    rate = np.float32(settings.rate)
    user_rows, item_rows = rows.user_rows.copy(), rows.item_rows.copy()
    found = []
    for blocks, users, items in updates:
        at = _positions(rows.users, users, "user"), _positions(rows.items, items, "item")
        own = Rows(users, items, user_rows.take(at[0], 0), item_rows.take(at[1], 0))
        update = learned(blocks, own, settings)
        user_rows[at[0]] = own.user_rows - rate * update.user_gradient
        item_rows[at[1]] = own.item_rows - rate * update.item_gradient
        found.append(update)
    return found


def _with_unseen(blocks: Sequence[Block], rows: Rows, settings: DriftSettings) -> Update:
    if not blocks or not all(block.positives for block in blocks):
        raise ValueError("expected at least one block, and in each at least one positive")
    m, n = len(rows.users), len(rows.items)
    parts = [[getattr(block, part) for block in blocks] for part in ("positives", "negatives", "unseen")]
    positives, negatives, unseen = (np.array([len(one) for one in part], np.intp) for part in parts)
    # For the few ids of an update, one search for all of them is faster than one for each part.
    named = [item for part in parts for one in part for item in one]
    item = _positions(rows.items, named, "item")
    liked, passed, drawn = np.split(item, (positives.sum(), positives.sum() + negatives.sum()))
    user = _positions(rows.users, [block.user for block in blocks], "user")

    # Pairs of each positive with the disliked items of its block, and with the items drawn for it.
    facing, each = negatives.repeat(positives), (unseen // positives).repeat(positives)
    i = np.concatenate([liked.repeat(facing), liked.repeat(each)])
    j = np.concatenate([passed[_facing(negatives, positives, facing)], drawn])
    weight = np.concatenate(
        [
            (settings.seen_weight / np.maximum(facing, 1)).repeat(facing),
            (1.0 / np.maximum(each, 1)).repeat(each),
        ]
    )
    owner = user.repeat(positives)
    row = n * np.concatenate([owner.repeat(facing), owner.repeat(each)])

    # A bias takes no part in pairs: it is the last coordinate.
    free = slice(-1) if settings.item_bias else slice(None)
    user_rows, item_rows = rows.user_rows[:, free], rows.item_rows[:, free]
    user_gradient, item_gradient = np.zeros_like(rows.user_rows), np.zeros_like(rows.item_rows)
    user_gradient[:, free], item_gradient[:, free], loss = _of_pairs(
        user_rows, item_rows, row + i, row + j, weight
    )
    # The weights of a positive's pairs add up to those of the two means.
    paired = settings.seen_weight * (facing > 0) + (each > 0)
    user_ridge = settings.ridge * np.bincount(owner, paired, m)
    item_ridge = settings.ridge * np.bincount(np.concatenate([liked, j]), np.concatenate([paired, weight]), n)
    loss += _penalise(user_gradient[:, free], user_rows, user_ridge)
    loss += _penalise(item_gradient[:, free], item_rows, item_ridge)
    if settings.item_bias:
        item_gradient[:, -1], odds_loss = _of_odds(liked, passed, rows.item_rows[:, -1])
        loss += odds_loss
    return Update(
        users=rows.users,
        items=rows.items,
        user_gradient=user_gradient,
        item_gradient=item_gradient,
        loss=float(loss),
        blocks=len(blocks),
        pairs=len(weight),
    )


def _facing(
    negatives: NDArray[np.intp], positives: NDArray[np.intp], facing: NDArray[np.intp]
) -> NDArray[np.intp]:
    """Return, for all pairs of blocks, block by block and positive by positive, the number of the negative.

    ``facing`` is the number of negatives that each positive is paired with.
    """
    skipped = (negatives.cumsum() - negatives).repeat(positives) - (facing.cumsum() - facing)
    return np.asarray(np.arange(facing.sum()) + skipped.repeat(facing))


def _of_pairs(
    user_rows: NDArray[np.float32],
    item_rows: NDArray[np.float32],
    i: NDArray[np.intp],
    j: NDArray[np.intp],
    weight: NDArray[np.float64],
) -> tuple[NDArray[np.float32], NDArray[np.float32], float]:
    """Return the gradients of the weighted pairs' losses without ridge, (m, d) and (n, d), and the sum of the losses.

    ``i`` and ``j`` are entries of the flat S, (m n,), of the liked and of the other item.
    """
    scores = (user_rows @ item_rows.T).ravel()
    w = scores[i] - scores[j]
    loss = np.logaddexp(0.0, -w)
    # 1 - sigma(w) = exp(-w) sigma(w) = exp(-w - loss), whose exponent is never positive.
    slope = weight * np.exp(-w - loss)
    G = np.bincount(np.concatenate([i, j]), np.concatenate([-slope, slope]), len(scores))
    G = G.astype(scores.dtype).reshape(len(user_rows), len(item_rows))
    return G @ item_rows, G.T @ user_rows, float(weight @ loss)


def _of_odds(
    liked: NDArray[np.intp], passed: NDArray[np.intp], odds: NDArray[np.float32]
) -> tuple[NDArray[np.float64], float]:
    """Return the gradient of the records' logistic loss by the items' log-odds, (n,), and the sum of the losses.

    ``liked`` and ``passed`` are positions in ``odds``, one for each record.
    """
    item = np.concatenate([liked, passed])
    sign = np.repeat([1.0, -1.0], [len(liked), len(passed)])
    w = sign * odds[item]
    loss = np.logaddexp(0.0, -w)
    slopes = np.bincount(item, -sign * np.exp(-w - loss), len(odds))
    return slopes.astype(np.float64), float(loss.sum())


def initial(
    n_users: int, n_items: int, settings: DriftSettings, seed: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Draw the factors before the first update (3.1).

    Parameters
    ----------
    n_users, n_items : int
    settings : DriftSettings
    seed : int
        At least 0.

    Returns
    -------
    Upsilon : ndarray of float32, shape (n_users, d)
    Psi : ndarray of float32, shape (n_items, d)
    """
    return initial_user_rows(n_users, settings, seed), initial_item_rows(n_items, settings, seed)


def initial_user_rows(n_users: int, settings: DriftSettings, seed: int) -> NDArray[np.float32]:
    """Draw the users' factors; the first rows are the same for any number of users.

    Parameters
    ----------
    n_users : int
    settings : DriftSettings
    seed : int
        At least 0.

    Returns
    -------
    ndarray of float32, shape (n_users, d)
        Normal with standard deviation ``init_scale``; with an item bias, 1 in the last column.
    """
    rows = _drawn(n_users, settings, seed, _USER_ROWS)
    if settings.item_bias:
        rows[:, -1] = 1
    return rows


def initial_item_rows(n_items: int, settings: DriftSettings, seed: int) -> NDArray[np.float32]:
    """Draw the items' factors; the first rows are the same for any number of items.

    Parameters
    ----------
    n_items : int
    settings : DriftSettings
    seed : int
        At least 0.

    Returns
    -------
    ndarray of float32, shape (n_items, d)
        Normal with standard deviation ``init_scale``; a bias starts at 0.
    """
    rows = _drawn(n_items, settings, seed, _ITEM_ROWS)
    if settings.item_bias:
        rows[:, -1] = 0
    return rows


def fetch(
    Upsilon: NDArray[np.float32],
    Psi: NDArray[np.float32],
    users: NDArray[np.int32],
    items: NDArray[np.int32],
) -> Rows:
    """Copy the rows that an owner wants (3.3, step 3).

    Parameters
    ----------
    Upsilon : ndarray of float32, shape (U, d)
    Psi : ndarray of float32, shape (I, d)
    users : ndarray of int32, shape (m,)
        Ascending, none twice.
    items : ndarray of int32, shape (n,)
        Ascending, none twice.

    Returns
    -------
    Rows
    """
    return Rows(users, items, Upsilon[users], Psi[items])


def check(update: Update, settings: DriftSettings, n_users: int, n_items: int) -> None:
    """Check an owner's update before it is applied to the model.

    Parameters
    ----------
    update : Update
        From an owner.
    settings : DriftSettings
    n_users, n_items : int
        Rows of the model.

    Raises
    ------
    DataError
        Ids out of range, not ascending or twice; gradients of another shape or not finite; a loss that is not
        finite; counts that cannot be; a step in the users' fixed coordinate.
    """
    for what, ids, size, gradient in (
        ("user", update.users, n_users, update.user_gradient),
        ("item", update.items, n_items, update.item_gradient),
    ):
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise DataError(
                f"{what} ids are {ids.dtype} of shape {ids.shape}; expected integers, one per row"
            )
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= size):
            raise DataError(f"{what} ids from {ids.min()} to {ids.max()}; expected 0 to {size - 1}")
        if not (ids[1:] > ids[:-1]).all():
            raise DataError(f"{what} ids are not ascending; expected sorted ids, none twice")
        if gradient.shape != (expected := (len(ids), settings.dim)):
            raise DataError(f"the {what} gradient has shape {gradient.shape}; expected {expected}")
        if not np.isfinite(gradient).all():
            row = int(np.argmin(np.isfinite(gradient).all(axis=1)))
            raise DataError(
                f"the gradient of {what} {ids[row]} holds NaN or infinity; expected finite values"
            )
    if not np.isfinite(update.loss):
        raise DataError(f"the loss is {update.loss}; expected a finite number")
    if not 1 <= update.blocks <= update.pairs:
        raise DataError(
            f"{update.blocks} blocks with {update.pairs} pairs; expected a block, and a pair in each"
        )
    if settings.item_bias and update.user_gradient[:, -1].any():
        raise DataError("the users' last coordinate has a gradient; expected zeros, it is fixed to 1")


def apply(Upsilon: NDArray[np.float32], Psi: NDArray[np.float32], update: Update, rate: float) -> None:
    r"""Step against the gradient, in place: :math:`\theta \leftarrow \theta - \alpha \nabla` (3.4, Alg. 4).

    Parameters
    ----------
    Upsilon : ndarray of float32, shape (U, d)
    Psi : ndarray of float32, shape (I, d)
    update : Update
        No id twice, or all but one of its rows would be lost.
    rate : float
        :math:`\alpha`.
    """
    Upsilon[update.users] -= rate * update.user_gradient
    Psi[update.items] -= rate * update.item_gradient


def step(
    Upsilon: NDArray[np.float32], Psi: NDArray[np.float32], blocks: Sequence[Block], settings: DriftSettings
) -> Update:
    """Run one exchange between an owner and the orchestrator on the whole model, in place.

    Parameters
    ----------
    Upsilon : ndarray of float32, shape (U, d)
    Psi : ndarray of float32, shape (I, d)
    blocks : sequence of Block
        At least one.
    settings : DriftSettings

    Returns
    -------
    Update
        The update that was applied.
    """
    rows = fetch(Upsilon, Psi, *wanted(blocks))
    update = learned(blocks, rows, settings)
    apply(Upsilon, Psi, update, settings.rate)
    return update


def score(user_rows: NDArray[np.float32], Psi: NDArray[np.float32]) -> NDArray[np.float32]:
    r"""Score all items: :math:`S_u = \Psi v_u` (3.2).

    Parameters
    ----------
    user_rows : ndarray of float32, shape (n, d)
    Psi : ndarray of float32, shape (I, d)

    Returns
    -------
    ndarray of float32, shape (n, I)
    """
    return user_rows @ Psi.T


def owner_order(seed: int, owner: int, epoch: int, n_blocks: int) -> NDArray[np.int64]:
    """Draw the order in which an owner passes over its stored blocks in an epoch after the first.

    Parameters
    ----------
    seed : int
        Seed of the run, at least 0.
    owner : int
        Slot of the owner, at least 0.
    epoch : int
        From 2: the first pass is the intake.
    n_blocks : int

    Returns
    -------
    ndarray of int64, shape (n_blocks,)
        A permutation of the block numbers.
    """
    return _generator(seed, _OWNER_ORDER, owner, epoch).permutation(n_blocks)


def _positions(table: NDArray[np.int32], ids: list[int] | NDArray[np.int32], what: str) -> NDArray[np.intp]:
    """Return the positions of ids in an ascending table."""
    sought = np.array(ids, np.int32)
    found = table.searchsorted(sought)
    if not len(table) or (unknown := table.take(found, mode="clip") != sought).any():
        missing = ids[0] if not len(table) else ids[int(np.argmax(unknown))]
        raise DataError(
            f"no row of {what} {missing}, which a block names; expected the rows that `wanted` lists"
        )
    return found


def _penalise(gradient: NDArray[np.float32], rows: NDArray[np.float32], ridge: NDArray[np.floating]) -> float:
    """Add the gradient of the ridge in place and return its loss; ridge (n,), one coefficient per row."""
    gradient += (2 * ridge[:, None] * rows).astype(rows.dtype)
    return float(ridge @ np.einsum("nd,nd->n", rows, rows))


def _drawn(n: int, settings: DriftSettings, seed: int, table: int) -> NDArray[np.float32]:
    drawn = _generator(seed, table).standard_normal((n, settings.dim), dtype=np.float32)
    return drawn * np.float32(settings.init_scale)


def _generator(seed: int, *key: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
