"""Rosters: lists, signed with the operator's offline key, of participants who may receive a shared secret.

The third party decides who is enrolled.  Enrolment alone must not entitle to a secret key: whoever runs the third
party could enrol an accomplice, who would be sent the key.  So the operator signs a list of participants with an
Ed25519 key that no service holds; its public half is in the configuration of every client.

A roster is a text file without secrets::

    -----BEGIN COTERIE ROSTER-----
    purpose: paillier
    run: *
    issued: 1800000000
    expires: 1831536000
    member: 64 hexadecimal digits, a line for each, ascending
    signature: 128 hexadecimal digits
    -----END COTERIE ROSTER-----

``run: *`` holds for every run of the federation; times are Unix seconds.  Signed are the explicit bytes (roster,
purpose, run, issued, expires, all members), where every run is the empty text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from coterie.crypto.explicit import encode
from coterie.crypto.identity import Validity, check_signature
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CertificateError

__all__ = ["MOST_MEMBERS", "PAILLIER", "Roster", "load_roster_key", "save_roster_key"]

PAILLIER = "paillier"
"""Purpose of a roster of participants who may hold a secret Paillier key."""
MOST_MEMBERS = 4096
"""Most participants on a roster, so that the envelopes for all of them fit into one message."""

_ROSTER = "roster"
_ID = 32
_SIGNATURE = 64
_EVERY_RUN = "*"
_BEGIN = "-----BEGIN COTERIE ROSTER-----"
_END = "-----END COTERIE ROSTER-----"
_WORDS = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_TEXT = re.compile(
    rf"{_BEGIN}\n"
    r"purpose: (?P<purpose>[a-z0-9-]+)\n"
    r"run: (?P<run>[a-z0-9-]+|\*)\n"
    r"issued: (?P<issued>\d{1,18})\n"
    r"expires: (?P<expires>\d{1,18})\n"
    r"(?P<members>(?:member: [0-9a-f]{64}\n)+)"
    r"signature: (?P<signature>[0-9a-f]{128})\n"
    rf"{_END}\n?"
)


@dataclass(frozen=True)
class Roster:
    """A signed list of participants who may receive the secrets of one purpose, in one run or in all.

    Parameters
    ----------
    purpose : str
        Which secrets: lower-case words, digits and single hyphens.
    run : str
        The run; empty for every run of the federation.
    members : tuple of bytes
        Participant ids, 32 bytes each, ascending, each once.
    issued, expiry : int
        Validity [issued, expiry), Unix seconds.
    signature : bytes
        The operator's, over all fields above, 64 bytes.
    """

    purpose: str
    run: str
    members: tuple[bytes, ...]
    issued: int
    expiry: int
    signature: bytes

    @classmethod
    def sign(
        cls,
        key: Ed25519PrivateKey,
        members: Iterable[bytes],
        issued: int,
        expiry: int,
        *,
        purpose: str = PAILLIER,
        run: str = "",
    ) -> Self:
        """Sign a roster with the operator's key; ``members`` come in any order.

        Raises
        ------
        VerificationError
            MALFORMED when somebody comes twice, or anything else is not as the class says.
        """
        unsigned = cls(purpose, run, tuple(sorted(members)), issued, expiry, bytes(_SIGNATURE))
        unsigned.check_form()
        return replace(unsigned, signature=key.sign(unsigned._signed()))

    def check_form(self) -> None:
        """Check every field, without the signature and the clock.

        Raises
        ------
        VerificationError
            MALFORMED.
        """
        if _WORDS.fullmatch(self.purpose) is None:
            raise _malformed("its purpose is not made of lower-case words, digits and single hyphens")
        if not 0 < len(self.members) <= MOST_MEMBERS:
            raise _malformed(f"it has {len(self.members)} members, expected 1 to {MOST_MEMBERS}")
        if any(len(member) != _ID for member in self.members):
            raise _malformed(f"a member's id does not have {_ID} bytes")
        for before, after in itertools.pairwise(self.members):
            if before == after:
                raise _malformed(f"participant {after.hex()[:16]} is on it twice")
            if before > after:
                raise _malformed(f"its members are not ascending: {after.hex()[:16]} comes too late")
        if not 0 <= self.issued < self.expiry < 1 << 63:
            raise _malformed(f"it is issued at {self.issued} and expires at {self.expiry}")
        if len(self.signature) != _SIGNATURE:
            raise _malformed(f"its signature has {len(self.signature)} bytes, expected {_SIGNATURE}")

    def verify(self, roster_key: bytes, *, purpose: str, run: str, now: int) -> None:
        """Check that the operator signed the roster for this purpose and run, and that it is valid now.

        Parameters
        ----------
        roster_key : bytes
            The operator's raw Ed25519 public key, 32 bytes, from the caller's own configuration.
        purpose : str
        run : str
        now : int
            Unix seconds.

        Raises
        ------
        VerificationError
            MALFORMED, BAD_SIGNATURE, WRONG_PURPOSE, WRONG_RUN, NOT_YET_VALID or EXPIRED.
        """
        self.check_form()
        check_signature(roster_key, self.signature, self._signed(), "the roster", Reason.BAD_SIGNATURE)
        if self.purpose != purpose:
            raise VerificationError(
                Reason.WRONG_PURPOSE, f"the roster is for {self.purpose!r}, expected {purpose!r}"
            )
        if self.run and self.run != run:
            raise VerificationError(Reason.WRONG_RUN, f"the roster is for run {self.run!r}, expected {run!r}")
        Validity(self.issued, self.expiry).check("the roster", now)

    def eligible(self, revoked: Collection[bytes]) -> tuple[bytes, ...]:
        """Return the ids of members who are not revoked, ascending."""
        return tuple(member for member in self.members if member not in revoked)

    def to_text(self) -> str:
        """Return the content of a roster file."""
        lines = [
            _BEGIN,
            f"purpose: {self.purpose}",
            f"run: {self.run or _EVERY_RUN}",
            f"issued: {self.issued}",
            f"expires: {self.expiry}",
            *(f"member: {member.hex()}" for member in self.members),
            f"signature: {self.signature.hex()}",
            _END,
        ]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse the content of a roster file, without verifying it; `verify` does.

        Raises
        ------
        VerificationError
            MALFORMED.
        """
        found = _TEXT.fullmatch(text.replace("\r\n", "\n"))
        if found is None:
            raise _malformed("its lines are not those of a roster", hint="`coterie certs roster` makes one")
        members = tuple(bytes.fromhex(line.split()[1]) for line in found["members"].splitlines())
        roster = cls(
            found["purpose"],
            "" if found["run"] == _EVERY_RUN else found["run"],
            members,
            int(found["issued"]),
            int(found["expires"]),
            bytes.fromhex(found["signature"]),
        )
        roster.check_form()
        return roster

    def save(self, path: Path) -> None:
        """Write the roster to a file that everybody may read, mode 0644.

        Raises
        ------
        CertificateError
            The file cannot be written.
        """
        _write_public(path, self.to_text())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the file that ``save`` wrote.

        Raises
        ------
        CertificateError
            The file cannot be read.
        VerificationError
            MALFORMED.
        """
        hint = "the operator signs it once those whom it names have joined: `coterie certs roster`"
        return cls.from_text(_read_public(path, "the roster", hint))

    def _signed(self) -> bytes:
        members = b"".join(self.members)
        return encode(_ROSTER, self.purpose, self.run, self.issued, self.expiry, members)


def save_roster_key(path: Path, public: bytes) -> None:
    """Write the operator's public key for rosters (raw Ed25519, 32 bytes) as PEM, mode 0644.

    Raises
    ------
    CertificateError
        The file cannot be written.
    """
    key = Ed25519PublicKey.from_public_bytes(public)
    _write_public(path, key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode("ascii"))


def load_roster_key(path: Path) -> bytes:
    """Read the operator's public key for rosters, raw Ed25519, 32 bytes.

    Raises
    ------
    CertificateError
        The file cannot be read, or holds no Ed25519 public key in PEM.
    """
    text = _read_public(path, "the operator's public key for rosters")
    try:
        key = load_pem_public_key(text.encode("ascii"))
    except ValueError:
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise CertificateError(
            f"{path} holds no Ed25519 public key in PEM",
            hint="`coterie certs roster-key` makes the operator's, in the file that ends in .pub",
        )
    return key.public_bytes_raw()


def _write_public(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="ascii")
        path.chmod(0o644)
    except OSError as error:
        raise CertificateError(f"cannot write {path}: {error.strerror}") from error


def _read_public(path: Path, what: str, hint: str | None = None) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError as error:
        raise CertificateError(f"cannot read {what}, {path}: {error.strerror}", hint=hint) from error
    except UnicodeDecodeError:
        raise CertificateError(f"{path} is not {what}: it is no text") from None


def _malformed(message: str, *, hint: str | None = None) -> VerificationError:
    return VerificationError(Reason.MALFORMED, f"the roster cannot be used: {message}", hint=hint)
