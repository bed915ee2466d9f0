"""The id of a public Paillier key, as key records and the keys themselves compute it."""

from __future__ import annotations

import hashlib

from coterie.crypto.explicit import encode

__all__ = ["paillier_key_id"]


def paillier_key_id(
    modulus: bytes, set_public: bytes, bits: int, created: int, run: str, base: bytes
) -> bytes:
    """Return the id of a public Paillier key: SHA-256 of its explicit bytes, 32 bytes."""
    return hashlib.sha256(encode("paillier-key", modulus, set_public, bits, created, run, base)).digest()
