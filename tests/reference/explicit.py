"""Explicit bytes (docs/spec/explicit-bytes.md)."""

import hashlib


def encode(purpose, *fields):
    """Return label and fields, each field behind its length."""
    found = b"coterie/v1/" + purpose.encode("ascii")
    for field in fields:
        if isinstance(field, str):
            field = field.encode("utf-8")
        elif isinstance(field, int):
            field = field.to_bytes(8, "big")
        found += len(field).to_bytes(4, "big") + field
    return found


def digest(purpose, *fields):
    """Return the SHA-256 of explicit bytes."""
    return hashlib.sha256(encode(purpose, *fields)).digest()
