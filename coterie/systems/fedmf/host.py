"""Host's side of FedMF: contributions, evaluation and recommendations of its users."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import Arrays, KeepPrivate, User
from coterie.secure_sum.contribution import Contribution
from coterie.secure_sum.plan import SumPlan
from coterie.systems.fedmf.fold_in import folded_factors
from coterie.systems.fedmf.local_step import FedMfUpdate, contribute, local_step
from coterie.systems.fedmf.mathematics import initial_factors, predicted, scores
from coterie.systems.fedmf.server import layouts
from coterie.systems.fedmf.settings import FedMfSettings
from coterie.systems.shared.biases import without_biases
from coterie.systems.shared.factor_steps import UserData, sample
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.members_of_host import Added, add_support
from coterie.systems.shared.rated_host import RatedHost, training_ratings
from coterie.systems.shared.rated_server import Layouts

__all__ = ["FedMfHost"]


class FedMfHost(RatedHost):
    """Host's side of FedMF.

    Parameters
    ----------
    settings : FedMfSettings
    data : HostData
        Data of the users; interactions without a rating are used neither in training nor in evaluation.
    keys : ndarray of uint64, shape (users,)
        Each user's own number, which nobody else knows.
    seed : int
        Seed of the run.
    keep : callable
        Takes initial private arrays, ``factors``, float32 (users, width), and with SCAFFOLD ``control``, float32
        (users, items, width); returns the stored ones, if any.
    shape : Layouts, optional
        Layouts of contributions of a system that is built on FedMF; FedMF's own if left out.

    Attributes
    ----------
    private : dict of str to ndarray
        Private arrays, a row for each user; changed in place.

    Raises
    ------
    DataError
        A rating out of the plan's range.
    """

    table = "fedmf"
    """Table of the run's file that has the range of ratings, for errors."""

    def __init__(
        self,
        settings: FedMfSettings,
        data: HostData,
        keys: NDArray[np.uint64],
        seed: int,
        keep: KeepPrivate,
        shape: Layouts | None = None,
    ) -> None:
        rated = training_ratings(data, settings.lowest, settings.highest, self.table)
        users = [UserData(items, ratings) for items, ratings in rated]
        super().__init__(shape or layouts(settings, len(data.items)), data, keys, seed, users)
        self.settings = settings
        self.private = keep(self._initial())
        self._rated = dataclasses.replace(data.rated(), training=True)
        # Drawn before anybody is told which items are open, so that supports tell no more than contributions do.
        self._users = self._sampled(np.arange(len(users)), 0)

    def item_vectors(self, model: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return the items' factors without biases, float32 (I, K)."""
        return without_biases(self.settings, model["items"])

    def _initial(self) -> Arrays:
        """Return users' private arrays before their first round."""
        made: Arrays = {"factors": initial_factors(self.settings, self.keys)}
        if self.settings.scaffold:
            # A row for each item, so that the shape stays the same when a user rates another item during a run.
            made["control"] = np.zeros(
                (len(self.keys), len(self._data.items), self.settings.width), np.float32
            )
        return made

    def _sampled(self, index: NDArray[np.intp], round_: int) -> list[UserData]:
        """Return users' data with the unrated items that each of them samples."""
        return sample(
            [self._users[user] for user in index.tolist()],
            self.keys[index],
            self.settings.sampling(),
            len(self._data.items),
            seed=self.seed,
            round_=round_,
        )

    def _items(self, user: int) -> NDArray[np.integer]:
        return self._users[user].touched

    def _apart(self, plan: SumPlan) -> bool:
        return plan.noise_floor > 0

    def _supports(self, pairs: Sequence[tuple[int, User]]) -> Iterator[Added]:
        for member, user in pairs:
            own = self._users[user.index]
            yield member, partial(_add_supports, own.items, own.sampled)

    def _stepped(
        self,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        index: NDArray[np.intp],
        allowed: NDArray[np.bool_],
    ) -> Iterator[tuple[FedMfUpdate, Callable[[Contribution], None]]]:
        settings = self.settings
        for update in local_step(
            model,
            self._sampled(index, plan.round)
            if settings.resample
            else [self._users[user] for user in index.tolist()],
            settings,
            self.keys[index],
            factors=self.private["factors"][index],
            seed=self.seed,
            round_=plan.round,
            allowed=allowed,
            predicts=settings.predicts(plan.pass_number),
            controls=[self.private["control"][user] for user in index.tolist()]
            if settings.scaffold
            else None,
        ):
            if update.control is not None and np.isfinite(update.kept).all():
                self.private["control"][index[update.index], update.rows] = update.control
            yield update, partial(contribute, update)

    def measure(
        self, model: Mapping[str, NDArray[np.float32]], index: NDArray[np.intp], *, round_: int = 0
    ) -> dict[str, NDArray[np.float64]]:
        """Return metrics of some users, float64 (users,) by name; they do not leave the host."""
        factors = self.private["factors"]
        return self._rated.measure(lambda users: self._predicted(model, factors[users]), index)

    def fold_in(self, model: Mapping[str, NDArray[np.float32]]) -> None:
        """Solve for the factors of users with ratings, at a finished model."""
        index = np.flatnonzero(self._rates)
        if len(index):
            users = [self._users[user] for user in index.tolist()]
            self.private["factors"][index] = folded_factors(model, users, self.settings)

    def factors(
        self, model: Mapping[str, NDArray[np.float32]], index: NDArray[np.intp], *, round_: int = 0
    ) -> NDArray[np.float32]:
        """Return the factors that some users keep, float32 (n, width), at any version of the model."""
        kept: NDArray[np.float32] = self.private["factors"][index]
        return kept

    def _predicted(
        self, model: Mapping[str, NDArray[np.float32]], factors: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        return predicted(self.settings, scores(model, factors))


def _add_supports(
    rated: NDArray[np.integer], sampled: NDArray[np.integer], contribution: Contribution
) -> None:
    add_support(rated, contribution)
    if len(sampled):
        add_support(sampled, contribution, noise=True)
