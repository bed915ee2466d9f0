"""Envelopes: content sealed once for the holder of an X25519 key, under an ephemeral key of its own.

::

    key    = HKDF-SHA256(X25519(ephemeral, recipient), info = context)
    sealed = ephemeral public key (32 bytes) || AES-256-GCM(key, nonce 0, content, context)

No key seals twice, so the nonce may be zero.  The context is explicit bytes that name the purpose, both sides and the
ephemeral key.  Assumptions are those of sealed records (``coterie.crypto.sealed``); a thief of the recipient's key
opens recorded envelopes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from coterie.crypto.verification import Reason, VerificationError

__all__ = ["agree", "open_envelope", "seal_envelope"]

_NONCE = bytes(12)
_KEY = 32
_TAG = 16


def seal_envelope(
    recipient: bytes, content: bytes, context: Callable[[bytes], bytes]
) -> tuple[bytes, X25519PrivateKey]:
    """Seal content for the holder of a key.

    Parameters
    ----------
    recipient : bytes
        X25519 public key, 32 bytes.
    content : bytes
    context : callable
        Returns the context for an ephemeral public key.

    Returns
    -------
    sealed : bytes
        48 bytes longer than the content.
    ephemeral : X25519PrivateKey
        The ephemeral key, with which the sender may derive a key for the answer.

    Raises
    ------
    VerificationError
        MALFORMED when the recipient's key is not usable.
    """
    ephemeral = X25519PrivateKey.from_private_bytes(os.urandom(_KEY))
    public = ephemeral.public_key().public_bytes_raw()
    described = context(public)
    aead = _aead(agree(ephemeral, recipient), described)
    return public + aead.encrypt(_NONCE, content, described), ephemeral


def open_envelope(
    shared: Callable[[bytes], bytes], sealed: bytes, context: Callable[[bytes], bytes], what: str
) -> bytes:
    """Open an envelope, and return its content.

    Parameters
    ----------
    shared : callable
        Returns the X25519 shared secret of the recipient's key and an ephemeral public key.
    sealed : bytes
        Envelope that `seal_envelope` made.
    context : callable
        As for `seal_envelope`.
    what : str
        Name of the content, for errors: ``"a sealed Paillier key"``.

    Raises
    ------
    VerificationError
        MALFORMED when it is too short, NOT_AUTHENTIC when it does not open.
    """
    if len(sealed) < _KEY + _TAG:
        raise VerificationError(Reason.MALFORMED, f"{what} of {len(sealed)} bytes")
    public, ciphertext = sealed[:_KEY], sealed[_KEY:]
    described = context(public)
    try:
        return _aead(shared(public), described).decrypt(_NONCE, ciphertext, described)
    except InvalidTag:
        raise VerificationError(
            Reason.NOT_AUTHENTIC, f"{what} does not open: altered, or for another holder, key, run or epoch"
        ) from None


def agree(private: X25519PrivateKey, public: bytes) -> bytes:
    """Return the X25519 shared secret of two keys, 32 bytes; derive keys from it, never use it as a key.

    Raises
    ------
    VerificationError
        MALFORMED when the public key has another size or low order.
    """
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise VerificationError(
            Reason.MALFORMED, "an agreement key has another size than 32 bytes, or low order"
        ) from None


def _aead(shared: bytes, context: bytes) -> AESGCM:
    return AESGCM(HKDF(SHA256(), _KEY, salt=None, info=context).derive(shared))
