"""Centralised training of GMF, MLP and NeuMF, the reference in FedNCF's tables.

Models, loss, initial values and the rule for negatives are those of `coterie.systems.fedncf.mathematics`: for each
interaction some items without one in the user's training data are drawn, anew in each epoch and with replacement.  A
central trainer can do more than a federation: shuffled mini-batches over all users, and Adam over all parameters (He et
al., 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.systems.fedncf.networks import (
    Architecture,
    gradients,
    initial_items,
    initial_network,
    log_odds,
)
from coterie.systems.shared.optimisers import adam

__all__ = ["CentralNcf", "CentralSettings", "EpochDone", "instances", "train"]

_MODEL, _EPOCH = 0, 1
"""First element of the key under which each use of the seed draws."""


@dataclass(frozen=True)
class CentralSettings:
    """Settings of centralised training.

    Parameters
    ----------
    architecture : Architecture
    negatives : int
        Sampled items per interaction, at least 1.
    batch_size : int
        Instances of a step, at least 1.
    rate : float
        Step size of Adam, above 0.
    decay : float
        Multiplies the rate after each epoch, above 0 and at most 1.
    weight_decay : float
        Coefficient of weight decay for the embeddings in a batch, at least 0.
    patience : int
        Epochs without a better result after which to stop.

    Raises
    ------
    ConfigError
        A value out of its range.
    """

    architecture: Architecture = field(default_factory=Architecture)
    negatives: int = 4
    batch_size: int = 1024
    rate: float = 5e-3
    decay: float = 1.0
    weight_decay: float = 0.0
    patience: int = 10

    def __post_init__(self) -> None:
        for name in ("negatives", "batch_size", "patience"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least 1")
        # Written so that NaN fails, too.
        if not (0 < self.rate < np.inf and 0 < self.decay <= 1 and 0 <= self.weight_decay < np.inf):
            raise ConfigError(
                f"rate {self.rate}, decay {self.decay}, weight_decay {self.weight_decay}; expected a rate above 0, "
                "a decay above 0 and at most 1, a weight decay of at least 0"
            )


@dataclass(frozen=True, eq=False)
class CentralNcf:
    """Trained model with the embeddings of all users.

    Parameters
    ----------
    users : ndarray of float32, shape (n_users, width)
    items : ndarray of float32, shape (n_items, width)
    network : ndarray of float32, shape (network_size,)
    """

    users: NDArray[np.float32]
    items: NDArray[np.float32]
    network: NDArray[np.float32]

    def copy(self) -> CentralNcf:
        """Return a copy whose arrays are its own."""
        return CentralNcf(self.users.copy(), self.items.copy(), self.network.copy())


EpochDone = Callable[[int, CentralNcf, float], float]
"""Callback after each epoch: takes its number (from 1), the model and the mean loss; returns a validation score."""


def train(
    histories: Sequence[NDArray[np.integer]],
    n_items: int,
    settings: CentralSettings,
    *,
    epochs: int,
    seed: int,
    on_epoch: EpochDone | None = None,
) -> CentralNcf:
    """Train a model on the interactions of all users.

    Parameters
    ----------
    histories : sequence of ndarray of int, shape (n_u,)
        Each user's training items, none twice.
    n_items : int
    settings : CentralSettings
    epochs : int
        Passes over the data at most.
    seed : int
        At least 0.
    on_epoch : callable, optional
        Scores the model after each epoch.  If given, the model with the best score is returned, and training stops
        after ``settings.patience`` epochs without a better one.

    Returns
    -------
    CentralNcf
    """
    architecture = settings.architecture
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_MODEL,)))
    model = CentralNcf(
        initial_items(architecture, len(histories), rng),
        initial_items(architecture, n_items, rng),
        initial_network(architecture, rng, log_odds(settings.negatives)),
    )
    values = (model.users, model.items, model.network[None])
    moments = [(np.zeros_like(value), np.zeros_like(value)) for value in values]
    steps, best, since = 0, -np.inf, 0
    kept = model
    for epoch in range(1, epochs + 1):
        rate = settings.rate * settings.decay ** (epoch - 1)
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_EPOCH, epoch)))
        user, item, label = instances(histories, n_items, settings.negatives, rng)
        order = rng.permutation(len(user))
        loss = 0.0
        for first in range(0, len(order), settings.batch_size):
            batch = order[first : first + settings.batch_size]
            steps += 1
            loss += _step(
                model, user[batch], item[batch], label[batch], settings, moments, steps, rate
            ) * len(batch)
        if on_epoch is None:
            continue
        value = on_epoch(epoch, model, loss / max(len(order), 1))
        if value > best:
            best, since, kept = value, 0, model.copy()
        else:
            since += 1
            if since >= settings.patience:
                break
    return kept


def instances(
    histories: Sequence[NDArray[np.integer]], n_items: int, negatives: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Draw the instances of an epoch, interactions and then negatives; users who lack either are left out.

    Returns
    -------
    user, item : ndarray of int64, shape (n,)
    label : ndarray of float32, shape (n,)
    """
    sizes = np.array([len(each) if len(each) < n_items else 0 for each in histories], np.int64)
    kept = [np.sort(each).astype(np.int64) for each, size in zip(histories, sizes, strict=True) if size]
    users = np.flatnonzero(sizes)
    if not kept:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32)
    positives = np.concatenate(kept)
    owner = np.repeat(users, sizes[users])
    again = np.repeat(owner, negatives)
    drawn = rng.integers(0, n_items - sizes[again])
    # The k-th item outside a history is found among its gaps; all users at once by shifting each by a multiple.
    span = n_items + 1
    gaps = np.concatenate([each - np.arange(len(each)) for each in kept]) + span * owner
    before = np.searchsorted(gaps, drawn + span * again, "right")
    starts = np.cumsum(sizes) - sizes
    drawn += before - starts[again]
    label = np.zeros(len(positives) + len(drawn), np.float32)
    label[: len(positives)] = 1
    return np.concatenate([owner, again]), np.concatenate([positives, drawn]), label


def _step(
    model: CentralNcf,
    user: NDArray[np.int64],
    item: NDArray[np.int64],
    label: NDArray[np.float32],
    settings: CentralSettings,
    moments: list[tuple[NDArray[np.float32], NDArray[np.float32]]],
    steps: int,
    rate: float,
) -> float:
    """Take one step of Adam on the mean loss of a batch, and return that loss."""
    n, width = len(user), settings.architecture.width
    rows = np.ones((1, width + 1, n), np.float32)
    rows[0, :-1] = model.items[item].T
    private = np.ascontiguousarray(model.users[user].T)[None]
    weight = np.full((1, n), 1 / n, np.float32)
    found = gradients(settings.architecture, private, rows, model.network, label[None], weight)
    moves = (
        _summed(found.private[0], user, model.users, settings.weight_decay),
        _summed(found.rows[0], item, model.items, settings.weight_decay),
        found.network,
    )
    values = (model.users, model.items, model.network[None])
    for value, gradient, (first, second) in zip(values, moves, moments, strict=True):
        adam(value, gradient, first, second, steps, rate)
    return float(found.loss[0])


def _summed(
    each: NDArray[np.float32], at: NDArray[np.int64], table: NDArray[np.float32], weight_decay: float
) -> NDArray[np.float32]:
    """Return the sums of instances' gradients (width, n) by row of a table, with the weight decay of those rows."""
    order = np.argsort(at, kind="stable")
    rows, starts = np.unique(at[order], return_index=True)
    found = np.zeros_like(table)
    found[rows] = np.add.reduceat(each.T[order], starts, axis=0)
    if weight_decay:
        found[rows] += np.float32(weight_decay) * table[rows]
    return found
