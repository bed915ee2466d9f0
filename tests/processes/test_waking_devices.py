"""Devices that exist only while they are awake: each wake is a process of its own, which ends when nothing is due."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from coterie.launch.children import start
from coterie.process.next_wake import NEXT_WAKE

from .patience import PAUSE_S, WAIT_S
from .running import Running

USERS = 4
DEVICES = tuple(f"client/host-{number}" for number in range(USERS))


LIGHT = os.environ.get("COTERIE_DEVICE", "")
"""Command of a light installation (`make device`), with which devices wake in place of this one."""


def light(arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command of the light installation."""
    # Nothing of this installation is in its way.
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    with log.open("ab") as stream:
        return subprocess.Popen([LIGHT, *arguments], stdout=stream, stderr=stream, env=environment)


class Device:
    """A device whose timer starts the client service for one wake after the other.

    Parameters
    ----------
    running : Running
        The federation; its launcher starts no process of this device.
    party : str
    """

    def __init__(self, running: Running, party: str) -> None:
        self._child = running.children[party]
        self.statuses: list[int] = []
        self.may_wake = asyncio.Event()
        self.may_wake.set()

    async def wake(self, *options: str) -> int:
        """Wake once; return the exit status."""
        # The federation has all its services serve metrics; a device has nobody who reads them.
        given = (self._child.folder / "config.toml").read_text().splitlines(keepends=True)
        device = self._child.folder / "device.toml"
        if not device.exists():
            device.write_text("".join(line for line in given if not line.startswith("metrics =")))
        config = str(device)
        arguments = ["serve", "client", "--once", *options, "--config", config]
        process = light(arguments, self._child.log) if LIGHT else start(arguments, self._child.log)
        # The launcher knows of it, and ends it with the federation.
        self._child.process = process
        try:
            async with asyncio.timeout(WAIT_S):
                while (status := process.poll()) is None:
                    await asyncio.sleep(PAUSE_S)
        except TimeoutError:
            pytest.fail(f"{self._child.party} is still awake after {WAIT_S} s; {self._child.last_words()}")
        self._child.process = None
        self.statuses.append(status)
        return status

    @property
    def next(self) -> dict[str, Any]:
        """When the device wakes next, as its file says."""
        found: dict[str, Any] = json.loads((self._child.state / NEXT_WAKE).read_bytes())
        return found

    async def live(self) -> None:
        """Wake when it is due, until the run is over."""
        while True:
            await self.may_wake.wait()
            await self.wake()
            if (self._child.state / NEXT_WAKE).exists() and self.next["over"]:
                return
            late = self.next["at"] - time.time() if (self._child.state / NEXT_WAKE).exists() else PAUSE_S
            await asyncio.sleep(max(late, 0.0))


def settings_of(small: Callable[..., Any], system: str, secure_sum: str, **rounds: Any) -> Any:
    split = {"split": {"kind": "leave-last-out"}} if system == "fedncf" else {}
    return small(
        system=system,
        secure_sum=secure_sum,
        **split,
        data={"synthetic": {"users": USERS, "items": 40, "interactions": 60, "seed": 1}},
        rounds={
            "experiment": False,
            "cohort": USERS,
            "group": USERS,
            "min_cohort": 1,
            "min_sum": 3,
            "passes": 1,
            "evaluate_every": 1,
            "patience": 0,
            "step_timeout_s": 30.0,
            **rounds,
        },
        federation={"hosts": len(DEVICES), "check_in_s": 2.0, "party_timeout_s": 120.0},
    )


async def test_a_masked_run_of_devices_that_exist_only_while_awake_ends_with_metrics(
    small: Callable[..., Any], federation: Callable[..., Running]
) -> None:
    settings = settings_of(small, "fedncf", "masked")
    async with federation(settings, hold=DEVICES) as running:
        await running.start()
        devices = [Device(running, party) for party in DEVICES]
        async with asyncio.TaskGroup() as living:
            for device in devices:
                living.create_task(device.live())
            await running.ended()
        # Each has woken once more, and knows that the run is over.
        report = await running.finish()
    assert (report["phase"], report["reason"]) == ("done", ""), report["reason"]
    assert {one["summed"] for one in report["rounds"] if not one["reason"]} == {USERS}
    assert [one["epoch"] for one in report["history"]] == [0, 1]
    # A device that comes when it was told to was never away.
    assert [one["change"] for one in report["parties"] if one["party"] in DEVICES] == ["joined"] * USERS
    for device in devices:
        assert set(device.statuses) == {0}
        assert len(device.statuses) > 1


async def test_a_waking_device_that_comes_late_is_taken_in(
    small: Callable[..., Any], federation: Callable[..., Running]
) -> None:
    late = DEVICES[-1]
    settings = settings_of(
        small, "fedmf", "clear", passes=3, group=1, min_sum=1, most_users=USERS, cohorts="all"
    )
    running = federation(settings, hold=DEVICES, expect_users=USERS - 1)
    async with running:
        await running.start()
        devices = {party: Device(running, party) for party in DEVICES}
        # Nobody else has come: the run gathers.
        assert await devices[DEVICES[0]].wake() == 0
        first = devices[DEVICES[0]].next
        assert (first["over"], first["at"] > first["written"]) == ("", True)
        async with asyncio.TaskGroup() as living:
            for party in DEVICES[:-1]:
                living.create_task(devices[party].live())
            await running.a_round("a round without the late device", reason="")
            # However long the late device takes to start, the others do not train to the end without it.
            for party in DEVICES[:-1]:
                devices[party].may_wake.clear()
            living.create_task(devices[late].live())
            await running.change(late, "joined")
            for party in DEVICES[:-1]:
                devices[party].may_wake.set()
            await running.ended()
        report = await running.finish()
    assert (report["phase"], report["reason"]) == ("done", ""), report["reason"]
    assert [one["users"] for one in report["waves"]] == [1]
    trained = [one["users"] for one in report["rounds"] if one["purpose"] == "train" and not one["reason"]]
    assert (trained[0], trained[-1]) == (USERS - 1, USERS)
    for device in devices.values():
        assert set(device.statuses) == {0}
