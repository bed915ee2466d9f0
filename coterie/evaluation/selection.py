"""Selection of a model's best version by validation data, never by test data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.holdout import headline
from coterie.evaluation.leave_one_out import CHOOSE_BY, LeaveOneOut, ScoreAll, ScoreCandidates

__all__ = ["SelectedModel", "Selection", "best_of", "better", "lower_is_better", "measured_once"]


@dataclass(frozen=True)
class SelectedModel:
    """The outcome of training one model once: its evaluated versions, and the figures of the best.

    Parameters
    ----------
    history : sequence of mapping
        One entry for each version that was evaluated: ``step`` (epoch or global round) and ``metrics``, means over
        users by key; more keys are free.
    best : int
        Position in ``history`` of the selected version.
    metrics : mapping of str to float
        Metrics of that version; may have keys that are too dear to compute for all.
    users : mapping of str to int
        Number of users with a value, by metric.
    per_user : mapping of str to ndarray of float64, shape (U,), or None
        Metrics of that version, in the data set's order of users; None where values stay with the users.
    facts : mapping
        JSON-ready: what else is to be said of the row, such as ``secure_sum``.
    """

    history: Sequence[Mapping[str, Any]]
    best: int
    metrics: Mapping[str, float]
    users: Mapping[str, int] = field(default_factory=dict)
    per_user: Mapping[str, NDArray[np.float64]] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def lower_is_better(metric: str) -> bool:
    """Return whether smaller values of a metric are better, as of errors of predicted ratings."""
    return metric.endswith(("rmse", "mae"))


def better(metric: str, value: float, held: float) -> bool:
    """Return whether a value of a metric is better than the held one; equal values are not."""
    return value < held if lower_is_better(metric) else value > held


def best_of(history: Sequence[Mapping[str, Any]], choose_by: str) -> int:
    """Return the position of the entry with the best metric, the first among equals.

    Parameters
    ----------
    history : sequence of mapping
        As in `SelectedModel`; not empty.
    choose_by : str
        Metric, of errors the lowest wins; where no entry has it there is nothing to choose by, and the last one is
        returned.
    """
    values = [entry["metrics"].get(choose_by, math.nan) for entry in history]
    if all(math.isnan(value) for value in values):
        return len(history) - 1
    return int(np.nanargmin(values) if lower_is_better(choose_by) else np.nanargmax(values))


class Selection:
    """Evaluates versions of a model during training, and keeps the figures of the best.

    Parameters
    ----------
    holdout : LeaveOneOut
    choose_by : str
        A metric on validation data.
    """

    def __init__(self, holdout: LeaveOneOut, choose_by: str = CHOOSE_BY) -> None:
        self._holdout = holdout
        self._choose_by = choose_by
        self._history: list[dict[str, Any]] = []
        self._best = 0
        self._per_user: dict[str, NDArray[np.float64]] = {}

    def see(
        self,
        step: int,
        score_candidates: ScoreCandidates,
        score_all: ScoreAll | None = None,
        **more: Any,
    ) -> Mapping[str, float]:
        """Evaluate a version.

        All items are scored only for a version that is the best so far: for large catalogues that is the dearer part.

        Parameters
        ----------
        step : int
            Epoch or global round.
        score_candidates, score_all : callable
            As in `LeaveOneOut.measure`.
        **more
            Further entries for the history, such as ``train_loss``.

        Returns
        -------
        mapping of str to float
            Means over users, without those over all items.

        Raises
        ------
        RunError
            A score is not finite.
        """
        measured = self._holdout.measure(score_candidates)
        means = headline(measured)
        self._history.append({"step": step, **more, "metrics": means})
        if best_of(self._history, self._choose_by) == len(self._history) - 1:
            self._best = len(self._history) - 1
            if score_all is not None:
                measured = self._holdout.measure(score_candidates, score_all)
            self._per_user = measured
        return means

    @property
    def since_best(self) -> int:
        """Number of versions since the best one, for early stopping."""
        return len(self._history) - 1 - self._best

    def trained(self, **facts: Any) -> SelectedModel:
        """Return the outcome; at least one version must have been seen."""
        if not self._history:
            raise ValueError("no version was measured; expected at least one")
        return SelectedModel(
            history=tuple(self._history),
            best=self._best,
            metrics=headline(self._per_user),
            users={name: int(np.count_nonzero(~np.isnan(values))) for name, values in self._per_user.items()},
            per_user=self._per_user,
            facts=facts,
        )


def measured_once(
    holdout: LeaveOneOut, score_candidates: ScoreCandidates, score_all: ScoreAll | None = None
) -> SelectedModel:
    """Return the outcome of a model with one version only, such as popularity."""
    selection = Selection(holdout)
    selection.see(0, score_candidates, score_all)
    return selection.trained()
