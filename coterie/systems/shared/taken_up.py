"""Interactions without ratings: data, metrics and choice of a version of systems that rank items by held-out ones."""

from __future__ import annotations

import dataclasses

import numpy as np

from coterie.evaluation.leave_one_out import RANKED
from coterie.systems.shared.host_data import HostData

__all__ = ["CHOOSE_BY", "FIGURES", "MEASURES", "TAKEN_UP", "taken_up"]

TAKEN_UP = 1.0
"""Rating that stands for an interaction: the user has taken the item up."""

_RANKED = ("ndcg@10", "precision@10", "recall@10")

MEASURES = tuple(prefix + name for prefix in ("", "validation_") for name in _RANKED)
"""Metrics measured for each user, among all unseen items; every held-out item counts as relevant."""

FIGURES = tuple(prefix + name for prefix in ("", "validation_") for name in (*_RANKED, "f1@10"))
"""Figures of an evaluation."""

CHOOSE_BY = "validation_ndcg@10"
"""Figure by which the version that counts is chosen, unless a run names another one."""


def taken_up(data: HostData) -> HostData:
    """Return a copy of the data with a rating of 1 for each interaction, and without attributes."""
    ones = np.where(data.part == RANKED, np.nan, TAKEN_UP).astype(np.float32)
    return dataclasses.replace(data, rating=ones, attributes=None)
