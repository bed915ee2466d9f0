"""Sealed versions of a model: only holders of a Paillier key read and make them, and the server keeps them.

A version is sealed with AES-256-GCM under a key that is derived from the secrets of the Paillier key
(``HeldKey.derived``), with the explicit bytes (sealed-model, run, key id, round) as associated data and a random nonce:
it opens for the holders of this key only, and only as the version of this round.

Holders that computed a version independently compare it by its HMAC under another such key.  A party without the key
learns from two HMACs only whether they are equal.

Assumed: AES-GCM with random nonces of 96 bits; a key takes some nonces per round, far fewer than 2^32.
"""

from __future__ import annotations

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC

from coterie.crypto.custody import HeldKey
from coterie.crypto.explicit import encode
from coterie.crypto.verification import Reason, VerificationError

__all__ = ["AGREEMENT_BYTES", "agreement", "open_model", "seal_model"]

AGREEMENT_BYTES = 32
_NONCE_BYTES = 12
_TAG_BYTES = 16


def seal_model(held: HeldKey, run: str, round_: int, content: bytes) -> bytes:
    """Seal the version of a model that a round made.

    Parameters
    ----------
    held : HeldKey
        Key under which the round was summed.
    run : str
    round_ : int
    content : bytes

    Returns
    -------
    bytes
        Nonce (12 bytes), ciphertext and tag: 28 bytes more than the content has.
    """
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + _aead(held).encrypt(nonce, content, _context(held, run, round_))


def open_model(held: HeldKey, run: str, round_: int, sealed: bytes) -> bytes:
    """Open the version of a model that a round made.

    Raises
    ------
    VerificationError
        NOT_AUTHENTIC when the version does not open: altered, or of another key, run or round.
    """
    if len(sealed) < _NONCE_BYTES + _TAG_BYTES:
        raise VerificationError(Reason.NOT_AUTHENTIC, f"a sealed model of {len(sealed)} bytes")
    try:
        return _aead(held).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], _context(held, run, round_))
    except InvalidTag:
        raise VerificationError(
            Reason.NOT_AUTHENTIC, "a sealed model does not open: altered, or of another key, run or round"
        ) from None


def agreement(held: HeldKey, plan_hash: bytes, *parts: bytes) -> bytes:
    """Return the HMAC by which holders compare their results of a sum, 32 bytes.

    Parameters
    ----------
    held : HeldKey
    plan_hash : bytes
        Hash of the sum's plan.
    parts : bytes
        Inputs and results of the holder, or their hashes.
    """
    mac = HMAC(held.derived("model-agreement"), SHA256())
    mac.update(encode("applied-sum", plan_hash, *parts))
    return mac.finalize()


def _aead(held: HeldKey) -> AESGCM:
    return AESGCM(held.derived("model-key"))


def _context(held: HeldKey, run: str, round_: int) -> bytes:
    return encode("sealed-model", run, held.key_id, round_)
