"""Models of a run's report, which runs write as ``report.json``, and which the HTML page and the terminal show.

Every part is optional.  A key that does not apply is absent, and stays absent when the report is written again; a
number that is not known or not finite is None.  Unknown keys are kept.  ``Report.read`` takes reports of any version.

``python -m coterie.telemetry.report`` prints the tables of keys; ``--write docs/report.md`` puts them into the page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    StrictBool,
    StrictInt,
    ValidationError,
)

__all__ = [
    "Average",
    "Calls",
    "Chosen",
    "Course",
    "CpuAccount",
    "DatasetPart",
    "Devices",
    "EvaluationPart",
    "EventPart",
    "Figures",
    "FurtherRun",
    "Heading",
    "Network",
    "NetworkShare",
    "Number",
    "Part",
    "Protection",
    "ReferenceRow",
    "Report",
    "RoundRecord",
    "SeedRecord",
    "StalenessPart",
    "TimelinePoint",
]


def _number(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError("expected a number")
    try:
        if not math.isfinite(value):
            return None
    except OverflowError:  # a whole number beyond any float
        return None
    return int(value) if isinstance(value, Integral) else float(value)


def _finite(value: Any) -> Any:
    """Return a JSON-like value with every number that is not finite replaced by None."""
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return _number(value) if isinstance(value, Real) and not isinstance(value, bool) else value


def _scored(value: object) -> object:
    """Return a bare number as the mean of one seed; other values as they are."""
    return {"mean": value} if isinstance(value, Real) and not isinstance(value, bool) else value


Number = Annotated[float | None, PlainValidator(_number), PlainSerializer(lambda value: value)]
"""A finite number, or None; an integer stays one."""
Figures = dict[str, Annotated[Any, AfterValidator(_finite)]]
"""Figures whose names are not fixed: numbers, words or lists by name."""


class Part(BaseModel):
    """A part of a report; it keeps keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)
    __pydantic_extra__: Figures

    @classmethod
    def read(cls, found: object) -> Self:
        """Return a part from parsed JSON of any version, without the values that this version cannot read.

        Parameters
        ----------
        found : object
            Parsed JSON.  Each value of an unexpected shape is left out, and everything around it kept; anything but
            an object is read as an empty part.
        """
        kept = _copied(found) if isinstance(found, Mapping) else {}
        while True:
            try:
                return cls.model_validate(kept)
            except ValidationError as error:
                _leave_out(kept, [one["loc"] for one in error.errors(include_url=False, include_input=False)])

    def having(self, **parts: Any) -> Self:
        """Return a copy with further parts, which are validated."""
        return type(self)(**{**self.given(), **parts})

    def given(self) -> dict[str, Any]:
        """Return the fields that were set, and unknown ones, by name."""
        return {
            name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set
        } | (self.model_extra or {})

    def content(self) -> dict[str, Any]:
        """Return the content of ``report.json``: only the keys that were set."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list | tuple) else value


def _leave_out(kept: dict[str, Any], places: list[tuple[int | str, ...]]) -> None:
    """Delete the values at validation errors' locations, each followed as deep as it exists."""
    dead: dict[int, tuple[Any, set[Any]]] = {}
    for place in places:
        holder: Any = None
        last: Any = None
        inside: Any = kept
        for step in place:
            if isinstance(inside, dict):
                if step not in inside:
                    break
            elif not isinstance(inside, list) or not isinstance(step, int):
                break
            holder, last, inside = inside, step, inside[step]
        dead.setdefault(id(holder), (holder, set()))[1].add(last)
    for holder, steps in dead.values():
        for step in sorted(steps, reverse=True):
            del holder[step]


# --- parts -------------------------------------------------------------------------------------------------------


class DatasetPart(Part):
    """Name and size of the data set, and which split of it was used."""

    name: str = Field("", description="Name of the data set.")
    users: Number = Field(None, description="Number of users.")
    items: Number = Field(None, description="Number of items.")
    interactions: Number = Field(None, description="Number of interactions.")
    split_sha256: str = Field(
        "",
        description="Digest of the split. It is the same wherever, and in whichever order of rows, the data was read.",
    )


class Average(Part):
    """A metric over the seeds."""

    mean: Number = Field(None, description="Mean over the seeds.")
    std: Number = Field(None, description="Standard deviation over the seeds; null for one seed.")


Metrics = dict[str, Annotated[Average, BeforeValidator(_scored)]]


class EvaluationPart(Part):
    """One evaluation of the model."""

    epoch: Number = Field(None, description="Epoch; of runs in rounds, number of passes.")
    version: Number = Field(None, description="Version of the model; absent for rows beside the run.")
    time_s: Number = Field(
        None, description="Seconds since the start of the run; absent for rows beside the run."
    )
    train_loss: Number = Field(None, description="Training loss of the epoch.")
    owners: Number = Field(None, description="Data owners that were present.")
    withheld: Number = Field(None, description="Client hosts that withheld their sums.")
    users: Number = Field(None, description="Users that were measured.")
    metrics: dict[str, Number] = Field(default_factory=dict, description="Means over the users, by metric.")


class ReferenceRow(Part):
    """A row beside the run: same data, same split, same metrics."""

    metrics: Metrics = Field(default_factory=dict, description="As `metrics` of the run, by metric.")
    history: tuple[EvaluationPart, ...] = Field(
        (), description="Evaluations of the first seed, where the row learns."
    )
    label: str = Field("", description="Name for a reader; absent where the report has words for the row.")
    note: str = Field("", description="A line that says how the row is made; absent like `label`.")


class Chosen(Part):
    """The version of the model that counts, by validation items."""

    version: Number = Field(None, description="Version of the model.")
    epoch: Number = Field(None, description="Passes after which it was evaluated.")
    metrics: dict[str, Number] = Field(default_factory=dict, description="Means over the users, by metric.")
    users: dict[str, Number] = Field(default_factory=dict, description="Users that were measured, by metric.")


class RoundRecord(Part):
    """One round: its cohort, its outcome and its time."""

    round: Number = Field(None, description="Number of the round.")
    time_s: Number = Field(None, description="Seconds since the start of the run.")
    purpose: str = Field("", description="Purpose: `supports`, `train`, `evaluate` or `window`.")
    pass_: Number = Field(None, alias="pass", description="Pass over the users.")
    users: Number = Field(None, description="Users of the cohort.")
    members: Number = Field(None, description="Members of the cohort: the parties that contribute.")
    summed: Number = Field(None, description="Users whose contributions are in the sum.")
    dropped: Number = Field(None, description="Members that sent nothing at some step.")
    refused: Number = Field(None, description="Messages that the server refused.")
    liars: Number = Field(None, description="Members that revealed wrong shares.")
    reason: str = Field("", description="Reason for abandoning the round; empty for a round with a sum.")
    seconds: dict[str, Number] = Field(default_factory=dict, description="Duration in seconds, by phase.")
    bytes_in: Number = Field(
        None, description="Bytes that all members sent; null where nothing crossed a network."
    )
    version: Number = Field(None, description="Version of the model after the round.")
    silent_owners: tuple[str, ...] = Field(
        (), description="Data owners that sent nothing about their items in time."
    )
    dropped_places: Number = Field(
        None,
        description="Places of a [sparse](spec/encrypted-sum.md#sparse-sums) sum that too few users sent.",
    )


class Devices(Part):
    """Devices that a masked sum bears to lose, in a usual cohort."""

    count: Number = Field(None, description="Devices in a cohort.")
    curious: Number = Field(None, description="Devices that may be curious without learning a contribution.")
    lost: Number = Field(None, description="Devices that may be lost without losing the sum.")


class Protection(Part):
    """What the sums of a run protect, in words."""

    sum: str = Field("", description="Name of the secure sum.")
    parties: str = Field("", description="Parties of a sum: `hosts` or `users`.")
    warnings: tuple[str, ...] = Field((), description="Sentences about what the cohorts give away.")
    says: str = Field("", description="What the server sees of a contribution.")
    devices: Devices = Field(Devices(), description="Devices of a masked sum; absent for other sums.")


class StalenessPart(Part):
    """Ages of the gradients that were applied, in versions of the model."""

    max_staleness: Number = Field(None, description="Age above which gradients are refused.")
    refused: Number = Field(None, description="Gradients that were refused as too old.")
    histogram: dict[str, Number] = Field(
        default_factory=dict, description="Number of applied gradients, by the age of their rows."
    )


class TimelinePoint(Part):
    """The parties that were present when a phase began."""

    time_s: Number = Field(None, description="Seconds since the start of the run.")
    version: Number = Field(None, description="Version of the model.")
    owners: Number = Field(None, description="Data owners that were present.")
    hosts: Number = Field(None, description="Client hosts that were present.")


class EventPart(Part):
    """A party that came or went, or a phase that began."""

    time_s: Number = Field(None, description="Seconds since the start of the run.")
    text: str = Field("", description="A line for a reader.")


class Calls(Part):
    """All calls of one RPC, counted at the calling side over all processes."""

    calls: Number = Field(None, description="Number of calls.")
    errors: Number = Field(
        None,
        description="Calls that did not succeed, among them those made before the peer was there, which are repeated.",
    )
    bytes_out: Number = Field(
        None, description="Bytes of sent messages, without the framing of HTTP/2 and TLS."
    )
    bytes_in: Number = Field(None, description="Bytes of received messages, likewise.")
    p50_ms: Number = Field(None, description="Median duration, milliseconds.")
    p99_ms: Number = Field(None, description="Duration that 99% of the calls did not exceed, milliseconds.")
    server_p50_ms: Number = Field(None, description="Median of the server's own time, milliseconds.")
    network_p50_ms: Number = Field(None, description="Median of the rest of the time, milliseconds.")
    network_s: Number = Field(None, description="The rest of the time of all calls together, seconds.")


class NetworkShare(Part):
    """Time that one party's calls spent on the network."""

    seconds: Number = Field(
        None, description="Seconds of its calls without what the called services spent on them."
    )
    share: Number = Field(None, description="Share of training; null where training took no measurable time.")


class Network(Part):
    """How much of training was spent on the network.

    Calls overlap each other and work: a network that takes no time would save no more than the largest share.
    """

    seconds: Number = Field(None, description="Seconds of all rounds together; without rounds, of training.")
    of: Number = Field(None, description="Number of these rounds; null for a run without rounds.")
    by_party: dict[str, NetworkShare] = Field(
        default_factory=dict, description="Time on the network of hosts, owners and decrypting clients."
    )


class CpuAccount(Part):
    """CPU seconds of one process."""

    total: Number = Field(None, description="All CPU seconds of the process.")
    start: Number = Field(None, description="CPU seconds of its start: imports, stores, certificates.")
    security: Number = Field(
        None,
        description="CPU seconds of sealing, opening, key agreement, signatures and secure sums. TLS runs inside gRPC "
        "and is in the total only.",
    )
    activities: dict[str, Number] = Field(default_factory=dict, description="CPU seconds, by activity.")


class FurtherRun(Part):
    """A federation beside the run that differs in one setting."""

    theta: Number = Field(None, description="Value of `theta`.")
    metrics: dict[str, Number] = Field(default_factory=dict, description="Metrics at the last evaluation.")
    rpcs: Number = Field(None, description="Number of calls.")
    cpu_seconds: Number = Field(
        None, description="CPU seconds of all processes, without those of their start."
    )


class SeedRecord(Part):
    """One of several seeds; everything else of it stands in its own folder."""

    seed: Number = Field(None, description="The seed.")
    split_sha256: str = Field("", description="Digest of its split.")
    history: tuple[EvaluationPart, ...] = Field((), description="As `history` of the run.")
    chosen: Chosen | None = Field(None, description="As `chosen` of the run.")
    updates: Number = Field(None, description="As `updates` of the run.")
    cpu_seconds: dict[str, CpuAccount] = Field(
        default_factory=dict, description="As `cpu_seconds` of the run."
    )


# --- the whole ---------------------------------------------------------------------------------------------------


class Heading(Part):
    """What was run, on which data and with which software, and its results over all seeds."""

    run_id: str = Field(
        "", description="Id of the run: its name, time and four random digits. It sorts by time."
    )
    system: str = Field("", description="Name of the system.")
    label: str = Field("", description="Name of what was trained, as its paper writes it.")
    form: str = Field(
        "",
        description="Form of the system. Of a system in rounds it is the parties of a sum, `hosts` or `users`.",
    )
    secure_sum: str = Field("", description="Name of the secure sum.")
    dataset: DatasetPart = Field(DatasetPart(), description="Name, size and split of the data set.")
    seeds: tuple[StrictInt, ...] = Field((), description="The seeds; one federation each.")
    settings: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of the run with their defaults, as in [configuration.md](configuration.md).",
    )
    metrics: Metrics = Field(
        default_factory=dict,
        description="Results by [metric](#metrics), at the last evaluation. Of a run in rounds they are those of the "
        "version that validation items chose.",
    )
    reference: dict[str, ReferenceRow] = Field(
        default_factory=dict, description="[Rows beside the run](#rows-beside-the-run), by name."
    )
    versions: dict[str, str] = Field(
        default_factory=dict, description="Versions of Coterie and the packages that it stands on."
    )
    machine: Figures = Field(default_factory=dict, description="`python`, `system`, `processor`, `cores`.")


class Course(Part):
    """What one federation did, cost and revealed; a report has that of its first seed."""

    history: tuple[EvaluationPart, ...] = Field((), description="Evaluations of the first seed, in order.")
    chosen: Chosen | None = Field(
        None, description="Runs in rounds: the version that counts; null where there is none."
    )
    rounds: tuple[RoundRecord, ...] = Field((), description="Runs in rounds: every round.")
    abandoned: Number = Field(None, description="Runs in rounds: number of abandoned rounds.")
    groups: Number = Field(None, description="Runs in rounds: number of fixed groups.")
    closed_share: Number = Field(
        None,
        description="Runs in rounds whose groups are asked for their items: the share of all users' training items, "
        "from 0 to 1, that no row learns from, because fewer than `min_touch` of a group have them. Null elsewhere, "
        "and where the server never has the model.",
    )
    visits: Number = Field(None, description="Shielded form: number of visits of users to owners.")
    held_rows: Number = Field(
        None,
        description="Shielded form: rows that never left their owner, because fewer than `k_min` users were behind "
        "them.",
    )
    protection: Protection = Field(
        Protection(), description="Runs in rounds: what the sums protect and what the cohorts give away."
    )
    in_process: StrictBool = Field(
        False,
        description="True for a run without services (`coterie run --in-process`). It has no `traffic`, `network`, "
        "`counts`, `peak_rss_mb` and `visibility`.",
    )
    staleness: StalenessPart = Field(
        StalenessPart(), description="Asynchronous training: ages of gradients in versions."
    )
    owners_timeline: tuple[TimelinePoint, ...] = Field(
        (), description="Parties that were present, at each phase."
    )
    events: tuple[EventPart, ...] = Field((), description="Parties that came and went, and phases.")
    updates: Number = Field(None, description="Updates that were applied: the version at the end.")
    start_seconds: Number = Field(
        None, description="Seconds until every process was started and the run created."
    )
    traffic: dict[str, Calls] = Field(default_factory=dict, description="Calls and bytes, by RPC.")
    network: Network = Field(Network(), description="How much of training was spent on the network.")
    cpu_seconds: dict[str, CpuAccount] = Field(default_factory=dict, description="CPU seconds, by party.")
    counts: dict[str, dict[str, Number]] = Field(
        default_factory=dict, description="Number of things handled, by party and activity."
    )
    peak_rss_mb: dict[str, Number] = Field(
        default_factory=dict, description="Largest resident memory in MiB, by party."
    )
    visibility: dict[str, dict[str, str]] = Field(
        default_factory=dict,
        description="By party and kind of datum: `seen` or `not seen`, read off the transcripts. Without transcripts "
        "it is `may see` or `may not see`, as declared in [threat-model.md](threat-model.md). [More](#visibility)",
    )
    attacks: dict[str, Figures] = Field(
        default_factory=dict,
        description="With `federation.attacks`: figures by attack, [below](#attacks).",
    )


class Report(Course, Heading):
    """What is left of a run: the content of ``report.json``."""

    theta_study: tuple[FurtherRun, ...] = Field(
        (), description="With `study.theta`: a federation for each value of theta."
    )
    per_seed: tuple[SeedRecord, ...] = Field((), description="With several seeds: the record of each.")
    started: str = Field("", description="When the run began (ISO 8601, UTC).")
    duration_s: Number = Field(None, description="Seconds from the start to the report.")


if __name__ == "__main__":
    from coterie.telemetry.report_reference import main

    main()
