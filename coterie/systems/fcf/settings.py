"""Settings of FCF."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from coterie.systems.fcf.mathematics import TAKEN_UP
from coterie.systems.run_settings import BaseRunSettings
from coterie.systems.settings import SystemSettings
from coterie.systems.shared.factor_settings import (
    Bits,
    Factors,
    FactorSettings,
    MinTouch,
    ServerBeta1,
    ServerBeta2,
    ServerOptimiserName,
    ServerRate,
    ServerTau,
    room_for,
)
from coterie.systems.shared.popularity import PopularityWeight
from coterie.systems.shared.problems import (
    few_behind,
    rounds_problems,
    split_problems,
)
from coterie.systems.shared.rated_measures import choosable
from coterie.systems.shared.taken_up import FIGURES

__all__ = ["FcfSettings"]


class FcfSettings(SystemSettings):
    r"""FCF: what users take up, from what they took up, users' factors solved for, in rounds.

    ``factors`` is the length of :math:`p_u` and :math:`q_j`, ``confidence`` :math:`a` and ``ridge`` :math:`\lambda`.
    The server's optimiser moves :math:`Q` along the gradient of :math:`J / (1 + a)`; a user's gradient of a row is
    clipped at ``item_bound``.
    """

    omitted: ClassVar[frozenset[str]] = frozenset({"popularity"})

    factors: Factors = 20
    confidence: float = Field(
        4.0,
        gt=0,
        description="Extra weight of an item that the user took up (a): it weighs 1 + a, any other item 1.",
    )
    ridge: float = Field(5.0, gt=0, description="Weight of the L2 penalty, lambda.")
    server_optimiser: ServerOptimiserName = Field(
        "fedadam",
        description="Optimiser by which the server moves the factors of items; the paper's is fedadam.",
    )
    server_rate: ServerRate = 0.05
    server_beta1: ServerBeta1 = 0.5
    server_beta2: ServerBeta2 = 0.99
    server_tau: ServerTau = 1e-8
    bits: Bits = 16
    item_bound: float = Field(
        4.0,
        gt=0,
        description="Largest absolute value of a user's gradient of an item factor; larger ones are clipped "
        "before they are sent.",
    )
    min_touch: MinTouch = 3
    popularity: PopularityWeight = 0.0

    @model_validator(mode="after")
    def _told_apart(self) -> FcfSettings:
        if not (1 / (1 + self.confidence) < 1 and self.ridge / (1 + self.confidence) > 0):
            raise ValueError(
                f"confidence is {self.confidence}, ridge {self.ridge}; expected 1 + confidence above 1, and ridge "
                "divided by it above 0, in floating point"
            )
        return self

    def factor_settings(self) -> FactorSettings:
        """Return the equivalent settings of FedMVMF's factorisation, where every rating is `TAKEN_UP`."""
        return FactorSettings(
            factors=self.factors,
            weights="incl-unc",
            uncertainty=1 / (1 + self.confidence),
            side=0.0,
            ridge=self.ridge / (1 + self.confidence),
            server_optimiser=self.server_optimiser,
            server_rate=self.server_rate,
            server_beta1=self.server_beta1,
            server_beta2=self.server_beta2,
            server_tau=self.server_tau,
            lowest=TAKEN_UP,
            highest=TAKEN_UP,
            bits=self.bits,
            item_bound=self.item_bound,
            min_touch=self.min_touch,
        )

    @property
    def width(self) -> int:
        """Number of values in a row of the model."""
        return self.factors

    @property
    def room(self) -> int:
        """Largest number of users in a sum of training whose codes cannot overflow."""
        return room_for(self.bits)

    def problems(self, run: BaseRunSettings) -> list[str]:
        """Return the conflicts between a run and these settings, a sentence each."""
        return split_problems(
            run, ("random", "temporal", "leave-last-out", "leave-random-out")
        ) + rounds_problems(
            run,
            chosen_by=choosable(FIGURES),
            wide=f"{run.description.table}.bits {self.bits}",
        )

    def warnings(self, run: BaseRunSettings) -> list[str]:
        """Return warnings about what the cohorts and settings of a run disclose, a sentence each."""
        return few_behind(run, self.min_touch)
