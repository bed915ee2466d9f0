"""The centralised reference and the trivial rows of a run: same data, same split, same metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.config.run import DriftOptions
from coterie.evaluation.baselines import popularity, positive_share, random_scores
from coterie.evaluation.holdout import TRAIN, headline
from coterie.launch.feed import Feed
from coterie.learning import saros
from coterie.learning.blocks import Stream
from coterie.learning.drift import DriftSettings, score

__all__ = ["Reference", "in_time_order", "learning_settings", "references"]


@dataclass(frozen=True)
class Reference:
    """One row beside the federation's: final metrics and, where it learns, metrics by epoch."""

    metrics: dict[str, float]
    history: list[dict[str, Any]]


def learning_settings(options: DriftOptions) -> DriftSettings:
    """Return the learning settings of a run's options."""
    return DriftSettings(
        dim=options.dim,
        rate=options.rate,
        ridge=options.ridge,
        theta=options.theta,
        item_bias=options.item_bias,
    )


def in_time_order(feed: Feed, chosen: npt.NDArray[np.bool_]) -> Stream:
    """Return the chosen interactions user by user, each user's in the order of time."""
    data = feed.dataset
    index = np.nonzero(chosen)[0]
    time = data.time[index] if data.time is not None else index
    index = index[np.lexsort((index, time, data.user[index]))]
    return Stream(data.user[index], data.item[index], feed.positive[index])


def references(feed: Feed, options: DriftOptions, seed: int) -> dict[str, Reference]:
    """Train SAROS and score the trivial rows.

    Returns
    -------
    dict
        ``saros``, ``random``, ``popularity``, ``positive_share``.
    """
    data, holdout = feed.dataset, feed.holdout()
    n_users, n_items = len(data.users), len(data.items)
    train = feed.split.part == TRAIN
    history: list[dict[str, Any]] = []

    def done(epoch: int, Upsilon: npt.NDArray[np.float32], Psi: npt.NDArray[np.float32], loss: float) -> None:
        measured = headline(holdout.measure(lambda chosen: score(Upsilon[chosen], Psi)))
        history.append({"epoch": epoch, "train_loss": loss, "metrics": measured})

    stream = in_time_order(feed, train)
    saros.train(
        stream, n_users, n_items, learning_settings(options), epochs=options.epochs, seed=seed, on_epoch=done
    )

    liked, item = feed.positive[train], data.item[train]
    chance = random_scores(n_users, n_items, seed)
    trivial = {
        "random": chance,
        "popularity": np.broadcast_to(popularity(item, liked, n_items), (n_users, n_items)),
        "positive_share": np.broadcast_to(positive_share(item, liked, n_items), (n_users, n_items)),
    }
    rows = {"saros": Reference(history[-1]["metrics"], history)}
    for name, table in trivial.items():
        measured = headline(holdout.measure(table.__getitem__))
        # These scores order items; they are no logits, so the loss says nothing about them.
        rows[name] = Reference({key: x for key, x in measured.items() if not key.endswith("_loss")}, [])
    return rows
