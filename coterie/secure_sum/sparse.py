"""Sparse encrypted contributions: a member leaves out ciphertexts that hold only zeros (FedMF's *PartText*).

The member encrypts and sends less, but shows the server and the key holders in which places it has values: for one
user, near which items.  For a ciphertext that was left out the server adds the plaintext of a contribution of zeros,
which everybody knows, so that every ciphertext of the sum still covers all members; only its pads are those of the
members that sent it.

A ciphertext over few members would show their values, and a server could claim that all others left theirs out.  So a
place has a floor: two members, and as many users as the plan says (``SumPlan.sparse_floor``).  The server drops
ciphertexts that fewer sent, and holders sign no list in which a place is below the floor.

The list says in bits who sent which ciphertexts: a row of whole bytes for each member in the order of the list, place
``j`` in bit ``j mod 8`` of byte ``j / 8``.
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
"""Fewest members that must have sent a ciphertext: one alone may stand for a whole host, and show its sum."""


def something(codes: NDArray[np.uint32], zeros: NDArray[np.uint32], packing: Packing) -> NDArray[np.bool_]:
    """Return which ciphertexts have codes other than a contribution of zeros has, bool (ciphertexts,)."""
    padded = np.zeros(packing.ciphertexts(codes.size) * packing.slots, np.bool_)
    padded[: codes.size] = codes != zeros
    found: NDArray[np.bool_] = np.logical_or.reduce(padded.reshape(-1, packing.slots), axis=1)
    return found


def nothing(layout: Layout, packing: Packing) -> list[mpz]:
    """Return the plaintexts of one user's contribution of zeros, without pads."""
    return packing.pack(layout.zeros(1))


def pack_places(sent: NDArray[np.bool_]) -> bytes:
    """Pack which ciphertexts were sent, bool (ciphertexts,) or (members, ciphertexts), into bits for a message."""
    return np.packbits(sent, axis=-1, bitorder="little").tobytes()


def unpack_places(packed: bytes, members: int, ciphertexts: int = 0) -> NDArray[np.bool_]:
    """Unpack which ciphertexts each member sent, from the bits that `pack_places` writes.

    Parameters
    ----------
    packed : bytes
    members : int
        Number of rows, at least 1.
    ciphertexts : int, optional
        Number of ciphertexts of the sum; 0 if unknown: then the columns of whole bytes are returned.

    Returns
    -------
    ndarray of bool, shape (members, ciphertexts)

    Raises
    ------
    ValueError
        When the bytes are no such rows, or a bit is set beyond the last ciphertext.
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
    """Return which ciphertexts of a sum were sent by enough members and users, bool (ciphertexts,)."""
    several, users = np.zeros((2, sent.shape[1]), np.int64)
    # Row by row: a product over thousands of members and ciphertexts would take much memory.
    for member, row in zip(members, sent, strict=True):
        several += row
        users += row * plan.members[member].users
    found: NDArray[np.bool_] = (several >= FEWEST_MEMBERS) & (users >= plan.sparse_floor)
    return found


def above_floor(plan: SumPlan, members: Sequence[int], sent: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which ciphertexts each member sent, without those that too few members or users sent."""
    found: NDArray[np.bool_] = sent & covered(plan, members, sent)
    return found
