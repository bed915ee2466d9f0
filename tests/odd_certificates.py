"""Certificates that anybody can make and no library reads to its end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

__all__ = ["ODD_EXTENSIONS", "with_odd_extensions"]

ODD_EXTENSIONS = ("an X.400 address", "names twice")

_NAMES = x509.SubjectAlternativeName.oid


def with_odd_extensions(kind: str) -> bytes:
    """Return a certificate (PEM) whose extensions are of a kind that is not read."""
    if kind == "an X.400 address":
        only = x509.UnrecognizedExtension(_NAMES, b"\x30\x04\xa3\x02\x30\x00")
        return _signed(only).public_bytes(Encoding.PEM)
    names = x509.SubjectAlternativeName([x509.DNSName("one")])
    other = x509.UnrecognizedExtension(x509.ObjectIdentifier("2.5.29.77"), b"\x30\x00")
    der = _signed(names, other).public_bytes(Encoding.DER)
    twice = x509.load_der_x509_certificate(der.replace(b"\x06\x03\x55\x1d\x4d", b"\x06\x03\x55\x1d\x11"))
    return twice.public_bytes(Encoding.PEM)


def _signed(*extensions: x509.ExtensionType) -> x509.Certificate:
    key, now, nobody = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC), x509.Name([])
    builder = x509.CertificateBuilder(nobody, nobody, key.public_key(), 1, now, now + timedelta(days=1))
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(key, hashes.SHA256())
