"""The beacon of a run: drawn by the third party, bound to the run, kept for good."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto.beacon import Beacon, draw_beacon, verify_beacon
from coterie.crypto.verification import VerificationError
from coterie.store.thirdparty import ThirdPartyStore

DIRECTORY = Ed25519PrivateKey.generate()
KEY = DIRECTORY.public_key().public_bytes_raw()


def test_a_beacon_verifies_for_its_run_under_the_directorys_key_and_nothing_else():
    beacon = draw_beacon("a-run", DIRECTORY)
    assert len(beacon.value) == 32
    verify_beacon("a-run", *beacon, KEY)
    other = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    for run, value, signature, key in (
        ("b-run", beacon.value, beacon.signature, KEY),
        ("a-run", bytes(32), beacon.signature, KEY),
        ("a-run", beacon.value[:31], beacon.signature, KEY),
        ("a-run", beacon.value, b"", KEY),
        ("a-run", beacon.value, beacon.signature, other),
        ("a-run", beacon.value, beacon.signature, b""),
    ):
        with pytest.raises(VerificationError):
            verify_beacon(run, value, signature, key)


def test_no_two_drawings_are_alike():
    assert len({draw_beacon("a-run", DIRECTORY).value for _ in range(100)}) == 100


async def test_a_run_keeps_the_first_beacon_also_after_a_restart(tmp_path: Path):
    first, second = (draw_beacon("a-run", DIRECTORY) for _ in range(2))
    store = ThirdPartyStore(tmp_path / "thirdparty.db")
    assert await store.beacon("a-run", first) == first
    assert await store.beacon("a-run", second) == first
    store.close()
    store = ThirdPartyStore(tmp_path / "thirdparty.db")
    assert await store.beacon("a-run", second) == first
    assert await store.beacon("b-run", second) == Beacon(*second)
    store.close()
