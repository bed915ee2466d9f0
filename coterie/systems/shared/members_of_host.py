"""Contributions of members that cover several users, added up user by user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import User
from coterie.secure_sum.contribution import Contribution, Layout

__all__ = ["gathered"]


def gathered(
    layout: Layout,
    members: Mapping[int, Sequence[User]],
    each: Iterable[tuple[int, Callable[[Contribution], None]]],
) -> Iterator[tuple[int, NDArray[np.uint32]]]:
    """Yield each member and the codes of its contribution once all its users are in it.

    Parameters
    ----------
    layout : Layout
    members : mapping of int to sequence of User
        The users that each member covers.
    each : iterable of (int, callable)
        For each user once, in any order: the member, and a function that adds the user's values to its contribution.
    """
    waiting = {member: len(users) for member, users in members.items()}
    made: dict[int, Contribution] = {}
    for member, add in each:
        if member not in made:
            made[member] = Contribution(layout)
        add(made[member])
        made[member].count()
        waiting[member] -= 1
        if not waiting[member]:
            yield member, made.pop(member).codes()
