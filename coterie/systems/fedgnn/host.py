"""Host's side of FedGNN: contributions, evaluation and recommendations of its users."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import Arrays, KeepPrivate, User
from coterie.secure_sum.plan import SumPlan
from coterie.systems.fedgnn.local_step import Neighbours, contribute, hidden_rows, local_step
from coterie.systems.fedgnn.mathematics import initial_factors
from coterie.systems.fedgnn.server import layouts
from coterie.systems.fedgnn.settings import FedGnnSettings
from coterie.systems.shared.biases import predicted
from coterie.systems.shared.factor_steps import UserData, sample
from coterie.systems.shared.factors import scores
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.members_of_host import Added, add_support
from coterie.systems.shared.rated_host import RatedHost, add_nothing, training_ratings
from coterie.systems.shared.rated_server import open_anywhere

__all__ = ["FedGnnHost"]


class FedGnnHost(RatedHost):
    """Host's side of FedGNN.

    Parameters
    ----------
    settings : FedGnnSettings
    data : HostData
        Data of the users; interactions without a rating are used neither in training nor in evaluation.
    keys : ndarray of uint64, shape (users,)
        Each user's own number, which nobody else knows.
    seed : int
        Seed of the run.
    keep : callable
        Takes initial private arrays, ``factors``, float32 (users, K + 2); returns the stored ones, if any.

    Attributes
    ----------
    private : dict of str to ndarray
        Private arrays, a row for each user; changed in place.

    Raises
    ------
    DataError
        A rating out of the plan's range.
    """

    def __init__(
        self, settings: FedGnnSettings, data: HostData, keys: NDArray[np.uint64], seed: int, keep: KeepPrivate
    ) -> None:
        rated = training_ratings(data, settings.lowest, settings.highest, "fedgnn")
        users = [UserData(items, ratings) for items, ratings in rated]
        super().__init__(layouts(settings, len(data.items)), data, keys, seed, users)
        self.settings = settings
        self.private: Arrays = keep({"factors": initial_factors(settings, keys)})
        self._rated = dataclasses.replace(data.rated(), training=True)
        # Drawn before anybody is told which items are open, so that supports tell no more than contributions do.
        self._users = sample(users, keys, settings.sampling(), len(data.items), seed=seed)

    def _neighbours(self, index: NDArray[np.intp]) -> Neighbours | None:
        """Return what some users know of their neighbours; None in a run without."""
        return None

    def _items(self, user: int) -> NDArray[np.integer]:
        return self._users[user].touched

    def _supports(self, pairs: Sequence[tuple[int, User]]) -> Iterator[Added]:
        for member, user in pairs:
            yield member, partial(add_support, self._items(user.index))

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
                self.settings,
                self.keys[index],
                rows=self.private["factors"][index],
                seed=self.seed,
                round_=plan.round,
                allowed=open_anywhere(model) if opened is None else opened[group],
                neighbours=self._neighbours(index),
            ):
                member, user = own[update.index]
                # A step that diverged sends nothing, and must not be where the next one begins.
                if np.isfinite(update.kept).all():
                    self.private["factors"][user] = update.kept
                yield member, partial(contribute, update)

    def measure(
        self, model: Mapping[str, NDArray[np.float32]], index: NDArray[np.intp], *, round_: int = 0
    ) -> dict[str, NDArray[np.float64]]:
        """Return metrics of some users, float64 (users,) by name; they do not leave the host."""
        rows = np.zeros((len(self.keys), self.settings.width), np.float32)
        rows[index] = self.factors(model, index)
        return self._rated.measure(lambda users: self._predicted(model, rows[users]), index)

    def factors(
        self, model: Mapping[str, NDArray[np.float32]], index: NDArray[np.intp], *, round_: int = 0
    ) -> NDArray[np.float32]:
        """Return hidden rows of some users at a version, float32 (n, K + 2)."""
        return hidden_rows(
            model,
            [self._users[user] for user in index.tolist()],
            self.private["factors"][index],
            self._neighbours(index),
        )

    def _predicted(
        self, model: Mapping[str, NDArray[np.float32]], factors: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        return predicted(self.settings, scores(model, factors))




