"""Sign parties' certificates and participants' bundles with the third party's keys."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import structlog
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto import clocks
from coterie.crypto.authority import (
    PeerIdentity,
    authorities,
    authority_name,
    issuer_of,
    load_tls_key,
    make_csr,
    new_tls_key,
    renewal_time,
    save_tls_key,
)
from coterie.crypto.beacon import Beacon, draw_beacon
from coterie.crypto.clocks import apart, moment
from coterie.crypto.identity import Validity, countersign
from coterie.crypto.keyfile import write_private_file
from coterie.crypto.transparency import LogKey, bundle_statement
from coterie.errors import CertificateError, CryptoError
from coterie.net.credentials import TlsFiles
from coterie.secure_sum.bundles import bundle_from_wire, bundle_to_wire
from coterie.store.authority import DirectorySecrets
from coterie.store.thirdparty import Published
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1.common_pb2 import KeyBundle
from coterie_thirdparty.sealing_keys import SealingKeys

_log = structlog.get_logger("coterie.thirdparty")

__all__ = ["PER_MESSAGE", "Certification", "Countersigned", "Issued", "check_count", "unusable_request"]

PER_MESSAGE = 1_000
"""Most bundles in one message."""

_RENEWABLE_AT = 0.5
"""Share of its validity after which a certificate may be renewed."""


class Issued(NamedTuple):
    """A newly issued certificate."""

    chain: bytes
    """The certificate and the authority's, PEM."""
    fingerprint: bytes
    """SHA-256 of the certificate, 32 bytes."""
    public_key_hash: bytes
    """SHA-256 of the certificate's public key (DER), 32 bytes."""


class Countersigned(NamedTuple):
    """A bundle with the directory's countersignature."""

    published: Published
    signature: bytes
    """The directory's signature, 64 bytes."""


def check_count(count: int, limit: int, field: str) -> None:
    """Refuse a list that is too long.

    Raises
    ------
    Refusal
        TOO_LARGE.
    """
    if count > limit:
        raise Refusal(
            ErrorReason.ERROR_REASON_TOO_LARGE, f"{count} {field}", field=field, expected=f"at most {limit}"
        )


def unusable_request(error: CertificateError) -> Refusal:
    """Return the refusal of a certificate request that cannot be used."""
    return Refusal(
        ErrorReason.ERROR_REASON_INVALID_FIELD,
        error.message,
        field="certificate_request",
        expected="PKCS#10 in PEM, signed by its ECDSA P-256 key",
    )


def _trusted(tls: TlsFiles, authority: bytes) -> bytes:
    """Return the authorities that a third party trusts: its own, and those of its folder that can sign for anybody.

    An expired certificate, and one that is no authority's, are left out for good; so is all of a damaged file.
    """
    own = x509.load_pem_x509_certificate(authority)
    try:
        held = tls.authority.read_bytes()
        known = authorities(held)
    except FileNotFoundError:
        return authority
    except (OSError, ValueError) as error:
        _log.warning("trusts its own authority alone", file=str(tls.authority), error=str(error))
        return authority
    wanted: list[x509.Certificate] = []
    for one in known:
        problem = None if one == own else _unfit(one)
        if problem is not None:
            _log.warning(
                "an authority is not trusted any more", authority=authority_name(one), reason=problem
            )
        elif one not in wanted:
            wanted.append(one)
    if own not in wanted:
        wanted.insert(0, own)
    if wanted == known:
        return held
    return b"".join(one.public_bytes(serialization.Encoding.PEM) for one in wanted)


def _unfit(certificate: x509.Certificate) -> str | None:
    """Return why a certificate can be no authority's; None when it can."""
    if clocks.now_s() >= certificate.not_valid_after_utc.timestamp():
        return f"it expired at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    try:
        is_authority = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        is_authority = False
    return None if is_authority else "it is no certificate of an authority"


class Certification:
    """Signs with the authority's and the directory's keys, for enrolment and the key directory.

    Parameters
    ----------
    secrets : DirectorySecrets
        The authority's and the directory's keys.
    days : float
        Validity of certificates, days.

    Raises
    ------
    CertificateError
        The authority's certificate begins later than this machine's clock says.
    """

    def __init__(self, secrets: DirectorySecrets, days: float) -> None:
        self._secrets = secrets
        self._days = days
        self.directory_key = secrets.directory_key
        root = x509.load_pem_x509_certificate(secrets.authority.certificate_pem)
        self._ends = root.not_valid_after_utc.timestamp()
        begins, now = root.not_valid_before_utc.timestamp(), clocks.now_s()
        if now < begins:
            raise CertificateError(
                f"this machine's clock says {moment(now)}, and the authority's certificate is valid from "
                f"{moment(begins)}",
                hint=f"the clock of the third party is {apart(now - begins, 'that of the maker of the authority')}, or "
                "more: set it and start the process again",
            )

    @property
    def valid(self) -> bool:
        """Whether the authority's own certificate has not expired."""
        return clocks.now_s() < self._ends

    @staticmethod
    def check_due(shown: bytes) -> None:
        """Check that a certificate (PEM) is old enough to be renewed, which bounds certificates per party.

        Raises
        ------
        Refusal
            NOT_READY before half of its validity is over.
        """
        left = renewal_time(shown, _RENEWABLE_AT) - clocks.now_s()
        if left > 0:
            raise Refusal(
                ErrorReason.ERROR_REASON_NOT_READY,
                f"this certificate is renewed in {math.ceil(left)} s at the earliest",
                field="certificate",
                expected="half of its validity to be over",
            )

    def issue(self, request: bytes, role: str, name: str) -> Issued:
        """Sign a certificate for the key of a certificate request (PEM).

        Raises
        ------
        Refusal
            NOT_READY when the authority has expired, INVALID_FIELD for a request that cannot be used.
        """
        if not self.valid:
            raise Refusal(
                ErrorReason.ERROR_REASON_NOT_READY,
                "the authority's certificate has expired",
                field="authority",
            )
        try:
            return self._issue(request, role, name)
        except CertificateError as error:
            raise unusable_request(error) from error

    def _issue(self, request: bytes, role: str, name: str) -> Issued:
        pem = self._secrets.authority.issue(request, role, name, self._days)
        public = x509.load_pem_x509_certificate(pem).public_key()
        key = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        return Issued(
            chain=pem + self._secrets.authority.certificate_pem,
            fingerprint=PeerIdentity.from_certificate(pem).fingerprint,
            public_key_hash=hashlib.sha256(key).digest(),
        )

    def certify_self(self, tls: TlsFiles, name: str) -> bool:
        """Certify the third party itself, when it has no certificate, a damaged one, or one past half of its validity.

        That is before other parties renew theirs, for which they need the third party.  The key stays; running servers
        use the new certificate from the next handshake on.

        Returns
        -------
        bool
            Whether a new certificate was issued.

        Raises
        ------
        CertificateError
            When the folder holds another party's certificate, or cannot be written.
        """
        authority = self._secrets.authority.certificate_pem
        trusted = _trusted(tls, authority)
        if (
            tls.complete()
            and tls.authority.read_bytes() == trusted
            and self._signed(tls)
            and tls.damage() is None
        ):
            held = tls.identity()
            if (held.role, held.name) != ("thirdparty", name):
                raise CertificateError(
                    f"the certificate in {tls.folder} is {held}'s, and this is thirdparty/{name}",
                    hint="give every process a state folder of its own, and keep its name",
                )
            if clocks.now_s() < renewal_time(tls.chain.read_bytes(), _RENEWABLE_AT):
                return False
        tls.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not tls.key.exists():
            save_tls_key(tls.key, new_tls_key())
        issued = self._issue(make_csr(load_tls_key(tls.key)), "thirdparty", name)
        write_private_file(tls.authority, trusted)
        write_private_file(tls.chain, issued.chain)
        _log.info("trusts authorities", authorities=[authority_name(one) for one in authorities(trusted)])
        return True

    def _signed(self, tls: TlsFiles) -> bool:
        """Return whether the present authority signed the certificate in a folder, and not an earlier one."""
        try:
            issuer_of(
                x509.load_pem_x509_certificate(tls.chain.read_bytes()),
                self._secrets.authority.certificate_pem,
            )
        except (CertificateError, ValueError):
            return False
        return True

    def log_key(self, key: Ed25519PrivateKey) -> LogKey:
        """Return a key that signs heads of the transparency log, certified by the directory's key."""
        return LogKey(key, self._secrets.signing_key)

    def sealing_keys(self, path: Path) -> SealingKeys:
        """Return the keys to which users seal requests, kept in a file and signed with the directory's key."""
        return SealingKeys(path, self._secrets.signing_key)

    def beacon(self, run_id: str, population_sha256: bytes) -> Beacon:
        """Draw and sign a beacon for the population of a run."""
        return draw_beacon(run_id, population_sha256, self._secrets.signing_key)

    def countersign(self, messages: Sequence[KeyBundle], party: str) -> list[Countersigned]:
        """Verify and countersign a party's bundles; about 0.1 ms each, so call it in a thread.

        The party is part of what is signed: the one of the token or certificate, whatever the messages say.

        Raises
        ------
        Refusal
            BAD_SIGNATURE for a bundle that does not verify or has expired.
        """
        now = clocks.now()
        return [self._countersign(message, party, now) for message in messages]

    def _countersign(self, message: KeyBundle, party: str, now: int) -> Countersigned:
        try:
            bundle = countersign(bundle_from_wire(message), self._secrets.signing_key, party)
            Validity(bundle.not_before, bundle.not_after).check("the key bundle", now)
        except CryptoError as error:
            raise Refusal(
                ErrorReason.ERROR_REASON_BAD_SIGNATURE,
                error.message,
                field="bundles",
                expected="bundles that are valid now and signed by their participants",
            ) from error
        content = bundle_to_wire(bundle).SerializeToString(deterministic=True)
        return Countersigned(
            Published(bundle.participant_id, bundle.version, content, bundle_statement(bundle)),
            bundle.countersignature,
        )
