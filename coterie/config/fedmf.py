"""Configuration of FedMF and FCF."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from coterie.config.base import Model
from coterie.errors import ConfigError
from coterie.systems.fcf.host import FcfPlan
from coterie.systems.fcf.mathematics import FcfSettings
from coterie.systems.fedmf.mathematics import FedMfSettings, printed
from coterie.systems.fedmf.server import FedMfPlan
from coterie.systems.shared.optimisers import ServerOptimiser

__all__ = ["FcfOptions", "FedMfOptions"]

_FEDMF = tuple(one.name for one in dataclasses.fields(FedMfSettings))
_FCF = tuple(one.name for one in dataclasses.fields(FcfSettings) if one.name != "server")
"""Settings that are named here as there."""

_MIN_TOUCH = "Fewest users of a group that must have rated an item for it to be trained."


class FedMfOptions(Model):
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


class FcfOptions(Model):
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
