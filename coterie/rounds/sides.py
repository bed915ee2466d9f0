"""Interfaces of a learning system that trains in rounds: a side at the orchestration server and a side at hosts.

A new system implements both, and its `System` names them; no service changes (``docs/extending.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, cast, overload, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from coterie.crypto.graph_key import GraphTerms
from coterie.crypto.latent_terms import LatentTerms
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Clip, Layout
from coterie.secure_sum.plan import SumPlan

__all__ = [
    "Arrays",
    "Clipped",
    "Combining",
    "ComparesItems",
    "Expanding",
    "FoldsIn",
    "Growing",
    "HostSide",
    "HostUsers",
    "KeepPrivate",
    "Likeness",
    "Limited",
    "NormBounded",
    "OwnerSide",
    "SameMembers",
    "ScoresMany",
    "ServerSide",
    "SharedUser",
    "Summed",
    "ToldServerSide",
    "User",
    "combining",
    "expanding",
    "named",
    "scorer_of",
    "unnamed",
    "with_groups",
]

Arrays = dict[str, NDArray[Any]]
"""Arrays by name: a model, or the state that a side keeps."""

KeepPrivate = Callable[[Arrays], Arrays]
"""Takes the initial private arrays of a host's users, (users, ...) each; returns the stored ones, if any."""


@dataclass(frozen=True)
class Summed:
    """A round's decoded sum and the users that it covers, as `ServerSide.apply` takes them.

    Parameters
    ----------
    purpose : Purpose
    sums : mapping of str to ndarray of float64
        Sums by segment, from `Layout.decode` of the purpose's layout.
    users : int
        Number of users in the sum.
    pass_number, part : int
        Pass, and number of the cohort in it; for SUPPORTS ``part`` is the group.
    shares : ndarray of float64, shape (groups,)
        Share of each group's users that is in the sum, taking the cohort's absentees as spread evenly over its groups.
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
    """A system's side at the orchestration server: pure functions of the arrays that the server keeps."""

    asks_supports: bool
    """Whether groups are asked for their items, and train those that are then open to them."""
    needs_every_sum: bool
    """Whether an abandoned sum of TRAIN is formed again at its place; otherwise it is lost, and the next follows."""
    metrics: tuple[str, ...]
    """Names of the metrics that an evaluation measures."""

    def initial(self) -> Arrays:
        """Return the server's arrays before the first round."""
        ...

    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of contributions for a purpose."""
        ...

    def apply(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the arrays after a sum."""
        ...

    def model(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        """Return the model that participants fetch."""
        ...

    def opened(self, arrays: Arrays) -> NDArray[np.bool_] | None:
        """Return which items each group may train, bool (groups, I); None when there is no such list."""
        ...

    def measured(
        self, purpose: Purpose, sums: Mapping[str, NDArray[np.float64]]
    ) -> dict[str, tuple[float, float]]:
        """Return the metrics in a sum: sum and count over users, by name."""
        ...

    def figures(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, int]]:
        """Return an evaluation's figures, value and number of users by name, from the metrics' sums over all users.

        Figures are means, and values computed from means, such as a root of a mean square.
        """
        ...


@dataclass(frozen=True)
class User:
    """A user of a host, as the host's side of a system knows it in a round.

    Parameters
    ----------
    index : int
        Position among the host's users.
    group : int
        Group of the user in the population.
    """

    index: int
    group: int


class HostUsers(Sequence[User]):
    """Users of a host in two arrays, each made when it is asked for: a host may have very many.

    Parameters
    ----------
    indices, groups : ndarray of int, shape (n,)
        ``index`` and ``group`` of each `User`.
    """

    def __init__(self, indices: NDArray[np.integer], groups: NDArray[np.integer]) -> None:
        self.indices, self.groups = indices, groups

    @classmethod
    def of(cls, users: Sequence[User]) -> HostUsers:
        """Return the same users in arrays, or an instance as it is."""
        if isinstance(users, HostUsers):
            return users
        return cls(
            np.array([one.index for one in users], np.intp), np.array([one.group for one in users], np.intp)
        )

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, at: int) -> User: ...
    @overload
    def __getitem__(self, at: slice) -> HostUsers: ...
    def __getitem__(self, at: int | slice) -> User | HostUsers:
        if isinstance(at, slice):
            return HostUsers(self.indices[at], self.groups[at])
        return User(int(self.indices[at]), int(self.groups[at]))

    def __iter__(self) -> Iterator[User]:
        return (User(int(index), int(group)) for index, group in zip(self.indices, self.groups, strict=True))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


class HostSide(Protocol):
    """A system's side at a client host: the local step of the host's users."""

    @property
    def measured(self) -> Mapping[str, NDArray[np.float64]]:
        """Return each user's last measured metrics, (users,) by name, NaN where none; they never leave the host."""
        ...

    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of contributions for a purpose; computed at the host, not taken from the server."""
        ...

    def inputs(self, purpose: Purpose) -> tuple[str, ...]:
        """Return the names of what contributions for a purpose depend on beside plan and model.

        These are names of `coterie.rounds.inputs`.  The host hashes each of them as it uses it, and takes part in no
        sum whose plan has another hash.  A side is given the open items of a group only when it names them.
        """
        ...

    def contributions(
        self,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        opened: NDArray[np.bool_] | None,
        members: Mapping[int, Sequence[User]],
    ) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        """Run the local step: yield the codes of each member's contribution, in any order, and update private state."""
        ...

    def recommend(self, model: Mapping[str, NDArray[np.float32]], user: int) -> NDArray[np.float32]:
        """Return a user's scores of all items, float32 (I,)."""
        ...


@runtime_checkable
class NormBounded(Protocol):
    """A host's side that scales users' contributions to training down to a norm, before they are rounded."""

    norm_bound: float
    """Largest Euclidean norm of one user's contribution to training, 0 for none; set before the first round."""


@runtime_checkable
class Limited(Protocol):
    """A system's side at the server that takes catalogues up to a size only."""

    @property
    def too_many_items(self) -> str:
        """Return why the catalogue is too large for the run's settings; empty where it is not."""
        ...


@runtime_checkable
class Growing(Protocol):
    """A system's side at the server that keeps arrays by group, in runs whose users may come later."""

    def grown(self, arrays: Arrays) -> Arrays:
        """Return arrays that were made for fewer groups with rows for all groups of this side; others as they are."""
        ...


def with_groups(array: NDArray[Any], groups: int) -> NDArray[Any]:
    """Return an array with a row for each group: rows of zeros follow those that it has."""
    more = max(groups - len(array), 0)
    return np.pad(array, [(0, more), *[(0, 0)] * (array.ndim - 1)]) if more else array


@runtime_checkable
class SameMembers(Protocol):
    """A system's side at the server whose sums of TRAIN are all over the members of the first one, or not formed."""

    same_members: bool
    """Whether that is so: two sums of nearly the same values over other members differ by what single users have."""


@runtime_checkable
class Clipped(Protocol):
    """A host's side that clips users' contributions to every sum (`coterie.secure_sum.contribution.Clip`)."""

    clip: Clip | None
    """Bounds of one user's contribution, None for none; set before the first round."""


class SharedUser(NamedTuple):
    """What a user shares with the other users of a run by graph expansion."""

    items: NDArray[np.integer]
    """Items that it publishes under tags, by position in the catalogue."""
    embedding: NDArray[np.float32]
    """Sealed to the other hosts, shape (d,)."""


class Expanding(Protocol):
    """A host's side whose users learn from anonymous neighbours (`coterie.parties.expansion`); `expanding` finds it.

    Before each sum of training it is asked which of its users are to publish, and which are to ask for neighbours.
    """

    @property
    def graph_terms(self) -> GraphTerms | None:
        """Terms of the run's graph; None in a run without."""
        ...

    def sharers(self, model: Mapping[str, NDArray[np.float32]]) -> NDArray[np.int64]:
        """Return how many users publish each item, (I,), as every host knows it from the model."""
        ...

    def epoch(self, plan: SumPlan) -> int:
        """Return the lowest epoch of the graph key under which users may publish and ask before a sum, from 1."""
        ...

    def due(self, plan: SumPlan, users: Sequence[int]) -> Sequence[int]:
        """Return which of some users are to publish before a sum."""
        ...

    def shared(self, user: int) -> SharedUser:
        """Return what a user publishes."""
        ...

    def published(self, plan: SumPlan, user: int) -> None:
        """Take note that the third party has what a user publishes, before a sum."""
        ...

    def curious(self, plan: SumPlan, users: Sequence[int]) -> Sequence[int]:
        """Return which of some users are to ask for neighbours before a sum."""
        ...

    def met(self, plan: SumPlan, user: int, neighbours: Sequence[NDArray[np.float32]]) -> None:
        """Take the embeddings of a user's neighbours, in any order."""
        ...


def expanding(side: HostSide) -> Expanding | None:
    """Return a host's side as one that learns from anonymous neighbours; None where it does not."""
    # Sides may be wrapped (`coterie.systems.private_sides`), so attributes decide.
    return cast(Expanding, side) if getattr(side, "graph_terms", None) is not None else None


class Combining(Protocol):
    """A host's side that learns from pseudo meta-latents (`coterie.parties.latents`); `combining` finds it.

    Before each sum it is asked which of its users are to publish a latent vector, and whether it needs combinations.
    """

    combines: bool
    """Whether the run has pseudo meta-latents."""

    def latent_terms(self, model: Mapping[str, NDArray[np.float32]]) -> LatentTerms | None:
        """Return the terms of the run's set, as every host knows them from the model; None before they are known."""
        ...

    def key_users(self, plan: SumPlan, users: Sequence[int]) -> Sequence[int]:
        """Return which of some users are to have published before a sum."""
        ...

    def latent(self, model: Mapping[str, NDArray[np.float32]], user: int) -> NDArray[np.float64]:
        """Return the vector that a user publishes, (d,)."""
        ...

    def lacks_latents(self, plan: SumPlan) -> bool:
        """Return whether pseudo meta-latents are needed for a sum and are not known here."""
        ...

    def take_latents(self, latents: NDArray[np.float64]) -> None:
        """Take the pseudo meta-latents of the run as they were combined, (count, d)."""
        ...


def combining(side: HostSide) -> Combining | None:
    """Return a host's side as one that learns from pseudo meta-latents; None where it does not."""
    return cast(Combining, side) if getattr(side, "combines", False) else None


class Likeness(NamedTuple):
    """The own item of a user that is most like each of some items, by a model.

    Attributes
    ----------
    measure : str
        What likeness is in this model, in words.
    own : tuple of str or None
        Key of the own item for each item; None where no own item is like it.
    values : tuple of float
        Their likeness; 0 where there is none.
    """

    measure: str
    own: tuple[str | None, ...]
    values: tuple[float, ...]


@runtime_checkable
class ComparesItems(Protocol):
    """A host's side whose model says how alike items are."""

    likeness: str
    """What the values are, in words."""

    def alike(
        self,
        model: Mapping[str, NDArray[np.float32]],
        items: NDArray[np.integer],
        others: NDArray[np.integer],
    ) -> NDArray[np.floating]:
        """Return how like each of some items is to each of others, (items, others); 0 or less: not at all."""
        ...


@runtime_checkable
class ScoresMany(Protocol):
    """A host's side that computes scores of many users faster than one after the other."""

    def scorer(self, model: Mapping[str, NDArray[np.float32]]) -> Callable[[int], NDArray[np.float32]]:
        """Return a function from a user to what `HostSide.recommend` returns; what all users share is computed once."""
        ...


_MANY = 32
"""Users from which on work that is done once for all of them pays."""


def scorer_of(
    side: HostSide, model: Mapping[str, NDArray[np.float32]], users: int
) -> Callable[[int], NDArray[np.float32]]:
    """Return a function from a user of a host to its scores of all items, float32 (I,), to be called for some users.

    Parameters
    ----------
    side : HostSide
    model : mapping
    users : int
        About how many users will be asked about: what is computed once for all needs memory.
    """
    many = users >= _MANY and isinstance(side, ScoresMany)
    return cast(ScoresMany, side).scorer(model) if many else partial(side.recommend, model)


@runtime_checkable
class FoldsIn(Protocol):
    """A host's side that serves users who never took part in training, by their data and a finished model alone."""

    def fold_in(self, model: Mapping[str, NDArray[np.float32]]) -> None:
        """Set what all users keep, as it follows from their training data and a finished model.

        `HostSide.recommend` and measures at this model are then those of users who have trained, or near them.  A
        system whose users keep nothing has nothing to set.
        """
        ...


class OwnerSide(Protocol):
    """A system's side at a data owner, for systems that ask owners something in each round of training."""

    private: Arrays
    """Private state from round to round; the owner's service stores it, and restores it after a restart."""

    def answer(self, model: Mapping[str, NDArray[np.float32]]) -> Arrays:
        """Return the owner's answer about its items for the server, and update the private state."""
        ...


class ToldServerSide(ServerSide, Protocol):
    """A system's side at the orchestration server, for systems that ask data owners in each round."""

    def told(self, arrays: Arrays, answers: Sequence[Arrays]) -> Arrays:
        """Return the arrays with the owners' answers for the sum that is applied next; some owners may be absent."""
        ...


def named(prefix: str, arrays: Mapping[str, NDArray[np.float32]]) -> Arrays:
    """Return arrays with a prefix put before their names."""
    return {prefix + name: value for name, value in arrays.items()}


def unnamed(prefix: str, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
    """Return the arrays whose names have a prefix, as float32 and under names without the prefix."""
    return {
        name.removeprefix(prefix): value.astype(np.float32, copy=False)
        for name, value in arrays.items()
        if name.startswith(prefix)
    }
