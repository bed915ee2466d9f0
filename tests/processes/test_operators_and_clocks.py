"""Hosts whose operator's key was replaced while a run goes on, that know two operators, or whose clock is wrong."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto.operator_key import public_text
from coterie.errors import CertificateError
from coterie.launch.children import Child

from .programs import ProgramChild

HOST = "client/host-3"
DAY_S = 86_400
USERS = 40
FAKETIME = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)


def lasting(small):
    """Return settings of a run that goes on for longer than a test, in which one of four hosts may be away."""
    return small(
        system="fedncf",
        secure_sum="clear",
        split={"kind": "leave-last-out"},
        data={"synthetic": {"users": USERS, "items": 60, "interactions": 900}},
        rounds={
            "cohort": USERS,
            "group": USERS,
            "min_cohort": 5,
            "min_sum": 5,
            "passes": 50_000,
            "evaluate_every": 50_000,
            "patience": 0,
        },
        federation={"hosts": 4, "party_timeout_s": 3.0},
    )


def trust(child: Child, *keys: str) -> None:
    """Let a party know operators by these keys, and no others."""
    config = child.folder / "config.toml"
    text, replaced = re.subn(
        r"^operator_keys = .*$", f"operator_keys = {json.dumps(keys)}", config.read_text(), flags=re.M
    )
    assert replaced == 1
    config.write_text(text)


def another_key() -> str:
    return public_text(Ed25519PrivateKey.generate())


def said(running, party: str, words: str) -> bool:
    return words in running.children[party].log.read_text()


async def test_a_host_whose_operator_key_is_replaced_in_a_run_leaves_it_and_with_both_keys_goes_on(
    small, federation
):
    async with federation(lasting(small)) as running:
        await running.start()
        await running.a_round("a round of everybody", reason="", summed=USERS)
        host = running.children[HOST]
        (old,) = re.findall(r'^operator_keys = \["(.*)"\]$', (host.folder / "config.toml").read_text(), re.M)
        new = another_key()

        await host.stop()
        trust(host, new)
        host.start()
        words = "is not signed by an operator whom this party accepts"
        await running.comes_true(lambda: said(running, HOST, words), "the host leaves the run and says why")
        await running.a_round("a round without it", reason="", summed=USERS * 3 // 4)
        assert await running.first_health(HOST) == "NOT_SERVING"

        await host.stop()
        # In the time of the change parties know both.
        trust(host, new, old)
        host.start()
        await running.a_round("a round of everybody again", reason="", summed=USERS)
        await running.stop()


@pytest.mark.skipif(
    FAKETIME is None, reason="needs libfaketime, a library that gives a process another clock"
)
async def test_a_host_whose_clock_is_a_day_slow_says_so_and_ends_and_the_run_goes_on(small, federation):
    async with federation(lasting(small)) as running:
        await running.start()
        await running.a_round("a round of everybody", reason="", summed=USERS)
        right = running.children[HOST]
        wrong = with_clock(running, -DAY_S)
        await running.comes_true(lambda: not wrong.alive, "the host ends")
        assert wrong.process is not None
        assert wrong.process.returncode == CertificateError.exit_code
        assert re.search(
            r"this machine's clock says .* and the certificate in .* is valid from", wrong.last_words()
        )
        await running.a_round("a round without it", reason="", summed=USERS * 3 // 4)
        right.start()
        running.children[HOST] = right
        await running.a_round("a round of everybody again", reason="", summed=USERS)
        await running.stop()


@pytest.mark.skipif(
    FAKETIME is None, reason="needs libfaketime, a library that gives a process another clock"
)
async def test_a_host_whose_clock_is_a_day_fast_takes_part_while_its_certificate_is_valid(small, federation):
    async with federation(lasting(small)) as running:
        await running.start()
        await running.a_round("a round of everybody", reason="", summed=USERS)
        wrong = with_clock(running, DAY_S)
        await running.comes_true(lambda: said(running, HOST, tomorrow()), "the host is up with another clock")
        await running.a_round("a round of everybody again", reason="", summed=USERS)
        assert wrong.alive
        await running.stop()


def with_clock(running, off_s: int) -> ProgramChild:
    """Kill the host and start it again with a clock that is off by some seconds."""
    right = running.children[HOST]
    right.kill()
    clock = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": f"{off_s:+d}s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    wrong = ProgramChild(
        right.role, right.name, right.folder, program=["coterie", "serve", right.role], variables=clock
    )
    running.children[HOST] = wrong
    wrong.start()
    return wrong


def tomorrow() -> str:
    """Return the beginning of a timestamp of what a clock says that is a day fast."""
    return (datetime.now(UTC) + timedelta(days=1)).date().isoformat()
