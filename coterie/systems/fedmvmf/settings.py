"""Settings of FedMVMF."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from coterie.errors import ConfigError
from coterie.systems.run import Run
from coterie.systems.settings import SideInformation, SystemSettings
from coterie.systems.shared.factor_server import FIGURES, MvmfPlan
from coterie.systems.shared.factors import PRESETS, MvmfSettings, layout
from coterie.systems.shared.optimisers import ServerOptimiser
from coterie.systems.shared.problems import (
    NO_GROUPS,
    few_behind,
    random_cohorts,
    rounds_problems,
    sparse_problems,
)

__all__ = ["MvmfOptions"]

_PLAIN = tuple(one.name for one in dataclasses.fields(MvmfSettings) if one.name != "server")
"""Settings that are named here as there."""


class MvmfOptions(SystemSettings):
    """FedMVMF: ratings predicted from ratings, attributes of users and features of items, in rounds."""

    preset: Literal["paper", "top-n", "both"] = Field(
        "paper",
        description="Named settings; what is given beside it goes before. paper: best at ordering what a user rates. "
        "top-n: weights on all items, best at finding liked items among all unseen ones. both: between the two.",
    )
    factors: int = Field(6, ge=1, le=1024, description="Latent factors K.")
    weights: Literal["obs-only", "incl-unc", "sampled"] = Field(
        "sampled",
        description="Weight of an unrated item: none, uncertainty for every item, or uncertainty for sampled ones.",
    )
    uncertainty: float = Field(0.1, gt=0, lt=1, description="Weight of an unrated item, alpha.")
    samples: float = Field(1.0, gt=0, description="sampled: least unrated items per rated one, rho.")
    resample: bool = Field(
        False,
        description="sampled: draw them anew in each round, as the paper does. Who sees two rounds of one user then "
        "knows what it has rated.",
    )
    side: float = Field(1.0, ge=0, description="Weight of attributes and features, lambda 1.")
    ridge: float = Field(10.0, gt=0, description="Ridge coefficient, lambda 2.")
    update: Literal["semi-als", "sgd"] = Field(
        "semi-als", description="Whether users' factors and those of features are solved for, or take a step."
    )
    private_rate: float = Field(1e-4, gt=0, description="sgd: step size of users' factors.")
    feature_rate: float = Field(1e-5, gt=0, description="sgd: step size of the factors of features.")
    server_optimiser: Literal["fedsgd", "fedadagrad", "fedadam", "fedyogi"] = Field(
        "fedadam", description="What moves the factors of items and attributes."
    )
    server_rate: float = Field(0.05, gt=0, description="Its step size.")
    server_beta1: float = Field(0.5, ge=0, lt=1, description="Decay of its first moment.")
    server_beta2: float = Field(0.99, ge=0, lt=1, description="Decay of its second moment.")
    server_tau: float = Field(1e-8, gt=0, description="Added to the root of its second moment.")
    lowest: float = Field(0.5, gt=0, description="Lowest rating that there is; one below is refused.")
    highest: float = Field(5.0, gt=0, description="Highest rating that there is; one above is refused.")
    bits: int = Field(16, ge=8, le=31, description="Bits of a transmitted value.")
    item_bound: float = Field(16.0, gt=0, description="Largest transmitted value of an item's gradient.")
    attribute_bound: float = Field(
        8.0, gt=0, description="Largest transmitted value of an attribute's gradient."
    )
    min_touch: int = Field(
        3, ge=1, description="Fewest users of a group that must have rated an item for it to be trained."
    )
    attributes: bool = Field(
        True, description="Whether hosts are given the attributes of their users, where the data set has any."
    )
    features: Literal["known", "genres", "genome", "none"] = Field(
        "known",
        description="What data owners know of items: genres and year, the tag genome, nothing, or (known) the genome "
        "where there is one and else genres and year.",
    )
    genome: Path | None = Field(
        None, description="Folder with MovieLens' genome-scores.csv; the data set's own when absent."
    )
    item_servers: int = Field(
        1, ge=1, le=64, description="Data owners over which items and their features are divided."
    )

    def settings(self) -> MvmfSettings:
        """Return the settings of the mathematics.

        Raises
        ------
        ConfigError
            Settings that do not go together.
        """
        server = ServerOptimiser(
            self.server_optimiser, self.server_rate, self.server_beta1, self.server_beta2, self.server_tau
        )
        return MvmfSettings(server=server, **{name: getattr(self, name) for name in _PLAIN})

    def plan(self, attributes: Sequence[str] = (), *, new_items: bool = False) -> MvmfPlan:
        """Return the settings as the plan of a run carries them.

        Parameters
        ----------
        attributes : sequence of str
            Names of the users' attributes.
        new_items : bool
            Whether only items that nobody trains are ranked.
        """
        return MvmfPlan(self.settings(), tuple(attributes), self.min_touch, new_items)

    @model_validator(mode="before")
    @classmethod
    def _of_the_preset(cls, given: Any) -> Any:
        """Take what is not given from the preset."""
        preset = given.get("preset") if isinstance(given, Mapping) else None
        if not isinstance(preset, str) or preset not in PRESETS:
            return given
        found = {name: getattr(PRESETS[preset], name) for name in _PLAIN}
        return {**found, **given}

    @model_validator(mode="after")
    def _together(self) -> MvmfOptions:
        try:
            self.plan()
        except ConfigError as error:
            raise ValueError(error.message) from error
        return self

    def for_plan(self, run: Run, attributes: Sequence[str] = ()) -> str:
        """Return the settings as `RunPlan.settings` carries them, JSON."""
        return self.plan(attributes, new_items=run.split.kind == "cold-items").to_json()

    @property
    def variant(self) -> str:
        """Which of the models or presets is run."""
        return self.preset

    @property
    def width(self) -> int:
        """How many values a row of the model has."""
        return self.factors

    @property
    def room(self) -> int:
        """Largest number of users over which a sum of training has room."""
        return layout(self.settings(), 1, 1).capacity

    @property
    def rating_range(self) -> tuple[float, float] | None:
        """Lowest and highest rating that the system learns from."""
        return self.lowest, self.highest

    @property
    def catalogue_owners(self) -> int:
        """Number of data owners over which items are divided."""
        return self.item_servers

    @property
    def side_information(self) -> SideInformation | None:
        """What the system learns from beside interactions."""
        return SideInformation(self.attributes, self.features, self.genome)

    def problems(self, run: Run) -> list[str]:
        """Return what of a run does not go together with these settings, a sentence each."""
        found = []
        if run.split.kind in ("leave-last-out", "published"):
            found.append(
                f"split.kind {run.split.kind!r}: fedmvmf orders several held-out ratings of each user; expected "
                "'random', 'temporal', 'cold-users' or 'cold-items'"
            )
        return found + rounds_problems(
            run,
            chosen_by=[name for name in FIGURES if name.startswith("validation_")],
            wide=f"mvmf.bits {self.bits}",
        )

    def sparse_problems(self, run: Run) -> list[str]:
        """Return why contributions cannot leave out what has nothing in it, a sentence each."""
        found = []
        if self.weights == "incl-unc":
            found.append(
                "encryption.sparse with mvmf.weights 'incl-unc': users have something for every item; expected "
                "'obs-only' or 'sampled'"
            )
        return found + sparse_problems(run, self.min_touch)

    def warnings(self, run: Run) -> list[str]:
        """Return what the cohorts and settings of a run give away, a sentence each."""
        found = list[str]()
        if random_cohorts(run) and self.weights != "incl-unc":
            found.append(NO_GROUPS)
        found += few_behind(run, self.min_touch)
        if self.weights == "sampled" and self.resample:
            found.append(
                "resample: unrated items are drawn anew in each round; who sees contributions of one user in two "
                "rounds knows what it has rated."
            )
        if self.weights == "obs-only":
            found.append(
                "obs-only: a contribution has rows of rated items only, and so shows which they are."
            )
        return found
