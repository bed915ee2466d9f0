"""Contributions whose users' values are clipped as a whole, from which noise of differential privacy follows.

Users wait until there are many, whose values are then clipped and rounded together.  Each user's values come out as
they would alone: norms are summed user by user, and a user's values are rounded by its own random numbers, segment by
segment in the order of the layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.secure_sum.contribution import Clip, Contribution, Segment, SegmentValues, rounded

__all__ = ["ClippedContribution"]

_TOGETHER = 1 << 16
"""Number of values from which users that wait are clipped and added up."""

_NO_ITEMS = np.zeros(0, np.intp)


class _Part:
    """Values of one segment of several users, one after the other.

    Parameters
    ----------
    segment : Segment
    found : sequence of (int, SegmentValues)
        Number of a user and its values, at least one each.

    Attributes
    ----------
    values : ndarray, shape (n,)
    """

    def __init__(self, segment: Segment, found: Sequence[tuple[int, SegmentValues]]) -> None:
        self.segment = segment
        self.waiting = [one for _, one in found]
        self._owner = np.array([user for user, _ in found], np.intp)
        self._lengths = np.array([one.values.size for one in self.waiting], np.intp)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self.values: NDArray[np.floating] = np.concatenate([one.values.ravel() for one in self.waiting])

    def _places(self) -> Iterator[tuple[SegmentValues, int, int]]:
        """Yield each user's values, and where they begin and end."""
        ends = self._starts + self._lengths
        return zip(self.waiting, self._starts.tolist(), ends.tolist(), strict=True)

    def summed(self, values: NDArray[np.generic], users: int) -> NDArray[np.float64]:
        """Return the sum of each user's values, float64 (users,); of each user by itself, in the same order."""
        found = np.zeros(users)
        found[self._owner] = np.add.reduceat(values, self._starts, dtype=np.float64)
        return found

    def each(self, users: NDArray[Any]) -> NDArray[Any]:
        """Return for each value the entry of its user, out of an array with one for each user."""
        return np.repeat(users[self._owner], self._lengths)

    def rounded(self) -> tuple[NDArray[np.int32], int]:
        """Return the values in steps, rounded by each user's own draws, and how many were beyond their bound."""
        precision: Any = self.segment.precision
        uniform = np.empty(len(self.values), precision)
        for one, start, end in self._places():
            one.rng.random(out=uniform[start:end], dtype=precision)
        return rounded(self.values, self.segment, uniform)

    def add_to(self, total: NDArray[np.int64], steps: NDArray[np.int32]) -> None:
        """Add steps of all users to the sum of the segment, int64 of the segment's shape."""
        if all(one.rows is None for one in self.waiting):
            total += steps.reshape(-1, *self.segment.shape).sum(axis=0, dtype=np.int64)
            return
        for one, start, end in self._places():
            own = steps[start:end].reshape(one.values.shape)
            if one.rows is None:
                total += own
            else:
                total[one.rows] += own


@dataclass
class ClippedContribution(Contribution):
    """Contribution of users none of whom exceeds the norms of a clip, rounding included.

    Parameters
    ----------
    clip : Clip
    """

    clip: Clip = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._counted: list[list[SegmentValues]] = []
        self._size = 0

    def add(
        self,
        name: str,
        values: NDArray[np.floating],
        rng: np.random.Generator,
        rows: NDArray[np.integer] | None = None,
        *,
        noise: bool = False,
    ) -> None:
        """Add one user's values as `Contribution.add`; noise is clipped with all else, and cannot be taken out."""
        # Copied, because the caller may go on using the arrays.
        kept = None if rows is None else rows.copy()
        self._waiting.append(
            SegmentValues(self._segment(name, values, rows), values.copy(), rng, kept, noise)
        )

    def count(self, users: int = 1) -> None:
        """Count ``users`` further users, whose values have all been added; their norms are bounded together.

        Raises
        ------
        UnboundedValueError
            As `settle`.
        """
        waiting, self._waiting = self._waiting, []
        self._counted.append(_counted_few(_joined(waiting), self.clip.most_items))
        self._size += sum(one.values.size for one in waiting)
        self.users += users
        if self._size >= _TOGETHER:
            self.settle()

    def bounded(self, metrics: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return a user's metrics that may be above 1, all shortened by the same factor, so that quotients stay."""
        order = self.clip.order
        norm = float(_root(_terms(metrics, order).sum(keepdims=True), order)[0])
        return metrics * min(self.clip.most_metrics / max(norm, 1e-12), 1.0)

    def codes(self) -> NDArray[np.uint32]:
        """Return the vector of codes of all users counted, uint32 (size,)."""
        self.settle()
        return super().codes()

    def settle(self) -> None:
        """Clip, round and add up the values of the users counted so far.

        Raises
        ------
        UnboundedValueError
            As `coterie.secure_sum.contribution.quantise`.
        """
        counted, self._counted, self._size = self._counted, [], 0
        changes = []
        for segment in self.layout.segments:
            found = [
                (user, one)
                for user, waiting in enumerate(counted)
                for one in waiting
                if one.segment is segment and one.values.size
            ]
            if not found:
                continue
            part = _Part(segment, found)
            if segment.changes and not self.clip.per_value:
                changes.append(part)
                continue
            if segment.changes:
                self._add(part, self._each_clipped(part))
                continue
            if segment.measures and segment.bound > 1:
                self._shorten_metrics(part, len(counted))
            self._add(part, self._rounded(part))
        if changes:
            self._clip(changes, len(counted))

    def _rounded(self, part: _Part) -> NDArray[np.int32]:
        steps, beyond = part.rounded()
        self.clipped += beyond
        return steps

    def _add(self, part: _Part, steps: NDArray[np.int32]) -> None:
        total = self.steps[self.layout.places[part.segment.name]].reshape(part.segment.shape)
        part.add_to(total, steps)

    def _each_clipped(self, part: _Part) -> NDArray[np.int32]:
        """Return steps of values none of which is beyond the clip by itself."""
        part.values = np.clip(part.values, -self.clip.norm, self.clip.norm)
        most = int(self.clip.norm / part.segment.step)
        return np.clip(self._rounded(part), -most, most)

    def _shorten_metrics(self, part: _Part, users: int) -> None:
        """Shorten the whole parts of metrics to the norm that users' metrics may have."""
        order, most = self.clip.order, self.clip.most_metrics
        norm = _root(part.summed(_terms(part.values, order), users), order)
        long = norm > most
        if long.any():
            scale = np.where(long, most / np.where(long, norm, 1.0), 1.0)
            part.values = np.floor(part.values * part.each(scale))

    def _clip(self, parts: Sequence[_Part], users: int) -> None:
        """Round the values that change a model such that no user's norm, of all of them together, is above the clip."""
        order, most = self.clip.order, self.clip.norm
        norm = _root(
            sum((part.summed(_terms(part.values, order), users) for part in parts), np.zeros(users)), order
        )
        # Rounding may lengthen what is as long as allowed: so much is left for it that it seldom does.
        step = max(segment.step for segment in self.layout.segments if segment.changes)
        filled = sum((part.summed(part.values != 0, users) for part in parts), np.zeros(users))
        spare = (1.5 * np.sqrt(filled) if order == 1 else filled * step / (8 * most)) + 2
        target = np.maximum(most - spare * step, most / 2)
        # Values that are not finite stay as they are, and are refused when they are rounded.
        long = np.isfinite(norm) & (norm > target)
        self.shortened += int(np.count_nonzero(long))
        if long.any():
            scale = np.where(long, target / np.where(long, norm, 1.0), 1.0)
            for part in parts:
                part.values = (part.values * part.each(scale)).astype(part.values.dtype)
        made = [self._rounded(part) for part in parts]
        total = np.zeros(users)
        for part, steps in zip(parts, made, strict=True):
            # Sums of whole numbers are exact.
            total += part.summed(_terms(steps, order), users) * part.segment.step**order
        longer = _root(total, order) > most
        for part, steps in zip(parts, made, strict=True):
            if longer.any():
                # Rounded towards zero nothing gets longer.
                steps = np.where(part.each(longer), _towards_zero(part.segment, part.values), steps)
            self._add(part, steps)


def _terms(values: NDArray[Any], order: int) -> NDArray[np.float64]:
    """Return what a norm adds up: absolute values or squares, float64."""
    found: NDArray[np.float64] = (np.square if order == 2 else np.abs)(values, dtype=np.float64)
    return found


def _root(total: NDArray[np.float64], order: int) -> NDArray[np.float64]:
    """Return norms, given the sums of `_terms`."""
    found: NDArray[np.float64] = np.sqrt(total) if order == 2 else total
    return found


def _joined(waiting: list[SegmentValues]) -> list[SegmentValues]:
    """Return a user's values with those of a segment together, of which noise and all else are clipped as one."""
    if len({one.segment.name for one in waiting}) == len(waiting):
        return waiting
    found: dict[str, SegmentValues] = {}
    for one in waiting:
        name = one.segment.name
        if name not in found:
            found[name] = one
            continue
        before = found[name]
        if before.rows is None or one.rows is None or np.intersect1d(before.rows, one.rows).size:
            raise ValueError(
                f"segment {name}: rows were added twice for a user whose contribution is clipped"
            )
        values, rows = np.concatenate([before.values, one.values]), np.concatenate([before.rows, one.rows])
        found[name] = before._replace(values=values, rows=rows)
    return list(found.values())


def _towards_zero(segment: Segment, values: NDArray[np.floating]) -> NDArray[np.int32]:
    """Round values to whole steps towards zero."""
    steps = np.trunc(np.asarray(values, np.float64) / segment.step)
    return np.clip(steps, -segment.levels, segment.levels).astype(np.int32)


def _counted_few(waiting: list[SegmentValues], most: int) -> list[SegmentValues]:
    """Return a user's values with counts of at most so many items, and without the rows of the others."""
    dropped: dict[str, NDArray[np.bool_]] = {}
    found = []
    for one in waiting:
        segment, values, rows = one.segment, one.values, one.rows
        counts = not segment.clip and not segment.measures and values.ndim == 1
        items = np.flatnonzero(values) if counts and len(values) > most else _NO_ITEMS
        if len(items) > most:
            left = _sampled(items if rows is None else rows[items], most)
            gone = np.delete(items, left)
            values[gone] = 0
            mask = np.zeros(segment.shape[0], np.bool_)
            mask[gone if rows is None else rows[gone]] = True
            dropped[segment.name] = mask
        found.append(one)
    if not dropped:
        return found
    return [_without(one, dropped[one.segment.over]) if one.segment.over in dropped else one for one in found]


def _sampled(items: NDArray[np.integer], most: int) -> NDArray[np.intp]:
    """Return the positions of some of a user's items, which depend on these items alone."""
    seed = hashlib.sha256(np.asarray(items, "<i8").tobytes()).digest()
    rng = np.random.default_rng(np.frombuffer(seed, "<u4"))
    return np.sort(rng.choice(len(items), most, replace=False))


def _without(one: SegmentValues, gone: NDArray[np.bool_]) -> SegmentValues:
    """Return values with some rows set to zero."""
    values = one.values.copy()
    values[gone if one.rows is None else gone[one.rows]] = 0
    return one._replace(values=values)
