"""Shamir's secret sharing (Shamir 1979): any ``t`` shares give the secret, fewer say nothing about it.

A secret is a number below 2^256.  It is the value at 0 of a polynomial of degree ``t - 1`` over the integers modulo
the prime ``PRIME = 2^256 + 297``, whose other coefficients are drawn from the operating system; the share of holder
``x`` is the value at ``x``.  Shares carry no authentication: whoever reconstructs checks the result against something
public, here a hash or a public key.

Python's integers are not constant in time.  A member computes shares of secrets that live for one round, so an
observer of its clock would need to see each of these computations, once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice

from coterie.errors import CryptoError

__all__ = ["PRIME", "SECRET_BYTES", "interpolate", "reconstruct", "split", "weights"]

PRIME = 2**256 + 297
"""The smallest prime above 2^256: every 32-byte string is a secret."""

SECRET_BYTES = 32
"""Bytes of a secret, big-endian."""

_DRAW_BYTES = (
    33  # 2^264 / PRIME is nearly 256, so a draw is taken after masking to 257 bits about every second time
)
_DRAW_MASK = (1 << 257) - 1
_LAZY = 32  # steps of Horner's rule between reductions


def split(secrets: Sequence[bytes], threshold: int, holders: Sequence[int]) -> list[tuple[int, ...]]:
    """Share secrets among holders.

    Parameters
    ----------
    secrets : sequence of bytes
        Each 32 bytes, big-endian.
    threshold : int
        How many shares reconstruct, at least 1.
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
    # All polynomials are evaluated at once, packed into one integer with room for what is not reduced yet.
    room = 257 + (_LAZY + 1) * (max(holders).bit_length() + 1)
    drawn = [_coefficients(threshold - 1) for _ in secrets]
    packed = [_pack([int.from_bytes(secret) for secret in secrets], room)]
    packed += [_pack(column, room) for column in zip(*drawn, strict=True)]
    packed.reverse()
    return [_evaluate(packed, x, len(secrets), room) for x in holders]


def weights(points: Sequence[int]) -> tuple[int, ...]:
    """Return the weights with which values at these points add up to the value at 0 (Lagrange).

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
        These points and one more, in the same order: where many secrets are reconstructed from nearly the same holders,
        the weights follow from those of all of them, which are remembered.
    """
    points = tuple(shares)
    found = weights(points) if len(among) != len(points) + 1 else _without(among, points)
    return sum(map(int.__mul__, found, shares.values())) % PRIME


def interpolate(shares: Mapping[int, int], x: int) -> int:
    """Return the value at ``x`` of the polynomial through these shares: what an honest holder's share would be."""
    if x in shares:
        return shares[x]
    # The value at 0 after moving x there; points below x become negative, which is nothing special modulo the prime.
    moved = _lagrange([point - x for point in shares])
    return sum(map(int.__mul__, moved, shares.values())) % PRIME


def _coefficients(count: int) -> list[int]:
    """Return numbers drawn uniformly from [0, PRIME): 257 bits each, again when they are too large."""
    return list(islice((drawn for drawn in _draws(count) if drawn < PRIME), count))


def _draws(count: int) -> Iterator[int]:
    while True:
        block = os.urandom(_DRAW_BYTES * (2 * count + 16))
        for start in range(0, len(block), _DRAW_BYTES):
            yield int.from_bytes(block[start : start + _DRAW_BYTES]) & _DRAW_MASK


def _pack(values: Iterable[int], room: int) -> int:
    packed = 0
    for place, value in enumerate(values):
        packed |= value << (place * room)
    return packed


def _evaluate(packed: Sequence[int], x: int, count: int, room: int) -> tuple[int, ...]:
    total = 0
    for start in range(0, len(packed), _LAZY):
        for coefficients in packed[start : start + _LAZY]:
            total = total * x + coefficients
        reduced = _unpack(total, count, room)
        total = _pack(reduced, room)
    return reduced


def _unpack(packed: int, count: int, room: int) -> tuple[int, ...]:
    mask = (1 << room) - 1
    return tuple((packed >> (place * room) & mask) % PRIME for place in range(count))


# A cohort whose graph is complete has nearly one set of survivors; a circulant one has as many as members.
@lru_cache(maxsize=256)
def _weights(points: tuple[int, ...]) -> tuple[int, ...]:
    _require_points(points)
    return _lagrange(points)


def _without(among: tuple[int, ...], points: tuple[int, ...]) -> list[int]:
    """Return the weights of points from those of one more: each loses its factor of that one."""
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
