"""References of a run of DRIFT (SAROS and trivial rankers): same data, same split, same metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.config.run import RunSettings
from coterie.evaluation.baselines import popularity, positive_share, random_scores
from coterie.evaluation.central import ScoreItems
from coterie.evaluation.holdout import TRAIN, headline
from coterie.studies.reference import Reference
from coterie.studies.run_data import Feed
from coterie.systems.drift import central as saros
from coterie.systems.drift.blocks import Stream
from coterie.systems.drift.rankings import measure
from coterie.systems.drift.settings import DriftSettings

__all__ = ["ROWS", "in_time_order", "judged", "references", "trivial_scores"]


def in_time_order(feed: Feed, chosen: npt.NDArray[np.bool_]) -> Stream:
    """Return the chosen interactions user by user, each user's by time."""
    data = feed.dataset
    index = np.nonzero(chosen)[0]
    time = data.time[index] if data.time is not None else index
    index = index[np.lexsort((index, time, data.user[index]))]
    return Stream(data.user[index], data.item[index], feed.positive[index])


ROWS = ("saros", "random", "popularity", "positive_share")
"""References that a run of DRIFT is compared with."""


def references(
    feed: Feed, options: DriftSettings, seed: int, *, only: Collection[str] = ROWS
) -> dict[str, Reference]:
    """Train SAROS and measure the trivial rankers.

    Returns
    -------
    dict
        References by name, those of `ROWS` that ``only`` names.
    """
    rows = {name: _trivial(name, feed, seed) for name in ROWS if name in only and name != "saros"}
    return {"saros": _saros(feed, options, seed), **rows} if "saros" in only else rows


def _saros(feed: Feed, options: DriftSettings, seed: int) -> Reference:
    data, holdout = feed.dataset, feed.holdout()
    n_users, n_items = len(data.users), len(data.items)
    train = feed.split.part == TRAIN
    history: list[dict[str, Any]] = []

    def done(epoch: int, Upsilon: npt.NDArray[np.float32], Psi: npt.NDArray[np.float32], loss: float) -> None:
        measured = headline(measure(holdout, Upsilon, Psi, options).metrics)
        history.append({"epoch": epoch, "train_loss": loss, "metrics": measured})

    stream = in_time_order(feed, train)
    saros.train(stream, n_users, n_items, options, epochs=options.epochs, seed=seed, on_epoch=done)

    return Reference(history[-1]["metrics"], history, "SAROS", "centralised, same blocks")


def _trivial(name: str, feed: Feed, seed: int) -> Reference:
    return Reference(_ranked(feed, trivial_scores(name, feed, seed)), [])


def trivial_scores(
    name: str, feed: Feed, seed: int
) -> Callable[[npt.NDArray[np.intp]], npt.NDArray[np.floating]]:
    """Return the scores of ``random``, ``popularity`` or ``positive_share``, learned from the training part."""
    data = feed.dataset
    shape = n_users, n_items = len(data.users), len(data.items)
    train = feed.split.part == TRAIN
    liked, item = feed.positive[train], data.item[train]
    if name == "random":
        table = random_scores(n_users, n_items, seed)
    elif name == "popularity":
        table = np.broadcast_to(popularity(item, liked, n_items), shape)
    else:
        table = np.broadcast_to(positive_share(item, liked, n_items), shape)
    return table.__getitem__


def judged(settings: RunSettings, feed: Feed) -> Callable[[ScoreItems], Mapping[str, float]]:
    """Return the measure of a run of DRIFT, without losses."""
    return lambda score: _ranked(feed, score)


def _ranked(
    feed: Feed, scores: Callable[[npt.NDArray[np.intp]], npt.NDArray[np.floating]]
) -> dict[str, float]:
    measured = headline(feed.holdout().measure(scores))
    # These scores order items; they are no logits, so the loss says nothing about them.
    return {key: x for key, x in measured.items() if not key.endswith("_loss")}
