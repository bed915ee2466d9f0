"""IDCF with all data in one place: the same attention over key users' own vectors, which nobody combines or encrypts.

Steps, halves of ratings and the optimiser are those of the federation; sums are not rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.systems.fedidcf.attention import Attention, Told, gradients_of, told
from coterie.systems.fedidcf.mathematics import initial
from coterie.systems.fedidcf.settings import FedIdcfSettings
from coterie.systems.shared import optimisers
from coterie.systems.shared.biases import USER
from coterie.systems.shared.optimisers import ServerOptimiser

__all__ = ["KnownRatings", "train"]


class KnownRatings(NamedTuple):
    """A user's rated items of the training part, and its ratings on the scale from -1 to 1."""

    items: NDArray[np.integer]
    ratings: NDArray[np.float64]


def train(
    items: NDArray[np.float32],
    vectors: NDArray[np.float64],
    learners: Sequence[KnownRatings],
    everybody: Sequence[KnownRatings],
    settings: FedIdcfSettings,
    *,
    steps: int,
    seed: int,
    every: int = 1,
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Train the attention, and yield all users' rows before the first step, now and then, and after the last one.

    Parameters
    ----------
    items : ndarray of float32, shape (n_items, K + 2)
        Rows of items that the first phase learned.
    vectors : ndarray of float64, shape (n, K)
        Key users' own vectors.
    learners : sequence of KnownRatings
        Key users, on whose ratings the attention is trained.
    everybody : sequence of KnownRatings
        Users whose rows are asked for.
    settings : FedIdcfSettings
    steps, seed : int
    every : int, optional
        Steps from one yield to the next.

    Yields
    ------
    step : int
        Number of steps made.
    rows : ndarray of float32, shape (len(everybody), K + 2)
    """
    model: dict[str, NDArray[np.float32]] = initial(settings, len(items), seed)
    optimiser = ServerOptimiser("fedadam", settings.attention_rate, 0.9, 0.999, 1e-8)
    moved = {name: model[name] for name in ("query", "key")}
    moments = optimisers.initial_state(optimiser, moved)
    known = [told(items[one.items], one.ratings) for one in learners]
    unit = max(float(np.sqrt(np.mean([one.liked**2 for one in known]))), 1e-6)
    rngs = [np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(n,))) for n in range(len(learners))]
    own = [told(items[one.items], one.ratings) for one in everybody]
    for step in range(steps + 1):
        attention = Attention(moved, vectors, unit)
        if step % every == 0 or step == steps:
            yield step, _rows(attention, own)
        if step < steps:
            change = {name: np.zeros(value.shape) for name, value in moved.items()}
            for one, rng in zip(learners, rngs, strict=True):
                found = gradients_of(attention, items[one.items], one.ratings, rng)
                for name, value in zip(change, found, strict=True):
                    change[name] -= value / len(learners)
            moved, moments = optimisers.step(optimiser, moved, moments, change)


def _rows(attention: Attention, own: Sequence[Told]) -> NDArray[np.float32]:
    found = np.ones((len(own), attention.latents.shape[1] + 2), np.float32)
    for row, one in zip(found, own, strict=True):
        row[USER], row[2:] = one.bias, attention.vector(one.liked)
    return found
