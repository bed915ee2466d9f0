"""Hosts that come after a run has begun, as real processes: they train from the next pass on."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coterie.rounds.population import Population
from coterie.wire.v1.common_pb2 import Population as PopulationMessage
from coterie.wire.v1.common_pb2 import Waves

from .running import Running
from .stores import rows

PASSES = 12

full = pytest.mark.full("takes ten seconds of a processor")


def settings_of(small: Callable[..., Any], hosts: int, system: str = "fedncf", **changes: Any) -> Any:
    split = {"split": {"kind": "leave-last-out"}} if system == "fedncf" else {}
    return small(
        system=system,
        **split,
        data={"synthetic": {"users": 20 * hosts, "items": 60, "interactions": 500 * hosts, "seed": 1}},
        federation={"hosts": hosts},
        **{
            "secure_sum": "clear",
            **changes,
            "rounds": {
                "experiment": False,
                "cohorts": "all",
                "cohort": 20,
                "group": 20,
                "min_cohort": 1,
                "min_sum": 10,
                "passes": PASSES,
                "evaluate_every": 2,
                "patience": 0,
                "most_users": 20 * hosts,
                **changes.get("rounds", {}),
            },
        },
    )


def users_at(running: Running, *hosts: int) -> int:
    feed = running.feed
    return len({user for user in feed.dataset.user.tolist() if feed.host[user] in hosts})


async def come_in(running: Running, first: str, *late: str) -> None:
    """Start hosts once the others have trained, and hold these up until they are there."""
    await running.a_round("a round of training", reason="")
    running.signal(first, signal.SIGSTOP)
    running.release(*late)
    for party in late:
        await running.change(party, "joined")
    running.signal(first, signal.SIGCONT)


def population_at(running: Running, host: str) -> tuple[Population, int]:
    """Return the population of the run as a host has kept it, and the last pass in which it took part."""
    store = running.children[host].state / "client.db"
    ((payload, pass_number),) = rows(store, "SELECT population, pass_number FROM populations")
    later = [Waves.FromString(one) for (one,) in rows(store, "SELECT waves FROM waves ORDER BY after")]
    return Population.from_wire(PopulationMessage.FromString(payload)).extended(*later), pass_number


@pytest.mark.parametrize(("secure_sum", "late"), [("clear", (2,)), ("masked", (3, 4, 5))])
async def test_hosts_that_come_after_gathering_train_from_the_next_pass_on(
    small: Callable[..., Any],
    federation: Callable[..., Running],
    secure_sum: str,
    late: tuple[int, ...],
) -> None:
    hosts = max(late) + 1
    names = [f"client/host-{number}" for number in late]
    settings = settings_of(small, hosts, secure_sum=secure_sum, rounds={"min_cohort": len(late)})
    running = federation(settings, hold=names)
    early = users_at(running, *range(min(late)))
    running.expect_users = early
    async with running:
        await running.start()
        await come_in(running, "client/host-0", *names)
        report = await running.finish()
    assert running.ended_well()
    assert report["phase"] == "done", report["reason"]
    everybody = early + users_at(running, *late)
    ((wave,),) = [report["waves"]]
    assert wave["users"] == everybody - early
    assert 1 <= wave["from_pass"] < PASSES
    # Evaluations before the pass in which they trained first are over the others alone.
    users = {one["epoch"]: one["users"]["hit_ratio@10"] for one in report["history"]}
    assert users == {
        number: early if number <= wave["from_pass"] else everybody for number in range(0, PASSES + 1, 2)
    }
    trained = [one for one in report["rounds"] if one["purpose"] == "train" and not one["reason"]]
    assert {one["users"] for one in trained} == {early, everybody}
    kept = [population_at(running, f"client/host-{number}") for number in range(hosts)]
    populations, passes = zip(*kept, strict=True)
    assert all(one == populations[0] for one in populations)
    assert set(passes) == {PASSES - 1}
    assert len(populations[0]) == everybody


@full
@pytest.mark.parametrize("system", ["fedmf", "fcf", "fpl"])
async def test_users_who_come_later_train_in_every_system_that_says_so(
    small: Callable[..., Any], federation: Callable[..., Running], system: str
) -> None:
    late = "client/host-2"
    running = federation(settings_of(small, 3, system), hold=[late])
    early = users_at(running, 0, 1)
    running.expect_users = early
    async with running:
        await running.start()
        await come_in(running, "client/host-0", late)
        report = await running.finish()
    assert running.ended_well()
    assert report["phase"] == "done", report["reason"]
    everybody = early + users_at(running, 2)
    (wave,) = report["waves"]
    assert wave["users"] == everybody - early
    trained = [one for one in report["rounds"] if one["purpose"] == "train" and not one["reason"]]
    assert {one["users"] for one in trained} == {early, everybody}
    asked = [one for one in report["rounds"] if one["purpose"] == "supports" and not one["reason"]]
    assert [(one["pass"], one["users"]) for one in asked] == [(0, 20), (0, 20), (wave["from_pass"], 20)]


@full
async def test_a_wave_outlives_kills_of_the_server_the_third_party_and_a_host_that_came_later(
    small: Callable[..., Any], federation: Callable[..., Running]
) -> None:
    late = "client/host-2"
    running = federation(settings_of(small, 3), hold=[late])
    early = users_at(running, 0, 1)
    running.expect_users = early
    cos, third = "cos/cos", "thirdparty/directory"
    everybody = early + users_at(running, 2)
    async with running:
        await running.start()
        await running.a_round("a round of training", reason="")
        running.signal("client/host-0", signal.SIGSTOP)
        running.release(late)
        await running.change(late, "joined")
        # The wave is durable at the server before anybody answers.
        running.children[third].kill()
        running.signal("client/host-0", signal.SIGCONT)
        await running.waits("no beacon yet for users who came later")
        running.kill_and_restart(cos, third)
        await running.a_round("a round over everybody", users=everybody)
        running.kill_and_restart(cos, third, late)
        await running.a_round("another round over everybody", users=everybody)
        report = await running.finish()
    assert report["phase"] == "done", report["reason"]
    (wave,) = report["waves"]
    assert wave["users"] == everybody - early
    assert report["history"][-1]["users"]["hit_ratio@10"] == everybody
    populations = [population_at(running, f"client/host-{number}")[0] for number in range(3)]
    assert all(one == populations[0] for one in populations)
    third_store = running.children[third].state / "directory.db"
    assert rows(third_store, "SELECT number, from_pass FROM waves") == [(1, wave["from_pass"])]


async def test_a_server_restored_from_a_backup_of_before_a_wave_learns_the_wave_and_the_run_goes_on(
    small: Callable[..., Any], federation: Callable[..., Running], tmp_path: Path
) -> None:
    late, cos = "client/host-2", "cos/cos"
    running = federation(settings_of(small, 3, rounds={"passes": 40, "evaluate_every": 20}), hold=[late])
    early = users_at(running, 0, 1)
    running.expect_users = early
    everybody = early + users_at(running, 2)
    backup = tmp_path / "backup"
    async with running:
        await running.start()
        await running.a_round("a round before the backup", reason="")
        server = running.children[cos]
        server.kill()
        shutil.copytree(server.state, backup)
        server.start()
        running.release(late)
        await running.change(late, "joined")
        for number in range(3):
            await running.a_round(f"round {number} over everybody", reason="", users=everybody)
        server.kill()
        shutil.rmtree(server.state)
        shutil.copytree(backup, server.state)
        server.start()
        await running.a_round("a round over everybody after the restore", reason="", users=everybody)
        report = await running.finish()
    assert report["phase"] == "done", report["reason"]
    (wave,) = report["waves"]
    assert wave["users"] == everybody - early
    (said,) = [
        line for line in running.log(cos) if line["event"].startswith("users who came later were learned")
    ]
    assert (said["users"], said["waves"], said["not_registered"]) == (everybody - early, 1, everybody - early)
    # The device has forgotten nothing, and goes on by itself with the slots that it has now.
    (again,) = [line for line in running.log(late) if "has forgotten this party" in line["event"]]
    assert "client/host-2" in again["because"]
    trained = [one for one in report["rounds"] if one["purpose"] == "train" and not one["reason"]]
    assert trained[-1]["summed"] == everybody
    assert running.ended_well()
    populations = [population_at(running, f"client/host-{number}")[0] for number in range(3)]
    assert all(one == populations[0] for one in populations)
