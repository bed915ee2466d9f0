"""Baselines for FCF: same data, same split, same metrics."""

from __future__ import annotations

from coterie.config.run import RunSettings
from coterie.evaluation.central import Als
from coterie.studies.reference import Reference
from coterie.studies.run_data import Feed
from coterie.systems.shared.study.taken_up import ranked

__all__ = ["fcf_references"]


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
    return {"als": Reference(dict(ranked(settings, feed)(fitted.score)), [])}
