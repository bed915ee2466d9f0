"""The rows beside FedMVMF: same data, same split, same metrics."""

from __future__ import annotations

import dataclasses

import numpy as np

from coterie.config.run import RunSettings
from coterie.evaluation.baselines import damped_mean, popularity, random_scores
from coterie.evaluation.rated import figures
from coterie.studies.run_data import Feed
from coterie.systems.drift.study.references import Reference
from coterie.systems.shared.factor_server import FIGURES

__all__ = ["mvmf_references"]


def mvmf_references(settings: RunSettings, feed: Feed, seed: int) -> dict[str, Reference]:
    """Measure what knows no user.

    Parameters
    ----------
    settings : RunSettings
    feed : Feed
    seed : int
        Of random scores.

    Returns
    -------
    dict
        ``item_mean``: the mean rating of each item, drawn towards that of all; ``popularity`` and ``random``, which
        order items and predict no ratings: they have no errors.
    """
    data, train = feed.dataset, feed.split.train
    shape = users, items = len(data.users), len(data.items)
    item, rating = data.item[train], data.rating[train]
    raters = popularity(item, np.ones(len(item), np.bool_), items)
    rated = feed.rated()
    if settings.split.kind == "cold-items":
        # With one group these are the items that hosts rank, too: those that nobody may train.
        rated = dataclasses.replace(rated, among=raters < settings.mvmf.min_touch)
    tables = {
        "item_mean": np.broadcast_to(damped_mean(item, rating, items), shape),
        "popularity": np.broadcast_to(raters, shape),
        "random": random_scores(users, items, seed),
    }
    found = {}
    for name, table in tables.items():
        metrics = figures(rated.measure(table.__getitem__))
        metrics = {key: metrics[key] for key in FIGURES if key in metrics}
        if name != "item_mean":
            metrics = {key: value for key, value in metrics.items() if not key.endswith("rmse")}
        found[name] = Reference(metrics, [])
    return found
