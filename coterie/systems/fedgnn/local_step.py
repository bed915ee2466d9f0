r"""Local step of FedGNN: many users of a host take gradient steps as one batched tensor program.

A user steps E times on its own row :math:`(b_u, 1, p)`, on copies of the rows of its items and on a copy of the
attention layer, from the same point for all three, along

.. math::

    \frac{1}{n} \sum_j (r_j - \hat r_j)^2 + \lambda (b_u^2 + |p|^2), \qquad
    \sum_j (r_j - \hat r_j)^2 + \lambda \sum_j (b_j^2 + |q_j|^2),

the first for its own row and, without the penalty, for the layer, the second for rows of items.  It contributes the
changes of the copies.  Ratings of closed items train the user's own row and the layer: their rows do not move, and
nothing else of them leaves the host.

Pseudo-interacted items have a rating made up from the user's mean.  Only their rows step, beside the hidden embedding
that the user had before each step, and only if they are open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.secure_sum.contribution import Contribution
from coterie.systems.fedgnn.attention import Graphs, gradients, hidden
from coterie.systems.fedgnn.settings import FedGnnSettings
from coterie.systems.shared.biases import moving, scaled
from coterie.systems.shared.factor_steps import UserData, check_user, generators
from coterie.systems.shared.row_steps import check_kept, sampled_rows
from coterie.systems.shared.stacks import padded, stacks

__all__ = [
    "FedGnnUpdate",
    "Neighbours",
    "TakenSteps",
    "contribute",
    "hidden_rows",
    "local_step",
    "stacked_graphs",
    "steps",
]

_LOCAL = 8
"""First element of the key of the draws; FedMVMF, which draws the initial rows, and FedMF have the lower ones."""

_NO_ITEMS = np.empty(0, np.int32)

Neighbours = tuple[NDArray[np.float32], NDArray[np.integer]]
"""Embeddings of users' neighbours, (users, m, K), and how many of the m each user has, (users,)."""


class TakenSteps(NamedTuple):
    """The outcome of the steps of ``n`` users with ``w`` items at most."""

    change: NDArray[np.float64]
    """Changes of the rows of items, (n, w, K + 2)."""
    layers: NDArray[np.float64]
    """Users' copies of the layer, (n, K + 2, K)."""
    users: NDArray[np.float64]
    """Users' own rows, (n, K + 2)."""
    loss: NDArray[np.float64]
    """Sums of squared errors before the first step, (n,)."""


@dataclass(frozen=True, eq=False)
class FedGnnUpdate:
    """One user's contribution to a round, and the row that the user keeps.

    Parameters
    ----------
    index : int
        Position of the user.
    rows : ndarray of int32, shape (t,)
        Open items that the user rated, ascending.
    change : ndarray of float32, shape (t, K + 2)
        Change of their rows by the user's steps.
    layer : ndarray of float32, shape (K + 2, K)
        Change of the layer.
    sampled : ndarray of int32, shape (s,)
        Open pseudo-interacted items, ascending.
    noise : ndarray of float32, shape (s, K + 2)
        Change of their rows.
    kept : ndarray of float32, shape (K + 2,)
        The row that the user keeps.
    loss : float
        Sum of squared errors before the first step, each item predicted by the graph without it.
    rng : Generator
        For the rounding of the contribution.
    """

    index: int
    rows: NDArray[np.int32]
    change: NDArray[np.float32]
    layer: NDArray[np.float32]
    sampled: NDArray[np.int32]
    noise: NDArray[np.float32]
    kept: NDArray[np.float32]
    loss: float
    rng: np.random.Generator


def contribute(update: FedGnnUpdate, contribution: Contribution) -> None:
    """Add a user's update to the contribution of its member: the user itself, or its host.

    Raises
    ------
    UnboundedValueError
        The local steps diverged: a value is NaN or infinite.
    """
    contribution.add("items", update.change, update.rng, rows=update.rows)
    contribution.add("layer", update.layer, update.rng)
    if len(update.sampled):
        contribution.add("items", update.noise, update.rng, rows=update.sampled, noise=True)


def hidden_rows(
    model: Mapping[str, NDArray[np.float32]],
    users: Sequence[UserData],
    rows: NDArray[np.float32],
    neighbours: Neighbours | None = None,
) -> NDArray[np.float32]:
    """Return users' hidden rows at a version of the model, float32 (users, K + 2).

    Parameters
    ----------
    model : mapping
    users : sequence of UserData
        Their rated items are nodes of their graphs.
    rows : ndarray of float32, shape (users, K + 2)
        Rows that the users keep.
    neighbours : tuple, optional
    """
    found = np.empty_like(rows)
    items = model["items"].astype(np.float64)
    for stack, graphs, _ in stacked_graphs(items, users, rows, neighbours):
        found[stack] = hidden(model["layer"], graphs).astype(np.float32)
    return found


def local_step(
    model: Mapping[str, NDArray[np.float32]],
    users: Sequence[UserData],
    settings: FedGnnSettings,
    keys: Sequence[int] | NDArray[np.integer],
    *,
    rows: NDArray[np.float32],
    seed: int,
    round_: int,
    allowed: NDArray[np.bool_] | None = None,
    neighbours: Neighbours | None = None,
) -> Iterator[FedGnnUpdate]:
    """Run the local steps of a round for some users, each on its own graph.

    Parameters
    ----------
    model : mapping
        Version of the model that the users fetched.
    users : sequence of UserData
        Data without attributes, of users with ratings.
    settings : FedGnnSettings
    keys : sequence of int
        Each user's own number, at least 0, which nobody else knows.
    rows : ndarray of float32, shape (users, K + 2)
        Rows that the users kept from their last round.
    seed, round_ : int
        Seed of the run, and number of the round; at least 0.
    allowed : ndarray of bool, shape (n_items,), optional
        Open items; all if left out.
    neighbours : tuple, optional
        Neighbours of these users; none if left out.

    Yields
    ------
    FedGnnUpdate
        One for each user, in no particular order: those of similar size come together.

    Raises
    ------
    DataError
        A user's data does not fit the model: an item that does not exist, a rating out of range.  Errors name the
        user's position and no value.
    ValueError
        Rows of another shape.
    """
    check_kept("rows", rows, len(users), settings.width)
    items = model["items"].astype(np.float64)
    fitting = settings.sampling()
    for position, user in enumerate(users):
        check_user(user, position, fitting, len(items), 0)
    opened = np.ones(len(items), np.bool_) if allowed is None else allowed
    for stack, graphs, places in stacked_graphs(items, users, rows, neighbours):
        rngs = generators([keys[u] for u in stack], _LOCAL, seed, round_)
        own = [users[u] for u in stack]
        yield from _stepped(model, items, stack, own, settings, graphs, places, opened, rngs)


def stacked_graphs(
    items: NDArray[np.float64],
    users: Sequence[UserData],
    rows: NDArray[np.float32],
    neighbours: Neighbours | None = None,
) -> Iterator[tuple[list[int], Graphs, NDArray[np.int64]]]:
    """Yield users that go through the program together, with their graphs and the places of their items.

    Parameters
    ----------
    items : ndarray of float64, shape (n_items, K + 2)
    users : sequence of UserData
    rows : ndarray of float32, shape (users, K + 2)
        Users' own rows.
    neighbours : tuple, optional
    """
    width = rows.shape[1]
    beside = width * width + (0 if neighbours is None else neighbours[0].shape[1] * width)
    # Rows, their changes, gradients, means without each item and what is computed from them.
    for stack in stacks([len(user.items) for user in users], 8 * width, 2 * beside):
        graphs, places = _graphs(items, [users[u].items for u in stack], rows, neighbours, stack)
        yield stack, graphs, places


def _graphs(
    items: NDArray[np.float64],
    rated: Sequence[NDArray[np.integer]],
    rows: NDArray[np.float32],
    neighbours: Neighbours | None,
    stack: Sequence[int],
) -> tuple[Graphs, NDArray[np.int64]]:
    """Return the graphs of users, padded to one number of items, and the items' places, (n, w)."""
    n, width = len(rated), padded(len(rated[0]))
    places, marks = np.zeros((n, width), np.int64), np.zeros((n, width))
    for row, own in enumerate(rated):
        places[row, : len(own)], marks[row, : len(own)] = own, 1.0
    if neighbours is None:
        embeddings, known = np.zeros((n, 0, items.shape[1] - 2)), np.zeros((n, 0))
    else:
        embeddings = neighbours[0][stack].astype(np.float64)
        known = (np.arange(embeddings.shape[1]) < neighbours[1][stack][:, None]).astype(np.float64)
    return Graphs(rows[stack].astype(np.float64), items[places], marks, embeddings, known), places


def _stepped(
    model: Mapping[str, NDArray[np.float32]],
    items: NDArray[np.float64],
    stack: Sequence[int],
    users: Sequence[UserData],
    settings: FedGnnSettings,
    graphs: Graphs,
    places: NDArray[np.int64],
    opened: NDArray[np.bool_],
    rngs: Sequence[np.random.Generator],
) -> Iterator[FedGnnUpdate]:
    """Run the local steps of users whose items are padded to the same number."""
    ratings = np.zeros(places.shape)
    for row, user in enumerate(users):
        ratings[row, : len(user.items)] = scaled(settings, user.ratings)
    first = model["layer"].astype(np.float64)
    path: list[NDArray[np.float64]] = []
    # A step too long ends in infinities and NaN, which a contribution refuses.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        taken = steps(first, graphs, ratings, settings, opened[places], path if settings.samples else None)
        sent, kept = taken.change.astype(np.float32), taken.users.astype(np.float32)
        moved = (taken.layers - first).astype(np.float32)
    for row, (position, user) in enumerate(zip(stack, users, strict=True)):
        order = np.argsort(user.items)
        sampled, noise = _NO_ITEMS, np.empty((0, settings.width), np.float32)
        if len(user.sampled):
            sampled, noise = sampled_rows(items, user, settings, [each[row] for each in path], opened)
        order = order[opened[user.items[order]]]
        yield FedGnnUpdate(
            index=position,
            rows=user.items[order].astype(np.int32),
            change=sent[row, order],
            layer=moved[row],
            sampled=sampled,
            noise=noise,
            kept=kept[row],
            loss=float(taken.loss[row]),
            rng=rngs[row],
        )


def steps(
    layer: NDArray[np.float64],
    graphs: Graphs,
    ratings: NDArray[np.float64],
    settings: FedGnnSettings,
    opened: NDArray[np.bool_],
    path: list[NDArray[np.float64]] | None = None,
) -> TakenSteps:
    """Take a user's E steps, for several users at once.

    Parameters
    ----------
    layer : ndarray of float64, shape (K + 2, K)
        As fetched.
    graphs : Graphs
        With rows of items as fetched.
    ratings : ndarray of float64, shape (n, w)
        On the scale from -1 to 1.
    settings : FedGnnSettings
    opened : ndarray of bool, shape (n, w)
        Items whose rows move.
    path : list, optional
        Filled with users' hidden rows before each step.
    """
    of_users, of_items = moving(settings)
    moves = (graphs.rated * opened)[:, :, None] * of_items
    layers = np.repeat(layer[None], len(ratings), axis=0)
    now, change, loss = graphs, np.zeros_like(graphs.items), np.zeros(len(ratings))
    for epoch in range(settings.local_epochs):
        if path is not None:
            path.append(_hidden_of(layers, now))
        found = gradients(layers, now, ratings)
        if not epoch:
            loss = (found.missed * found.missed).sum(axis=1)
        slope = found.users + 2 * settings.ridge * now.users
        own = now.users - settings.private_rate * of_users * slope
        change = change - settings.rate * moves * (found.items + 2 * settings.ridge * now.items)
        layers = layers - settings.layer_rate * found.layers
        now = now._replace(users=own, items=graphs.items + change)
    return TakenSteps(change, layers, now.users, loss)


def _hidden_of(layers: NDArray[np.float64], graphs: Graphs) -> NDArray[np.float64]:
    """Return users' hidden rows, each with its own copy of the layer."""
    return np.concatenate(
        [
            hidden(layers[row], Graphs(*(each[row : row + 1] for each in graphs)))
            for row in range(len(graphs.users))
        ]
    )
