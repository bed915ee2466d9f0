"""FedNCF in rounds: the two sides of ``coterie.systems.fedncf.mathematics``, with metrics in the same vector.

With ``touch = "once"`` each group first sums which items its users have.  Items with fewer than ``min_touch``
supporters stay closed for that group: a row that one participant touches *is* that participant's row, whatever
protects the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.leave_one_out import LeaveOneOut, metric_names
from coterie.rounds.sides import Arrays, Summed, User, named, unnamed
from coterie.rounds.training import Purpose, means
from coterie.secure_sum.contribution import Contribution, Layout, Segment
from coterie.secure_sum.plan import SumPlan
from coterie.systems.fedncf.local_step import UserUpdate, contribute, local_step
from coterie.systems.fedncf.mathematics import (
    FedNcfSettings,
    Private,
    apply,
    balance,
    expected_touches,
    initial,
    initial_server_state,
    layout,
    scores,
)
from coterie.systems.fedncf.networks import Architecture
from coterie.systems.shared.members_of_host import gathered
from coterie.systems.shared.metric_segments import add_measures, measure_segments, measured_in
from coterie.systems.shared.optimisers import ServerOptimiser
from coterie.systems.shared.plan_settings import settings_from_json, settings_to_json

__all__ = ["FedNcfHost", "FedNcfPlan", "FedNcfServer"]

_ROUNDING = 3
"""First element of the key under which the values of an evaluation are rounded; training has lower ones."""

_MODEL, _SERVER = "model.", "server."


@dataclass(frozen=True)
class FedNcfPlan:
    """What the plan of a run says about FedNCF.

    Parameters
    ----------
    learning : FedNcfSettings
    min_touch : int
        Fewest users of a group that must have an item for the group to train it; with ``touch = "once"``.
    """

    learning: FedNcfSettings
    min_touch: int = 3

    def to_json(self) -> str:
        """Return the settings as the contract's ``RunPlan.settings``."""
        return settings_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> FedNcfPlan:
        """Return the settings of a plan.

        Raises
        ------
        ConfigError
            When they are malformed, name something unknown, or a value is out of its range.
        """
        return settings_from_json(text, "FedNCF", cls._of)

    @classmethod
    def _of(cls, plain: dict[str, Any]) -> FedNcfPlan:
        learning = dict(plain.pop("learning"))
        architecture = dict(learning.pop("architecture"))
        architecture["layers"] = tuple(architecture["layers"])
        server = ServerOptimiser(**learning.pop("server"))
        settings = FedNcfSettings(architecture=Architecture(**architecture), server=server, **learning)
        return cls(settings, **plain)

    @property
    def supports(self) -> bool:
        """Whether each group is asked for its items first."""
        return self.learning.aggregation == "mf-fedavg" and self.learning.touch == "once"

    def layout(self, purpose: Purpose, n_items: int) -> Layout:
        """Return what a contribution of a purpose looks like."""
        match purpose:
            case Purpose.SUPPORTS:
                return Layout((Segment.whole("supports", (n_items,), 1),))
            case Purpose.EVALUATE:
                return Layout(measure_segments(_names(purpose)))
            case Purpose.TRAIN:
                return layout(self.learning, n_items, measure_segments(_names(purpose)))


def _names(purpose: Purpose) -> tuple[str, ...]:
    """Return the metrics of a purpose: a round of training ranks among the sampled items only, which is quick."""
    return metric_names(everything=purpose is Purpose.EVALUATE)


class FedNcfServer:
    """The side of the orchestration server.

    Parameters
    ----------
    plan : FedNcfPlan
    n_items : int
    seed : int
        Of the run.
    groups : int
        Groups of the population.
    """

    def __init__(self, plan: FedNcfPlan, n_items: int, seed: int, groups: int) -> None:
        self.plan = plan
        self.asks_supports = plan.supports
        self.metrics = _names(Purpose.EVALUATE)
        self._n_items = n_items
        self._seed = seed
        self._groups = groups

    def initial(self) -> Arrays:
        """Return version 0 of the model, the optimiser's state, and no supports."""
        model = initial(self.plan.learning, self._n_items, self._seed)
        arrays = named(_MODEL, model) | named(_SERVER, initial_server_state(self.plan.learning, model))
        if self.asks_supports:
            arrays["supports"] = np.zeros((self._groups, self._n_items), np.uint32)
            arrays["group_users"] = np.zeros(self._groups, np.uint32)
        return arrays

    def layout(self, purpose: Purpose) -> Layout:
        """Return what a contribution of a purpose looks like."""
        return self.plan.layout(purpose, self._n_items)

    def apply(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the arrays after a sum."""
        if summed.purpose is Purpose.EVALUATE:
            return arrays
        if summed.purpose is Purpose.SUPPORTS:
            supports, users = arrays["supports"].copy(), arrays["group_users"].copy()
            supports[summed.part] = summed.sums["supports"].astype(np.uint32)
            users[summed.part] = summed.users
            return {**arrays, "supports": supports, "group_users": users}
        model, state = apply(
            self.model(arrays),
            unnamed(_SERVER, arrays),
            summed.sums,
            self.plan.learning,
            users=summed.users,
            global_round=summed.pass_number,
            expected=self._expected(arrays, summed.shares),
            population=summed.population,
        )
        return {**arrays, **named(_MODEL, model), **named(_SERVER, state)}

    def model(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        """Return item embeddings and network."""
        return unnamed(_MODEL, arrays)

    def opened(self, arrays: Arrays) -> NDArray[np.bool_] | None:
        """Return which items each group may train."""
        if not self.asks_supports:
            return None
        opened: NDArray[np.bool_] = arrays["supports"] >= self.plan.min_touch
        return opened

    def measured(
        self, purpose: Purpose, sums: Mapping[str, NDArray[np.float64]]
    ) -> dict[str, tuple[float, float]]:
        """Return sum and count over users of the metrics in a sum."""
        return measured_in(sums, _names(purpose))

    def figures(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, int]]:
        """Return the means over users."""
        return means(totals)

    def _expected(self, arrays: Arrays, shares: NDArray[np.float64]) -> NDArray[np.float64] | None:
        opened = self.opened(arrays)
        if opened is None:
            return None
        total = np.zeros(self._n_items)
        for group in np.flatnonzero(shares):
            support = np.where(opened[group], arrays["supports"][group], 0).astype(np.float64)
            users = int(arrays["group_users"][group])
            if users and support.any():
                mean = float(support.sum()) / users
                touched = expected_touches(support, mean, self.plan.learning, users=users)
                total += shares[group] * touched
        return total


@dataclass
class FedNcfHost:
    """The side of a host.

    Parameters
    ----------
    plan : FedNcfPlan
    holdout : LeaveOneOut
        The users' interactions, by position at this host and item of the catalogue.
    keys : ndarray of uint64, shape (users,)
        Each user's own number, which nobody else knows.
    private : Private
        What each user keeps; changed in place.
    seed : int
        Of the run.
    measured : dict of str to ndarray of float64, shape (users,)
        Metrics as they were last measured for a contribution.
    """

    plan: FedNcfPlan
    holdout: LeaveOneOut
    keys: NDArray[np.uint64]
    private: Private
    seed: int
    measured: Mapping[str, NDArray[np.float64]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._histories = self.holdout.training()

    def layout(self, purpose: Purpose) -> Layout:
        """Return what a contribution of a purpose looks like."""
        return self.plan.layout(purpose, self.holdout.n_items)

    def contributions(
        self,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        opened: NDArray[np.bool_] | None,
        members: Mapping[int, Sequence[User]],
    ) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        """Yield the codes of each member's contribution, in any order."""
        purpose = Purpose(plan.purpose)
        each = self._each(purpose, plan, model, opened, members)
        return gathered(self.layout(purpose), members, each)

    def _each(
        self,
        purpose: Purpose,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        opened: NDArray[np.bool_] | None,
        members: Mapping[int, Sequence[User]],
    ) -> Iterator[tuple[int, _Add]]:
        pairs = [(member, user) for member, users in members.items() for user in users]
        if purpose is Purpose.SUPPORTS:
            for member, user in pairs:
                yield member, _Supports(self._histories[user.index])
            return
        index = np.array([user.index for _, user in pairs], np.intp)
        measured = self._measure(purpose, model, index)
        if purpose is Purpose.EVALUATE:
            for (member, user), values in zip(pairs, measured, strict=True):
                yield member, _Measured(values, self._rng(user.index, plan.round))
            return
        # Groups are about equally large; how large, hosts are not told.
        weights = None if opened is None else balance(opened, np.ones(len(opened), np.int64))
        for group in sorted({user.group for _, user in pairs}):
            own = [n for n, (_, user) in enumerate(pairs) if user.group == group]
            for update in local_step(
                model,
                self.private.take(index[own]),
                [self._histories[n] for n in index[own]],
                self.plan.learning,
                self.keys[index[own]],
                seed=self.seed,
                round_=plan.round,
                global_round=plan.pass_number,
                allowed=None if opened is None else opened[group],
                balance=weights,
            ):
                place = own[update.index]
                trained = pairs[place][1].index
                # A step that diverged sends nothing, and must not be where the next one begins.
                if np.isfinite(update.private.embedding).all():
                    self.private.put([trained], update.private)
                yield pairs[place][0], _Update(update, self.plan.learning, measured[place])

    def _measure(
        self, purpose: Purpose, model: Mapping[str, NDArray[np.float32]], index: NDArray[np.intp]
    ) -> NDArray[np.float64]:
        """Return the metrics of some users, (n, m)."""
        self.measured = found = self.measure(model, index, everything=purpose is Purpose.EVALUATE)
        return np.stack([found[name][index] for name in _names(purpose)], axis=1)

    def measure(
        self,
        model: Mapping[str, NDArray[np.float32]],
        index: NDArray[np.intp] | None = None,
        *,
        everything: bool = True,
    ) -> dict[str, NDArray[np.float64]]:
        """Return each user's metrics, float64 (users,) by name; they do not leave the host."""
        learning, embedding = self.plan.learning, self.private.embedding

        def candidates(users: NDArray[np.intp], items: NDArray[np.int32]) -> NDArray[np.floating]:
            return scores(model, embedding[users], learning, items)

        def all_items(users: NDArray[np.intp]) -> NDArray[np.floating]:
            return scores(model, embedding[users], learning)

        return self.holdout.measure(candidates, all_items if everything else None, index)

    def recommend(self, model: Mapping[str, NDArray[np.float32]], user: int) -> NDArray[np.float32]:
        """Return a user's scores of all items, float32 (I,)."""
        own: NDArray[np.float32] = scores(model, self.private.embedding[[user]], self.plan.learning)[0]
        return own

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
