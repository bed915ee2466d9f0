"""FedMVMF in rounds: the side of the server, which asks data owners what they know of items.

An item that no group may train has no row to be learned.  Where a data owner knows features of it, the model has the
row that they predict (17), and so new items are ranked beside the others.  A user without ratings to learn from
contributes nothing and is served by its attributes (15).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import Arrays
from coterie.systems.fedmvmf.settings import FedMvmfPlan
from coterie.systems.shared.factor_server import FactorServer
from coterie.systems.shared.factors import layout
from coterie.systems.shared.rated_measures import MEASURES
from coterie.systems.shared.rated_server import Layouts

__all__ = ["FedMvmfServer", "layouts"]


def layouts(plan: FedMvmfPlan, n_items: int) -> Layouts:
    """Return what contributions look like."""
    return Layouts(n_items, layout(plan, n_items, len(plan.attribute_names)), MEASURES)


class FedMvmfServer(FactorServer):
    """The side of the orchestration server.

    Parameters
    ----------
    plan : FedMvmfPlan
    n_items : int
    seed : int
        Of the run.
    groups : int
        Groups of the population.
    """

    def __init__(self, plan: FedMvmfPlan, n_items: int, seed: int, groups: int) -> None:
        super().__init__(plan, layouts(plan, n_items), seed, groups, len(plan.attribute_names))

    def initial(self) -> Arrays:
        """Return version 0 of the model, the optimiser's state, no supports and no predicted rows."""
        return {
            **super().initial(),
            "predicted": np.zeros((self._n_items, self.settings.factors), np.float32),
            "has_predicted": np.zeros(self._n_items, np.uint8),
        }

    def told(self, arrays: Arrays, answers: Sequence[Arrays]) -> Arrays:
        """Return the arrays with what data owners say of their items for the round that is applied next.

        Parameters
        ----------
        arrays : dict
        answers : sequence of dict
            Of `coterie.systems.fedmvmf.owner.FedMvmfOwner.answer`.  Of an item of several owners pulls are added,
            predicted rows averaged.
        """
        shape = (self._n_items, self.settings.factors)
        pull, rows, count = np.zeros(shape), np.zeros(shape), np.zeros(self._n_items)
        for one in answers:
            pull[one["items"]] += one["pull"]
            rows[one["new_items"]] += one["rows"]
            count[one["new_items"]] += 1
        predicted, has = arrays["predicted"].copy(), arrays["has_predicted"].copy()
        fresh = count > 0
        predicted[fresh] = (rows[fresh] / count[fresh, None]).astype(np.float32)
        has[fresh] = 1
        return {**arrays, "pull": pull.astype(np.float32), "predicted": predicted, "has_predicted": has}

    def model(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        """Return factors and popularity; new items have the rows that their features predict."""
        model = super().model(arrays)
        new = (arrays["popularity"] == 0) & (arrays["has_predicted"] > 0)
        model["items"] = np.where(new[:, None], arrays["predicted"], model["items"]).astype(np.float32)
        return model
