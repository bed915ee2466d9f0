"""Beacons: randomness that the third party draws and signs for a run, once the run's population is fixed.

Cohorts, groups and masking graphs follow from the population and its beacon.  The beacon is drawn after the population,
so nobody can choose either by the other.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto.explicit import encode, further
from coterie.crypto.identity import check_signature
from coterie.crypto.verification import Reason, VerificationError

__all__ = ["BEACON_BYTES", "Beacon", "beacon_statement", "draw_beacon", "population_hash", "verify_beacon"]

BEACON_BYTES = 32
_BEACON = "beacon"
_POPULATION = "population"
_PART = 1 << 12


class Beacon(NamedTuple):
    """Random bytes for a run, with the directory's signature.

    Parameters
    ----------
    value : bytes
        32 bytes.
    signature : bytes
        The directory's, over label, run, hash of the population, and value; 64 bytes.
    """

    value: bytes
    signature: bytes


def beacon_statement(run_id: str, population_sha256: bytes, value: bytes) -> bytes:
    """Return the bytes of a beacon for a population of a run that the directory signs."""
    return encode(_BEACON, run_id, population_sha256, value)


def population_hash(run_id: str, participants: Sequence[bytes], devices: Sequence[str]) -> bytes:
    """Return the SHA-256 of a run's population, 32 bytes: label, run, number of users, then each user's two fields.

    Parameters
    ----------
    run_id : str
    participants : sequence of bytes
        Ids of the users' participants, in the population's order.
    devices : sequence of str
        Name of the connection that speaks for each.
    """
    digest = hashlib.sha256(encode(_POPULATION, run_id, len(participants)))
    named = {device: further(_POPULATION, device) for device in set(devices)}
    # In parts: the encoding of a million users has as many bytes as all other things of a run together.
    users = zip(participants, devices, strict=True)
    while part := list(islice(users, _PART)):
        digest.update(
            b"".join([further(_POPULATION, participant) + named[device] for participant, device in part])
        )
    return digest.digest()


def draw_beacon(run_id: str, population_sha256: bytes, directory_key: Ed25519PrivateKey) -> Beacon:
    """Draw and sign a beacon for the population of a run, which `population_hash` names."""
    value = secrets.token_bytes(BEACON_BYTES)
    return Beacon(value, directory_key.sign(beacon_statement(run_id, population_sha256, value)))


def verify_beacon(
    run_id: str, population_sha256: bytes, value: bytes, signature: bytes, directory_key: bytes
) -> None:
    """Check that the directory signed a beacon for this population of this run.

    Parameters
    ----------
    run_id : str
    population_sha256 : bytes
        As `population_hash` gives it.
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
    signed = beacon_statement(run_id, population_sha256, value)
    check_signature(directory_key, signature, signed, "the beacon", Reason.BAD_SIGNATURE)
