"""FedMF's side of a host: what its users contribute, how they are measured and recommended to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import Arrays, User
from coterie.secure_sum.contribution import Contribution
from coterie.secure_sum.plan import SumPlan
from coterie.systems.fedmf.local_step import FedMfUpdate, contribute, local_step
from coterie.systems.fedmf.mathematics import scores
from coterie.systems.fedmf.server import FedMfPlan
from coterie.systems.shared.factor_steps import UserData
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.rated_host import Added, RatedHost, add_nothing, training_ratings
from coterie.systems.shared.rated_server import open_anywhere

__all__ = ["FedMfHost"]


class FedMfHost(RatedHost):
    """The side of a host.

    Parameters
    ----------
    plan : FedMfPlan
    data : HostData
        Interactions without a rating teach nothing and are measured by nothing.
    keys : ndarray of uint64, shape (users,)
        Each user's own number, which nobody else knows.
    private : dict of str to ndarray
        ``factors``: what each user kept, float32 (users, K); changed in place.
    seed : int
        Of the run.

    Raises
    ------
    DataError
        A rating out of the plan's range.
    """

    def __init__(
        self, plan: FedMfPlan, data: HostData, keys: NDArray[np.uint64], private: Arrays, seed: int
    ) -> None:
        learning = plan.learning
        rated = training_ratings(data, learning.lowest, learning.highest, "fedmf")
        super().__init__(plan, data, keys, seed, [UserData(items, ratings) for items, ratings in rated])
        self.plan = plan
        self.private = private
        self._rated = dataclasses.replace(data.rated(), training=True)

    def _trained(
        self,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        opened: NDArray[np.bool_] | None,
        pairs: Sequence[tuple[int, User]],
    ) -> Iterator[Added]:
        for group, own, others in self._of_groups(pairs):
            for member in others:
                yield member, add_nothing
            index = np.array([user for _, user in own], np.intp)
            for update in local_step(
                model,
                [self._users[user] for user in index.tolist()],
                self.plan.learning,
                self.keys[index],
                factors=self.private["factors"][index],
                seed=self.seed,
                round_=plan.round,
                allowed=open_anywhere(model) if opened is None else opened[group],
            ):
                member, user = own[update.index]
                # A step that diverged sends nothing, and must not be where the next one begins.
                if np.isfinite(update.kept).all():
                    self.private["factors"][user] = update.kept
                yield member, partial(_add_update, update)

    def measure(
        self, model: Mapping[str, NDArray[np.float32]], index: NDArray[np.intp], *, round_: int = 0
    ) -> dict[str, NDArray[np.float64]]:
        """Return metrics of some users, float64 (users,) by name; they do not leave the host."""
        factors = self.private["factors"]
        return self._rated.measure(lambda users: scores(model, factors[users]), index)

    def factors(
        self, model: Mapping[str, NDArray[np.float32]], index: NDArray[np.intp], *, round_: int = 0
    ) -> NDArray[np.float32]:
        """Return what some users kept, float32 (n, K), whatever the version."""
        kept: NDArray[np.float32] = self.private["factors"][index]
        return kept


def _add_update(update: FedMfUpdate, contribution: Contribution) -> None:
    contribute(update, contribution)
