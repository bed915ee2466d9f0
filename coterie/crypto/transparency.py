"""The third party's transparency log: its entries, its signed heads, and the evidence that it shows two logs.

Everything that the third party signs is an entry: a *kind* and the *statement*, the bytes that it signed.  A *head* is
the size and the root of the tree over all entries (`coterie.crypto.merkle`), with a time, signed with a key of its own
that the directory's key certifies.  Two heads of one log never differ at one size, and the larger is never the older.
"""

from __future__ import annotations

import base64
import binascii
import enum
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto.explicit import encode
from coterie.crypto.identity import Bundle, check_signature, countersigned
from coterie.crypto.merkle import leaf_hash
from coterie.crypto.verification import Reason, VerificationError

__all__ = [
    "BEACON",
    "BUNDLE",
    "CERTIFICATE",
    "REVOCATION",
    "Evidence",
    "FalseLogError",
    "LogBreach",
    "LogKey",
    "SignedHead",
    "bundle_statement",
    "certificate_statement",
    "contradiction",
    "entry_leaf",
    "entry_text",
    "revocation_statement",
    "validate_kind",
]

CERTIFICATE = "certificate"
"""Kind of a certificate; its statement is the certificate in DER."""
BUNDLE = "bundle"
"""Kind of a countersigned bundle of the directory."""
REVOCATION = "revocation"
"""Kind of the revocation of a participant or a certificate."""
BEACON = "beacon"
"""Kind of a run's beacon."""

_KIND = re.compile(r"[a-z]([a-z-]{0,30}[a-z])?")
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----([^-]*)-----END CERTIFICATE-----")
_HASH = 32


def validate_kind(kind: str) -> str:
    """Return the kind of an entry if it has the form of one: 1 to 32 of a-z and inner '-'.

    Raises
    ------
    ValueError
    """
    if _KIND.fullmatch(kind) is None:
        raise ValueError(f"{kind[:80]!r} is no kind of an entry, expected 1 to 32 of a-z and inner '-'")
    return kind


def entry_text(kind: str, statement: bytes) -> bytes:
    """Return the explicit bytes of an entry."""
    return encode("log-entry", kind, statement)


def entry_leaf(kind: str, statement: bytes) -> bytes:
    """Return the hash of an entry as a leaf of the tree, 32 bytes."""
    return leaf_hash(entry_text(kind, statement))


def certificate_statement(chain: bytes) -> bytes:
    """Return the statement of a certificate: the first of a chain in PEM, as DER.

    Raises
    ------
    VerificationError
        MALFORMED.
    """
    found = _CERTIFICATE.search(chain)
    try:
        if found is None:
            raise ValueError
        return base64.b64decode(b"".join(found[1].split()), validate=True)
    except (binascii.Error, ValueError):
        raise VerificationError(Reason.MALFORMED, "that is no chain of certificates in PEM") from None


def bundle_statement(bundle: Bundle) -> bytes:
    """Return the statement of a countersigned bundle: the bytes that the directory signed."""
    return countersigned(bundle)


def revocation_statement(kind: str, subject: bytes, revision: int) -> bytes:
    """Return the statement of a revocation.

    Parameters
    ----------
    kind : str
        ``"participant"`` or ``"certificate"``.
    subject : bytes
        Id of the participant or fingerprint of the certificate, 32 bytes.
    revision : int
        Revision of the directory from which it holds.
    """
    return encode("revocation", kind, subject, revision)


class LogKey:
    """The third party's key for signing heads of its log, certified by the directory's key.

    Parameters
    ----------
    key : Ed25519PrivateKey
        Signs heads; nothing else.
    directory_key : Ed25519PrivateKey
        Certifies it.
    """

    __slots__ = ("_certification", "_key", "_public")

    def __init__(self, key: Ed25519PrivateKey, directory_key: Ed25519PrivateKey) -> None:
        self._key = key
        self._public = key.public_key().public_bytes_raw()
        self._certification = directory_key.sign(encode("log-key", self._public))

    def sign(self, size: int, root: bytes, time_ms: int) -> SignedHead:
        """Sign the head of the log."""
        signature = self._key.sign(encode("log-head", size, root, time_ms))
        return SignedHead(size, root, time_ms, self._public, self._certification, signature)


@dataclass(frozen=True)
class SignedHead:
    """The head of the third party's log at one moment.

    Parameters
    ----------
    size : int
        Number of entries.
    root : bytes
        Root of the tree over them, 32 bytes.
    time_ms : int
        Time of the signature, Unix milliseconds; grows with every head.
    log_key : bytes
        Raw Ed25519 public key that signs heads, 32 bytes.
    certification : bytes
        The directory's signature over ``log_key``, 64 bytes.
    signature : bytes
        Signature with ``log_key`` over size, root and time, 64 bytes.
    """

    size: int
    root: bytes
    time_ms: int
    log_key: bytes
    certification: bytes
    signature: bytes

    def verify(self, directory_key: bytes) -> None:
        """Check that the third party with this directory key signed the head.

        Raises
        ------
        VerificationError
            MALFORMED or BAD_SIGNATURE.
        """
        if not (0 <= self.size < 1 << 63 and 0 <= self.time_ms < 1 << 63 and len(self.root) == _HASH):
            raise VerificationError(
                Reason.MALFORMED, "the log's head has a size, a time or a root that is out of range"
            )
        what, reason = "the key of the log", Reason.BAD_SIGNATURE
        check_signature(directory_key, self.certification, encode("log-key", self.log_key), what, reason)
        signed = encode("log-head", self.size, self.root, self.time_ms)
        check_signature(self.log_key, self.signature, signed, "the head of the log", reason)

    def to_json(self) -> dict[str, object]:
        """Return the head as the evidence file and the file of a party's newest head have it."""
        return {
            "size": self.size,
            "root": self.root.hex(),
            "time_ms": self.time_ms,
            "log_key": self.log_key.hex(),
            "certification": self.certification.hex(),
            "signature": self.signature.hex(),
        }

    @classmethod
    def from_json(cls, content: object) -> Self:
        """Parse what `to_json` returned; the signature is not checked.

        Raises
        ------
        VerificationError
            MALFORMED.
        """
        try:
            if not isinstance(content, dict):
                raise TypeError
            size, time_ms = content["size"], content["time_ms"]
            if not (type(size) is int and type(time_ms) is int):
                raise TypeError
            names = ("log_key", "certification", "signature")
            return cls(
                size,
                bytes.fromhex(content["root"]),
                time_ms,
                *(bytes.fromhex(content[name]) for name in names),
            )
        except (KeyError, TypeError, ValueError):
            raise VerificationError(Reason.MALFORMED, "that is no head of a log") from None


class LogBreach(enum.StrEnum):
    """Kinds of evidence."""

    TWO_LOGS = "two-logs"
    """Two heads of one size with different roots."""
    WENT_BACK = "went-back"
    """The later head has fewer entries: the log lost some, as after its restoration from a backup."""
    NOT_CONSISTENT = "not-consistent"
    """The larger head is not shown to begin with the entries of the smaller."""
    NOT_LOGGED = "not-logged"
    """A statement that the third party signed is not in its log."""


def contradiction(one: SignedHead, other: SignedHead) -> LogBreach | None:
    """Return why two verified heads cannot be of one log, without any proof; None if they may be of one."""
    if one.size == other.size:
        return LogBreach.TWO_LOGS if one.root != other.root else None
    smaller, larger = (one, other) if one.size < other.size else (other, one)
    # The third party signs heads one after the other, each with a later time.
    return LogBreach.WENT_BACK if smaller.time_ms >= larger.time_ms else None


_WORDS = {
    LogBreach.TWO_LOGS: "signed two heads of its log with {0.size} entries and different roots: it shows two logs",
    LogBreach.WENT_BACK: "shows a log of {1.size} entries after one of {0.size}: its log was set back, as by a "
    "restoration from a backup, and is another log now",
    LogBreach.NOT_CONSISTENT: "does not show that its log of {1.size} entries begins with the {0.size} entries of "
    "another head that it signed: it shows two logs",
    LogBreach.NOT_LOGGED: "signed a statement of the kind {2!r} that is not in its log of {0.size} entries",
}


@dataclass(frozen=True)
class Evidence:
    """Signed heads, and perhaps a statement, that convict a third party.

    Parameters
    ----------
    thirdparty : str
        Role and name.
    finding : LogBreach
    heads : sequence of SignedHead
        Two heads, in the order of their times or sizes; one for `LogBreach.NOT_LOGGED`.
    kind : str
        Kind of the statement; empty without one.
    statement : bytes
        As the third party signed it.
    """

    thirdparty: str
    finding: LogBreach
    heads: tuple[SignedHead, ...]
    kind: str = ""
    statement: bytes = b""

    @classmethod
    def of(cls, thirdparty: str, finding: LogBreach, one: SignedHead, other: SignedHead) -> Self:
        """Return the evidence in two heads."""
        by_time = finding == LogBreach.WENT_BACK
        heads = sorted((one, other), key=lambda head: head.time_ms if by_time else head.size)
        return cls(thirdparty, finding, tuple(heads))

    def text(self) -> str:
        """Return a sentence that names the third party and what it did."""
        return f"{self.thirdparty} {_WORDS[self.finding].format(self.heads[0], self.heads[-1], self.kind)}"

    def to_json(self) -> bytes:
        """Return the content of the evidence file."""
        content = {
            "thirdparty": self.thirdparty,
            "finding": self.finding,
            "heads": [head.to_json() for head in self.heads],
            "kind": self.kind,
            "statement": self.statement.hex(),
        }
        return json.dumps(content, indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Parse the content of an evidence file; nothing is checked yet.

        Raises
        ------
        VerificationError
            MALFORMED.
        """
        try:
            content = json.loads(text)
            heads = tuple(SignedHead.from_json(one) for one in content["heads"])
            found = cls(
                str(content["thirdparty"]),
                LogBreach(content["finding"]),
                heads,
                str(content["kind"]),
                bytes.fromhex(content["statement"]),
            )
        except (KeyError, TypeError, ValueError):
            raise VerificationError(Reason.MALFORMED, "that is no evidence against a log") from None
        if len(heads) != (1 if found.finding == LogBreach.NOT_LOGGED else 2):
            raise VerificationError(Reason.MALFORMED, "that is no evidence against a log")
        return found

    def convicts(self, directory_key: bytes) -> bool:
        """Check the heads' signatures; return whether they contradict each other by themselves.

        Where they do not, the log's entries decide (`refuted_by`).

        Raises
        ------
        VerificationError
            MALFORMED or BAD_SIGNATURE: the third party signed no such heads.
        """
        for head in self.heads:
            head.verify(directory_key)
        return len(self.heads) == 2 and contradiction(*self.heads) is not None

    def refuted_by(self, roots: Sequence[bytes], leaves: frozenset[bytes]) -> bool:
        """Return whether the log as it is now explains everything: the heads are of it, and it has the statement.

        Parameters
        ----------
        roots : sequence of bytes
            Roots of the log at the sizes of ``heads``.
        leaves : frozenset of bytes
            Its leaf hashes.
        """
        if any(head.root != root for head, root in zip(self.heads, roots, strict=True)):
            return False
        return not self.kind or entry_leaf(self.kind, self.statement) in leaves


class FalseLogError(VerificationError):
    """The third party shows two logs, or signed what it did not log; nothing that it says may be relied on.

    Parameters
    ----------
    evidence : Evidence
    """

    def __init__(self, evidence: Evidence) -> None:
        missing = evidence.finding == LogBreach.NOT_LOGGED
        super().__init__(
            Reason.NOT_LOGGED if missing else Reason.SPLIT_VIEW,
            evidence.text(),
            hint="its signed heads are kept in log/evidence.json of the state folder; `coterie audit log` checks them; "
            "if it was restored from a backup, docs/upkeep.md says how parties take it again",
        )
        self.evidence = evidence
