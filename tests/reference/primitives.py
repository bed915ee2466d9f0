"""The primitives under their own names; from bytes to bytes."""

import hashlib
import hmac

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM


class Refused(Exception):  # noqa: N818 - the book's word
    """Something that a peer said is not as the book has it."""


def ed25519_public(seed):
    """Return the public key of a seed."""
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def ed25519_sign(seed, message):
    """Return a signature, 64 bytes."""
    return Ed25519PrivateKey.from_private_bytes(seed).sign(message)


def ed25519_check(public, signature, message, what):
    """Refuse a signature that does not hold."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        raise Refused(f"{what}: the signature does not hold") from None


def x25519_public(secret):
    """Return the public key of a secret."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def x25519(secret, public):
    """Return the shared secret; a public key of low order is refused."""
    try:
        return X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise Refused("a public key of another size or of low order") from None


def hkdf(secret, info, salt=b""):
    """RFC 5869 with SHA-256, 32 bytes."""
    extracted = hmac.digest(salt or bytes(32), secret, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def gcm_seal(key, nonce, plain, associated=b""):
    """AES-256-GCM: ciphertext and tag."""
    return AESGCM(key).encrypt(nonce, plain, associated)


def gcm_open(key, nonce, sealed, associated=b""):
    """Return what was sealed, or refuse."""
    try:
        return AESGCM(key).decrypt(nonce, sealed, associated)
    except (InvalidTag, ValueError):
        raise Refused("what was sealed does not open") from None


def keystream(key, length):
    """Return AES-256 in counter mode from the block ``00..00 00000002``: the masks."""
    first = bytes(12) + (2).to_bytes(4, "big")
    return Cipher(algorithms.AES256(key), modes.CTR(first)).encryptor().update(bytes(length))


def sha256(data):
    """Return the digest."""
    return hashlib.sha256(data).digest()
