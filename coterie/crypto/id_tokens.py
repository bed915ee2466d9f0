"""Binding of an issuer's ID tokens (OpenID Connect) to keys and names: nonce, name of a party, hash of a token.

Assumed: SHA-256 (collision resistant).
"""

from __future__ import annotations

import base64
import hashlib
import re

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.crypto.explicit import encode

__all__ = [
    "id_token_hash",
    "id_token_nonce",
    "is_id_token",
    "is_subject_name",
    "subject_hash",
    "subject_name",
]

_TOKEN = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")
_NAME = re.compile(r"oidc-[a-z2-7]{52}(-[1-9][0-9]?)?")


def is_id_token(text: str) -> bool:
    """Return whether a text has the form of an ID token: three parts of base64url, with points between.

    An enrolment token holds no point.
    """
    return _TOKEN.fullmatch(text.strip()) is not None


def id_token_hash(text: str) -> bytes:
    """Return the SHA-256 under which the third party stores an ID token, 32 bytes."""
    return hashlib.sha256(encode("id-token", text.strip())).digest()


def id_token_nonce(key: ec.EllipticCurvePublicKey) -> str:
    """Return the nonce that an ID token must carry to enrol a key: 43 characters of base64url.

    Parameters
    ----------
    key : ec.EllipticCurvePublicKey
        Public key of the certificate request.
    """
    public = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    digest = hashlib.sha256(encode("id-token-nonce", public)).digest()
    return base64.urlsafe_b64encode(digest).decode("ascii").rstrip("=")


def subject_hash(issuer: str, subject: str) -> bytes:
    """Return the hash that stands for a subject of an issuer in names and records, 32 bytes."""
    return hashlib.sha256(encode("id-token-subject", issuer, subject)).digest()


def subject_name(issuer: str, subject: str, device: int = 1) -> str:
    """Return the name of the party that a subject's ID token enrols.

    Parameters
    ----------
    issuer, subject : str
        Claims of the token.
    device : int
        Number of the device, from 1 to 99.

    Returns
    -------
    str
        ``oidc-`` and 52 characters of base32, for later devices followed by ``-`` and the number.
    """
    text = base64.b32encode(subject_hash(issuer, subject)).decode("ascii").rstrip("=").lower()
    return f"oidc-{text}" if device == 1 else f"oidc-{text}-{device}"


def is_subject_name(name: str) -> bool:
    """Return whether a name has the form of `subject_name`; no enrolment token is made for one."""
    return _NAME.fullmatch(name) is not None
