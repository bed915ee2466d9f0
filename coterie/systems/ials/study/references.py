"""Baseline for federated iALS: same data, same split, same metrics."""

from __future__ import annotations

from coterie.config.run import RunSettings
from coterie.evaluation.central import Ials
from coterie.studies.judges import one_held_out
from coterie.studies.reference import Reference
from coterie.studies.run_data import Feed
from coterie.systems.ials.settings import IalsSettings

__all__ = ["references"]


def references(settings: RunSettings, feed: Feed, seed: int) -> dict[str, Reference]:
    """Measure the baseline of a run of iALS.

    Returns
    -------
    dict
        ``ials``, the same cost minimised with all data in one place, for as many epochs as the run has passes.
    """
    own = settings.table(IalsSettings)
    fitted = Ials(
        factors=own.factors,
        ridge=own.ridge,
        alpha0=own.alpha0,
        nu=own.nu,
        epochs=settings.rounds.passes,
        seed=seed,
    ).fit(feed.training())
    measured = dict(one_held_out(settings, feed)(fitted.score))
    return {"ials": Reference(measured, [], Ials.label, "the same cost with all data in one place, no floor")}
