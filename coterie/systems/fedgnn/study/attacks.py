r"""Attacks on a run of FedGNN: those of factorisations, and ratings read off contributions by retracing the steps.

The row of an item has the user's 1 beside its hidden embedding, so the change of :math:`b_j` in one local epoch is
:math:`2 \eta (m_j - \lambda b_j)` with the error :math:`m_j`.  The steps are public: the attacker takes them itself,
for the ratings and the embedding that it guesses and without any neighbours, and moves its guess until the changes are
those that were sent.  The user's bias begins at 0 for everybody; in contributions that are not the first it is one
unknown number, the same for all of the user's ratings, which must become whole stars.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from coterie.studies.study import Recorded
from coterie.systems.fedgnn.attention import Graphs
from coterie.systems.fedgnn.local_step import steps
from coterie.systems.fedgnn.mathematics import EMBEDDED
from coterie.systems.fedgnn.server import layouts
from coterie.systems.fedgnn.settings import FedGnnSettings
from coterie.systems.shared.biases import ITEM, predicted
from coterie.systems.shared.study.attacks import report
from coterie.systems.shared.study.reconstruction import Marginals, Reconstruction, Seen
from coterie.systems.shared.study.stars import nothing, offset, read_off

__all__ = ["attack", "reconstruct"]

_RETRACED = 40
"""Times that the steps are taken for a better guess."""

_WIDEST = 3.0
"""Largest rating that is guessed on the way, on the scale from -1 to 1."""


def attack(recorded: Recorded) -> dict[str, dict[str, Any]]:
    """Attack the server's transcript of a run of FedGNN.

    Returns
    -------
    dict
        As `coterie.systems.shared.study.attacks.report`, which takes every touched item to be rated.
    """
    settings = FedGnnSettings.from_json(recorded.plan.settings)
    shape = layouts(settings, recorded.truth.n_items)
    return report(recorded, shape, settings.factor_settings(), own=partial(_own, settings=settings))


def _own(seen: Seen, marginals: Marginals, *, first: bool, settings: FedGnnSettings) -> Reconstruction:
    return reconstruct(seen, settings, marginals, first=first)


def reconstruct(seen: Seen, settings: FedGnnSettings, marginals: Marginals, *, first: bool) -> Reconstruction:
    """Reconstruct a user's ratings from one contribution, or from a sum as if it were one user's.

    Parameters
    ----------
    seen : Seen
        Changes of rows, as they were sent, and the rows that the user had fetched.
    settings : FedGnnSettings
    marginals : Marginals
        Public statistics of ratings on their own range.
    first : bool
        Whether it is the user's first contribution, which it formed with a bias of 0.
    """
    at = np.flatnonzero(seen.touched)
    if not len(at):
        return nothing(seen.items.shape[0], seen.items.shape[1], len(seen.attributes))
    sent, rows = seen.items[at], seen.item_factors[at].astype(np.float64)
    factor = np.zeros(rows.shape[1])
    factor[ITEM] = 1
    none = np.zeros((1, 0, settings.factors))
    layer = np.zeros((settings.factors + 2, settings.factors))
    opened = np.ones((1, len(at)), np.bool_)
    # Alone, a bias comes by so much closer to its rating; the embeddings' part is made up for in further rounds.
    closer = 1 - (1 - 2 * settings.rate) ** settings.local_epochs
    ratings = rows[:, ITEM] + sent[:, ITEM] / closer
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for _ in range(_RETRACED):
            graphs = Graphs(factor[None], rows[None], np.ones((1, len(at))), none, none[:, :, 0])
            change = steps(layer, graphs, ratings[None], settings, opened).change[0]
            missed = sent - change
            along = change[:, ITEM]
            factor[EMBEDDED] += along @ missed[:, EMBEDDED] / max(float(along @ along), 1e-12)
            ratings = np.clip(np.nan_to_num(ratings + missed[:, ITEM] / closer), -_WIDEST, _WIDEST)
            factor = np.clip(np.nan_to_num(factor), -_WIDEST, _WIDEST)
    values = predicted(settings, ratings.astype(np.float32)).astype(np.float64)
    if not first:
        values = values + offset(values, at, marginals)
    return read_off(values, at, factor, marginals, len(seen.attributes))
