"""Baseline rows for tables with one held-out item per user: random order, popularity, alternating least squares."""

from __future__ import annotations

import numpy as np

from coterie.config.run import RunSettings
from coterie.evaluation.baselines import als, from_factors, from_table, popularity, random_scores
from coterie.evaluation.selection import SelectedModel, measured_once
from coterie.studies.run_data import Feed
from coterie.studies.tables.row import Choices, LogUniform, Options, Row

__all__ = ["ALS", "POPULARITY", "RANDOM"]


def _random(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
    return measured_once(
        feed.leave_one_out(),
        *from_table(random_scores(len(feed.dataset.users), len(feed.dataset.items), seed)),
    )


def _popularity(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
    data, train = feed.dataset, feed.split.train
    # Implicit feedback: every rated item counts, whatever the rating.
    every = np.ones(int(train.sum()), np.bool_)
    known = popularity(data.item[train], every, len(data.items))
    return measured_once(
        feed.leave_one_out(), *from_table(np.broadcast_to(known, (len(data.users), len(data.items))))
    )


def _als(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
    data, train = feed.dataset, feed.split.train
    factors = als(
        data.user[train], data.item[train], len(data.users), len(data.items), seed=seed, **dict(options)
    )
    return measured_once(feed.leave_one_out(), *from_factors(*factors))


RANDOM = Row("random", "Random order", _random)
POPULARITY = Row("popularity", "Popularity", _popularity)
ALS = Row(
    "als",
    "ALS (implicit)",
    _als,
    options={"factors": 64, "regularization": 0.01, "alpha": 1.0, "iterations": 15},
    space={
        "factors": Choices((8, 16, 32, 64, 128)),
        "regularization": LogUniform(1e-3, 100.0),
        "alpha": LogUniform(0.1, 100.0),
        "iterations": Choices((5, 10, 15, 30)),
    },
    note="all data in one place; another method than the paper's",
)
