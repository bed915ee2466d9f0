"""Federations of parties whose clocks are wrong: by ten minutes nothing happens, by a day the refusal says whose.

A party has its wrong clock from its first start on, before it has enrolled.
"""

import asyncio
import contextlib
import re
import urllib.request
from pathlib import Path

import pytest

from coterie.crypto.clocks import BACKDATED_S, CLOCK_SKEW_S
from coterie.errors import CertificateError, CoterieError
from coterie.studies.run_data import load, make_feed
from coterie.wire.refusal import Refusal

from .patience import ANOTHER_FORM
from .programs import ProgramChild
from .running import Running

FAKETIME = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)
pytestmark = pytest.mark.skipif(
    FAKETIME is None,
    reason="needs libfaketime (Debian's package libfaketime), which gives a process its own clock",
)

DAY_S = 86_400
BUSY_S = 200
"""Time that a start or a call may take on a machine that is busy, seconds: measured differences are off by so much."""
USERS = 24
HOST, COS, THIRD_PARTY, HOLDER = "client/host-1", "cos/cos", "thirdparty/directory", "decrypting-client/key-1"
OWNER = "data-owner/catalogue"
ROUNDS = {
    "cohort": USERS,
    "group": USERS,
    "min_cohort": 5,
    "min_sum": 5,
    "passes": 5_000,
    "evaluate_every": 5_000,
}


class Wrong(Running):
    """A federation in which one party has another clock, which a test may set again while the party runs."""

    party = ""
    off_s = 0

    def _configure(self):
        laid = super()._configure()
        right = self.children[self.party]
        self.clock = right.folder / "clock"
        self.set_clock(self.off_s)
        wrong = self.children[self.party] = ProgramChild(
            right.role,
            right.name,
            right.folder,
            program=["coterie", "serve", right.role],
            variables={
                "LD_PRELOAD": str(FAKETIME),
                "FAKETIME_TIMESTAMP_FILE": str(self.clock),
                "FAKETIME_NO_CACHE": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            },
        )
        self._late = [wrong if child is right else child for child in self._late]
        return laid

    def set_clock(self, off_s):
        """Let the clock of the party be off by some seconds from now on."""
        new = self.clock.with_suffix(".new")
        new.write_text(f"{off_s:+d}s\n")
        new.replace(self.clock)

    def off(self, service, party):
        """Return by how much a service says that the clock of a party is ahead, seconds; None when it says nothing."""
        with urllib.request.urlopen(f"http://{self.metrics[service]}/metrics", timeout=10) as page:
            found = re.search(
                rf'^coterie_clock_skew_seconds{{.*party="{party}".*}} (\S+)$', page.read().decode(), re.M
            )
        return None if found is None else float(found.group(1))


@pytest.fixture
def wrong(small, tmp_path):
    """Return a function that makes a federation in which a party's clock is off."""

    def make(party, off_s, secure_sum="masked", **changes):
        settings = small(
            **{
                "system": "fedncf",
                "secure_sum": secure_sum,
                "split": {"kind": "leave-last-out"},
                "data": {"synthetic": {"users": USERS, "items": 60, "interactions": 700}},
                "rounds": ROUNDS,
                "encryption": {"bits": 1024, "comparison": True},
                "federation": {"hosts": 3, "party_timeout_s": 5.0},
                **changes,
            }
        )
        made = Wrong(settings, make_feed(settings, load(settings), 0), tmp_path)
        made.party, made.off_s = party, off_s
        return made

    return make


def sum_for(party):
    """Return a secure sum in which a party takes part."""
    return "encrypted" if party == HOLDER else "masked"


# --- ten minutes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("party", "off_s"),
    [
        (HOST, CLOCK_SKEW_S),
        (COS, -CLOCK_SKEW_S),
        (THIRD_PARTY, -CLOCK_SKEW_S),
        (HOLDER, CLOCK_SKEW_S),
        pytest.param(HOST, -CLOCK_SKEW_S, marks=ANOTHER_FORM),
        pytest.param(COS, CLOCK_SKEW_S, marks=ANOTHER_FORM),
        pytest.param(THIRD_PARTY, CLOCK_SKEW_S, marks=ANOTHER_FORM),
        pytest.param(HOLDER, -CLOCK_SKEW_S, marks=ANOTHER_FORM),
    ],
)
async def test_a_clock_that_is_ten_minutes_off_disturbs_no_round_and_is_measured(wrong, party, off_s):
    async with wrong(party, off_s, sum_for(party)) as running:
        await running.start()
        await running.a_round("a round of everybody", reason="", summed=USERS)
        await running.a_round("another one", reason="", summed=USERS)
        # The COS measures its callers; the others measure the COS, which calls nobody but the third party.
        service, whose, sign = {
            COS: (THIRD_PARTY, COS, 1),
            THIRD_PARTY: (THIRD_PARTY, HOST, -1),
        }.get(party, (COS, party, 1))
        await running.comes_true(lambda: running.off(service, whose) is not None, "the clock is measured")
        assert abs(running.off(service, whose) - sign * off_s) < BUSY_S
        if party == HOST:
            running.set_clock(0)
            await running.comes_true(lambda: running.off(service, whose) is None, "the clock is right again")
            await running.a_round("a round with the right clock", reason="", summed=USERS)
        await running.stop()


@pytest.mark.parametrize("off_s", [CLOCK_SKEW_S, pytest.param(-CLOCK_SKEW_S, marks=ANOTHER_FORM)])
async def test_a_data_owner_whose_clock_is_ten_minutes_off_is_visited(wrong, off_s):
    changes = {
        "system": "drift",
        "split": {},
        "rounds": {},
        "drift": {"form": "shielded", "dim": 8, "epochs": 2, "k_min": 3, "window": 40},
        "federation": {"owners": 3, "hosts": 3},
    }
    running = wrong("", off_s, **changes)
    running.party = f"data-owner/{running.feed.partition.names[0]}"
    async with running:
        await running.start()
        assert (await running.finish())["phase"] == "done"


# --- a day -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "party", [HOST, COS, *(pytest.param(party, marks=ANOTHER_FORM) for party in (HOLDER, OWNER))]
)
async def test_a_party_whose_clock_is_a_day_slow_ends_and_says_whose_clock_is_off(wrong, party):
    async with wrong(party, -DAY_S, sum_for(party), federation={"hosts": 2}) as running:
        starting = asyncio.create_task(running.start())
        said = await last_words(running, party, CertificateError.exit_code)
        assert re.search(
            r"this machine's clock says .*, and the authority's certificate in .* is valid from", said
        )
        behind = re.search(rf"the clock of {party} is (\d+) s behind the third party's, or more", said)
        assert abs(int(behind.group(1)) - (DAY_S - BACKDATED_S)) < BUSY_S
        await given_up(starting)


@pytest.mark.parametrize(
    "party", [HOST, *(pytest.param(party, marks=ANOTHER_FORM) for party in (HOLDER, OWNER))]
)
async def test_a_party_that_enrols_with_a_clock_a_day_fast_is_refused_by_name_and_enrols_with_the_right_one(
    wrong, party
):
    async with wrong(party, DAY_S, sum_for(party)) as running:
        await running.start()
        said = await last_words(running, party, Refusal.exit_code)
        assert "the key bundle is valid from" in said
        ahead = re.search(rf"the clock of {party} is (\d+) s ahead of that of this service", said)
        assert abs(int(ahead.group(1)) - DAY_S) < BUSY_S
        running.set_clock(0)
        running.children[party].start()
        await running.a_round("a round of everybody", reason="", summed=USERS)
        await running.stop()


async def test_a_cos_whose_clock_is_a_day_fast_trains(wrong):
    async with wrong(COS, DAY_S) as running:
        await running.start()
        await running.a_round("a round of everybody", reason="", summed=USERS)
        await running.stop()


async def test_a_third_party_whose_clock_is_a_day_slow_does_not_start(wrong):
    async with wrong(THIRD_PARTY, -DAY_S) as running:
        starting = asyncio.create_task(running.start())
        said = await last_words(running, THIRD_PARTY, CertificateError.exit_code)
        assert "the authority's certificate is valid from" in said
        assert re.search(r"the clock of the third party is \d+ s behind", said)
        await given_up(starting)


async def test_nobody_takes_the_certificate_of_a_third_party_whose_clock_is_a_day_fast(wrong):
    async with wrong(THIRD_PARTY, DAY_S) as running:
        starting = asyncio.create_task(running.start())
        said = await last_words(running, HOST, CertificateError.exit_code)
        assert "certificate is not yet valid" in said
        assert "look at the clock and the certificate of thirdparty/directory" in said
        await given_up(starting)


async def last_words(running, party, code):
    """Wait until a party has ended with an exit status; return what it said last."""
    await running.comes_true(
        lambda: party in running.children and running.children[party].process is not None, f"{party} starts"
    )
    child = running.children[party]
    await running.comes_true(lambda: not child.alive, f"{party} ends")
    assert child.process.returncode == code, child.last_words()
    # The error and, on another line, what to do.
    return child.log.read_text()


async def given_up(starting):
    """End a start that cannot succeed."""
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError, CoterieError):
        await starting


# --- in the middle of a run --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "party", [HOST, COS, *(pytest.param(party, marks=ANOTHER_FORM) for party in (THIRD_PARTY, HOLDER, OWNER))]
)
async def test_a_clock_that_jumps_back_by_an_hour_in_mid_round_ends_nothing(wrong, party):
    async with wrong(party, 0, sum_for(party)) as running:
        await running.start()
        await running.a_round("a round of everybody", reason="", summed=USERS)
        running.set_clock(-3600)
        for _ in range(3):
            await running.a_round("a round after the jump", reason="", summed=USERS)
        await running.stop()
