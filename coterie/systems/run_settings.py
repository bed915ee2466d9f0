"""Configuration of a run that all systems share: data, split, rounds, encryption, federation.

`BaseRunSettings` is a run without the tables of the systems; `coterie.config.run.RunSettings` adds a table for each
system that is registered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

from pydantic import Field, field_validator, model_validator

from coterie.crypto.key_record import KeyTerms
from coterie.data.folds import FOLDS
from coterie.evaluation.leave_one_out import CHOOSE_BY
from coterie.rounds.policy import LEAST_REDRAW, min_sum
from coterie.rounds.training import MOST_ABANDONED
from coterie.secure_sum.aggregation import Aggregation, AggregationRule
from coterie.secure_sum.chains import MOST_SUMS
from coterie.secure_sum.privacy import NoiseMechanism, NoisePlace, Privacy
from coterie.secure_sum.registry import KEYED
from coterie.systems.description import Driver, System
from coterie.systems.registry import system_named
from coterie.systems.settings import ConfigModel, Label, Sha256, SystemSettings, ValidationMetric
from coterie.systems.shared.optimisers import ServerOptimiser
from coterie.wire.versions import NEWEST

__all__ = [
    "AggregationSettings",
    "BaseRunSettings",
    "BesideSettings",
    "ChurnSettings",
    "DataSettings",
    "EncryptionSettings",
    "FederationSettings",
    "RaySettings",
    "RoundsSettings",
    "ServerOptimiserSettings",
    "SplitSettings",
    "SyntheticSettings",
]

_FIXED_GROUP = 200
"""Fewest users of a fixed group unless the run says otherwise."""

_LEAST_BITS = 2048

_CLUSTER = re.compile(r"(ray(://[^/\s:]+:[0-9]{1,5})?)?")

S = TypeVar("S", bound=SystemSettings)


class SyntheticSettings(ConfigModel):
    """The embedded synthetic data set, used when no path is given."""

    users: int = Field(300, ge=2, description="Number of users to generate.")
    items: int = Field(400, ge=2, description="Number of items to generate.")
    interactions: int = Field(24_000, ge=4, description="Number of interactions to generate.")
    genres: int = Field(6, ge=1, description="Number of genres; each item has one to three.")
    seed: int = Field(0, ge=0, description="Seed of the generator; equal seeds give equal data.")


class DataSettings(ConfigModel):
    """Which interactions to learn from."""

    path: Path | None = Field(
        None, description="File or folder of the data set. When absent, a synthetic one is generated."
    )
    layout: str | None = Field(
        None,
        description="Layout of the data set, such as `ml-100k` or `csv`. When absent, it is recognised by the "
        "names of the files.",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description='Columns of a CSV, TSV, Parquet or NumPy file, as in `{user = "customer", item = "sku"}`: our name '
        "to the file's.",
    )
    positive_from: float = Field(
        3.0,
        description="Lowest rating that counts as positive, for systems that learn from likes and dislikes. "
        "Other systems use the ratings, or count every interaction.",
    )
    rating_range: tuple[float, float] | None = Field(
        None,
        description="Lowest and highest rating that is not an error, as in `[0, 100]`. When absent, 0.5 to 5 in the "
        "MovieLens layouts and any number elsewhere.",
    )
    min_user: int = Field(
        1,
        ge=1,
        description="Fewest interactions of a user who is kept, counted once in the data set as it was read. 1: all "
        "users.",
    )
    min_item: int = Field(
        1,
        ge=1,
        description="Fewest interactions of an item that is kept, counted once like `data.min_user`. 1: all items.",
    )
    k_core: int = Field(
        1,
        ge=1,
        description="Fewest interactions of every user and item among those that are kept, counted again until nothing "
        "more drops out, after `data.min_user` and `data.min_item`. 1: no such filter.",
    )
    synthetic: SyntheticSettings = Field(
        default_factory=lambda: SyntheticSettings(),
        description="The synthetic data set, used when `data.path` is absent.",
    )

    @model_validator(mode="after")
    def _range(self) -> DataSettings:
        if self.rating_range is not None:
            low, high = self.rating_range
            if not (isfinite(low) and isfinite(high) and low <= high):
                raise ValueError(
                    f"rating_range [{low:g}, {high:g}]: expected two finite numbers, the lowest rating and the highest"
                )
        return self


class SplitSettings(ConfigModel):
    """How each user's interactions are divided."""

    kind: Literal[
        "temporal",
        "random",
        "leave-last-out",
        "leave-random-out",
        "published",
        "cold-users",
        "cold-items",
        "file",
    ] = Field(
        "temporal",
        description="Which interactions are held out to test: each user's last ones by time (temporal), random "
        "ones, each user's last one (leave-last-out), a random one of each user (leave-random-out), those "
        "published with the data, all of some users or items (cold-users, cold-items), as if they came later, or "
        "those that `split.path` names (file). A system refuses kinds by which it cannot be measured.",
    )
    fold: int | None = Field(
        None,
        ge=1,
        le=FOLDS,
        description="kind = published, MovieLens 100K: the published fold that tests, 1 to 5. When absent, each seed "
        "has its own, seed 0 the first one, so that five seeds test by every rating once.",
    )
    path: Path | None = Field(
        None,
        description="kind = file: the file with the part of each interaction, as `coterie data split` writes it. Every "
        "seed then has the same split.",
    )
    sha256: Sha256 = Field(
        "",
        description="kind = file: SHA-256 that the split must have, as a report names it (`split_sha256`). Empty: any.",
    )
    train: float = Field(
        0.8,
        gt=0,
        lt=1,
        description="Share that is not held out to test: of each user's interactions, or of the users or items "
        "with cold-users and cold-items. Splits of one interaction of each user, published and file ignore it.",
    )
    validation: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Share of the training part that is held out to choose a version of the model; where one "
        "interaction of each user is held out, one more of each, unless 0. file ignores it.",
    )
    ties: Literal["hash", "file"] = Field(
        "hash",
        description="leave-last-out: order of interactions at a user's last second, by a seeded hash of user and "
        "item or as in the file.",
    )

    @model_validator(mode="after")
    def _of_a_file(self) -> SplitSettings:
        if self.kind == "file" and self.path is None:
            raise ValueError("kind 'file' without path; expected the file that `coterie data split` wrote")
        if self.kind != "file" and (self.path is not None or self.sha256):
            key = "path" if self.path is not None else "sha256"
            raise ValueError(f"{key} with kind {self.kind!r}, which reads no file; expected kind 'file'")
        if self.kind != "published" and self.fold is not None:
            raise ValueError(
                f"fold {self.fold} with kind {self.kind!r}; expected kind 'published', or no fold"
            )
        return self


class ServerOptimiserSettings(ConfigModel):
    """Optimiser by which the server moves the model in rounds, for systems that step along sums."""

    name: Literal["none", "fedsgd", "fedavg", "fedadagrad", "fedadam", "fedyogi"] = Field(
        "none",
        description="none: the step of the system itself. fedavg: the same, by this name. fedsgd: that step times "
        "`rate`. fedadagrad, fedadam, fedyogi: steps whose size adapts to each value. In systems with a key "
        "`server_optimiser` of their own it takes that one's place; those that do not step take none.",
    )
    rate: float = Field(
        0.01,
        gt=0,
        allow_inf_nan=False,
        description="Size of a step; 1.0 for fedsgd unless given. fedavg ignores it.",
    )
    beta1: float = Field(
        0.9, ge=0, lt=1, description="fedadagrad, fedadam, fedyogi: decay of the mean of changes."
    )
    beta2: float = Field(
        0.99, ge=0, lt=1, description="fedadam, fedyogi: decay of the mean of squared changes."
    )
    tau: float = Field(
        1e-8,
        gt=0,
        allow_inf_nan=False,
        description="fedadagrad, fedadam, fedyogi: added to the root of the mean of squares; the larger, the less "
        "steps adapt.",
    )

    @model_validator(mode="before")
    @classmethod
    def _whole_steps(cls, given: Any) -> Any:
        """Fill in the rate of fedsgd where none is given."""
        if isinstance(given, Mapping) and given.get("name") == "fedsgd":
            return {"rate": 1.0, **given}
        return given

    @property
    def optimiser(self) -> ServerOptimiser | None:
        """The optimiser; None where the system's own step moves the model."""
        if self.name == "none":
            return None
        return ServerOptimiser(self.name, self.rate, self.beta1, self.beta2, self.tau)


class AggregationSettings(ConfigModel):
    """Terms on which the contributions to a round of training become one sum."""

    rule: AggregationRule = Field(
        "sum",
        description="How the server combines contributions; rules but sum need `secure_sum` clear. sum: added. median, "
        "trimmed-mean: by coordinate, over the members that touched the row. krum, distance, spectral: members that "
        "stand out are left out. norm-bound: scaled down to `norm_bound`, then added.",
    )
    byzantine: float = Field(
        0.1,
        gt=0,
        description="Members that may lie, for trimmed-mean, krum, distance and spectral: a share of those that "
        "submit if below 0.5, or a whole number.",
    )
    norm_bound: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Largest Euclidean norm of one user's contribution to training; 0: none. Hosts scale what is "
        "longer down before they round it, under every sum; with rule norm-bound the server does too.",
    )

    @property
    def terms(self) -> Aggregation:
        """The same as terms of a sum."""
        return Aggregation(self.rule, self.byzantine, self.norm_bound)


class PrivacySettings(ConfigModel):
    """Differential privacy: users' contributions to sums are clipped as a whole and get noise."""

    place: NoisePlace = Field(
        "none",
        description="Where noise is added. none: sums are exact. local: to each member's contribution, which the "
        "server "
        "may see. distributed: each user adds a part, and only a masked or encrypted sum has all of it.",
    )
    mechanism: NoiseMechanism = Field(
        "gaussian",
        description="gaussian: discrete Gaussian noise, Euclidean norms. laplace: discrete Laplace noise, sums of "
        "absolute "
        "values as norms; only with local.",
    )
    noise: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Standard deviation (gaussian) or scale (laplace) of the noise in multiples of a clip; what a sum "
        "costs follows from it alone.",
    )
    clip: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Largest norm of the values of one user's contribution that change the model; longer ones are "
        "scaled "
        "down.",
    )
    most_items: int = Field(
        100, ge=1, description="Largest number of items by which a user is counted: of more, a sample."
    )
    most_metrics: float = Field(
        10.0,
        gt=0,
        allow_inf_nan=False,
        description="Largest norm of a user's metrics that may be above 1, such as sums of squared errors; scaled down "
        "together.",
    )
    delta: float = Field(1e-5, gt=0, lt=1, description="Delta at which epsilon is stated.")
    colluders: int = Field(
        0,
        ge=0,
        description="distributed: users of a sum who may tell the server their noise; the others add more for it.",
    )
    per_value: bool = Field(
        False,
        description="Whether each value is clipped by itself, and `noise` is in multiples of that, as in FedGNN "
        "(clip 0.1, "
        "noise 2, laplace). It costs an epsilon that protects nobody, which the report states.",
    )

    @property
    def terms(self) -> Privacy:
        """The same as terms of sums."""
        return Privacy(**{name: getattr(self, name) for name in type(self).model_fields})


class RoundsSettings(ConfigModel):
    """Rounds of a system that learns in rounds: cohorts, floors, length and evaluation."""

    cohorts: Literal["groups", "random", "independent", "all"] = Field(
        "groups",
        description="How the users of a round are drawn. groups: whole fixed groups. random: at random, each "
        "user once in a pass, as in the papers. independent: at random, anew in each round. all: "
        "every user in every round.",
    )
    cohort: int = Field(
        _FIXED_GROUP,
        ge=1,
        description="Users of a cohort: at least this many with groups, exactly with random and independent.",
    )
    group: int = Field(
        _FIXED_GROUP,
        ge=1,
        description="Smallest number of users of a fixed group.",
    )
    fit_groups: bool = Field(
        False,
        description="Whether `group`, and `cohort` with it, grow for the data before the run is planned: they double "
        "until groups close at most 5% of users' training items, and tell at most .03 in AUC more of users' items "
        "than popularity does; if no groups do, one holds everybody. For `coterie run` and `coterie evaluate`, "
        "which have the data; `coterie bootstrap` refuses it.",
    )
    redraw: int = Field(
        0,
        ge=0,
        description="Passes after which fixed groups are drawn anew and asked for their items again; 0: never. "
        "Below 50 in experiments only: sums over groups that overlap can be subtracted from one "
        "another.",
    )
    most_users: int = Field(
        0,
        ge=0,
        description="Most users of a run whose population is open: users who come after it has begun take part from "
        "the next pass on, once they are enough for a group (docs/open-population.md). 0: the users are those who "
        "were there when it began.",
    )
    channel_rounds: int = Field(
        0,
        ge=0,
        le=MOST_SUMS,
        description="Masked sums: rounds for which two members use one agreement of their channel keys, with keys of "
        "their own for each; 0: they agree in each round. It takes processor time off members; whoever takes a "
        "member's memory could open the shares sealed for it until its members agree anew, with 0 none.",
    )
    passes: int = Field(
        60,
        ge=1,
        le=100_000,
        description="Most passes over all users (the papers' global rounds); `patience` may end a run earlier.",
    )
    evaluate_every: int = Field(
        5, ge=1, description="Passes between two evaluations of the model by all users."
    )
    patience: int = Field(
        5,
        ge=0,
        description="Evaluations without an improvement after which the run ends; 0: it makes all passes.",
    )
    choose_by: ValidationMetric = Field(
        CHOOSE_BY,
        description="Metric on the validation items that chooses the version of the model that counts: the "
        "highest value, or the lowest of an error.",
    )
    min_cohort: int = Field(20, ge=1, description="Smallest cohort in which members take part.")
    min_sum: int = Field(
        20,
        ge=1,
        description="Smallest number of contributors over which a sum is formed; two thirds of the cohort where "
        "that is more.",
    )
    step_timeout_s: float = Field(
        120.0,
        gt=0,
        description="Longest duration of one step of a round, seconds. A member that has not answered by then "
        "drops out of the round.",
    )
    experiment: bool = Field(
        True,
        description="Whether the floors `min_cohort` and `min_sum` count users. Set it to false where each host "
        "is one person's device: then they count devices. In an experiment one host stands for many "
        "devices.",
    )
    party_per_user: bool = Field(
        False,
        description="Whether each user is a member of its own in a sum, as on a device of its own. false: a host "
        "adds up its users' contributions first and is one member.",
    )
    server_optimiser: ServerOptimiserSettings = Field(
        default_factory=lambda: ServerOptimiserSettings(),
        description="Optimiser by which the server moves the model (docs/aggregation.md).",
    )
    aggregation: AggregationSettings = Field(
        default_factory=lambda: AggregationSettings(),
        description="How contributions to training become one sum: robust rules, and a bound of norms.",
    )
    privacy: PrivacySettings = Field(
        default_factory=lambda: PrivacySettings(),
        description="Clip and noise of users' contributions (docs/privacy.md).",
    )

    @model_validator(mode="after")
    def _floors(self) -> RoundsSettings:
        if self.redraw and self.cohorts != "groups":
            raise ValueError(
                f"redraw {self.redraw} with cohorts {self.cohorts!r}: there are no groups to draw anew"
            )
        if 0 < self.redraw < LEAST_REDRAW and not self.experiment:
            raise ValueError(
                f"redraw {self.redraw} is below {LEAST_REDRAW}: members refuse groups that are drawn anew so often"
            )
        if self.cohorts == "all":
            return self
        if self.cohort < self.min_cohort:
            raise ValueError(
                f"cohort {self.cohort} is below min_cohort {self.min_cohort}: every round would be refused"
            )
        if self.cohorts == "groups" and self.group < self.min_cohort:
            raise ValueError(
                f"group {self.group} is below min_cohort {self.min_cohort}: groups are asked for their items one "
                "by one, and that sum would be refused"
            )
        if min_sum(self.cohort, self.min_sum) > self.cohort:
            raise ValueError(f"min_sum {self.min_sum} is above cohort {self.cohort}: no sum would be formed")
        return self


class EncryptionSettings(ConfigModel):
    """The Paillier key of an encrypted sum, and who decrypts."""

    bits: int = Field(
        3072,
        ge=1024,
        le=8192,
        multiple_of=16,
        description="Length of the Paillier key's modulus, bits; 3072 stand for 128 bits of security.",
    )
    comparison: bool = Field(
        False,
        description="Whether a key of fewer than 2048 bits is allowed, to compare with a paper. Such a key "
        "protects nobody.",
    )
    obfuscators: Literal["public", "short"] = Field(
        "public",
        description="Length of the random exponents by which contributors hide values. public: half of the key's "
        "length. short: 512 bits, which is four times as fast and assumes more.",
    )
    holders: int = Field(
        3,
        ge=1,
        le=32,
        description="Number of decrypting clients, each of which holds the secret key and decrypts a part of "
        "each sum. There are none under secure_sum 'shared-key', where client hosts hold the key.",
    )
    sparse: bool = Field(
        False,
        description="Whether contributions to training leave out ciphertexts that hold only zeros (FedMF's "
        "PartText). It costs less, and shows the server near which items each user has something.",
    )
    rotate_every: int = Field(
        0, ge=0, description="Rounds after which the holders replace the key; 0: never."
    )

    @model_validator(mode="after")
    def _long_enough(self) -> Self:
        if self.bits < _LEAST_BITS and not self.comparison:
            raise ValueError(
                f"encryption.bits {self.bits}: keys of fewer than {_LEAST_BITS} bits are for comparisons with papers "
                "only (encryption.comparison = true)"
            )
        return self

    @property
    def terms(self) -> KeyTerms:
        """Requirements of the run for its Paillier keys, which parties check."""
        return KeyTerms(bits=self.bits, comparison=self.comparison)


class ChurnSettings(ConfigModel):
    """Owners that come late and leave early (to study joining and leaving)."""

    owners: int = Field(0, ge=0, description="Number of data-owner processes that join late and leave early.")
    join_at: float = Field(0.3, gt=0, lt=1, description="Share of the epochs after which they join.")
    leave_at: float = Field(0.6, gt=0, lt=1, description="Share of the epochs after which they leave.")

    @model_validator(mode="after")
    def _ordered(self) -> ChurnSettings:
        if self.owners and self.join_at >= self.leave_at:
            raise ValueError(f"join_at {self.join_at} must be below leave_at {self.leave_at}")
        return self


class FederationSettings(ConfigModel):
    """Parties of a run, their timeouts, and what they record."""

    owners: int = Field(
        3,
        ge=0,
        description="Number of data owners, for systems that divide items among owners by genre. 0: one owner "
        "for each genre.",
    )
    owner_processes: int = Field(
        0, ge=0, description="Number of processes that serve the data owners. 0: one for each owner."
    )
    hosts: int = Field(2, ge=1, description="Number of client hosts, among which the users are divided.")
    coordinators: int = Field(
        1,
        ge=1,
        le=4,
        description="Number of processes of the COS that take turns (`docs/replicas.md`): one serves, the others wait "
        "as its standbys. For `coterie bootstrap`; `coterie run` takes 1.",
    )
    intakes: int = Field(
        0,
        ge=0,
        le=32,
        description="Number of intakes of the COS, which hold the connections of parties (`docs/replicas.md`). For "
        "`coterie bootstrap`; `coterie run` takes 0.",
    )
    database: str | None = Field(
        None,
        description="URL of the PostgreSQL database that the processes of such a COS share, for their configurations. "
        "When absent, each is given it later, as by `COTERIE_DATABASE__URL`. Passwords do not belong here.",
    )
    min_users: int = Field(
        20,
        ge=1,
        description="Smallest number of users of a host that may send sums of metrics in clear; asynchronous "
        "training only.",
    )
    evaluate_every: int = Field(
        0,
        ge=0,
        description="Updates after which asynchronous training is also evaluated. 0: only at the end of each "
        "epoch.",
    )
    phase_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Longest duration of one phase of a run, seconds. Then the run ends and names the parties "
        "that are missing. Time in which the run waits for absent parties does not count.",
    )
    party_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Time without a call after which a party counts as absent, seconds. The run goes on without "
        "it until it calls again.",
    )
    most_abandoned: int = Field(
        MOST_ABANDONED,
        ge=1,
        description="Number of sums abandoned in a row after which a run that forms sums has failed. A run that waits "
        "for parties, because too few are there for a sum, or for another key after a holder was revoked, abandons "
        "none.",
    )
    give_up_s: float = Field(
        86_400.0,
        gt=0,
        description="Time without any sum after which a run in rounds has failed, seconds; that it waited for parties "
        "counts. In DRIFT: longest wait for owners or hosts, all of whom are away.",
    )
    check_in_s: float = Field(
        0.0,
        ge=0,
        le=86_400,
        description="Runs in rounds: longest time after which a host that checks in (`check_in` of its configuration) "
        "is asked to come back, seconds, at least 1; 0: the polls of all hosts are held. A host that may be in the "
        "next round comes back within half of `step_timeout_s`. Hosts that `coterie run` and `coterie bootstrap` "
        "configure check in if it is set.",
    )
    restarts: int = Field(
        3,
        ge=0,
        description="How many times in all `coterie run` starts a service again that was ended by a signal, as when "
        "memory runs out. Its state is in its store: the run goes on. After that the run fails.",
    )
    oldest_protocol: int = Field(
        0,
        ge=0,
        le=NEWEST,
        description="Lowest version of the protocol that every party of the run must speak; parties of older releases "
        "are refused by name. 0: the lowest that has what the plan uses.",
    )
    transcripts: bool = Field(
        False,
        description="Whether every service records its messages, private data included. The report then shows "
        "which kinds of data each party saw.",
    )
    attacks: bool = Field(
        False,
        description="Whether attacks on the server's recorded messages are run after training, with their "
        "accuracy in the report. Implies `transcripts`.",
    )
    per_user_metrics: bool = Field(
        False,
        description="Whether each user's figures at the chosen version are kept in the run's folder (`users.csv`), so "
        "that `coterie runs compare` compares two runs user by user. For experiments: they are private data.",
    )
    churn: ChurnSettings = Field(
        default_factory=lambda: ChurnSettings(),
        description="Data owners that join late and leave early, to study churn.",
    )

    @field_validator("check_in_s")
    @classmethod
    def _no_busy_loop(cls, check_in_s: float) -> float:
        if 0 < check_in_s < 1:
            raise ValueError(f"check_in_s {check_in_s:g}, expected 0, or 1 to 86400")
        return check_in_s


class RaySettings(ConfigModel):
    """Client hosts on the nodes of a Ray cluster, for experiments beyond one machine."""

    address: str = Field(
        "",
        description="The cluster on which client hosts run: `ray://HOST:PORT`, a port of Ray Client at its head, or "
        "`ray`, the cluster that this machine is a node of. Empty: hosts run on this machine. `coterie run --hosts` "
        "sets it.",
    )
    cpus: float = Field(
        1.0, gt=0, description="Processors that Ray reserves for each host; below 1, several share one."
    )
    memory_mb: int = Field(
        0,
        ge=0,
        description="Memory that Ray reserves for each host, MiB. 0: hosts are placed by processors only.",
    )
    reached_at: str = Field(
        "",
        description="Address of this machine at which nodes reach its services. Empty: the one from which it reaches "
        "the cluster.",
    )
    state: Path | None = Field(
        None,
        description="Folder that all nodes share, in which hosts keep their state while they run. When a node is "
        "lost, its hosts go on from there on other nodes. When absent, the run goes on without them.",
    )

    @field_validator("address")
    @classmethod
    def _of_a_cluster(cls, address: str) -> str:
        if _CLUSTER.fullmatch(address) is None:
            raise ValueError(f"{address!r} is no Ray cluster, expected ray://HOST:PORT, or ray")
        return address

    @property
    def head(self) -> tuple[str, int] | None:
        """Host and port of the cluster's head; None for the cluster that this machine is a node of."""
        host, _, port = self.address.removeprefix("ray://").rpartition(":")
        return (host, int(port)) if host else None


class BesideSettings(ConfigModel):
    """A second federation that is trained beside the run, for comparison, with some keys set otherwise."""

    label: str = Field("", max_length=80, description="What the second federation is, for the report.")
    changes: tuple[str, ...] = Field(
        (),
        description="Keys that it sets otherwise, each as `--set` takes it, such as "
        '`"secure_sum=clear"`. Without any there is no second federation. It is trained on the data of '
        "the first seed, after the run; where the run is attacked, so is this.",
    )


class BaseRunSettings(ConfigModel):
    """Settings of a run without the tables of systems: data, rounds, federation, seeds."""

    name: Label = Field(
        "run", description="Name of the run; its id is the name, the time and four random digits."
    )
    system: str = Field(description="Learning system to train; `coterie systems` lists them.")
    secure_sum: Literal["clear", "denoised", "masked", "encrypted", "shared-key"] = Field(
        "clear",
        description="How contributions are summed: in clear, in clear without the noise that denoisers take out, under "
        "masks, encrypted, or under a key that participants share. `coterie systems` shows which system runs under "
        "which.",
    )
    seeds: tuple[int, ...] = Field(
        (0,),
        min_length=1,
        description="Seeds of split, model and sampling. One federation is trained for each; the report has "
        "means over them.",
    )
    reference: bool = Field(
        True,
        description="Whether baselines are measured on the same data: the same model with all data in one place, "
        "where there is one, simple methods such as item-kNN and EASE, popularity and random order.",
    )
    output: Path = Field(Path("runs"), description="Folder in which each run gets a folder of its own.")
    data: DataSettings = Field(default_factory=lambda: DataSettings(), description="Data set to learn from.")
    split: SplitSettings = Field(
        default_factory=lambda: SplitSettings(),
        description="Division of the interactions into training, validation and test.",
    )
    rounds: RoundsSettings = Field(
        default_factory=lambda: RoundsSettings(),
        description="Cohorts, floors and length, for systems that learn in rounds.",
    )
    encryption: EncryptionSettings = Field(
        default_factory=lambda: EncryptionSettings(),
        description="Paillier key of sums with secure_sum 'encrypted' or 'shared-key'.",
    )
    federation: FederationSettings = Field(
        default_factory=lambda: FederationSettings(), description="Parties, timeouts and recordings."
    )
    ray: RaySettings = Field(
        default_factory=lambda: RaySettings(),
        description="Client hosts on the nodes of a Ray cluster (docs/ray.md).",
    )
    beside: BesideSettings = Field(
        default_factory=lambda: BesideSettings(),
        description="Second federation that is trained for comparison; by `coterie run` only.",
    )

    @property
    def description(self) -> System:
        """Description of the run's system."""
        return system_named(self.system)

    @property
    def own(self) -> SystemSettings:
        """Settings of the run's system."""
        return cast(SystemSettings, getattr(self, self.description.table))

    def table(self, kind: type[S]) -> S:
        """Return the settings of any system by their class, whichever system the run trains.

        Raises
        ------
        TypeError
            There is no table of this class.
        """
        for name in type(self).model_fields:
            if type(value := getattr(self, name)) is kind:
                return value
        raise TypeError(f"a run has no table of {kind.__name__}")

    def with_table(self, table: SystemSettings) -> Self:
        """Return a copy of the run with other settings of one system."""
        names = [name for name in type(self).model_fields if type(getattr(self, name)) is type(table)]
        return self.model_copy(update={names[0]: table})

    @property
    def form(self) -> str:
        """Name of the system's form, as in the plan."""
        return self.own.form_in(self)

    @property
    def driver(self) -> Driver:
        """Schedule by which the orchestration server drives the run."""
        return self.description.forms[self.form]

    @property
    def floors_count_users(self) -> bool:
        """Whether the run forms sums whose floors count users and not devices: an experiment."""
        return self.driver is not Driver.ASYNCHRONOUS and self.rounds.experiment

    @property
    def sparse(self) -> bool:
        """Whether contributions to training leave out ciphertexts that hold only zeros."""
        return self.encryption.sparse and self.secure_sum in KEYED
