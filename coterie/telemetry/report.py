"""Models of a run's report, which runs write as ``report.json``, and which the HTML page and the terminal show.

Every part is optional.  A key that does not apply is absent, and stays absent when the report is written again; a
number that is not known or not finite is None.  Unknown keys are kept.  ``Report.read`` takes reports of any version.
Keys of one system only are in a subclass in its room.

`coterie.systems.report_reference` makes the tables of keys in ``docs/report.md`` from the models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    SerializeAsAny,
    StrictBool,
    StrictInt,
    ValidationError,
)

from coterie.telemetry.quantities import measure, percent

__all__ = [
    "REPORT_FORMAT",
    "AskedService",
    "AttackFigures",
    "Average",
    "BesidePart",
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
    "HostRequests",
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
    "UsersPart",
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


REPORT_FORMAT = 1
"""Version of the form of ``report.json`` that this release writes."""

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
    notes: tuple[str, ...] = Field(
        (), description="Changes that reading and filters made: repeated rows, what a filter left out."
    )
    split_sha256: str = Field(
        "",
        description="SHA-256 of the split. Equal data and settings give the same one on every machine, whatever "
        "the order of the rows.",
    )


class Average(Part):
    """A metric over the seeds."""

    mean: Number = Field(None, description="Mean over the seeds.")
    std: Number = Field(None, description="Standard deviation over the seeds; null for one seed.")


Metrics = dict[str, Annotated[Average, BeforeValidator(_scored)]]


class EvaluationPart(Part):
    """One evaluation of the model by all users."""

    epoch: Number = Field(None, description="Number of the epoch, in systems with rounds of the pass.")
    version: Number = Field(None, description="Version of the model; absent for rows beside the run.")
    time_s: Number = Field(
        None, description="Seconds since the start of the run; absent for rows beside the run."
    )
    train_loss: Number = Field(None, description="Training loss of the epoch.")
    owners: Number = Field(None, description="Number of data owners that were present.")
    withheld: Number = Field(None, description="Number of client hosts that withheld their sums of metrics.")
    users: Number = Field(None, description="Number of users that were measured.")
    metrics: dict[str, Number] = Field(default_factory=dict, description="Means over the users, by metric.")


class ReferenceRow(Part):
    """A baseline on the same data and split as the run, with the same metrics."""

    metrics: Metrics = Field(default_factory=dict, description="As `metrics` of the run, by metric.")
    history: tuple[EvaluationPart, ...] = Field(
        (), description="Evaluations of the first seed, for a baseline that learns."
    )
    label: str = Field("", description="Name of the baseline to show; absent where the report has its own.")
    note: str = Field("", description="Line that says how the baseline is computed; absent like `label`.")


class Chosen(Part):
    """The version of the model that counts, chosen by validation items."""

    version: Number = Field(None, description="Version of the model.")
    epoch: Number = Field(None, description="Number of passes after which the version was evaluated.")
    metrics: dict[str, Number] = Field(default_factory=dict, description="Means over the users, by metric.")
    users: dict[str, Number] = Field(default_factory=dict, description="Users that were measured, by metric.")


class RoundRecord(Part):
    """One round: its cohort, its outcome and its time."""

    round: Number = Field(None, description="Number of the round.")
    time_s: Number = Field(None, description="Seconds since the start of the run.")
    purpose: str = Field("", description="Purpose: `supports`, `train`, `evaluate` or `window`.")
    pass_: Number = Field(None, alias="pass", description="Number of the pass over the users.")
    users: Number = Field(None, description="Number of users in the cohort.")
    members: Number = Field(None, description="Number of members, the parties that contribute.")
    summed: Number = Field(None, description="Number of users whose contributions are in the sum.")
    dropped: Number = Field(None, description="Number of members that did not answer some step (dropouts).")
    refused: Number = Field(None, description="Number of messages that the server refused.")
    liars: Number = Field(None, description="Number of members that revealed wrong shares.")
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
        description="Number of places of a [sparse](spec/encrypted-sum.md#sparse-sums) sum that too few users "
        "sent to be decrypted.",
    )
    left_out: Number = Field(
        None,
        description="Number of members whose contributions a [robust rule](robustness.md) left out of the sum, or that "
        "were [withdrawn](systems/fedrec.md#fedrec-denoisers) because their noise was not taken out.",
    )
    withdrawn: tuple[str, ...] = Field(
        (), description="Why contributions of a denoised sum were withdrawn, a sentence for each cause."
    )


class WavePart(Part):
    """Users who came after a run had begun and took part from the same pass on."""

    from_pass: Number = Field(None, description="First pass in which they took part, counted from 0.")
    users: Number = Field(None, description="Number of them.")


class Devices(Part):
    """Numbers of devices that a masked sum tolerates as curious or lost, in a usual cohort."""

    count: Number = Field(None, description="Devices in a cohort.")
    curious: Number = Field(None, description="Devices that may be curious without learning a contribution.")
    lost: Number = Field(None, description="Devices that may be lost without losing the sum.")


class Protection(Part):
    """Protection of contributions by the sums of a run, in words."""

    sum: str = Field("", description="Name of the secure sum.")
    parties: str = Field("", description="Parties of a sum: `hosts` or `users`.")
    warnings: tuple[str, ...] = Field(
        (), description="Sentences about what the cohorts and settings disclose."
    )
    says: str = Field("", description="The server's view of a contribution.")
    devices: Devices = Field(Devices(), description="Devices of a masked sum; absent for other sums.")


class FloorsPart(Part):
    """What the groups of a run close to learning and tell, computed from the data before the run."""

    group: Number = Field(None, description="Smallest number of users of a group, as in the plan.")
    groups: Number = Field(None, description="Number of groups.")
    closed: Number = Field(
        None, description="Share of users' training items that is closed to their groups, from 0 to 1."
    )
    held_out: Number = Field(None, description="The same of items held out to validate and test.")
    auc: Number = Field(
        None,
        description="AUC with which the counts of the groups tell users' training items from others; null where the "
        "data set is too large for the attack.",
    )
    popularity_auc: Number = Field(None, description="The same of popularity alone.")
    fitted: StrictBool = Field(
        False, description="Whether the groups were chosen for the data (`rounds.fit_groups`)."
    )
    text: str = Field("", description="The same in words.")


class PrivacyPart(Part):
    """Differential privacy of the users of a run, from the noise in its sums."""

    place: str = Field(
        "", description="Where noise was added: `local` or `distributed`; empty where sums are exact."
    )
    mechanism: str = Field("", description="`gaussian` or `laplace`.")
    per_value: StrictBool = Field(
        False, description="Whether values were clipped one by one, which protects no user as a whole."
    )
    noise: Number = Field(
        None, description="Standard deviation or scale of the noise, in multiples of a clip."
    )
    clip: Number = Field(
        None, description="Largest norm of the values of a user's contribution that change the model."
    )
    delta: Number = Field(None, description="Delta at which epsilon is stated.")
    epsilon: Number = Field(
        None,
        description="What the run cost the user with most sums, for the replacement of all data of one user. Sums of "
        "items and of metrics count, and no sampling is taken to help.",
    )
    epsilon_median: Number = Field(None, description="The same of the user in the middle.")
    epsilon_planned: Number = Field(
        None, description="The most that the plan allowed; null where it has no bound (`per_value`)."
    )
    sums: Number = Field(None, description="Sums of the user with most.")
    text: str = Field("", description="The same in words.")


class StalenessPart(Part):
    """Ages of the gradients that were applied, in versions of the model: how many updates their rows lacked.

    All gradients of an exchange (`drift.local_updates`) have the age of its first: the rows of the later ones have
    those before.
    """

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


class ResumePart(Part):
    """A resumption of the run by the operator, after it had failed."""

    time_s: Number = Field(None, description="Seconds since the start of the run.")
    round: Number = Field(None, description="Number of the last round that had begun.")
    failure: str = Field("", description="Why the run had failed.")


class Calls(Part):
    """All calls of one RPC, counted at the calling side over all processes."""

    calls: Number = Field(None, description="Number of calls.")
    errors: Number = Field(
        None,
        description="Number of calls that failed. Calls made before the peer was started are among them, and are "
        "repeated.",
    )
    bytes_out: Number = Field(
        None, description="Bytes of sent messages, without the framing of HTTP/2 and TLS."
    )
    bytes_in: Number = Field(None, description="Bytes of received messages, likewise.")
    p50_ms: Number = Field(None, description="Median duration, milliseconds.")
    p99_ms: Number = Field(None, description="Duration that 99% of the calls did not exceed, milliseconds.")
    server_p50_ms: Number = Field(
        None, description="Median time that the server spent on a call, milliseconds."
    )
    network_p50_ms: Number = Field(
        None, description="Median time of a call without the server's time, milliseconds."
    )
    network_s: Number = Field(None, description="Time of all calls without the server's time, seconds.")


class NetworkShare(Part):
    """Time that one party's calls spent on the network."""

    seconds: Number = Field(
        None, description="Duration of the party's calls without the time of the called services, seconds."
    )
    share: Number = Field(
        None, description="`seconds` divided by the duration of training; null where that was not measurable."
    )


class Network(Part):
    """How much of training was spent on the network.

    Calls overlap each other and work: a network that takes no time would save no more than the largest share.
    """

    seconds: Number = Field(
        None, description="Duration of all rounds, or of training where there are none, seconds."
    )
    of: Number = Field(None, description="Number of the rounds in `seconds`; null for a run without rounds.")
    by_party: dict[str, NetworkShare] = Field(
        default_factory=dict, description="Time on the network of hosts, owners and decrypting clients."
    )


class HostRequests(Part):
    """Requests of one host's users to a service of the third party, which the COS handed on; users are not named.

    A request is `publish`, `ask` or `forget`.
    """

    answered: dict[str, Number] = Field(
        default_factory=dict, description="Number of requests that were answered, by kind."
    )
    refused: dict[str, dict[str, Number]] = Field(
        default_factory=dict,
        description="Number of requests that were refused, by reason and kind. `TOO_LARGE` and `OVERLOADED` are "
        "limits.",
    )


class ActivityPart(Part):
    """Users who are alike in how much they had to train on."""

    users: Number = Field(None, description="Number of users.")
    least: Number = Field(None, description="Fewest training items of one of them.")
    most: Number = Field(None, description="Most training items of one of them.")
    mean: Number = Field(None, description="Mean of the metric over them.")


class UsersPart(Part):
    """How a metric is spread over users; only with `federation.per_user_metrics`."""

    users: Number = Field(None, description="Number of users that were measured.")
    counts: tuple[Number, ...] = Field(
        (),
        description="Numbers of users by value: from `edges[i]` to `edges[i + 1]`, the last edge included.",
    )
    edges: tuple[Number, ...] = Field((), description="Ends of the intervals that `counts` counts.")
    by_activity: tuple[ActivityPart, ...] = Field(
        (),
        description="Users in at most ten parts of nearly equal size, each of five or more, from those with the fewest "
        "training items on; empty for fewer than five users.",
    )


class AskedService(Part):
    """A service of the third party that users asked."""

    counters: dict[str, Number] = Field(
        default_factory=dict,
        description="Counters of the third party over all users, at the end of the run. `expansion`: `epoch`, "
        "`uploads`, `tags`, `served_tags`, `questions`, `neighbours` of the newest graph. `latents`: `epoch`, "
        "`key_users`, `combinations` of the newest set. Absent where the third party did not answer.",
    )
    refused: dict[str, Number] = Field(
        default_factory=dict, description="Number of requests that the third party refused, by reason."
    )
    hosts: dict[str, HostRequests] = Field(
        default_factory=dict, description="Requests by client host, as the COS counted them."
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


class AttackFigures(Part):
    """Figures of one attack on the server's transcript.

    The attacks that any system in rounds may run (`coterie.privacy.attacks`) have their figures here; a system whose
    own attacks have more declares a subclass.
    """

    auc: Number = Field(
        None,
        description="AUC of guessing which items users have, by the transcript alone; null if there was nothing to "
        "attack. `disaggregate`: the better of `counts_auc` and `rows_auc`.",
    )
    auc_with_popularity: Number = Field(None, description="The same, if popularity decides between equals.")
    popularity_auc: Number = Field(None, description="AUC by popularity alone.")
    users: Number = Field(None, description="Number of users that were attacked.")
    pairs: Number = Field(
        None, description="Number of true pairs of user and item. `differencing`: number of pairs of sums."
    )
    rounds: Number = Field(
        None, description="Number of sums. `intersection`, `places`: last rounds that were used."
    )
    counts_auc: Number = Field(None, description="`disaggregate`: AUC by counts of who has what.")
    rows_auc: Number = Field(None, description="`disaggregate`: AUC by what is learned of items.")
    smallest_cohort: Number = Field(None, description="`disaggregate`: users of the smallest cohort.")
    exposed: Number = Field(
        None, description="`differencing`: share of the users that pairs of sums single out."
    )
    same_version: Number = Field(
        None, description="`differencing`: number of the pairs whose sums are of one version of the model."
    )
    explained: Number = Field(
        None, description="`cluster`: share of the touched rows that were traced to users."
    )
    explained_auc: Number = Field(None, description="`cluster`: AUC among the rows that were traced.")
    directions: Number = Field(None, description="`cluster`: mean number of directions found in a sum.")
    precision: Number = Field(None, description="Share of what was named that is true.")
    recall: Number = Field(None, description="Share of what is true that was named.")
    auc_touched: Number = Field(
        None, description="`intersection`, `places`: AUC among items that were touched at all."
    )
    popularity_auc_touched: Number = Field(
        None, description="`intersection`, `places`: the same by popularity alone."
    )
    tags: Number = Field(None, description="`tag_matching`: number of tags in the third party's store.")
    chance: Number = Field(
        None, description="`tag_matching`: share of the tags that is of the item with the most tags."
    )
    tags_named: Number = Field(
        None,
        description="`tag_matching`: share of the tags whose item is named by somebody with the store and public "
        "ratings.",
    )
    uploads_named: Number = Field(
        None, description="`tag_matching`: share of the uploads whose user is named."
    )
    unsplit_named: Number = Field(
        None, description="`tag_matching`: as `tags_named`, if every item had one tag for all of its users."
    )
    client_tags_named: Number = Field(
        None, description="`tag_matching`: as `tags_named`, with the graph key of one client that colludes."
    )
    client_uploads_named: Number = Field(
        None, description="`tag_matching`: as `uploads_named`, with this key."
    )

    @property
    def reached(self) -> float | None:
        """The AUC that the attack reached, with popularity between equals where that is more; None without any."""
        return max((one for one in (self.auc, self.auc_with_popularity) if one is not None), default=None)

    @property
    def gained(self) -> float | None:
        """What the attack's AUC is above that of popularity alone; None where either is unknown."""
        reached = self.reached
        return None if reached is None or self.popularity_auc is None else reached - self.popularity_auc

    def words(self) -> list[str]:
        """Return the figures that a line in the terminal shows."""
        best = self.auc if self.auc_with_popularity is None else self.auc_with_popularity
        if best is None:
            return [named] if (named := self._named()) else []
        alone = self.popularity_auc
        beside = "" if alone is None else f" (popularity alone {measure(alone)})"
        return [f"AUC {measure(best)}{beside}"]

    def reveals(self) -> str:
        """Return what an attack that ranks nothing reveals, in words; empty for the others."""
        return self._named()

    def _named(self) -> str:
        if self.tags_named is None:
            return ""
        beside = [
            f"{what} {percent(share)}"
            for what, share in (("unsplit", self.unsplit_named), ("with a client", self.client_tags_named))
            if share is not None
        ]
        return f"{percent(self.tags_named)} of the tags named" + (f" ({', '.join(beside)})" if beside else "")


class BesidePart(Part):
    """The second federation of a run (``[beside]``), trained on the data of the first seed."""

    label: str = Field("", description="What it is, in the words of `beside.label`.")
    changes: tuple[str, ...] = Field(
        (), description="Keys in which it differs, as `beside.changes` gives them."
    )
    metrics: dict[str, Number] = Field(
        default_factory=dict, description="Metrics of the version that counts, as `metrics` of the run."
    )
    attacks: Mapping[str, SerializeAsAny[AttackFigures]] = Field(
        default_factory=dict, description="As `attacks` of the run; only with `federation.attacks`."
    )
    failed: str = Field("", description="Why it has no figures, where it ended without a result.")


class FurtherRun(Part):
    """A federation trained beside the run with another value of one setting.

    A system that has such runs declares a subclass with the setting as a field, and a list of them as a key of its
    report.  The page shows each such list in a section.
    """

    setting: ClassVar[str] = ""
    """Name of the field with the value of the setting."""
    symbol: ClassVar[str] = ""
    """Name of the setting on the page."""
    title: ClassVar[str] = ""
    """Heading of the section."""
    lead: ClassVar[str] = ""
    """Sentence that explains the setting."""

    metrics: dict[str, Number] = Field(default_factory=dict, description="Metrics at the last evaluation.")
    rpcs: Number = Field(None, description="Number of calls.")
    cpu_seconds: Number = Field(
        None, description="CPU seconds of all processes, without those of their start."
    )


class SeedRecord(Part):
    """Record of one of several seeds; its other figures are in the folder of the seed."""

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
    """The heading of a report: the run, its data set, its software, and its results over all seeds."""

    format: StrictInt = Field(
        0, description="Version of the form of the file, now 1; reports of earlier releases have none."
    )
    run_id: str = Field(
        "", description="Id of the run: its name, time and four random digits. It sorts by time."
    )
    system: str = Field("", description="Name of the system.")
    label: str = Field("", description="Name of the trained model, as its paper writes it.")
    form: str = Field(
        "",
        description="Form of the system. For a system with rounds it names the members of a sum, `hosts` or "
        "`users`.",
    )
    secure_sum: str = Field("", description="Name of the secure sum.")
    experiment: StrictBool = Field(
        False,
        description="True where floors of sums count users and not devices (`rounds.experiment`): hosts of many "
        "users stand for many devices then, and the floors protect nobody from the users of one host.",
    )
    dataset: DatasetPart = Field(DatasetPart(), description="Name, size and split of the data set.")
    seeds: tuple[StrictInt, ...] = Field(
        (), description="Seeds of the run; one federation was trained for each."
    )
    settings: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of the run with their defaults, as in [configuration.md](configuration.md).",
    )
    metrics: Metrics = Field(
        default_factory=dict,
        description="Results by [metric](#metrics): of the last evaluation, or in systems with rounds of the "
        "version that validation items chose.",
    )
    reference: dict[str, ReferenceRow] = Field(
        default_factory=dict, description="[Baselines](#rows-beside-the-run) on the same data, by name."
    )
    versions: dict[str, str] = Field(
        default_factory=dict, description="Versions of Coterie and the packages that it uses."
    )
    machine: Figures = Field(
        default_factory=dict,
        description="Machine that the run was on: `python`, `system`, `processor`, `cores`.",
    )


class Course(Part):
    """The course, costs and disclosures of one federation; a report has those of its first seed."""

    history: tuple[EvaluationPart, ...] = Field((), description="Evaluations of the first seed, in order.")
    chosen: Chosen | None = Field(
        None,
        description="Systems with rounds: version of the model that counts; null if no version was evaluated.",
    )
    rounds: tuple[RoundRecord, ...] = Field((), description="Systems with rounds: record of every round.")
    abandoned: Number = Field(None, description="Systems with rounds: number of abandoned rounds.")
    groups: Number = Field(None, description="Systems with rounds: number of fixed groups.")
    waves: tuple[WavePart, ...] = Field(
        (), description="Runs whose population is open: users who came after the run had begun, in order."
    )
    closed_share: Number = Field(
        None,
        description="Systems with rounds whose groups are asked for their items: share of all users' training "
        "items, from 0 to 1, that are closed, because fewer than `min_touch` users of their group "
        "have them. No row learns from them. Null for other systems, and where the server never has "
        "the model.",
    )
    floors: FloorsPart = Field(
        FloorsPart(),
        description="Systems with rounds whose groups are asked for their items: what groups were expected to close "
        "and tell.",
    )
    privacy: PrivacyPart = Field(
        PrivacyPart(),
        description="Systems with rounds: differential privacy, where `rounds.privacy` adds noise.",
    )
    protection: Protection = Field(
        Protection(),
        description="Systems with rounds: protection by the sums, and what the cohorts disclose.",
    )
    over_users: dict[str, UsersPart] = Field(
        default_factory=dict,
        description="Spread over users of each metric of the version that counts; only with "
        "`federation.per_user_metrics`.",
    )
    third_party: dict[str, AskedService] = Field(
        default_factory=dict,
        description="Services of the third party that users asked, by name: `expansion` is "
        "[graph expansion](expansion.md), `latents` are [meta-latents](meta-latents.md).",
    )
    in_process: StrictBool = Field(
        False,
        description="True for a run without services (`coterie run --in-process`). It has no `third_party`, `traffic`, "
        "`network`, `counts`, `peak_rss_mb` and `visibility`.",
    )
    staleness: StalenessPart = Field(
        StalenessPart(), description="Asynchronous training: ages of gradients, in versions of the model."
    )
    owners_timeline: tuple[TimelinePoint, ...] = Field(
        (), description="Numbers of parties that were present, at each phase."
    )
    events: tuple[EventPart, ...] = Field(
        (), description="Events of the run: parties that joined or left, and phases."
    )
    resumes: tuple[ResumePart, ...] = Field(
        (), description="Resumptions of the run by `coterie resume`, in order."
    )
    updates: Number = Field(
        None, description="Number of updates that were applied, which is the version at the end."
    )
    start_seconds: Number = Field(
        None, description="Seconds until every process was started and the run created."
    )
    traffic: dict[str, Calls] = Field(default_factory=dict, description="Calls and bytes, by RPC.")
    network: Network = Field(Network(), description="Share of training that was spent on the network.")
    cpu_seconds: dict[str, CpuAccount] = Field(default_factory=dict, description="CPU seconds, by party.")
    restarted: dict[str, int] = Field(
        default_factory=dict,
        description="Processes that were ended from outside and started again, with how often, by party. Their CPU "
        "seconds, traffic, counts and memory are those since the last start.",
    )
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
    attacks: Mapping[str, SerializeAsAny[AttackFigures]] = Field(
        default_factory=dict,
        description="Figures by [attack](#attacks); only with `federation.attacks`.",
    )


class Report(Course, Heading):
    """The report of a run: the content of ``report.json``.

    A system whose reports have keys of their own declares a subclass (`coterie.systems.description.System.report`);
    `coterie.systems.reports.read_report` reads a stored report by it.
    """

    per_seed: tuple[SeedRecord, ...] = Field(
        (), description="Record of each seed, in runs with several seeds."
    )
    beside: BesidePart | None = Field(
        None, description="Second federation that the run was compared with, where `beside` asks for one."
    )
    started: str = Field("", description="Time at which the run began (ISO 8601, UTC).")
    duration_s: Number = Field(
        None,
        description="Seconds from the start to the report; in a run that was taken up, from the last time.",
    )
    taken_up: tuple[str, ...] = Field(
        (),
        description="Times at which `coterie runs resume` took the run up after an interruption (ISO 8601, UTC). "
        "Messages, CPU time and memory of a federation that went on from its stores count from the last time.",
    )

    def facts(self) -> list[tuple[str, str]]:
        """Return facts of a system's own keys that the page and the terminal list beside the rounds: name, text."""
        return []
