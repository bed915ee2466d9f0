"""The signature by which the holder of an expired certificate has it renewed."""

from __future__ import annotations

import hashlib

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.crypto.explicit import encode
from coterie.errors import CertificateError

__all__ = ["check_late_request", "sign_late_request"]

_PURPOSE = "late-renewal"


def _statement(certificate: x509.Certificate, request: bytes, third_party: str, time: int) -> bytes:
    der = certificate.public_bytes(serialization.Encoding.DER)
    return encode(_PURPOSE, third_party, hashlib.sha256(der).digest(), hashlib.sha256(request).digest(), time)


def sign_late_request(
    key: ec.EllipticCurvePrivateKey, certificate: bytes, request: bytes, third_party: str, time: int
) -> bytes:
    """Sign a request for the renewal of an expired certificate.

    Parameters
    ----------
    key : EllipticCurvePrivateKey
        That of the certificate.
    certificate, request : bytes
        The expired certificate, and the certificate request, PEM.
    third_party : str
        Name of the third party that is asked.
    time : int
        Unix seconds.

    Raises
    ------
    CertificateError
        ``certificate`` is none.
    """
    return key.sign(_statement(_loaded(certificate), request, third_party, time), ec.ECDSA(hashes.SHA256()))


def check_late_request(
    certificate: bytes, request: bytes, third_party: str, time: int, signature: bytes
) -> None:
    """Check that the holder of a certificate's key asks for its renewal, for the same key.

    Raises
    ------
    CertificateError
        It does not, or one of the two is malformed.
    """
    held = _loaded(certificate)
    key = held.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise CertificateError("the certificate's key is no ECDSA key")
    try:
        key.verify(signature, _statement(held, request, third_party, time), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise CertificateError("the request is not signed with the key of the certificate") from error
    try:
        wanted = x509.load_pem_x509_csr(request).public_key()
    except ValueError as error:
        raise CertificateError("the certificate request is malformed") from error
    if wanted != key:
        raise CertificateError("the request is for another key than that of the certificate")


def _loaded(pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise CertificateError("the certificate is not in PEM, or not whole") from error
