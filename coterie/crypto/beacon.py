"""Beacons: randomness that the third party draws and signs for a run, once the run's population is fixed.

Cohorts, groups and masking graphs follow from the population and its beacon.  The beacon is drawn after the population,
so nobody can choose either by the other.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto.explicit import encode, further
from coterie.crypto.identity import check_signature
from coterie.crypto.merkle import Tree, leaf_hash
from coterie.crypto.verification import Reason, VerificationError

__all__ = [
    "BEACON_BYTES",
    "Beacon",
    "SignedPart",
    "beacon_statement",
    "beginning_hash",
    "draw_beacon",
    "population_hash",
    "user_leaves",
    "verify_beacon",
    "wave_hash",
]

BEACON_BYTES = 32
_BEACON = "beacon"
_POPULATION = "population"
_USER = "population-user"
_AT_ONCE = 1 << 12


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


class SignedPart(NamedTuple):
    """Users of a run who came together, those of its beginning or of a wave, as the third party signs them.

    Parameters
    ----------
    users : int
        How many they are.
    devices : int
        Number of connections that speak for them.
    root : bytes
        Root of the tree over `user_leaves`, 32 bytes.
    """

    users: int
    devices: int
    root: bytes

    @classmethod
    def of(cls, participants: Sequence[bytes], devices: Sequence[str]) -> SignedPart:
        """Return the part of these users; parameters are those of `population_hash`."""
        tree = Tree.of(user_leaves(participants, devices))
        return cls(len(tree), len(set(devices)), tree.root())


def user_leaves(participants: Iterable[bytes], devices: Sequence[str]) -> Iterator[bytes]:
    """Yield the leaf of each user in the tree of its part, 32 bytes; parameters are those of `population_hash`."""
    head = encode(_USER)
    named = {device: further(_USER, device) for device in set(devices)}
    # All ids have one length, so their lengths are encoded once.
    begun = {}
    for participant, device in zip(participants, devices, strict=True):
        length = len(participant)
        if length not in begun:
            field = further(_USER, participant)
            begun[length] = head + field[: len(field) - length]
        yield leaf_hash(begun[length] + participant + named[device])


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
    while some := list(islice(users, _AT_ONCE)):
        digest.update(
            b"".join([further(_POPULATION, participant) + named[device] for participant, device in some])
        )
    return digest.digest()


def beginning_hash(run_id: str, population_sha256: bytes, part: SignedPart) -> bytes:
    """Return the SHA-256 of the users of a run's beginning as the first wave follows them, 32 bytes.

    Parameters
    ----------
    run_id : str
    population_sha256 : bytes
        As `population_hash` gives it.
    part : SignedPart
        The same users.
    """
    return hashlib.sha256(encode("population-beginning", run_id, population_sha256, *part)).digest()


def wave_hash(run_id: str, number: int, from_pass: int, before_sha256: bytes, part: SignedPart) -> bytes:
    """Return the SHA-256 of a run's population up to and with a wave of users who came later, 32 bytes.

    Parameters
    ----------
    run_id : str
    number : int
        Number of the wave, from 1.
    from_pass : int
        First pass in which its users take part.
    before_sha256 : bytes
        Hash of the population before the wave: of the wave before it, or `beginning_hash`.
    part : SignedPart
        The wave's users.
    """
    return hashlib.sha256(encode("population-wave", run_id, number, from_pass, before_sha256, *part)).digest()


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
