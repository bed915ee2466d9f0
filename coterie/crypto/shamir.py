"""Shamir's secret sharing (Shamir 1979): any ``t`` shares reconstruct the secret, fewer reveal nothing of it.

A secret is a number below 2^256.  It is the value at 0 of a polynomial of degree ``t - 1`` over the integers modulo
the prime ``PRIME = 2^256 + 297``, otherwise drawn uniformly from the operating system; the share of holder ``x`` is
the value at ``x``.  Shares carry no authentication: whoever reconstructs checks the result against something public,
here a hash or a public key.

The coefficients are drawn in the Newton basis 1, x, x(x - 1), x(x - 1)(x - 2) and so on.  Like coefficients of powers
they represent each polynomial once, so the polynomial is uniform; its values at 0, 1, 2 and so on follow from its
finite differences by additions alone.

Python's integers are not constant in time.  A member computes shares of secrets that live for one round, so an
observer of its clock would need to see each of these computations, once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import accumulate

from coterie.errors import CryptoError

__all__ = ["PRIME", "SECRET_BYTES", "interpolate", "reconstruct", "split", "weights"]

PRIME = 2**256 + 297
"""The smallest prime above 2^256, so that every 32-byte string can be a secret."""

SECRET_BYTES = 32
"""Bytes of a secret, big-endian."""

_DRAW_BYTES = (
    33  # 2^264 / PRIME is nearly 256, so a draw is taken after masking to 257 bits about every second time
)
_DRAW_MASK = (1 << 257) - 1
_LAZY = 32  # steps of Horner's rule between reductions
_TABLE = (
    128  # the largest point up to which a table of differences takes less than Horner's rule at each point
)


def split(secrets: Sequence[bytes], threshold: int, holders: Sequence[int]) -> list[tuple[int, ...]]:
    """Split secrets into shares for holders.

    Parameters
    ----------
    secrets : sequence of bytes
        Each 32 bytes, big-endian.
    threshold : int
        Number of shares that reconstruct a secret, at least 1.
    holders : sequence of int
        The points x at which shares are taken: distinct, in [1, 2^32).

    Returns
    -------
    list of tuple of int
        For each holder its share of each secret, in [0, PRIME).

    Raises
    ------
    CryptoError
        When a secret has another length, a point is out of range or appears twice, or there are fewer holders than
        the threshold.
    """
    if any(len(secret) != SECRET_BYTES for secret in secrets):
        raise CryptoError(f"a secret to be shared takes {SECRET_BYTES} bytes")
    if not 1 <= threshold <= len(holders):
        raise CryptoError(f"threshold {threshold} for {len(holders)} holders, expected 1 to their number")
    _require_points(holders)
    drawn = [_coefficients(threshold - 1) for _ in secrets]
    rows = [[int.from_bytes(secret), *row] for secret, row in zip(secrets, drawn, strict=True)]
    most = max(holders)
    return _tabulate(rows, holders, most) if most <= _TABLE else _evaluate(rows, holders, most)


def weights(points: Sequence[int]) -> tuple[int, ...]:
    """Return the Lagrange weights with which values at these points add up to the value at 0.

    Raises
    ------
    CryptoError
        When a point is out of range or appears twice.
    """
    return _weights(tuple(points))


def reconstruct(shares: Mapping[int, int], among: tuple[int, ...] = ()) -> int:
    """Return the value at 0 of the polynomial through these shares, in [0, PRIME).

    Parameters
    ----------
    shares : mapping
        Point to share; exactly as many as the threshold.
    among : tuple of int, optional
        These points and one more, in the same order.  Where many secrets are reconstructed from nearly the same points,
        the weights follow from the cached weights of ``among``.
    """
    points = tuple(shares)
    found = weights(points) if len(among) != len(points) + 1 else _without(among, points)
    return sum(map(int.__mul__, found, shares.values())) % PRIME


def interpolate(shares: Mapping[int, int], x: int) -> int:
    """Return the value at ``x`` of the polynomial through these shares: what an honest holder's share would be."""
    if x in shares:
        return shares[x]
    # Shift x to 0; points below x become negative, which makes no difference modulo the prime.
    moved = _lagrange([point - x for point in shares])
    return sum(map(int.__mul__, moved, shares.values())) % PRIME


def _coefficients(count: int) -> list[int]:
    """Draw numbers uniformly from [0, PRIME) by rejection, 257 bits at a time."""
    found: list[int] = []
    while len(found) < count:
        block = os.urandom(_DRAW_BYTES * (2 * count + 16))
        starts = range(0, len(block), _DRAW_BYTES)
        drawn = [int.from_bytes(block[start : start + _DRAW_BYTES]) & _DRAW_MASK for start in starts]
        found += [number for number in drawn if number < PRIME]
    return found[:count]


def _pack(values: Iterable[int], room: int) -> int:
    packed = 0
    for place, value in enumerate(values):
        packed |= value << (place * room)
    return packed


def _tabulate(rows: Sequence[Sequence[int]], holders: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Return the values of polynomials at small points, from tables of their differences."""
    shares = []
    for row in rows:
        # The k-th difference at 0 is k! times the k-th coefficient.
        differences = [value * factor % PRIME for value, factor in zip(row, _factorials(), strict=False)]
        values = [differences.pop()] * (most + 1 - len(differences))
        for at_zero in reversed(differences):
            values = list(accumulate(values, initial=at_zero))
        shares.append([values[x] % PRIME for x in holders])
    return list(zip(*shares, strict=True))


@cache
def _factorials() -> tuple[int, ...]:
    return tuple(accumulate(range(1, _TABLE), lambda so_far, k: so_far * k % PRIME, initial=1))


def _evaluate(rows: Sequence[Sequence[int]], holders: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Return the values of polynomials at any points, by Horner's rule."""
    # All polynomials at once, packed into one integer with room for carries between reductions.
    room = 257 + (_LAZY + 1) * (most.bit_length() + 1)
    packed = [_pack(column, room) for column in zip(*rows, strict=True)]
    return [_evaluate_at(packed, x, len(rows), room) for x in holders]


def _evaluate_at(packed: Sequence[int], x: int, count: int, room: int) -> tuple[int, ...]:
    total = 0
    # Terms beyond the x-th have the factor x - x.
    degrees = range(min(len(packed) - 1, x), -1, -1)
    for start in range(0, len(degrees), _LAZY):
        for degree in degrees[start : start + _LAZY]:
            total = total * (x - degree) + packed[degree]
        reduced = _unpack(total, count, room)
        total = _pack(reduced, room)
    return reduced


def _unpack(packed: int, count: int, room: int) -> tuple[int, ...]:
    mask = (1 << room) - 1
    return tuple((packed >> (place * room) & mask) % PRIME for place in range(count))


# In a complete graph nearly all secrets have the same surviving holders.  In a circulant graph each secret has its own
# holders, which are not asked for again.
@lru_cache(maxsize=16)
def _weights(points: tuple[int, ...]) -> tuple[int, ...]:
    _require_points(points)
    return _lagrange(points)


def _without(among: tuple[int, ...], points: tuple[int, ...]) -> list[int]:
    """Return the weights of ``points`` from those of ``among``, which has one more, by dividing out its factor."""
    (left,) = set(among).difference(points)
    inverse = pow(left, -1, PRIME)
    return [
        weight * ((left - x) * inverse % PRIME)
        for x, weight in zip(among, _weights(among), strict=True)
        if x != left
    ]


def _lagrange(points: Sequence[int]) -> tuple[int, ...]:
    """Return prod_{j != i} x_j / (x_j - x_i) modulo PRIME for each i, with one inversion in all."""
    whole = math.prod(points)
    below = []
    for i, x in enumerate(points):
        apart = [other - x for other in points]
        apart[i] = x
        below.append(math.prod(apart) % PRIME)
    # Montgomery: the inverse of the product gives all inverses.
    running, before = 1, []
    for value in below:
        before.append(running)
        running = running * value % PRIME
    inverse = pow(running, -1, PRIME)
    found = [0] * len(below)
    for i in reversed(range(len(below))):
        found[i] = whole * (inverse * before[i] % PRIME) % PRIME
        inverse = inverse * below[i] % PRIME
    return tuple(found)


def _require_points(points: Sequence[int]) -> None:
    if len(set(points)) != len(points) or not all(0 < point < 1 << 32 for point in points):
        raise CryptoError("points of shares are distinct numbers from 1 to 2^32 - 1")
