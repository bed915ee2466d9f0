"""Host's side of FedNCF: trains and measures its users, and makes their contributions to the secure sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.leave_one_out import LeaveOneOut
from coterie.rounds.inputs import inputs_of
from coterie.rounds.sides import HostUsers, KeepPrivate, User
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Clip, Contribution, Layout
from coterie.secure_sum.plan import SumPlan
from coterie.systems.fedncf.local_step import UserUpdate, contribute, local_step
from coterie.systems.fedncf.mathematics import Private, balance, initial_private, scores
from coterie.systems.fedncf.purposes import layout_of, metrics_of
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.systems.shared.alike import ComparedByVectors
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.members_of_host import gathered
from coterie.systems.shared.metric_segments import add_measures
from coterie.systems.shared.popularity import with_popularity

__all__ = ["FedNcfHost"]

_ROUNDING = 3
"""First element of the key under which the values of an evaluation are rounded; training has lower ones."""

_USERS_AT_ONCE = 4096
"""Most users whose local steps are taken in one call."""


@dataclass
class FedNcfHost(ComparedByVectors):
    """Host's side of FedNCF.

    Parameters
    ----------
    settings : FedNcfSettings
    holdout : LeaveOneOut
        The users' interactions, by position at this host and item of the catalogue.
    keys : ndarray of uint64, shape (users,)
        Each user's own number, which nobody else knows.
    private : Private
        Private arrays, a slot for each user; changed in place.
    seed : int
        Seed of the run.
    measured : dict of str to ndarray of float64, shape (users,)
        Metrics as they were last measured for a contribution.
    norm_bound : float
        Largest Euclidean norm of one user's contribution to training; 0 for none.
    clip : Clip, optional
        Bounds of one user's contribution to any sum.
    """

    settings: FedNcfSettings
    holdout: LeaveOneOut
    keys: NDArray[np.uint64]
    private: Private
    seed: int
    measured: Mapping[str, NDArray[np.float64]] = field(init=False, default_factory=dict)
    norm_bound: float = field(init=False, default=0.0)
    clip: Clip | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._histories = self.holdout.training()

    @classmethod
    def of_plan(
        cls, settings: str, data: HostData, keys: NDArray[np.uint64], seed: int, keep: KeepPrivate
    ) -> Self:
        """Build the side from the settings of a plan, JSON; parameters as for `coterie.systems.registry.host_side`.

        Raises
        ------
        ConfigError
            The text holds no settings of FedNCF.
        """
        own = FedNcfSettings.from_json(settings)
        private = Private(**keep(dict(initial_private(own, keys).arrays())))
        return cls(own, data.leave_one_out(seed), keys, private, seed)

    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of a contribution to a sum of this purpose."""
        return layout_of(self.settings, purpose, self.holdout.n_items)

    def inputs(self, purpose: Purpose) -> tuple[str, ...]:
        """Return the names of what contributions for a purpose depend on beside plan and model."""
        return inputs_of(purpose, opens=self.settings.asks_supports)

    def contributions(
        self,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        opened: NDArray[np.bool_] | None,
        members: Mapping[int, Sequence[User]],
    ) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        """Yield each member and the codes of its contribution, in any order."""
        purpose = Purpose(plan.purpose)
        each = self._each(purpose, plan, model, opened, members)
        bound = self.norm_bound if purpose is Purpose.TRAIN else 0.0
        return gathered(self.layout(purpose), members, each, bound, clip=self.clip)

    def _each(
        self,
        purpose: Purpose,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        opened: NDArray[np.bool_] | None,
        members: Mapping[int, Sequence[User]],
    ) -> Iterator[tuple[int, _Add]]:
        each = [HostUsers.of(users) for users in members.values()]
        member = np.repeat(np.fromiter(members, np.intp, len(members)), [len(users) for users in each])
        index = np.concatenate([np.empty(0, np.intp), *(users.indices for users in each)])
        if purpose is Purpose.SUPPORTS:
            for place, user in enumerate(index):
                yield int(member[place]), _Supports(self._histories[user])
            return
        measured = self._measure(purpose, model, index)
        if purpose is Purpose.EVALUATE:
            for place, user in enumerate(index):
                yield int(member[place]), _Measured(measured[place], self._rng(int(user), plan.round))
            return
        # Hosts do not know the sizes of groups, which are about equal.
        weights = None if opened is None else balance(opened, np.ones(len(opened), np.int64))
        group = np.concatenate([np.empty(0, np.intp), *(users.groups for users in each)])
        for one in np.unique(group).tolist():
            whole = np.flatnonzero(group == one)
            # Some users after others: what is copied for a step does not grow with the host.
            for own in np.split(whole, range(_USERS_AT_ONCE, len(whole), _USERS_AT_ONCE)):
                users = index[own]
                for update in local_step(
                    model,
                    self.private.take(users),
                    self._histories.take(users),
                    self.settings,
                    self.keys[users],
                    seed=self.seed,
                    round_=plan.round,
                    global_round=plan.pass_number,
                    allowed=None if opened is None else opened[one],
                    balance=weights,
                ):
                    place = own[update.index]
                    # A step that diverged sends nothing, and must not be where the next one begins.
                    if np.isfinite(update.private.embedding).all():
                        self.private.put([index[place]], update.private)
                    yield int(member[place]), _Update(update, self.settings, measured[place])

    def _measure(
        self, purpose: Purpose, model: Mapping[str, NDArray[np.float32]], index: NDArray[np.intp]
    ) -> NDArray[np.float64]:
        """Measure some users for a purpose, and return their metrics, (n, m)."""
        self.measured = found = self.measure(model, index, everything=purpose is Purpose.EVALUATE)
        return np.stack([found[name][index] for name in metrics_of(purpose)], axis=1)

    def measure(
        self,
        model: Mapping[str, NDArray[np.float32]],
        index: NDArray[np.intp] | None = None,
        *,
        everything: bool = True,
    ) -> dict[str, NDArray[np.float64]]:
        """Return each user's metrics, float64 (users,) by name; they do not leave the host."""
        embedding = self.private.embedding

        def candidates(users: NDArray[np.intp], items: NDArray[np.int32]) -> NDArray[np.floating]:
            return self._scores(model, embedding[users], items)

        def all_items(users: NDArray[np.intp]) -> NDArray[np.floating]:
            return self._scores(model, embedding[users])

        return self.holdout.measure(candidates, all_items if everything else None, index)

    def recommend(self, model: Mapping[str, NDArray[np.float32]], user: int) -> NDArray[np.float32]:
        """Return a user's scores of all items, float32 (I,)."""
        own: NDArray[np.float32] = self._scores(model, self.private.embedding[[user]])[0]
        return own

    def _scores(
        self,
        model: Mapping[str, NDArray[np.float32]],
        embedding: NDArray[np.float32],
        items: NDArray[np.integer] | None = None,
    ) -> NDArray[np.float32]:
        found = scores(model, embedding, self.settings, items)
        return with_popularity(found, model, self.settings.popularity, items)

    def _rng(self, user: int, round_: int) -> np.random.Generator:
        key = (_ROUNDING, self.seed, round_)
        return np.random.default_rng(np.random.SeedSequence(int(self.keys[user]), spawn_key=key))


@dataclass(frozen=True)
class _Supports:
    items: NDArray[np.integer]

    def __call__(self, contribution: Contribution) -> None:
        # Whole numbers are not rounded: nothing is drawn.
        ones = np.ones(len(self.items))
        contribution.add("supports", ones, np.random.default_rng(0), rows=self.items)


@dataclass(frozen=True)
class _Measured:
    values: NDArray[np.float64]
    rng: np.random.Generator

    def __call__(self, contribution: Contribution) -> None:
        add_measures(contribution, self.values, self.rng)


@dataclass(frozen=True)
class _Update:
    update: UserUpdate
    settings: FedNcfSettings
    measured: NDArray[np.float64]

    def __call__(self, contribution: Contribution) -> None:
        contribute(self.update, contribution, self.settings)
        add_measures(contribution, self.measured, self.update.rng)


_Add = _Supports | _Measured | _Update
