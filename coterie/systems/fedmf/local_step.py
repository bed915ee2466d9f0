r"""Local step of FedMF: many users of a host take gradient steps as one batched tensor program.

A user steps E times, from the same point for both factors,

.. math::

    p_u \leftarrow p_u - \eta_p \Bigl(-2 \sum_j q_j (r_{uj} - p_u q_j) + 2 \lambda p_u\Bigr), \qquad
    q_j \leftarrow q_j - \eta \bigl(-2 (r_{uj} - p_u q_j) p_u + 2 \lambda q_j\bigr),

on its own copy of the rows :math:`q_j` that it rated, and contributes the change of the copy from the fetched row:
for E = 1 that is :math:`-\eta` times the gradient, to the bit.  Mean steps divide the sum over :math:`j` by the number
of the user's ratings.

Ratings of closed items train :math:`p_u` only: their rows do not move, and nothing of them leaves the host.

Sampled items (FedRec) have a rating made up from the user's mean, or what the fetched model predicts.  Only their rows
step, beside the same :math:`p_u`, and only if they are open: the user's own factor learns from real ratings alone, and
the changes of rated rows are those without any sampled items, to the bit.

Three settings change the local steps.  FedProx adds :math:`\mu (q_j - q_j^t)` to the gradients of rows, where
:math:`q_j^t` is the fetched row; :math:`p_u` is the user's own, and its gradient stays as it is.  SCAFFOLD adds
:math:`c_j - c_{uj}` to them: the last mean gradient of all raters of the row in place of the user's own last one.
Stragglers stop after a part of the E steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.secure_sum.contribution import Contribution
from coterie.systems.fedmf.mathematics import moving, scaled
from coterie.systems.fedmf.settings import FedMfSettings
from coterie.systems.shared.factor_steps import UserData, check_user, generators
from coterie.systems.shared.optimisers import corrected, next_control
from coterie.systems.shared.row_steps import check_kept, sampled_rows
from coterie.systems.shared.stacks import padded, stacks

__all__ = ["FedMfUpdate", "contribute", "local_step"]

_LOCAL = 7
"""First element of the key of the draws; FedMVMF, which draws the initial factors, has the lower ones."""

_NO_ITEMS = np.empty(0, np.int32)


@dataclass(frozen=True, eq=False)
class FedMfUpdate:
    r"""One user's contribution to a round, and the factor that the user keeps.

    Parameters
    ----------
    index : int
        Position of the user.
    rows : ndarray of int32, shape (t,)
        Open items that the user rated, ascending.
    change : ndarray of float32, shape (t, K)
        Change of their rows by the user's steps.
    sampled : ndarray of int32, shape (s,)
        Open items that the user sampled, ascending.
    noise : ndarray of float32, shape (s, K)
        Change of their rows.
    kept : ndarray of float32, shape (K,)
        :math:`p_u` that the user keeps.
    loss : float
        :math:`\sum_j (r_{uj} - p_u q_j)^2` before the first step.
    rng : Generator
        For the rounding of the contribution.
    control : ndarray of float32, shape (t, K), optional
        Control variates of the rows that the user keeps, with SCAFFOLD.
    """

    index: int
    rows: NDArray[np.int32]
    change: NDArray[np.float32]
    sampled: NDArray[np.int32]
    noise: NDArray[np.float32]
    kept: NDArray[np.float32]
    loss: float
    rng: np.random.Generator
    control: NDArray[np.float32] | None = None


def contribute(update: FedMfUpdate, contribution: Contribution) -> None:
    """Add a user's update to the contribution of its member: the user itself, or its host.

    Segments beyond those of `coterie.systems.fedmf.mathematics.layout` are the caller's, and so is
    `Contribution.count`.

    Raises
    ------
    UnboundedValueError
        The local steps diverged: a value is NaN or infinite.
    """
    contribution.add("items", update.change, update.rng, rows=update.rows)
    if len(update.sampled):
        contribution.add("items", update.noise, update.rng, rows=update.sampled, noise=True)


def local_step(
    model: Mapping[str, NDArray[np.float32]],
    users: Sequence[UserData],
    settings: FedMfSettings,
    keys: Sequence[int] | NDArray[np.integer],
    *,
    factors: NDArray[np.float32],
    seed: int,
    round_: int,
    allowed: NDArray[np.bool_] | None = None,
    predicts: bool = False,
    controls: Sequence[NDArray[np.float32]] | None = None,
) -> Iterator[FedMfUpdate]:
    """Run the local steps of a round for some users, each on its own ratings.

    Parameters
    ----------
    model : mapping
        Version of the model that the users fetched.
    users : sequence of UserData
        Data without attributes.  A user without ratings contributes nothing; its factor only shrinks.
    settings : FedMfSettings
    keys : sequence of int
        Each user's own number, at least 0, which nobody else knows.
    factors : ndarray of float32, shape (users, width)
        Factors that the users kept from their last round.
    seed, round_ : int
        Seed of the run, and number of the round; at least 0.
    allowed : ndarray of bool, shape (n_items,), optional
        Open items; all if left out.
    predicts : bool
        Whether sampled items count as rated with what the fetched model predicts, instead of the user's mean.
    controls : sequence of ndarray of float32, shape (n_items, width) each, optional
        Control variates that the users kept; needed with SCAFFOLD.

    Yields
    ------
    FedMfUpdate
        One for each user, in no particular order: those of similar size come together.

    Raises
    ------
    DataError
        A user's data does not fit the model: an item that does not exist, a rating out of range.  Errors name the
        user's position and no value.
    ValueError
        Factors of another shape, or no control variates where there should be some.
    """
    check_kept("factors", factors, len(users), settings.width)
    if settings.scaffold and (controls is None or len(controls) != len(users)):
        raise ValueError(
            f"control variates of {len(controls or ())} users; with scaffold expected those of {len(users)}"
        )
    items = model["items"].astype(np.float64)
    common = model["control"].astype(np.float64) if settings.scaffold else None
    fitting = settings.sampling()
    for position, user in enumerate(users):
        check_user(user, position, fitting, len(items), 0)
    opened = np.ones(len(items), np.bool_) if allowed is None else allowed
    # Rows, their changes and a gradient, and both control variates: so many values for each factor of an item.
    values = 5 if settings.scaffold else 3
    for stack in stacks([len(user.items) for user in users], values * settings.width):
        rngs = generators([keys[u] for u in stack], _LOCAL, seed, round_)
        variates = None
        if common is not None and controls is not None:
            variates = common, [controls[u] for u in stack]
        yield from _stepped(
            items,
            stack,
            [users[u] for u in stack],
            settings,
            factors[stack],
            opened,
            rngs,
            predicts,
            variates,
        )


def _stepped(
    items: NDArray[np.float64],
    stack: Sequence[int],
    users: Sequence[UserData],
    settings: FedMfSettings,
    factors: NDArray[np.float32],
    opened: NDArray[np.bool_],
    rngs: Sequence[np.random.Generator],
    predicts: bool,
    variates: tuple[NDArray[np.float64], Sequence[NDArray[np.float32]]] | None,
) -> Iterator[FedMfUpdate]:
    """Run the local steps of users whose items are padded to the same number.

    NumPy itself adds up over factors and over items, not BLAS: the result has the same bits under every BLAS kernel.
    """
    n, width = len(users), padded(len(users[0].items))
    places = np.zeros((n, width), np.int64)
    ratings, rated = np.zeros((n, width)), np.zeros((n, width))
    for row, user in enumerate(users):
        own = len(user.items)
        places[row, :own], rated[row, :own] = user.items, 1.0
        ratings[row, :own] = scaled(settings, user.ratings)
    of_users, of_items = moving(settings)
    moves = (rated * opened[places])[:, :, None] * of_items
    divisor = np.maximum(rated.sum(axis=1), 1.0)[:, None] if settings.steps == "mean" else 1.0
    before, p = items[places], factors.astype(np.float64)
    change, loss = np.zeros_like(before), np.zeros(n)
    path = []
    epochs = _epochs(settings, rngs)
    control, common = (before, before) if variates is None else _at(places, users, *variates)
    # A step too long ends in infinities and NaN, which a contribution refuses.
    with np.errstate(over="ignore", invalid="ignore"):
        for epoch in range(settings.local_epochs):
            q = before + change
            missed = rated * (ratings - np.einsum("nwk,nk->nw", q, p))
            if not epoch:
                loss = (missed * missed).sum(axis=1)
            path.append(p)
            by_user = -2 * np.einsum("nw,nwk->nk", missed, q) / divisor + 2 * settings.ridge * p
            by_row = -2 * missed[:, :, None] * p[:, None, :] + 2 * settings.ridge * q
            if settings.proximal:
                by_row += settings.proximal * change
            if settings.scaffold:
                by_row = corrected(by_row, control, common)
            if settings.stragglers:
                works = (epoch < epochs).astype(np.float64)[:, None]
                by_user, by_row = works * by_user, works[:, :, None] * by_row
            p = p - settings.private_rate * (of_users * by_user)
            change = change - settings.rate * (moves * by_row)
        if settings.scaffold:
            # The server learns of control variates by what it is sent alone, so they follow from the clipped change.
            change = np.clip(change, -settings.change_bound, settings.change_bound)
            control = next_control(control, common, change, settings.local_epochs * settings.rate)
        sent, kept = change.astype(np.float32), p.astype(np.float32)
    for row, (position, user) in enumerate(zip(stack, users, strict=True)):
        order = user.ascending
        sampled, noise = _NO_ITEMS, np.empty((0, settings.width), np.float32)
        if len(user.sampled):
            # Rated items come first in what a user touches.
            order = order[order < len(user.items)]
            trail = [each[row] for each in path[: epochs[row]]]
            sampled, noise = sampled_rows(
                items, user, settings, trail, opened, predicts=predicts, proximal=settings.proximal
            )
        order = order[opened[user.items[order]]]
        yield FedMfUpdate(
            index=position,
            rows=user.items[order].astype(np.int32),
            change=sent[row, order],
            sampled=sampled,
            noise=noise,
            kept=kept[row],
            loss=float(loss[row]),
            rng=rngs[row],
            control=control[row, order].astype(np.float32) if settings.scaffold else None,
        )


def _at(
    places: NDArray[np.int64],
    users: Sequence[UserData],
    common: NDArray[np.float64],
    controls: Sequence[NDArray[np.float32]],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the users' own and the common control variates of padded rows, float64 (n, w, K) each."""
    fetched = common[places]
    own = np.zeros_like(fetched)
    for row, user in enumerate(users):
        own[row, : len(user.items)] = controls[row][user.items]
    return own, fetched


def _epochs(settings: FedMfSettings, rngs: Sequence[np.random.Generator]) -> NDArray[np.int64]:
    """Return the number of local epochs that each user takes: all of them, or fewer where it is a straggler."""
    found = np.full(len(rngs), settings.local_epochs, np.int64)
    if settings.stragglers:
        for row, rng in enumerate(rngs):
            slow, part = rng.random(), rng.integers(1, settings.local_epochs, endpoint=True)
            if slow < settings.stragglers:
                found[row] = part
    return found
