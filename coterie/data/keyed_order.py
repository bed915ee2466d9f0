"""Seeded hashes of external keys, for orders that do not depend on the order of rows in a file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["key_hash", "pair_hash"]


def key_hash(keys: Sequence[str], seed: int) -> NDArray[np.uint64]:
    """Hash every key under a seed (BLAKE2b, 8 bytes).

    Parameters
    ----------
    keys : sequence of str
    seed : int
        Fits 64 bits, signed.

    Returns
    -------
    ndarray of uint64, shape (len(keys),)
    """
    seeded = hashlib.blake2b(digest_size=8, key=seed.to_bytes(8, "little", signed=True))
    digests = bytearray()
    for key in keys:
        state = seeded.copy()
        state.update(key.encode())
        digests += state.digest()
    return np.frombuffer(bytes(digests), dtype="<u8").astype(np.uint64)


def pair_hash(
    users: Sequence[str],
    items: Sequence[str],
    user: NDArray[np.int32],
    item: NDArray[np.int32],
    seed: int,
) -> NDArray[np.uint64]:
    """Hash (user, item) pairs, which breaks ties in splits.

    Keys are hashed once each and the pairs are mixed from the two hashes, so a million pairs cost array
    operations and not a million digests.

    Parameters
    ----------
    users, items : sequence of str
        External keys.
    user, item : ndarray of int32, shape (N,)
        Indices into the keys.
    seed : int

    Returns
    -------
    ndarray of uint64, shape (N,)
    """
    return _mix(key_hash(users, seed)[user] + _mix(key_hash(items, seed))[item])


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every input bit over all output bits (the finaliser of SplitMix64, Steele et al. 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
