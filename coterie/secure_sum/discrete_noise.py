r"""Exact sampling of the discrete Gaussian and Laplace (Canonne, Kamath and Steinke, 2020), many numbers at once.

The discrete Gaussian of variance parameter :math:`\sigma^2` has the probabilities
:math:`P[x] \propto e^{-x^2 / (2 \sigma^2)}` for whole numbers x, the discrete Laplace of scale t
:math:`P[x] \propto e^{-|x| / t}`.  Samples of floating-point noise tell, by their lowest
bits, what they were added to (Mironov, 2012).  Here the discrete Laplace compares whole numbers with uniform whole
numbers: algorithms 1 and 2 of the paper.  The discrete Gaussian, of which more is drawn, compares uniform numbers
with weights, by more of their bits where the first do not decide.  So the probabilities are exact.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import lru_cache
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

_AT_ONCE = 1 << 12
"""Values drawn together: so few that a processor's nearest memory holds all numbers of their decisions."""

_FURTHEST = 14
_WORD, _FLOAT, _GUIDE = 64, 53, 14
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
    return _filled(size, lambda left: _gaussian(variance, min(left * 17 // 16 + 64, _AT_ONCE), random))


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
    return _filled(size, lambda left: _laplace(scale, min(2 * left + 16, _AT_ONCE), random))


def _filled(size: int, drawn: Callable[[int], NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return so many samples, from draws that are asked for as many as are left and give some number of them."""
    found = np.empty(size, np.int64)
    done = 0
    while done < size:
        kept = drawn(size - done)[: size - done]
        found[done : done + len(kept)] = kept
        done += len(kept)
    return found


def _below(limit: NDArray[np.int64] | int, size: int, random: RandomBytes) -> NDArray[np.int64]:
    """Draw uniform whole numbers from 0 to below a limit: words of 63 bits, drawn again where they are not even."""
    bounds = np.broadcast_to(np.asarray(limit, np.int64), (size,))
    found = np.empty(size, np.int64)
    open_ = np.arange(size)
    while len(open_):
        words = (np.frombuffer(random(8 * len(open_)), "<u8") >> np.uint64(1)).astype(np.int64)
        bound = bounds[open_]
        # The last, incomplete run of residues is left out.
        fair = words < (2**63 - 1) // bound * bound
        found[open_[fair]] = words[fair] % bound[fair]
        open_ = open_[~fair]
    return found


def _at_most_one(over: NDArray[np.int64], under: int, random: RandomBytes) -> NDArray[np.bool_]:
    """Draw true with probability exp(-over / under), for over of 0 to under (algorithm 1)."""
    found = np.zeros(len(over), np.bool_)
    open_ = np.arange(len(over))
    step = 1
    while len(open_):
        # Bernoulli(over / (under step)): one draw for each of the two factors, none for a factor of 1.
        goes_on = over[open_] > 0 if under == 1 else _below(under, len(open_), random) < over[open_]
        if step > 1:
            goes_on &= _below(step, len(open_), random) == 0
        found[open_[~goes_on]] = step % 2 == 1
        open_ = open_[goes_on]
        step += 1
    return found


def _exponential(over: NDArray[np.int64], under: int, random: RandomBytes) -> NDArray[np.bool_]:
    """Draw true with probability exp(-over / under), for over of 0 or more (algorithm 1)."""
    whole, rest = np.divmod(over, under)
    found = _at_most_one(rest, under, random)
    # exp(-whole) is as many draws of exp(-1), all of which have to be true.
    open_ = np.flatnonzero(found & (whole > 0))
    while len(open_):
        held = _at_most_one(np.ones(len(open_), np.int64), 1, random)
        found[open_[~held]] = False
        open_ = open_[held]
        whole[open_] -= 1
        open_ = open_[whole[open_] > 0]
    return found


def _gaussian(variance: int, size: int, random: RandomBytes) -> NDArray[np.int64]:
    """Draw most of ``size`` samples of the discrete Gaussian.

    A block of neighbouring absolute values is chosen by the weight of its smallest value, a value in it uniformly,
    and it is kept by the quotient of the weights.  Beyond `_FURTHEST` standard deviations, of a probability below
    2^-140, there are no blocks.
    """
    width = _width(variance)
    block = _chosen(variance, size, random)
    # One bit decides the sign, and others the place in the block, whose width is a power of two.
    bits = (np.frombuffer(random(8 * size), "<u8") >> np.uint64(1)).astype(np.int64)
    value = block * width + (bits >> 1 & (width - 1))
    # The exponent of a weight is its square over twice the variance.
    over = value**2 - (block * width) ** 2
    kept = _smaller(over, 2 * variance, random) if width > 1 else np.ones(size, np.bool_)
    negative = bits & 1 == 1
    # Zero would otherwise be drawn with both signs.
    kept &= ~(negative & (value == 0))
    drawn: NDArray[np.int64] = np.where(negative, -value, value)[kept]
    return drawn


def _width(variance: int) -> int:
    """Return the number of values in a block: about a sixteenth of the standard deviation, a power of two."""
    return 1 << max(math.isqrt(variance).bit_length() - 5, 0)


def _chosen(variance: int, size: int, random: RandomBytes) -> NDArray[np.int64]:
    """Choose blocks by their weights: by as many bits of a uniform number as it takes."""
    high, guide = _guide(variance)
    words = np.frombuffer(random(8 * size), "<u8")
    found: NDArray[np.int64] = guide[words >> np.uint64(_WORD - _GUIDE)]
    # Few words share their first bits with a bound.
    near = np.flatnonzero(found < 0)
    looked_up = words[near]
    places = np.searchsorted(high, looked_up, side="right")
    # A word that equals the first bits of a bound is decided by further ones.
    for place in np.flatnonzero(high[np.maximum(places - 1, 0)] == looked_up).tolist():
        places[place] = _decided(variance, int(looked_up[place]), random)
    found[near] = places
    return found


@lru_cache(64)
def _guide(variance: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the first words of the bounds, and the block of a word by its first bits; -1 where those are a bound's."""
    high = np.array([bound >> _EXTRA for bound in _bounds(variance, _DIGITS)], np.uint64)
    first = (high >> np.uint64(_WORD - _GUIDE)).astype(np.int64)
    guide = np.searchsorted(first, np.arange(1 << _GUIDE), side="right").astype(np.int64)
    guide[first] = -1
    return high, guide


def _decided(variance: int, word: int, random: RandomBytes) -> int:
    digits, bits = _DIGITS, _WORD
    while True:
        extra = _bits_of(digits) - bits
        word, bits = (word << extra) | (int.from_bytes(random(extra // 8), "little")), bits + extra
        bounds = _bounds(variance, digits)
        # Bounds are right to a few units of their last bits.
        if all(abs(word - bound) > _ROUNDING for bound in bounds):
            return sum(word >= bound for bound in bounds)
        digits *= 2


@lru_cache(64)
def _bounds(variance: int, digits: int) -> tuple[int, ...]:
    """Return the sums of the blocks' weights up to each but the last, as parts of 2^(bits of so many digits)."""
    width = _width(variance)
    blocks = _FURTHEST * math.isqrt(variance) // width + 2
    with localcontext() as context:
        context.prec = digits + 20
        weights = [(-Decimal((n * width) ** 2) / (2 * variance)).exp() for n in range(blocks)]
        whole = sum(weights)
        sums = accumulate(weights[:-1])
        return tuple(int(one / whole * 2 ** _bits_of(digits)) for one in sums)


def _bits_of(digits: int) -> int:
    """Return the number of bits, in whole words, that so many digits carry."""
    return digits * 3 // _WORD * _WORD


def _smaller(over: NDArray[np.int64], under: int, random: RandomBytes) -> NDArray[np.bool_]:
    """Draw true with probability exp(-over / under), for quotients below 2.

    A decision by floating-point numbers stands unless it is so close that their error could have turned it; those few
    are made by decimal numbers of as many digits as it takes.
    """
    words = np.frombuffer(random(8 * len(over)), "<u8") >> np.uint64(_WORD - _FLOAT)
    uniform, wanted = words / 2.0**_FLOAT, np.exp(over / -under)
    found: NDArray[np.bool_] = uniform < wanted
    for place in np.flatnonzero(np.abs(uniform - wanted) < _UNSURE).tolist():
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


def _laplace(scale: int, size: int, random: RandomBytes) -> NDArray[np.int64]:
    """Draw about half of ``size`` samples or more of the discrete Laplace of a scale (algorithm 2)."""
    part = _below(scale, size, random)
    part = part[_exponential(part, scale, random)]
    turns = np.zeros(len(part), np.int64)
    open_ = np.arange(len(part))
    while len(open_):
        open_ = open_[_at_most_one(np.ones(len(open_), np.int64), 1, random)]
        turns[open_] += 1
    found = part + scale * turns
    negative = _below(2, len(found), random) == 1
    # Zero would otherwise be drawn with both signs.
    kept = ~(negative & (found == 0))
    drawn: NDArray[np.int64] = np.where(negative, -found, found)[kept]
    return drawn
