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

__all__ = [
    "BEACON_BYTES",
    "Beacon",
    "beacon_statement",
    "draw_beacon",
    "population_hash",
    "verify_beacon",
    "wave_hash",
]

BEACON_BYTES = 32
_BEACON = "beacon"
_POPULATION = "population"
_WAVE = "population-wave"
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
    return _users_hash(_POPULATION, encode(_POPULATION, run_id, len(participants)), participants, devices)


def wave_hash(
    run_id: str,
    number: int,
    from_pass: int,
    before_sha256: bytes,
    participants: Sequence[bytes],
    devices: Sequence[str],
) -> bytes:
    """Return the SHA-256 of a run's population up to and with a wave of users who came later, 32 bytes.

    Parameters
    ----------
    run_id : str
    number : int
        Number of the wave, from 1.
    from_pass : int
        First pass in which its users take part.
    before_sha256 : bytes
        Hash of the population before the wave: of the wave before it, or `population_hash`.
    participants, devices
        Of the wave's users, as for `population_hash`.
    """
    head = encode(_WAVE, run_id, number, from_pass, before_sha256, len(participants))
    return _users_hash(_WAVE, head, participants, devices)


def _users_hash(own_label: str, head: bytes, participants: Sequence[bytes], devices: Sequence[str]) -> bytes:
    """Return the SHA-256 of an encoding that begins with ``head`` and has two fields of each user."""
    digest = hashlib.sha256(head)
    named = {device: further(own_label, device) for device in set(devices)}
    # In parts: the encoding of a million users has as many bytes as all other things of a run together.
    users = zip(participants, devices, strict=True)
    while part := list(islice(users, _PART)):
        digest.update(
            b"".join([further(own_label, participant) + named[device] for participant, device in part])
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
