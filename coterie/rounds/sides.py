"""What a rounds-based learning system is to the rounds: two sides, one at the orchestration server, one at hosts.

A new system implements both, and its `System` names them; no service changes (``docs/extending.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.plan import SumPlan

__all__ = [
    "Arrays",
    "HostSide",
    "Keep",
    "OwnerSide",
    "ServerSide",
    "Summed",
    "ToldServerSide",
    "User",
    "named",
    "unnamed",
]

Arrays = dict[str, NDArray[Any]]
"""Named arrays."""

Keep = Callable[[Arrays], Arrays]
"""Given what users keep before their first round, (users, ...) each: the same arrays where a host left them last."""


@dataclass(frozen=True)
class Summed:
    """A round's sum, decoded, and what it covers.

    Parameters
    ----------
    purpose : Purpose
    sums : mapping of str to ndarray of float64
        `Layout.decode` of the purpose's layout.
    users : int
        Users that it covers.
    pass_number, part : int
        Which cohort; of SUPPORTS ``part`` is the group.
    shares : ndarray of float64, shape (groups,)
        Which share of each group was in the cohort.
    population : int
        All users of the run.
    """

    purpose: Purpose
    sums: Mapping[str, NDArray[np.float64]]
    users: int
    pass_number: int
    part: int
    shares: NDArray[np.float64]
    population: int


class ServerSide(Protocol):
    """The side of the orchestration server: pure functions of the arrays that it keeps."""

    asks_supports: bool
    metrics: tuple[str, ...]
    """Names of the metrics that an evaluation measures."""

    def initial(self) -> Arrays:
        """Return everything that is kept, before the first round."""
        ...

    def layout(self, purpose: Purpose) -> Layout:
        """Return what a contribution of a purpose looks like."""
        ...

    def apply(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the arrays after a sum."""
        ...

    def model(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        """Return what participants fetch."""
        ...

    def opened(self, arrays: Arrays) -> NDArray[np.bool_] | None:
        """Return which items each group may train, bool (groups, I); None when there is no such list."""
        ...

    def measured(
        self, purpose: Purpose, sums: Mapping[str, NDArray[np.float64]]
    ) -> dict[str, tuple[float, float]]:
        """Return sum and count over users of the metrics in a sum."""
        ...

    def figures(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, int]]:
        """Return the figures of an evaluation from these sums over everybody: value and number of users by name.

        Means are a figure, and so is what is made of several of them, such as a root of a mean square.
        """
        ...


@dataclass(frozen=True)
class User:
    """A user as a round names it at its host.

    Parameters
    ----------
    index : int
        Position among the host's users.
    group : int
        Its group in the population.
    """

    index: int
    group: int


class HostSide(Protocol):
    """The side of a host: the local step of its users."""

    @property
    def measured(self) -> Mapping[str, NDArray[np.float64]]:
        """Return each user's metrics as last measured, (users,) by name, NaN elsewhere; they never leave the host."""
        ...

    def layout(self, purpose: Purpose) -> Layout:
        """Return what a contribution of a purpose looks like; computed here, not taken from the server."""
        ...

    def contributions(
        self,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        opened: NDArray[np.bool_] | None,
        members: Mapping[int, Sequence[User]],
    ) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        """Yield the codes of each member's contribution, in any order; private state moves on."""
        ...

    def recommend(self, model: Mapping[str, NDArray[np.float32]], user: int) -> NDArray[np.float32]:
        """Return a user's scores of all items, float32 (I,)."""
        ...


class OwnerSide(Protocol):
    """The side of a data owner, of systems that ask owners for something in each round of training."""

    private: Arrays
    """What it keeps from round to round; a service stores it, and gives it back after a restart."""

    def answer(self, model: Mapping[str, NDArray[np.float32]]) -> Arrays:
        """Return what the server is told of the owner's items; what is kept moves on."""
        ...


class ToldServerSide(ServerSide, Protocol):
    """The side of the orchestration server, of systems that ask data owners."""

    def told(self, arrays: Arrays, answers: Sequence[Arrays]) -> Arrays:
        """Return the arrays with what owners answered for the sum that is applied next; some may be absent."""
        ...


def named(prefix: str, arrays: Mapping[str, NDArray[np.float32]]) -> Arrays:
    """Return arrays with a prefix to their names."""
    return {prefix + name: value for name, value in arrays.items()}


def unnamed(prefix: str, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
    """Return the arrays whose names have a prefix, without it."""
    return {
        name.removeprefix(prefix): value.astype(np.float32, copy=False)
        for name, value in arrays.items()
        if name.startswith(prefix)
    }
