"""Host's side of FedMVMF: adds users' attributes, and an evaluation among new items only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from coterie.data.attributes import AttributeTable
from coterie.errors import DataError
from coterie.evaluation.rated import Rated
from coterie.rounds.sides import KeepPrivate
from coterie.systems.fedmvmf.server import layouts
from coterie.systems.fedmvmf.settings import FedMvmfPlan
from coterie.systems.shared.factor_host import FactorHost
from coterie.systems.shared.factor_steps import UserData
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.rated_host import training_ratings
from coterie.systems.shared.rated_server import open_anywhere

__all__ = ["FedMvmfHost"]


class FedMvmfHost(FactorHost):
    """Host's side of FedMVMF.

    Parameters
    ----------
    plan : FedMvmfPlan
    data : HostData
        Data of the users; interactions without a rating are used neither in training nor in evaluation.
    keys, seed, keep
        As for `FactorHost`.

    Raises
    ------
    DataError
        A rating out of the plan's range, or attributes that are not those of the plan.
    """

    def __init__(
        self, plan: FedMvmfPlan, data: HostData, keys: NDArray[np.uint64], seed: int, keep: KeepPrivate
    ) -> None:
        super().__init__(plan, layouts(plan, len(data.items)), data, keys, seed, keep, _users(plan, data))
        self.plan = plan

    def _held_out(self, model: Mapping[str, NDArray[np.float32]]) -> Rated:
        """Return the hold-out; where the plan says ``new_items``, new items are ranked among each other."""
        if not self.plan.new_items:
            return self._rated
        return dataclasses.replace(self._rated, among=~open_anywhere(model))


def _users(plan: FedMvmfPlan, data: HostData) -> list[UserData]:
    """Return each user's training data: its rated items of the training part, ascending, and its attributes."""
    n_users = len(data.users)
    table = data.attributes
    if table is None:
        table = AttributeTable(
            plan.attribute_names, np.full((n_users, len(plan.attribute_names)), np.nan, np.float32)
        )
    if table.names != plan.attribute_names:
        raise DataError(
            f"this host's attributes are {', '.join(table.names) or 'none'}; the run's are "
            f"{', '.join(plan.attribute_names) or 'none'}",
            hint="the columns of the attributes file must be those of the run, in the same order",
        )
    rated = training_ratings(data, plan.lowest, plan.highest, "mvmf")
    return [
        UserData(items, ratings, table.values[position]) for position, (items, ratings) in enumerate(rated)
    ]
