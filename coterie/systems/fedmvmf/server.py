"""Server's side of FedMVMF: adds the answers of data owners about features of items.

An item that no group may train has no learned row.  Where a data owner knows features of such an item, the model has
the row that the features predict (17), so that new items are ranked with the others.  A user without training ratings
contributes nothing and gets recommendations by its attributes (15).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import Arrays
from coterie.systems.fedmvmf.settings import FedMvmfPlan
from coterie.systems.shared.factor_server import FactorServer
from coterie.systems.shared.factors import layout
from coterie.systems.shared.rated_measures import MEASURES, on_range
from coterie.systems.shared.rated_server import Layouts

__all__ = ["FedMvmfServer", "layouts"]


def layouts(plan: FedMvmfPlan, n_items: int) -> Layouts:
    """Return the layouts of contributions, by purpose of a sum."""
    measures = on_range(MEASURES, *plan.rating_range)
    return Layouts(n_items, layout(plan, n_items, len(plan.attribute_names)), measures)


class FedMvmfServer(FactorServer):
    """Server's side of FedMVMF.

    Parameters
    ----------
    plan : FedMvmfPlan
    n_items : int
    seed : int
        Seed of the run.
    groups : int
        Groups of the population.
    """

    def __init__(self, plan: FedMvmfPlan, n_items: int, seed: int, groups: int) -> None:
        super().__init__(plan, layouts(plan, n_items), seed, groups, len(plan.attribute_names))

    def initial(self) -> Arrays:
        """Return version 0 of the model, the optimiser's state, no supports and no predicted rows."""
        return {
            **super().initial(),
            "predicted": np.zeros((self._n_items, self.settings.width), np.float32),
            "has_predicted": np.zeros(self._n_items, np.uint8),
        }

    def told(self, arrays: Arrays, answers: Sequence[Arrays]) -> Arrays:
        """Return the server's arrays with the answers of data owners, for the round that is applied next.

        Parameters
        ----------
        arrays : dict
        answers : sequence of dict
            Answers of `coterie.systems.fedmvmf.owner.FedMvmfOwner.answer`.  For an item of several owners pulls are
            added, and predicted rows are averaged.
        """
        shape = (self._n_items, self.settings.width)
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
        """Return factors and popularity, with predicted rows for new items that have features."""
        model = super().model(arrays)
        new = (arrays["popularity"] == 0) & (arrays["has_predicted"] > 0)
        model["items"] = np.where(new[:, None], arrays["predicted"], model["items"]).astype(np.float32)
        return model
