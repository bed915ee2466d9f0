"""Compare a round through all processes, with mutual TLS, with the same round in one process; time empty rounds."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.rows import Ask, Row, lower
from coterie.config.run import RunSettings
from coterie.launch.federation import Federation
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import Feed, load, make_feed
from coterie.wire.v1 import operator_pb2 as wire

_COHORT = 50
_PASSES = 4
_FIRST = 5
"""Rounds of training before the measured ones, in which caches fill and keys are agreed."""


@dataclass(frozen=True)
class Spent:
    """The cost of a round of training, on average over the measured rounds.

    Parameters
    ----------
    cpu : float
        CPU seconds of all service processes.
    wall : float
        Median seconds.
    by_process : mapping of str to float
        CPU seconds by role.
    activities : mapping of str to float
        CPU seconds by activity, over the whole run and all processes.
    rounds : int
        Rounds measured.
    sent : float
        Bytes of one member's messages in a round.
    """

    cpu: float
    wall: float
    by_process: Mapping[str, float]
    activities: Mapping[str, float]
    rounds: int
    sent: float


def settings_for(
    data: Path | None,
    model: str,
    secure_sum: str,
    *,
    per_user: bool = False,
    synthetic: Mapping[str, int] | None = None,
    **changes: Mapping[str, Any],
) -> RunSettings:
    """Return the settings of a measured run: random cohorts of 50 users at two hosts, evaluated only at the ends."""
    sections: dict[str, dict[str, Any]] = {
        "data": {"path": None if synthetic else data, "synthetic": dict(synthetic or {})},
        "fedncf": {"model": model, "touch": "exact"},
        "rounds": {
            "cohorts": "random",
            "cohort": _COHORT,
            "passes": _PASSES,
            "evaluate_every": 1000,
            "party_per_user": per_user,
        },
        "federation": {"hosts": 2},
    }
    for section, values in changes.items():
        sections[section] = {**sections.get(section, {}), **values}
    return RunSettings.model_validate(
        {"system": "fedncf", "secure_sum": secure_sum, "reference": False, **sections}
    )


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process so far, over all its threads, also ended ones.

    The id of another process's clock is made as ``clock_getcpuclockid`` makes it on Linux.  That clock counts
    nanoseconds, where ``/proc/PID/stat`` has ticks of 10 ms.
    """
    return time.clock_gettime((~pid << 3) | 2)


def process_seconds(federation: Federation) -> dict[str, float]:
    """Return the CPU seconds of the service processes so far, by role."""
    found: dict[str, float] = {}
    for child in federation.children.values():
        if child.process is not None:
            found[child.role] = found.get(child.role, 0.0) + cpu_of(child.process.pid)
    return found


def data_set(data: Path | None) -> Path | None:
    """Return the data set to measure on: the given one, or MovieLens 100K where ``COTERIE_DATA`` has it."""
    root = os.environ.get("COTERIE_DATA")
    if data is None and root and (Path(root) / "ml-100k").is_dir():
        return Path(root) / "ml-100k"
    return data


async def spent(settings: RunSettings, feed: Feed, first: int = _FIRST) -> Spent:
    """Run a federation and read the processes' CPU clocks between two rounds of training."""
    marks: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        async with Federation(settings, feed, Path(folder), run_id="bench", seed=0) as federation:
            await federation.start()
            async for event in federation.watch():
                if event.HasField("round") and event.round.purpose == "train":
                    marks += [process_seconds(federation)]
            report = await federation.report()
        accounts = federation.accounts()
    trained = [one for one in report["rounds"] if one["purpose"] == "train"]
    rounds = len(marks) - 1 - first
    by_process = {role: (marks[-1][role] - marks[first][role]) / rounds for role in marks[-1]}
    activities: dict[str, float] = {}
    for account in accounts.values():
        for name, seconds in account["cpu_seconds"]["activities"].items():
            activities[name] = activities.get(name, 0.0) + seconds
    return Spent(
        cpu=sum(by_process.values()),
        wall=statistics.median(sum(one["seconds"].values()) for one in trained[first:]),
        by_process=by_process,
        activities=activities,
        rounds=rounds,
        sent=statistics.median(one["bytes_in"] / one["members"] for one in trained),
    )


def in_process(settings: RunSettings, feed: Feed, first: int = _FIRST) -> float:
    """Return the CPU seconds of a round of training in this process."""
    marks: list[float] = []

    def see(event: wire.WatchRunResponse) -> None:
        if event.HasField("round") and event.round.purpose == "train":
            marks.append(time.process_time())

    train_in_process(settings, feed, run_id="bench", seed=0, see=see)
    return (marks[-1] - marks[first]) / (len(marks) - 1 - first)


FEW = {"users": 8, "items": 40, "interactions": 120}
"""Synthetic data of the smallest size."""
COHORT_OF_FEW = {"cohort": 4, "min_cohort": 4, "min_sum": 4}


def rows(ask: Ask) -> Iterator[Row]:
    """Measure rounds of 50 users on two hosts."""
    first = ask.size(_FIRST, 0)
    few: dict[str, Any] = ask.size({}, {"synthetic": FEW, "rounds": {**COHORT_OF_FEW, "passes": 1}})
    cases = (
        ("neumf", "clear", False, 1.25),
        ("neumf", "masked", False, 1.6),
        ("gmf", "clear", False, None),
        ("gmf", "masked", False, None),
        ("neumf", "clear", True, 1.6),
        ("neumf", "masked", True, None),
    )
    data = data_set(ask.data)
    for model, secure_sum, per_user, target in ask.size(cases, (cases[2], cases[5])):
        settings = settings_for(data, model, secure_sum, per_user=per_user, **few)
        feed = make_feed(settings, load(settings), 0)
        # Always against the clear sum in one process: what a protection costs is part of the ratio.
        plain = settings_for(data, model, "clear", per_user=per_user, **few)
        theirs = statistics.median(in_process(plain, feed, first) for _ in range(ask.size(3, 1)))
        found = asyncio.run(spent(settings, feed, first))
        who = "users" if per_user else "hosts"
        by_process = ", ".join(f"{role} {1e3 * s:.1f}" for role, s in found.by_process.items())
        aim = f"; target <= {target} times" if target is not None else ""
        yield lower(
            f"round.{model}.{who}.{secure_sum}",
            1e3 * found.cpu,
            1e3 * theirs,
            "CPU ms",
            f"{feed.dataset.name}; {1e3 * found.wall:.1f} ms wall; ms by role: {by_process}; {found.rounds} rounds, "
            f"{found.sent / 1e3:.1f} kB sent by a member{aim}",
        )
        if per_user and secure_sum == "masked":
            yield lower(
                "round.neumf.users.masked.per_participant",
                1e3 * (found.cpu - theirs) / settings.rounds.cohort,
                None,
                "CPU ms",
                f"beyond the round in clear in one process; n = {settings.rounds.cohort}; target <= 5 ms",
            )


def empty_rows(ask: Ask) -> Iterator[Row]:
    """Measure the wall time of rounds that carry almost nothing."""
    for secure_sum, target in (("clear", 25), ("masked", 60)):
        settings = settings_for(
            None,
            "gmf",
            secure_sum,
            synthetic={"users": 40, "items": 40, "interactions": 400},
            fedncf={"dim": 4, "touch": "once", "min_touch": 1},
            rounds={"cohorts": "all", "passes": ask.size(100, 2)},
        )
        feed = make_feed(settings, load(settings), 0)
        found = asyncio.run(spent(settings, feed, ask.size(_FIRST, 0)))
        yield Row(
            f"round.empty.{secure_sum}",
            1e3 * found.wall,
            None,
            "ms wall",
            None,
            f"2 hosts of 20 users, {found.sent / 1e3:.2f} kB sent by a member; target <= {target} ms",
        )
