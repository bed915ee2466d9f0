"""Baselines for EASE: same data, same split, same metrics."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.evaluation.baselines import from_table, popularity, random_scores
from coterie.evaluation.selection import measured_once
from coterie.studies.reference import Reference
from coterie.studies.run_data import Feed
from coterie.systems.ease.mathematics import precision, scores, symmetric, triangle
from coterie.systems.ease.settings import EaseSettings

__all__ = ["central_scores", "references"]


def references(settings: RunSettings, feed: Feed, seed: int) -> dict[str, Reference]:
    """Measure the baselines of a run of EASE.

    Returns
    -------
    dict
        ``ease``, the same model with all data in one place, where no item is closed and no pair is left out;
        ``popularity`` and ``random``.
    """
    data, training = feed.dataset, feed.split.train
    users, items = len(data.users), len(data.items)
    holdout = feed.leave_one_out()
    known = popularity(data.item[training], np.ones(int(training.sum()), np.bool_), items)
    tables = {
        "ease": central_scores(holdout.training(), items, settings.table(EaseSettings).ridge),
        "popularity": np.broadcast_to(known, (users, items)),
        "random": random_scores(users, items, seed),
    }
    words = {"ease": ("EASE, centralised", "the same model with all data in one place, without floors")}
    return {
        name: Reference(dict(measured_once(holdout, *from_table(table)).metrics), [], *words.get(name, ()))
        for name, table in tables.items()
    }


def central_scores(histories: list[NDArray[np.int32]], n_items: int, ridge: float) -> NDArray[np.float32]:
    """Return scores of all users, float32 (U, I), of EASE with all data in one place."""
    table = np.zeros((len(histories), n_items), np.float32)
    for user, items in enumerate(histories):
        table[user, items] = 1
    inverse = symmetric(precision(triangle(table.T @ table), ridge))
    everything = np.ones(n_items, np.bool_)
    return np.stack([scores(inverse, everything, items) for items in histories])
