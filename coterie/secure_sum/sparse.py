"""Sparse contributions under a key: a member leaves out ciphertexts in which it has nothing (FedMF's *PartText*).

It then encrypts and sends less, and shows the server, and those who hold the key, in which places it has something: for
one user, near which items.  In the place of what was left out the server puts what is in a contribution of zeros, which
everybody knows, so that every ciphertext of the sum is still one over all members; only the tags are those of the
members that sent theirs.

A ciphertext over few members would show what is theirs, and a server could say that all others left theirs out.  So a
place has a floor: two members, and as many users as the plan says (``SumPlan.sparse_floor``).  The server drops what
fewer sent, and holders sign no list in which a place is below it.

Who sent what travels as bits, a row of whole bytes for each member in the order of the list, place ``j`` in bit
``j mod 8`` of byte ``j / 8``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gmpy2 import mpz
from numpy.typing import NDArray

from coterie.crypto.paillier import Packing
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.plan import SumPlan

__all__ = [
    "FEWEST_MEMBERS",
    "above_floor",
    "covered",
    "nothing",
    "pack_places",
    "something",
    "unpack_places",
]

FEWEST_MEMBERS = 2
"""Members that must have sent a ciphertext: one alone may stand for all users of a host, and the sum is its own."""


def something(codes: NDArray[np.uint32], zeros: NDArray[np.uint32], packing: Packing) -> NDArray[np.bool_]:
    """Return in which ciphertexts codes differ from those of a contribution of zeros, bool (ciphertexts,)."""
    padded = np.zeros(packing.ciphertexts(codes.size) * packing.slots, np.bool_)
    padded[: codes.size] = codes != zeros
    found: NDArray[np.bool_] = np.logical_or.reduce(padded.reshape(-1, packing.slots), axis=1)
    return found


def nothing(layout: Layout, packing: Packing) -> list[mpz]:
    """Return what is in the ciphertexts of one user's contribution of zeros, without tags."""
    return packing.pack(layout.zeros(1), [0] * packing.ciphertexts(layout.size))


def pack_places(sent: NDArray[np.bool_]) -> bytes:
    """Return who sent what, bool (ciphertexts,) or (members, ciphertexts), as it travels."""
    return np.packbits(sent, axis=-1, bitorder="little").tobytes()


def unpack_places(packed: bytes, members: int, ciphertexts: int = 0) -> NDArray[np.bool_]:
    """Return who sent what.

    Parameters
    ----------
    packed : bytes
    members : int
        Rows; at least 1.
    ciphertexts : int, optional
        Of the sum; who does not know reads whole bytes.

    Returns
    -------
    ndarray of bool, shape (members, ciphertexts)

    Raises
    ------
    ValueError
        The bytes are no such rows, or name a ciphertext that there is not.
    """
    width, left = divmod(len(packed), members)
    if left or (ciphertexts and width != -(-ciphertexts // 8)):
        raise ValueError(f"{len(packed)} bytes do not say what {members} members sent")
    rows = np.frombuffer(packed, np.uint8).reshape(members, width)
    found = np.unpackbits(rows, axis=1, bitorder="little").astype(np.bool_)
    if ciphertexts and found[:, ciphertexts:].any():
        raise ValueError(
            f"a member is said to have sent more than the {ciphertexts} ciphertexts that there are"
        )
    return found[:, :ciphertexts] if ciphertexts else found


def covered(plan: SumPlan, members: Sequence[int], sent: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which ciphertexts of a sum enough members and users have sent, bool (ciphertexts,)."""
    several, users = np.zeros((2, sent.shape[1]), np.int64)
    # Row by row: thousands of members and ciphertexts take no memory but their bits.
    for member, row in zip(members, sent, strict=True):
        several += row
        users += row * plan.members[member].users
    found: NDArray[np.bool_] = (several >= FEWEST_MEMBERS) & (users >= plan.sparse_floor)
    return found


def above_floor(plan: SumPlan, members: Sequence[int], sent: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return who sent what, without ciphertexts that too few members or users sent."""
    found: NDArray[np.bool_] = sent & covered(plan, members, sent)
    return found
