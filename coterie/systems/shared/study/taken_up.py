"""Measure of systems that rank items by held-out interactions, for references and tables on the same split."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from coterie.config.run import RunSettings
from coterie.evaluation.central import ScoreItems
from coterie.evaluation.rated import Rated, figures
from coterie.studies.run_data import Feed
from coterie.systems.shared.study.references import only
from coterie.systems.shared.taken_up import FIGURES, TAKEN_UP

__all__ = ["held_out", "ranked"]


def held_out(feed: Feed) -> Rated:
    """Return the hold-out of a run's data in which every held-out item is relevant."""
    data = feed.dataset
    taken = np.full(len(data), TAKEN_UP, np.float32)
    return Rated(
        len(data.users),
        len(data.items),
        data.user,
        data.item,
        taken,
        feed.split.part,
        relevant_from=TAKEN_UP,
    )


def ranked(settings: RunSettings, feed: Feed) -> Callable[[ScoreItems], Mapping[str, float]]:
    """Return the measure of a run (`Study.judged`): a ranking of all unseen items, every held-out one relevant."""
    rated = held_out(feed)
    return lambda score: only(figures(rated.measure(score)), FIGURES)
