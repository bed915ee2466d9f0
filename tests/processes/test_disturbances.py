"""Parties that come late, leave, fall silent or run out of disk while a federation trains."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

LARGER = {"synthetic": {"users": 160, "interactions": 6000}}


def users_of(running, *hosts):
    feed = running.feed
    return len({u for u in feed.dataset.user.tolist() if feed.host[u] in hosts})


# --- joining and leaving -----------------------------------------------------------------------------------------


async def test_an_owner_that_joins_late_gets_what_is_its_own_and_may_leave_again(small, federation):
    churn = {"owners": 1, "join_at": 0.3, "leave_at": 0.6}
    settings = small(data=LARGER, drift={"epochs": 30}, federation={"churn": churn})
    async with federation(settings) as running:
        first, late = running.parties("data-owner") or (None, None)
        await running.start()
        first, late = running.parties("data-owner")
        report = await running.finish()

    assert running.ended_well()
    assert report["phase"] == "done"
    changes = [(one["party"], one["change"]) for one in report["parties"] if one["party"] in (first, late)]
    assert changes == [(first, "joined"), (late, "joined"), (late, "left")]
    owners = [one["owners"] for one in report["phases"]]
    assert [n for n, before in zip(owners, [None, *owners], strict=False) if n != before][-3:] == [1, 2, 1]
    slot = {one.slot for one in running.applied() if one.epoch == 1}
    (late_slot,) = running.blocks().keys() - slot
    epochs = {one.epoch for one in running.applied() if one.slot == late_slot}
    assert min(epochs) > 30 * 0.3
    assert max(epochs) < 30
    assert running.counted_once()


async def test_hosts_may_come_late_and_leave_while_the_run_goes_on(small, federation):
    settings = small(
        data=LARGER, drift={"epochs": 30}, federation={"hosts": 3, "party_timeout_s": 3.0, "min_users": 10}
    )
    running = federation(settings, hold=["client/host-2"])
    running._expect_users = users_of(running, 0, 1)
    async with running:
        await running.start()
        await running.phase("epoch", 2)
        running.release("client/host-2")
        await running.change("client/host-2", "joined")
        await running.phase("epoch", (await running.run_state()).epoch + 3)
        await running.children["client/host-1"].stop()
        await running.change("client/host-1", "lost")
        report = await running.finish()

    assert running.ended_well()
    assert report["phase"] == "done"
    hosts = [one["hosts"] for one in report["phases"]]
    assert max(hosts) == 3
    assert hosts[-1] == 2
    assert {user for _, user in running.stored()} == set(running.users())
    assert running.counted_once(grows=True)


async def test_a_silent_owner_counts_as_lost_and_nothing_twice_when_it_returns(small, federation):
    settings = small(drift={"epochs": 60}, federation={"party_timeout_s": 2.0})
    async with federation(settings) as running:
        await running.start()
        first, silent = running.parties("data-owner")
        # Silent from the first record on: what hosts deliver to it must not hold up anything else.
        await running.phase("intake")
        running.signal(silent, signal.SIGSTOP)
        await running.change(silent, "lost")
        await running.phase("epoch", 3)
        running.signal(silent, signal.SIGCONT)
        await running.change(silent, "returned")
        delivered = (await running.run_state()).epoch + 3
        await running.phase("epoch", delivered)

        # Silent within an epoch, whose other half the run goes on without.
        running.signal(silent, signal.SIGSTOP)
        await running.until(lambda event: sum(lost(event, silent) for event in running.events) == 2)
        await running.phase("epoch", (await running.run_state()).epoch + 2)
        running.signal(silent, signal.SIGCONT)
        await running.until(lambda event: sum(returned(event, silent) for event in running.events) == 2)
        report = await running.finish()

    assert running.ended_well()
    assert report["phase"] == "done"
    assert {first, silent} == set(running.parties("data-owner"))
    assert running.counted_once(away=True)


def lost(event, party):
    return (event.party.party, event.party.change) == (party, "lost")


def returned(event, party):
    return (event.party.party, event.party.change) == (party, "returned")


async def test_a_run_whose_owner_never_comes_fails_and_says_what_it_waited_for(small, federation):
    settings = small(federation={"phase_timeout_s": 4.0})
    running = federation(settings)
    missing = f"data-owner/{running.feed.partition.names[1]}"
    running._hold = (missing,)
    async with running:
        await running.start()
        report = await running.finish()

    assert report["phase"] == "failed"
    assert re.fullmatch(
        r"gather took too long; waiting for: 1 of 2 data owners and \d+ of 60 users came", report["reason"]
    )
    assert running.ended_well()


# --- staleness ---------------------------------------------------------------------------------------------------


async def test_gradients_on_old_rows_are_refused_counted_and_computed_again(small, federation):
    settings = small(drift={"max_staleness": 0, "theta": 2}, federation={"owners": 3})
    async with federation(settings) as running:
        await running.start()
        report = await running.finish()

    assert report["phase"] == "done"
    staleness = report["staleness"]
    assert staleness["refused"] > 0
    assert set(staleness["histogram"]) == {"0"}
    assert sum(staleness["histogram"].values()) == report["version"] == len(running.applied())
    assert running.counted_once()


async def test_the_histogram_of_ages_counts_every_update(small, federation):
    settings = small(federation={"owners": 3})
    async with federation(settings) as running:
        await running.start()
        report = await running.finish()

    assert report["staleness"]["refused"] == 0
    assert sum(report["staleness"]["histogram"].values()) == report["version"] == len(running.applied())


# --- a full disk -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_volume(folder: Path, size: str):
    """Mount a volume of a fixed size in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a volume in memory needs the rights of root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Write a file until nothing more fits."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))
    return ballast


def refused(address: str, reason: str) -> float:
    """Return how many refusals of a reason a service counts on its metrics page."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as page:
        found = re.findall(rf'coterie_refusals_total{{.*reason="{reason}".*}} (\S+)', page.read().decode())
    return sum(map(float, found))


async def test_an_owner_without_space_refuses_and_takes_everything_later_once(small, federation):
    running = federation(small(data=LARGER), hold=["client/host-0", "client/host-1"])
    full = f"data-owner/{running.feed.partition.names[0]}"
    state = running.folder / f"owner-{running.feed.partition.names[0]}" / "state"
    with small_volume(state, "2m"):
        async with running:
            await running.start()
            await running.change(full, "joined")
            ballast = fill(state)
            for host in running.parties("client"):
                running.release(host)
            async with asyncio.timeout(30):
                while refused(running.metrics[full], "STORE_FULL") < 3:
                    await asyncio.sleep(0.1)
            # What a host holds for acknowledged is in the store.
            sent, stored = acknowledged(running, full), running.stored()
            assert sum(sent.values()) < sum(len(outbox) for outbox in running.sent().values())
            for key, count in sent.items():
                assert count <= len(stored.get(key, ()))
            assert (await running.run_state()).epoch == 1

            ballast.unlink()
            report = await running.finish()
        assert report["phase"] == "done"
        assert running.ended_well()
        assert running.counted_once()


def acknowledged(running, party):
    """Return by (owner, user) how many records the hosts hold for acknowledged by a party."""
    import sqlite3

    (owner,) = {owner for owner, _ in running.sent() if owner in participants(running, party)}
    ids = {place: participant for participant, place in running.users().items()}
    found = {}
    for host in running.parties("client"):
        with contextlib.closing(sqlite3.connect(running.children[host].state / "client.db")) as connection:
            for user, count in connection.execute(
                "SELECT user, acknowledged FROM sent WHERE recipient = ? AND kind = 'interaction'", (party,)
            ):
                found[owner, ids[host, user]] = count
    return found


def participants(running, party):
    from coterie.net.enrolment import saved_bundles

    return {bundle.participant_id for bundle in saved_bundles(running.children[party].state)}
