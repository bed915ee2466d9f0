"""Settings of FedMVMF: a table in a run's file, and its extension in the plan of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from coterie.systems.run_settings import BaseRunSettings
from coterie.systems.settings import ConfigModel, SideInformation
from coterie.systems.shared.factor_settings import FactorSettings
from coterie.systems.shared.problems import (
    NO_GROUPS,
    few_behind,
    random_cohorts,
    rounds_problems,
    sparse_problems,
)
from coterie.systems.shared.rated_measures import FIGURES, choosable

__all__ = ["PRESETS", "FedMvmfPlan", "FedMvmfSettings"]

_PAPER: Mapping[str, Any] = MappingProxyType(
    {
        "biases": False,
        "factors": 6,
        "weights": "sampled",
        "samples": 1.0,
        "ridge": 10.0,
        "server_rate": 0.05,
        "item_bound": 16.0,
    }
)

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "ratings": {
            **_PAPER,
            "biases": True,
            "factors": 20,
            "weights": "obs-only",
            "ridge": 5.0,
            "server_rate": 0.02,
            "item_bound": 4.0,
        },
        "paper": _PAPER,
        "top-n": {**_PAPER, "factors": 20, "weights": "incl-unc", "ridge": 3.0, "item_bound": 32.0},
        "both": {**_PAPER, "factors": 20, "samples": 3.0, "ridge": 5.0, "item_bound": 32.0},
    }
)
"""Values that each preset sets; the defaults of other keys are the paper's."""

_SAMPLED = ("uncertainty", "samples", "resample")
"""Keys that mean something only where unrated items have weights."""


class _Preset(ConfigModel):
    """Base with the key ``preset``, so that it stands first in the table."""

    preset: Literal["ratings", "paper", "top-n", "both"] = Field(
        "ratings",
        description="Named values of other keys; keys given explicitly override them. ratings: biases and no weights "
        "on unrated items, best at predicting ratings (biases true, factors 20, weights obs-only, ridge 5, "
        "server_rate 0.02, item_bound 4). paper: the published form, which has the defaults below, ratings as they "
        "are and weights on sampled items; without a preset, biases = false or a key of unrated items (weights other "
        "than obs-only, uncertainty, samples, resample) means it. top-n: weights on all items, best at finding liked "
        "items among all unseen ones. both: between the last two.",
    )


class FedMvmfSettings(FactorSettings, _Preset):
    """FedMVMF: ratings predicted from ratings, attributes of users and features of items, in rounds.

    The settings of its mathematics are those of `FactorSettings`; only the launcher of a run reads preset, side
    information and item servers.
    """

    local: ClassVar[frozenset[str]] = frozenset(
        {"preset", "attributes", "features", "genome", "item_servers"}
    )
    omitted: ClassVar[frozenset[str]] = frozenset({"biases"})

    attributes: bool = Field(
        True,
        description="Whether the model uses attributes of users, which hosts are given where the data set has "
        "any.",
    )
    features: Literal["known", "genres", "genome", "none"] = Field(
        "known",
        description="Features of items that data owners are given. genres: genres and year of release. genome: "
        "the tag genome. none: no features. known: the genome where there is one, else genres and "
        "year.",
    )
    genome: Path | None = Field(
        None, description="Folder with MovieLens' genome-scores.csv. When absent, the data set's own folder."
    )
    item_servers: int = Field(
        1, ge=1, le=64, description="Number of data owners among which items and their features are divided."
    )

    @model_validator(mode="before")
    @classmethod
    def _of_the_preset(cls, given: Any) -> Any:
        """Fill in keys that are not given from the preset."""
        if not isinstance(given, Mapping):
            return given
        preset = given.get("preset", "paper" if _published(given) else "ratings")
        if not isinstance(preset, str) or preset not in PRESETS:
            return given
        return {"preset": preset, **PRESETS[preset], **given}

    def for_plan(self, run: BaseRunSettings, attributes: Sequence[str] = ()) -> str:
        """Return the settings for `RunPlan.settings`, JSON, with what follows from the run's data and split."""
        plan = FedMvmfPlan(
            **self.model_dump(),
            attribute_names=tuple(attributes),
            new_items=run.split.kind == "cold-items",
        )
        return plan.to_json()

    @property
    def variant(self) -> str:
        """Name of the preset."""
        return self.preset

    @property
    def catalogue_owners(self) -> int:
        """Number of data owners among which items are divided."""
        return self.item_servers

    @property
    def side_information(self) -> SideInformation | None:
        """Side information that the system learns from."""
        return SideInformation(self.attributes, self.features, self.genome)

    def problems(self, run: BaseRunSettings) -> list[str]:
        """Return the conflicts between a run and these settings, a sentence each."""
        found = []
        if run.split.kind in ("leave-last-out", "leave-random-out"):
            found.append(
                f"split.kind {run.split.kind!r}: fedmvmf orders several held-out ratings of each user; expected "
                "'random', 'temporal', 'cold-users' or 'cold-items'"
            )
        return found + rounds_problems(
            run,
            chosen_by=choosable(FIGURES),
            wide=f"mvmf.bits {self.bits}",
        )

    def sparse_problems(self, run: BaseRunSettings) -> list[str]:
        """Return why contributions cannot leave out ciphertexts of zeros, a sentence each."""
        found = []
        if self.weights == "incl-unc":
            found.append(
                "encryption.sparse with mvmf.weights 'incl-unc': users have something for every item; expected "
                "'obs-only' or 'sampled'"
            )
        return found + sparse_problems(run, self.min_touch)

    def warnings(self, run: BaseRunSettings) -> list[str]:
        """Return warnings about what the cohorts and settings of a run disclose, a sentence each."""
        found = list[str]()
        if random_cohorts(run) and self.weights != "incl-unc":
            found.append(NO_GROUPS)
        found += few_behind(run, self.min_touch)
        if self.weights == "sampled" and self.resample:
            found.append(
                "resample: unrated items are drawn anew in each round; who sees contributions of one user in two "
                "rounds knows what it has rated."
            )
        if self.weights == "obs-only" and run.secure_sum == "clear":
            found.append(
                "obs-only: a contribution has rows of rated items only, and so shows in clear which they are."
            )
        return found


def _published(given: Mapping[str, Any]) -> bool:
    """Return whether keys that are given without a preset mean the published form."""
    if given.get("biases") is not None:
        return not given["biases"]
    return given.get("weights", "obs-only") != "obs-only" or any(name in given for name in _SAMPLED)


class FedMvmfPlan(FedMvmfSettings):
    """Settings in the plan of a run, with what follows from the run's data and split."""

    attribute_names: tuple[str, ...] = Field(
        (),
        description="Names of the users' attributes, in the order of the rows of U; what hosts know must have the "
        "same.",
    )
    new_items: bool = Field(
        False,
        description="Whether, in the search among all unseen items, only those are ranked that nobody may train: the "
        "paper's measurement of new items.",
    )

    @field_validator("attribute_names", mode="before")
    @classmethod
    def _listed(cls, given: Any) -> Any:
        """Convert the list of a JSON text into a tuple."""
        return tuple(given) if isinstance(given, list) else given
