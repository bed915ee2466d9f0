"""Construction of a run's report, from the COS's facts and the launcher's own measurements."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coterie import kernels
from coterie.config.run import RunSettings
from coterie.data import Dataset
from coterie.data.whole_file import whole_file
from coterie.errors import PreflightError
from coterie.studies.reference import Reference
from coterie.systems.registry import distribution_of, systems
from coterie.telemetry.report import (
    REPORT_FORMAT,
    Average,
    Chosen,
    Course,
    EvaluationPart,
    EventPart,
    Network,
    NetworkShare,
    PrivacyPart,
    ReferenceRow,
    Report,
    ResumePart,
    RoundRecord,
    SeedRecord,
    TimelinePoint,
    WavePart,
)

__all__ = ["SeedOutcome", "about", "counting", "from_cos", "network", "surroundings", "together", "write"]

_PACKAGES = ("coterie", "grpcio", "protobuf", "numpy", "cryptography", "SQLAlchemy")


def about(dataset: Dataset) -> dict[str, Any]:
    """Return name and size of a data set and the changes made by reading it, as the report states them."""
    return {
        "name": dataset.name,
        "users": len(dataset.users),
        "items": len(dataset.items),
        "interactions": len(dataset),
        "notes": list(dataset.notes),
    }


def surroundings() -> dict[str, Any]:
    """Return ``versions`` of packages and the ``machine``, as reports and tables state them."""
    packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
    if (compiled := kernels.package()) is not None:
        packages["coterie-native"] = compiled.version()
    # Plug-in systems come from other distributions.
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


def from_cos(known: Mapping[str, Any], report: type[Report] = Report) -> Course:
    """Return the course of a federation from the COS's facts.

    Parameters
    ----------
    known : mapping
        The COS's answer to ``GetReport``.
    report : type of Report
        Model of the report, whose own keys are taken over where the COS gives them.
    """
    found = Course(
        history=_history(known),
        owners_timeline=_timeline(known),
        events=_events(known),
        updates=known["version"],
    )
    start = _start(known)
    if known["resumes"]:
        resumes = [
            ResumePart(time_s=_seconds(one, start), **_without(one, "time_ms")) for one in known["resumes"]
        ]
        found = found.having(resumes=resumes)
    if "rounds" not in known:
        return found.having(staleness=known["staleness"])
    if known.get("third_party"):
        found = found.having(third_party=known["third_party"])
    rounds = [
        RoundRecord.model_validate({"time_s": _seconds(one, start), **_without(one, "time_ms")})
        for one in known["rounds"]
    ]
    own = [key for key in report.model_fields if key not in Report.model_fields]
    return found.having(
        rounds=rounds,
        abandoned=known["abandoned"],
        groups=known["groups"],
        waves=tuple(WavePart(**one) for one in known.get("waves", ())),
        closed_share=known.get("closed_share"),
        privacy=known.get("privacy") or PrivacyPart(),
        chosen=known["chosen"],
        **{key: known[key] for key in own if key in known},
    )


def network(found: Course, accounts: Mapping[str, Mapping[str, Any]]) -> Network:
    """Return each party's time on the network, in seconds and as a share of the rounds' time (else of the training's).

    Parameters
    ----------
    found : Course
        Course of the federation, by `from_cos`.
    accounts : mapping
        Account of each process, by party.
    """
    in_rounds = "rounds" in found.model_fields_set
    if in_rounds:
        seconds = sum(spent or 0.0 for one in found.rounds for spent in one.seconds.values())
    else:
        seconds = max((one.time_s or 0.0 for one in found.history), default=0.0)
    by_party = {}
    for party, account in accounts.items():
        if party.partition("/")[0] in ("client", "data-owner", "decrypting-client"):
            spent = sum(entry["network_ms"] for entry in account["called"].values()) / 1e3
            share = round(spent / seconds, 4) if seconds else None
            by_party[party] = NetworkShare(seconds=round(spent, 3), share=share)
    return Network(seconds=round(seconds, 3), of=len(found.rounds) if in_rounds else None, by_party=by_party)


def _without(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != key}


def _start(known: Mapping[str, Any]) -> int:
    """Return the time of the COS's earliest record of a phase or party, milliseconds."""
    return min((one["time_ms"] for one in (*known["phases"], *known["parties"])), default=0)


def _seconds(record: Mapping[str, Any], start: int) -> float:
    """Return the time of a record, seconds since the start."""
    return round((int(record["time_ms"]) - start) / 1e3, 3)


def _history(known: Mapping[str, Any]) -> list[EvaluationPart]:
    start = _start(known)
    entries = []
    for one in known["history"]:
        metrics = dict(one["metrics"])
        entries.append(
            EvaluationPart(
                epoch=one["epoch"],
                version=one["version"],
                time_s=_seconds(one, start),
                train_loss=metrics.pop("train_loss", None),
                owners=one.get("owners"),
                withheld=one.get("withheld"),
                users=max((n for name, n in one["users"].items() if name != "train_loss"), default=0),
                metrics=metrics,
            )
        )
    return entries


def _timeline(known: Mapping[str, Any]) -> list[TimelinePoint]:
    start = _start(known)
    return [
        TimelinePoint(
            time_s=_seconds(one, start), version=one["version"], owners=one["owners"], hosts=one["hosts"]
        )
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


def _events(known: Mapping[str, Any]) -> list[EventPart]:
    texts = [(one["time_ms"], f"{one['party']} {one['change']}") for one in known["parties"]]
    texts += [
        (one["time_ms"], _PHASES.get(one["phase"], one["phase"]).format(one["epoch"]))
        for one in known["phases"]
    ]
    texts += [
        (one["time_ms"], f"waits: {one['reason']}" if one["reason"] else "goes on") for one in known["waits"]
    ]
    texts += [
        (one["time_ms"], f"resumed after round {one['round']}; it had failed: {one['failure']}")
        for one in known["resumes"]
    ]
    if left := _left_out(known):
        first = min((one["time_ms"] for one in known["parties"]), default=0)
        texts.append((first, f"earlier changes of parties are counted only: {left}"))
    start = _start(known)
    return [EventPart(time_s=round((at - start) / 1e3, 3), text=text) for at, text in sorted(texts)]


def _left_out(known: Mapping[str, Any]) -> str:
    """Return how many parties came or went before those that the server lists; empty when it lists all."""
    # Servers of earlier releases list all, and count nothing; changes that a launcher adds are not counted.
    changes = Counter(known.get("party_changes", {}))
    before = changes - Counter(one["change"] for one in known["parties"])
    return ", ".join(f"{number:,} {change}" for change, number in sorted(before.items()))


# --- all seeds together ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SeedOutcome:
    """The outcome of one seed of a run.

    Attributes
    ----------
    seed : int
    split_sha256 : str
        Digest of the seed's split.
    course : Course
        Course of the seed's federation: metrics, costs and visibility.
    reference : mapping of str to Reference, optional
        Reference rows by name; None when the run wants none.
    """

    seed: int
    split_sha256: str
    course: Course
    reference: Mapping[str, Reference] | None = None

    @property
    def metrics(self) -> dict[str, float | None]:
        """Metrics of the chosen version; without one, of the last evaluation."""
        return counting(self.course).metrics


def counting(course: Course) -> Chosen | EvaluationPart:
    """Return the version of a federation's model that counts: the chosen one, or without one the last evaluated."""
    return course.chosen or course.history[-1]


def together(
    settings: RunSettings, dataset: Mapping[str, Any], run_id: str, singles: Sequence[SeedOutcome]
) -> Report:
    """Return the report of a run from the outcomes of its seeds.

    Parameters
    ----------
    settings : RunSettings
        The run.
    dataset : mapping
        The data set, as `about` describes it.
    run_id : str
        Id of the run.
    singles : sequence of SeedOutcome
        One outcome for each seed.
    """
    first = singles[0]
    return settings.description.report(
        format=REPORT_FORMAT,
        run_id=run_id,
        system=settings.system,
        label=settings.own.label(settings),
        form=settings.form,
        secure_sum=settings.secure_sum,
        experiment=settings.floors_count_users,
        dataset={**dataset, "split_sha256": first.split_sha256},
        seeds=settings.seeds,
        settings=settings.model_dump(mode="json", exclude={"output"}),
        metrics=_mean_std([single.metrics for single in singles]),
        reference=_reference([single.reference for single in singles]),
        **surroundings(),
        # Facts that are not averaged are the first seed's; `per_seed` has part of the others'.
        **first.course.content(),
        **({"per_seed": [_record(single) for single in singles]} if len(singles) > 1 else {}),
    )


def _reference(rows: Sequence[Mapping[str, Reference] | None]) -> dict[str, ReferenceRow]:
    """Return the reference rows averaged over all seeds; empty unless every seed has them."""
    known = [one for one in rows if one is not None]
    if len(known) < len(rows):
        return {}
    return {
        name: ReferenceRow(
            metrics=_mean_std([one[name].metrics for one in known]), history=row.history, **_words(row)
        )
        for name, row in known[0].items()
    }


def _record(single: SeedOutcome) -> SeedRecord:
    kept = SeedRecord.model_fields.keys() & single.course.model_fields_set
    course = {name: part for name, part in single.course.given().items() if name in kept}
    return SeedRecord(seed=single.seed, split_sha256=single.split_sha256, **course)


def _mean_std(rows: Sequence[Mapping[str, float | None]]) -> dict[str, Average]:
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            values[name].append(np.nan if value is None else value)
    return {
        name: Average(
            mean=float(np.mean(found)), std=float(np.std(found, ddof=1)) if len(found) > 1 else None
        )
        for name, found in values.items()
    }


def _words(row: Reference) -> dict[str, Any]:
    """Return a row's own label and note, as far as it has them; the report labels the trivial rows itself."""
    return {key: text for key, text in (("label", row.label), ("note", row.note)) if text}


def write(report: Report, folder: Path) -> str:
    """Write ``report.json`` and ``report.html`` into a folder.

    Returns
    -------
    str
        Why there is no page, where a package is missing for it; empty otherwise.
    """
    with whole_file(folder / "report.json") as beside:
        beside.write_text(json.dumps(report.content(), indent=1))
    from coterie.telemetry import report_html

    try:
        report_html.write(report, folder / "report.html")
    except PreflightError as error:
        # A page of an earlier attempt would be another run's.
        (folder / "report.html").unlink(missing_ok=True)
        return str(error)
    return ""
