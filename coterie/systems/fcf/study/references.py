"""Baselines for FCF: same data, same split, same metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from coterie.config.run import RunSettings
from coterie.evaluation.central import Als, ScoreItems
from coterie.evaluation.rated import Rated, figures
from coterie.studies.reference import Reference
from coterie.studies.run_data import Feed
from coterie.systems.fcf.mathematics import TAKEN_UP
from coterie.systems.fcf.settings import FIGURES
from coterie.systems.shared.study.references import only

__all__ = ["fcf_references", "judged"]


def fcf_references(settings: RunSettings, feed: Feed, seed: int) -> dict[str, Reference]:
    """Measure the baseline of a run of FCF.

    Returns
    -------
    dict
        ``als``, the same cost minimised with all data in one place, where the package ``implicit`` is installed.
    """
    if Als.objection(len(feed.dataset.items)):
        return {}
    fitted = Als(seed=seed).fit(feed.training())
    return {"als": Reference(dict(judged(settings, feed)(fitted.score)), [])}


def judged(settings: RunSettings, feed: Feed) -> Callable[[ScoreItems], Mapping[str, float]]:
    """Return the measure of a run of FCF: a ranking of all unseen items, where every held-out item is relevant."""
    data = feed.dataset
    taken = np.full(len(data), TAKEN_UP, np.float32)
    rated = Rated(
        len(data.users),
        len(data.items),
        data.user,
        data.item,
        taken,
        feed.split.part,
        relevant_from=TAKEN_UP,
    )
    return lambda score: only(figures(rated.measure(score)), FIGURES)
