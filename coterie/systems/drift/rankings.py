"""Two rankings of DRIFT with log-odds: all unseen items, and a user's own items, each with a weight of its own.

The log-odds of being liked say much about which of the items that somebody has chosen it will like, and little about
which it chooses.  So each ranking takes the weight that is best on the validation part.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.holdout import Holdout, headline
from coterie.systems.drift.mathematics import score
from coterie.systems.drift.settings import DriftSettings

__all__ = ["CHOOSE_ITEMS_BY", "CHOOSE_UNSEEN_BY", "Ranked", "measure", "weigh"]

CHOOSE_UNSEEN_BY = "validation_ndcg@10"
"""Metric that chooses the weight of the ranking of all unseen items."""

CHOOSE_ITEMS_BY = "validation_ndcg_items@10"
"""Metric that chooses the weight of the ranking of a user's own test items."""

_OF_ITEMS = ("_test_items@", "_items@", "test_loss")
"""Parts of the names of metrics that compare a user's own items."""


class Ranked(NamedTuple):
    """Metrics of each user, float64 (users,) by name, and the weight of the log-odds in each ranking."""

    metrics: dict[str, NDArray[np.float64]]
    unseen: float = 1.0
    items: float = 1.0


def weigh(user_rows: NDArray[np.float32], weight: float, settings: DriftSettings) -> NDArray[np.float32]:
    """Return users' rows, (n, d), whose scores have the items' log-odds with this weight."""
    if not settings.ranks_by_odds:
        return user_rows
    weighed = user_rows.copy()
    weighed[:, -1] = weight
    return weighed


def measure(
    holdout: Holdout, user_rows: NDArray[np.float32], Psi: NDArray[np.float32], settings: DriftSettings
) -> Ranked:
    """Measure users' rankings, each with the best of ``bias_weights`` where the model has log-odds.

    Parameters
    ----------
    holdout : Holdout
    user_rows : ndarray of float32, shape (users, d)
    Psi : ndarray of float32, shape (I, d)
        At least the items of the hold-out, which stand first.
    settings : DriftSettings

    Returns
    -------
    Ranked
        Without a validation part the first weight is taken.
    """
    Psi = Psi[: holdout.n_items]

    def measured(
        weight: float, only: Literal["validation", "test"] | None = None
    ) -> dict[str, NDArray[np.float64]]:
        rows = weigh(user_rows, weight, settings)
        return holdout.measure(lambda chosen: score(rows[chosen], Psi), only=only)

    if not settings.ranks_by_odds:
        return Ranked(measured(1.0))
    tried = {weight: measured(weight, "validation") for weight in settings.bias_weights}
    means = {weight: headline(metrics) for weight, metrics in tried.items()}
    unseen, items = (
        max(means, key=lambda weight: means[weight].get(name, 0.0))
        for name in (CHOOSE_UNSEEN_BY, CHOOSE_ITEMS_BY)
    )
    # Only the chosen weights are measured on the test part, which costs as much again for each.
    whole = {weight: {**measured(weight, "test"), **tried[weight]} for weight in {unseen, items}}
    return Ranked(
        {
            name: whole[items][name] if any(part in name for part in _OF_ITEMS) else values
            for name, values in whole[unseen].items()
        },
        unseen,
        items,
    )
