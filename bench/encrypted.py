"""Measure encrypted rounds through all processes at 3,072 bits: seconds by phase, CPU by activity, bytes.

The papers' figures are of other machines and of loops over single values, so they stand in the notes and give no
ratios.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.rounds import FEW, data_set
from bench.rows import Ask, Row, lower
from coterie.config.run import RunSettings
from coterie.launch.federation import Federation
from coterie.studies.run_data import load, make_feed

__all__ = ["Measured", "measure", "rows"]

_ROUNDS = int(os.environ.get("COTERIE_BENCH_ROUNDS", "3"))
"""Measured rounds of training, after a first one in which tables are built; with 0, that one is measured."""

_CPU = ("local step", "encryption", "sums of ciphertexts", "decryption", "decryption proofs")


@dataclass(frozen=True)
class Measured:
    """The cost of training: median seconds of a round by phase, CPU seconds of a run by activity, bytes of a member."""

    phases: Mapping[str, float]
    activities: Mapping[str, float]
    rounds: int
    members: int
    sent: float


def _settings(
    data: Path | None,
    system: str,
    cohort: int,
    *,
    secure_sum: str = "encrypted",
    synthetic: Mapping[str, int] | None = None,
    **changes: Mapping[str, Any],
) -> RunSettings:
    sections: dict[str, dict[str, Any]] = {
        "data": {"synthetic": dict(synthetic)} if synthetic else {"path": data},
        "rounds": {
            "cohorts": "random",
            "cohort": cohort,
            "min_cohort": min(cohort, 20),
            "min_sum": min(cohort, 20),
            "passes": 1000,
            "evaluate_every": 1000,
            "party_per_user": True,
            "step_timeout_s": 3600.0,
        },
        "federation": {"hosts": 2, "owners": 1},
    }
    for section, values in changes.items():
        sections[section] = {**sections.get(section, {}), **values}
    return RunSettings.model_validate(
        {"system": system, "secure_sum": secure_sum, "reference": False, **sections}
    )


async def measure(settings: RunSettings, rounds: int = _ROUNDS) -> Measured:
    """Run a federation until ``rounds`` rounds of training are over, after a first one."""
    feed = make_feed(settings, load(settings), 0)
    with tempfile.TemporaryDirectory() as folder:
        async with Federation(settings, feed, Path(folder), run_id="bench", seed=0) as federation:
            await federation.start()
            trained = 0
            async for event in federation.watch():
                trained += event.HasField("round") and event.round.purpose == "train"
                if trained > rounds:
                    break
            report = await federation.report()
        accounts = federation.accounts()
    seen = [one for one in report["rounds"] if one["purpose"] == "train"]
    activities: dict[str, float] = {}
    for account in accounts.values():
        for name, seconds in account["cpu_seconds"]["activities"].items():
            activities[name] = activities.get(name, 0.0) + seconds
    phases = {
        name: statistics.median(one["seconds"][name] for one in seen[1:] or seen)
        for name in seen[-1]["seconds"]
    }
    return Measured(
        phases,
        activities,
        len(report["rounds"]),
        seen[-1]["members"],
        statistics.median(one["bytes_in"] / one["members"] for one in seen),
    )


def _row(name: str, found: Measured, note: str) -> Row:
    phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in found.phases.items())
    cpu = ", ".join(f"{one} {found.activities[one]:.2f}" for one in _CPU if one in found.activities)
    return lower(
        name,
        sum(found.phases.values()),
        None,
        "s wall",
        f"{found.members} members; s by phase: {phases}; {found.sent / 1e3:.0f} kB sent by a member; CPU s over all "
        f"{found.rounds} rounds of the run: {cpu}; {note}",
    )


_SHORT = {"bits": 1024, "comparison": True}
"""Keys of the smallest size."""


def rows(ask: Ask) -> Iterator[Row]:
    """Measure FedNeuMF with 20 participants, and FedMVMF with ``COTERIE_BENCH_MEMBERS`` of them (100 by default)."""
    data = data_set(ask.data)
    few: dict[str, Any] = ask.size({}, {"encryption": _SHORT})
    synthetic = ask.size(None, FEW)
    rounds = ask.size(_ROUNDS, 0)
    where = "synthetic data" if data is None else data.name
    published = data is not None and (data / "ncf-split").is_dir()
    # The key is held by decrypting clients, or by the participants as in the paper's MF-HEAvg.
    for name, secure_sum in (
        ("encrypted.fedncf.neumf.round", "encrypted"),
        ("encrypted.fedncf.neumf.shared.round", "shared-key"),
    ):
        neumf = _settings(
            data,
            "fedncf",
            ask.size(20, 4),
            secure_sum=secure_sum,
            synthetic=synthetic,
            fedncf={"model": "neumf", "touch": "exact"},
            split={"kind": "published" if published else "leave-last-out"},
            **few,
        )
        yield _row(
            name,
            asyncio.run(measure(neumf, rounds)),
            f"{where}; the paper, element by element: 2,361 s to encrypt, 806 s to decrypt, 67.2 MB by a participant",
        )
    members = int(os.environ.get("COTERIE_BENCH_MEMBERS", ask.size("100", "4")))
    mvmf = _settings(data, "fedmvmf", members, mvmf={"weights": "incl-unc"}, synthetic=synthetic, **few)
    yield _row(
        "encrypted.fedmvmf.round",
        asyncio.run(measure(mvmf, rounds)),
        f"{where}, every item in each contribution; the paper, 1,024 bits, for each user 3.08 s, aggregation 239 s and "
        "decryption 97.6 s in all",
    )
