"""The layout of contributions: named segments of one vector of integer codes, which secure sums add.

A participant's real values become integer codes by a quantiser with stochastic rounding (``docs/spec``, Quantiser).
Codes of many participants are added modulo 2^32, in clear or under masks; the sum of the rounded values is recovered
exactly.  Because integers are added, the sum depends neither on the order in which contributions arrive nor on how
users are spread over hosts.

Where the package coterie-native is installed, values are rounded by a compiled kernel, to the same bits, if it agrees
with the reference here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie import kernels

__all__ = [
    "Clip",
    "Contribution",
    "ImpossibleSumError",
    "Layout",
    "Segment",
    "SegmentValues",
    "UnboundedValueError",
    "compare_kernel",
    "quantise",
    "rounded",
]

_MODULUS_BITS = 32
_SINGLE_BITS = 16
"""Most bits of a code whose value is rounded in single precision."""


class UnboundedValueError(ValueError):
    """A value is not finite, or exceeds the bound that its segment declares; the value does not leave the client."""


class ImpossibleSumError(ValueError):
    """A sum exceeds its declared bounds: some participant did not follow the plan, and the round is void."""


@dataclass(frozen=True)
class Segment:
    """A named part of a contribution's vector, with its shape and quantiser.

    Parameters
    ----------
    name : str
        Unique within the layout.
    shape : tuple of int
        Shape of the values; a scalar has ``()``.
    bound : float
        Largest absolute value of one user's contribution.
    bits : int
        Bits b of one code, 2 to 31.  A segment of whole numbers up to ``m`` has ``bound = 2^(b-1) - 1 >= m``: then
        nothing is rounded (``Segment.whole``).
    over : str
        Name of the segment whose sum divides this one: a scalar divides everything (instances), a vector as long as
        the first axis divides row by row (touch counts).  Empty for a plain sum.
    clip : bool
        Whether values beyond the bound are clipped and counted; they are refused otherwise.
    measures : bool
        Whether the values are metrics, which change no model.  Not part of the layout's hash.
    """

    name: str
    shape: tuple[int, ...]
    bound: float
    bits: int
    over: str = ""
    clip: bool = True
    measures: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.bits < _MODULUS_BITS or not (math.isfinite(self.bound) and self.bound > 0):
            raise ValueError(f"segment {self.name}: {self.bits} bits, bound {self.bound}")

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...], largest: int) -> Segment:
        """Return a segment of whole numbers with absolute value up to ``largest``, carried without rounding."""
        bits = max(int(largest).bit_length() + 1, 2)
        return cls(name, shape, float(2 ** (bits - 1) - 1), bits, clip=False)

    @cached_property
    def changes(self) -> bool:
        """Whether the values change a model, as counts and metrics do not: robust rules are about these alone."""
        return self.clip and not self.measures

    @cached_property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def precision(self) -> type[np.float32] | type[np.float64]:
        """Precision in which values are rounded."""
        return np.float32 if self.bits <= _SINGLE_BITS else np.float64

    @cached_property
    def levels(self) -> int:
        """Largest absolute quantised value, 2^(b-1) - 1."""
        return int(2 ** (self.bits - 1) - 1)

    @cached_property
    def step(self) -> float:
        """Difference of two neighbouring quantised values."""
        return self.bound / self.levels


def quantise(
    values: NDArray[np.floating], segment: Segment, rng: np.random.Generator
) -> tuple[NDArray[np.int32], int]:
    """Round values to whole steps, up or down at random so that the expected value is exact; zero stays zero.

    ``q = clip(floor(x) + [x - floor(x) > u], -(2^(b-1) - 1), 2^(b-1) - 1)`` with ``x = v (2^(b-1) - 1) / B`` and ``u``
    uniform in [0, 1).  Values that are whole numbers of steps stay as they are.

    Returns
    -------
    steps : ndarray of int32, same shape
        Centred codes; the code on the wire is ``steps + 2^(b-1)``.
    clipped : int
        Number of values beyond the bound.

    Raises
    ------
    UnboundedValueError
        When a value is NaN or infinite, or beyond the bound of a segment that does not clip.
    """
    return rounded(values, segment, rng.random(np.shape(values), dtype=segment.precision))


def rounded(
    values: NDArray[np.floating], segment: Segment, uniform: NDArray[np.floating]
) -> tuple[NDArray[np.int32], int]:
    """Round values as `quantise`, given uniform draws of the segment's precision, of the same shape."""
    native = _compiled()
    if native is not None:
        found = _by_kernel(native, native.ncf_ways()[0], values, segment, uniform)
        if found is not None:
            return found
    return _by_reference(values, segment, uniform)


def _by_reference(
    values: NDArray[np.floating], segment: Segment, uniform: NDArray[np.floating]
) -> tuple[NDArray[np.int32], int]:
    # A value too large for the precision is infinite and refused below.
    with np.errstate(over="ignore"):
        scaled = np.asarray(np.multiply(values, segment.levels / segment.bound, dtype=segment.precision))
    beyond = 0
    # If the maximum is within the bound, all values are, and none is NaN.
    if not np.abs(scaled).max(initial=0) <= segment.levels:
        beyond = _beyond(scaled, segment)
    # For a scalar, floor returns a number, which cannot be changed in place.
    steps = np.asarray(np.floor(scaled))
    scaled -= steps
    # Compare instead of floor(x + u): that sum would itself be rounded up now and then for a draw just below 1.
    steps += scaled > uniform
    if beyond:
        np.clip(steps, -segment.levels, segment.levels, out=steps)
    return steps.astype(np.int32), beyond


def _by_kernel(
    native: Any,
    way: str,
    values: NDArray[np.floating],
    segment: Segment,
    uniform: NDArray[np.floating],
    sums: NDArray[np.int64] | None = None,
    rows: NDArray[np.integer] | None = None,
) -> tuple[NDArray[np.int32], int] | None:
    """Round values, and add them to sums; None, and nothing is added, where the reference has an error to tell."""
    given = np.asarray(values)
    if given.dtype != segment.precision or not given.flags.c_contiguous or not given.flags.aligned:
        # A value too large for the precision is infinite and refused.
        with np.errstate(over="ignore"):
            given = np.array(given, segment.precision, order="C")
    found: tuple[NDArray[np.int32], int] | None = native.round_steps(
        given,
        np.asarray(uniform),
        segment.levels / segment.bound,
        segment.levels,
        way,
        clips=segment.clip,
        sums=sums,
        rows=None if rows is None else np.ascontiguousarray(rows, np.int64),
    )
    return found


@cache
def _compiled() -> Any | None:
    """Return the package with the compiled kernel if it agrees with the reference here; None otherwise."""
    return kernels.agreed("the compiled kernel of rounding", _agrees)


def compare_kernel() -> None:
    """Compare the compiled kernel with the reference, as before its first use; see `coterie.kernels.left_out`."""
    _compiled()


def _agrees(native: Any) -> bool:
    """Return whether each way of the kernel has the steps and the sums of the reference."""
    for bits, clip in ((2, True), (16, True), (24, True), (31, False)):
        segment = Segment("", (), 0.7, bits, clip=clip)
        rng = np.random.default_rng(bits)
        values = rng.normal(0, 0.5, (401, 3))
        values = (values if clip else np.clip(values, -0.7, 0.7)).astype(np.float32)
        # Whole numbers of steps, and those next to them.
        values[:100] = np.rint(values[:100] / segment.step) * segment.step
        np.clip(values[:100], -0.7, 0.7, out=values[:100])
        uniform = rng.random(values.shape, segment.precision)
        uniform[:50] = 0
        values = values if clip else values.astype(np.float64)
        steps, beyond = _by_reference(values, segment, uniform)
        rows = rng.permutation(500)[:401]
        for way in native.ncf_ways():
            sums = np.arange(1500)
            found = _by_kernel(native, way, values, segment, uniform, sums, rows)
            expected = np.arange(1500).reshape(500, 3)
            expected[rows] += steps
            if found is None or found[1] != beyond or not np.array_equal(found[0], steps):
                return False
            if not np.array_equal(sums, expected.reshape(-1)):
                return False
    return True


def _beyond(scaled: NDArray[np.floating], segment: Segment) -> int:
    """Return the number of values beyond the bound; raise UnboundedValueError where they may not be clipped."""
    if not np.isfinite(scaled).all():
        raise UnboundedValueError(
            f"segment {segment.name} holds a value that is not a finite number: the local step diverged"
        )
    beyond = int(np.count_nonzero(np.abs(scaled) > segment.levels))
    if not segment.clip:
        raise UnboundedValueError(
            f"segment {segment.name}: {beyond} values beyond the declared bound {segment.bound:g}"
        )
    return beyond


@dataclass(frozen=True)
class Layout:
    """The segments of a contribution's vector, in order; server and hosts compute it independently."""

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        names = [segment.name for segment in self.segments]
        if len(set(names)) != len(names):
            raise ValueError(f"segments with the same name: {names}")
        for segment in self.segments:
            if segment.over:
                divisor = self[segment.over].shape
                if divisor not in ((), segment.shape[:1]):
                    raise ValueError(f"segment {segment.over} of shape {divisor} cannot divide {segment}")

    def __getitem__(self, name: str) -> Segment:
        """Return a segment by name."""
        for segment in self.segments:
            if segment.name == name:
                return segment
        raise KeyError(name)

    @cached_property
    def size(self) -> int:
        """Length of the vector."""
        return sum(segment.size for segment in self.segments)

    @cached_property
    def places(self) -> dict[str, slice]:
        """Position of each segment in the vector, by name."""
        found, start = {}, 0
        for segment in self.segments:
            found[segment.name] = slice(start, start + segment.size)
            start += segment.size
        return found

    @cached_property
    def _offsets(self) -> NDArray[np.uint32]:
        return self._spread([1 << (segment.bits - 1) for segment in self.segments]).astype(np.uint32)

    @cached_property
    def _span(self) -> NDArray[np.uint32]:
        """Difference of the largest and the smallest code of one user."""
        return self._spread([2 * segment.levels for segment in self.segments]).astype(np.uint32)

    @cached_property
    def levels(self) -> NDArray[np.int64]:
        """Largest absolute step of one user at each position, int64 (size,)."""
        return self._spread([segment.levels for segment in self.segments])

    def zeros(self, users: int) -> NDArray[np.uint32]:
        """Return the sum of ``users`` contributions of zeros, codes modulo 2^32; uint32 (size,)."""
        return np.uint32(users) * self._offsets

    def _spread(self, each: Sequence[int]) -> NDArray[np.int64]:
        return np.repeat(np.array(each, np.int64), [segment.size for segment in self.segments])

    @property
    def capacity(self) -> int:
        """Largest number of users whose codes can be added without passing 2^32."""
        widest = max(segment.bits for segment in self.segments)
        return int((2**_MODULUS_BITS - 1) // (2**widest - 1))

    def require_capacity(self, users: int) -> None:
        """Check that the codes of ``users`` users can be added without passing 2^32.

        Raises
        ------
        ValueError
            When the sum could pass 2^32; the message names the largest possible number of users.
        """
        if users > self.capacity:
            raise ValueError(
                f"a sum over {users} users would overflow: this layout has room for {self.capacity}; use fewer bits"
            )

    def decode(self, total: NDArray[np.uint32], users: int) -> dict[str, NDArray[np.float64]]:
        """Decode a sum of codes; return the sum over users of each segment's values, by name.

        Parameters
        ----------
        total : ndarray of uint32, shape (size,)
            Sum of the users' codes modulo 2^32.
        users : int
            Number of users in the sum.

        Raises
        ------
        ImpossibleSumError
            When a value is beyond ``users`` times its bound; the message shows no value.
        """
        if not self.possible(total, users):
            raise ImpossibleSumError(f"a sum is beyond what the contributions of {users} users can add up to")
        # Sums within the bounds do not wrap around.
        steps = (total - self.zeros(users)).view(np.int32)
        values = {}
        for segment in self.segments:
            scaled: NDArray[np.float64] = steps[self.places[segment.name]].astype(np.float64) * segment.step
            values[segment.name] = scaled.reshape(segment.shape)
        return values

    def possible(self, codes: NDArray[np.uint32], users: int) -> bool:
        """Return whether codes, summed over ``users`` users, are within the declared bounds."""
        # Each user's code is at least 1, so a smaller sum wraps around here and is beyond the span.
        span = self._span if users == 1 else np.uint32(users) * self._span
        return bool(((codes - np.uint32(users)) <= span).all())

    def average(self, sums: Mapping[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
        """Divide each segment's sum by the sum of its ``over`` segment, taken as at least 1; return them by name."""
        found = {}
        for segment in self.segments:
            value = sums[segment.name]
            if segment.over:
                divisor = np.maximum(sums[segment.over], 1.0)
                value = value / divisor.reshape(divisor.shape + (1,) * (value.ndim - divisor.ndim))
            found[segment.name] = value
        return found


class Clip(NamedTuple):
    """Bounds of one user's contribution as a whole, from which noise of differential privacy follows.

    Parameters
    ----------
    norm : float
        Largest norm of the values that change a model (`Segment.changes`), over all segments together, rounding
        included.
    order : int
        1 or 2: the norm is the sum of absolute values, or Euclidean.
    per_value : bool
        Whether ``norm`` bounds each value by itself.
    most_items : int
        Largest number of places in which a user is counted; a user who would be counted in more drops some, and the
        rows that these counts divide.
    most_metrics : float
        Largest norm of the whole parts of a user's metrics.
    """

    norm: float
    order: int
    per_value: bool
    most_items: int
    most_metrics: float


class SegmentValues(NamedTuple):
    """Values of a user that wait for the user's norm to be known.

    Parameters
    ----------
    segment : Segment
    values : ndarray
    rng : Generator
        Source of the draws by which the values are rounded.
    rows : ndarray of int, optional
        Rows of the segment; all of them unless given.
    noise : bool
        As for `Contribution.add`.
    """

    segment: Segment
    values: NDArray[np.floating]
    rng: np.random.Generator
    rows: NDArray[np.integer] | None
    noise: bool

    @property
    def squared(self) -> float:
        """Sum of the squared values; 0 for counts and metrics."""
        return float(np.square(self.values, dtype=np.float64).sum()) if self.segment.changes else 0.0


@dataclass
class Contribution:
    """Builds the vector of a member's contribution: of one user, or summed over several users of a host.

    Values are rounded user by user, so that the sum does not depend on how users are spread over hosts.

    Parameters
    ----------
    layout : Layout
    users : int
        Number of users counted so far.
    clipped : int
        Number of values beyond their bounds so far.
    norm_bound : float
        Largest Euclidean norm of one user's values, over all segments that change a model (`Segment.changes`); 0 for
        none.  A user's values are then rounded when the user is counted, scaled down where their norm is larger.
    shortened : int
        Number of users whose values were scaled down so far.
    steps, noise : ndarray of int64, shape (size,)
        All values so far in steps, and the noise among them.
    """

    layout: Layout
    users: int = 0
    clipped: int = 0
    norm_bound: float = 0.0
    shortened: int = 0
    steps: NDArray[np.int64] = field(init=False)
    noise: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = np.zeros(self.layout.size, np.int64)
        self.noise = np.zeros(self.layout.size, np.int64)
        self._waiting: list[SegmentValues] = []

    def add(
        self,
        name: str,
        values: NDArray[np.floating],
        rng: np.random.Generator,
        rows: NDArray[np.integer] | None = None,
        *,
        noise: bool = False,
    ) -> None:
        """Add one user's values of a segment, or of some of its rows (of the first axis; each at most once).

        ``noise`` says that the values hide others, and that denoisers may take them out of the sum again.

        Raises
        ------
        UnboundedValueError
            As `quantise`; with a bound of norms `count` raises it.
        ValueError
            When the shape is not the segment's.
        """
        segment = self._segment(name, values, rows)
        if self.norm_bound:
            # Copied, because the caller may go on using the array.
            self._waiting.append(SegmentValues(segment, values.copy(), rng, rows, noise))
        else:
            self._round(segment, values, rng, rows, noise)

    def _segment(self, name: str, values: NDArray[np.floating], rows: NDArray[np.integer] | None) -> Segment:
        """Return a segment, whose shape values must have."""
        segment = self.layout[name]
        expected = segment.shape if rows is None else (len(rows), *segment.shape[1:])
        if values.shape != expected:
            raise ValueError(f"segment {name}: values of shape {values.shape}, expected {expected}")
        return segment

    def _round(
        self,
        segment: Segment,
        values: NDArray[np.floating],
        rng: np.random.Generator,
        rows: NDArray[np.integer] | None,
        noise: bool = False,
    ) -> None:
        uniform = rng.random(np.shape(values), dtype=segment.precision)
        native = None if noise else _compiled()
        if native is not None:
            sums = self.steps[self.layout.places[segment.name]]
            found = _by_kernel(native, native.ncf_ways()[0], values, segment, uniform, sums, rows)
            if found is not None:
                self.clipped += found[1]
                return
        steps, clipped = rounded(values, segment, uniform)
        self.clipped += clipped
        self._put(segment, steps, rows, noise)

    def _put(
        self,
        segment: Segment,
        rounded: NDArray[np.int32],
        rows: NDArray[np.integer] | None,
        noise: bool = False,
    ) -> None:
        for steps in (self.steps, self.noise) if noise else (self.steps,):
            place = steps[self.layout.places[segment.name]].reshape(segment.shape)
            if rows is None:
                place += rounded
            else:
                place[rows] += rounded

    def count(self, users: int = 1) -> None:
        """Count ``users`` further users, whose values have all been added; their norm is bounded together."""
        waiting, self._waiting = self._waiting, []
        norm = math.sqrt(sum(one.squared for one in waiting))
        scale = 1.0
        # Values that are not finite stay as they are, and are refused when they are rounded.
        if math.isfinite(norm) and norm > self.norm_bound * users:
            scale = self.norm_bound * users / norm
            self.shortened += users
        for segment, values, rng, rows, noise in waiting:
            scaled = values * scale if segment.changes and scale < 1 else values
            self._round(segment, scaled, rng, rows, noise)
        self.users += users

    def bounded(self, metrics: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return a user's metrics that may be above 1, as long as they may be."""
        return metrics

    def codes(self) -> NDArray[np.uint32]:
        """Return the vector of codes, uint32 (size,), summed modulo 2^32 over the users counted."""
        return self.steps.astype(np.uint32) + self.layout.zeros(self.users)

    def apart(self) -> NDArray[np.uint32]:
        """Return the codes, and in a second row the noise in them, steps modulo 2^32; uint32 (2, size)."""
        return np.stack([self.codes(), self.noise.astype(np.uint32)])
