"""Settings of DRIFT: a table in a run's file, its part of a plan, and the input of the mathematics."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from coterie.errors import ConfigError
from coterie.secure_sum.contribution import Layout, Segment
from coterie.systems.run_settings import BaseRunSettings
from coterie.systems.settings import MaskedSum, SystemSettings
from coterie.systems.shared.problems import FEWEST_BEHIND
from coterie.wire.v1.orchestrator_pb2 import RunPlan

__all__ = ["MIN_MASKED", "DriftSettings"]

MIN_MASKED = 3
"""Fewest owners, or hosts, in a masked sum: of two each would know the other's vector."""

_MOST_BLOCKS = 1024
"""Largest number of blocks of an update."""

_IN_FIELDS = ("form", "dim", "rate", "ridge", "theta", "item_bias", "max_staleness", "epochs")
"""Settings that are fields of a plan."""

_IN_JSON = {
    "k_min": "k_min",
    "window": "window",
    "window_s": "window_s",
    "join_s": "join_s",
    "window_bound": "bound",
    "window_bits": "bits",
}
"""Settings that the plan of the shielded form carries as JSON, and their keys there."""

_WITH_LOCAL = {"local_updates": "local_updates"}
"""Setting that the plan of the published form carries as JSON where it is above 1, and its key there."""

_WITH_UNSEEN = {name: name for name in ("unseen", "unseen_each", "seen_weight", "bias_weights")}
"""Settings that the plan carries as JSON where unseen items are drawn, and their keys there."""


class DriftSettings(SystemSettings):
    """DRIFT.

    One class serves as the table of a file, as the content of a plan and as an argument of the mathematics.
    """

    local: ClassVar[frozenset[str]] = frozenset({"compare_theta"})
    """Keys that only the launcher of a run reads: they are no part of its plan."""

    init_scale: ClassVar[float] = 0.03
    """Standard deviation of the initial values: at zero no gradient would ever start."""

    form: Literal["published", "shielded"] = Field(
        "published",
        description="published: data owners ask the server for rows of users and items and send it gradients in "
        "clear, as in the paper. shielded: users bring their rows to owners, sealed, and the server "
        "sees sums over windows of visits.",
    )
    dim: int = Field(16, ge=1, le=1024, description="Number of latent dimensions, d in the paper.")
    rate: float = Field(0.2, gt=0, description="Step size, alpha in the paper.")
    ridge: float = Field(0.001, ge=0, description="Weight of the L2 penalty, lambda in the paper.")
    theta: int = Field(
        2,
        ge=1,
        le=_MOST_BLOCKS,
        description="published: number of saved blocks after which an owner makes an update (Theta in the "
        "paper).",
    )
    compare_theta: tuple[int, ...] = Field(
        (),
        description="published: values of `theta` to compare. Each is trained beside the run, in a federation of its "
        "own, and the report has a section on them.",
    )
    epochs: int = Field(
        8, ge=1, le=10_000, description="Passes of each owner over its blocks of interactions."
    )
    item_bias: bool = Field(
        False,
        description="Whether the last coordinate of every user's row is fixed to 1, which makes that of an item "
        "a bias. With `unseen` it is learned as the item's log-odds of being liked, apart from the pairs.",
    )
    unseen: Literal["none", "own", "all"] = Field(
        "none",
        description="Whether liked items are also paired with items that the user has not seen. none: no, as in the "
        "paper. own: with items of the same owner. all: with items of every owner, only in the shielded form, whose "
        "owners have all rows. A run on data without dislikes needs it.",
    )
    unseen_each: int = Field(
        4,
        ge=1,
        le=100,
        description="Unseen items drawn anew for each liked item in each pass, with `unseen`.",
    )
    seen_weight: float = Field(
        0.2, ge=0, description="Weight of the pairs with disliked items, with `unseen`; the others have 1."
    )
    bias_weights: tuple[float, ...] = Field(
        (0.0, 0.5, 1.0, 2.0, 4.0),
        min_length=1,
        max_length=16,
        description="Weights to try for the bias of items in a ranking, with `unseen` and `item_bias`. Each host takes "
        "for each ranking the one that is best on validation data of its users; without such data, the first.",
    )
    max_staleness: int = Field(
        2000,
        ge=0,
        description="published: largest age of the rows of a gradient, in versions of the model. Older gradients "
        "are refused.",
    )
    local_updates: int = Field(
        1,
        ge=1,
        le=64,
        description="published: updates that an owner makes between two exchanges with the server. It fetches the rows "
        "of all of them, computes each on the rows as its own updates before left them, and sends them together. A "
        "larger number means fewer messages, and rows that lack more of the other owners' updates; `max_staleness` "
        "bounds how many.",
    )
    k_min: int = Field(
        5,
        ge=1,
        le=10_000,
        description="shielded: smallest number of distinct users behind a row that may leave its owner.",
    )
    window: int = Field(
        128,
        ge=1,
        description="shielded: visits of users to owners after which the owners' gradients are summed (a "
        "window).",
    )
    window_s: float = Field(
        10.0,
        gt=0,
        description="shielded: time after which a window is summed that has had fewer visits, seconds.",
    )
    join_s: float = Field(
        10.0,
        gt=0,
        description="shielded: longest time that an owner may take to join a window, and for each step of its "
        "sum, seconds.",
    )
    window_bound: float = Field(
        64.0, gt=0, description="shielded: largest absolute value of an owner's gradients in one window."
    )
    window_bits: int = Field(
        24, ge=8, le=28, description="shielded: bits to which each value of an owner's gradients is rounded."
    )

    @field_validator("compare_theta")
    @classmethod
    def _within_bounds(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if wrong := [value for value in values if not 1 <= value <= _MOST_BLOCKS]:
            raise ValueError(f"{wrong[0]} is no value of theta; expected 1 to {_MOST_BLOCKS}")
        return values

    @model_validator(mode="after")
    def _a_user_has_more_than_its_constant(self) -> Self:
        if self.item_bias and self.dim < 2:
            raise ValueError(f"dim is {self.dim}; expected at least 2 with item_bias")
        return self

    @model_validator(mode="after")
    def _owners_have_the_rows_of_unseen_items(self) -> Self:
        if self.unseen == "all" and self.form != "shielded":
            raise ValueError(
                "unseen 'all' with form 'published': an owner would ask the server for rows of other owners' items; "
                "expected unseen 'own', or form 'shielded'"
            )
        return self

    @classmethod
    def from_plan(cls, plan: RunPlan) -> Self:
        """Return the settings that a plan carries; settings of the other form have their defaults.

        Raises
        ------
        ConfigError
            When the settings are malformed, have an unknown key, or a value is out of its range.
        """
        try:
            found = {name: getattr(plan, name) for name in _IN_FIELDS}
            if plan.settings or plan.form == "shielded":
                found |= _in_json(plan.settings, shielded=plan.form == "shielded")
            return cls.model_validate(found, strict=True)
        except ValueError as error:
            raise ConfigError(
                f"the settings of the plan are not those of DRIFT: {_words(error)}",
                hint="the peers may be of another release",
            ) from error

    def for_plan(self, run: BaseRunSettings | None = None, attributes: Sequence[str] = ()) -> str:
        """Return the settings of windows, local updates and unseen items as JSON; equal texts for equal settings.

        The text is empty where a run has none of them, in the paper's form.
        """
        keys = {
            **(_IN_JSON if self.form == "shielded" else {}),
            **(_WITH_LOCAL if self.form == "published" and self.local_updates > 1 else {}),
            **(_WITH_UNSEEN if self.pairs_unseen else {}),
        }
        if not keys:
            return ""
        plain = {key: getattr(self, name) for name, key in keys.items()}
        return json.dumps(plain, sort_keys=True, separators=(",", ":"))

    def window_layout(self, n_items: int) -> Layout:
        """Return the layout of an owner's vector in a window: a gradient for every item's row.

        Rows that must not leave the owner are zeros.
        """
        return Layout((Segment("gradient", (n_items, self.dim), self.window_bound, self.window_bits),))

    def fill(self, plan: RunPlan, run: BaseRunSettings | None = None, attributes: Sequence[str] = ()) -> None:
        """Write the settings into the plan of a run; ``run`` and ``attributes`` are not used."""
        plan.dim = self.dim
        plan.rate = self.rate
        plan.ridge = self.ridge
        plan.theta = self.theta
        plan.item_bias = self.item_bias
        plan.max_staleness = self.max_staleness
        plan.epochs = self.epochs
        plan.settings = self.for_plan()

    @property
    def pairs_unseen(self) -> bool:
        """Whether liked items are also paired with unseen ones."""
        return self.unseen != "none"

    @property
    def without_dislikes(self) -> str:
        """Settings with which the system learns from likes alone, in words; empty where it does already."""
        return "" if self.pairs_unseen else "drift.unseen = 'own', which pairs liked items with unseen ones"

    @property
    def ranks_by_odds(self) -> bool:
        """Whether items have log-odds of being liked, which each ranking weighs in its own way."""
        return self.pairs_unseen and self.item_bias

    @property
    def width(self) -> int:
        """Number of values in a row of the model."""
        return self.dim

    @property
    def owners_floor(self) -> int | None:
        """Fewest users behind a row that leaves a data owner; None in the published form, which holds none back."""
        return self.k_min if self.form == "shielded" else None

    @property
    def room(self) -> int:
        """Largest number of owners in a window whose codes cannot overflow."""
        return self.window_layout(1).capacity

    def form_in(self, run: BaseRunSettings) -> str:
        """Return the form of the system, as the plan names it."""
        return self.form

    def passes(self, run: BaseRunSettings) -> int:
        """Return the number of passes over the blocks that a run makes."""
        return self.epochs

    def problems(self, run: BaseRunSettings) -> list[str]:
        """Return the conflicts between a run and these settings, a sentence each."""
        federation, found = run.federation, list[str]()
        if run.split.kind.startswith("cold-"):
            found.append(
                f"split.kind {run.split.kind!r}: DRIFT has nothing to say of whom it has not learned from; expected "
                "'temporal' or 'random'"
            )
        if self.form == "published":
            return found
        if run.secure_sum == "masked":
            for name, count in (("owners", federation.owners), ("hosts", federation.hosts)):
                # 0 stands for one owner for each genre.
                if 0 < count < MIN_MASKED:
                    found.append(
                        f"secure_sum 'masked' with federation.{name} {count}: of two members each would know the "
                        f"other's vector; expected at least {MIN_MASKED}"
                    )
        for name, asked in (
            ("drift.compare_theta", bool(self.compare_theta)),
            ("drift.local_updates", self.local_updates > 1),
            ("federation.evaluate_every", federation.evaluate_every > 0),
            ("federation.churn.owners", federation.churn.owners > 0),
        ):
            if asked:
                found.append(f"{name} is for the published form of DRIFT only")
        return found

    def protection(self, run: BaseRunSettings, hosts: int) -> dict[str, Any] | None:
        """Describe what the windows of DRIFT's shielded form protect."""
        masked = run.secure_sum == "masked"
        found: dict[str, Any] = {"sum": run.secure_sum, "parties": "data owners", "warnings": []}
        rows = f"rows with at least {self.k_min} users behind them"
        if masked:
            found["says"] = (
                f"The server sees, for each window, the sum over all owners that joined, of {rows}, and no vector of a "
                "single owner."
            )
        else:
            found["says"] = f"The server sees, for each window, one vector of each owner, of {rows}."
        if self.k_min < FEWEST_BEHIND:
            found["warnings"].append(
                f"drift.k_min {self.k_min}: rows of so few users leave their owner; of two users each would know the "
                "other's part."
            )
        if hosts and run.rounds.experiment:
            found["warnings"].append(
                "An experiment: a host of this machine stands for many people's devices, and keeps all their rows."
            )
        return found

    def masked_sums(self, run: BaseRunSettings, hosts: int) -> list[MaskedSum] | None:
        """Return the masked sums of a run: over hosts in an evaluation, over owners in a window."""
        sums = [MaskedSum(hosts, "client hosts", "its users are measured with the next one")]
        # 0 stands for one owner for each genre of the data, whose number is not known here.
        if run.federation.owners:
            sums.append(MaskedSum(run.federation.owners, "data owners", "the next one has its rows"))
        return sums


def _in_json(text: str, *, shielded: bool) -> dict[str, Any]:
    """Parse the settings that a plan carries as JSON, and return them by name.

    Raises
    ------
    ValueError
        When the text is no JSON object, or has an unknown key.
    """
    keys = {**(_IN_JSON if shielded else _WITH_LOCAL), **_WITH_UNSEEN}
    plain = json.loads(text)
    if not isinstance(plain, dict):
        raise ValueError(f"settings are {type(plain).__name__}; expected an object")
    if unknown := sorted(plain.keys() - set(keys.values())):
        raise ValueError(f"unknown {', '.join(unknown)}; expected {', '.join(sorted(keys.values()))}")
    found = {name: plain[key] for name, key in keys.items() if key in plain}
    # JSON has no tuples, and a plan's values are read as they are.
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _words(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'all'}: {one['msg']}" for one in error.errors())
