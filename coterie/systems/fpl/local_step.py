r"""Local step of FPL: the triples of many users of a host, each user's one after the other.

For a triple (u, i, j) of an item i that user u has and a sampled item j that it has not, with :math:`\hat x_{uij} =
\hat x_{ui} - \hat x_{uj}` and :math:`s = \sigma(-\hat x_{uij})` (the paper's equation 1):

.. math::

    \Delta p_u = s (q_i - q_j) - \lambda p_u, \quad
    \Delta q_i = s p_u - \lambda q_i, \quad \Delta b_i = s - \lambda b_i, \quad
    \Delta q_j = -s p_u - \lambda q_j, \quad \Delta b_j = -s - \lambda b_j.

:math:`p_u` moves after each triple; the rows stay as they were fetched, because the server moves them.  A user sends
:math:`\Delta q_j, \Delta b_j` of every triple, and :math:`\Delta q_i, \Delta b_i` of some, as its :math:`\pi` decides,
added up by item.

Closed items are in no triple: no contribution to training has anything of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.secure_sum.contribution import Contribution
from coterie.systems.fpl.settings import PI, FplSettings

__all__ = ["Disclosure", "FplUpdate", "Triples", "contribute", "disclosure", "local_step", "stepped"]

_LOCAL, _PI, _SENT = 2, 3, 4
"""First element of the key under which each use of a user's own number draws; `coterie.systems.fpl.mathematics` has
the lower ones."""

_VALUES = 1 << 20
"""Most float64 values of updates in a batch of users."""


@dataclass(frozen=True, eq=False)
class Disclosure:
    r"""A user's choice of what it sends of its own items.

    Attributes
    ----------
    pi : float
        Probability of sending an update of an item in ``items``.
    items : ndarray of bool, shape (n_items,)
        Items that may be sent at all.
    """

    pi: float
    items: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Triples:
    """A user's triples of a round, in the order in which they are trained.

    Attributes
    ----------
    own, other : ndarray of int, shape (T,)
        Items i that the user has, and items j that it has not.
    sent : ndarray of bool, shape (T,)
        Whether the update of i is sent.
    """

    own: NDArray[np.integer]
    other: NDArray[np.integer]
    sent: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class FplUpdate:
    """One user's contribution to a round, and the factor that the user keeps.

    Attributes
    ----------
    index : int
        Position of the user.
    rows : ndarray of int, shape (t,)
        Items that the user sends something of, ascending.
    change : ndarray of float64, shape (t, 1 + K)
        Sums of the updates of their biases and factors.
    kept : ndarray of float32, shape (1 + K,)
        Factor that the user keeps.
    rng : Generator
        For the rounding of the contribution.
    """

    index: int
    rows: NDArray[np.integer]
    change: NDArray[np.float64]
    kept: NDArray[np.float32]
    rng: np.random.Generator


def contribute(update: FplUpdate, contribution: Contribution) -> None:
    """Add a user's update to the contribution of its member: the user itself, or its host.

    Raises
    ------
    UnboundedValueError
        The local steps diverged: a value is NaN or infinite.
    """
    contribution.add("items", update.change, update.rng, rows=update.rows)


def disclosure(settings: FplSettings, key: int, n_items: int, own: float = math.nan) -> Disclosure:
    """Return what a user sends of its own items: drawn from the user's own number, the same in the whole run.

    Parameters
    ----------
    settings : FplSettings
    key : int
        The user's own number.
    n_items : int
    own : float
        Share that the user has set for itself; NaN where it has set none, and the settings decide.

    Raises
    ------
    ValueError
        The user's own share is below 0 or above 1.
    """
    pi = _share(settings, _rng(key, _PI).random()) if math.isnan(own) else own
    if not PI.lowest <= pi <= PI.highest:
        raise ValueError("a user's own share is out of range; expected 0 to 1")
    if settings.disclose == "updates":
        return Disclosure(pi, np.ones(n_items, np.bool_))
    return Disclosure(1.0, _rng(key, _SENT).random(n_items) < pi)


def _share(settings: FplSettings, drawn: float) -> float:
    """Return the share of a user that has set none, by a number drawn from 0 to 1."""
    if not settings.pi_mix:
        return settings.lowest + (settings.highest - settings.lowest) * drawn
    shares, parts = zip(*settings.pi_mix, strict=True)
    # A part of 0 is nobody's, and rounding may leave the last sum below the number.
    chosen = min(int(np.searchsorted(np.cumsum(parts), drawn, side="right")), len(shares) - 1)
    return float(shares[chosen])


def local_step(
    model: Mapping[str, NDArray[np.float32]],
    users: Sequence[NDArray[np.integer]],
    settings: FplSettings,
    keys: Sequence[int] | NDArray[np.integer],
    *,
    factors: NDArray[np.float32],
    disclosed: Sequence[Disclosure],
    seed: int,
    round_: int,
    allowed: NDArray[np.bool_],
) -> Iterator[FplUpdate]:
    """Run the local steps of a round for some users.

    Parameters
    ----------
    model : mapping
        Version of the model that the users fetched.
    users : sequence of ndarray of int
        Items of each user, each once.
    settings : FplSettings
    keys : sequence of int
        Each user's own number, at least 0, which nobody else knows.
    factors : ndarray of float32, shape (users, 1 + K)
        Factors that the users kept from their last round.
    disclosed : sequence of Disclosure
    seed, round_ : int
        Seed of the run, and number of the round; at least 0.
    allowed : ndarray of bool, shape (n_items,)
        Open items.

    Yields
    ------
    FplUpdate
        One for each user, those with many triples first.  A user with no open item, or with all of them, has no
        triple: it sends nothing, and its factor stays.
    """
    rngs = [_rng(key, _LOCAL, seed, round_) for key in keys]
    triples = [
        _drawn(items, settings, one, allowed, rng)
        for items, one, rng in zip(users, disclosed, rngs, strict=True)
    ]
    items, p = model["items"].astype(np.float64), factors.astype(np.float64)
    for batch in _batches([len(each.own) for each in triples], settings.width):
        made = stepped(items, p[batch], [triples[user] for user in batch], settings)
        for user, (rows, change, kept) in zip(batch, made, strict=True):
            yield FplUpdate(user, rows, change, kept.astype(np.float32), rngs[user])


def _rng(key: int, *use: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(int(key), spawn_key=use))


def _drawn(
    items: NDArray[np.integer],
    settings: FplSettings,
    disclosed: Disclosure,
    allowed: NDArray[np.bool_],
    rng: np.random.Generator,
) -> Triples:
    """Draw a user's triples: its open items in random order, each with an open item that it has not."""
    own, others = items[allowed[items]], allowed.copy()
    others[items] = False
    absent = np.flatnonzero(others)
    if not len(own) or not len(absent):
        none = np.empty(0, np.int64)
        return Triples(none, none, none.astype(np.bool_))
    if settings.triples_per_item:
        liked = np.concatenate([rng.permutation(own) for _ in range(settings.triples_per_item)])
    else:
        liked = rng.choice(own, 1)
    sent = (rng.random(len(liked)) < disclosed.pi) & disclosed.items[liked]
    return Triples(liked, rng.choice(absent, len(liked)), sent)


def _batches(counts: Sequence[int], width: int) -> Iterator[list[int]]:
    """Yield positions of users, those with many triples first, whose updates fit into memory together."""
    batch: list[int] = []
    values = 0
    for user in np.argsort(-np.asarray(counts, np.int64), kind="stable").tolist():
        size = 2 * counts[user] * width
        if batch and values + size > _VALUES:
            yield batch
            batch, values = [], 0
        batch.append(user)
        values += size
    if batch:
        yield batch


def stepped(
    items: NDArray[np.float64],
    factors: NDArray[np.float64],
    triples: Sequence[Triples],
    settings: FplSettings,
) -> Iterator[tuple[NDArray[np.integer], NDArray[np.float64], NDArray[np.float64]]]:
    """Train users on their triples.

    Parameters
    ----------
    items : ndarray of float64, shape (n_items, 1 + K)
        Rows that the users fetched.
    factors : ndarray of float64, shape (users, 1 + K)
    triples : sequence of Triples
        Users with more triples before users with fewer.
    settings : FplSettings

    Yields
    ------
    rows : ndarray of int, shape (t,)
        Items that the user sends something of, ascending.
    change : ndarray of float64, shape (t, 1 + K)
    kept : ndarray of float64, shape (1 + K,)

    Notes
    -----
    NumPy itself adds up over factors and over triples, not BLAS, and each user's numbers by themselves: the result has
    the same bits under every BLAS kernel, whichever users are trained together.
    """
    counts = np.array([len(one.own) for one in triples], np.int64)
    longest = int(counts.max(initial=0))
    # A step of all users has their triples side by side: the first users still have one when others have none left.
    own, other = (np.zeros((longest, len(triples)), np.int64) for _ in range(2))
    for user, one in enumerate(triples):
        own[: counts[user], user], other[: counts[user], user] = one.own, one.other
    p = factors.copy()
    # What a triple adds to the row of i, and takes from that of j, without the ridge.
    pulls = np.zeros((longest, *p.shape))
    # A step too long ends in infinities and NaN, which a contribution refuses.
    with np.errstate(over="ignore", invalid="ignore"):
        for at in range(longest):
            active = int(np.count_nonzero(counts > at))
            here = p[:active]
            apart = items[own[at, :active]] - items[other[at, :active]]
            difference = np.einsum("uk,uk->u", here, apart)
            # sigma(-x) = exp(-ln(1 + e^x)), whose exponent is never positive.
            s = np.exp(-np.logaddexp(0.0, difference))[:, None]
            pulls[at, :active] = s * here
            step = s * apart - settings.ridge * here
            step[:, 0] = 0
            p[:active] = here + settings.private_rate * step
        for user, one in enumerate(triples):
            pull = pulls[: counts[user], user]
            touched = np.concatenate([one.own[one.sent], one.other])
            updates = np.concatenate([pull[one.sent], -pull]) - settings.ridge * items[touched]
            order = np.argsort(touched, kind="stable")
            rows, starts = np.unique(touched[order], return_index=True)
            change = np.add.reduceat(updates[order], starts) if len(rows) else updates
            yield rows, change, p[user]
