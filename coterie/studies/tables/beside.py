"""Baseline rows for tables with one held-out item per user: random order, popularity, alternating least squares."""

from __future__ import annotations

from coterie.evaluation.central import Als, MostPopular, Random
from coterie.studies.tables.central_rows import central_row
from coterie.studies.tables.tasks import RANKING

__all__ = ["ALS", "POPULARITY", "RANDOM"]

RANDOM = central_row(Random, RANKING)
POPULARITY = central_row(MostPopular, RANKING)
ALS = central_row(Als, RANKING)
