"""Host's side of federated iALS: solves for its users' factors, contributes, measures, recommends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.leave_one_out import LeaveOneOut
from coterie.rounds.inputs import inputs_of
from coterie.rounds.sides import KeepPrivate, User
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Contribution, Layout
from coterie.secure_sum.plan import SumPlan
from coterie.systems.ials.mathematics import UserEquations, bounded, products
from coterie.systems.ials.settings import METRICS, IalsSettings
from coterie.systems.shared.alike import ComparedByVectors
from coterie.systems.shared.factors import scores
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.members_of_host import Added, UserByUser
from coterie.systems.shared.metric_segments import add_measures
from coterie.systems.shared.popularity import with_popularity

__all__ = ["IalsHost"]

_ROUNDING = 1
"""First element of the key under which the values of a contribution are rounded."""

_USERS_AT_ONCE = 256
"""Most users whose equations are held in memory at once."""

_Model = Mapping[str, NDArray[np.float32]]


class IalsHost(ComparedByVectors, UserByUser):
    """Host's side of federated iALS.

    Parameters
    ----------
    settings : IalsSettings
    data : HostData
        Data of the users; an interaction counts, whatever its rating.
    keys : ndarray of uint64, shape (users,)
        Each user's own number, which nobody else knows.
    seed : int
        Seed of the run.
    keep : callable
        Not used: a user's factor is solved for anew at each version, and nothing is kept.

    Attributes
    ----------
    measured : mapping of str to ndarray of float64, shape (users,)
        Metrics as they were last measured for a contribution.
    """

    def __init__(
        self, settings: IalsSettings, data: HostData, keys: NDArray[np.uint64], seed: int, keep: KeepPrivate
    ) -> None:
        self.measured: Mapping[str, NDArray[np.float64]] = {}
        self._settings = settings
        self._holdout: LeaveOneOut = data.leave_one_out(seed)
        self._keys = keys
        self._seed = seed
        # Terms are added in the order of items, whatever the order in which a store returns them.
        self._histories = [np.sort(items) for items in self._holdout.training()]

    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of a contribution to a sum of this purpose."""
        return self._settings.layout(purpose, self._holdout.n_items)

    def inputs(self, purpose: Purpose) -> tuple[str, ...]:
        """Return the names of what contributions for a purpose depend on beside plan and model."""
        return inputs_of(purpose, opens=True)

    def _items(self, user: int) -> NDArray[np.integer]:
        return self._histories[user]

    def _evaluated(self, plan: SumPlan, model: _Model, pairs: Sequence[tuple[int, User]]) -> Iterator[Added]:
        index = np.array([user.index for _, user in pairs], np.intp)
        # The metrics of single users do not leave the host.
        self.measured = found = self.measure(model, index)
        for member, user in pairs:
            values = np.array([found[name][user.index] for name in METRICS])
            yield member, partial(add_measures, values=values, rng=self._rng(user, plan))

    def _trained(
        self,
        plan: SumPlan,
        model: _Model,
        opened: NDArray[np.bool_] | None,
        pairs: Sequence[tuple[int, User]],
    ) -> Iterator[Added]:
        equations, whole = self._equations(model), model["open"] > 1
        for first in range(0, len(pairs), _USERS_AT_ONCE):
            some = pairs[first : first + _USERS_AT_ONCE]
            solved = equations.solved([self._histories[user.index] for _, user in some])
            factors = bounded(solved, self._settings.user_bound)
            for (member, user), factor in zip(some, factors, strict=True):
                items = self._histories[user.index]
                rows = items if opened is None else items[opened[user.group][items]]
                add = partial(_add_factor, factor=factor, rows=rows, whole=rows[whole[rows]])
                yield member, partial(add, rng=self._rng(user, plan))

    def _equations(self, model: _Model) -> UserEquations:
        settings = self._settings
        return UserEquations(
            model["items"], model["open"] > 0, ridge=settings.ridge, alpha0=settings.alpha0, nu=settings.nu
        )

    def _rng(self, user: User, plan: SumPlan) -> np.random.Generator:
        key = (_ROUNDING, self._seed, plan.round)
        return np.random.default_rng(np.random.SeedSequence(int(self._keys[user.index]), spawn_key=key))

    def factors(self, model: _Model, index: NDArray[np.intp]) -> NDArray[np.float32]:
        """Return factors of some users at a version, float32 (n, d); they do not leave the host."""
        equations = self._equations(model)
        found = np.empty((len(index), self._settings.factors), np.float32)
        for first in range(0, len(index), _USERS_AT_ONCE):
            part = slice(first, first + _USERS_AT_ONCE)
            found[part] = equations.solved([self._histories[user] for user in index[part].tolist()])
        return found

    def measure(self, model: _Model, index: NDArray[np.intp]) -> dict[str, NDArray[np.float64]]:
        """Return metrics of some users, float64 (users,) by name, NaN for others; they do not leave the host."""
        weight = self._settings.popularity
        factors = np.zeros((len(self._keys), self._settings.factors), np.float32)
        factors[index] = self.factors(model, index)

        def candidates(users: NDArray[np.intp], items: NDArray[np.int32]) -> NDArray[np.floating]:
            return with_popularity(scores(model, factors[users], items), model, weight, items)

        def all_items(users: NDArray[np.intp]) -> NDArray[np.floating]:
            return with_popularity(scores(model, factors[users]), model, weight)

        return self._holdout.measure(candidates, all_items, index)

    def fold_in(self, model: _Model) -> None:
        """Set nothing: users keep nothing, and their factors follow from their items and the model."""

    def recommend(self, model: _Model, user: int) -> NDArray[np.float32]:
        """Return a user's scores of all items, float32 (I,); closed items score 0, and popularity where it counts."""
        own: NDArray[np.float32] = scores(model, self.factors(model, np.array([user], np.intp)))[0]
        return with_popularity(own, model, self._settings.popularity)


def _add_factor(
    contribution: Contribution,
    factor: NDArray[np.float64],
    rows: NDArray[np.integer],
    whole: NDArray[np.integer],
    rng: np.random.Generator,
) -> None:
    """Add a user's part of the equations of items."""
    triangle = products(factor[None])
    contribution.add("users", np.repeat(factor[None], len(rows), axis=0), rng, rows=rows)
    contribution.add("gram", triangle[0], rng)
    if len(whole):
        contribution.add("products", np.repeat(triangle, len(whole), axis=0), rng, rows=whole)
