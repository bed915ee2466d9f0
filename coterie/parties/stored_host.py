"""What a client host's state folder says of its users, in the form from which a system's side of the host is built.

The host builds its side from it in a run; whoever holds the folder of a finished run on this machine builds it again.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.crypto.keyfile import read_private_file, write_private_file
from coterie.data.attributes import AttributeTable
from coterie.data.keyed_order import key_hash
from coterie.evaluation.leave_one_out import RANKED
from coterie.store.packed_history import HistoryColumns
from coterie.systems.registry import preferences_of

__all__ = ["RANDOMNESS", "HistoryArrays", "history_arrays", "preference_table", "user_keys"]

RANDOMNESS = "randomness.key"  # pragma: allowlist secret - a file's name
"""File in a host's state folder from which all randomness of its users is derived, where no seed is set."""
_RANDOMNESS_BYTES = 32


class HistoryArrays(NamedTuple):
    """Interactions by user (from 0), item of the catalogue, part and rating (NaN without one); shape (N,) each."""

    user: NDArray[np.int32]
    item: NDArray[np.int32]
    part: NDArray[np.int8]
    rating: NDArray[np.float32]


def history_arrays(held: HistoryColumns) -> HistoryArrays:
    """Return the rows of a store's history that have an item of the catalogue.

    A repeated interaction appears once, at its first row, with the last rating that was given.  Rows of part
    ``RANKED``, which are no interactions, come last.

    Parameters
    ----------
    held : HistoryColumns
        In the order of the store, with places in the catalogue.
    """
    user, item, _, part, given = held
    rating = np.full(len(user), np.nan, np.float32)
    first = np.zeros(len(user), np.bool_)
    width = int(item.max(initial=0)) + 1
    # Some users after others, so that what is sorted at once stays small.
    for rows in held.blocks():
        told = rows[item[rows] >= 0]
        pairs = user[told].astype(np.int64) * width + item[told]
        own = np.flatnonzero(part[told] != RANKED)
        _, found = np.unique(pairs[own], return_index=True)
        first[told[own[found]]] = True
        if given is not None:
            _, same = np.unique(pairs * (RANKED + 1) + part[told], return_inverse=True)
            last = np.full(len(told), np.nan)
            rated = np.flatnonzero(~np.isnan(given[told]))
            # Of several rows of one item the last one counts.
            last[same[rated]] = given[told[rated]]
            rating[told] = last[same]
    chosen = np.concatenate([np.flatnonzero(first), np.flatnonzero((item >= 0) & (part == RANKED))])
    return HistoryArrays(
        user[chosen].astype(np.int32) - np.int32(1),
        item[chosen],
        part[chosen],
        rating[chosen],
    )


def preference_table(
    system: str, users: int, values: Mapping[int, Mapping[str, float]]
) -> AttributeTable | None:
    """Return what users have set for a system, a row for each; None where the system has no preferences.

    Parameters
    ----------
    system : str
    users : int
        Number of the host's users.
    values : mapping
        Values by name, by user, counted from 1.
    """
    names = tuple(one.name for one in preferences_of(system))
    if not names:
        return None
    table = np.full((users, len(names)), np.nan, np.float32)
    for user, own in values.items():
        table[user - 1] = [own.get(name, math.nan) for name in names]
    return AttributeTable(names, table)


def user_keys(state: Path, names: Sequence[str], seed: int | None) -> NDArray[np.uint64]:
    """Return each user's own seed, from which all its randomness in learning is derived.

    Parameters
    ----------
    state : Path
        Folder of the process: holds 32 bytes of the operating system's randomness, mode 0600, made when missing.
    names : sequence of str
        The users.
    seed : int, optional
        Seed of an experiment, used in place of that randomness: keys are the same on every machine.

    Returns
    -------
    ndarray of uint64, shape (len(names),)
    """
    if seed is not None:
        return key_hash(names, seed)
    path = state / RANDOMNESS
    if not path.exists():
        write_private_file(path, os.urandom(_RANDOMNESS_BYTES))
    keyed = hashlib.blake2b(digest_size=8, key=read_private_file(path), person=b"coterie.user.v1")
    digests = bytearray()
    for name in names:
        one = keyed.copy()
        one.update(name.encode())
        digests += one.digest()
    return np.frombuffer(bytes(digests), "<u8").astype(np.uint64)
