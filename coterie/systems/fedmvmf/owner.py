"""FedMVMF's side of a data owner that knows features of its items: the paper's item server."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from coterie.data.attributes import AttributeTable
from coterie.errors import DataError
from coterie.rounds.sides import Arrays
from coterie.systems.fedmvmf.mathematics import initial_features, item_server_step
from coterie.systems.fedmvmf.settings import FedMvmfPlan
from coterie.systems.shared.factors import from_attributes
from coterie.systems.shared.rated_server import open_anywhere

__all__ = ["FedMvmfOwner"]


class FedMvmfOwner:
    """The side of a data owner that knows features of its items: the paper's item server.

    Parameters
    ----------
    plan : FedMvmfPlan
    items : ndarray of int, shape (n,)
        Its items, by position in the catalogue.
    features : AttributeTable
        A row for each of them.
    seed : int
        Of the run.

    Raises
    ------
    DataError
        Another number of rows than items.
    """

    def __init__(
        self, plan: FedMvmfPlan, items: NDArray[np.integer], features: AttributeTable, seed: int
    ) -> None:
        if len(features) != len(items):
            raise DataError(f"features of {len(features)} items for the {len(items)} of this owner")
        order = np.argsort(items)
        self._plan = plan
        self._items = items[order].astype(np.int64)
        self._features = features.values[order]
        self.private: Arrays = {"factors": initial_features(plan, len(features.names), seed)}
        """``V`` as the last round left it, float32 (n_features, K); only SGD looks at it."""

    def answer(self, model: Mapping[str, NDArray[np.float32]]) -> Arrays:
        """Return what is told of the items in a round, and let ``V`` move on.

        Parameters
        ----------
        model : mapping
            The version that the round trains.

        Returns
        -------
        dict of str to ndarray
            ``items``, uint32 (n,), ascending, and ``pull``, float32 (n, K): the sum of :math:`f(j, d)` over the
            features of items that are trained; ``new_items``, uint32 (m,), and ``rows``, float32 (m, K): the factors
            that features predict (17) of the others, of which any feature is known.
        """
        trained = open_anywhere(model)[self._items]
        own, others = self._items[trained], self._items[~trained]
        # V is what explains the features of items whose factors are learned: predicted ones would confirm themselves.
        factors, pull = item_server_step(
            model["items"][own], self._features[trained], self.private["factors"], self._plan
        )
        self.private = {"factors": factors}
        told = self._features[~trained]
        known = ~np.isnan(told).all(axis=1) if told.shape[1] else np.zeros(len(told), np.bool_)
        rows = from_attributes(told[known], factors, self._plan)
        return {
            "items": own.astype(np.uint32),
            "pull": pull,
            "new_items": others[known].astype(np.uint32),
            "rows": rows,
        }
