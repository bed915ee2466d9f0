"""The error of every failed verification (signature, key, sealed batch), with a reason from a closed enumeration."""

from __future__ import annotations

import enum

from coterie.errors import CryptoError

__all__ = ["Reason", "VerificationError"]


class Reason(enum.StrEnum):
    """Reasons why a signature, key or sealed message does not verify."""

    MALFORMED = "malformed"
    """A field has the wrong size or is out of range."""
    BAD_SIGNATURE = "bad-signature"
    """The signature of the participant does not match."""
    NOT_COUNTERSIGNED = "not-countersigned"
    """The directory has not countersigned the bundle."""
    BAD_COUNTERSIGNATURE = "bad-countersignature"
    """The countersignature is not the directory's, or over something else."""
    NOT_YET_VALID = "not-yet-valid"
    """The validity has not begun."""
    EXPIRED = "expired"
    """The validity has ended."""
    OLD_VERSION = "old-version"
    """The bundle's version is too low to replace the bundle already held."""
    WRONG_PARTICIPANT = "wrong-participant"
    """The statement is about another participant."""
    WRONG_CERTIFICATE = "wrong-certificate"
    """The delegation is for another TLS certificate."""
    WRONG_PARTY = "wrong-party"
    """The key bundle is of a participant of another party, or of a party with another role."""
    WRONG_KEY = "wrong-key"
    """The object belongs to another key than expected, or is encrypted under another."""
    WRONG_RUN = "wrong-run"
    """The object is for another run."""
    BAD_VERSION = "bad-version"
    """The header has a format that this release does not read."""
    UNKNOWN_PREKEY = "unknown-prekey"
    """The batch is sealed for a prekey that is not held here, or not any more."""
    WRONG_DIRECTION = "wrong-direction"
    """The batch is a reply where records were due, or the other way round."""
    NOT_AUTHENTIC = "not-authentic"
    """The ciphertext or its associated data was altered, or made for another context."""
    EXHAUSTED = "exhausted"
    """The session has no nonce left."""
    WRONG_PURPOSE = "wrong-purpose"
    """The object was signed for another purpose."""
    NOT_LISTED = "not-listed"
    """The participant is not on the operator's roster, or not named in the record."""
    REVOKED = "revoked"
    """The participant was revoked."""
    TOO_FEW = "too-few"
    """The key has too few holders."""
    OLD_EPOCH = "old-epoch"
    """The key's epoch does not follow that of the key already seen."""
    NOT_LOGGED = "not-logged"
    """The statement is not shown to be in the third party's log."""
    SPLIT_VIEW = "split-view"
    """Two heads of the third party's log are of two logs."""
    FORKED = "forked"
    """The session was inherited through a fork, where its nonces could repeat."""


class VerificationError(CryptoError):
    """A signature, key or sealed message that does not verify.

    Parameters
    ----------
    reason : Reason
        Why, for programs.
    message : str
        The reason in words, without secrets and private values.
    hint : str, optional
        Advice on what to do next.
    """

    def __init__(self, reason: Reason, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason
