"""Requests of users to the third party's expansion services, sealed so that the COS, which relays them, reads nothing.

A request is sealed (`coterie.crypto.envelope`) to the third party's *sealing key*, which the directory signs.  Its
context names the kind of request, run, epoch, upload and key.  Contents are padded to a power of two.  The answer is
sealed under a key from the same agreement with a fresh salt::

    key    = HKDF-SHA256(X25519(ephemeral, sealing key), salt = 32 random bytes,
                         info = (expansion-answer, SHA-256 of the sealed request))
    sealed = salt || AES-256-GCM(key, nonce 0, answer, associated = info)

An upload's id is the SHA-256 of a secret that only the user's host and the third party see: whoever presents the secret
may add to the upload, ask for its neighbours and have it forgotten.  The COS sees the id and whose it is.
"""

from __future__ import annotations

import enum
import hashlib
import os
import struct
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from coterie.crypto.envelope import agree, open_envelope, seal_envelope
from coterie.crypto.explicit import encode
from coterie.crypto.identity import Validity, check_signature
from coterie.crypto.verification import Reason, VerificationError

__all__ = [
    "AnswerKey",
    "Kind",
    "SealingKey",
    "SealingSecret",
    "UploadPlace",
    "open_request",
    "pad",
    "seal_request",
    "unpad",
    "upload_id_of",
]

_ID = 32
_KEY = 32
_KEY_ID = 8
_SALT = 32
_TAG = 16
_NONCE = bytes(12)
_LENGTH = struct.Struct(">I")
_LEAST = 4096


class Kind(enum.StrEnum):
    """Kinds of sealed requests; one is never taken for another."""

    PUBLISH = "publish"
    NEIGHBOURS = "neighbours"
    FORGET = "forget"
    PUBLISH_LATENT = "publish-latent"
    FORGET_LATENT = "forget-latent"


class UploadPlace(NamedTuple):
    """The part of a request that is not sealed, but authenticated with it."""

    run: str
    epoch: int
    upload_id: bytes
    """SHA-256 of the upload's secret, 32 bytes."""


class SealingKey(NamedTuple):
    """The public half of the third party's key for requests."""

    key_id: bytes
    """Random, 8 bytes."""
    public: bytes
    """X25519, 32 bytes."""
    expiry: int
    """First second at which nothing may be sealed to it any more, Unix seconds."""
    signature: bytes
    """The directory's, 64 bytes."""

    def verify(self, directory_key: bytes, now: int) -> None:
        """Check that the directory signed the key, and that it may still be sealed to.

        Raises
        ------
        VerificationError
            MALFORMED, BAD_SIGNATURE or EXPIRED.
        """
        if len(self.key_id) != _KEY_ID or len(self.public) != _KEY or not 0 <= self.expiry < 1 << 63:
            raise VerificationError(
                Reason.MALFORMED, "a sealing key has an id, a key or an expiry of another form"
            )
        what = "the sealing key"
        check_signature(
            directory_key,
            self.signature,
            _statement(self.key_id, self.public, self.expiry),
            what,
            Reason.BAD_SIGNATURE,
        )
        Validity(0, self.expiry).check(what, now)


class SealingSecret:
    """The third party's half of a key for requests.

    Parameters
    ----------
    private : X25519PrivateKey
    public : SealingKey
    """

    __slots__ = ("_private", "public")

    def __init__(self, private: X25519PrivateKey, public: SealingKey) -> None:
        self._private = private
        self.public = public

    @classmethod
    def generate(cls, directory: Ed25519PrivateKey, expiry: int) -> SealingSecret:
        """Draw a key, signed by the directory, usable until ``expiry`` (Unix seconds)."""
        return cls.of(os.urandom(_KEY), os.urandom(_KEY_ID), expiry, directory)

    @classmethod
    def of(cls, private: bytes, key_id: bytes, expiry: int, directory: Ed25519PrivateKey) -> SealingSecret:
        """Return the key of a secret half (32 bytes) and an id (8 bytes), signed by the directory."""
        held = X25519PrivateKey.from_private_bytes(private)
        public = held.public_key().public_bytes_raw()
        signature = directory.sign(_statement(key_id, public, expiry))
        return cls(held, SealingKey(key_id, public, expiry, signature))

    def agree(self, public: bytes) -> bytes:
        """Return the X25519 shared secret with an ephemeral key, 32 bytes."""
        return agree(self._private, public)

    def private_bytes(self) -> bytes:
        """Return the secret half, 32 bytes, for the file that keeps it."""
        return self._private.private_bytes_raw()

    def __repr__(self) -> str:
        return f"<SealingSecret {self.public.key_id.hex()}>"


class AnswerKey:
    """The key of the answers to one sealed request; both sides have it.

    Parameters
    ----------
    shared : bytes
        X25519 shared secret of the request's ephemeral key and the sealing key.
    sealed : bytes
        The sealed request.
    """

    __slots__ = ("_info", "_shared")

    def __init__(self, shared: bytes, sealed: bytes) -> None:
        self._shared = shared
        self._info = encode("expansion-answer", hashlib.sha256(sealed).digest())

    def seal(self, content: bytes) -> bytes:
        """Seal an answer, padded, under a fresh salt."""
        salt = os.urandom(_SALT)
        return salt + self._aead(salt).encrypt(_NONCE, pad(content), self._info)

    def open(self, sealed: bytes) -> bytes:
        """Open an answer.

        Raises
        ------
        VerificationError
            MALFORMED when it is too short, NOT_AUTHENTIC when it is no answer to this request.
        """
        if len(sealed) < _SALT + _TAG:
            raise VerificationError(Reason.MALFORMED, f"a sealed answer of {len(sealed)} bytes")
        try:
            padded = self._aead(sealed[:_SALT]).decrypt(_NONCE, sealed[_SALT:], self._info)
        except InvalidTag:
            raise VerificationError(
                Reason.NOT_AUTHENTIC, "a sealed answer does not open: altered, or to another request"
            ) from None
        return unpad(padded)

    def _aead(self, salt: bytes) -> AESGCM:
        return AESGCM(HKDF(SHA256(), _KEY, salt=salt, info=self._info).derive(self._shared))

    def __repr__(self) -> str:
        return "<AnswerKey>"


def upload_id_of(secret: bytes) -> bytes:
    """Return the id of an upload, the SHA-256 of its secret (32 bytes).

    Raises
    ------
    VerificationError
        MALFORMED when the secret has another size.
    """
    if len(secret) != _ID:
        raise VerificationError(
            Reason.MALFORMED, f"an upload's secret has {len(secret)} bytes, expected {_ID}"
        )
    return hashlib.sha256(encode("graph-upload", secret)).digest()


def seal_request(kind: Kind, place: UploadPlace, key: SealingKey, content: bytes) -> tuple[bytes, AnswerKey]:
    """Seal a request to the third party; return it, and the key of its answers.

    Raises
    ------
    VerificationError
        MALFORMED when the key is not usable.
    """
    sealed, ephemeral = seal_envelope(
        key.public, pad(content), lambda public: _context(kind, place, key, public)
    )
    return sealed, AnswerKey(agree(ephemeral, key.public), sealed)


def open_request(
    kind: Kind, place: UploadPlace, key: SealingSecret, sealed: bytes
) -> tuple[bytes, AnswerKey]:
    """Open a request; return its content, and the key of its answers.

    Raises
    ------
    VerificationError
        MALFORMED when it is too short, NOT_AUTHENTIC when it is of another kind or place, or altered.
    """
    padded = open_envelope(
        key.agree, sealed, lambda public: _context(kind, place, key.public, public), "a sealed request"
    )
    return unpad(padded), AnswerKey(key.agree(sealed[:_KEY]), sealed)


def pad(content: bytes) -> bytes:
    """Return a content behind its length (4 bytes, big-endian), with zeros up to a power of two of at least 4,096."""
    size = _LEAST
    while size < _LENGTH.size + len(content):
        size *= 2
    return (_LENGTH.pack(len(content)) + content).ljust(size, b"\0")


def unpad(padded: bytes) -> bytes:
    """Return the content that was padded.

    Raises
    ------
    VerificationError
        MALFORMED.
    """
    length = _LENGTH.unpack_from(padded)[0] if len(padded) >= _LENGTH.size else 0
    content = padded[_LENGTH.size : _LENGTH.size + length]
    if pad(content) != padded:
        raise VerificationError(
            Reason.MALFORMED, f"a content of {len(padded)} bytes is not padded as it must be"
        )
    return content


def _statement(key_id: bytes, public: bytes, expiry: int) -> bytes:
    return encode("expansion-key", key_id, public, expiry)


def _context(kind: Kind, place: UploadPlace, key: SealingKey, ephemeral: bytes) -> bytes:
    return encode(
        "expansion-request",
        kind.value,
        place.run,
        place.epoch,
        place.upload_id,
        key.key_id,
        ephemeral,
        key.public,
    )
