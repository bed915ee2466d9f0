"""Host's side of FedGNN: contributions, evaluation and recommendations of its users."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from coterie.crypto.graph_key import GraphTerms
from coterie.rounds.sides import Arrays, KeepPrivate, SharedUser, User
from coterie.secure_sum.contribution import Contribution
from coterie.secure_sum.plan import SumPlan
from coterie.systems.fedgnn.inductive import fitted_rows
from coterie.systems.fedgnn.local_step import FedGnnUpdate, Neighbours, contribute, hidden_rows, local_step
from coterie.systems.fedgnn.mathematics import EMBEDDED, initial_factors
from coterie.systems.fedgnn.neighbours import KnownNeighbours, published_items
from coterie.systems.fedgnn.server import SHARED, SHARERS, layouts
from coterie.systems.fedgnn.settings import NEIGHBOURHOOD, FedGnnSettings
from coterie.systems.shared.biases import predicted
from coterie.systems.shared.factor_steps import UserData, sample
from coterie.systems.shared.factors import scores
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.members_of_host import Added, add_support
from coterie.systems.shared.rated_host import RatedHost, training_ratings

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
        initial: Arrays = {"factors": initial_factors(settings, keys)}
        if settings.neighbours:
            initial |= KnownNeighbours.initial(settings, len(keys))
        self.private = keep(initial)
        self._around = KnownNeighbours(settings, self.private) if settings.neighbours else None
        self._passes = 0
        self._rated = dataclasses.replace(data.rated(), training=True)
        # Drawn before anybody is told which items are open, so that supports tell no more than contributions do.
        self._users = sample(users, keys, settings.sampling(), len(data.items), seed=seed)

    def item_vectors(self, model: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return the items' embeddings without biases, float32 (I, K)."""
        return model["items"][:, EMBEDDED]

    def _neighbours(self, index: NDArray[np.intp]) -> Neighbours | None:
        """Return what some users know of their neighbours; None in a run without."""
        return None if self._around is None else self._around.of(index)

    # --- graph expansion -------------------------------------------------------------------------------------------

    @property
    def graph_terms(self) -> GraphTerms | None:
        """Terms of the run's graph; None in a run without neighbours."""
        return None if self._around is None else self._around.terms

    def sharers(self, model: Mapping[str, NDArray[np.float32]]) -> NDArray[np.int64]:
        """Return how many users publish each item, (I,), by the levels in the model."""
        return np.rint(np.exp2(model[SHARERS].astype(np.float64))).astype(np.int64)

    def epoch(self, plan: SumPlan) -> int:
        """Return the lowest epoch of the graph key before a sum: 1, and more after each rotation."""
        return 1 if self._around is None else self._around.epoch(plan.pass_number)

    def due(self, plan: SumPlan, users: Sequence[int]) -> Sequence[int]:
        """Return which of some users are to publish before a sum: those who rated something."""
        rated = [user for user in users if self._rates[user]]
        return [] if self._around is None else self._around.due(plan.pass_number, rated)

    def shared(self, user: int) -> SharedUser:
        """Return what a user publishes: some of its items, and its embedding."""
        return SharedUser(self._published(user), self.private["factors"][user, EMBEDDED].copy())

    def published(self, plan: SumPlan, user: int) -> None:
        """Take note that a user has published."""
        if self._around is not None:
            self._around.published(plan.pass_number, user)

    def curious(self, plan: SumPlan, users: Sequence[int]) -> Sequence[int]:
        """Return which of some users are to ask for neighbours before a sum."""
        return [] if self._around is None else self._around.curious(plan.pass_number, users)

    def met(self, plan: SumPlan, user: int, neighbours: Sequence[NDArray[np.float32]]) -> None:
        """Take the embeddings of a user's neighbours."""
        if self._around is not None:
            self._around.take(plan.pass_number, user, neighbours)

    def _published(self, user: int) -> NDArray[np.integer]:
        own, key = self._users[user].items, int(self.keys[user])
        return published_items(own, key, len(self._data.items), self.settings.tags, self.seed)

    def _items(self, user: int) -> NDArray[np.integer]:
        return self._users[user].touched

    def _supports(self, pairs: Sequence[tuple[int, User]]) -> Iterator[Added]:
        for member, user in pairs:
            shares = self._published(user.index) if self.settings.neighbours else None
            yield member, partial(_add_supports, self._items(user.index), shares)

    def _evaluated(
        self, plan: SumPlan, model: Mapping[str, NDArray[np.float32]], pairs: Sequence[tuple[int, User]]
    ) -> Iterator[Added]:
        self._passes = plan.pass_number
        yield from super()._evaluated(plan, model, pairs)

    def _stepped(
        self,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        index: NDArray[np.intp],
        allowed: NDArray[np.bool_],
    ) -> Iterator[tuple[FedGnnUpdate, Callable[[Contribution], None]]]:
        for update in local_step(
            model,
            [self._users[user] for user in index.tolist()],
            self.settings,
            self.keys[index],
            rows=self.private["factors"][index],
            seed=self.seed,
            round_=plan.round,
            allowed=allowed,
            neighbours=self._neighbours(index),
        ):
            yield update, partial(contribute, update)

    def fold_in(self, model: Mapping[str, NDArray[np.float32]]) -> None:
        """Fit the rows of users with ratings at a finished model; they have no neighbours."""
        index = np.flatnonzero(self._rates)
        if len(index):
            users = [self._users[user] for user in index.tolist()]
            self.private["factors"][index] = fitted_rows(
                model, users, self.settings, self.keys[index], seed=self.seed
            )

    def measure(
        self, model: Mapping[str, NDArray[np.float32]], index: NDArray[np.intp], *, round_: int = 0
    ) -> dict[str, NDArray[np.float64]]:
        """Return metrics of some users, float64 (users,) by name; they do not leave the host."""
        rows = np.zeros((len(self.keys), self.settings.width), np.float32)
        rows[index] = self.factors(model, index)
        found = self._rated.measure(lambda users: self._predicted(model, rows[users]), index)
        if self._around is not None:
            passes = self._passes
            for name, values in zip(
                NEIGHBOURHOOD, (self._around.has_any(index), self._around.current(passes, index)), strict=True
            ):
                found[name] = np.full(len(self.keys), np.nan)
                found[name][index] = values
        return found

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


def _add_supports(
    items: NDArray[np.integer], shares: NDArray[np.integer] | None, contribution: Contribution
) -> None:
    add_support(items, contribution)
    if shares is not None:
        contribution.add(SHARED, np.ones(len(shares)), np.random.default_rng(0), rows=shares)
