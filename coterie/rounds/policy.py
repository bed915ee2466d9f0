"""Who is in which cohort, and under which floors.

Sums over known, changing cohorts can be solved for the individuals, and no mask helps against that.  So by default the
participants are cut into fixed groups, by randomness that the third party signs, and a cohort is one or more whole
groups; at most every so many passes the groups are drawn anew.  ``random`` and ``independent``
cohorts reproduce the papers.

Everything here is a function of the plan and of a canonical order of the participants, so that members can check that
a cohort was drawn by the rule.  What was drawn last is kept, for all members of a process and all rounds of a pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coterie.crypto.explicit import encode
from coterie.rounds.training import Purpose
from coterie.wire.v1.orchestrator_pb2 import RoundsPlan

__all__ = [
    "LEAST_REDRAW",
    "CohortRule",
    "Cohorts",
    "Parts",
    "cohorts",
    "everybody",
    "group_of",
    "groups",
    "min_sum",
    "sparse_floor",
]

LEAST_REDRAW = 50
"""Passes between two drawings of groups, outside experiments: sums over groups that overlap can be subtracted."""

Cohorts = Literal["groups", "random", "independent", "all"]

Parts = tuple[NDArray[np.int64], ...]
"""Positions of users in the canonical order, ascending within a part; nobody may write into them."""

_KEPT = 4
"""Drawings that are kept, each with a number for every user: those of a run or two, training and evaluating."""


@dataclass(frozen=True)
class CohortRule:
    """How cohorts are drawn.

    Parameters
    ----------
    kind : str
        ``"groups"``, ``"random"``, ``"independent"`` or ``"all"``.
    size : int
        Users in a cohort: at random exactly so many (half as many to half again as many in the last of a pass, unless
        cohorts are independent), in groups at least.
    group : int
        Fewest users in a group.
    beacon : bytes
        Randomness of the permutations.
    redraw : int
        Passes after which groups are drawn anew; 0 for never.
    """

    kind: Cohorts
    size: int
    group: int
    beacon: bytes
    redraw: int = 0

    def drawing(self, pass_number: int) -> int:
        """Return by which drawing the groups of a pass are cut, from 0."""
        return pass_number // self.redraw if self.redraw else 0

    def redrawn(self, pass_number: int) -> bool:
        """Whether a pass is the first one of its drawing."""
        return pass_number % self.redraw == 0 if self.redraw else pass_number == 0


def _permutation(beacon: bytes, purpose: str, number: int, count: int) -> NDArray[np.int64]:
    """Return the positions 0 to ``count - 1`` in the order of their keys.

    The keys are 64-bit numbers, big-endian, one after the other from SHAKE-256 over (purpose, beacon, number, count);
    equal keys stay in order.  (The streams of NumPy's generators may change from one release to the next, and members
    draw the same cohorts with whatever they run on.)
    """
    keys = hashlib.shake_256(encode(purpose, beacon, number, count)).digest(8 * count)
    return np.argsort(np.frombuffer(keys, ">u8"), kind="stable")


def _parts(found: Iterable[NDArray[np.int64]]) -> Parts:
    """Return users in ascending order, for everybody to read."""
    parts = tuple(np.sort(part) for part in found)
    for part in parts:
        part.setflags(write=False)
    return parts


@lru_cache(_KEPT)
def groups(rule: CohortRule, users: int, drawing: int = 0) -> Parts:
    """Cut the users into fixed groups.

    Parameters
    ----------
    users : int
        How many there are.
    drawing : int
        Counts drawings, from 0.

    Returns
    -------
    tuple of ndarray of int
        Positions in the canonical order, ascending within a group; sizes differ by at most one, and a population
        smaller than twice the least group is one group.
    """
    count = max(users // max(rule.group, 1), 1)
    return _parts(np.array_split(_permutation(rule.beacon, "groups", drawing, users), count))


@lru_cache(_KEPT)
def group_of(rule: CohortRule, users: int, drawing: int = 0) -> NDArray[np.int64]:
    """Return the group of each user as `groups` cuts them, int64 (users,), to be read only."""
    found = np.empty(users, np.int64)
    for number, part in enumerate(groups(rule, users, drawing)):
        found[part] = number
    found.setflags(write=False)
    return found


@lru_cache(_KEPT)
def cohorts(rule: CohortRule, users: int, global_round: int) -> Parts:
    """Return the cohorts of one global round, in order.

    Everybody is in exactly one of them, unless they are drawn independently of each other; there are as many then as
    would cover everybody.

    Returns
    -------
    tuple of ndarray of int
        Positions in the canonical order, ascending within a cohort.
    """
    if rule.kind == "all" or users <= rule.size:
        return _parts([np.arange(users)])
    if rule.kind in ("random", "independent"):
        # A rest of less than half a cohort joins the last one: too few would be refused by their floor.
        starts = [first for first in range(0, users, rule.size) if users - first >= rule.size / 2]
        if rule.kind == "independent":
            first = global_round * len(starts)
            orders = (
                _permutation(rule.beacon, "independent-cohorts", first + part, users)
                for part in range(len(starts))
            )
            return _parts(order[: rule.size] for order in orders)
        order = _permutation(rule.beacon, "cohorts", global_round, users)
        return _parts(order[first:last] for first, last in pairwise([*starts, users]))
    fixed = groups(rule, users, rule.drawing(global_round))
    least = min(len(part) for part in fixed)
    # Groups that are left over at the end of a pass join its last cohort: none is smaller than asked for.
    per = min(max(-(-rule.size // least), 1), len(fixed))
    order = _permutation(rule.beacon, "cohorts", global_round, len(fixed))
    return _parts(
        np.concatenate([fixed[n] for n in order[first:last]])
        for first, last in pairwise([*range(0, len(fixed) - per + 1, per), len(fixed)])
    )


def everybody(rule: CohortRule, users: int, global_round: int) -> Parts:
    """Return as many cohorts as `cohorts`, with everybody in exactly one of them: those of an evaluation."""
    covering = replace(rule, kind="random") if rule.kind == "independent" else rule
    return cohorts(covering, users, global_round)


def min_sum(users: int, floor: int) -> int:
    """Return the fewest users over which a sum of a cohort is formed: two thirds of it, and at least ``floor``."""
    return max(floor, -(-2 * users // 3))


def sparse_floor(rounds: RoundsPlan, purpose: Purpose) -> int:
    """Return the fewest users whose ciphertexts of one place are added in a sparse sum; 0 where it is none.

    Two thirds of a cohort have hardly ever something in the same place.
    """
    return rounds.min_sum if rounds.sparse and purpose is Purpose.TRAIN else 0
