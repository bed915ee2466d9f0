"""Baselines for FedGNN: same data, same split, same metrics."""

from __future__ import annotations

from coterie.config.run import RunSettings
from coterie.studies.reference import Reference
from coterie.studies.run_data import Feed
from coterie.systems.shared.study.references import rating_references

__all__ = ["fedgnn_references"]


def fedgnn_references(settings: RunSettings, feed: Feed, seed: int) -> dict[str, Reference]:
    """Measure the baselines of a run of FedGNN: those of ratings.

    Returns
    -------
    dict
    """
    return rating_references(settings, feed, seed)
