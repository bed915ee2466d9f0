"""Configuration of a run (``coterie run FILE.toml``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from coterie.config.base import Label, Model
from coterie.config.encryption import EncryptionSettings
from coterie.config.fedmf import FcfOptions, FedMfOptions
from coterie.config.fedncf import FedNcfOptions, RoundsSettings
from coterie.config.mvmf import MvmfOptions
from coterie.evaluation.leave_one_out import metric_names
from coterie.systems.combinations import combination
from coterie.systems.drift.shielded_run import MIN_MASKED, ShieldedPlan
from coterie.systems.fcf import host as fcf_rounds
from coterie.systems.fedmf import mathematics as fedmf
from coterie.systems.fedmf import server as fedmf_rounds
from coterie.systems.fedncf import mathematics as fedncf
from coterie.systems.registry import KEYED
from coterie.systems.shared import factors as mvmf
from coterie.systems.shared.factor_server import CHOOSE_BY, FIGURES

__all__ = [
    "ChurnSettings",
    "DataSettings",
    "DriftOptions",
    "FcfOptions",
    "FedMfOptions",
    "FedNcfOptions",
    "FederationSettings",
    "MvmfOptions",
    "RoundsSettings",
    "RunSettings",
    "SplitSettings",
    "StudySettings",
    "SyntheticSettings",
]


class SyntheticSettings(Model):
    """The embedded synthetic data set, used when no path is given."""

    users: int = Field(300, ge=2, description="Number of users.")
    items: int = Field(400, ge=2, description="Number of items.")
    interactions: int = Field(24_000, ge=4, description="Number of interactions.")
    genres: int = Field(6, ge=1, description="Number of genres.")
    seed: int = Field(0, ge=0, description="Seed of the generator.")


class DataSettings(Model):
    """Which interactions to learn from."""

    path: Path | None = Field(None, description="A data set; the synthetic one when absent.")
    layout: str | None = Field(None, description="Layout of the data set; recognised when absent.")
    columns: dict[str, str] = Field(
        default_factory=dict, description="CSV, TSV, Parquet: our column name to the file's."
    )
    positive_from: float = Field(
        3.0,
        description="A rating at or above this is positive. Of no meaning for fedncf, where every interaction counts, "
        "for fcf, where it does, too, and for fedmvmf and fedmf, which predict ratings.",
    )
    synthetic: SyntheticSettings = Field(
        default_factory=lambda: SyntheticSettings(), description="The synthetic set."
    )


class SplitSettings(Model):
    """How each user's interactions are divided."""

    kind: Literal["temporal", "random", "leave-last-out", "published", "cold-users", "cold-items"] = Field(
        "temporal",
        description="By time, at random, each user's last interaction, or the hold-out published with the data. "
        "fedncf holds one item of each user out: leave-last-out unless given. fedmvmf, fedmf and fcf divide at random "
        "unless given; fedmvmf also holds out whole users or whole items, as if they came afterwards.",
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


class DriftOptions(Model):
    """DRIFT."""

    form: Literal["published", "shielded"] = Field(
        "published",
        description="published: owners ask the server for rows and send it gradients, as in the paper. shielded: users "
        "take their rows along to owners, sealed, and the server sees sums over windows.",
    )
    dim: int = Field(16, ge=1, le=1024, description="Latent dimensions d.")
    rate: float = Field(0.2, gt=0, description="Step size alpha.")
    ridge: float = Field(0.001, ge=0, description="Ridge coefficient lambda.")
    theta: int = Field(
        2, ge=1, le=1024, description="published: saved blocks that trigger an update (Theta)."
    )
    epochs: int = Field(8, ge=1, le=10_000, description="Passes over the blocks.")
    item_bias: bool = Field(False, description="Fix the last coordinate of users to 1: an item bias.")
    max_staleness: int = Field(
        2000, ge=0, description="published: a gradient on rows older than this many versions is refused."
    )
    k_min: int = Field(
        5, ge=1, le=10_000, description="shielded: fewest distinct users behind a row that leaves its owner."
    )
    window: int = Field(128, ge=1, description="shielded: visits of users to owners between two windows.")
    window_s: float = Field(
        10.0, gt=0, description="shielded: seconds after which a window is opened that has seen fewer visits."
    )
    join_s: float = Field(
        10.0,
        gt=0,
        description="shielded: how long an owner may take to join a window, and for each of its steps, seconds.",
    )
    window_bound: float = Field(
        64.0, gt=0, description="shielded: largest absolute value of an owner's gradients in one window."
    )
    window_bits: int = Field(24, ge=8, le=28, description="shielded: bits of a transmitted value.")

    def windows(self) -> ShieldedPlan:
        """Return the settings of windows, as the plan of a run carries them."""
        return ShieldedPlan(
            k_min=self.k_min,
            window=self.window,
            window_s=self.window_s,
            join_s=self.join_s,
            bound=self.window_bound,
            bits=self.window_bits,
        )


class ChurnSettings(Model):
    """Owners that come late and leave early (to study joining and leaving)."""

    owners: int = Field(0, ge=0, description="How many owner processes.")
    join_at: float = Field(0.3, gt=0, lt=1, description="Share of the epochs after which they join.")
    leave_at: float = Field(0.6, gt=0, lt=1, description="Share of the epochs after which they leave.")

    @model_validator(mode="after")
    def _ordered(self) -> ChurnSettings:
        if self.owners and self.join_at >= self.leave_at:
            raise ValueError(f"join_at {self.join_at} must be below leave_at {self.leave_at}")
        return self


class FederationSettings(Model):
    """Who takes part, on this machine."""

    owners: int = Field(
        3,
        ge=0,
        description="Data owners; genres are grouped. 0: one owner for each genre. fedncf has one, which says which "
        "items there are; fedmvmf has mvmf.item_servers.",
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


class StudySettings(Model):
    """Further federations beside the run, for a section of their own in the report."""

    theta: tuple[int, ...] = Field(
        (), description="Values of Theta to compare, each a federation of its own."
    )


_USUAL: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "fedncf": {"split": {"kind": "leave-last-out"}, "rounds": {"passes": 300}},
    "fedmvmf": {
        "split": {"kind": "random"},
        # As in the paper everybody is in each round; a sum over so many shows little of any group.
        "rounds": {"cohorts": "all", "group": 1000, "choose_by": CHOOSE_BY},
    },
    "fedmf": {
        "split": {"kind": "random"},
        "rounds": {"cohorts": "all", "group": 1000, "choose_by": fedmf_rounds.CHOOSE_BY},
    },
    "fcf": {
        "split": {"kind": "random"},
        "rounds": {"cohorts": "all", "group": 1000, "choose_by": fcf_rounds.CHOOSE_BY},
    },
}
"""What holds for a system where nothing else is given."""


class RunSettings(Model):
    """A run: data, system, federation, seeds."""

    name: Label = Field("run", description="Name of the run; part of its id.")
    system: Literal["drift", "fedncf", "fedmvmf", "fedmf", "fcf"] = Field(
        "drift", description="Learning system."
    )
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
    drift: DriftOptions = Field(default_factory=lambda: DriftOptions(), description="Settings of drift.")
    fedncf: FedNcfOptions = Field(default_factory=lambda: FedNcfOptions(), description="Settings of fedncf.")
    mvmf: MvmfOptions = Field(default_factory=lambda: MvmfOptions(), description="Settings of fedmvmf.")
    fedmf: FedMfOptions = Field(default_factory=lambda: FedMfOptions(), description="Settings of fedmf.")
    fcf: FcfOptions = Field(default_factory=lambda: FcfOptions(), description="Settings of fcf.")
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
    def form(self) -> str:
        """Form of the system, as the plan names it: of rounds, whether hosts or users are the parties."""
        if self.system == "drift":
            return self.drift.form
        return "users" if self.rounds.party_per_user else "hosts"

    @property
    def sparse(self) -> bool:
        """Whether contributions to training leave out what has nothing in it."""
        return self.encryption.sparse and self.secure_sum in KEYED

    @property
    def room(self) -> int:
        """Largest number of users over which a sum of training has room, of systems that have rounds."""
        if self.system == "fedmvmf":
            return mvmf.layout(self.mvmf.settings(), 1, 1).capacity
        if self.system == "fedmf":
            return fedmf.layout(self.fedmf.plan().learning, 1).capacity
        if self.system == "fcf":
            return mvmf.layout(self.fcf.plan().learning.mvmf(), 1, 0).capacity
        return fedncf.layout(self.fedncf.plan().learning, n_items=1).capacity

    @property
    def width(self) -> int:
        """How many values a row of the model has."""
        if self.system == "drift":
            return self.drift.dim
        factors = {"fedmvmf": self.mvmf.factors, "fedmf": self.fedmf.factors, "fcf": self.fcf.factors}
        found = factors.get(self.system)
        return self.fedncf.plan().learning.architecture.width if found is None else found

    @property
    def variant(self) -> str:
        """Which of the system's models or presets is run; empty where there is one."""
        return {
            "fedncf": self.fedncf.model,
            "fedmvmf": self.mvmf.preset,
            "fedmf": f"{self.fedmf.steps} of gradients",
        }.get(self.system, "")

    def plan_settings(self, attributes: Sequence[str] = ()) -> str:
        """Return the settings of a system with rounds as the plan of a run carries them.

        Parameters
        ----------
        attributes : sequence of str
            Names of the users' attributes, of systems that learn from them.
        """
        if self.system == "fedmvmf":
            return self.mvmf.plan(attributes, new_items=self.split.kind == "cold-items").to_json()
        if self.system == "fedmf":
            return self.fedmf.plan().to_json()
        if self.system == "fcf":
            return self.fcf.plan().to_json()
        return self.fedncf.plan().to_json()

    @model_validator(mode="before")
    @classmethod
    def _of_the_system(cls, given: Any) -> Any:
        """Take from the system what the file says nothing of: split, cohorts, passes, what chooses a version."""
        usual = _USUAL.get(str(given.get("system"))) if isinstance(given, Mapping) else None
        if usual is None:
            return given
        made = dict(given)
        for table, values in usual.items():
            held = given.get(table, {})
            if isinstance(held, Mapping):
                made[table] = {**values, **held}
        return made

    @model_validator(mode="after")
    def _goes_together(self) -> RunSettings:
        problems = {
            "drift": _drift_problems,
            "fedncf": _fedncf_problems,
            "fedmvmf": _fedmvmf_problems,
            "fedmf": _factor_problems,
            "fcf": _factor_problems,
        }[self.system](self)
        together = combination(self.system, self.secure_sum, self.form)
        if not together.allowed:
            problems.append(f"secure_sum {self.secure_sum!r} with system {self.system!r}: {together.why}")
        if problems:
            raise ValueError("; ".join(problems))
        return self


def _drift_problems(settings: RunSettings) -> list[str]:
    federation, found = settings.federation, list[str]()
    if settings.split.kind.startswith("cold-"):
        found.append(
            f"split.kind {settings.split.kind!r}: drift has nothing to say of whom it has not learned from; expected "
            "'temporal' or 'random'"
        )
    if settings.drift.form == "published":
        return found
    if settings.secure_sum == "masked":
        for name, count in (("owners", federation.owners), ("hosts", federation.hosts)):
            # 0 owners are as many as there are genres.
            if 0 < count < MIN_MASKED:
                found.append(
                    f"secure_sum 'masked' with federation.{name} {count}: of two members each would know the other's "
                    f"vector; expected at least {MIN_MASKED}"
                )
    for name, asked in (
        ("study.theta", bool(settings.study.theta)),
        ("federation.evaluate_every", federation.evaluate_every > 0),
        ("federation.churn.owners", federation.churn.owners > 0),
    ):
        if asked:
            found.append(f"{name} is for the published form of drift only")
    return found


def _fedncf_problems(settings: RunSettings) -> list[str]:
    found = []
    if settings.split.kind not in ("leave-last-out", "published"):
        found.append(
            f"split.kind {settings.split.kind!r}: fedncf is measured by one held-out item of each user; expected "
            "'leave-last-out' or 'published'"
        )
    return found + _rounds_problems(
        settings,
        chosen_by=[name for name in metric_names() if name.startswith("validation_")],
        wide=f"fedncf.bits {settings.fedncf.bits} and n_cap {settings.fedncf.n_cap}",
    )


def _fedmvmf_problems(settings: RunSettings) -> list[str]:
    found = []
    if settings.split.kind in ("leave-last-out", "published"):
        found.append(
            f"split.kind {settings.split.kind!r}: fedmvmf orders several held-out ratings of each user; expected "
            "'random', 'temporal', 'cold-users' or 'cold-items'"
        )
    return found + _rounds_problems(
        settings,
        chosen_by=[name for name in FIGURES if name.startswith("validation_")],
        wide=f"mvmf.bits {settings.mvmf.bits}",
    )


def _sparse_problems(settings: RunSettings) -> list[str]:
    if not settings.sparse:
        return []
    systems: dict[str, tuple[str, int]] = {
        "fedmf": ("fedmf", settings.fedmf.min_touch),
        "fedmvmf": ("mvmf", settings.mvmf.min_touch),
    }
    if settings.system not in systems:
        return [
            f"encryption.sparse with system {settings.system!r}: its users have something everywhere, or rows are "
            f"divided by counts of the same sum; expected one of {', '.join(systems)}"
        ]
    found, (table, min_touch) = [], systems[settings.system]
    if settings.system == "fedmvmf" and settings.mvmf.weights == "incl-unc":
        found.append(
            "encryption.sparse with mvmf.weights 'incl-unc': users have something for every item; expected 'obs-only' "
            "or 'sampled'"
        )
    if min_touch < settings.rounds.min_sum:
        found.append(
            f"encryption.sparse with {table}.min_touch {min_touch}: what fewer than rounds.min_sum "
            f"{settings.rounds.min_sum} users sent is not added, and such items would never be learned; expected "
            f"{settings.rounds.min_sum} or more"
        )
    return found


def _factor_problems(settings: RunSettings) -> list[str]:
    """Return what is wrong of FedMF or FCF."""
    system, found = settings.system, []
    figures, kinds, bits = {
        "fedmf": (fedmf_rounds.FIGURES, ("random", "temporal"), settings.fedmf.bits),
        "fcf": (fcf_rounds.FIGURES, ("random", "temporal", "leave-last-out"), settings.fcf.bits),
    }[system]
    if settings.split.kind not in kinds:
        found.append(
            f"split.kind {settings.split.kind!r}: {system} is measured by held-out items of users that it has learned "
            f"from; expected {' or '.join(map(repr, kinds))}"
        )
    return found + _rounds_problems(
        settings,
        chosen_by=[name for name in figures if name.startswith("validation_")],
        wide=f"{system}.bits {bits}",
    )


_AGREEING = 2
"""Hosts that apply each sum where participants share the key (``coterie.secure_sum.shared_key``, which needs gmpy2)."""


def _rounds_problems(settings: RunSettings, *, chosen_by: Sequence[str], wide: str) -> list[str]:
    """Return what is wrong of a system with rounds; ``wide`` names what makes its codes so."""
    found = []
    federation, rounds = settings.federation, settings.rounds
    if settings.split.validation == 0:
        found.append(
            f"split.validation 0 leaves no item for rounds.choose_by {rounds.choose_by!r}; expected above 0"
        )
    if rounds.choose_by not in chosen_by:
        found.append(
            f"rounds.choose_by {rounds.choose_by!r} is not measured; expected one of {', '.join(chosen_by)}"
        )
    if settings.secure_sum != "clear" and federation.hosts == 1 and not rounds.party_per_user:
        found.append(
            f"secure_sum {settings.secure_sum!r} with federation.hosts 1: the host is the only party, and a sum over "
            "one member protects nothing; expected more hosts, or rounds.party_per_user true"
        )
    if settings.secure_sum == "shared-key" and federation.hosts < _AGREEING:
        found.append(
            f"secure_sum 'shared-key' with federation.hosts {federation.hosts}: {_AGREEING} hosts have to come to the "
            "same model; expected more hosts"
        )
    found += _sparse_problems(settings)
    if not rounds.experiment and federation.hosts < rounds.min_cohort:
        found.append(
            f"rounds.experiment false counts devices, and federation.hosts {federation.hosts} are fewer than "
            f"rounds.min_cohort {rounds.min_cohort}; expected true on one machine"
        )
    if rounds.cohorts != "all" and rounds.cohort > settings.room:
        found.append(
            f"{wide} leave room for sums over {settings.room} users, and rounds.cohort is {rounds.cohort}; expected "
            "fewer bits or users"
        )
    for name, asked in (
        ("federation.churn.owners", federation.churn.owners > 0),
        ("study.theta", bool(settings.study.theta)),
    ):
        if asked:
            found.append(f"{name} is for drift only")
    return found
