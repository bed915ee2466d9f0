"""Measure how the cost of rounds grows with users: CPU time of all processes, memory of the COS and of hosts.

Users are synthetic with few interactions each, so that costs per user dominate.  The variable ``COTERIE_BENCH_USERS``
names the sizes, ``1000,5000,20000`` when it is absent.  The suite runs only on request: the largest size takes minutes,
and nearly all of them pass while hosts draw keys and enrol their users.  From 100,001 users on only masked rounds of
everybody are measured, and each phase is told on standard error: a million users take a quarter of an hour or more.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.rounds import process_seconds
from bench.rows import Ask, Row, lower
from coterie.config.run import RunSettings
from coterie.launch.federation import Federation
from coterie.rounds.training import Purpose
from coterie.studies.run_data import load, make_feed
from coterie.wire.v1 import operator_pb2 as wire

_SIZES = tuple(int(n) for n in os.environ.get("COTERIE_BENCH_USERS", "1000,5000,20000").split(","))
_COHORT = 500
_EACH = 10
"""Number of interactions of a user."""
_OF_WIDE, _NARROW = 65_537, {"bits": 12, "metric_bits": 12, "n_cap": 2047}
"""Users of one sum for whom codes of 16 bits have room, and narrower codes."""
_OF_A_HOST = 250_000
"""Most users of a host: each host holds the ids of all users of the run, so that few hosts take the least memory."""
_SMALL = 100_000
"""Most users of a run in clear, and of cohorts whose members are users."""
_ROUNDS = 2
"""Measured rounds; one where there are more users than in a small run."""
_PATIENCE = {"phase_timeout_s": 7200, "party_timeout_s": 1800}
"""Patience of a federation whose hosts enrol very many users, seconds."""


@dataclass(frozen=True)
class Grown:
    """The cost of a run.

    Parameters
    ----------
    registered : float
        Bytes resident at the COS when the population was fixed.
    peak : float
        Most bytes resident at the COS from then on.
    cpu : float
        CPU seconds of all processes for one measured round, the median.
    cos : float
        CPU seconds of the COS for one measured round, the median.
    joined : mapping of str to float
        CPU seconds by role until the population was fixed: enrolment and registration.
    spent : mapping of str to float
        CPU seconds by role for one measured round, the median.
    most : mapping of str to float
        Most bytes resident so far at a process of each role, registration included.
    wall : float
        Seconds from the start of the services to the last measured round.
    """

    registered: float
    peak: float
    cpu: float
    cos: float
    joined: Mapping[str, float]
    spent: Mapping[str, float]
    most: Mapping[str, float]
    wall: float


def _settings(users: int, secure_sum: str, rounds: Mapping[str, Any]) -> RunSettings:
    return RunSettings.model_validate(
        {
            "system": "fedncf",
            "secure_sum": secure_sum,
            "reference": False,
            "data": {"synthetic": {"users": users, "items": 200, "interactions": _EACH * users}},
            "fedncf": {"model": "gmf", "dim": 4, "touch": "exact", **(_NARROW if users > _OF_WIDE else {})},
            "rounds": {"passes": 3, "evaluate_every": 1000, "step_timeout_s": 1800, **rounds},
            "federation": {"hosts": max(2, 4 * (users > _SMALL), -(-users // _OF_A_HOST)), **_PATIENCE},
        }
    )


def _resident(pid: int, key: str) -> float:
    """Return ``VmRSS`` or ``VmHWM`` of a process, bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return 1024.0 * int(value.split()[0])
    raise RuntimeError(f"the system says nothing of {key}")


def _most(federation: Federation) -> dict[str, float]:
    """Return the most bytes resident so far at a process of each role."""
    found: dict[str, float] = {}
    for child in federation.children.values():
        if child.process is not None:
            peak = _resident(child.process.pid, "VmHWM")
            found[child.role] = max(found.get(child.role, 0.0), peak)
    return found


def _tell(begun: float, what: str, federation: Federation) -> None:
    """Say on standard error what CPU and memory the services have taken so far, by role."""
    cpu, most = process_seconds(federation), _most(federation)
    told = "; ".join(f"{role} {cpu[role]:.1f} CPU s, {most[role] / 2**20:.0f} MiB" for role in cpu)
    print(f"{time.monotonic() - begun:.0f} s, {what}: {told}", file=sys.stderr, flush=True)


async def _grown(settings: RunSettings, purpose: Purpose, rounds: int, *, told: bool = False) -> Grown:
    """Run a federation until ``rounds`` measured rounds of a purpose are over, after a first one."""
    feed = make_feed(settings, load(settings), 0)
    marks: list[dict[str, float]] = []
    registered, joined, most = 0.0, dict[str, float](), dict[str, float]()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        async with Federation(settings, feed, Path(folder), run_id="bench", seed=0) as federation:
            await federation.start()
            process = federation.cos.process
            if process is None:
                raise RuntimeError("the COS was not started")
            if told:
                _tell(begun, "started", federation)
            async for event in federation.watch():
                if event.HasField("phase") and event.phase.phase == wire.RunPhase.RUN_PHASE_ROUNDS:
                    registered, joined = _resident(process.pid, "VmRSS"), process_seconds(federation)
                    most = _most(federation)
                    if told:
                        _tell(begun, "registered", federation)
                    # Reset the peak, so that it counts from here on.
                    Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # noqa: ASYNC240 - no disk behind it
                if told and event.HasField("round"):
                    _tell(begun, f"round of {event.round.purpose}", federation)
                if event.HasField("round") and event.round.purpose == purpose.value:
                    marks.append(process_seconds(federation))
                    if len(marks) == rounds + 1:
                        break
            peak = _resident(process.pid, "VmHWM")
            after = _most(federation)
    each = [{role: last[role] - first[role] for role in last} for first, last in itertools.pairwise(marks)]
    return Grown(
        registered,
        peak,
        float(np.median([sum(one.values()) for one in each])),
        float(np.median([one["cos"] for one in each])),
        joined,
        {role: float(np.median([one[role] for one in each])) for role in marks[-1]},
        {role: max(most.get(role, 0.0), after[role]) for role in after},
        time.monotonic() - begun,
    )


def _slope(sizes: Sequence[int], values: list[float]) -> float:
    return float(np.polyfit(sizes, values, 1)[0]) if len(sizes) > 1 else values[0] / sizes[0]


def _exponent(sizes: Sequence[int], values: list[float]) -> float:
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0]) if len(sizes) > 1 else 1.0


def _by_role(found: Mapping[str, float], unit: float, name: str) -> str:
    return ", ".join(f"{role} {value / unit:.3g} {name}" for role, value in found.items())


def _shown(sizes: Sequence[int], values: list[float], unit: str) -> str:
    return ", ".join(f"{n / 1000:g} k: {value:.3g} {unit}" for n, value in zip(sizes, values, strict=True))


def rows(ask: Ask) -> Iterator[Row]:
    """Measure hosts as members with every user in each round, and users as members in cohorts of 500."""
    population, cohort = ask.size((_SIZES, _COHORT), ((24,), 6))
    small = [users for users in population if users <= _SMALL]
    everybody = [
        asyncio.run(_grown(_settings(users, "clear", {"cohorts": "all"}), Purpose.TRAIN, _ROUNDS))
        for users in small
    ]
    cost = [one.cpu for one in everybody]
    if small:
        yield lower(
            "scale.hosts.growth",
            _exponent(small, cost),
            1.0,
            "exponent",
            f"CPU of a round with every user, hosts as parties, by users ({_shown(small, cost, 's')}); "
            f"of it the COS {_shown(small, [one.cos for one in everybody], 's')}; linear is 1",
        )
    masked, hosted = list[Grown](), list[int]()
    for users in population:
        large = users > _SMALL
        settings = _settings(users, "masked", {"cohorts": "all"})
        one = asyncio.run(_grown(settings, Purpose.TRAIN, 1 if large else _ROUNDS, told=large))
        masked.append(one)
        hosted.append(-(-users // settings.federation.hosts))
        yield Row(
            f"scale.masked.{users}",
            one.cpu,
            None,
            "CPU s",
            None,
            f"a masked round of all users ({_by_role(one.spent, 1.0, 's')}); before it they enrolled and registered "
            f"({_by_role(one.joined, 1.0, 's')}); most memory of a process ({_by_role(one.most, 2**20, 'MiB')}); "
            f"{one.wall:.0f} s in all",
        )
    resident = [one.registered for one in masked]
    shown = _shown(population, [one / 2**20 for one in resident], "MiB")
    yield Row(
        "scale.registered",
        _slope(population, resident) / 1e3,
        None,
        "kB",
        None,
        f"memory of the COS for each registered participant, by the slope over users ({shown}); target <= 1 kB",
    )
    peak = [one.most["client"] for one in masked]
    shown = _shown(hosted, [one / 2**20 for one in peak], "MiB")
    yield Row(
        "scale.host_memory",
        _slope(hosted, peak) / 1e3,
        None,
        "kB",
        None,
        f"most memory of a host for each of its users, from enrolment to the last masked round, by the slope "
        f"over users of a host ({shown}); target <= 1 kB",
    )
    spent = {
        role: 1e6 * _slope(population, [one.joined[role] for one in masked])
        for role in ("cos", "thirdparty", "client")
    }
    yield Row(
        "scale.registration",
        spent["cos"],
        None,
        "CPU us",
        None,
        f"of the COS for each participant that registers, by the slope over users; the third party enrols it in "
        f"{spent['thirdparty']:.3g}, its host draws its keys, enrols and registers it in {spent['client']:.3g}; "
        "target <= 60",
    )
    cost = [one.cpu for one in masked]
    yield lower(
        "scale.masked.growth",
        _exponent(population, cost),
        1.05,
        "exponent",
        f"CPU of a masked round with every user, hosts as parties, by users ({_shown(population, cost, 's')}); of "
        f"it the COS {_shown(population, [one.cos for one in masked], 's')}, whose memory in rounds is at most "
        f"{_shown(population, [one.peak / 2**20 for one in masked], 'MiB')}; target <= 1.05",
    )
    if not small:
        return
    for secure_sum in ("clear", "masked"):
        # The cost of a cohort does not depend on the number of registered users; clear sums show that.
        sizes = small if secure_sum == "clear" else small[:1]
        floors = {"min_cohort": min(cohort, 20), "min_sum": min(cohort, 20)}
        own = {"cohorts": "random", "cohort": cohort, "party_per_user": True, **floors}
        found = [
            asyncio.run(_grown(_settings(users, secure_sum, own), Purpose.EVALUATE, 1)) for users in sizes
        ]
        for users, one in zip(sizes, found, strict=True):
            yield Row(
                f"scale.users.{secure_sum}.{users}",
                (one.peak - one.registered) / cohort / 1e3,
                None,
                "kB",
                None,
                f"memory of the COS for each member of a cohort of {cohort}, peak in rounds less before them; "
                f"{1e3 * one.cpu / cohort:.3g} CPU ms a member in a round of evaluation, of it the COS "
                f"{1e3 * one.cos / cohort:.3g}; target <= 12 kB",
            )
