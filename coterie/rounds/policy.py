"""The rules by which a run draws cohorts and sets floors; the server applies them, and members check them.

Sums over known, changing cohorts can be solved for single users, and masks do not prevent that.  So by default the
participants are cut into fixed groups, by randomness that the third party signs, and a cohort is one or more whole
groups; groups are drawn anew only every ``redraw`` passes.  ``random`` and ``independent`` cohorts reproduce the
papers.

All functions depend only on the plan and on the canonical order of the participants, so that members can check that a
cohort was drawn by the rule.  The last drawings are cached, for all members of a process and all rounds of a pass.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
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
    "first_asked",
    "group_of",
    "groups",
    "largest_cohort",
    "min_sum",
    "noise_floor",
    "numbers",
    "population_pass",
    "sparse_floor",
]

LEAST_REDRAW = 50
"""Fewest passes between two drawings of groups, outside experiments: sums over overlapping groups can be subtracted."""

Cohorts = Literal["groups", "random", "independent", "all"]

Parts = tuple[NDArray[np.int64], ...]
"""Parts of the population: positions in the canonical order, ascending within a part; read-only arrays."""

_KEPT = 4
"""Cached drawings, each with one number for every user: enough for training and evaluation of two runs."""

_drawing = threading.Lock()


@dataclass(frozen=True)
class CohortRule:
    """The rule by which a run draws its cohorts.

    Parameters
    ----------
    kind : str
        ``"groups"``, ``"random"``, ``"independent"`` or ``"all"``.
    size : int
        Users in a cohort.  ``"random"`` cohorts have exactly this many, but the last one of a pass has half as many to
        half again as many; ``"independent"`` cohorts have exactly this many; cohorts of groups at least.
    group : int
        Fewest users in a group.
    beacon : bytes
        Random bytes that seed the permutations.
    redraw : int
        Passes after which groups are drawn anew; 0 for never.
    waves : tuple of (int, bytes)
        First user and beacon of the beginning and of each wave of users who came later; each is cut into groups for
        itself.  Empty where nobody came.
    """

    kind: Cohorts
    size: int
    group: int
    beacon: bytes
    redraw: int = 0
    waves: tuple[tuple[int, bytes], ...] = ()

    def drawing(self, pass_number: int) -> int:
        """Return the number, from 0, of the drawing that is in force in a pass."""
        return pass_number // self.redraw if self.redraw else 0

    def redrawn(self, pass_number: int) -> bool:
        """Return whether a pass is the first one of its drawing."""
        return pass_number % self.redraw == 0 if self.redraw else pass_number == 0


def _permutation(beacon: bytes, purpose: str, number: int, count: int) -> NDArray[np.int64]:
    """Return the positions 0 to ``count - 1`` sorted by pseudorandom keys.

    The keys are 64-bit numbers, big-endian, one after the other from SHAKE-256 over (purpose, beacon, number, count);
    equal keys stay in order.  NumPy's generators are not used: their streams may change from one release to the next,
    and all members must draw the same cohorts.
    """
    keys = hashlib.shake_256(encode(purpose, beacon, number, count)).digest(8 * count)
    return np.argsort(np.frombuffer(keys, ">u8"), kind="stable")


def _parts(found: Iterable[NDArray[np.int64]]) -> Parts:
    """Return the parts as sorted, read-only arrays."""
    parts = tuple(np.sort(part) for part in found)
    for part in parts:
        part.setflags(write=False)
    return parts


_drawn: OrderedDict[tuple[CohortRule, int, int], Parts] = OrderedDict()
"""The last drawings of groups, as `groups` returns them."""


def groups(rule: CohortRule, users: int, drawing: int = 0) -> Parts:
    """Cut the users into fixed groups.

    Only the groups of the last wave are drawn where those before it are known.

    Parameters
    ----------
    users : int
        Number of users.
    drawing : int
        Number of the drawing, from 0.

    Returns
    -------
    tuple of ndarray of int
        Positions in the canonical order, ascending within a group; sizes differ by at most one, and a population
        smaller than twice the least group is one group.
    """
    with _drawing:
        found = _drawn.get((rule, users, drawing))
        if found is not None:
            _drawn.move_to_end((rule, users, drawing))
    if found is None:
        starts = rule.waves or ((0, rule.beacon),)
        known: Parts = ()
        if len(starts) > 1:
            *before, (last, _) = starts
            # As `population_rule` makes it: there are no waves where nobody came later.
            waves = tuple(before) if len(before) > 1 else ()
            known = _drawn.get((replace(rule, beacon=before[-1][1], waves=waves), last, drawing), ())
        ends = [*(first for first, _ in starts[1:]), users]
        parts = list(zip(starts, ends, strict=True))
        fresh: list[NDArray[np.int64]] = []
        for (first, beacon), last in parts[-1:] if known else parts:
            order = first + _permutation(beacon, "groups", drawing, last - first)
            fresh += np.array_split(order, _groups_of(rule, last - first))
        found = (*known, *_parts(fresh))
        # Threads may draw the same at once: each item is replaced by an equal one.
        with _drawing:
            _drawn[rule, users, drawing] = found
            while len(_drawn) > _KEPT:
                _drawn.popitem(last=False)
    return found


def _groups_of(rule: CohortRule, users: int) -> int:
    """Return into how many groups users who came together are cut."""
    return max(users // max(rule.group, 1), 1)


def first_asked(rule: CohortRule) -> int:
    """Return the number of the first group of the wave that came last: how many groups there were before it."""
    return sum(_groups_of(rule, last - first) for (first, _), (last, _) in pairwise(rule.waves))


def population_pass(purpose: Purpose, pass_number: int) -> int:
    """Return the pass whose population a sum has: waves take part in a pass, and in the evaluations after it.

    An evaluation stands before the training of the pass whose number it has.
    """
    return max(pass_number - 1, 0) if purpose is Purpose.EVALUATE else pass_number


@lru_cache(_KEPT)
def group_of(rule: CohortRule, users: int, drawing: int = 0) -> NDArray[np.int64]:
    """Return the group of each user as `groups` cuts them, int64 (users,), read-only."""
    found = np.empty(users, np.int64)
    for number, part in enumerate(groups(rule, users, drawing)):
        found[part] = number
    found.setflags(write=False)
    return found


@lru_cache(_KEPT)
def cohorts(rule: CohortRule, users: int, global_round: int) -> Parts:
    """Return the cohorts of one global round, in order.

    Every user is in exactly one cohort, unless cohorts are drawn independently of each other; then there are as many as
    would cover all users.

    Returns
    -------
    tuple of ndarray of int
        Positions in the canonical order, ascending within a cohort.
    """
    if rule.kind == "all" or users <= rule.size:
        return _parts([np.arange(users)])
    if rule.kind in ("random", "independent"):
        starts = _first_of_each(rule, users)
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
    order = _permutation(rule.beacon, "cohorts", global_round, len(fixed))
    return _parts(
        np.concatenate([fixed[n] for n in order[first:last]])
        for first, last in pairwise([*_starts(rule, users), len(fixed)])
    )


def _starts(rule: CohortRule, users: int) -> range:
    """Return where cohorts of whole groups begin in the order of the groups in a pass."""
    count, least = _sizes(rule, users)
    # Groups left over at the end of a pass join its last cohort, so that no cohort is smaller than asked for.
    per = min(max(-(-rule.size // least), 1), count)
    return range(0, count - per + 1, per)


def _sizes(rule: CohortRule, users: int) -> tuple[int, int]:
    """Return the number of groups, and the users of the smallest one, without drawing them."""
    starts = [first for first, _ in rule.waves] or [0]
    parts = [last - first for first, last in pairwise([*starts, users])]
    numbers = [_groups_of(rule, part) for part in parts]
    return sum(numbers), min(part // number for part, number in zip(parts, numbers, strict=True))


def numbers(rule: CohortRule, users: int) -> tuple[int, int]:
    """Return how many groups and how many cohorts of a pass there are, without drawing them."""
    count = _sizes(rule, users)[0]
    if rule.kind == "all" or users <= rule.size:
        return count, 1
    if rule.kind in ("random", "independent"):
        return count, len(_first_of_each(rule, users))
    return count, len(_starts(rule, users))


def _first_of_each(rule: CohortRule, users: int) -> list[int]:
    """Return the places at which cohorts of single users begin."""
    # A remainder of less than half a cohort joins the last cohort: on its own it would be below the floor.
    return [first for first in range(0, users, rule.size) if users - first >= rule.size / 2]


def largest_cohort(rule: CohortRule, users: int, fewest: int) -> int:
    """Return the most users that a cohort of a pass may have, however a population grows to so many users.

    Parameters
    ----------
    users : int
        Most users of the population.
    fewest : int
        Fewest users of its beginning; those who come later are one whole group at least.
    """
    if rule.kind != "groups":
        return users
    group = max(rule.group, 1)
    # As `cohorts` counts them, where the smallest group is as small as it may be; left-over groups join the last one.
    per = max(-(-rule.size // max(min(group, fewest), 1)), 1)
    return min(users, max(rule.size, (2 * per - 1) * (2 * group - 1)))


def everybody(rule: CohortRule, users: int, global_round: int) -> Parts:
    """Return the cohorts of an evaluation: as many as `cohorts` gives, with every user in exactly one."""
    covering = replace(rule, kind="random") if rule.kind == "independent" else rule
    return cohorts(covering, users, global_round)


def min_sum(users: int, floor: int) -> int:
    """Return the fewest users over which a cohort's sum may be formed: two thirds of the cohort, at least ``floor``."""
    return max(floor, -(-2 * users // 3))


def sparse_floor(rounds: RoundsPlan, purpose: Purpose) -> int:
    """Return the fewest users whose ciphertexts are added in one place of a sparse sum; 0 for sums that are not sparse.

    The floor is ``min_sum`` alone: two thirds of a cohort hardly ever have something in the same place.
    """
    return rounds.min_sum if rounds.sparse and purpose is Purpose.TRAIN else 0


def noise_floor(rounds: RoundsPlan, secure_sum: str, purpose: Purpose) -> int:
    """Return the fewest users whose noise a denoiser adds up; 0 for sums without noise, such as evaluations."""
    return rounds.min_sum if secure_sum == "denoised" and purpose is not Purpose.EVALUATE else 0
