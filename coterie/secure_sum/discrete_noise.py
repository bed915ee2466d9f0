r"""Exact sampling of the discrete Gaussian and Laplace (Canonne, Kamath and Steinke, 2020), many numbers at once.

The discrete Gaussian of variance parameter :math:`\sigma^2` has the probabilities
:math:`P[x] \propto e^{-x^2 / (2 \sigma^2)}` for whole numbers x, the discrete Laplace of scale t
:math:`P[x] \propto e^{-|x| / t}`.  Samples of floating-point noise tell, by their lowest
bits, what they were added to (Mironov, 2012).  Here uniform numbers are compared with weights, by more of their bits
where the first do not decide.  So the probabilities are exact.

Absolute values are cut into blocks of neighbours.  A block is chosen by its weight and a value in it uniformly, which
is kept by the quotient of its weight and that of the block's smallest value.
"""

from __future__ import annotations

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

__all__ = ["LARGEST_SCALE", "LARGEST_VARIANCE", "RandomBytes", "discrete_gaussian", "discrete_laplace"]

RandomBytes = Callable[[int], bytes]
"""Returns as many uniform random bytes as asked."""

LARGEST_VARIANCE = 2**50
"""Largest variance for which the numbers of a decision fit 63 bits."""

LARGEST_SCALE = 2**31
"""Largest scale of a discrete Laplace for which all numbers of a decision fit 63 bits."""

_AT_ONCE = 1 << 14
"""Values drawn together: so few that a processor's nearest memory holds all numbers of their decisions."""

_FURTHEST = 14
"""Standard deviations of the discrete Gaussian beyond which there are no blocks, of a probability below 2^-140."""

_SCALES = 8
"""Scales of the discrete Laplace that have blocks; beyond, the distribution begins anew."""

_WORD, _FLOAT, _GUIDE, _SHORT = 64, 53, 14, 32
_LATER = 11
"""Bits of a short word that decide nothing, until further 32 bits follow those before them: 53 together."""

_DIGITS = 64
_EXTRA = 128
"""Bits of a bound beyond its first word, at `_DIGITS` digits."""

_UNSURE = 1e-12
"""More than the error of an exponential in double precision, and of a uniform number of 53 bits."""

_ROUNDING = 1 << 16
"""More than the error of a bound, in units of its last bit."""


def discrete_gaussian(
    variance: int, size: int, random: RandomBytes = secrets.token_bytes
) -> NDArray[np.int64]:
    r"""Draw independent samples.

    Parameters
    ----------
    variance : int
        :math:`\sigma^2`, 1 to `LARGEST_VARIANCE`.
    size : int
    random : callable, optional
        Source of randomness; that of the operating system unless given.

    Returns
    -------
    ndarray of int64, shape (size,)

    Raises
    ------
    ValueError
        A variance out of its range.
    """
    if not 1 <= variance <= LARGEST_VARIANCE:
        raise ValueError(f"a variance of {variance}; expected 1 to {LARGEST_VARIANCE}")
    return _filled(size, lambda left: _drawn(_gaussian(variance), _asked(left), random))


def discrete_laplace(scale: int, size: int, random: RandomBytes = secrets.token_bytes) -> NDArray[np.int64]:
    r"""Draw independent samples of the discrete Laplace, whose variance is about :math:`2 t^2`.

    Parameters
    ----------
    scale : int
        t, 1 to `LARGEST_SCALE`.
    size : int
    random : callable, optional
        Source of randomness; that of the operating system unless given.

    Returns
    -------
    ndarray of int64, shape (size,)

    Raises
    ------
    ValueError
        A scale out of its range.
    """
    if not 1 <= scale <= LARGEST_SCALE:
        raise ValueError(f"a scale of {scale}; expected 1 to {LARGEST_SCALE}")
    return _filled(size, lambda left: _drawn(_laplace(scale), _asked(left), random))


def _filled(size: int, drawn: Callable[[int], NDArray[np.signedinteger]]) -> NDArray[np.int64]:
    """Return so many samples, from draws that are asked for as many as are left and give some number of them."""
    found = np.empty(size, np.int64)
    done = 0
    while done < size:
        kept = drawn(size - done)[: size - done]
        found[done : done + len(kept)] = kept
        done += len(kept)
    return found


def _asked(left: int) -> int:
    """Return how many samples to draw where so many are left: a few are not kept."""
    return min(left * 17 // 16 + 64, _AT_ONCE)


class _Law(ABC):
    """A symmetric distribution of whole numbers, cut into blocks of absolute values."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Number of values in a block, a power of two."""

    @abstractmethod
    def sums(self) -> list[Decimal]:
        """Return the probabilities of blocks up to each but the last, in the context's digits.

        The weight of a block is that of its smallest value.
        """

    @abstractmethod
    def quotients(self, value: NDArray[np.int64], place: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        """Return a and b for values at some places of their blocks: the weight is exp(-a / b) of the smallest value's.

        a is below 2 b.
        """

    @abstractmethod
    def sure(self, block: NDArray[np.signedinteger]) -> NDArray[np.uint32]:
        """Return for each block a word below which a word keeps every value of it, as `_lower`."""

    @property
    @abstractmethod
    def kind(self) -> type[np.signedinteger]:
        """Type of numbers that holds all values; the smaller, the less memory is read and written."""

    @property
    def last(self) -> int | None:
        """Number of the block that stands for all values from its smallest on, among which the law begins anew."""
        return None


@dataclass(frozen=True)
class _Gaussian(_Law):
    variance: int

    @cached_property
    def width(self) -> int:
        """About a sixteenth of the standard deviation."""
        return 1 << max(math.isqrt(self.variance).bit_length() - 5, 0)

    @cached_property
    def _blocks(self) -> int:
        return _FURTHEST * math.isqrt(self.variance) // self.width + 2

    @cached_property
    def _sure(self) -> NDArray[np.uint32]:
        place = np.full(self._blocks, self.width - 1)
        over, under = self.quotients(np.arange(self._blocks) * self.width + place, place)
        return _lower(np.exp(over / -under))

    def sure(self, block: NDArray[np.signedinteger]) -> NDArray[np.uint32]:
        return self._sure.take(block)

    @property
    def kind(self) -> type[np.signedinteger]:
        # Values are below so many standard deviations, which are at most 2^25.
        return np.int32

    def sums(self) -> list[Decimal]:
        weights = [(-Decimal((n * self.width) ** 2) / (2 * self.variance)).exp() for n in range(self._blocks)]
        whole = sum(weights)
        return [one / whole for one in accumulate(weights[:-1])]

    def quotients(self, value: NDArray[np.int64], place: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        # The exponent of a weight is its square over twice the variance: a is the difference of two squares.
        found = value + value
        found -= place
        found *= place
        return found, 2 * self.variance


@dataclass(frozen=True)
class _Laplace(_Law):
    scale: int

    @cached_property
    def width(self) -> int:
        """About a sixteenth of the scale."""
        return 1 << max(self.scale.bit_length() - 5, 0)

    @cached_property
    def _sure(self) -> NDArray[np.uint32]:
        return _lower(np.exp(np.array([1 - self.width]) / self.scale))

    def sure(self, block: NDArray[np.signedinteger]) -> NDArray[np.uint32]:
        # The same for every block.
        return self._sure

    @property
    def kind(self) -> type[np.signedinteger]:
        # Values have no bound.
        return np.int64

    @cached_property
    def last(self) -> int:
        return _SCALES * self.scale // self.width + 1

    def sums(self) -> list[Decimal]:
        return [1 - (-Decimal((n + 1) * self.width) / self.scale).exp() for n in range(self.last)]

    def quotients(self, value: NDArray[np.int64], place: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        return place, self.scale


@lru_cache(64)
def _gaussian(variance: int) -> _Gaussian:
    """Return the law of a variance, which keeps what it has computed for its blocks."""
    return _Gaussian(variance)


@lru_cache(64)
def _laplace(scale: int) -> _Laplace:
    """Return the law of a scale, as `_gaussian`."""
    return _Laplace(scale)


def _drawn(law: _Law, size: int, random: RandomBytes) -> NDArray[np.signedinteger]:
    """Draw most of ``size`` samples."""
    value, width = _chosen(law, size, random), law.width
    if width == 1:
        negative = np.frombuffer(random(size), np.uint8) & 1 == 1
        kept = _without_second_zero(value, negative)
    else:
        words = np.frombuffer(random(4 * size), "<u4")
        # Decisions take the first bits of a word; sign and place in the block are others.
        bits = (words if 2 * width <= 1 << _LATER else np.frombuffer(random(4 * size), "<u4")).view(np.int32)
        unsure = np.flatnonzero(words >= law.sure(value))
        # Widths are powers of two.
        place = bits & (width - 1)
        negative = bits & width != 0
        value *= width
        value += place
        kept = _without_second_zero(value, negative)
        first = (words[unsure] >> np.uint32(_LATER)).astype(np.int64)
        over, under = law.quotients(value[unsure].astype(np.int64), place[unsure].astype(np.int64))
        kept[unsure] &= _smaller(over, under, first << _SHORT | _more_bits(len(unsure), random), random)
    # Signs are random: a choice for each value would be mispredicted half of the time.
    value *= 1 - 2 * negative.astype(value.dtype)
    drawn: NDArray[np.signedinteger] = value[kept]
    return drawn


def _more_bits(size: int, random: RandomBytes) -> NDArray[np.int64]:
    """Draw 32 bits for each of some words."""
    return np.frombuffer(random(4 * size), "<u4").astype(np.int64)


def _without_second_zero(value: NDArray[np.signedinteger], negative: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which values to keep such that zero is not drawn with both signs."""
    kept: NDArray[np.bool_] = (value != 0) | ~negative
    return kept


def _lower(quotients: NDArray[np.float64]) -> NDArray[np.uint32]:
    """Return words below which every word is surely below a quotient, whatever bits follow its first ones."""
    first = np.floor(quotients * (1 - _UNSURE) * 2.0 ** (_SHORT - _LATER)).astype(np.uint32)
    return first << np.uint32(_LATER)


def _chosen(law: _Law, size: int, random: RandomBytes) -> NDArray[np.signedinteger]:
    """Choose blocks by their weights: by as many bits of a uniform number as it takes."""
    high, guide = _guide(law)
    words = np.frombuffer(random(4 * size), "<u4")
    found: NDArray[np.signedinteger] = guide.take(words >> np.uint32(_SHORT - _GUIDE)).astype(law.kind)
    # Few words share their first bits with a bound.
    near = np.flatnonzero(found < 0)
    looked_up = words[near].astype(np.uint64) << np.uint64(_SHORT)
    looked_up |= _more_bits(len(near), random).view(np.uint64)
    places = np.searchsorted(high, looked_up, side="right")
    # A word that equals the first bits of a bound is decided by further ones.
    for place in np.flatnonzero(high[np.maximum(places - 1, 0)] == looked_up).tolist():
        places[place] = _decided(law, int(looked_up[place]), random)
    found[near] = places
    if law.last is not None:
        beyond = np.flatnonzero(found == law.last)
        if len(beyond):
            found[beyond] += _chosen(law, len(beyond), random)
    return found


@lru_cache(64)
def _guide(law: _Law) -> tuple[NDArray[np.uint64], NDArray[np.int16]]:
    """Return the first words of the bounds, and the block of a word by its first bits; -1 where those are a bound's."""
    high = np.array([bound >> _EXTRA for bound in _bounds(law, _DIGITS)], np.uint64)
    first = (high >> np.uint64(_WORD - _GUIDE)).astype(np.int64)
    # Small, because every sample looks up an entry at random.
    guide = np.searchsorted(first, np.arange(1 << _GUIDE), side="right").astype(np.int16)
    guide[first] = -1
    return high, guide


def _decided(law: _Law, word: int, random: RandomBytes) -> int:
    digits, bits = _DIGITS, _WORD
    while True:
        extra = _bits_of(digits) - bits
        word, bits = (word << extra) | (int.from_bytes(random(extra // 8), "little")), bits + extra
        bounds = _bounds(law, digits)
        # Bounds are right to a few units of their last bits.
        if all(abs(word - bound) > _ROUNDING for bound in bounds):
            return sum(word >= bound for bound in bounds)
        digits *= 2


@lru_cache(64)
def _bounds(law: _Law, digits: int) -> tuple[int, ...]:
    """Return the sums of the blocks' weights up to each but the last, as parts of 2^(bits of so many digits)."""
    with localcontext() as context:
        context.prec = digits + 20
        return tuple(int(one * 2 ** _bits_of(digits)) for one in law.sums())


def _bits_of(digits: int) -> int:
    """Return the number of bits, in whole words, that so many digits carry."""
    return digits * 3 // _WORD * _WORD


def _smaller(
    over: NDArray[np.int64], under: int, words: NDArray[np.int64], random: RandomBytes
) -> NDArray[np.bool_]:
    """Return whether uniform numbers are below exp(-over / under), for quotients below 2; given by their first 53 bits.

    A decision by floating-point numbers stands unless it is so close that their error could have turned it; those few
    are made by decimal numbers of as many digits as it takes.
    """
    wanted = over * (-1 / under)
    np.exp(wanted, out=wanted)
    # How far a uniform number of 53 bits is above the quotient.
    above = words * 2.0**-_FLOAT
    above -= wanted
    found: NDArray[np.bool_] = above < 0
    for place in np.flatnonzero(np.abs(above, out=above) < _UNSURE).tolist():
        found[place] = _below_exponential(int(words[place]), int(over[place]), under, random)
    return found


def _below_exponential(word: int, over: int, under: int, random: RandomBytes) -> bool:
    """Return whether a uniform number with these first bits is below exp(-over / under)."""
    if not over:
        return True
    bits, digits = _FLOAT, _DIGITS
    while True:
        word, bits = (word << _WORD) | int.from_bytes(random(_WORD // 8), "little"), bits + _WORD
        digits = max(digits, bits)
        with localcontext() as context:
            context.prec = digits
            wanted = (Decimal(-over) / under).exp() * 2**bits
        if abs(wanted - word) > _ROUNDING:
            return bool(word < wanted)
