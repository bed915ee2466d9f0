"""FCF in rounds: FedMVMF with every interaction as a rating of 1, no side information, and metrics of implicit data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.leave_one_out import RANKED
from coterie.rounds.sides import Arrays
from coterie.secure_sum.contribution import Layout
from coterie.systems.fcf.mathematics import TAKEN_UP, FcfSettings
from coterie.systems.shared.factor_host import MvmfHost
from coterie.systems.shared.factor_server import MvmfPlan
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.optimisers import ServerOptimiser
from coterie.systems.shared.rated_server import RatedPlan

__all__ = ["CHOOSE_BY", "FIGURES", "MEASURES", "FcfHost", "FcfPlan", "taken_up"]

_RANKED = ("ndcg@10", "precision@10", "recall@10")

MEASURES = tuple(prefix + name for prefix in ("", "validation_") for name in _RANKED)
"""What a user's measurement has: over all unseen items, of which every held-out one counts as liked."""

FIGURES = tuple(prefix + name for prefix in ("", "validation_") for name in (*_RANKED, "f1@10"))
"""What an evaluation comes to."""

CHOOSE_BY = "validation_ndcg@10"
"""By what the version that counts is chosen unless a run says otherwise."""


@dataclass(frozen=True)
class FcfPlan(RatedPlan):
    """What the plan of a run says about FCF.

    Parameters
    ----------
    learning : FcfSettings
    min_touch : int
        Fewest users of a group that must have an item for the group to train it.

    Raises
    ------
    ConfigError
        A value out of its range.
    """

    system: ClassVar[str] = "FCF"

    learning: FcfSettings
    min_touch: int = 3

    @classmethod
    def _of(cls, plain: dict[str, Any]) -> FcfPlan:
        learning = dict(plain.pop("learning"))
        server = ServerOptimiser(**learning.pop("server"))
        return cls(FcfSettings(server=server, **learning), **plain)

    @property
    def measures(self) -> tuple[str, ...]:
        """What a user's measurement has."""
        return MEASURES

    def of_training(self, n_items: int) -> Layout:
        """Return what a contribution to a round of training looks like."""
        return self.mvmf().of_training(n_items)

    def mvmf(self) -> MvmfPlan:
        """Return the plan of FedMVMF that is the same, but for what is measured."""
        return _Implicit(self.learning.mvmf(), (), self.min_touch)


@dataclass(frozen=True)
class _Implicit(MvmfPlan):
    """FedMVMF's plan with measures of implicit data."""

    @property
    def measures(self) -> tuple[str, ...]:
        """What a user's measurement has."""
        return MEASURES


class FcfHost(MvmfHost):
    """The side of a host: FedMVMF's, given a 1 for each interaction.

    Parameters
    ----------
    plan : FcfPlan
    data : HostData
        Whatever is rated counts, however it was rated.
    keys, private, seed
        As for FedMVMF.
    """

    def __init__(
        self, plan: FcfPlan, data: HostData, keys: NDArray[np.uint64], private: Arrays, seed: int
    ) -> None:
        super().__init__(plan.mvmf(), taken_up(data), keys, private, seed)
        self._rated = dataclasses.replace(self._rated, relevant_from=TAKEN_UP)


def taken_up(data: HostData) -> HostData:
    """Return the same with a 1 for each interaction, and without attributes."""
    ones = np.where(data.part == RANKED, np.nan, TAKEN_UP).astype(np.float32)
    return dataclasses.replace(data, rating=ones, attributes=None)
