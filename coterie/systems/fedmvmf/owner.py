"""Data owner's side of FedMVMF: the paper's item server, which knows features of its items."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from coterie.data.attributes import AttributeTable
from coterie.errors import DataError
from coterie.rounds.sides import Arrays
from coterie.systems.fedmvmf.mathematics import initial_features, item_server_step
from coterie.systems.fedmvmf.settings import FedMvmfPlan
from coterie.systems.shared.biases import USER
from coterie.systems.shared.factors import from_attributes
from coterie.systems.shared.rated_server import open_anywhere

__all__ = ["FedMvmfOwner"]


class FedMvmfOwner:
    """Data owner's side of FedMVMF: the paper's item server, which knows features of its items.

    Parameters
    ----------
    plan : FedMvmfPlan
    items : ndarray of int, shape (n,)
        The owner's items, by position in the catalogue.
    features : AttributeTable
        Features of the items, a row for each.
    seed : int
        Seed of the run.

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
        """``V`` as the last round left it, float32 (n_features, K); only SGD reads it."""

    def answer(self, model: Mapping[str, NDArray[np.float32]]) -> Arrays:
        """Return the owner's answer about its items in a round, and update ``V``.

        Parameters
        ----------
        model : mapping
            Version of the model that the round trains.

        Returns
        -------
        dict of str to ndarray
            ``items``, uint32 (n,), ascending, and ``pull``, float32 (n, K): trained items, and for each the sum of
            :math:`f(j, d)` over its features; ``new_items``, uint32 (m,), and ``rows``, float32 (m, K): other items
            with a known feature, and the factors that features predict for them (17).
        """
        trained = open_anywhere(model)[self._items]
        own, others = self._items[trained], self._items[~trained]
        # V is fitted to items with learned factors only: predicted factors would confirm themselves.
        factors, pull = item_server_step(
            model["items"][own], self._features[trained], self.private["factors"], self._plan
        )
        self.private = {"factors": factors}
        told = self._features[~trained]
        known = ~np.isnan(told).all(axis=1) if told.shape[1] else np.zeros(len(told), np.bool_)
        rows = from_attributes(told[known], factors, self._plan, one=USER if self._plan.biases else None)
        return {
            "items": own.astype(np.uint32),
            "pull": pull,
            "new_items": others[known].astype(np.uint32),
            "rows": rows,
        }
