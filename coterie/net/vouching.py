"""How an intake of a service vouches for its callers: the certificate of each travels with the call.

An intake ends the callers' connections and hands their calls on.  TLS then shows the service the intake's certificate,
so the intake adds the caller's own to the metadata of the call, and the version of this hand-over.  The service takes
that word only from a certificate of its own role and name, and checks the caller's certificate itself: an intake can
speak for parties that the authority knows, and for no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from coterie.crypto.authority import PeerIdentity, issuer_of
from coterie.errors import CertificateError
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.versions import own

__all__ = [
    "CALLER_KEY",
    "HANDED_OVER",
    "INTAKE_FIELD",
    "INTAKE_KEY",
    "Vouched",
    "Vouching",
    "claim",
    "is_claimed",
]

CALLER_KEY = "coterie-caller-bin"
"""Metadata of a call that was handed on: the caller's certificate, DER."""

INTAKE_KEY = "coterie-intake"
"""Metadata of an intake's calls: version of the hand-over, and the release of the intake."""

INTAKE_FIELD = "intake"
"""Field of the refusal of an intake of another version."""

HANDED_OVER = 4
"""Version of the hand-over between an intake and its coordinator; both must have the same.

Since 2 an intake takes several pieces in one message, and items without a hash: parties send them as the coordinator's
protocol allows, and an intake that does not know them would fail each submission.  Since 3 an intake holds the polls of
its callers itself (`intakes.proto`).  Since 4 an intake takes contributions of all sums.
"""


class Vouched(NamedTuple):
    """A caller whose certificate an intake showed."""

    identity: PeerIdentity
    end: float
    """When the certificate expires, Unix seconds."""


def claim(pem: bytes = b"") -> tuple[tuple[str, str | bytes], ...]:
    """Return the metadata by which an intake says its version, and whose call it hands on.

    Parameters
    ----------
    pem : bytes
        The caller's certificate; empty for a call of the intake itself.
    """
    release = own().release
    said: tuple[tuple[str, str | bytes], ...] = ((INTAKE_KEY, f"{HANDED_OVER}/{release}"),)
    if not pem:
        return said
    der = x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)
    return (*said, (CALLER_KEY, der))


def is_claimed(metadata: Iterable[Any] | None) -> bool:
    """Return whether a call has metadata that only an intake's calls have; any caller can send it."""
    return any(key in (CALLER_KEY, INTAKE_KEY) for key, _ in metadata or ())


class Vouching:
    """Takes the word of a service's intakes for their callers.

    Parameters
    ----------
    party : str
        Role and name that an intake's certificate must have.
    authorities : callable
        Returns the certificates of the authorities, PEM, one of which must have issued a caller's.
    """

    def __init__(self, party: str, authorities: Callable[[], bytes]) -> None:
        self._party = party
        self._authorities = authorities

    def is_intake(self, identity: PeerIdentity) -> bool:
        """Return whether a TLS identity is that of this service's intakes."""
        return str(identity) == self._party

    def caller(self, intake: PeerIdentity, metadata: Iterable[Any] | None) -> bytes | None:
        """Return the certificate (DER) of the caller for whom a call is handed on; None for a call that is not.

        Raises
        ------
        Refusal
            WRONG_ROLE when the caller is no intake; NOT_READY when the intake is of another version.
        """
        told = {key: value for key, value in metadata or () if key in (CALLER_KEY, INTAKE_KEY)}
        if not told:
            return None
        if not self.is_intake(intake):
            raise Refusal(
                ErrorReason.ERROR_REASON_WRONG_ROLE,
                f"{intake} hands a call on",
                field="certificate",
                expected=f"a certificate of {self._party}, which intakes have",
            )
        version, _, release = str(told.get(INTAKE_KEY, "")).partition("/")
        if version != str(HANDED_OVER):
            # Not UNSUPPORTED_VERSION: the party whose call it is can do nothing about it, and is to wait.
            raise Refusal(
                ErrorReason.ERROR_REASON_NOT_READY,
                f"the intake (release {release[:40] or 'unknown'}) hands calls on in version {version[:8] or 'none'}, "
                f"and the coordinator (release {own().release}) takes version {HANDED_OVER}",
                field=INTAKE_FIELD,
                expected="intakes and coordinator of one release",
            )
        found = told.get(CALLER_KEY)
        return found if isinstance(found, bytes) else None

    def checked(self, der: bytes) -> Vouched:
        """Return the identity in a caller's certificate, which one of the authorities must have issued.

        Raises
        ------
        Refusal
            BAD_SIGNATURE.
        """
        try:
            certificate = x509.load_der_x509_certificate(der)
            issuer_of(certificate, self._authorities())
            pem = certificate.public_bytes(serialization.Encoding.PEM)
            return Vouched(PeerIdentity.from_certificate(pem), certificate.not_valid_after_utc.timestamp())
        except (CertificateError, ValueError) as error:
            raise Refusal(
                ErrorReason.ERROR_REASON_BAD_SIGNATURE,
                "a call was handed on with a certificate that no authority of this federation issued",
                field="certificate",
            ) from error
