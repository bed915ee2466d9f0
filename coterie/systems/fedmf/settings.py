"""Settings of FedMF."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from coterie.errors import ConfigError
from coterie.systems.fedmf.mathematics import FedMfSettings, layout, printed
from coterie.systems.fedmf.server import FIGURES, FedMfPlan
from coterie.systems.run import Run
from coterie.systems.settings import SystemSettings
from coterie.systems.shared.problems import (
    NO_GROUPS,
    few_behind,
    random_cohorts,
    rounds_problems,
    sparse_problems,
)

__all__ = ["FedMfOptions"]

_FEDMF = tuple(one.name for one in dataclasses.fields(FedMfSettings))
"""Settings that are named here as there."""

_MIN_TOUCH = "Fewest users of a group that must have rated an item for it to be trained."


class FedMfOptions(SystemSettings):
    """FedMF: ratings predicted from ratings alone, by gradient steps of each user, in rounds."""

    factors: int = Field(10, ge=1, le=1024, description="Latent factors K.")
    local_epochs: int = Field(1, ge=1, le=1000, description="Gradient steps of a user in a round, E.")
    steps: Literal["mean", "sum"] = Field(
        "mean",
        description="Whether factors move by the mean of their gradients over ratings, or by the sum, as printed: then "
        "one step size must be small enough for the most active user and the most rated item.",
    )
    rate: float = Field(
        0.05, gt=0, description="Step size of items' factors; 1e-4 with steps = sum unless given."
    )
    private_rate: float = Field(
        0.05, gt=0, description="Step size of users' own factors; 1e-4 with steps = sum unless given."
    )
    ridge: float = Field(
        0.02, ge=0, description="Ridge coefficient lambda, of a user's factor and its copies of rows."
    )
    lowest: float = Field(0.5, gt=0, description="Lowest rating that there is; one below is refused.")
    highest: float = Field(5.0, gt=0, description="Highest rating that there is; one above is refused.")
    bits: int = Field(16, ge=8, le=31, description="Bits of a transmitted value.")
    change_bound: float = Field(
        4.0,
        gt=0,
        description="Largest transmitted change of a value of an item; 0.02 with steps = sum unless given.",
    )
    min_touch: int = Field(3, ge=1, description=_MIN_TOUCH)

    def plan(self) -> FedMfPlan:
        """Return the settings as the plan of a run carries them.

        Raises
        ------
        ConfigError
            Settings that do not go together.
        """
        return FedMfPlan(FedMfSettings(**{name: getattr(self, name) for name in _FEDMF}), self.min_touch)

    @model_validator(mode="before")
    @classmethod
    def _of_the_steps(cls, given: Any) -> Any:
        """Take rates and bound that are not given from those that suit the steps."""
        if not isinstance(given, Mapping) or given.get("steps") != "sum":
            return given
        found = printed()
        usual = {name: getattr(found, name) for name in ("rate", "private_rate", "change_bound")}
        return {**usual, **given}

    @model_validator(mode="after")
    def _together(self) -> FedMfOptions:
        try:
            self.plan()
        except ConfigError as error:
            raise ValueError(error.message) from error
        return self

    def for_plan(self, run: Run, attributes: Sequence[str] = ()) -> str:
        """Return the settings as `RunPlan.settings` carries them, JSON."""
        return self.plan().to_json()

    @property
    def variant(self) -> str:
        """Which of the models or presets is run."""
        return f"{self.steps} of gradients"

    @property
    def width(self) -> int:
        """How many values a row of the model has."""
        return self.factors

    @property
    def room(self) -> int:
        """Largest number of users over which a sum of training has room."""
        return layout(self.plan().learning, 1).capacity

    @property
    def rating_range(self) -> tuple[float, float] | None:
        """Lowest and highest rating that the system learns from."""
        return self.lowest, self.highest

    def problems(self, run: Run) -> list[str]:
        """Return what of a run does not go together with these settings, a sentence each."""
        found = []
        kinds = ("random", "temporal")
        if run.split.kind not in kinds:
            found.append(
                f"split.kind {run.split.kind!r}: {run.system} is measured by held-out items of users that it has "
                f"learned from; expected {' or '.join(map(repr, kinds))}"
            )
        return found + rounds_problems(
            run,
            chosen_by=[name for name in FIGURES if name.startswith("validation_")],
            wide=f"{run.description.table}.bits {self.bits}",
        )

    def sparse_problems(self, run: Run) -> list[str]:
        """Return why contributions cannot leave out what has nothing in it, a sentence each."""
        return sparse_problems(run, self.min_touch)

    def warnings(self, run: Run) -> list[str]:
        """Return what the cohorts and settings of a run give away, a sentence each."""
        found = [NO_GROUPS] if random_cohorts(run) else []
        found += few_behind(run, self.min_touch)
        if run.secure_sum == "clear":
            found.append(
                "In a user's contribution the rows of items that it has not rated are zero: in clear it shows which it "
                "has rated, and the others are multiples of the user's own factor, or nearly so."
            )
        return found
