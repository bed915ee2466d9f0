"""The certificate authority of a federation, and the one-time tokens that let a party enrol.

Certificates are X.509 with ECDSA P-256 keys (gRPC's TLS takes neither Ed25519 nor names that are URIs only).
Each says one role and one name, twice: as the URI ``coterie://role/name`` and as the DNS name
``name.role.coterie.internal`` that a caller verifies whatever address it dialled.  Both are chosen here, from
the token; nothing but the public key is taken from a request.  Assumed: ECDSA P-256 (unforgeable under chosen
messages) and SHA-256 (collision resistant).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coterie.crypto.clocks import BACKDATED_S, CLOCK_SKEW_S, moment
from coterie.crypto.explicit import encode
from coterie.crypto.id_tokens import is_subject_name
from coterie.crypto.keyfile import read_private_file, write_private_file
from coterie.errors import CertificateError, nearest

__all__ = [
    "CERTIFICATE_DAYS",
    "ROLES",
    "Authority",
    "PeerIdentity",
    "TokenRecord",
    "authority_name",
    "load_tls_key",
    "logical_name",
    "make_csr",
    "name_in",
    "new_tls_key",
    "new_token",
    "renewal_time",
    "requested_key",
    "save_tls_key",
    "token_hash",
    "validate_name",
    "validate_role",
    "validity_of",
]

ROLES = ("cos", "data-owner", "client", "decrypting-client", "thirdparty", "operator")
"""Roles that a certificate may give; the authorisation table uses them."""

CERTIFICATE_DAYS = 30
"""Validity of a party's certificate, days; parties renew it after two thirds of that."""

_DOMAIN = "coterie.internal"
_SCHEME = "coterie://"
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_BACKDATED = timedelta(seconds=BACKDATED_S)
_RENEWED_AT = 2 / 3
_TOKEN_BYTES = 32


def validate_role(role: str) -> str:
    """Return ``role`` if it is one of ``ROLES``.

    Raises
    ------
    CertificateError
        There is no such role.
    """
    if role not in ROLES:
        near = nearest(role, ROLES)
        raise CertificateError(
            f"unknown role {role!r}, expected one of {', '.join(ROLES)}",
            hint=f"did you mean {near!r}?" if near else None,
        )
    return role


def validate_name(name: str) -> str:
    """Return ``name`` if it is a lower-case DNS label.

    Raises
    ------
    CertificateError
        The name is no such label.
    """
    if _LABEL.fullmatch(name) is None:
        raise CertificateError(
            f"the name {name[:80]!r} is not a DNS label, expected 1 to 63 of a-z, 0-9 and inner '-'"
        )
    return name


def logical_name(role: str, name: str) -> str:
    """Return the DNS name by which a peer is verified, ``name.role.coterie.internal``.

    >>> logical_name("data-owner", "comedy")
    'comedy.data-owner.coterie.internal'

    Raises
    ------
    CertificateError
        The role or the name is not valid.
    """
    return f"{validate_name(name)}.{validate_role(role)}.{_DOMAIN}"


def name_in(role: str, tls_name: str) -> str:
    """Return the name in a logical name of a role, the inverse of `logical_name`.

    >>> name_in("data-owner", "comedy.data-owner.coterie.internal")
    'comedy'

    Raises
    ------
    CertificateError
        It is no logical name of that role: an address, or another role's.
    """
    name, _, _ = tls_name.partition(".")
    if logical_name(role, name) != tls_name:
        raise CertificateError(
            f"{tls_name[:80]!r} is no name of a {role}, expected {logical_name(role, name)!r}"
        )
    return name


def new_tls_key() -> ec.EllipticCurvePrivateKey:
    """Draw a P-256 key for a TLS certificate."""
    return ec.generate_private_key(ec.SECP256R1())


def save_tls_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Write a TLS key as PEM (PKCS#8) to a file of mode 0600.

    Raises
    ------
    CertificateError
        The file cannot be written.
    """
    write_private_file(
        path,
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


def load_tls_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a P-256 key that was written by ``save_tls_key``.

    Raises
    ------
    CertificateError
        The file is missing, readable by others, or holds no such key.
    """
    try:
        key = serialization.load_pem_private_key(read_private_file(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise CertificateError(f"{path} is no unencrypted private key in PEM") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise CertificateError(f"the key in {path} is not an ECDSA P-256 key, which certificates here need")
    return key


def make_csr(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a certificate request (PKCS#10, PEM) that proves possession of ``key`` and asks for no name."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@dataclass(frozen=True)
class PeerIdentity:
    """Role and name that a certificate gives its holder.

    Parameters
    ----------
    role : str
        One of ``ROLES``.
    name : str
        A DNS label, unique within the role.
    fingerprint : bytes
        SHA-256 of the certificate (DER), 32 bytes.
    """

    role: str
    name: str
    fingerprint: bytes

    @classmethod
    def from_certificate(cls, pem: bytes) -> Self:
        """Read role and name from a certificate, or from the first of a chain.

        TLS has verified the chain; here only the names are read, and checked against each other.

        Raises
        ------
        CertificateError
            ``pem`` is no certificate, or does not carry exactly one role and name of ours.
        """
        certificate = _load_certificate(pem)
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (x509.ExtensionNotFound, ValueError):
            raise CertificateError("the certificate carries no names, expected a coterie:// role") from None
        except (x509.UnsupportedGeneralNameType, x509.DuplicateExtension) as error:
            raise CertificateError(f"the certificate's extensions cannot be read: {error}") from None
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        if len(uris) != 1 or not uris[0].startswith(_SCHEME):
            raise CertificateError(
                f"the certificate carries the URIs {uris}, expected one {_SCHEME}role/name"
            )
        role, _, name = uris[0].removeprefix(_SCHEME).partition("/")
        expected = [logical_name(role, name)]
        dns = names.get_values_for_type(x509.DNSName)
        if dns != expected:
            raise CertificateError(f"the certificate of {role}/{name} is for {dns}, expected {expected}")
        return cls(role, name, certificate.fingerprint(hashes.SHA256()))

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"


def validity_of(pem: bytes) -> tuple[float, float]:
    """Return when a certificate was issued and when it ends, in Unix seconds.

    The validity begins a little before the issue, for peers whose clocks are behind.

    Raises
    ------
    CertificateError
        ``pem`` is no certificate.
    """
    certificate = _load_certificate(pem)
    end = certificate.not_valid_after_utc.timestamp()
    return min((certificate.not_valid_before_utc + _BACKDATED).timestamp(), end), end


def renewal_time(pem: bytes, share: float = _RENEWED_AT) -> float:
    """Return the time at which a share of a certificate's validity has passed and it is to be renewed, Unix seconds.

    Raises
    ------
    CertificateError
        ``pem`` is no certificate.
    """
    issued, end = validity_of(pem)
    return issued + share * (end - issued)


def authorities(pem: bytes) -> list[x509.Certificate]:
    """Return the authorities of a file of certificates: one, or two while one takes the place of the other.

    Raises
    ------
    ValueError
        A certificate is not in PEM, or not whole.
    """
    found = x509.load_pem_x509_certificates(pem)
    if len(found) != pem.count(b"-----BEGIN"):
        raise ValueError("a certificate is not whole")
    return found


def issuer_of(certificate: x509.Certificate, trusted: bytes) -> x509.Certificate:
    """Return which of some authorities (PEM) issued a certificate.

    Raises
    ------
    CertificateError
        None of them did; the message names the authority that did, and those that are trusted.
    ValueError
        The authorities are not certificates in PEM.
    """
    known = authorities(trusted)
    for one in known:
        try:
            certificate.verify_directly_issued_by(one)
        except (InvalidSignature, ValueError, TypeError):
            continue
        return one
    names = ", ".join(authority_name(one) for one in known)
    raise CertificateError(
        f"the third party's certificate is not the authority's: {certificate.issuer.rfc4514_string()} signed it, and "
        f"trusted are {names}",
        hint="ca.pem names the authorities that are trusted; while one takes the place of the other it has both",
    )


def authority_name(authority: x509.Certificate) -> str:
    """Return an authority's subject and the beginning of its fingerprint, for people."""
    fingerprint = authority.fingerprint(hashes.SHA256()).hex()[:16]
    return f"{authority.subject.rfc4514_string()} (SHA-256 {fingerprint})"


class Authority:
    """The certificate authority of one federation: a root that signs the certificates of all parties.

    Parameters
    ----------
    certificate : x509.Certificate
        The self-signed root.
    key : ec.EllipticCurvePrivateKey
        Its key.

    Raises
    ------
    CertificateError
        The key is not the certificate's.
    """

    __slots__ = ("_certificate", "_key")

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        if certificate.public_key() != key.public_key():
            raise CertificateError("the authority's key does not belong to its certificate")
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, name: str, days: int, *, now: datetime | None = None) -> Self:
        """Make a new root.

        Parameters
        ----------
        name : str
            Common name, for people; 1 to 64 characters.
        days : int
            Validity.
        now : datetime, optional
            Start of the validity; the present by default.

        Raises
        ------
        CertificateError
            The name or the number of days cannot be used.
        """
        if not 1 <= len(name) <= 64:
            raise CertificateError(f"the authority's name has {len(name)} characters, expected 1 to 64")
        begin, end = _validity(days, now)
        key = new_tls_key()
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        public = key.public_key()
        certificate = (
            _builder(subject, subject, public, begin, end)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(authority=True), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    def save(self, folder: Path) -> None:
        """Write ``ca.pem`` and, with mode 0600, ``ca-key.pem``.

        Raises
        ------
        CertificateError
            A file cannot be written.
        """
        save_tls_key(folder / "ca-key.pem", self._key)
        try:
            (folder / "ca.pem").write_bytes(self.certificate_pem)
        except OSError as error:
            raise CertificateError(f"cannot write {folder / 'ca.pem'}: {error.strerror}") from error

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the files that ``save`` wrote.

        Raises
        ------
        CertificateError
            A file is missing, the key is readable by others, or they do not belong together.
        """
        try:
            pem = (folder / "ca.pem").read_bytes()
        except OSError as error:
            raise CertificateError(f"cannot read {folder / 'ca.pem'}: {error.strerror}") from error
        return cls(_load_certificate(pem), load_tls_key(folder / "ca-key.pem"))

    @property
    def certificate_pem(self) -> bytes:
        """Root certificate, PEM, which every party trusts."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        csr_pem: bytes,
        role: str,
        name: str,
        days: float = CERTIFICATE_DAYS,
        *,
        now: datetime | None = None,
    ) -> bytes:
        """Issue a certificate for the key of a request, with the given role and name; the *caller* has checked both.

        Parameters
        ----------
        csr_pem : bytes
            Certificate request, PEM; every name and extension in it is ignored.
        role : str
            One of ``ROLES``.
        name : str
            A DNS label.
        days : float
            Validity; ends no later than the authority's own.
        now : datetime, optional
            Start of the validity; the present by default.

        Returns
        -------
        bytes
            The certificate, PEM, without the authority's.

        Raises
        ------
        CertificateError
            The request is malformed, not signed by its key or not for P-256; the role, name or days are not
            valid; the authority itself has expired.
        """
        host = logical_name(role, name)
        public = requested_key(csr_pem)
        begin, end = _validity(days, now)
        last = self._certificate.not_valid_after_utc
        if last <= begin + _BACKDATED:
            raise CertificateError(
                f"the authority's certificate expired at {last:%Y-%m-%d %H:%M} UTC",
                hint="create a new authority and enrol again",
            )
        names = [x509.UniformResourceIdentifier(f"{_SCHEME}{role}/{name}"), x509.DNSName(host)]
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            _builder(subject, self._certificate.subject, public, begin, min(end, last))
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)

    def __repr__(self) -> str:
        return f"<Authority {self._certificate.subject.rfc4514_string()}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Authority holds a secret and is never pickled")


@dataclass(frozen=True)
class TokenRecord:
    """The third party's record of a one-time enrolment token, with the token's hash and not the token.

    The store ensures that a token is used only once; this record says what the token allows.

    Parameters
    ----------
    token_hash : bytes
        SHA-256, 32 bytes.
    role, name : str
        Role and name that the token gives its holder.
    expiry : int
        First second at which the token is no longer valid, Unix seconds.
    max_participants : int
        For how many participants the holder may publish bundles.
    """

    token_hash: bytes
    role: str
    name: str
    expiry: int
    max_participants: int

    def matches(self, secret_text: str) -> bool:
        """Return whether a text is this token, compared in constant time."""
        try:
            return hmac.compare_digest(token_hash(secret_text), self.token_hash)
        except CertificateError:
            return False

    def expired(self, now: float) -> bool:
        """Return whether the token is over, by more than `CLOCK_SKEW_S`: its maker's clock may be another."""
        return now >= self.expiry + CLOCK_SKEW_S

    def check(self, secret_text: str, role: str, name: str, now: int) -> None:
        """Raise unless a text is this token, for this role and name, and still valid.

        Raises
        ------
        CertificateError
            Says what is wrong; the token is not in the message.
        """
        if not self.matches(secret_text):
            raise CertificateError("the enrolment token is not the expected one")
        if (role, name) != (self.role, self.name):
            raise CertificateError(
                f"the enrolment token was asked to enrol {role}/{name}, expected {self.role}/{self.name}"
            )
        if self.expired(now):
            raise CertificateError(
                f"the enrolment token expired at {moment(self.expiry)}, and this machine's clock says {moment(now)}",
                hint="ask the operator for a new token",
            )


def new_token(role: str, name: str, expiry: int, max_participants: int) -> tuple[str, TokenRecord]:
    """Draw a one-time enrolment token.

    Parameters
    ----------
    role, name : str
        Role and name that the token gives its holder.
    expiry : int
        First second at which the token is no longer valid, Unix seconds.
    max_participants : int
        For how many participants the holder may publish bundles; 0 for a party that speaks for nobody.

    Returns
    -------
    secret_text : str
        52 lower-case characters (base32 of 32 random bytes), shown once and handed to the party.
    record : TokenRecord
        The third party's record of the token.

    Raises
    ------
    CertificateError
        The role or name is not valid, the name is one of those that ID tokens give, or a number is negative.
    """
    validate_role(role)
    validate_name(name)
    if role == "client" and is_subject_name(name):
        raise CertificateError(
            f"the name {name!r} belongs to a subject of an issuer of ID tokens, which no token enrols",
            hint="choose another name",
        )
    if expiry < 0 or max_participants < 0:
        raise CertificateError(
            f"a token with expiry {expiry} for {max_participants} participants, expected no negative number"
        )
    text = base64.b32encode(os.urandom(_TOKEN_BYTES)).decode("ascii").rstrip("=").lower()
    return text, TokenRecord(token_hash(text), role, name, expiry, max_participants)


def token_hash(secret_text: str) -> bytes:
    """Return the SHA-256 under which a token is stored, 32 bytes; case and surrounding space do not matter.

    A plain hash is enough, because a token has 256 random bits and cannot be guessed.

    Raises
    ------
    CertificateError
        The text is not a token; it is not repeated in the message.
    """
    text = secret_text.strip().upper()
    try:
        secret = base64.b32decode(text + "=" * (-len(text) % 8))
    except (binascii.Error, ValueError):
        secret = b""
    if len(secret) != _TOKEN_BYTES:
        raise CertificateError(f"an enrolment token is {_TOKEN_BYTES} bytes in base32 (52 characters)")
    return hashlib.sha256(encode("enrolment-token", secret)).digest()


def _load_certificate(pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError:
        raise CertificateError("not a certificate in PEM") from None


def requested_key(csr_pem: bytes) -> ec.EllipticCurvePublicKey:
    """Return the key of a certificate request (PKCS#10, PEM), which has signed it.

    Raises
    ------
    CertificateError
        The request is malformed, not signed by its key or not for P-256.
    """
    try:
        request = x509.load_pem_x509_csr(csr_pem)
        public = request.public_key()
        signed = request.is_signature_valid
    except (ValueError, InvalidSignature, UnsupportedAlgorithm):
        raise CertificateError("not a certificate request in PEM that can be read") from None
    if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
        raise CertificateError("the certificate request is for another kind of key, expected ECDSA P-256")
    if not signed:
        raise CertificateError("the certificate request is not signed by the key that it names")
    return public


def _validity(days: float, now: datetime | None) -> tuple[datetime, datetime]:
    if not 0 < days <= 36_500:
        raise CertificateError(f"a certificate for {days} days, expected more than 0 and at most 36500")
    start = now or datetime.now(UTC)
    # A peer whose clock is a little behind should not refuse a fresh certificate.
    return start - _BACKDATED, start + timedelta(days=days)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    begin: datetime,
    end: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
