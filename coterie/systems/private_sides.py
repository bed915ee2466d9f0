"""Sides of systems in rounds whose contributions are clipped and get noise, around any system's own sides.

The system's own sides know nothing of noise.  A host's side clips (`coterie.rounds.sides.Clipped`); `PrivateHost`
adds noise to the codes of each member, and `PrivateServer` decodes sums with noise, and takes impossible counts out
of them.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.rounds.conductor import aggregation_of
from coterie.rounds.policy import min_sum
from coterie.rounds.privacy import check_plan, privacy_of
from coterie.rounds.sides import (
    Arrays,
    Clipped,
    HostSide,
    KeepPrivate,
    ServerSide,
    Summed,
    User,
)
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.noise_stream import SEED_BYTES, noise_stream
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.privacy import Privacy
from coterie.systems.around_server import AroundServer
from coterie.systems.registry import host_side
from coterie.systems.shared.host_data import HostData
from coterie.wire.v1.orchestrator_pb2 import RunPlan

__all__ = ["PrivateHost", "PrivateServer", "planned_host_side"]

_SEEDS = "privacy_seeds"
_ABOVE = 2.0
"""Standard deviations of noise above which a count of users, or the length of a row, has to be."""


def planned_host_side(plan: RunPlan, data: HostData, keys: NDArray[np.uint64], keep: KeepPrivate) -> HostSide:
    """Build a host's side of a planned run, with its bound of norms, or its clip and noise.

    Parameters
    ----------
    plan : RunPlan
    data, keys, keep
        As for `coterie.systems.registry.host_side`.

    Raises
    ------
    ConfigError
        As `coterie.systems.registry.host_side`, or the terms of privacy are not met.
    ValueError
        When the data does not fit the system.
    """
    bound = aggregation_of(plan.rounds).norm_bound

    def make(kept: KeepPrivate) -> HostSide:
        return host_side(plan.system, plan.settings, data, keys, plan.seed, kept, norm_bound=bound)

    check_plan(plan)
    terms = privacy_of(plan.rounds)
    return PrivateHost(make, terms, plan.rounds.min_sum, len(keys), keep) if terms.on else make(keep)


class PrivateServer(AroundServer):
    """Server's side of a system whose sums have noise.

    Parameters
    ----------
    side : ServerSide
        The system's own side.
    terms : Privacy
        With noise.
    floor : int
        The run's fewest users of a sum.
    reports_of_users : bool
        Whether each user is a member, with local noise of its own.

    Raises
    ------
    ConfigError
        The codes of a sum have no room for the noise.
    """

    def __init__(
        self, side: ServerSide, terms: Privacy, floor: int, *, reports_of_users: bool = False
    ) -> None:
        super().__init__(side)
        self._terms = terms
        self._floor = floor
        self._reports_of_users = reports_of_users
        for purpose in Purpose:
            if purpose is not Purpose.SUPPORTS or side.asks_supports:
                self.layout(purpose)

    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of contributions with noise for a purpose."""
        return _noisy(self._terms, self._side.layout(purpose), self._floor)

    def _possible(
        self, purpose: Purpose, sums: Mapping[str, NDArray[np.float64]], users: int
    ) -> dict[str, NDArray[np.float64]]:
        """Return sums in which no count is below 0, no item is counted by noise alone, and changes are less noisy."""
        layout, found = self._side.layout(purpose), dict(sums)
        # The cohort had at least these users, and its floor decided how much each added.
        floor = min_sum(users, self._floor)
        for segment in layout.segments:
            if segment.changes:
                noise = self._terms.deviation(layout, segment.name, floor, self._draws(users))
                found[segment.name] = _shortened(found[segment.name], noise)
                continue
            noise = 0.0
            if purpose is Purpose.SUPPORTS and self._terms.place == "distributed":
                # Of the many items that nobody has, noise alone lifts one in 44 above twice its standard deviation.
                noise = _ABOVE * self._terms.deviation(layout, segment.name, floor, users)
            counted = found[segment.name]
            found[segment.name] = np.where(counted > noise, counted, 0.0)
        return found

    def _draws(self, users: int) -> int:
        """Return how many draws of noise are at least in a sum: one of each user or, of local noise, of each member."""
        return users if self._terms.place == "distributed" or self._reports_of_users else min(users, 1)

    def apply(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the arrays after a sum."""
        sums = self._possible(summed.purpose, summed.sums, summed.users)
        return self._side.apply(
            arrays,
            Summed(
                summed.purpose,
                sums,
                summed.users,
                summed.pass_number,
                summed.part,
                summed.shares,
                summed.population,
            ),
        )

    def measured(
        self, purpose: Purpose, sums: Mapping[str, NDArray[np.float64]]
    ) -> dict[str, tuple[float, float]]:
        """Return the metrics in a sum: sum and count over users, by name."""
        found = self._side.measured(purpose, self._possible(purpose, sums, 0))
        # Noise may leave nobody who was measured; figures are computed from all metrics.
        return {name: (total, max(count, 1.0)) for name, (total, count) in found.items()}


class PrivateHost:
    """Host's side of a system whose users' contributions are clipped and get noise.

    Parameters
    ----------
    make : callable
        Makes the system's own side, given where it keeps users' private arrays.
    terms : Privacy
        With noise.
    floor : int
        The run's fewest users of a sum.
    users : int
        Users of this host.
    keep : callable
        As for the system's own side; keeps the seeds of users' noise as well, which the operating system draws.

    Raises
    ------
    ConfigError
        The system does not clip contributions, or codes have no room for the noise.
    """

    def __init__(
        self,
        make: Callable[[KeepPrivate], HostSide],
        terms: Privacy,
        floor: int,
        users: int,
        keep: KeepPrivate,
    ) -> None:
        drawn = np.frombuffer(secrets.token_bytes(users * SEED_BYTES), np.uint8).reshape(users, SEED_BYTES)
        self._seeds: NDArray[np.uint8] | None = None

        def with_seeds(initial: Arrays) -> Arrays:
            kept = keep({**initial, _SEEDS: drawn})
            self._seeds = kept[_SEEDS]
            return {name: kept[name] for name in initial}

        self._side = make(with_seeds)
        if self._seeds is None:
            # The system's users keep nothing themselves.
            with_seeds({})
        if not isinstance(self._side, Clipped):
            raise ConfigError("rounds.privacy: hosts of this system do not clip contributions")
        self._side.clip = terms.bounds
        self._terms = terms
        self._floor = floor

    def __getattr__(self, name: str) -> Any:
        """Return what else the system's own side has."""
        if name == "_side":
            raise AttributeError(name)
        return getattr(self._side, name)

    @property
    def measured(self) -> Mapping[str, NDArray[np.float64]]:
        """Each user's last measured metrics, without noise; they do not leave the host."""
        return self._side.measured

    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of contributions with noise for a purpose."""
        return _noisy(self._terms, self._side.layout(purpose), self._floor)

    def inputs(self, purpose: Purpose) -> tuple[str, ...]:
        """Return the names of what contributions for a purpose depend on beside plan and model."""
        return self._side.inputs(purpose)

    def contributions(
        self,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        opened: NDArray[np.bool_] | None,
        members: Mapping[int, Sequence[User]],
    ) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        """Yield each member and the codes of its contribution with noise, in any order."""
        purpose = Purpose(plan.purpose)
        own, noisy = self._side.layout(purpose), self.layout(purpose)
        for member, codes in self._side.contributions(plan, model, opened, members):
            users = members[member]
            exact = (codes - own.zeros(len(users))).view(np.int32)
            random = noise_stream(self._seeds_of(users), plan, "privacy-noise", *_more(plan, codes))
            floors = self._floor, plan.min_sum
            steps = self._terms.with_noise(own, floors, len(users), exact, random)
            yield member, steps.astype(np.uint32) + noisy.zeros(len(users))

    def _seeds_of(self, users: Sequence[User]) -> bytes:
        if self._seeds is None:
            raise AssertionError("seeds are drawn when the side is made")
        return self._seeds[[user.index for user in users]].tobytes()

    def recommend(self, model: Mapping[str, NDArray[np.float32]], user: int) -> NDArray[np.float32]:
        """Return a user's scores of all items, float32 (I,)."""
        return self._side.recommend(model, user)


def _shortened(values: NDArray[np.float64], noise: float) -> NDArray[np.float64]:
    """Return a sum without the length that noise may have added, row by row.

    Rows that may be noise alone become zero: the model would only wander.  This is the shrinkage of James and Stein,
    1961, with the length that noise seldom exceeds in place of the one that it has on average.  Vectors are taken as
    one row.
    """
    rows = (
        values.reshape(len(values), math.prod(values.shape[1:])) if values.ndim > 1 else values.reshape(1, -1)
    )
    squared = np.square(rows).sum(axis=1, keepdims=True)
    width = rows.shape[1]
    added = (width + _ABOVE * math.sqrt(2 * width)) * noise**2
    kept = np.maximum(1 - added / np.maximum(squared, np.finfo(np.float64).tiny), 0.0)
    shortened: NDArray[np.float64] = (rows * kept).reshape(values.shape)
    return shortened


def _more(plan: SumPlan, codes: NDArray[np.uint32]) -> tuple[bytes | int, ...]:
    """Return what tells noise apart beside the place of a sum.

    Counts of items are the same when their sum is formed again, and get the same noise then.  Other values depend on
    the round: each round has noise of its own, and a member that restarts sends the contribution that it made.
    """
    digest = hashlib.sha256(codes.astype("<u4", copy=False).tobytes()).digest()
    return (digest,) if Purpose(plan.purpose) is Purpose.SUPPORTS else (digest, plan.round)


def _noisy(terms: Privacy, layout: Layout, floor: int) -> Layout:
    try:
        return terms.noisy(layout, floor)
    except ValueError as error:
        raise ConfigError(str(error)) from error
