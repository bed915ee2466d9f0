"""Contributions of members that cover several users, added up user by user."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import User
from coterie.rounds.training import Purpose
from coterie.secure_sum.clipped import ClippedContribution, Clipper
from coterie.secure_sum.contribution import Clip, Contribution, Layout
from coterie.secure_sum.plan import SumPlan

__all__ = ["Added", "UserByUser", "add_support", "gathered"]

Added = tuple[int, Callable[[Contribution], None]]
"""Member of a sum, and a function that adds one user's values to its contribution."""


class UserByUser(ABC):
    """Base of a host's side whose users are added to the contributions of members one by one."""

    norm_bound: float = 0.0
    """Largest Euclidean norm of one user's contribution to training; 0 for none."""
    clip: Clip | None = None
    """Bounds of one user's contribution to any sum; None for none."""

    def contributions(
        self,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        opened: NDArray[np.bool_] | None,
        members: Mapping[int, Sequence[User]],
    ) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        """Yield each member and the codes of its contribution, in any order."""
        purpose = Purpose(plan.purpose)
        pairs = [(member, user) for member, users in members.items() for user in users]
        match purpose:
            case Purpose.SUPPORTS:
                each = self._supports(pairs)
            case Purpose.EVALUATE:
                each = self._evaluated(plan, model, pairs)
            case Purpose.TRAIN:
                each = self._trained(plan, model, opened, pairs)
        bound = self.norm_bound if purpose is Purpose.TRAIN else 0.0
        return gathered(self.layout(purpose), members, each, bound, clip=self.clip, apart=self._apart(plan))

    def _apart(self, plan: SumPlan) -> bool:
        """Return whether contributions to a sum name the noise in them (`Contribution.apart`)."""
        return False

    @abstractmethod
    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of a contribution to a sum of this purpose."""

    @abstractmethod
    def _items(self, user: int) -> NDArray[np.integer]:
        """Return the training items of a user of this host, by its position."""

    def _supports(self, pairs: Sequence[tuple[int, User]]) -> Iterator[Added]:
        for member, user in pairs:
            yield member, partial(add_support, self._items(user.index))

    @abstractmethod
    def _evaluated(
        self, plan: SumPlan, model: Mapping[str, NDArray[np.float32]], pairs: Sequence[tuple[int, User]]
    ) -> Iterator[Added]:
        """Yield each user's metrics of a version."""

    @abstractmethod
    def _trained(
        self,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        opened: NDArray[np.bool_] | None,
        pairs: Sequence[tuple[int, User]],
    ) -> Iterator[Added]:
        """Yield each user's part of a round of training, and update what users keep."""


def add_support(items: NDArray[np.integer], contribution: Contribution, *, noise: bool = False) -> None:
    """Add 1 to the support of each item; ``noise`` as for `Contribution.add`."""
    # Whole numbers are not rounded: nothing is drawn.
    contribution.add("supports", np.ones(len(items)), np.random.default_rng(0), rows=items, noise=noise)


def gathered(
    layout: Layout,
    members: Mapping[int, Sequence[User]],
    each: Iterable[Added],
    norm_bound: float = 0.0,
    *,
    clip: Clip | None = None,
    apart: bool = False,
) -> Iterator[tuple[int, NDArray[np.uint32]]]:
    """Yield each member and the codes of its contribution once all its users are in it.

    Parameters
    ----------
    layout : Layout
    members : mapping of int to sequence of User
        The users that each member covers.
    each : iterable of (int, callable)
        For each user once, in any order: the member, and a function that adds the user's values to its contribution.
    norm_bound : float
        As for `Contribution`; not together with a clip.
    clip : Clip, optional
        Bounds of each user's whole contribution.
    apart : bool
        Whether the noise in the codes is in a second row.
    """
    waiting = {member: len(users) for member, users in members.items()}
    clipper = None if clip is None else Clipper(layout, clip)
    made: dict[int, Contribution] = {}
    complete: list[tuple[int, Contribution]] = []
    for member, add in each:
        if member not in made:
            made[member] = (
                Contribution(layout, norm_bound=norm_bound)
                if clip is None
                else ClippedContribution(layout, clip=clip, clipper=clipper)
            )
        add(made[member])
        made[member].count()
        waiting[member] -= 1
        if not waiting[member]:
            complete.append((member, made.pop(member)))
        # Users of several members are clipped together.
        if clipper is None or not clipper.waits:
            yield from _coded(complete, apart=apart)
            complete = []
    yield from _coded(complete, apart=apart)


def _coded(
    complete: Iterable[tuple[int, Contribution]], *, apart: bool
) -> Iterator[tuple[int, NDArray[np.uint32]]]:
    for member, whole in complete:
        yield member, whole.apart() if apart else whole.codes()
