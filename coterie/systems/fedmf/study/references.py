"""Baselines for FedMF: same data, same split, same metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.data.keyed_order import key_hash
from coterie.evaluation.baselines import damped_mean, damped_offset
from coterie.evaluation.rated import Rated, figures
from coterie.evaluation.selection import best_of
from coterie.studies.reference import Reference
from coterie.studies.run_data import Feed
from coterie.systems.fedmf.central import CentralFactors, train
from coterie.systems.fedmf.mathematics import predicted
from coterie.systems.fedmf.settings import FIGURES, FedMfSettings
from coterie.systems.shared.study.references import only, rating_references

__all__ = [
    "central_history",
    "central_values",
    "fedmf_means",
    "fedmf_references",
    "mean_scores",
    "values_of_means",
]


def fedmf_references(settings: RunSettings, feed: Feed, seed: int) -> dict[str, Reference]:
    """Measure the baselines of a run of FedMF.

    Returns
    -------
    dict
        ``mf``, the same steps with all ratings in one place, the version chosen as the federation's; ``means``, the
        mean of each item plus the user's mean offset; and the baselines of FedMVMF.
    """
    rounds = settings.rounds
    history: list[dict[str, Any]] = [
        {"epoch": step, "train_loss": metrics["train_rmse"] ** 2, "metrics": metrics}
        for step, metrics in central_history(settings, feed, seed)
    ]
    best = best_of(history, rounds.choose_by)
    return {
        "mf": Reference(
            dict(history[best]["metrics"]),
            history,
            "MF, centralised",
            "the same steps with all ratings in one place",
        ),
        "means": Reference(fedmf_means(feed)["means"], []),
        **rating_references(settings, feed, seed),
    }


def central_history(settings: RunSettings, feed: Feed, seed: int) -> list[tuple[int, dict[str, float]]]:
    """Train FedMF with all ratings in one place, and measure versions as often as a federation does.

    Items with fewer training raters than ``fedmf.min_touch`` keep their first rows, as in a federation of one group.

    Returns
    -------
    list of (int, dict)
        Number of rounds before the version, and its figures.
    """
    return [(step, _figures(values)) for step, values in central_values(settings, feed, seed)]


def central_values(
    settings: RunSettings, feed: Feed, seed: int
) -> list[tuple[int, dict[str, NDArray[np.float64]]]]:
    """Return what `central_history` returns, with the metrics of each user instead of figures."""
    data, own, rounds = feed.dataset, feed.split.train, settings.rounds
    item, items = data.item[own], len(data.items)
    learning = settings.table(FedMfSettings)
    rated = dataclasses.replace(feed.rated(), training=True)
    versions = train(
        data.user[own],
        item,
        data.rating[own].astype(np.float64),
        learning,
        key_hash(data.users, seed),
        items,
        rounds=rounds.passes,
        seed=seed,
        trained=np.bincount(item, minlength=items) >= learning.min_touch,
        optimiser=rounds.server_optimiser.optimiser,
    )
    return [
        (step, _measured(rated, factors, learning))
        for step, factors in enumerate(versions)
        if step % rounds.evaluate_every == 0 or step == rounds.passes
    ]


def _measured(
    rated: Rated, factors: CentralFactors, settings: FedMfSettings
) -> dict[str, NDArray[np.float64]]:
    p, q = factors.users.astype(np.float32), factors.items.astype(np.float32)
    return rated.measure(lambda users: predicted(settings, p[users] @ q.T))


def _figures(values: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    return only(figures(values), FIGURES)


def fedmf_means(feed: Feed) -> dict[str, dict[str, float]]:
    """Return the figures of predictors that know only means.

    Returns
    -------
    dict of str to dict
        Figures by predictor: ``means``, by `mean_scores`; ``item-mean``, the damped mean of each item.
    """
    return {name: _figures(values) for name, values in values_of_means(feed).items()}


def values_of_means(feed: Feed) -> dict[str, dict[str, NDArray[np.float64]]]:
    """Return what `fedmf_means` returns, with the metrics of each user instead of figures."""
    data, own = feed.dataset, feed.split.train
    by_item = damped_mean(data.item[own], data.rating[own], len(data.items))
    tables = {
        "means": mean_scores(feed),
        "item-mean": np.broadcast_to(by_item, (len(data.users), len(data.items))),
    }
    rated = dataclasses.replace(feed.rated(), training=True)
    return {name: rated.measure(table.__getitem__) for name, table in tables.items()}


def mean_scores(feed: Feed) -> NDArray[np.float32]:
    """Return the damped mean of each item plus each user's damped offset, float32 (users, items)."""
    data, own = feed.dataset, feed.split.train
    user, item, rating = data.user[own], data.item[own], data.rating[own]
    by_item = damped_mean(item, rating, len(data.items))
    by_user = damped_offset(user, item, rating, by_item, len(data.users))
    return by_user[:, None] + by_item[None, :]
