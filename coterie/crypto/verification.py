"""Why a signature, key or sealed batch is not accepted, in one closed vocabulary."""

from __future__ import annotations

import enum

from coterie.errors import CryptoError

__all__ = ["Reason", "VerificationError"]


class Reason(enum.StrEnum):
    """What is wrong with something that should have verified."""

    MALFORMED = "malformed"
    """A field has the wrong size or is out of range."""
    BAD_SIGNATURE = "bad-signature"
    """The signature of the participant does not match."""
    NOT_COUNTERSIGNED = "not-countersigned"
    """A bundle that the directory has not countersigned."""
    BAD_COUNTERSIGNATURE = "bad-countersignature"
    """The countersignature is not the directory's, or over something else."""
    NOT_YET_VALID = "not-yet-valid"
    """Before the validity begins."""
    EXPIRED = "expired"
    """After the validity ended."""
    OLD_VERSION = "old-version"
    """A bundle that does not replace the one already held."""
    WRONG_PARTICIPANT = "wrong-participant"
    """About another participant."""
    WRONG_CERTIFICATE = "wrong-certificate"
    """A delegation for another TLS certificate."""
    WRONG_KEY = "wrong-key"
    """Under, or of, another key."""
    WRONG_RUN = "wrong-run"
    """For another run."""
    BAD_VERSION = "bad-version"
    """A header of a format that this release does not read."""
    UNKNOWN_PREKEY = "unknown-prekey"
    """Sealed for a prekey that is not held here, or no longer."""
    WRONG_DIRECTION = "wrong-direction"
    """A reply where a record was due, or the other way round."""
    NOT_AUTHENTIC = "not-authentic"
    """The ciphertext or its associated data was altered, or belongs elsewhere."""
    EXHAUSTED = "exhausted"
    """The session has no nonce left."""
    WRONG_PURPOSE = "wrong-purpose"
    """Made for something else."""
    NOT_LISTED = "not-listed"
    """Somebody whom the operator's roster does not name."""
    REVOKED = "revoked"
    """Somebody who was revoked."""
    TOO_FEW = "too-few"
    """Fewer stand behind it than have to."""
    OLD_EPOCH = "old-epoch"
    """A key that does not follow the one already seen."""
    FORKED = "forked"
    """The session was inherited through a fork, where its nonces could repeat."""


class VerificationError(CryptoError):
    """Something that does not verify.

    Parameters
    ----------
    reason : Reason
        Why, for programs.
    message : str
        The same for people; never a secret, never a private value.
    hint : str, optional
        What to do next.
    """

    def __init__(self, reason: Reason, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason
