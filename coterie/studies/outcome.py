"""What is left of a run: the content of ``report.json``, from what the COS knows and what was measured beside it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coterie.config.run import RunSettings
from coterie.data import Dataset
from coterie.studies.reference import Reference
from coterie.systems.registry import distribution_of, systems

__all__ = ["Outcome", "about", "from_cos", "network", "surroundings", "together", "write"]

Outcome = dict[str, Any]
"""A report, JSON-ready (docs/report.md)."""

_PACKAGES = ("coterie", "grpcio", "protobuf", "numpy", "cryptography", "SQLAlchemy")


def about(dataset: Dataset) -> dict[str, Any]:
    """Return name and size of a data set, as the report states them."""
    return {
        "name": dataset.name,
        "users": len(dataset.users),
        "items": len(dataset.items),
        "interactions": len(dataset),
    }


def surroundings() -> dict[str, Any]:
    """Return ``versions`` of packages and the ``machine``, as reports and tables state them."""
    packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
    # Systems come from other distributions, too.
    came_with = (distribution_of(name).partition(" ") for name in systems())
    return {
        "versions": packages | {name: version for name, _, version in came_with},
        "machine": {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
            "processor": platform.machine(),
            "cores": os.cpu_count(),
        },
    }


# --- what the COS knows, as the report shows it ----------------------------------------------------------------


def from_cos(known: Mapping[str, Any]) -> Outcome:
    """Return the part of a single run's outcome that the COS knows.

    Parameters
    ----------
    known : mapping
        The answer to ``GetReport``.
    """
    found = {
        "history": _history(known),
        "owners_timeline": _timeline(known),
        "events": _events(known),
        "updates": known["version"],
    }
    if "rounds" not in known:
        return {**found, "staleness": known["staleness"]}
    start = _start(known)
    rounds = [
        {"time_s": round((one["time_ms"] - start) / 1e3, 3), **_without(one, "time_ms")}
        for one in known["rounds"]
    ]
    return {
        **found,
        "rounds": rounds,
        "abandoned": known["abandoned"],
        "groups": known["groups"],
        "closed_share": known.get("closed_share"),
        "chosen": known["chosen"],
        **{key: known[key] for key in ("visits", "held_rows") if key in known},
    }


def network(found: Mapping[str, Any], accounts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return how much of a round, or without rounds of training, a party's calls spent on the network.

    Parameters
    ----------
    found : mapping
        What the COS knows, by `from_cos`.
    accounts : mapping
        What each process counted, by its party.

    Returns
    -------
    dict
        ``seconds`` of all rounds and ``of`` how many, and ``by_party`` of those who take part: ``seconds`` of its calls
        without what the called services spent on them, and their ``share``.  Calls may overlap each other and work,
        so the largest share bounds what a network without delay would save.
    """
    rounds = found.get("rounds")
    if rounds is not None:
        seconds = sum(sum(one["seconds"].values()) for one in rounds)
    else:
        seconds = max((one["time_s"] for one in found["history"]), default=0.0)
    by_party = {}
    for party, account in accounts.items():
        if party.partition("/")[0] in ("client", "data-owner", "decrypting-client"):
            spent = sum(entry["network_ms"] for entry in account["called"].values()) / 1e3
            share = round(spent / seconds, 4) if seconds else None
            by_party[party] = {"seconds": round(spent, 3), "share": share}
    return {"seconds": round(seconds, 3), "of": None if rounds is None else len(rounds), "by_party": by_party}


def _without(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != key}


def _start(known: Mapping[str, Any]) -> int:
    """Return when the first thing happened that the COS knows of, milliseconds."""
    return min((one["time_ms"] for one in (*known["phases"], *known["parties"])), default=0)


def _history(known: Mapping[str, Any]) -> list[dict[str, Any]]:
    start = _start(known)
    entries = []
    for one in known["history"]:
        metrics = dict(one["metrics"])
        entries.append(
            {
                "epoch": one["epoch"],
                "version": one["version"],
                "time_s": round((one["time_ms"] - start) / 1e3, 3),
                "train_loss": metrics.pop("train_loss", None),
                "owners": one.get("owners"),
                "withheld": one.get("withheld"),
                "users": max((n for name, n in one["users"].items() if name != "train_loss"), default=0),
                "metrics": metrics,
            }
        )
    return entries


def _timeline(known: Mapping[str, Any]) -> list[dict[str, Any]]:
    start = _start(known)
    return [
        {
            "time_s": round((one["time_ms"] - start) / 1e3, 3),
            "version": one["version"],
            "owners": one["owners"],
            "hosts": one["hosts"],
        }
        for one in known["phases"]
    ]


_PHASES = {
    "gather": "parties gather",
    "intake": "epoch 1: interactions arrive, owners train",
    "flush": "everything is delivered: owners finish trailing blocks",
    "epoch": "epoch {}: owners pass over their blocks",
    "evaluate": "clients evaluate",
    "supports": "groups are asked for their items",
    "rounds": "rounds of training",
    "visit": "epoch {}: users visit owners",
    "done": "done",
    "failed": "failed",
}


def _events(known: Mapping[str, Any]) -> list[dict[str, Any]]:
    texts = [(one["time_ms"], f"{one['party']} {one['change']}") for one in known["parties"]]
    texts += [
        (one["time_ms"], _PHASES.get(one["phase"], one["phase"]).format(one["epoch"]))
        for one in known["phases"]
    ]
    start = _start(known)
    return [{"time_s": round((at - start) / 1e3, 3), "text": text} for at, text in sorted(texts)]


# --- all seeds together ----------------------------------------------------------------------------------------


def together(
    settings: RunSettings, dataset: Mapping[str, Any], run_id: str, singles: Sequence[Outcome]
) -> Outcome:
    """Return the report of a run from the outcomes of its seeds.

    Parameters
    ----------
    settings : RunSettings
        The run.
    dataset : mapping
        The data set, as `about` describes it.
    run_id : str
        Id of the run.
    singles : sequence of dict
        One outcome for each seed, with ``seed`` and ``split_sha256``; ``reference`` holds rows by name.
    """
    first = singles[0]
    report: Outcome = {
        "run_id": run_id,
        "system": settings.system,
        "label": settings.own.label(settings),
        "form": settings.form,
        "secure_sum": settings.secure_sum,
        "dataset": {**dataset, "split_sha256": first["split_sha256"]},
        "seeds": list(settings.seeds),
        "settings": settings.model_dump(mode="json", exclude={"output"}),
        "metrics": _mean_std([_result(single) for single in singles]),
        "reference": {},
        **surroundings(),
    }
    if all("reference" in single for single in singles):
        report["reference"] = {
            name: {
                "metrics": _mean_std([single["reference"][name].metrics for single in singles]),
                "history": _reference_history([single["reference"][name] for single in singles]),
                **_words(first["reference"][name]),
            }
            for name in first["reference"]
        }
    for key in (
        "history",
        "chosen",
        "rounds",
        "abandoned",
        "groups",
        "closed_share",
        "visits",
        "held_rows",
        "protection",
        "in_process",
        "staleness",
        "owners_timeline",
        "events",
        "updates",
        "start_seconds",
        "traffic",
        "network",
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
            {
                key: single[key]
                for key in ("seed", "split_sha256", "history", "chosen", "updates", "cpu_seconds")
                if key in single
            }
            for single in singles
        ]
    return report


def _result(single: Outcome) -> dict[str, float]:
    """Return the metrics that count: at the version that validation items chose, else at the last evaluation."""
    chosen = single.get("chosen") or single["history"][-1]
    metrics: dict[str, float] = chosen["metrics"]
    return metrics


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


def _words(row: Reference) -> dict[str, str]:
    """Return what the row says of itself; nothing of the rows that the report has words for."""
    return {key: text for key, text in (("label", row.label), ("note", row.note)) if text}


def _reference_history(rows: Sequence[Reference]) -> list[dict[str, Any]]:
    return rows[0].history


def write(report: Outcome, folder: Path) -> None:
    """Write ``report.json`` and ``report.html`` into a folder."""
    (folder / "report.json").write_text(json.dumps(report, indent=1, default=float))
    from coterie.telemetry import report_html

    report_html.write(report, folder / "report.html")
