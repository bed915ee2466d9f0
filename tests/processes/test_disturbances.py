"""Parties that come late, leave, fall silent or run out of disk while a federation trains."""

import re
import signal
import urllib.error

import pytest

from ..volumes import fill, small_volume
from .gate import Gate
from .recorded import of_system

LARGER = {"synthetic": {"users": 160, "interactions": 6000}}

ROUNDING = 1e-6
"""Tolerance of float32 gradients below 1, which a processor may add in any order."""


def owners(running):
    """Return the parties of the data owners, before they are started."""
    return [f"data-owner/{name}" for name in running.feed.partition.names]


def users_of(running, *hosts):
    return len({user for user in running.feed.dataset.user.tolist() if running.feed.host[user] in hosts})


def holders(running) -> set[bytes]:
    """Return the owners that have stored something."""
    return {owner for owner, _ in running.stores.stored()}


# --- joining and leaving -----------------------------------------------------------------------------------------


async def test_an_owner_that_joins_late_gets_what_is_its_own_and_may_leave_again(small, federation):
    churn = {"owners": 1, "join_at": 0.3, "leave_at": 0.6}
    settings = small(drift={"epochs": 10}, federation={"churn": churn})
    async with federation(settings) as running:
        first, late = owners(running)
        await running.start()
        # Epochs are short beside the start of a process: the run waits for it.
        await running.comes_true(lambda: running.children[late].alive, f"{late} is started")
        running.signal(first, signal.SIGSTOP)
        await running.change(late, "joined")
        running.signal(first, signal.SIGCONT)
        report = await running.finish()

    assert running.ended_well()
    assert report["phase"] == "done"
    changes = [(one["party"], one["change"]) for one in report["parties"] if one["party"] in (first, late)]
    assert changes == [(first, "joined"), (late, "joined"), (late, "left")]
    present = [one["owners"] for one in report["phases"]]
    assert [n for n, before in zip(present, [None, *present], strict=False) if n != before][-3:] == [1, 2, 1]
    applied = running.stores.applied()
    (late_slot,) = running.stores.blocks().keys() - {one.slot for one in applied if one.epoch == 1}
    epochs = {one.epoch for one in applied if one.slot == late_slot}
    # It leaves after epoch 6; on a machine that stands still before the run waits, after the one in which it came.
    assert min(epochs) > 3
    assert max(epochs) == max(6, min(epochs))
    assert running.stores.counted_once()


@pytest.mark.long
async def test_hosts_may_come_late_and_leave_while_the_run_goes_on(small, federation):
    late, leaving = "client/host-2", "client/host-1"
    settings = small(drift={"epochs": 20}, federation={"hosts": 3, "party_timeout_s": 3.0, "min_users": 10})
    running = federation(settings, hold=[late])
    running.expect_users = users_of(running, 0, 1)
    async with running:
        await running.start()
        await running.phase("epoch", 2)
        running.release(late)
        await running.change(late, "joined")
        await running.epochs(2)
        await running.children[leaving].stop()
        await running.change(leaving, "lost")
        report = await running.finish()

    assert running.ended_well()
    assert report["phase"] == "done"
    hosts = [one["hosts"] for one in report["phases"]]
    assert max(hosts) == 3
    assert hosts[-1] == 2
    assert {user for _, user in running.stores.stored()} == set(running.stores.users())
    assert running.stores.counted_once(grows=True)


# --- silence -----------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_a_silent_owner_counts_as_lost_and_nothing_twice_when_it_returns(small, federation):
    # One of three owners is not waited for: the test lets it come when it wants to.
    settings = small(
        drift={"epochs": 30}, federation={"owners": 3, "party_timeout_s": 2.0, "churn": {"owners": 1}}
    )
    running = federation(settings)
    _, silent, late = owners(running)
    async with Gate() as gate:
        # Hosts reach it through a gate that is shut: it gets no record, and they wait.
        running.keys[silent] = {"advertise": gate.address}
        running.hold.append(late)
        async with running:
            await running.start()
            gate.target = running.address(silent)
            await running.phase("intake")
            # While hosts wait, they are told of another owner, by a catalogue in which the silent one still is.
            running.release(late)
            await running.change(late, "joined")
            running.signal(silent, signal.SIGSTOP)
            await running.change(silent, "lost")
            # What hosts have for it holds up nothing else.
            await running.phase("epoch", 3)
            assert holders(running) == {
                owner
                for party in owners(running)
                if party != silent
                for owner in running.stores.participants(party)
            }
            running.signal(silent, signal.SIGCONT)
            await running.change(silent, "returned")
            gate.open()
            await running.comes_true(lambda: len(holders(running)) == 3, "a record that gets there")
            await running.epochs(2)

            # Silent within an epoch, whose other half the run goes on without.
            running.signal(silent, signal.SIGSTOP)
            await running.change(silent, "lost", times=2)
            await running.epochs(2)
            running.signal(silent, signal.SIGCONT)
            await running.change(silent, "returned", times=2)
            report = await running.finish()

    assert running.ended_well()
    assert report["phase"] == "done"
    assert running.stores.counted_once(away=True)


def answered_too_late(running, host) -> bool:
    return '"an evaluation was over before its answer"' in running.children[host].log.read_text()


@pytest.mark.long
async def test_a_host_that_stands_still_while_an_evaluation_is_closed_goes_on(small, federation):
    settings = small(drift={"epochs": 40}, federation={"hosts": 2, "party_timeout_s": 2.0, "min_users": 10})
    async with federation(settings) as running:
        silent = "client/host-1"
        await running.start()
        await running.phase("epoch", 2)
        # Between two polls nobody asks it for anything: then it is silenced another time.
        for times in range(1, 6):
            running.signal(silent, signal.SIGSTOP)
            # The evaluation that it was asked for waits for it until then, and is over when it hears of it.
            await running.change(silent, "lost", times)
            await running.epochs(1)
            running.signal(silent, signal.SIGCONT)
            await running.change(silent, "returned", times)
            await running.epochs(1)
            if answered_too_late(running, silent):
                break
        report = await running.finish()

    assert running.ended_well()
    assert report["phase"] == "done"
    assert answered_too_late(running, silent)
    assert running.stores.counted_once()


@pytest.mark.long
async def test_a_run_that_waits_too_long_for_a_silent_owner_fails_and_names_it(small, federation):
    settings = small(drift={"epochs": 500}, federation={"phase_timeout_s": 10.0})
    async with federation(settings) as running:
        _, silent = owners(running)
        await running.start()
        await running.phase("epoch", 2)
        running.signal(silent, signal.SIGSTOP)
        report = await running.finish()

    assert report["phase"] == "failed"
    assert report["reason"] == f"train took too long; waiting for: {silent}"
    assert running.ended_well()


async def test_a_run_whose_owner_never_comes_fails_and_says_what_it_waited_for(small, federation):
    settings = small(federation={"phase_timeout_s": 4.0})
    async with federation(settings) as running:
        running.hold.append(owners(running)[1])
        await running.start()
        await running.up(*(party for party in running.children if party not in running.hold))
        report = await running.finish()

    assert report["phase"] == "failed"
    assert re.fullmatch(
        r"gather took too long; waiting for: [01] of 2 data owners and \d+ of 60 users came", report["reason"]
    )
    assert running.ended_well()


# --- staleness ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local_updates", [1, 4])
async def test_gradients_on_old_rows_are_refused_counted_and_computed_again(small, federation, local_updates):
    settings = small(
        drift={"max_staleness": 0, "theta": 2, "local_updates": local_updates}, federation={"owners": 3}
    )
    async with federation(settings) as running:
        await running.start()
        report = await running.finish()

    assert report["phase"] == "done"
    staleness, applied = report["staleness"], running.stores.applied()
    assert staleness["refused"] > 0
    assert set(staleness["histogram"]) == {"0"}
    assert staleness["histogram"]["0"] == report["version"] == len(applied)
    assert all(
        (one.version, one.gradient.rows_version) == (exchange[0].version + place, exchange[0].version - 1)
        for exchange in running.stores.exchanges()
        for place, one in enumerate(exchange)
    )
    assert running.stores.counted_once()
    assert running.stores.gradients_differ_by() <= ROUNDING


@of_system("drift")
def test_the_histogram_of_ages_counts_every_update(recorded):
    held = recorded.run("drift")
    running, report = held.running, held.report
    ages = [one.version - 1 - one.gradient.rows_version for one in running.stores.applied()]
    assert report["staleness"]["refused"] == 0
    assert report["staleness"]["histogram"] == {str(age): ages.count(age) for age in sorted(set(ages))}
    assert len(ages) == report["version"]
    assert running.stores.gradients_differ_by() <= ROUNDING


# --- a full disk -------------------------------------------------------------------------------------------------


def refused(running, party: str, rpc: str, reason: str) -> float:
    """Return how many refusals of a reason a service counts on its metrics page."""
    found = re.findall(
        rf'^coterie_refusals_total{{reason="{reason}",rpc="{rpc}"}} (\S+)$', running.page(party), re.MULTILINE
    )
    return sum(map(float, found))


def healthy(running, party: str) -> bool:
    try:
        return running.page(party, "/healthz") == "SERVING\n"
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return False


@pytest.mark.long
async def test_an_owner_without_space_refuses_and_takes_everything_later_once(small, federation):
    early, late = "client/host-0", "client/host-1"
    running = federation(small(data=LARGER, drift={"epochs": 6}), hold=[early, late])
    running.expect_users = users_of(running, 0)
    full = owners(running)[0]
    state = running.folder / f"owner-{running.feed.partition.names[0]}" / "state"
    with small_volume(state, "2m"):
        async with running:
            await running.start()
            # The COS counts an owner as joined once it is registered; the owner then still writes that it takes part.
            await running.comes_true(
                lambda: any(line["event"] == "joined" for line in running.log(full)), f"{full} takes part"
            )
            # No room for what hosts seal for.
            ballast = fill(state)
            running.release(early)
            await running.comes_true(
                lambda: refused(running, full, "OwnerInfo", "STORE_FULL"), "a prekey is refused"
            )
            ballast.unlink()

            # No room for records; nor for the mark with which an owner begins a pass, so the run waits for space.
            await running.comes_true(
                lambda: holders(running) & set(running.stores.participants(full)), "a stored record"
            )
            ballast = fill(state)
            running.release(late)
            await running.comes_true(
                lambda: refused(running, full, "SubmitInteractions", "STORE_FULL") >= 3,
                "three messages are refused",
            )
            assert not healthy(running, full)
            # What a host holds for acknowledged is in the store.
            acknowledged, stored = running.stores.acknowledged(full), running.stores.stored()
            assert sum(acknowledged.values()) < sum(map(len, running.stores.sent().values()))
            for key, count in acknowledged.items():
                assert count <= len(stored.get(key, ()))

            ballast.unlink()
            await running.comes_true(lambda: healthy(running, full), "the owner is healthy again")
            report = await running.finish()
        assert report["phase"] == "done"
        assert running.ended_well()
        assert running.stores.counted_once(grows=True)
