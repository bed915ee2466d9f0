"""Baselines for FCF: same data, same split, same metrics."""

from __future__ import annotations

from importlib import util

import numpy as np

from coterie.config.run import RunSettings
from coterie.evaluation.baselines import als, popularity, random_scores
from coterie.evaluation.rated import Rated, figures
from coterie.studies.reference import Reference
from coterie.studies.run_data import Feed
from coterie.systems.fcf.mathematics import TAKEN_UP
from coterie.systems.fcf.settings import FIGURES
from coterie.systems.shared.study.references import only

__all__ = ["fcf_references"]


def fcf_references(settings: RunSettings, feed: Feed, seed: int) -> dict[str, Reference]:
    """Measure the baselines of a run of FCF.

    Returns
    -------
    dict
        ``popularity`` and ``random``; ``als``, the same cost minimised with all data in one place, where the package
        ``implicit`` is installed.
    """
    data, own = feed.dataset, feed.split.train
    shape = users, items = len(data.users), len(data.items)
    taken = np.full(len(data), TAKEN_UP, np.float32)
    rated = Rated(users, items, data.user, data.item, taken, feed.split.part, relevant_from=TAKEN_UP)
    known = popularity(data.item[own], np.ones(int(own.sum()), np.bool_), items)
    tables = {
        "popularity": np.broadcast_to(known, shape),
        "random": random_scores(users, items, seed),
    }
    if util.find_spec("implicit") is not None:
        p, q = als(data.user[own], data.item[own], users, items, seed=seed)
        tables["als"] = (p @ q.T).astype(np.float32)
    return {
        name: Reference(only(figures(rated.measure(table.__getitem__)), FIGURES), [])
        for name, table in tables.items()
    }
