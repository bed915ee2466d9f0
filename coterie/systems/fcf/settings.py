"""Settings of FCF."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from coterie.errors import ConfigError
from coterie.systems.fcf.host import FIGURES, FcfPlan
from coterie.systems.fcf.mathematics import FcfSettings
from coterie.systems.run import Run
from coterie.systems.settings import SystemSettings
from coterie.systems.shared.factors import layout
from coterie.systems.shared.optimisers import ServerOptimiser
from coterie.systems.shared.problems import few_behind, rounds_problems

__all__ = ["FcfOptions"]

_FCF = tuple(one.name for one in dataclasses.fields(FcfSettings) if one.name != "server")
"""Settings that are named here as there."""

_MIN_TOUCH = "Fewest users of a group that must have rated an item for it to be trained."


class FcfOptions(SystemSettings):
    """FCF: what users take up, from what they took up, users' factors solved for, in rounds."""

    factors: int = Field(20, ge=1, le=1024, description="Latent factors K.")
    confidence: float = Field(
        4.0, gt=0, description="a: an item that was taken up weighs 1 + a, any other one 1."
    )
    ridge: float = Field(5.0, gt=0, description="Ridge coefficient lambda.")
    server_optimiser: Literal["fedsgd", "fedadagrad", "fedadam", "fedyogi"] = Field(
        "fedadam", description="What moves the factors of items; the paper's is fedadam."
    )
    server_rate: float = Field(0.05, gt=0, description="Its step size.")
    server_beta1: float = Field(0.5, ge=0, lt=1, description="Decay of its first moment.")
    server_beta2: float = Field(0.99, ge=0, lt=1, description="Decay of its second moment.")
    server_tau: float = Field(1e-8, gt=0, description="Added to the root of its second moment.")
    bits: int = Field(16, ge=8, le=31, description="Bits of a transmitted value.")
    item_bound: float = Field(4.0, gt=0, description="Largest transmitted value of an item's gradient.")
    min_touch: int = Field(3, ge=1, description=_MIN_TOUCH)

    def plan(self) -> FcfPlan:
        """Return the settings as the plan of a run carries them.

        Raises
        ------
        ConfigError
            Settings that do not go together.
        """
        server = ServerOptimiser(
            self.server_optimiser, self.server_rate, self.server_beta1, self.server_beta2, self.server_tau
        )
        return FcfPlan(
            FcfSettings(server=server, **{name: getattr(self, name) for name in _FCF}), self.min_touch
        )

    @model_validator(mode="after")
    def _together(self) -> FcfOptions:
        try:
            self.plan()
        except ConfigError as error:
            raise ValueError(error.message) from error
        return self

    def for_plan(self, run: Run, attributes: Sequence[str] = ()) -> str:
        """Return the settings as `RunPlan.settings` carries them, JSON."""
        return self.plan().to_json()

    @property
    def width(self) -> int:
        """How many values a row of the model has."""
        return self.factors

    @property
    def room(self) -> int:
        """Largest number of users over which a sum of training has room."""
        return layout(self.plan().learning.mvmf(), 1, 0).capacity

    def problems(self, run: Run) -> list[str]:
        """Return what of a run does not go together with these settings, a sentence each."""
        found = []
        kinds = ("random", "temporal", "leave-last-out")
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

    def warnings(self, run: Run) -> list[str]:
        """Return what the cohorts and settings of a run give away, a sentence each."""
        return few_behind(run, self.min_touch)
