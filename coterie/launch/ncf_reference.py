"""The rows beside a run: same data, same split, same metrics."""

from __future__ import annotations

from importlib import util

import numpy as np

from coterie.config.run import RunSettings
from coterie.evaluation.baselines import als, from_factors, from_table, popularity, random_scores
from coterie.evaluation.leave_one_out import ScoreAll, ScoreCandidates
from coterie.evaluation.selection import Selection
from coterie.launch.feed import Feed
from coterie.launch.reference import Reference, references

__all__ = ["ncf_references", "reference_rows"]


def reference_rows(settings: RunSettings, feed: Feed, seed: int) -> dict[str, Reference]:
    """Train and measure the rows that stand beside a run, whatever its system."""
    if settings.system == "drift":
        return references(feed, settings.drift, seed)
    return ncf_references(feed, seed)


def ncf_references(feed: Feed, seed: int) -> dict[str, Reference]:
    """Score what stands beside FedNCF.

    Returns
    -------
    dict
        ``popularity`` and ``random``; ``als`` where the package ``implicit`` is installed.
    """
    data, train = feed.dataset, feed.split.train
    users, items = len(data.users), len(data.items)
    known = popularity(data.item[train], feed.positive[train], items)
    rows = {
        "popularity": _once(feed, *from_table(np.broadcast_to(known, (users, items)))),
        "random": _once(feed, *from_table(random_scores(users, items, seed))),
    }
    if util.find_spec("implicit") is not None:
        factors = als(data.user[train], data.item[train], users, items, seed=seed)
        rows["als"] = _once(feed, *from_factors(*factors))
    return rows


def _once(feed: Feed, score_candidates: ScoreCandidates, score_all: ScoreAll) -> Reference:
    """Measure what has one version only."""
    selection = Selection(feed.leave_one_out())
    selection.see(0, score_candidates, score_all)
    return Reference(dict(selection.trained().metrics), [])
