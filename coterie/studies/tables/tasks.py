"""The two tasks by which systems and central models are compared: ranking of items, and prediction of ratings.

Every row of a comparison is measured by the same code, from the scores of all items for every user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.central import PREDICTORS, RANKERS, Central, ScoreItems
from coterie.evaluation.holdout import headline
from coterie.evaluation.leave_one_out import CHOOSE_BY, HEADLINE
from coterie.evaluation.rated import figures, user_errors
from coterie.evaluation.selection import SelectedModel
from coterie.studies.run_data import Feed
from coterie.systems.description import System

__all__ = ["RANKING", "RATING", "TASKS", "ComparedTask"]

Values = dict[str, NDArray[np.float64]]
"""Metrics of single users by name, float64 (U,) each; NaN where a user has none."""


@dataclass(frozen=True)
class ComparedTask:
    """A task: the split, the measures, and the models that solve it with all data in one place.

    Attributes
    ----------
    name : str
    title : str
    split : str
        Kind of the split (``split.kind``).
    models : tuple of type of Central
    headline, choose_by : str
        Metric that comes first, and the one on validation data that chooses settings and the best rows.
    columns : mapping of str to str
        Heading by metric.
    compared_by : mapping of str to str
        Metric of single users by which rows are compared, by the metric of a column.
    ratings : bool
        Whether ratings are learned from and predicted.
    per_user : callable
        ``(data, score) -> values``: metrics of each user.
    summed_up : callable
        ``(values) -> metrics``: the figures of a row.
    """

    name: str
    title: str
    split: str
    models: tuple[type[Central], ...]
    headline: str
    choose_by: str
    columns: Mapping[str, str]
    compared_by: Mapping[str, str]
    ratings: bool
    per_user: Callable[[Feed, ScoreItems], Values]
    summed_up: Callable[[Values], dict[str, float]]

    def measured(self, feed: Feed, score: ScoreItems) -> SelectedModel:
        """Return the outcome of a model with one version, from its scores."""
        values = self.per_user(feed, score)
        metrics = self.summed_up(values)
        users = {name: int(np.count_nonzero(~np.isnan(of_users))) for name, of_users in values.items()}
        return SelectedModel(({"step": 0, "metrics": metrics},), 0, metrics, users, values)

    def solved_by(self, system: System) -> bool:
        """Return whether a system learns the task from all interactions, in rounds."""
        return system.in_rounds and not system.needs.likes and system.needs.ratings == self.ratings


def _ranks(feed: Feed, score: ScoreItems) -> Values:
    return feed.leave_one_out().measure(score, score)


def _errors(feed: Feed, score: ScoreItems) -> Values:
    values = feed.rated().measure(score)
    return {**values, **user_errors(values)}


def _error_figures(values: Values) -> dict[str, float]:
    return {**headline({name: values[name] for name in ("user_rmse", "user_mae")}), **figures(values)}


RANKING = ComparedTask(
    name="ranking",
    title="Ranking of items",
    split="leave-last-out",
    models=RANKERS,
    headline=HEADLINE,
    choose_by=CHOOSE_BY,
    columns={
        "hit_ratio@10": "HR@10",
        "ndcg@10": "NDCG@10",
        "hit_ratio_all@10": "HR@10\nall items",
        "ndcg_all@10": "NDCG@10\nall items",
    },
    compared_by={name: name for name in ("hit_ratio@10", "ndcg@10", "hit_ratio_all@10", "ndcg_all@10")},
    ratings=False,
    per_user=_ranks,
    summed_up=headline,
)

RATING = ComparedTask(
    name="rating",
    title="Prediction of ratings",
    split="random",
    models=PREDICTORS,
    headline="rmse",
    choose_by="validation_rmse",
    columns={"rmse": "RMSE", "mae": "MAE"},
    compared_by={"rmse": "user_rmse", "mae": "user_mae"},
    ratings=True,
    per_user=_errors,
    summed_up=_error_figures,
)

TASKS = (RANKING, RATING)
