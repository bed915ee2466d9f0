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
import numpy.typing as npt

from coterie.studies.study import Recorded
from coterie.systems.fedgnn.attention import Graphs
from coterie.systems.fedgnn.local_step import steps
from coterie.systems.fedgnn.server import layouts
from coterie.systems.fedgnn.settings import FedGnnSettings
from coterie.systems.shared.study.attacks import report
from coterie.systems.shared.study.reconstruction import Marginals, Reconstruction, Seen
from coterie.systems.shared.study.retraced import retraced

__all__ = ["attack", "reconstruct"]

Doubles = npt.NDArray[np.float64]


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
    # Alone, a bias comes by so much closer to its rating; the embeddings' part is made up for in further rounds.
    closer = 1 - (1 - 2 * settings.rate) ** settings.local_epochs
    none = np.zeros((1, 0, settings.factors))
    layer = np.zeros((settings.factors + 2, settings.factors))

    def take(rows: Doubles, factor: Doubles, ratings: Doubles) -> tuple[Doubles, float]:
        graphs = Graphs(factor[None], rows[None], np.ones((1, len(rows))), none, none[:, :, 0])
        opened = np.ones((1, len(rows)), np.bool_)
        return steps(layer, graphs, ratings[None], settings, opened).change[0], closer

    return retraced(seen, settings, marginals, lambda rows, factor: closer, take, first=first)
