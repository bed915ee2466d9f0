"""Baselines for FedMVMF: same data, same split, same metrics."""

from __future__ import annotations

from coterie.config.run import RunSettings
from coterie.studies.reference import Reference
from coterie.studies.run_data import Feed
from coterie.systems.fedmvmf.settings import FedMvmfSettings
from coterie.systems.shared.study.references import rating_references

__all__ = ["references"]


def references(settings: RunSettings, feed: Feed, seed: int) -> dict[str, Reference]:
    """Measure baselines that are the same for every user; with held-out items, among untrained items only."""
    return rating_references(settings, feed, seed, min_touch=settings.table(FedMvmfSettings).min_touch)
