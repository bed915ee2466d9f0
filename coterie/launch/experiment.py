"""A run from beginning to end: one federation for each seed, the references, the report."""

from __future__ import annotations

import asyncio
import datetime
import importlib.metadata
import json
import os
import platform
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa

from coterie.config.run import RunSettings
from coterie.data import Dataset
from coterie.errors import RunError
from coterie.launch.federation import Federation
from coterie.launch.feed import Feed, load, make_feed
from coterie.launch.reference import Reference, references
from coterie.evaluation.holdout import TRAIN
from coterie.net.enrolment import saved_bundles
from coterie.net.meter import merge
from coterie.privacy import visibility
from coterie.privacy.attacks import drift as attacks
from coterie.privacy.attacks.scoring import Truth
from coterie.store import cos as cos_store
from coterie.store.client import load_users
from coterie.wire.v1 import operator_pb2 as wire

__all__ = ["Outcome", "new_run_id", "run"]

_PACKAGES = ("coterie", "grpcio", "protobuf", "numpy", "cryptography", "SQLAlchemy")

Watcher = Callable[[int, wire.WatchRunResponse], None]
"""Called with the seed and each event."""

Outcome = dict[str, Any]
"""A report, JSON-ready (docs/report.md)."""


def new_run_id(name: str) -> str:
    """Return an id that sorts by time and is a DNS label."""
    return f"{name}-{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


async def run(settings: RunSettings, run_id: str, watcher: Watcher) -> tuple[Outcome, Path]:
    """Run a federation for each seed and report.

    Returns
    -------
    report : dict
        What ``report.json`` holds.
    folder : Path
        Where everything of the run is.

    Raises
    ------
    RunError
        When a run ends without a result.
    DataError
        When the data set cannot be read or divided.
    """
    started = datetime.datetime.now(datetime.UTC)
    begun = time.perf_counter()
    folder = (settings.output / run_id).absolute()
    dataset = await asyncio.to_thread(load, settings)
    singles: list[Outcome] = []
    for seed in settings.seeds:
        feed = make_feed(settings, dataset, seed)
        single = folder / f"seed-{seed}" if len(settings.seeds) > 1 else folder
        singles.append(await _one(settings, feed, single, run_id, seed, watcher))
    report = _together(settings, dataset, run_id, singles)
    report["started"] = started.isoformat(timespec="seconds")
    report["duration_s"] = round(time.perf_counter() - begun, 1)
    _write(report, folder)
    return report, folder


async def _one(
    settings: RunSettings, feed: Feed, folder: Path, run_id: str, seed: int, watcher: Watcher
) -> Outcome:
    async with Federation(settings, feed, folder, run_id=run_id, seed=seed) as federation:
        await federation.start()
        async for event in federation.watch():
            watcher(seed, event)
        known = await federation.report()
        start_seconds = federation.start_seconds
    if known["phase"] != "done":
        raise RunError(
            f"the run ended before its time: {known['reason']}", hint=f"logs of all processes: {folder}"
        )
    accounts = federation.accounts()
    outcome: Outcome = {
        "seed": seed,
        "split_sha256": feed.split.sha256(feed.dataset),
        "history": _history(known),
        "staleness": known["staleness"],
        "owners_timeline": _timeline(known),
        "events": _events(known),
        "updates": known["version"],
        "start_seconds": round(start_seconds, 2),
        "traffic": merge(account["called"] for account in accounts.values()),
        "cpu_seconds": {party: account["cpu_seconds"] for party, account in accounts.items()},
        "counts": {party: account["counts"] for party, account in accounts.items()},
        "peak_rss_mb": {party: account["peak_rss_mb"] for party, account in accounts.items()},
    }
    recorded = {
        party: list(child.state.glob("transcript*.bin")) for party, child in federation.children.items()
    }
    if any(recorded.values()):
        seen = await asyncio.to_thread(visibility.observed, recorded)
        outcome["visibility"] = {
            party: {kind: "seen" if yes else "not seen" for kind, yes in kinds.items()}
            for party, kinds in seen.items()
        }
    if settings.federation.attacks:
        outcome["attacks"] = await asyncio.to_thread(_attack, federation, feed, recorded["cos/cos"])
    if settings.reference:
        outcome["reference"] = await asyncio.to_thread(references, feed, settings.drift, seed)
    return outcome


# --- what the COS knows, as the report shows it ----------------------------------------------------------------


def _history(known: Mapping[str, Any]) -> list[dict[str, Any]]:
    start = known["phases"][0]["time_ms"] if known["phases"] else 0
    entries = []
    for one in known["history"]:
        metrics = dict(one["metrics"])
        entries.append(
            {
                "epoch": one["epoch"],
                "version": one["version"],
                "time_s": round((one["time_ms"] - start) / 1e3, 3),
                "train_loss": metrics.pop("train_loss", None),
                "owners": one["owners"],
                "withheld": one["withheld"],
                "users": max((n for name, n in one["users"].items() if name != "train_loss"), default=0),
                "metrics": metrics,
            }
        )
    return entries


def _timeline(known: Mapping[str, Any]) -> list[dict[str, Any]]:
    start = known["phases"][0]["time_ms"] if known["phases"] else 0
    return [
        {
            "time_s": round((one["time_ms"] - start) / 1e3, 3),
            "version": one["version"],
            "owners": one["owners"],
            "hosts": one["hosts"],
        }
        for one in known["phases"]
    ]


def _events(known: Mapping[str, Any]) -> list[dict[str, Any]]:
    start = known["phases"][0]["time_ms"] if known["phases"] else 0
    texts = [(one["time_ms"], f"{one['party']} {one['change']}") for one in known["parties"]]
    texts += [(one["time_ms"], f"{one['phase']}, epoch {one['epoch']}") for one in known["phases"]]
    return [{"time_s": round((at - start) / 1e3, 3), "text": text} for at, text in sorted(texts)]


# --- attacks ---------------------------------------------------------------------------------------------------


def _attack(federation: Federation, feed: Feed, transcripts: Sequence[Path]) -> dict[str, Any]:
    """Attack the COS's transcript; the experimenter, who holds all stores, knows the truth to judge it by."""
    slots, items = _numbering(federation)
    data = feed.dataset
    train = feed.split.part == TRAIN
    user_slot = np.array([slots.get(name, -1) for name in data.users])
    item_index = np.array([items.get(key, -1) for key in data.items])
    user, item = user_slot[data.user[train]], item_index[data.item[train]]
    known = (user >= 0) & (item >= 0)
    truth = Truth(
        n_users=max(slots.values()) + 1,
        n_items=len(items),
        users=user[known],
        items=item[known],
        positive=feed.positive[train][known],
    )
    return dict(attacks.report(transcripts, truth, federation.plan()))


def _numbering(federation: Federation) -> tuple[dict[str, int], dict[str, int]]:
    """Return slots by user name and catalogue indices by item key."""
    by_participant: dict[bytes, int] = {}
    with sa.create_engine(f"sqlite:///{federation.cos.state / 'cos.db'}").connect() as connection:
        for row in connection.execute(sa.select(cos_store.participants)):
            by_participant[row.participant] = row.slot
        items = {row.key: row.item for row in connection.execute(sa.select(cos_store.items))}
    slots: dict[str, int] = {}
    for child in federation.children.values():
        if child.role == "client":
            with sa.create_engine(f"sqlite:///{child.state / 'client.db'}").connect() as connection:
                names = load_users(connection)
            for name, bundle in zip(names, saved_bundles(child.state), strict=True):
                slots[name] = by_participant[bundle.participant_id]
    return slots, items


# --- all seeds together ----------------------------------------------------------------------------------------


def _together(
    settings: RunSettings, dataset: Dataset, run_id: str, singles: Sequence[Outcome]
) -> Outcome:
    first = singles[0]
    report: Outcome = {
        "run_id": run_id,
        "system": settings.system,
        "form": settings.drift.form,
        "secure_sum": settings.secure_sum,
        "dataset": {
            "name": dataset.name,
            "users": len(dataset.users),
            "items": len(dataset.items),
            "interactions": len(dataset),
            "split_sha256": first["split_sha256"],
        },
        "seeds": list(settings.seeds),
        "settings": settings.model_dump(mode="json", exclude={"output"}),
        "metrics": _mean_std([single["history"][-1]["metrics"] for single in singles]),
        "reference": {},
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "machine": {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
            "processor": platform.machine(),
            "cores": os.cpu_count(),
        },
    }
    if all("reference" in single for single in singles):
        report["reference"] = {
            name: {
                "metrics": _mean_std([single["reference"][name].metrics for single in singles]),
                "history": _reference_history([single["reference"][name] for single in singles]),
            }
            for name in first["reference"]
        }
    for key in (
        "history",
        "staleness",
        "owners_timeline",
        "events",
        "updates",
        "start_seconds",
        "traffic",
        "cpu_seconds",
        "counts",
        "peak_rss_mb",
        "visibility",
        "attacks",
    ):
        # What is not averaged is the first seed's; the others stand in their own folders.
        if key in first:
            report[key] = first[key]
    if len(singles) > 1:
        report["per_seed"] = [
            {key: single[key] for key in ("seed", "split_sha256", "history", "updates", "cpu_seconds")}
            for single in singles
        ]
    return report


def _mean_std(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float | None]]:
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            values[name].append(value)
    return {
        name: {
            "mean": float(np.mean(found)),
            "std": float(np.std(found, ddof=1)) if len(found) > 1 else None,
        }
        for name, found in values.items()
    }


def _reference_history(rows: Sequence[Reference]) -> list[dict[str, Any]]:
    return rows[0].history


def _write(report: Outcome, folder: Path) -> None:
    (folder / "report.json").write_text(json.dumps(report, indent=1, default=float))
    from coterie.telemetry import report_html

    report_html.write(report, folder / "report.html")
