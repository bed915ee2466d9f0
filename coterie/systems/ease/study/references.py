"""Baseline of EASE: the same model with all data in one place."""

from __future__ import annotations

from coterie.config.run import RunSettings
from coterie.evaluation.central import Ease
from coterie.studies.judges import one_held_out
from coterie.studies.reference import Reference
from coterie.studies.run_data import Feed
from coterie.systems.ease.settings import EaseSettings

__all__ = ["references"]


def references(settings: RunSettings, feed: Feed, seed: int) -> dict[str, Reference]:
    """Measure EASE with the run's `ridge` and all data in one place, where no item is closed and no pair is left out.

    It stands in place of the judge of this name (`coterie.studies.judges`).
    """
    central = Ease(ridge=settings.table(EaseSettings).ridge, seed=seed).fit(feed.training())
    words = "closed form, with all data in one place and without floors"
    return {
        "ease_central": Reference(dict(one_held_out(settings, feed)(central.score)), [], Ease.label, words)
    }
