"""Host's side of FPL: contributions, evaluation and recommendations of its users."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.inputs import inputs_of
from coterie.rounds.sides import KeepPrivate
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Contribution
from coterie.secure_sum.plan import SumPlan
from coterie.systems.fpl.local_step import FplUpdate, contribute, disclosure, local_step
from coterie.systems.fpl.mathematics import initial_factors, scores
from coterie.systems.fpl.server import layouts
from coterie.systems.fpl.settings import PI, FplSettings
from coterie.systems.shared.factor_steps import UserData
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.popularity import with_popularity
from coterie.systems.shared.rated_host import RatedHost, training_ratings
from coterie.systems.shared.rated_server import open_anywhere
from coterie.systems.shared.taken_up import TAKEN_UP, taken_up

__all__ = ["FplHost"]

_FOLD_IN_ROUNDS = 100
"""Rounds that a user who never took part in training takes on a finished model, whose rows do not move."""


class FplHost(RatedHost):
    """Host's side of FPL.

    Parameters
    ----------
    settings : FplSettings
    data : HostData
        Data of the users; an interaction counts, whatever its rating.  Preferences may have ``pi``.
    keys : ndarray of uint64, shape (users,)
        Each user's own number, which nobody else knows.
    seed : int
        Seed of the run.
    keep : callable
        Takes initial private arrays, ``factors``, float32 (users, 1 + K); returns the stored ones, if any.

    Attributes
    ----------
    private : dict of str to ndarray
        Private arrays, a row for each user; changed in place.
    """

    def __init__(
        self, settings: FplSettings, data: HostData, keys: NDArray[np.uint64], seed: int, keep: KeepPrivate
    ) -> None:
        ones = taken_up(data)
        users = [
            UserData(items, ratings) for items, ratings in training_ratings(ones, TAKEN_UP, TAKEN_UP, "fpl")
        ]
        super().__init__(layouts(settings, len(data.items)), ones, keys, seed, users)
        self.settings = settings
        self.private = keep({"factors": initial_factors(settings, keys)})
        self._rated = dataclasses.replace(ones.rated(), relevant_from=TAKEN_UP)
        self._disclosed = [
            disclosure(settings, int(key), len(data.items), float(own))
            for key, own in zip(keys, data.preference(PI.name), strict=True)
        ]

    def inputs(self, purpose: Purpose) -> tuple[str, ...]:
        """Return the names of what contributions for a purpose depend on beside plan and model."""
        return inputs_of(purpose, opens=self.settings.closes_items)

    def _stepped(
        self,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        index: NDArray[np.intp],
        allowed: NDArray[np.bool_],
    ) -> Iterator[tuple[FplUpdate, Callable[[Contribution], None]]]:
        for update in self.updates(model, index, allowed, round_=plan.round):
            yield update, partial(contribute, update)

    def items_of(self, user: int) -> NDArray[np.integer]:
        """Return the items that a user trains on, ascending."""
        return self._items(user)

    def updates(
        self,
        model: Mapping[str, NDArray[np.float32]],
        index: NDArray[np.intp],
        allowed: NDArray[np.bool_],
        *,
        round_: int,
    ) -> Iterator[FplUpdate]:
        """Yield what some users would contribute to a round of training; no private state changes.

        Parameters
        ----------
        model : mapping
        index : ndarray of int, shape (n,)
            Positions of the users; `FplUpdate.index` is a position in it.
        allowed : ndarray of bool, shape (n_items,)
            Open items.
        round_ : int
            Number of the round.
        """
        return local_step(
            model,
            [self._users[user].items for user in index.tolist()],
            self.settings,
            self.keys[index],
            factors=self.private["factors"][index],
            disclosed=[self._disclosed[user] for user in index.tolist()],
            seed=self.seed,
            round_=round_,
            allowed=allowed,
        )

    def measure(
        self, model: Mapping[str, NDArray[np.float32]], index: NDArray[np.intp], *, round_: int = 0
    ) -> dict[str, NDArray[np.float64]]:
        """Return metrics of some users, float64 (users,) by name; they do not leave the host."""
        factors = self.private["factors"]
        return self._rated.measure(lambda users: self._predicted(model, factors[users]), index)

    def fold_in(self, model: Mapping[str, NDArray[np.float32]]) -> None:
        """Move users' factors by the steps of training, on a finished model; nothing is sent.

        A user's part of the likelihood has one maximum where the rows do not move, so the first factor does not count.
        """
        allowed = open_anywhere(model)
        index = np.arange(len(self.keys))
        for round_ in range(_FOLD_IN_ROUNDS):
            for update in self.updates(model, index, allowed, round_=round_):
                self.private["factors"][update.index] = update.kept

    def factors(
        self, model: Mapping[str, NDArray[np.float32]], index: NDArray[np.intp], *, round_: int = 0
    ) -> NDArray[np.float32]:
        """Return the factors that some users keep, float32 (n, 1 + K), at any version of the model."""
        kept: NDArray[np.float32] = self.private["factors"][index]
        return kept

    def _predicted(
        self, model: Mapping[str, NDArray[np.float32]], factors: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        found = scores(model, factors, open_anywhere(model))
        return with_popularity(found, model, self.settings.popularity)
