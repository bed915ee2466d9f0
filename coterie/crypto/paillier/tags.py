"""Tags: numbers in plaintexts by which key holders verify whose vectors a ciphertext sums before they decrypt it.

Anybody who has a public Paillier key can also add a constant, double a ciphertext or mix several, and the server's
count of addends proves nothing.  So the key's record has the public half of a *set key*, whose secret half the holders
have with the secret key, and every contributor puts above the slots of each ciphertext a number that only the
contributor and the holders can compute::

    K_u     = HKDF-SHA256(X25519(u, set key), (set-tag, run, key id, id of u))
    stream  = AES-256-CTR under HKDF-SHA256(K_u, (tag-stream, plan hash)), from a block of zeros
    tag j   = bits 96 j to 96 j + 95 of it, big-endian

The plan's hash covers the run, the round, the summed quantity, the layout and the cohort.  A holder takes a ciphertext
for the sum over a set only if its highest field is the sum of the tags of that set.

Assumed: X25519 is gap Diffie-Hellman, HKDF a random oracle on the shared secret, AES-256 a pseudorandom permutation.
The contributor's bundle vouches for its X25519 key; a holder of the set key can make everybody's tags.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from coterie.crypto.explicit import encode
from coterie.crypto.paillier.packing import TAG_BITS

__all__ = ["contributor_key", "tag_sums", "tags"]

_KEY_BYTES = 32
_TAG_BYTES = TAG_BITS // 8


def contributor_key(agreed: bytes, run: str, key_id: bytes, participant: bytes) -> bytes:
    """Return a contributor's tag key, 32 bytes, a secret that it shares with the holders.

    Parameters
    ----------
    agreed : bytes
        X25519 of the contributor's agreement key and the set key, 32 bytes.
    run : str
    key_id : bytes
        Id of the Paillier key, 32 bytes.
    participant : bytes
        Id of the contributor, 32 bytes.
    """
    return _derive(agreed, encode("set-tag", run, key_id, participant))


def tags(key: bytes, plan_hash: bytes, count: int) -> list[int]:
    """Return a contributor's tags for the ciphertexts of one sum.

    Parameters
    ----------
    key : bytes
        Tag key, from `contributor_key`.
    plan_hash : bytes
        Hash of the sum's plan, 32 bytes.
    count : int
        Ciphertexts.

    Returns
    -------
    list of int
        Below 2^96 each.
    """
    return tag_sums([key], plan_hash, 0, count)


def tag_sums(
    keys: Iterable[bytes],
    plan_hash: bytes,
    first: int,
    count: int,
    sent: Iterable[NDArray[np.bool_]] | None = None,
) -> list[int]:
    """Return the sums of the tags of several contributors.

    Parameters
    ----------
    keys : iterable of bytes
        Each contributor's tag key, from `contributor_key`; fewer than 2^32.
    plan_hash : bytes
        Hash of the sum's plan, 32 bytes.
    first, count : int
        Position of the first ciphertext, and their number.
    sent : iterable of ndarray of bool, shape (count,), optional
        Which of the ciphertexts each contributor sent; all when absent.
    """
    end = first + count
    words = np.zeros((count, _TAG_BYTES // 4), np.uint64)
    info, zeros = encode("tag-stream", plan_hash), bytes(end * _TAG_BYTES)
    pairs = zip(keys, sent, strict=True) if sent is not None else ((key, None) for key in keys)
    for key, there in pairs:
        # Each plan has a key of its own, so the counter begins at zero.
        cipher = Cipher(algorithms.AES(_derive(key, info)), modes.CTR(bytes(16))).encryptor()
        own = np.frombuffer(cipher.update(zeros), ">u4").reshape(end, _TAG_BYTES // 4)[first:]
        words += own if there is None else own * there[:, None]
    return [(high << 64) + (middle << 32) + low for high, middle, low in words.tolist()]


def _derive(secret: bytes, info: bytes) -> bytes:
    return HKDF(SHA256(), _KEY_BYTES, None, info).derive(secret)
