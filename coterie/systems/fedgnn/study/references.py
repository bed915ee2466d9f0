"""Baselines for FedGNN: same data, same split, same metrics."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.data.keyed_order import key_hash
from coterie.evaluation.rated import figures
from coterie.evaluation.selection import best_of
from coterie.studies.reference import Reference
from coterie.studies.run_data import Feed
from coterie.systems.fedgnn.central import Form, train
from coterie.systems.fedgnn.settings import FIGURES, FedGnnSettings
from coterie.systems.shared.biases import predicted
from coterie.systems.shared.factor_steps import UserData
from coterie.systems.shared.study.references import only, rating_references

__all__ = ["UserValues", "central_values", "fedgnn_references"]

UserValues = dict[str, NDArray[np.float64]]
"""Metrics of each user, float64 (users,) by name."""


def fedgnn_references(settings: RunSettings, feed: Feed, seed: int) -> dict[str, Reference]:
    """Measure the baselines of a run of FedGNN.

    Returns
    -------
    dict
        ``gat``, the same steps with all ratings in one place and neighbours known exactly, the version chosen as the
        federation's; and the baselines of ratings.
    """
    history: list[dict[str, Any]] = []
    for step, values in central_values(settings, feed, seed):
        metrics = only(figures(values), FIGURES)
        history.append({"epoch": step, "train_loss": metrics["train_rmse"] ** 2, "metrics": metrics})
    best = best_of(history, settings.rounds.choose_by)
    return {
        "gat": Reference(
            dict(history[best]["metrics"]),
            history,
            "GAT, centralised",
            "the same steps with all ratings in one place, neighbours known exactly",
        ),
        **rating_references(settings, feed, seed),
    }


def central_values(
    settings: RunSettings, feed: Feed, seed: int, form: Form = "graph"
) -> list[tuple[int, UserValues]]:
    """Train with all ratings in one place, and measure versions as often as a federation does.

    Items with fewer training raters than ``fedgnn.min_touch`` keep their first rows, as in a federation of one group.

    Returns
    -------
    list of (int, dict)
        Number of rounds before the version, and the metrics of each user.
    """
    data, own, rounds = feed.dataset, feed.split.train, settings.rounds
    learning, n_items = settings.table(FedGnnSettings), len(data.items)
    user, item, rating = data.user[own], data.item[own], data.rating[own]
    people = np.unique(user)
    users = [UserData(item[user == one], rating[user == one]) for one in people]
    keys = key_hash(data.users, seed)[people]
    rated = dataclasses.replace(feed.rated(), training=True)
    trained = np.bincount(item, minlength=n_items) >= learning.min_touch
    found = []
    for step, version in enumerate(
        train(users, learning, keys, n_items, rounds=rounds.passes, seed=seed, trained=trained, form=form)
    ):
        if step % rounds.evaluate_every and step != rounds.passes:
            continue
        rows = np.zeros((len(data.users), learning.width), np.float32)
        rows[people] = version.users
        scores = predicted(learning, rows @ version.items.T)
        found.append((step, rated.measure(scores.__getitem__)))
    return found
