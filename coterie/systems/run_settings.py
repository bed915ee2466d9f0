"""Configuration of a run that all systems share: data, split, rounds, encryption, federation.

`BaseRunSettings` is a run without the tables of the systems; `coterie.config.run.RunSettings` adds a table for each
system that is registered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self, TypeVar, cast

from pydantic import Field, model_validator

from coterie.crypto.key_record import KeyTerms
from coterie.evaluation.leave_one_out import CHOOSE_BY
from coterie.rounds.policy import LEAST_REDRAW, min_sum
from coterie.secure_sum.registry import KEYED
from coterie.systems.description import Driver, System
from coterie.systems.registry import system_named
from coterie.systems.settings import ConfigModel, Label, SystemSettings

__all__ = [
    "BaseRunSettings",
    "ChurnSettings",
    "DataSettings",
    "EncryptionSettings",
    "FederationSettings",
    "RoundsSettings",
    "SplitSettings",
    "StudySettings",
    "SyntheticSettings",
]

_FIXED_GROUP = 200
"""Fewest users of a fixed group unless the run says otherwise."""

_LEAST_BITS = 2048

S = TypeVar("S", bound=SystemSettings)


class SyntheticSettings(ConfigModel):
    """The embedded synthetic data set, used when no path is given."""

    users: int = Field(300, ge=2, description="Number of users.")
    items: int = Field(400, ge=2, description="Number of items.")
    interactions: int = Field(24_000, ge=4, description="Number of interactions.")
    genres: int = Field(6, ge=1, description="Number of genres.")
    seed: int = Field(0, ge=0, description="Seed of the generator.")


class DataSettings(ConfigModel):
    """Which interactions to learn from."""

    path: Path | None = Field(None, description="A data set; the synthetic one when absent.")
    layout: str | None = Field(None, description="Layout of the data set; recognised when absent.")
    columns: dict[str, str] = Field(
        default_factory=dict, description="CSV, TSV, Parquet: our column name to the file's."
    )
    positive_from: float = Field(
        3.0,
        description="A rating at or above this is positive, for systems that learn from likes and dislikes; others "
        "count every interaction, or predict ratings.",
    )
    synthetic: SyntheticSettings = Field(
        default_factory=lambda: SyntheticSettings(), description="The synthetic set."
    )


class SplitSettings(ConfigModel):
    """How each user's interactions are divided."""

    kind: Literal["temporal", "random", "leave-last-out", "published", "cold-users", "cold-items"] = Field(
        "temporal",
        description="By time, at random, each user's last interaction, or the hold-out published with the data; or "
        "whole users or whole items, as if they came afterwards. A system refuses what it cannot be measured by.",
    )
    train: float = Field(
        0.8,
        gt=0,
        lt=1,
        description="Share that is not test: of each user's interactions, or of the users or items where these are "
        "held out as a whole; of no meaning where one interaction is held out.",
    )
    validation: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Share of the training part that is held out to choose the epoch. "
        "Where one interaction is held out: one more of each user, unless 0.",
    )
    ties: Literal["hash", "file"] = Field(
        "hash",
        description="leave-last-out: which of several interactions at the last second is the last, "
        "by a seeded hash of user and item or by the order of the file.",
    )


class RoundsSettings(ConfigModel):
    """Rounds of a rounds-based system: who is in them, and when the run ends."""

    cohorts: Literal["groups", "random", "independent", "all"] = Field(
        "groups",
        description="Whole fixed groups of users; users at random as in the papers, each once in a pass, or drawn "
        "anew in each round (independent); or everybody in each round.",
    )
    cohort: int = Field(
        _FIXED_GROUP, ge=1, description="Users of a cohort: at least (groups), exactly (random, independent)."
    )
    group: int = Field(
        _FIXED_GROUP,
        ge=1,
        description="Fewest users of a fixed group.",
    )
    redraw: int = Field(
        0,
        ge=0,
        description="Passes after which fixed groups are drawn anew and asked for their items again. 0: never. "
        "Fewer than 50 in an experiment only: sums over groups that overlap can be subtracted from one another.",
    )
    passes: int = Field(
        60,
        ge=1,
        le=100_000,
        description="Most passes over all users (the paper's global rounds); patience may end a run before.",
    )
    evaluate_every: int = Field(5, ge=1, description="Passes between two evaluations of all users.")
    patience: int = Field(
        5,
        ge=0,
        description="Evaluations without a better one after which the run ends. 0: all passes are made.",
    )
    choose_by: str = Field(
        CHOOSE_BY,
        pattern="^validation_",
        description="Metric on the validation items by which the version that counts is chosen; of errors the lowest "
        "counts.",
    )
    min_cohort: int = Field(20, ge=1, description="A cohort of fewer is refused by its members.")
    min_sum: int = Field(
        20, ge=1, description="A sum over fewer, or over less than two thirds of the cohort, is not formed."
    )
    step_timeout_s: float = Field(120.0, gt=0, description="Longest time for one step of a round, seconds.")
    experiment: bool = Field(
        True,
        description="Floors count users; false: they count devices, as they must where a host is one of many "
        "people's devices. One host of this machine stands for many devices.",
    )
    party_per_user: bool = Field(
        False,
        description="Every user is a party of its own, to measure devices honestly. false: a host is one party and "
        "adds up its users before anything leaves it.",
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
        description="Length of the key's modulus; 3072 stand for 128 bits.",
    )
    comparison: bool = Field(
        False,
        description="Whether the run compares with a paper: only then a key may have fewer than 2048 bits. Such a key "
        "protects nobody.",
    )
    obfuscators: Literal["public", "short"] = Field(
        "public",
        description="How contributors hide their values: by exponents of half the key's length, or of 512 bits, which "
        "is four times as fast and assumes more.",
    )
    holders: int = Field(
        3,
        ge=1,
        le=32,
        description="Decrypting clients: they hold the secret key together, and decrypt a part of each sum each. With "
        "secure_sum 'shared-key' client hosts hold it, and there are none.",
    )
    sparse: bool = Field(
        False,
        description="Whether contributions to training leave out ciphertexts without anything in them: FedMF's "
        "PartText. It costs less, and shows the server near which items each user has something.",
    )
    rotate_every: int = Field(
        0, ge=0, description="Rounds after which those who hold the key make another one; 0 for never."
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

    owners: int = Field(0, ge=0, description="How many owner processes.")
    join_at: float = Field(0.3, gt=0, lt=1, description="Share of the epochs after which they join.")
    leave_at: float = Field(0.6, gt=0, lt=1, description="Share of the epochs after which they leave.")

    @model_validator(mode="after")
    def _ordered(self) -> ChurnSettings:
        if self.owners and self.join_at >= self.leave_at:
            raise ValueError(f"join_at {self.join_at} must be below leave_at {self.leave_at}")
        return self


class FederationSettings(ConfigModel):
    """Who takes part, on this machine."""

    owners: int = Field(
        3,
        ge=0,
        description="Data owners, of systems whose owners hold genres; genres are grouped. 0: one owner for each "
        "genre.",
    )
    owner_processes: int = Field(
        0, ge=0, description="Processes that serve the owners. 0: one for each owner."
    )
    hosts: int = Field(2, ge=1, description="Client hosts; users are spread over them.")
    min_users: int = Field(20, ge=1, description="A host with fewer users sends no metric sum.")
    evaluate_every: int = Field(
        0, ge=0, description="Evaluate also after every so many updates. 0: at the end of each epoch."
    )
    phase_timeout_s: float = Field(600.0, gt=0, description="Longest time for one phase, seconds.")
    party_timeout_s: float = Field(
        60.0, gt=0, description="A silent party counts as absent after this, seconds."
    )
    transcripts: bool = Field(False, description="Every service records what it received.")
    attacks: bool = Field(
        False, description="Run the attacks on the recorded transcript and put their accuracy in the report."
    )
    churn: ChurnSettings = Field(
        default_factory=lambda: ChurnSettings(), description="Late and early owners."
    )


class StudySettings(ConfigModel):
    """Further federations beside the run, for a section of their own in the report."""

    theta: tuple[int, ...] = Field(
        (), description="Values of Theta to compare, each a federation of its own."
    )


class BaseRunSettings(ConfigModel):
    """Settings of a run without the tables of systems: data, rounds, federation, seeds."""

    name: Label = Field("run", description="Name of the run; part of its id.")
    system: str = Field(description="Learning system.")
    secure_sum: Literal["clear", "masked", "encrypted", "shared-key"] = Field(
        "clear",
        description="How contributions are summed; `coterie systems` shows what goes with which system.",
    )
    seeds: tuple[int, ...] = Field((0,), min_length=1, description="One federation is run for each seed.")
    reference: bool = Field(
        True,
        description="Also train the centralised reference (SAROS, NCF), where there is one, and trivial rows.",
    )
    output: Path = Field(Path("runs"), description="Folder in which the run leaves its own.")
    data: DataSettings = Field(default_factory=lambda: DataSettings(), description="Data set.")
    split: SplitSettings = Field(default_factory=lambda: SplitSettings(), description="Split.")
    rounds: RoundsSettings = Field(
        default_factory=lambda: RoundsSettings(), description="Rounds, of systems that have any."
    )
    encryption: EncryptionSettings = Field(
        default_factory=lambda: EncryptionSettings(),
        description="The key of sums with secure_sum 'encrypted' or 'shared-key'.",
    )
    study: StudySettings = Field(default_factory=lambda: StudySettings(), description="Studies.")
    federation: FederationSettings = Field(
        default_factory=lambda: FederationSettings(), description="The parties."
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
    def sparse(self) -> bool:
        """Whether contributions to training leave out ciphertexts that hold only zeros."""
        return self.encryption.sparse and self.secure_sum in KEYED
