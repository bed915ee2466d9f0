"""Measure how the cost of rounds grows with users: CPU time of all processes, and memory of the COS.

Users are synthetic with few interactions each, so that costs per user dominate.  The variable ``COTERIE_BENCH_USERS``
names the sizes, ``1000,5000,20000`` when it is absent.  The suite runs only on request: the largest size takes minutes,
and nearly all of them pass while hosts draw keys and enrol their users.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
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
_OF_A_HOST = 25_000
"""Most users of a host: an enrolment takes 50,000 at most."""
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
    """

    registered: float
    peak: float
    cpu: float
    cos: float
    joined: Mapping[str, float]


def _settings(users: int, secure_sum: str, rounds: Mapping[str, Any]) -> RunSettings:
    return RunSettings.model_validate(
        {
            "system": "fedncf",
            "secure_sum": secure_sum,
            "reference": False,
            "data": {"synthetic": {"users": users, "items": 200, "interactions": _EACH * users}},
            "fedncf": {"model": "gmf", "dim": 4, "touch": "exact", **(_NARROW if users > _OF_WIDE else {})},
            "rounds": {"passes": 3, "evaluate_every": 1000, "step_timeout_s": 900, **rounds},
            "federation": {"hosts": max(2, -(-users // _OF_A_HOST)), **_PATIENCE},
        }
    )


def _resident(pid: int, key: str) -> float:
    """Return ``VmRSS`` or ``VmHWM`` of a process, bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return 1024.0 * int(value.split()[0])
    raise RuntimeError(f"the system says nothing of {key}")


async def _grown(settings: RunSettings, purpose: Purpose, rounds: int) -> Grown:
    """Run a federation until ``rounds`` measured rounds of a purpose are over, after a first one."""
    feed = make_feed(settings, load(settings), 0)
    marks: list[dict[str, float]] = []
    registered, joined = 0.0, dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        async with Federation(settings, feed, Path(folder), run_id="bench", seed=0) as federation:
            await federation.start()
            process = federation.cos.process
            if process is None:
                raise RuntimeError("the COS was not started")
            async for event in federation.watch():
                if event.HasField("phase") and event.phase.phase == wire.RunPhase.RUN_PHASE_ROUNDS:
                    registered, joined = _resident(process.pid, "VmRSS"), process_seconds(federation)
                    # Reset the peak, so that it counts from here on.
                    Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # noqa: ASYNC240 - no disk behind it
                if event.HasField("round") and event.round.purpose == purpose.value:
                    marks.append(process_seconds(federation))
                    if len(marks) == rounds + 1:
                        break
            peak = _resident(process.pid, "VmHWM")
    spent = [
        {role: after[role] - before[role] for role in after} for before, after in itertools.pairwise(marks)
    ]
    return Grown(
        registered,
        peak,
        float(np.median([sum(one.values()) for one in spent])),
        float(np.median([one["cos"] for one in spent])),
        joined,
    )


def _slope(sizes: Sequence[int], values: list[float]) -> float:
    return float(np.polyfit(sizes, values, 1)[0]) if len(sizes) > 1 else values[0] / sizes[0]


def _exponent(sizes: Sequence[int], values: list[float]) -> float:
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0]) if len(sizes) > 1 else 1.0


def _shown(sizes: Sequence[int], values: list[float], unit: str) -> str:
    return ", ".join(f"{n / 1000:g} k: {value:.3g} {unit}" for n, value in zip(sizes, values, strict=True))


def rows(ask: Ask) -> Iterator[Row]:
    """Measure hosts as members with every user in each round, and users as members in cohorts of 500."""
    population, cohort = ask.size((_SIZES, _COHORT), ((24,), 6))
    everybody = [
        asyncio.run(_grown(_settings(users, "clear", {"cohorts": "all"}), Purpose.TRAIN, 2))
        for users in population
    ]
    cost = [one.cpu for one in everybody]
    yield lower(
        "scale.hosts.growth",
        _exponent(population, cost),
        1.0,
        "exponent",
        f"CPU of a round with every user, hosts as parties, by users ({_shown(population, cost, 's')}); "
        f"of it the COS {_shown(population, [one.cos for one in everybody], 's')}; linear is 1",
    )
    resident = [one.registered for one in everybody]
    shown = _shown(population, [one / 2**20 for one in resident], "MiB")
    yield Row(
        "scale.registered",
        _slope(population, resident) / 1e3,
        None,
        "kB",
        None,
        f"memory of the COS for each registered participant, by the slope over users ({shown}); target <= 1 kB",
    )
    spent = {
        role: 1e6 * _slope(population, [one.joined[role] for one in everybody])
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
    masked = [
        asyncio.run(_grown(_settings(users, "masked", {"cohorts": "all"}), Purpose.TRAIN, 2))
        for users in population
    ]
    cost = [one.cpu for one in masked]
    yield lower(
        "scale.masked.growth",
        _exponent(population, cost),
        1.05,
        "exponent",
        f"CPU of a masked round with every user, hosts as parties, by users ({_shown(population, cost, 's')}); of "
        f"it the COS {_shown(population, [one.cos for one in masked], 's')}, whose memory is at most "
        f"{_shown(population, [one.peak / 2**20 for one in masked], 'MiB')}; target <= 1.05",
    )
    for secure_sum in ("clear", "masked"):
        # The cost of a cohort does not depend on the number of registered users; clear sums show that.
        sizes = population if secure_sum == "clear" else population[:1]
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
