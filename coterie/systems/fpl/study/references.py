"""Baseline of FPL: the same pair-wise loss with all data in one place."""

from __future__ import annotations

from coterie.config.run import RunSettings
from coterie.evaluation.central import Bpr
from coterie.studies.reference import Reference
from coterie.studies.run_data import Feed
from coterie.systems.shared.study.taken_up import ranked

__all__ = ["references"]


def references(settings: RunSettings, feed: Feed, seed: int) -> dict[str, Reference]:
    """Measure BPR-MF, which learns from the same triples, where the package ``implicit`` is installed."""
    if Bpr.objection(len(feed.dataset.items)):
        return {}
    central = Bpr(seed=seed).fit(feed.training())
    return {"bpr": Reference(dict(ranked(settings, feed)(central.score)), [], Bpr.label, Bpr.note)}
