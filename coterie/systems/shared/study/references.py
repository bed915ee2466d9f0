"""Baselines for systems that predict ratings: same data, same split, same metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.evaluation.baselines import damped_mean, popularity, random_scores
from coterie.evaluation.rated import figures
from coterie.studies.reference import Reference
from coterie.studies.run_data import Feed
from coterie.systems.shared.rated_measures import FIGURES

__all__ = ["only", "rating_metrics", "rating_references", "rating_values"]


def rating_references(
    settings: RunSettings, feed: Feed, seed: int, *, min_touch: int | None = None
) -> dict[str, Reference]:
    """Measure baselines that are the same for every user.

    Parameters
    ----------
    settings : RunSettings
    feed : Feed
    seed : int
        Seed of random scores.
    min_touch : int, optional
        Fewest raters of an item that is trained; given, a run with held-out items ranks only items with fewer.

    Returns
    -------
    dict
        ``item_mean``: the mean rating of each item, shrunk towards the mean of all; ``popularity`` and ``random``,
        which order items and predict no ratings: they have no RMSE.
    """
    values = rating_values(settings, feed, seed, min_touch=min_touch)
    return {name: Reference(rating_metrics(name, found), []) for name, found in values.items()}


def rating_metrics(name: str, values: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """Return the figures of a baseline of `rating_references` from the metrics of each user."""
    metrics = only(figures(values), FIGURES)
    return {key: value for key, value in metrics.items() if name == "item_mean" or not key.endswith("rmse")}


def rating_values(
    settings: RunSettings, feed: Feed, seed: int, *, min_touch: int | None = None
) -> dict[str, dict[str, NDArray[np.float64]]]:
    """Return what `rating_references` returns, with the metrics of each user instead of figures."""
    data, train = feed.dataset, feed.split.train
    shape = users, items = len(data.users), len(data.items)
    item, rating = data.item[train], data.rating[train]
    raters = popularity(item, np.ones(len(item), np.bool_), items)
    rated = feed.rated()
    if settings.split.kind == "cold-items" and min_touch is not None:
        # In a run of one group hosts rank the same items: those that nobody may train.
        rated = dataclasses.replace(rated, among=raters < min_touch)
    tables = {
        "item_mean": np.broadcast_to(damped_mean(item, rating, items), shape),
        "popularity": np.broadcast_to(raters, shape),
        "random": random_scores(users, items, seed),
    }
    return {name: rated.measure(table.__getitem__) for name, table in tables.items()}


def only(metrics: Mapping[str, float], names: tuple[str, ...]) -> dict[str, float]:
    """Return those of the named metrics that were measured, in the order of the names."""
    return {name: metrics[name] for name in names if name in metrics}
