"""The beacon of a run: drawn by the third party for a population, bound to both, kept for good."""

import hashlib
import itertools
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto.beacon import draw_beacon, population_hash, verify_beacon
from coterie.crypto.explicit import encode
from coterie.crypto.verification import VerificationError
from coterie.store.thirdparty import Published, Redemption, ThirdPartyStore
from coterie.wire.refusal import ErrorReason, Refusal

DIRECTORY = Ed25519PrivateKey.generate()
KEY = DIRECTORY.public_key().public_bytes_raw()
PEOPLE = [bytes([n]) * 32 for n in range(4)]
DEVICES = ["client/a", "client/b", "client/a", "client/b"]
POPULATION = population_hash("a-run", PEOPLE, DEVICES)


def test_a_beacon_verifies_for_its_run_and_population_under_the_directorys_key_and_nothing_else():
    beacon = draw_beacon("a-run", POPULATION, DIRECTORY)
    assert len(beacon.value) == 32
    verify_beacon("a-run", POPULATION, *beacon, KEY)
    other = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    for run, population, value, signature, key in (
        ("b-run", POPULATION, beacon.value, beacon.signature, KEY),
        ("a-run", bytes(32), beacon.value, beacon.signature, KEY),
        ("a-run", b"", beacon.value, beacon.signature, KEY),
        ("a-run", POPULATION, bytes(32), beacon.signature, KEY),
        ("a-run", POPULATION, beacon.value[:31], beacon.signature, KEY),
        ("a-run", POPULATION, beacon.value, b"", KEY),
        ("a-run", POPULATION, beacon.value, beacon.signature, other),
        ("a-run", POPULATION, beacon.value, beacon.signature, b""),
    ):
        with pytest.raises(VerificationError):
            verify_beacon(run, population, value, signature, key)


def test_the_hash_of_a_population_covers_the_run_every_user_every_device_and_the_order():
    others = [
        population_hash("b-run", PEOPLE, DEVICES),
        population_hash("a-run", PEOPLE[:3], DEVICES[:3]),
        population_hash("a-run", PEOPLE[::-1], DEVICES[::-1]),
        population_hash("a-run", [*PEOPLE[:3], b"z" * 32], DEVICES),
        population_hash("a-run", PEOPLE, [*DEVICES[:3], "client/c"]),
    ]
    assert len({POPULATION, *others}) == 1 + len(others)


def test_the_hash_of_very_many_users_is_that_of_the_encoding_as_a_whole():
    people = [n.to_bytes(32) for n in range(9_000)]
    devices = [f"client/{n % 3}" for n in range(9_000)]
    fields = itertools.chain.from_iterable(zip(people, devices, strict=True))
    whole = encode("population", "a-run", len(people), *fields)
    assert population_hash("a-run", people, devices) == hashlib.sha256(whole).digest()


def test_no_two_drawings_are_alike():
    assert len({draw_beacon("a-run", POPULATION, DIRECTORY).value for _ in range(100)}) == 100


# --- at the third party ----------------------------------------------------------------------------------------------


def draw(sha256):
    return draw_beacon("a-run", sha256, DIRECTORY)


CHAIN = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


def opened(folder: Path) -> ThirdPartyStore:
    return ThirdPartyStore(folder / "thirdparty.db")


@pytest.fixture
async def store(tmp_path: Path):
    """The store of a third party with which two hosts of two users each have enrolled."""
    one = opened(tmp_path)
    for number, device in enumerate(("client/a", "client/b")):
        token = Redemption(bytes([number]) * 32, device, 2, bytes(32), bytes([number]) * 32, CHAIN, 0)
        own = [who for who, at in zip(PEOPLE, DEVICES, strict=True) if at == device]
        await one.enrol(token, [Published(who, 1, b"bundle", b"signed") for who in own])
    yield one
    one.close()


async def refused(store, participants, devices, run="a-run"):
    with pytest.raises(Refusal) as caught:
        await store.commit_population(run, participants, devices, draw)
    return caught.value


async def test_a_run_keeps_its_first_population_and_beacon_also_after_a_restart(store, tmp_path):
    first = await store.commit_population("a-run", PEOPLE, DEVICES, draw)
    verify_beacon("a-run", POPULATION, *first, KEY)
    assert await store.commit_population("a-run", PEOPLE, DEVICES, draw) == first
    again = opened(tmp_path)
    assert await again.commit_population("a-run", PEOPLE, DEVICES, draw) == first
    again.close()


async def test_another_population_of_the_same_run_is_refused_and_another_run_may_have_it(store):
    first = await store.commit_population("a-run", PEOPLE, DEVICES, draw)
    refusal = await refused(store, PEOPLE[:3], DEVICES[:3])
    assert refusal.reason == ErrorReason.ERROR_REASON_CONFLICT
    assert "this run has another population" in refusal.message
    assert await store.commit_population("b-run", PEOPLE[:3], DEVICES[:3], draw) != first
    assert await store.commit_population("a-run", PEOPLE, DEVICES, draw) == first


@pytest.mark.parametrize(
    ("participants", "devices", "count"),
    [
        ([*PEOPLE, b"z" * 32], [*DEVICES, "client/a"], 1),
        (PEOPLE, [*DEVICES[:3], "client/nobody"], 1),
        (PEOPLE, DEVICES[::-1], 4),
    ],
    ids=["a stranger", "a device that nobody has", "devices of others"],
)
async def test_a_user_who_is_not_enrolled_or_by_another_device_is_refused(
    store, participants, devices, count
):
    refusal = await refused(store, participants, devices)
    assert refusal.reason == ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT
    assert f"{count} users are not enrolled, or by another party" in refusal.message
    # Nothing was fixed.
    await store.commit_population("a-run", PEOPLE, DEVICES, draw)


async def test_a_revoked_user_is_refused_before_the_population_is_fixed_and_stays_in_it_afterwards(store):
    await store.commit_population("b-run", PEOPLE, DEVICES, draw)
    await store.revoke([PEOPLE[2]], [])
    assert (await refused(store, PEOPLE, DEVICES)).reason == ErrorReason.ERROR_REASON_REVOKED
    await store.commit_population("b-run", PEOPLE, DEVICES, draw)
    await store.commit_population("a-run", [*PEOPLE[:2], PEOPLE[3]], [*DEVICES[:2], DEVICES[3]], draw)
