"""Pads: numbers as long as the modulus in plaintexts, without which key holders decrypt nothing but one sum.

Anybody who has a public Paillier key can also add a constant, multiply a ciphertext by a number or mix several, and the
server's count of addends proves nothing.  So the key's record has the public half of a *set key*, whose secret half the
holders have with the secret key, and every contributor adds to each plaintext, modulo n, a number that only the
contributor and the holders can compute::

    K_u     = HKDF-SHA256(X25519(u, set key), (set-pad, run, key id, id of u))
    stream  = AES-256-CTR under HKDF-SHA256(K_u, (pad-stream, plan hash)), from a block of zeros
    pad j   = bytes t j to t j + t - 1 of it, big-endian, modulo n           t = 4 ceil(bits / 32) + 16

The plan's hash covers the run, the round, the summed quantity, the layout and the cohort.  A holder subtracts from what
it decrypted the pads of those on the list, and goes on only if what is left fills no more than the slots: the highest
96 bits and the guard above them are zero.

Why this is enough: from ciphertexts of ``m_u + P_u`` and the public key those of ``c + sum a_u (m_u + P_u)`` are
made, with known ``c`` and ``a_u``, and nothing else (assumed: Paillier encryption is *linear-only*).  Let ``s_u`` be
1 for those on the list and 0 for others: a holder is left with ``c + sum s_u m_u + sum (a_u - s_u) (m_u + P_u)``.
Unless every ``a_u`` is ``s_u``, some difference is not 0 modulo n, and invertible, as it would factor n otherwise.
That pad is uniform whatever is known of codes and of other pads, and so is what is left: it passes with a chance of
``2^(w s) / n``, below 2^-99.  The server learns the sum of the pads with the sum, as the proof of a decryption needs
it; then it knows what multiples of that sum decrypt to, and every other combination is as uniform as before.

Assumed besides: X25519 is gap Diffie-Hellman, HKDF a random oracle on the shared secret, AES-256 a pseudorandom
permutation; pads are uniform but for 2^-128.  The contributor's bundle vouches for its X25519 key; a holder of the set
key can make everybody's pads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from gmpy2 import mpz
from numpy.typing import NDArray

from coterie.crypto.explicit import encode
from coterie.crypto.paillier.keys import PublicKey

__all__ = ["HASH_BYTES", "contributor_key", "pad_sums", "pads", "sums_hash"]

HASH_BYTES = 32
"""Length of `sums_hash`."""

_KEY_BYTES = 32
_WORD_BYTES = 4
_EXCESS_BYTES = 16  # what is drawn beyond the length of n, so that it is uniform modulo n but for 2^-128


def contributor_key(agreed: bytes, run: str, key_id: bytes, participant: bytes) -> bytes:
    """Return a contributor's pad key, 32 bytes, a secret that it shares with the holders.

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
    return _derive(agreed, encode("set-pad", run, key_id, participant))


def pads(key: bytes, plan_hash: bytes, public: PublicKey, count: int) -> list[mpz]:
    """Return a contributor's pads for the ciphertexts of one sum.

    Parameters
    ----------
    key : bytes
        Pad key, from `contributor_key`.
    plan_hash : bytes
        Hash of the sum's plan, 32 bytes.
    public : PublicKey
        The Paillier key.
    count : int
        Ciphertexts.

    Returns
    -------
    list of mpz
        Below n each.
    """
    return pad_sums([key], plan_hash, public, count)


def pad_sums(
    keys: Iterable[bytes],
    plan_hash: bytes,
    public: PublicKey,
    count: int,
    sent: Iterable[NDArray[np.bool_]] | None = None,
) -> list[mpz]:
    """Return the sums modulo n of the pads of several contributors, for the first ciphertexts of a sum.

    Parameters
    ----------
    keys : iterable of bytes
        Each contributor's pad key, from `contributor_key`; fewer than 2^32.
    plan_hash : bytes
        Hash of the sum's plan, 32 bytes.
    public : PublicKey
        The Paillier key.
    count : int
        Ciphertexts.
    sent : iterable of ndarray of bool, shape (count,), optional
        Which of the ciphertexts each contributor sent; all when absent.
    """
    size = -(-public.bits // (8 * _WORD_BYTES)) * _WORD_BYTES + _EXCESS_BYTES
    words = np.zeros((count, size // _WORD_BYTES), np.uint64)
    info, zeros = encode("pad-stream", plan_hash), bytes(count * size)
    pairs = zip(keys, sent, strict=True) if sent is not None else ((key, None) for key in keys)
    for key, there in pairs:
        # Each plan has a key of its own, so the counter begins at zero.
        cipher = Cipher(algorithms.AES(_derive(key, info)), modes.CTR(bytes(16))).encryptor()
        own = np.frombuffer(cipher.update(zeros), ">u4").reshape(words.shape)
        words += own if there is None else own * there[:, None]
    low, high = ((words >> np.uint64(right)).astype(np.uint32).astype(">u4").tobytes() for right in (0, 32))
    return [
        (mpz.from_bytes(low[at : at + size], "big") + (mpz.from_bytes(high[at : at + size], "big") << 32))
        % public.n
        for at in range(0, count * size, size)
    ]


def sums_hash(plan_hash: bytes, first: int, sums: Sequence[mpz], size: int) -> bytes:
    """Return the hash of sums of pads, 32 bytes, in which key holders of one list agree.

    Parameters
    ----------
    plan_hash : bytes
        Hash of the sum's plan, 32 bytes.
    first : int
        Position of the first ciphertext.
    sums : sequence of mpz
    size : int
        Bytes of n.
    """
    content = hashlib.sha256()
    for one in sums:
        content.update(one.to_bytes(size, "big"))
    return hashlib.sha256(encode("pad-sums", plan_hash, first, content.digest())).digest()


def _derive(secret: bytes, info: bytes) -> bytes:
    return HKDF(SHA256(), _KEY_BYTES, None, info).derive(secret)
