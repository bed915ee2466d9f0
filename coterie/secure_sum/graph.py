"""The masking graph of Bell et al. (2020): which members mask with each other, and how many undo a mask.

Up to 100 members the graph is complete.  Above, it is a circulant: members sit on a ring in an order that follows from
a seed (`SumPlan.graph_seed`), and each is a neighbour of the ``k / 2`` before and after it.  Any ``t`` of a member's
neighbours reconstruct one of its two secrets for the round; no member holds a share of its own secrets.

Degree k and threshold t are chosen so that two events are unlikely for every member:

- ``2t <= k + c`` with ``c`` corrupt neighbours: then a server that tells neighbours different things could have both
  secrets of the member, and so its vector (each honest neighbour gives one share or the other, a corrupt one both);
- fewer than ``t`` neighbours survive: then the sum cannot be formed.

Corrupt and lost members are taken as a given number of the others, drawn without replacement, so both are tails of the
hypergeometric distribution, added up over all members.

The bounds hold for one graph.  A run has one for each purpose, pass and part, and all of them follow from its beacon:
256 graphs take eight bits off the 40.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from coterie.crypto.explicit import encode
from coterie.secure_sum.protocol import Failed

__all__ = [
    "COMPLETE",
    "Assumptions",
    "GraphFields",
    "Tolerance",
    "arranged",
    "graph_fields",
    "neighbourhoods",
    "tolerance",
]

COMPLETE = 100
"""Largest cohort whose graph is complete."""

_EXPOSED_BITS = 40
_FAILED_BITS = 30


class GraphFields(NamedTuple):
    """Degree k and threshold t of a masking graph, as the plan has them."""

    degree: int
    threshold: int


@dataclass(frozen=True)
class Assumptions:
    """The shares of corrupt and lost members that a masking graph is built to withstand.

    Parameters
    ----------
    corrupt : float
        Members that work with the server against the others, a fraction in [0, 1).
    dropout : float
        Members that are lost on the way, a fraction in [0, 1).
    """

    corrupt: float = 0.1
    dropout: float = 0.2

    def __post_init__(self) -> None:
        for name, value in (("corrupt", self.corrupt), ("dropout", self.dropout)):
            if not 0 <= value < 1:
                raise ValueError(f"{name} members: a fraction of {value}, expected 0 or more and below 1")


@lru_cache(maxsize=1024)
def graph_fields(members: int, assumed: Assumptions | None = None) -> GraphFields:
    """Return degree k and threshold t of the masking graph for ``members`` members.

    Complete graphs have ``t = min(floor(2n / 3) + 1, n - 1)``.  Above ``COMPLETE`` members the result is the smallest
    even k, and for it the smallest t, with ``n P[2t <= k + corrupt neighbours] <= 2^-40`` and
    ``n P[fewer than t neighbours survive] <= 2^-30``.

    Parameters
    ----------
    members : int
        Size n of the cohort.
    assumed : Assumptions, optional
        10% corrupt and 20% lost when left out; without effect up to ``COMPLETE`` members.

    Raises
    ------
    Failed
        For fewer than two members, and when no degree will do.
    """
    assumed = assumed or Assumptions()
    if members < 2:
        raise Failed(
            f"a masked sum over {members} member would show its contribution, expected at least 2 members"
        )
    if members <= COMPLETE:
        return GraphFields(members - 1, min(2 * members // 3 + 1, members - 1))
    corrupt, lost = _share(members, assumed.corrupt), _share(members, assumed.dropout)
    threshold = 1
    for degree in range(2, members - 1, 2):
        # The smallest t that hides the vectors never falls as k grows, so the search goes on from the last t.
        while _any(members, degree, corrupt, 2 * threshold - degree) > 2.0**-_EXPOSED_BITS:
            threshold += 1
        # Fewer than t survive when at least k - t + 1 are lost.
        if threshold <= degree and _any(members, degree, lost, degree - threshold + 1) <= 2.0**-_FAILED_BITS:
            return GraphFields(degree, threshold)
    raise Failed(
        f"no graph of {members} members withstands {assumed.corrupt:.0%} corrupt and {assumed.dropout:.0%} lost members"
    )


class Tolerance(NamedTuple):
    """Numbers of curious and of lost devices, the largest ones first, that a plan withstands.

    Parameters
    ----------
    curious : int
        Devices whose members may work with the server while every other member's contribution stays hidden in a sum
        with those of others.
    lost : int
        Devices that may be lost while the sum can still be formed.
    """

    curious: int
    lost: int


def tolerance(devices: Sequence[int], degree: int, threshold: int) -> Tolerance:
    """Return how many curious and how many lost devices a plan withstands.

    The bounds of ``graph_fields`` take members as independent; but all members of a device belong to one administrator
    and fail together.

    Parameters
    ----------
    devices : sequence of int
        Members that each device speaks for.
    degree, threshold : int
        As in the plan.
    """
    members = sum(devices)
    largest = sorted(devices, reverse=True)
    curious = lost = 0
    for count in range(1, len(largest)):
        taken = sum(largest[:count])
        exposed = _any(members, degree, taken, 2 * threshold - degree)
        # A single honest device could hide nothing: the sum minus the others' contributions is its own.
        if len(largest) - count < 2 or exposed > 2.0**-_EXPOSED_BITS:
            break
        curious = count
    for count in range(1, len(largest)):
        if _any(members, degree, sum(largest[:count]), degree - threshold + 1) > 2.0**-_FAILED_BITS:
            break
        lost = count
    return Tolerance(curious, lost)


def arranged(seed: bytes, members: int, degree: int) -> tuple[tuple[int, ...], ...]:
    """Return each member's neighbours, ascending.

    If ``degree = members - 1``, all other members are neighbours.  Otherwise the ring is the positions 0 to
    ``members - 1`` sorted by SHA-256((graph, seed, position)), and neighbours are at most ``degree / 2`` places
    away.

    Raises
    ------
    ValueError
        When there is no such graph: a degree below 1, above ``members - 1``, or odd without being complete.
    """
    if degree == members - 1 and degree >= 1:
        everyone = tuple(range(members))
        return tuple(everyone[:member] + everyone[member + 1 :] for member in everyone)
    if degree % 2 or not 2 <= degree < members - 1:
        raise ValueError(
            f"no graph of {members} members has degree {degree}, expected {members - 1}, or even and less"
        )
    ring = sorted(range(members), key=lambda at: hashlib.sha256(encode("graph", seed, at)).digest())
    reach = range(1, degree // 2 + 1)
    found: list[tuple[int, ...]] = [()] * members
    for place, member in enumerate(ring):
        around = [ring[(place + step) % members] for step in reach] + [ring[place - step] for step in reach]
        found[member] = tuple(sorted(around))
    return tuple(found)


@lru_cache(maxsize=8)
def neighbourhoods(seed: bytes, members: int, degree: int) -> tuple[tuple[int, ...], ...]:
    """Return each member's neighbours as ``arranged`` does; cached for all members of a plan in one process."""
    return arranged(seed, members, degree)


def _share(members: int, fraction: float) -> int:
    # 0.1 * 300 is 30.000000000000004: round what is meant to be whole.
    return math.floor(round(members * fraction, 6))


def _any(members: int, degree: int, marked: int, least: int) -> float:
    """Bound the probability that some member has at least ``least`` marked neighbours."""
    return members * _tail(members - 1, marked, degree, least)


def _tail(population: int, marked: int, drawn: int, least: int) -> float:
    """Return P[X >= least] for X hypergeometric: marked ones among those drawn without replacement."""
    marked = min(marked, population)
    first = max(least, drawn - (population - marked), 0)
    if first > min(drawn, marked):
        return 0.0
    if least <= max(0, drawn - (population - marked)):
        return 1.0
    whole = _log_choose(population, drawn)
    return math.fsum(
        math.exp(_log_choose(marked, n) + _log_choose(population - marked, drawn - n) - whole)
        for n in range(first, min(drawn, marked) + 1)
    )


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
