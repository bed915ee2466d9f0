"""Sealed noise: what a member of a denoised sum lets one denoiser read, of one contribution.

A member seals its noise under a key that it and the denoiser agree on by their long-term keys::

    key     HKDF-SHA256(X25519(member, denoiser), salt, info = (noise, plan hash, member's id, denoiser's id))
    sealed  salt (32 random bytes) || AES-256-GCM(key, zero nonce, noise, associated data = info)

The salt is drawn anew for each message, so a key seals one message, and the zero nonce never repeats under a key.  The
plan's hash binds run, round, purpose and cohort.  The agreement authenticates the member: only the two of them can
seal, so the server cannot put noise of its own in the place of a member's and read the rest from a sum.  There is no
forward secrecy: a denoiser's stolen agreement key opens the noise that was sealed for it before.

Assumed: X25519 is gap Diffie-Hellman, HKDF a random oracle on the shared secret, AES-256-GCM an AEAD.
"""

from __future__ import annotations

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from coterie.crypto.explicit import encode
from coterie.crypto.identity import Bundle, Identity
from coterie.crypto.verification import Reason, VerificationError

__all__ = ["SEALING_BYTES", "open_noise", "seal_noise"]

_SALT_BYTES = 32
_KEY_BYTES = 32
_ZERO_NONCE = bytes(12)

SEALING_BYTES = _SALT_BYTES + 16
"""Bytes by which sealed noise is longer than the noise: salt and tag."""


def seal_noise(
    member: Identity, denoiser: Bundle, plan_hash: bytes, noise: bytes, salt: bytes | None = None
) -> bytes:
    """Seal a member's noise for a denoiser.

    Parameters
    ----------
    member : Identity
        Keys of the member.
    denoiser : Bundle
        Verified public keys of the denoiser.
    plan_hash : bytes
        Hash of the sum's plan, 32 bytes.
    noise : bytes
    salt : bytes, optional
        32 bytes, never used twice; drawn when absent, as everywhere but in test vectors.

    Raises
    ------
    VerificationError
        MALFORMED when the denoiser's key is not usable.
    """
    drawn = os.urandom(_SALT_BYTES) if salt is None else salt
    about = encode("noise", plan_hash, member.participant_id, denoiser.participant_id)
    key = _key(member.agree(denoiser.agreement_public), drawn, about)
    return drawn + key.encrypt(_ZERO_NONCE, noise, about)


def open_noise(denoiser: Identity, member: Bundle, plan_hash: bytes, sealed: bytes) -> bytes:
    """Open the noise that a member sealed for a denoiser under a plan.

    Raises
    ------
    VerificationError
        NOT_AUTHENTIC when it was altered, or sealed by or for somebody else or under another plan; MALFORMED when the
        member's key is not usable.
    """
    about = encode("noise", plan_hash, member.participant_id, denoiser.participant_id)
    key = _key(denoiser.agree(member.agreement_public), sealed[:_SALT_BYTES], about)
    try:
        return key.decrypt(_ZERO_NONCE, sealed[_SALT_BYTES:], about)
    except (InvalidTag, ValueError):
        raise VerificationError(Reason.NOT_AUTHENTIC, "a member's sealed noise does not open") from None


def _key(agreed: bytes, salt: bytes, about: bytes) -> AESGCM:
    return AESGCM(HKDF(SHA256(), _KEY_BYTES, salt=salt, info=about).derive(agreed))
