"""Beacons: randomness that the third party draws and signs for a run, so that nobody can choose the run's groups."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto.explicit import encode
from coterie.crypto.identity import check_signature
from coterie.crypto.verification import Reason, VerificationError

__all__ = ["BEACON_BYTES", "Beacon", "beacon_statement", "draw_beacon", "verify_beacon"]

BEACON_BYTES = 32
_BEACON = "beacon"


class Beacon(NamedTuple):
    """Random bytes for a run, with the directory's signature.

    Parameters
    ----------
    value : bytes
        32 bytes.
    signature : bytes
        The directory's, over label, run and value; 64 bytes.
    """

    value: bytes
    signature: bytes


def beacon_statement(run_id: str, value: bytes) -> bytes:
    """Return the bytes of a run's beacon that the directory signs."""
    return encode(_BEACON, run_id, value)


def draw_beacon(run_id: str, directory_key: Ed25519PrivateKey) -> Beacon:
    """Draw and sign a beacon for a run."""
    value = secrets.token_bytes(BEACON_BYTES)
    return Beacon(value, directory_key.sign(beacon_statement(run_id, value)))


def verify_beacon(run_id: str, value: bytes, signature: bytes, directory_key: bytes) -> None:
    """Check that the directory signed a beacon for this run.

    Parameters
    ----------
    run_id : str
    value, signature : bytes
    directory_key : bytes
        Raw Ed25519 public key of the directory, 32 bytes.

    Raises
    ------
    VerificationError
        MALFORMED or BAD_SIGNATURE.
    """
    if len(value) != BEACON_BYTES:
        raise VerificationError(Reason.MALFORMED, f"a beacon of {len(value)} bytes, expected {BEACON_BYTES}")
    check_signature(
        directory_key, signature, beacon_statement(run_id, value), "the beacon", Reason.BAD_SIGNATURE
    )
