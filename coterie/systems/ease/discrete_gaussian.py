r"""Exact sampling of the discrete Gaussian (Canonne, Kamath and Steinke, 2020), many numbers at once.

The discrete Gaussian of variance parameter :math:`\sigma^2` has the probabilities
:math:`P[x] \propto e^{-x^2 / (2 \sigma^2)}` for whole numbers x.  Samples of floating-point noise tell, by their lowest
bits, what they were added to (Mironov, 2012).  Here every decision compares whole numbers with uniform whole numbers,
so the probabilities are exact: algorithms 1, 2 and 3 of the paper, for :math:`\sigma^2` that are whole numbers.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["LARGEST_VARIANCE", "RandomBytes", "discrete_gaussian"]

RandomBytes = Callable[[int], bytes]
"""Returns as many uniform random bytes as asked."""

LARGEST_VARIANCE = 10**8
"""Largest variance for which all numbers of a decision fit 63 bits."""

_AT_ONCE = 1 << 18


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
    scale = math.isqrt(variance) + 1
    found = np.empty(size, np.int64)
    done = 0
    while done < size:
        drawn = _laplace(scale, min(2 * (size - done) + 16, _AT_ONCE), random)
        # Algorithm 3: accept with probability exp(-(|y| - variance / scale)^2 / (2 variance)).
        distance = np.abs(drawn) * scale - variance
        # Beyond 2^31 the probability is below exp(-100) for every variance, and its square would not fit.
        near = np.abs(distance) < 2**31
        accepted = np.zeros(len(drawn), np.bool_)
        accepted[near] = _exponential(distance[near] ** 2, 2 * variance * scale**2, random)
        kept = drawn[accepted][: size - done]
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
