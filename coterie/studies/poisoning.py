"""Poisoning: users of a run in this process who lie to spoil its model, to push an item, or to save the work.

A liar poisons its data, which an honest client then trains on, or its client lies about what it computed: it then
ignores the norm bound of the run, and only the range of its codes limits it.  Liars count and measure honestly.  Those
of one host know each other's contributions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.evaluation.holdout import TRAIN
from coterie.rounds.sides import HostSide, User
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.plan import SumPlan
from coterie.studies.run_data import Feed
from coterie.systems.shared.host_data import HostData

__all__ = [
    "POISONINGS",
    "HonestData",
    "Lies",
    "NormRecorder",
    "PoisonedSide",
    "Poisoning",
    "chosen_liars",
    "poisoned_host",
    "pushed_item",
]

_BOOST = 10
"""Factor of boosted contributions."""

_LEAST_RATERS = 5
"""Fewest users who have the pushed item in training: so many keep it open for learning, and are no liars' work."""

_LIARS, _DATA, _SHUFFLE = 1, 2, 3
"""First elements of the keys of random draws."""

_Steps = Mapping[int, NDArray[np.int64]]
"""Contributions of liars in steps, int64 (layout size,), by member."""


class HonestData(NamedTuple):
    """What liars have to poison a host's data with.

    Parameters
    ----------
    data : HostData
        The host's honest data.
    liars : ndarray of bool, shape (users of the host,)
    target : int
        The pushed item.
    ratings : (float, float), optional
        Range of ratings, for systems that learn from them.
    rng : Generator
    """

    data: HostData
    liars: NDArray[np.bool_]
    target: int
    ratings: tuple[float, float] | None
    rng: np.random.Generator


@dataclass(frozen=True)
class Lies:
    """What a lying client has to lie with in one round.

    Parameters
    ----------
    layout : Layout
    steps : mapping of int to ndarray of int64, shape (layout size,)
        Honest contributions of the host's liars, by member.
    first : mapping of int to ndarray of int64
        Their contributions to the first round in which they took part.
    rng : Generator
    """

    layout: Layout
    steps: _Steps
    first: _Steps
    rng: np.random.Generator


@dataclass(frozen=True)
class Poisoning:
    """A way to poison a run.

    Parameters
    ----------
    name, title : str
        Name on the command line, and the words of tables.
    data : callable, optional
        Returns the poisoned data of a host.
    lie : callable, optional
        ``(lies) -> steps``: what the liars' clients send.
    """

    name: str
    title: str
    data: Callable[[HonestData], HostData] | None = None
    lie: Callable[[Lies], _Steps] | None = None


# --- data --------------------------------------------------------------------------------------------------------


def _flipped(honest: HonestData) -> HostData:
    """Return data whose liars rate the opposite; without ratings, they have as many items that they never chose."""
    data, rng = honest.data, honest.rng
    own = honest.liars[data.user] & (data.part == TRAIN)
    if honest.ratings is not None:
        rated = np.where(own, sum(honest.ratings) - data.rating, data.rating)
        return dataclasses.replace(data, rating=rated.astype(data.rating.dtype))
    item = data.item.copy()
    for user in np.flatnonzero(honest.liars).tolist():
        mine = np.flatnonzero(own & (data.user == user))
        others = np.setdiff1d(np.arange(len(data.items)), data.item[data.user == user])
        changed = min(len(mine), len(others))
        item[mine[:changed]] = rng.permutation(others)[:changed]
    return dataclasses.replace(data, item=item)


def _pushed(honest: HonestData) -> HostData:
    """Return data whose liars have the target in training, with the best rating; a row for each that had it not."""
    data, liars, target = honest.data, honest.liars, honest.target
    best = np.nan if honest.ratings is None else honest.ratings[1]
    held = data.item == target
    rating = np.where(held & liars[data.user] & (data.part == TRAIN), best, data.rating)
    without = np.setdiff1d(np.flatnonzero(liars), data.user[held])
    return dataclasses.replace(
        data,
        user=np.append(data.user, without),
        item=np.append(data.item, np.full(len(without), target)),
        part=np.append(data.part, np.full(len(without), TRAIN)),
        rating=np.append(rating, np.full(len(without), best)).astype(data.rating.dtype),
    )


# --- contributions -----------------------------------------------------------------------------------------------


def _boosted(lies: Lies) -> _Steps:
    """Return the contributions times 10."""
    return {member: _BOOST * steps for member, steps in lies.steps.items()}


def _sybils(lies: Lies) -> _Steps:
    """Return the same contribution for all: the opposite of their sum."""
    total = sum(lies.steps.values(), start=np.zeros(lies.layout.size, np.int64))
    return dict.fromkeys(lies.steps, -total)


def _zeros(lies: Lies) -> _Steps:
    """Return nothing but zeros: a free rider that does not train."""
    return {member: np.zeros_like(steps) for member, steps in lies.steps.items()}


def _stale(lies: Lies) -> _Steps:
    """Return the contributions to the first round, again and again."""
    return lies.first


def _noise(lies: Lies) -> _Steps:
    """Return the contributions with the values of each segment in random order: right in size, and worth nothing."""
    found = {}
    for member, steps in sorted(lies.steps.items()):
        drawn = steps.copy()
        for segment in lies.layout.segments:
            place = lies.layout.places[segment.name]
            drawn[place] = lies.rng.permutation(drawn[place])
        found[member] = drawn
    return found


POISONINGS: Mapping[str, Poisoning] = MappingProxyType(
    {
        one.name: one
        for one in (
            Poisoning("none", "no attack"),
            Poisoning("label-flip", "flipped labels", data=_flipped),
            Poisoning("boosted", "flipped labels, times 10", data=_flipped, lie=_boosted),
            Poisoning("sybils", "Sybils", lie=_sybils),
            Poisoning("push", "pushed item, times 10", data=_pushed, lie=_boosted),
            Poisoning("zeros", "free riders, zeros", lie=_zeros),
            Poisoning("stale", "free riders, stale", lie=_stale),
            Poisoning("noise", "free riders, noise", lie=_noise),
        )
    }
)
"""All ways, by name; ``none`` is a run without liars."""


def chosen_liars(feed: Feed, share: float, seed: int) -> NDArray[np.bool_]:
    """Return which users lie, bool (U,): a share of those that belong to a host, at least one, drawn with a seed."""
    members = np.flatnonzero(feed.host >= 0)
    count = max(round(share * len(members)), 1)
    drawn = np.random.default_rng([_LIARS, seed]).permutation(members)[:count]
    return np.isin(np.arange(len(feed.host)), drawn)


def pushed_item(feed: Feed) -> int:
    """Return the item that liars push: the one with the fewest users in training, of those with at least 5.

    Raises
    ------
    ConfigError
        No item has so many.
    """
    data = feed.dataset
    counts = np.bincount(data.item[feed.split.part == TRAIN], minlength=len(data.items))
    if counts.max(initial=0) < _LEAST_RATERS:
        raise ConfigError(f"{data.name}: no item has {_LEAST_RATERS} users in training, so none is pushed")
    return int(np.argmin(np.where(counts >= _LEAST_RATERS, counts, counts.max() + 1)))


@dataclass
class _OtherSide:
    """Base of a host's side that differs from an honest one in what it contributes.

    Parameters
    ----------
    side : HostSide
        The honest side.
    """

    side: HostSide

    @property
    def measured(self) -> Mapping[str, NDArray[np.float64]]:
        """Metrics as the honest side measured them."""
        return self.side.measured

    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of the honest side."""
        return self.side.layout(purpose)

    def inputs(self, purpose: Purpose) -> tuple[str, ...]:
        """Return the names of the honest side's inputs."""
        return self.side.inputs(purpose)

    def recommend(self, model: Mapping[str, NDArray[np.float32]], user: int) -> NDArray[np.float32]:
        """Return the scores of the honest side."""
        return self.side.recommend(model, user)


@dataclass
class PoisonedSide(_OtherSide):
    """A host's side some of whose users lie; a member lies if all users that it covers do.

    Parameters
    ----------
    side : HostSide
        The honest side, made from poisoned data where the attack poisons data.
    attack : Poisoning
    liars : collection of int
        Users that lie, as positions at this host.
    seed : int
    """

    attack: Poisoning
    liars: Collection[int]
    seed: int = 0
    _first: dict[tuple[int, ...], NDArray[np.int64]] = field(default_factory=dict, init=False)

    def contributions(
        self,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        opened: NDArray[np.bool_] | None,
        members: Mapping[int, Sequence[User]],
    ) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        """Yield each member and its contribution; of liars the lie, at the end."""
        made = self.side.contributions(plan, model, opened, members)
        if self.attack.lie is None or plan.purpose != Purpose.TRAIN.value:
            yield from made
            return
        layout, steps = self.layout(Purpose.TRAIN), dict[int, NDArray[np.int64]]()
        for member, codes in made:
            if all(user.index in self.liars for user in members[member]):
                steps[member] = (codes - layout.zeros(len(members[member]))).view(np.int32).astype(np.int64)
            else:
                yield member, codes
        if not steps:
            return
        of = {member: tuple(user.index for user in members[member]) for member in steps}
        first = {member: self._first.setdefault(of[member], steps[member]) for member in steps}
        rng = np.random.default_rng([_SHUFFLE, self.seed, plan.round])
        for member, lie in self.attack.lie(Lies(layout, steps, first, rng)).items():
            yield member, _codes(layout, steps[member], lie, len(members[member]))


@dataclass
class NormRecorder(_OtherSide):
    """A host's side that notes the norms of its members' first contributions to training, and is honest otherwise.

    Parameters
    ----------
    side : HostSide
    norms : list of float
        Receives the norm of each member of the first round of training, unless it is 0.
    """

    norms: list[float]
    _round: int = field(default=0, init=False)

    def contributions(
        self,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        opened: NDArray[np.bool_] | None,
        members: Mapping[int, Sequence[User]],
    ) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        """Yield the side's contributions, and note their norms."""
        layout = self.layout(Purpose(plan.purpose))
        training = plan.purpose == Purpose.TRAIN.value
        self._round = self._round or (plan.round if training else 0)
        for member, codes in self.side.contributions(plan, model, opened, members):
            if training and plan.round == self._round:
                values = layout.decode(codes, len(members[member]))
                changes = [values[one.name].ravel() for one in layout.segments if one.changes]
                norm = float(np.linalg.norm(np.concatenate(changes)))
                self.norms += [norm] if norm else []
            yield member, codes


def _codes(
    layout: Layout, honest: NDArray[np.int64], lie: NDArray[np.int64], users: int
) -> NDArray[np.uint32]:
    """Return the codes of a lie, cut off where the server would refuse them; counts and metrics stay honest."""
    kept = honest.copy()
    for segment in layout.segments:
        if segment.changes:
            place = layout.places[segment.name]
            kept[place] = np.clip(lie[place], -segment.levels * users, segment.levels * users)
    found: NDArray[np.uint32] = kept.astype(np.uint32) + layout.zeros(users)
    return found


def poisoned_host(
    attack: Poisoning,
    liars: NDArray[np.bool_],
    target: int,
    ratings: tuple[float, float] | None,
    seed: int,
    data: HostData,
    make: Callable[[HostData], HostSide],
) -> HostSide:
    """Return the side of a host with liars.

    Parameters
    ----------
    attack : Poisoning
    liars : ndarray of bool, shape (users of the host,)
    target : int
        The pushed item.
    ratings : (float, float), optional
        Range of ratings, for systems that learn from them.
    seed : int
    data : HostData
        The host's honest data.
    make : callable
        Makes the honest side from data.
    """
    if attack.data is not None:
        rng = np.random.default_rng([_DATA, seed])
        data = attack.data(HonestData(data, liars, target, ratings, rng))
    return PoisonedSide(make(data), attack, frozenset(np.flatnonzero(liars).tolist()), seed)
