"""Invitations: one signed file with all that a party on another machine needs to join a federation.

An invitation holds the authority's certificate, the address for enrolment, a one-time token, and the federation's part
of the party's configuration.  The directory signs it, so a change on the way is noticed.  A wholly forged invitation
names another authority; the party detects it by comparing the authority's fingerprint with the one that the operator
tells over another channel.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto.authority import new_token, token_hash, validate_name, validate_role
from coterie.crypto.clocks import CLOCK_SKEW_S, moment
from coterie.crypto.explicit import encode
from coterie.crypto.identity import check_signature
from coterie.crypto.keyfile import write_private_file
from coterie.crypto.verification import Reason
from coterie.errors import CertificateError, CryptoError
from coterie.launch.authority import TOKENS
from coterie.store.authority import load_secrets
from coterie.store.tokens import append_token

__all__ = ["INVITATION", "Invitation", "invite"]

INVITATION = "invitation"
"""Name of an invitation's file in a party's folder."""

_KIND = "coterie-invitation-1"
_LABEL = "invitation"
_MOST_BYTES = 1 << 16
_TEXTS = ("role", "name", "token", "authority", "directory_key", "enrol_address", "enrol_name")
_NUMBERS = ("participants", "issued", "expiry")


@dataclass(frozen=True)
class Invitation:
    """An invitation of one party to a federation.

    Parameters
    ----------
    role, name : str
        The party that the token enrols.
    token : str
        The one-time token; its first user becomes that party.
    participants : int
        For how many participants the party may speak.
    issued, expiry : int
        When the invitation was made, and the first second at which it is no longer valid; Unix seconds.
    authority : str
        The authority's certificate, PEM.
    directory_key : str
        The directory's Ed25519 public key, hexadecimal.
    enrol_address, enrol_name : str
        Address at which the third party takes enrolments, and the third party's name.
    settings : dict
        The federation's part of the party's configuration: its peers, the run.  Files are given by name only, and
        lie beside the invitation.
    signature : str
        The directory's signature over all other fields, hexadecimal.
    """

    role: str
    name: str
    token: str = field(repr=False)
    participants: int
    issued: int
    expiry: int
    authority: str = field(repr=False)
    directory_key: str
    enrol_address: str
    enrol_name: str
    settings: dict[str, Any]
    signature: str = ""

    @property
    def party(self) -> str:
        """Role and name, as ``client/host-0``."""
        return f"{self.role}/{self.name}"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the authority's certificate, hexadecimal."""
        certificate = x509.load_pem_x509_certificate(self.authority.encode())
        return certificate.fingerprint(hashes.SHA256()).hex()

    def signed(self, key: Ed25519PrivateKey) -> Self:
        """Return a copy that is signed by the directory's key."""
        return replace(self, signature=key.sign(self._content()).hex())

    def _content(self) -> bytes:
        facts = {**asdict(self), "signature": ""}
        return encode(_LABEL, json.dumps(facts, sort_keys=True, separators=(",", ":")).encode())

    def save(self, path: Path) -> None:
        """Write the invitation as JSON, mode 0600: anyone who reads the token can enrol as the party."""
        write_private_file(path, (json.dumps({"kind": _KIND, **asdict(self)}, indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read an invitation and verify its signature.

        Raises
        ------
        CertificateError
            The file cannot be read, is no invitation, or was changed after it was signed.
        """
        again = "ask the operator to make it again and to send it as a file"
        try:
            with path.open("rb") as file:
                content = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise CertificateError(f"cannot read the invitation {path}: {error.strerror}") from error
        found = cls._parsed(content)
        if found is None:
            raise CertificateError(
                f"{path} is no invitation, or not a whole one: expected what `coterie certs invite` writes",
                hint=again,
            )
        try:
            check_signature(
                bytes.fromhex(found.directory_key),
                bytes.fromhex(found.signature),
                found._content(),
                "the invitation",
                Reason.BAD_SIGNATURE,
            )
            validate_role(found.role)
            validate_name(found.name)
            token_hash(found.token)
            x509.load_pem_x509_certificate(found.authority.encode())
        except (CryptoError, CertificateError, ValueError) as error:
            raise CertificateError(
                f"the invitation {path} is not as it was signed: something in it was changed", hint=again
            ) from error
        return found

    @classmethod
    def _parsed(cls, content: bytes) -> Self | None:
        if len(content) > _MOST_BYTES:
            return None
        try:
            facts = json.loads(content)
            if facts.pop("kind") != _KIND:
                return None
            found = cls(**facts)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        texts = all(isinstance(getattr(found, key), str) for key in (*_TEXTS, "signature"))
        numbers = all(type(getattr(found, key)) is int for key in _NUMBERS)
        return found if texts and numbers and isinstance(found.settings, dict) else None

    def check_time(self, now: float) -> None:
        """Check that the invitation is valid at a time, Unix seconds, by this machine's clock.

        Raises
        ------
        CertificateError
            The invitation has expired, or was made later than ``now``, by more than `CLOCK_SKEW_S`.
        """
        clock = f"this machine's clock says {moment(now)}"
        if now < self.issued - CLOCK_SKEW_S:
            raise CertificateError(
                f"the invitation of {self.party} was made at {moment(self.issued)}, and {clock}",
                hint=f"set the clock of this machine, which is at least {int(self.issued - now)} s behind, "
                "or that of the third party's",
            )
        if now >= self.expiry + CLOCK_SKEW_S:
            raise CertificateError(
                f"the invitation of {self.party} expired at {moment(self.expiry)}, and {clock}",
                hint=self.ask_again,
            )

    @property
    def ask_again(self) -> str:
        """Hint for error messages: how to get another invitation."""
        return (
            "ask the operator of the third party for another "
            f"(`coterie certs invite --role {self.role} --name {self.name}`)"
        )

    def check_fingerprint(self, expected: str) -> None:
        """Check that the authority has the fingerprint that the operator told over another channel.

        Raises
        ------
        CertificateError
            The fingerprints differ.
        """
        if expected.replace(":", "").strip().lower() != self.fingerprint:
            raise CertificateError(
                f"the authority of this invitation has the fingerprint {self.fingerprint}, "
                f"expected {expected[:80]}",
                hint="do not use it: ask the operator what the fingerprint is, and who sent this",
            )


def invite(
    state: Path,
    role: str,
    name: str,
    participants: int,
    *,
    enrol: tuple[str, str],
    settings: dict[str, Any],
    hours: float = 24.0,
) -> Invitation:
    """Draw a token for a party, record its hash, and return the signed invitation with the token.

    Parameters
    ----------
    state : Path
        State folder of the third party.
    role, name : str
        The party.
    participants : int
        For how many participants the party may speak.
    enrol : tuple of str
        Address at which the third party takes enrolments, and the third party's name.
    settings : dict
        The federation's part of the party's configuration.
    hours : float
        Validity, hours.

    Raises
    ------
    CertificateError
        There is no authority, the role or name is not valid, or a file cannot be written.
    """
    secrets = load_secrets(state)
    now = int(time.time())
    token, record = new_token(role, name, now + int(hours * 3600), participants)
    append_token(state / TOKENS, record)
    return Invitation(
        role=role,
        name=name,
        token=token,
        participants=participants,
        issued=now,
        expiry=record.expiry,
        authority=secrets.authority.certificate_pem.decode(),
        directory_key=secrets.directory_key.hex(),
        enrol_address=enrol[0],
        enrol_name=enrol[1],
        settings=settings,
    ).signed(secrets.signing_key)
