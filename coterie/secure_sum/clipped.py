"""Contributions whose users' values are clipped as a whole, from which noise of differential privacy follows.

Users wait until there are many, whose values are then clipped and rounded together, also those of several members
(`Clipper`).  Each user's values come out as they would alone: norms are summed user by user, and a user's values are
rounded by its own random numbers, segment by segment in the order of the layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.secure_sum.contribution import (
    Clip,
    Contribution,
    Layout,
    Segment,
    SegmentValues,
    rounded,
)

__all__ = ["ClippedContribution", "Clipper"]

_TOGETHER = 1 << 16
"""Number of values from which users that wait are clipped and added up."""

_HELD = 1 << 22
"""Values of all contributions for which users wait, from which these are clipped, so that many take little memory."""

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

    def beyond(self, users: int) -> NDArray[np.int64]:
        """Return how many values of each user are beyond their bound, int64 (users,)."""
        return self.summed(np.abs(self.values) > self.segment.bound, users).astype(np.int64)

    def add_to(self, contributions: Sequence[Contribution], steps: NDArray[np.int32]) -> None:
        """Add each user's steps to the contribution that the user is in, one for each user."""
        whose = [contributions[user] for user in self._owner.tolist()]
        if all(one.rows is None for one in self.waiting) and all(one is whose[0] for one in whose):
            place = self._total(whose[0])
            place += steps.reshape(-1, *self.segment.shape).sum(axis=0, dtype=np.int64)
            return
        for whole, (one, start, end) in zip(whose, self._places(), strict=True):
            total, own = self._total(whole), steps[start:end].reshape(one.values.shape)
            if one.rows is None:
                total += own
            else:
                total[one.rows] += own

    def _total(self, whole: Contribution) -> NDArray[np.int64]:
        """Return the place of the segment in a contribution, int64 of the segment's shape."""
        return whole.steps[whole.layout.places[self.segment.name]].reshape(self.segment.shape)


class Clipper:
    """Users of one or more contributions of the same layout, who wait to be clipped together.

    Parameters
    ----------
    layout : Layout
    clip : Clip
    """

    def __init__(self, layout: Layout, clip: Clip) -> None:
        self._layout = layout
        self._clip = clip
        self._counted: list[list[SegmentValues]] = []
        self._whose: list[Contribution] = []
        self._size = 0
        self._held = 0

    @property
    def waits(self) -> bool:
        """Whether users wait."""
        return bool(self._counted)

    def wait(self, whole: Contribution, waiting: list[SegmentValues]) -> None:
        """Let a user's values wait, or values of several users that are bounded together, for a contribution.

        Raises
        ------
        UnboundedValueError
            As `settle`.
        """
        # Contributions come one after the other, or have few users.
        if not self._whose or self._whose[-1] is not whole:
            self._held += self._layout.size
        self._counted.append(_counted_few(_joined(waiting), self._clip.most_items))
        self._whose.append(whole)
        self._size += sum(one.values.size for one in waiting)
        if self._size >= _TOGETHER or self._held >= _HELD:
            self.settle()

    def settle(self) -> None:
        """Clip and round the values of all users that wait, and add them to their contributions.

        Raises
        ------
        UnboundedValueError
            As `coterie.secure_sum.contribution.quantise`.
        """
        counted, self._counted, self._size, self._held = self._counted, [], 0, 0
        whose, self._whose = self._whose, []
        by_segment: dict[str, list[tuple[int, SegmentValues]]] = {}
        for user, waiting in enumerate(counted):
            for one in waiting:
                if one.values.size:
                    by_segment.setdefault(one.segment.name, []).append((user, one))
        changes = []
        for segment in self._layout.segments:
            if segment.name not in by_segment:
                continue
            part = _Part(segment, by_segment[segment.name])
            if segment.changes and not self._clip.per_value:
                changes.append(part)
            elif segment.changes:
                part.add_to(whose, self._each_clipped(part, whose))
            else:
                if segment.measures and segment.bound > 1:
                    self._shorten_metrics(part, len(counted))
                part.add_to(whose, _rounded(part, whose))
        if changes:
            self._clip_changes(changes, whose)

    def _each_clipped(self, part: _Part, whose: Sequence[Contribution]) -> NDArray[np.int32]:
        """Return steps of values none of which is beyond the clip by itself."""
        part.values = np.clip(part.values, -self._clip.norm, self._clip.norm)
        most = int(self._clip.norm / part.segment.step)
        return np.clip(_rounded(part, whose), -most, most)

    def _shorten_metrics(self, part: _Part, users: int) -> None:
        """Shorten the whole parts of metrics to the norm that users' metrics may have."""
        order, most = self._clip.order, self._clip.most_metrics
        norm = _root(part.summed(_terms(part.values, order), users), order)
        long = norm > most
        if long.any():
            scale = np.where(long, most / np.where(long, norm, 1.0), 1.0)
            part.values = np.floor(part.values * part.each(scale))

    def _clip_changes(self, parts: Sequence[_Part], whose: Sequence[Contribution]) -> None:
        """Round the values that change a model such that no user's norm, of all of them together, is above the clip."""
        order, most, users = self._clip.order, self._clip.norm, len(whose)
        norm = _root(
            sum((part.summed(_terms(part.values, order), users) for part in parts), np.zeros(users)), order
        )
        # Rounding may lengthen what is as long as allowed: so much is left for it that it seldom does.
        step = max(segment.step for segment in self._layout.segments if segment.changes)
        filled = sum((part.summed(part.values != 0, users) for part in parts), np.zeros(users))
        spare = (1.5 * np.sqrt(filled) if order == 1 else filled * step / (8 * most)) + 2
        target = np.maximum(most - spare * step, most / 2)
        # Values that are not finite stay as they are, and are refused when they are rounded.
        long = np.isfinite(norm) & (norm > target)
        for user in np.flatnonzero(long).tolist():
            whose[user].shortened += 1
        if long.any():
            scale = np.where(long, target / np.where(long, norm, 1.0), 1.0)
            for part in parts:
                part.values = (part.values * part.each(scale)).astype(part.values.dtype)
        made = [_rounded(part, whose) for part in parts]
        total = np.zeros(users)
        for part, steps in zip(parts, made, strict=True):
            # Sums of whole numbers are exact.
            total += part.summed(_terms(steps, order), users) * part.segment.step**order
        longer = _root(total, order) > most
        for part, steps in zip(parts, made, strict=True):
            if longer.any():
                # Rounded towards zero nothing gets longer.
                steps = np.where(part.each(longer), _towards_zero(part.segment, part.values), steps)
            part.add_to(whose, steps)


@dataclass
class ClippedContribution(Contribution):
    """Contribution of users none of whom exceeds the norms of a clip, rounding included.

    Parameters
    ----------
    clip : Clip
    clipper : Clipper, optional
        Clips the users of other contributions of the same layout and clip as well; one of its own unless given.
    """

    clip: Clip = field(kw_only=True)
    clipper: Clipper | None = field(default=None, kw_only=True)

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
        if self.clipper is None:
            self.clipper = Clipper(self.layout, self.clip)
        self.clipper.wait(self, waiting)
        self.users += users

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
        if self.clipper is not None:
            self.clipper.settle()


def _rounded(part: _Part, whose: Sequence[Contribution]) -> NDArray[np.int32]:
    """Return a part's values in steps; count values beyond their bound for the contributions that they are in."""
    steps, beyond = part.rounded()
    if beyond:
        for whole, values in zip(whose, part.beyond(len(whose)).tolist(), strict=True):
            whole.clipped += values
    return steps


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
