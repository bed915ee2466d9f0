"""Robust rules: the sum of contributions computed so that a few of them, whatever they hold, change it little.

Rules work on rounded contributions, whole numbers of steps, of one round.  Each member counts once: a member that
covers several users enters with its mean over them, and the result is scaled to all users again, so that a learning
system takes it as it takes a sum.  Rows are those of a segment's first axis.

Embedding models are sparse: most members touch few rows.  Rules by coordinate (``median``, ``trimmed-mean``) and the
filter by ``distance`` therefore compare, in each row, the members that touched it; a median over all members would be
zero nearly everywhere.  Counts, which their bits bound already, and metrics are always added.

Sources: median and trimmed mean, Yin et al. 2018; Krum, Blanchard et al. 2017, with the n - f best contributions
(m-Krum); the spectral filter, Shejwalkar and Houmansadr 2021, without their random subsets of coordinates; the bound
of norms, Sun et al. 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.secure_sum.aggregation import Aggregation
from coterie.secure_sum.contribution import Layout, Segment

__all__ = ["RobustSum", "SparseSteps", "Submitted", "robust_sum"]

_CHUNK_BYTES = 64 << 20
"""Dense values in memory at once, bytes."""

_Steps = NDArray[np.float64]


class SparseSteps(NamedTuple):
    """A member's contribution without its zeros.

    Parameters
    ----------
    positions : ndarray of uint32, shape (n,)
        Positions of the values in the vector, ascending.
    values : ndarray of int32, shape (n,)
        Steps: codes without the offset of zero.
    """

    positions: NDArray[np.uint32]
    values: NDArray[np.int32]

    @classmethod
    def of(cls, codes: NDArray[np.uint32], users: int, layout: Layout) -> SparseSteps:
        """Return the steps in codes that are summed over ``users`` users."""
        steps = (codes - layout.zeros(users)).view(np.int32)
        positions = np.flatnonzero(steps)
        return cls(positions.astype(np.uint32), steps[positions])

    def within(self, place: slice) -> SparseSteps:
        """Return the part in a range of the vector, with positions in this range."""
        first, last = np.searchsorted(self.positions, (place.start, place.stop))
        return SparseSteps(self.positions[first:last] - np.uint32(place.start), self.values[first:last])


@dataclass(frozen=True, eq=False)
class Submitted:
    """The contributions of one round, by members in the order of the plan.

    Parameters
    ----------
    layout : Layout
    users : ndarray of int64, shape (members,)
        Number of users that each member covers.
    steps : sequence of SparseSteps
    """

    layout: Layout
    users: NDArray[np.int64]
    steps: Sequence[SparseSteps]

    @property
    def members(self) -> int:
        """Number of members."""
        return len(self.steps)

    def values(self) -> Iterator[tuple[Segment, slice]]:
        """Yield the segments that change a model, and their places."""
        for segment in self.layout.segments:
            if segment.changes:
                yield segment, self.layout.places[segment.name]

    def added(self, kept: Sequence[int]) -> NDArray[np.int64]:
        """Return the sum of some members' contributions, int64 (layout size,)."""
        total = np.zeros(self.layout.size, np.int64)
        for member in kept:
            one = self.steps[member]
            total[one.positions] += one.values
        return total


class RobustSum(NamedTuple):
    """The sum by a rule.

    Parameters
    ----------
    steps : ndarray of int64, shape (layout size,)
        Sum over the users of the members that were not left out, in steps.
    left_out : tuple of int
        Members that were left out, as positions in `Submitted`, ascending.
    """

    steps: NDArray[np.int64]
    left_out: tuple[int, ...] = ()


def robust_sum(given: Submitted, terms: Aggregation) -> RobustSum:
    """Return the sum of contributions by a rule; the same one whatever order they arrived in.

    Parameters
    ----------
    given : Submitted
    terms : Aggregation
        A rule but ``sum``, for which there are enough members (`Aggregation.shortfall`).
    """
    liars = terms.liars(given.members)
    match terms.rule:
        case "median":
            return RobustSum(_by_coordinate(given, lambda block: np.median(block, axis=1)))
        case "trimmed-mean":
            return RobustSum(_by_coordinate(given, lambda block: _trimmed(block, terms, liars)))
        case "norm-bound":
            return RobustSum(_shortened(given, terms.norm_bound))
        case rule:
            scores = _SCORES[rule](given, liars)
            # Equal scores are left out from the last member on.
            order = np.argsort(scores, kind="stable").tolist()
            kept, left_out = order[: given.members - liars], order[given.members - liars :]
            return RobustSum(given.added(sorted(kept)), tuple(sorted(left_out)))


# --- rows --------------------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """Rows of a segment that equally many members touched.

    Parameters
    ----------
    rows : ndarray of int64, shape (R,)
    members : ndarray of int64, shape (R, t)
        Members that touched each row, ascending.
    means : ndarray of float64, shape (R, t, width)
        Their values, as means over the users that each member covers.
    """

    rows: NDArray[np.int64]
    members: NDArray[np.int64]
    means: _Steps


def _touched(given: Submitted, segment: Segment, place: slice) -> Iterator[_Rows]:
    """Yield the rows of a segment that anybody touched, in blocks of equally many members."""
    _, width = _matrix(segment)
    rows, members, parts = [], [], []
    for member, steps in enumerate(given.steps):
        own = steps.within(place)
        row, column = np.divmod(own.positions.astype(np.int64), width)
        distinct, number = np.unique(row, return_inverse=True)
        block = np.zeros((len(distinct), width))
        block[number, column] = own.values
        rows.append(distinct)
        members.append(np.full(len(distinct), member, np.int64))
        parts.append(block / given.users[member])
    every, of, means = np.concatenate(rows), np.concatenate(members), np.concatenate(parts)
    # Stable, so that members stay ascending within a row.
    order = np.argsort(every, kind="stable")
    distinct, first, count = np.unique(every[order], return_index=True, return_counts=True)
    for touching in np.unique(count).tolist():
        chosen = np.flatnonzero(count == touching)
        at_once = max(_CHUNK_BYTES // (8 * touching * width), 1)
        for start in range(0, len(chosen), at_once):
            these = chosen[start : start + at_once]
            places = order[first[these][:, None] + np.arange(touching)]
            yield _Rows(distinct[these], of[places], means[places])


def _matrix(segment: Segment) -> tuple[int, int]:
    """Return the number of a segment's rows, and the number of values in a row."""
    rows = segment.shape[0] if segment.shape else 1
    return rows, segment.size // rows


# --- rules by coordinate -----------------------------------------------------------------------------------------


def _by_coordinate(given: Submitted, location: Callable[[_Steps], _Steps]) -> NDArray[np.int64]:
    """Return, in each row, a location of the means of those that touched it, times the users whom they cover."""
    total = given.added(range(given.members))
    for segment, place in given.values():
        found = np.zeros(_matrix(segment))
        for block in _touched(given, segment, place):
            users = given.users[block.members].sum(axis=1)
            found[block.rows] = location(block.means) * users[:, None]
        total[place] = np.rint(found).astype(np.int64).ravel()
    return total


def _trimmed(block: _Steps, terms: Aggregation, liars: int) -> _Steps:
    """Return the means of a block (R, t, width) over t without the k smallest and the k largest values."""
    touching = block.shape[1]
    # A share of liars counts among those that touched a row, rounded up; a number may all have touched it.
    among = liars if terms.byzantine >= 1 else math.ceil(terms.share * touching - 1e-6)
    cut = min(among, (touching - 1) // 2)
    kept: _Steps = np.sort(block, axis=1)[:, cut : touching - cut].mean(axis=1)
    return kept


def _shortened(given: Submitted, bound: float) -> NDArray[np.int64]:
    """Return the sum of contributions, each scaled down to ``bound`` for each user that its member covers."""
    total = given.added(range(given.members))
    values = list(given.values())
    found = {segment.name: np.zeros(segment.size) for segment, _ in values}
    for steps, users in zip(given.steps, given.users.tolist(), strict=True):
        parts = [(segment, steps.within(place)) for segment, place in values]
        norm = np.sqrt(sum(np.square(own.values * segment.step).sum() for segment, own in parts))
        factor = min(1.0, bound * users / norm) if norm else 1.0
        for segment, own in parts:
            found[segment.name][own.positions] += factor * own.values
    for segment, place in values:
        total[place] = np.rint(found[segment.name]).astype(np.int64)
    return total


# --- filters of whole contributions ------------------------------------------------------------------------------


def _krum(given: Submitted, liars: int) -> _Steps:
    """Return each member's sum of squared distances to its n - f - 2 nearest contributions, float64 (members,)."""
    products = _products(given)
    squares = np.diag(products)
    distances = np.maximum(squares[:, None] + squares[None, :] - 2 * products, 0)
    np.fill_diagonal(distances, np.inf)
    found: _Steps = np.sort(distances, axis=1)[:, : given.members - liars - 2].sum(axis=1)
    return found


def _distance(given: Submitted, liars: int) -> _Steps:
    """Return each member's root mean square distance from the median of the rows that it touched, (members,)."""
    squared, values = np.zeros(given.members), np.zeros(given.members)
    for segment, place in given.values():
        for block in _touched(given, segment, place):
            away = (block.means - np.median(block.means, axis=1)[:, None]) * segment.step
            np.add.at(squared, block.members, np.square(away).sum(axis=2))
            np.add.at(values, block.members, block.means.shape[2])
    return np.sqrt(squared / np.maximum(values, 1))


def _spectral(given: Submitted, liars: int) -> _Steps:
    """Return each member's squared projection on the direction in which contributions vary most, (members,)."""
    products = _products(given)
    centred = products - products.mean(axis=0) - products.mean(axis=1)[:, None] + products.mean()
    values, vectors = np.linalg.eigh(centred)
    found: _Steps = values[-1] * np.square(vectors[:, -1])
    return found


_SCORES: Mapping[str, Callable[[Submitted, int], _Steps]] = MappingProxyType(
    {"krum": _krum, "distance": _distance, "spectral": _spectral}
)
"""Scores by filter; the members with the highest ones are left out."""


def _products(given: Submitted) -> _Steps:
    """Return inner products of all pairs of members' means, float64 (members, members).

    For members of one user, codes of up to 16 bits and fewer than 2^23 values, products are of whole numbers below
    2^53 and therefore exact, whatever order they are added in.
    """
    found = np.zeros((given.members, given.members))
    for segment, place in given.values():
        of_segment = np.zeros_like(found)
        at_once = max(_CHUNK_BYTES // (8 * given.members), 1)
        for start in range(place.start, place.stop, at_once):
            dense = np.zeros((given.members, min(at_once, place.stop - start)))
            for member, steps in enumerate(given.steps):
                own = steps.within(slice(start, start + dense.shape[1]))
                dense[member, own.positions] = own.values / given.users[member]
            of_segment += dense @ dense.T
        found += segment.step**2 * of_segment
    return found
