"""Masks that cancel in a sum (Bonawitz et al. 2017): key derivation, expansion, and sealed shares for dropouts.

Every derivation is HKDF-SHA256 (RFC 5869) without salt, 32 bytes long, whose ``info`` is explicit bytes
(``coterie.crypto.explicit``)::

    share key   HKDF(X25519(channel keys of u and v), (share, plan hash, id of u, id of v))   u seals for v
    chain 1     HKDF(X25519(channel keys of u and v), (chain, plan hash, lower id, higher id))
    chain i+1   HKDF(chain i,                         (chain-step))
    share key   HKDF(chain i,                         (chained-share, plan hash, id of u, id of v))
    pair mask   HKDF(X25519(mask keys of u and v),    (pair-mask, plan hash, lower id, higher id))
    own mask    HKDF(b_u,                             (own-mask, plan hash, id of u))
    seed hash   SHA-256((seed, plan hash, b_u))

**Expansion.**  A key gives the keystream of AES-256 in counter mode whose first block is 12 zero bytes and the number 2
in 4 bytes, big-endian: what AES-256-GCM encrypts zeros to under the zero nonce.  The keystream is read as little-endian
uint32 words, one for each value of the vector.  A key expands once, so the nonce never repeats under it.

**Signs.**  The participant of a pair with the lower id adds the mask, and the other subtracts it.

**Sealed shares.**  65 bytes: one byte whose second bit is the top bit of the seed's share and whose first bit is the
top bit of the mask secret's share, then the lower 256 bits of each share, big-endian, in the same order.  Sealed with
AES-256-GCM under the share key, the zero nonce and no associated data; a share key seals one message.

**Chains.**  Members that meet in many rounds may agree once and derive the share keys of later rounds from a chain: a
hash ratchet (`coterie.secure_sum.chains`).  Chain i is given up once its share keys and chain i+1 are derived.

**Implementations.**  The reference adds the keystream of the cryptography package with NumPy.  Where the package
coterie-native is installed, a compiled kernel does both at once, if it agrees with the reference and is faster here.

Assumed: X25519 is gap Diffie-Hellman, HKDF a random oracle on the shared secret, AES-256 a pseudorandom
permutation (at most 2^31 blocks under a key here).
"""

from __future__ import annotations

import enum
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import chain, islice, repeat
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import (
    AEADEncryptionContext,
    Cipher,
    CipherContext,
    algorithms,
    modes,
)
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from numpy.typing import NDArray

from coterie.crypto.explicit import encode
from coterie.crypto.shamir import PRIME, SECRET_BYTES
from coterie.crypto.verification import Reason, VerificationError
from coterie.kernels import agreed, faster, leave_out, package

__all__ = [
    "SEALED_SHARE_BYTES",
    "SHARE_BYTES",
    "Keystream",
    "RoundKey",
    "add_masks",
    "chain_key",
    "chained_keys",
    "compare_kernel",
    "open_share",
    "own_mask_key",
    "pair_mask_key",
    "public_of",
    "require_usable",
    "seal_share",
    "seed_hash",
    "share_from_bytes",
    "share_key",
    "share_keys",
    "share_to_bytes",
]

SHARE_BYTES = 33
"""Bytes of a revealed share, big-endian."""

_PAIR_BYTES = 1 + 2 * SECRET_BYTES
SEALED_SHARE_BYTES = _PAIR_BYTES + 16
"""Bytes of a sealed pair of shares, with the tag."""

_PUBLIC_BYTES = 32
_KERNEL = "the compiled kernel of masks"
_ZERO_NONCE = bytes(12)
_FIRST_BLOCK = _ZERO_NONCE + (2).to_bytes(4)
_GCM, _CTR = modes.GCM(_ZERO_NONCE), modes.CTR(_FIRST_BLOCK)
_CHUNK = (
    1 << 14
)  # words: they and their keystream stay in the processor's second cache, and need no fresh pages
_ZEROS = bytes(4 * _CHUNK)
_TRIALS = 9
_AT_ONCE = 256  # masks of one pass over the vector, each with an open context of the cipher

_SHA256 = SHA256()
_NO_SALT = HMAC(bytes(_SHA256.digest_size), _SHA256)

_FIELD = 2**255 - 19
# The points of order 1, 2, 4 and 8 on Curve25519 and on its twist, by their u-coordinates: every scalar takes these to
# zero, and no others, because scalars are multiples of the cofactor.
_LOW_ORDER = frozenset(
    (
        0,
        1,
        _FIELD - 1,
        325606250916557431795983626356110631294008115727848805560023387167927233504,
        39382357235489614581723060781553021112529911719440698176882885853963445705823,
    )
)


class RoundKey:
    """An X25519 key pair of one member for one round.

    Its secret half is kept in memory so that it can be shared, and overwritten by ``wipe``; copies that the
    cryptographic library holds are freed with the object.

    Parameters
    ----------
    secret : bytes, optional
        The secret half, 32 bytes, where it was reconstructed; drawn from the operating system when left out.
    """

    __slots__ = ("_private", "_secret", "public")

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = bytearray(os.urandom(SECRET_BYTES) if secret is None else secret)
        self._private: X25519PrivateKey | None = X25519PrivateKey.from_private_bytes(self._secret)
        self.public = self._private.public_key().public_bytes_raw()

    @property
    def secret(self) -> bytes:
        """Secret half, 32 bytes, to split into shares."""
        return bytes(self._secret)

    def agree(self, public: bytes) -> bytes:
        """Return the X25519 shared secret, 32 bytes; derive keys from it, never use it as a key.

        Raises
        ------
        VerificationError
            MALFORMED when the public key has another size or low order, or the secret was wiped.
        """
        if self._private is None:
            raise VerificationError(Reason.MALFORMED, "a key of a round is used after it was wiped")
        return _agree(self._private, public)

    def wipe(self) -> None:
        """Overwrite the secret."""
        self._secret[:] = bytes(SECRET_BYTES)
        self._private = None

    def __repr__(self) -> str:
        return f"<RoundKey {self.public.hex()[:16]}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RoundKey holds a secret and is never pickled")


def public_of(secret: bytes) -> bytes:
    """Return the X25519 public key of a secret, 32 bytes."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def require_usable(public: bytes) -> None:
    """Raise unless an X25519 public key is usable for key agreement.

    Raises
    ------
    VerificationError
        MALFORMED when it has another size or low order.
    """
    # As RFC 7748 decodes it: little-endian without the top bit, modulo the field.
    if len(public) != _PUBLIC_BYTES or int.from_bytes(public, "little") % 2**255 % _FIELD in _LOW_ORDER:
        raise _unusable()


def _unusable() -> VerificationError:
    return VerificationError(Reason.MALFORMED, "an X25519 public key is not 32 bytes or has low order")


def _agree(private: X25519PrivateKey, public: bytes) -> bytes:
    try:
        return private.exchange(_public_key(public))
    except ValueError:
        raise _unusable() from None


# Each member of a host, and each lost member at the server, agrees with the same keys of others.
@lru_cache(maxsize=1 << 12)
def _public_key(public: bytes) -> X25519PublicKey:
    return X25519PublicKey.from_public_bytes(public)


def _extract(secret: bytes) -> bytes:
    """Return HKDF's pseudorandom key, the HMAC of the secret under the all-zero salt."""
    # Copying a context takes half the time of making one, and a round derives thousands of keys.
    context = _NO_SALT.copy()
    context.update(secret)
    return context.finalize()


def _expand(extracted: bytes, info: bytes) -> bytes:
    return HKDFExpand(_SHA256, 32, info).derive(extracted)


def _derive(secret: bytes, info: bytes) -> bytes:
    return _expand(_extract(secret), info)


def share_key(agreed: bytes, plan_hash: bytes, sender: bytes, receiver: bytes) -> bytes:
    """Return the key under which ``sender`` seals shares for ``receiver`` (participant ids), 32 bytes."""
    return _derive(agreed, encode("share", plan_hash, sender, receiver))


def share_keys(agreed: bytes, plan_hash: bytes, one: bytes, other: bytes) -> tuple[bytes, bytes]:
    """Return the share keys of two participants: from ``one`` to ``other``, and from ``other`` to ``one``."""
    extracted = _extract(agreed)
    return (
        _expand(extracted, encode("share", plan_hash, one, other)),
        _expand(extracted, encode("share", plan_hash, other, one)),
    )


def chain_key(agreed: bytes, plan_hash: bytes, one: bytes, other: bytes) -> bytes:
    """Return the first key of the chain of two participants, 32 bytes; the order of the two does not matter.

    Parameters
    ----------
    agreed : bytes
        What their channel keys agree on, 32 bytes.
    plan_hash : bytes
        Hash of the plan of the sum in which they agreed.
    one, other : bytes
        Their ids.
    """
    return _derive(agreed, encode("chain", plan_hash, min(one, other), max(one, other)))


def chained_keys(key: bytes, plan_hash: bytes, one: bytes, other: bytes) -> tuple[bytes, bytes, bytes]:
    """Return what follows from a chain's key: share keys from ``one`` to ``other`` and back, and the chain's next key.

    The key itself does not follow from them; give it up.
    """
    extracted = _extract(key)
    return (
        _expand(extracted, encode("chained-share", plan_hash, one, other)),
        _expand(extracted, encode("chained-share", plan_hash, other, one)),
        _expand(extracted, encode("chain-step")),
    )


def pair_mask_key(agreed: bytes, plan_hash: bytes, one: bytes, other: bytes) -> bytes:
    """Return the key of two participants' pair mask, 32 bytes; the order of the two does not matter."""
    return _derive(agreed, encode("pair-mask", plan_hash, min(one, other), max(one, other)))


def own_mask_key(seed: bytes, plan_hash: bytes, participant: bytes) -> bytes:
    """Return the key of a participant's own mask, 32 bytes, from its seed ``b``."""
    return _derive(seed, encode("own-mask", plan_hash, participant))


def seed_hash(plan_hash: bytes, seed: bytes) -> bytes:
    """Return the hash that commits to a seed, 32 bytes."""
    return hashlib.sha256(encode("seed", plan_hash, seed)).digest()


def share_to_bytes(share: int) -> bytes:
    """Return a share as 33 bytes, big-endian."""
    return share.to_bytes(SHARE_BYTES)


def share_from_bytes(share: bytes) -> int:
    """Parse a share of 33 bytes, big-endian.

    Raises
    ------
    VerificationError
        MALFORMED when it has another length or is not below the prime.
    """
    value = int.from_bytes(share)
    if len(share) != SHARE_BYTES or value >= PRIME:
        raise VerificationError(Reason.MALFORMED, f"a share is {SHARE_BYTES} bytes and below the prime")
    return value


def seal_share(key: bytes, seed_share: int, mask_share: int) -> bytes:
    """Seal one holder's two shares under a share key, which is used only once."""
    top = (seed_share >> 256) << 1 | mask_share >> 256
    low = (1 << 256) - 1
    plain = bytes([top]) + (seed_share & low).to_bytes(32) + (mask_share & low).to_bytes(32)
    return AESGCM(key).encrypt(_ZERO_NONCE, plain, None)


def open_share(key: bytes, sealed: bytes) -> tuple[int, int]:
    """Open a sealed pair: return the share of the seed and the share of the mask secret.

    Raises
    ------
    VerificationError
        NOT_AUTHENTIC when the pair does not open, MALFORMED when its content is not two shares.
    """
    try:
        plain = AESGCM(key).decrypt(_ZERO_NONCE, sealed, None)
    except (InvalidTag, ValueError):
        raise VerificationError(Reason.NOT_AUTHENTIC, "a sealed share does not open") from None
    if len(plain) != _PAIR_BYTES or plain[0] > 3:
        raise VerificationError(Reason.MALFORMED, "a sealed share does not hold two shares")
    seed_share = (plain[0] >> 1) << 256 | int.from_bytes(plain[1:33])
    mask_share = (plain[0] & 1) << 256 | int.from_bytes(plain[33:])
    if seed_share >= PRIME or mask_share >= PRIME:
        raise VerificationError(Reason.MALFORMED, "a sealed share is not below the prime")
    return seed_share, mask_share


class Keystream(enum.Enum):
    """Two implementations of the same keystream; the processor and its library decide which is faster."""

    GCM = "gcm"
    CTR = "ctr"

    def open(self, key: bytes) -> CipherContext | AEADEncryptionContext:
        """Return a cipher context that turns zeros into the keystream."""
        cipher = algorithms.AES256(key)
        return Cipher(cipher, _GCM if self is Keystream.GCM else _CTR).encryptor()

    @staticmethod
    @cache
    def fastest() -> Keystream:
        """Return the faster implementation on this machine, measured once in a few milliseconds."""
        spent = dict.fromkeys(Keystream, math.inf)
        out = bytearray(len(_ZEROS))
        # In turn, and by this thread's CPU time, so that other work on the machine does not decide.
        for _ in range(_TRIALS):
            for way in Keystream:
                stream = way.open(bytes(32))
                began = time.thread_time()
                stream.update_into(_ZEROS, out)
                spent[way] = min(spent[way], time.thread_time() - began)
        return min(spent, key=spent.__getitem__)


def add_masks(
    vector: NDArray[np.uint32],
    plus: Iterable[bytes] = (),
    minus: Iterable[bytes] = (),
    way: Keystream | None = None,
    mirrors: Mapping[bytes, NDArray[np.uint32]] = MappingProxyType({}),
) -> None:
    """Add the masks of ``plus`` to a vector and subtract the masks of ``minus``, modulo 2^32 and in place.

    Parameters
    ----------
    vector : ndarray of uint32, shape (n,)
        Contiguous; n below 2^34.
    plus, minus : iterable of bytes
        Mask keys, 32 bytes each, in any order.
    way : Keystream, optional
        Implementation of the reference; when left out, the compiled kernel or else the faster one.  The result is the
        same.
    mirrors : mapping of bytes to ndarray of uint32, shape (n,), optional
        For some of the keys a second vector that gets the mask with the opposite sign: the vector of the pair's other
        member, where both are of one host.
    """
    masks = chain(zip(plus, repeat(False)), zip(minus, repeat(True)))
    add = _faster() if way is None else partial(_add_by_reference, way)
    while group := list(islice(masks, _AT_ONCE)):
        add(
            vector,
            [key for key, _ in group],
            [sign for _, sign in group],
            [mirrors.get(key) for key, _ in group],
        )


_AddMasks = Callable[
    [NDArray[np.uint32], Sequence[bytes], Sequence[bool], Sequence[NDArray[np.uint32] | None]], None
]
"""Adds masks to a vector: their keys, whether each is subtracted, and the mirror of each."""


def _add_by_reference(
    way: Keystream,
    vector: NDArray[np.uint32],
    keys: Sequence[bytes],
    minus: Sequence[bool],
    mirrors: Sequence[NDArray[np.uint32] | None],
) -> None:
    buffer = bytearray(min(len(_ZEROS), 4 * len(vector)))
    words = np.frombuffer(buffer, "<u4")
    signs = ((np.subtract, np.add) if negative else (np.add, np.subtract) for negative in minus)
    streams = [
        (way.open(key), *operations, mirror)
        for key, operations, mirror in zip(keys, signs, mirrors, strict=True)
    ]
    # Chunk by chunk through all masks, so that a chunk of the vector is fetched and stored once.
    for start in range(0, len(vector), _CHUNK):
        part = vector[start : start + _CHUNK]
        mask = words[: len(part)]
        zeros = _ZEROS if len(part) == _CHUNK else _ZEROS[: 4 * len(part)]
        for stream, operation, opposite, mirror in streams:
            stream.update_into(zeros, buffer)
            operation(part, mask, out=part)
            if mirror is not None:
                other = mirror[start : start + _CHUNK]
                opposite(other, mask, out=other)
    words.fill(0)


@cache
def _faster() -> _AddMasks:
    """Return the compiled kernel if it agrees with the reference and is faster here, else the reference."""
    reference: _AddMasks = partial(_add_by_reference, Keystream.fastest())
    if (found := package()) is not None and not found.mask_ways():
        leave_out(_KERNEL, "has no way of computing them on this processor")
        return reference
    native = agreed(_KERNEL, _agrees)
    if native is None:
        return reference
    compiled: _AddMasks = partial(native.add_masks, way=native.mask_ways()[0])
    vector = np.zeros(_CHUNK, np.uint32)
    one = ([bytes(32)], [False], [None])
    if not faster(lambda: compiled(vector, *one), lambda: reference(vector, *one)):
        leave_out(_KERNEL, "is slower than the reference here")
        return reference
    return compiled


def compare_kernel() -> None:
    """Compare the compiled kernel with the reference, as before its first use; see `coterie.kernels.left_out`."""
    _faster()


def _agrees(native: Any) -> bool:
    """Return whether each way of the compiled kernel has the sums of the reference, ends of vectors included."""
    keys = [hashlib.sha256(bytes([number])).digest() for number in range(5)]
    minus = [False, True, False, True, True]
    for size in (1, 4, 131, _CHUNK + 67):
        start = np.frombuffer(hashlib.shake_128(b"kernel").digest(4 * size), np.uint32)
        expected, mirror = start.copy(), start.copy()
        _add_by_reference(Keystream.CTR, expected, keys, minus, [None, mirror, None, None, mirror])
        for way in native.mask_ways():
            found, other = start.copy(), start.copy()
            native.add_masks(found, keys, minus, [None, other, None, None, other], way)
            if not (np.array_equal(found, expected) and np.array_equal(other, mirror)):
                return False
    return True
