"""Settings of FedGNN, its metrics, and the figure by which a version is chosen."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from coterie.crypto.graph_key import GraphTerms
from coterie.crypto.verification import VerificationError
from coterie.systems.run_settings import BaseRunSettings
from coterie.systems.settings import SystemSettings
from coterie.systems.shared import rated_measures
from coterie.systems.shared.biases import width_of
from coterie.systems.shared.factor_settings import (
    Bits,
    FactorSettings,
    Highest,
    Lowest,
    MinTouch,
    check_range,
    drawing_settings,
    room_for,
    rows_settings,
)
from coterie.systems.shared.metric_segments import LARGEST, Measure
from coterie.systems.shared.problems import (
    NO_GROUPS,
    few_behind,
    random_cohorts,
    rounds_problems,
    split_problems,
)
from coterie.systems.shared.rated_measures import choosable

__all__ = ["CHOOSE_BY", "FIGURES", "MEASURES", "NEIGHBOURHOOD", "FedGnnSettings"]

MEASURES: tuple[str | Measure, ...] = (
    *rated_measures.MEASURES,
    Measure("train_squared_error", LARGEST),
    Measure("train_ratings", LARGEST),
)
"""Metrics measured for each user in every run."""

NEIGHBOURHOOD = ("with_neighbours", "neighbours_current")
"""Metrics of runs with neighbours: whether a user has any, and was answered when it last should have been."""

FIGURES = (*rated_measures.FIGURES, "train_rmse")
"""Figures of an evaluation in every run."""

CHOOSE_BY = "validation_rmse"
"""Figure whose lowest value decides the version that counts, unless a run names another one."""

_MOST_QUESTIONS = 64
"""Questions that the third party answers for an upload."""

Rate = Annotated[float, Field(gt=0)]


class FedGnnSettings(SystemSettings):
    r"""FedGNN: ratings predicted by a graph attention layer over a user's items and anonymous neighbours, in rounds.

    ``factors`` is the length K of embeddings.  A user's node has as neighbours the items that it rated and, with
    ``neighbours``, users who have items in common with it, whom nobody names (`coterie.parties.expansion`).
    """

    omitted: ClassVar[frozenset[str]] = frozenset({"rotate_every"})

    factors: int = Field(16, ge=1, le=256, description="Length of an embedding, K.")
    local_epochs: int = Field(5, ge=1, le=1000, description="Gradient steps of a user in a round (E).")
    rate: Rate = Field(0.3, description="Step size of the embeddings of items.")
    private_rate: Rate = Field(0.3, description="Step size of users' own embeddings.")
    layer_rate: Rate = Field(10.0, description="Step size of the attention layer.")
    ridge: float = Field(
        0.02,
        ge=0,
        description="Weight of the L2 penalty (lambda) on a user's embedding and its copies of the embeddings of "
        "items.",
    )
    lowest: Lowest = 0.5
    highest: Highest = 5.0
    bits: Bits = 16
    change_bound: float = Field(
        4.0,
        gt=0,
        description="Largest change of a value of an item's embedding by one user; larger ones are clipped before they "
        "are sent.",
    )
    layer_bound: float = Field(
        1.0,
        gt=0,
        description="Largest change of a value of the attention layer by one user; larger ones are clipped before "
        "they are sent.",
    )
    min_touch: MinTouch = 3
    samples: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Smallest number of pseudo-interacted items per rated one, drawn once per user, whose embeddings a "
        "user also changes, as if it had rated them with its mean rating. 0: none.",
    )

    neighbours: int = Field(
        0,
        ge=0,
        le=512,
        description="Most anonymous neighbours of a user, found by graph expansion at the third party. 0: none, and "
        "nothing is published.",
    )
    neighbours_after: int = Field(
        2,
        ge=1,
        le=100_000,
        description="neighbours: passes over all users before they have neighbours; they publish in the pass before.",
    )
    refresh: int = Field(
        20,
        ge=2,
        le=100_000,
        description="neighbours: passes after which users publish their embeddings again, and ask again in the next "
        "pass.",
    )
    tags: int = Field(
        32, ge=1, le=1024, description="neighbours: most items that a user publishes under tags."
    )
    rotate_every: int = Field(
        0,
        ge=0,
        le=100_000,
        description="neighbours: passes after which the graph key is replaced, before the next publication; users then "
        "publish under new tags and ids, and the third party deletes the old ones. 0: never.",
    )
    bucket_users: int = Field(
        20,
        ge=5,
        le=1 << 20,
        description="neighbours: users who share a tag, about: tags of items that more users publish are split.",
    )

    @model_validator(mode="after")
    def _range(self) -> FedGnnSettings:
        check_range(self.lowest, self.highest)
        if 0 < self.rotate_every < self.refresh:
            raise ValueError(
                f"rotate_every {self.rotate_every}, but users publish every {self.refresh} passes (refresh); "
                f"expected 0, or {self.refresh} or more"
            )
        if self.rotate_every and not self.neighbours:
            raise ValueError(f"rotate_every {self.rotate_every} without neighbours has no effect; expected 0")
        if self.neighbours:
            try:
                self.graph_terms.check()
            except VerificationError as error:
                raise ValueError(error.message) from error
        return self

    def factor_settings(self) -> FactorSettings:
        """Return FedMVMF's settings with the same biases, first embeddings, layout and checks of ratings."""
        return rows_settings(self)

    def sampling(self) -> FactorSettings:
        """Return FedMVMF's settings that draw the same items; without samples, none."""
        return drawing_settings(self)

    @property
    def graph_terms(self) -> GraphTerms:
        """Terms of the graph of a run with neighbours."""
        return GraphTerms(self.factors, self.tags, self.bucket_users, self.neighbours)

    @property
    def expands(self) -> bool:
        """Whether users find neighbours by graph expansion at the third party."""
        return self.neighbours > 0

    @property
    def biases(self) -> bool:
        """True: ratings are learned on the scale from -1 to 1, beside biases of users and of items."""
        return True

    @property
    def measures(self) -> tuple[str | Measure, ...]:
        """Metrics measured for each user: in runs with neighbours also whether it has any, and new ones."""
        return (*NEIGHBOURHOOD, *MEASURES) if self.neighbours else MEASURES

    @property
    def variant(self) -> str:
        """Name of what the graph has beside a user's own items, and of pseudo-interacted items."""
        sampled = f"{self.samples:g} pseudo-interacted per rating" if self.samples else ""
        around = f"up to {self.neighbours} neighbours" if self.neighbours else "no neighbours"
        return ", ".join(filter(None, (around, sampled)))

    @property
    def width(self) -> int:
        """Number of values in a row of the model: the embedding, and two more for biases."""
        return width_of(self.factors, True)

    @property
    def room(self) -> int:
        """Largest number of users in a sum of training whose codes cannot overflow."""
        return room_for(self.bits)

    @property
    def rating_range(self) -> tuple[float, float]:
        """Lowest and highest rating that the system learns from."""
        return self.lowest, self.highest

    def problems(self, run: BaseRunSettings) -> list[str]:
        """Return the conflicts between a run and these settings, a sentence each."""
        return (
            (self._no_neighbours(run) if self.neighbours else [])
            + split_problems(run, ("random", "temporal"))
            + rounds_problems(
                run, chosen_by=choosable(FIGURES), wide=f"{run.description.table}.bits {self.bits}"
            )
        )

    def _no_neighbours(self, run: BaseRunSettings) -> list[str]:
        """Return why users of a run cannot have neighbours, a sentence each."""
        found, rounds, table = [], run.rounds, run.description.table
        # A new key has new uploads, and each is answered anew.
        asked = min(max(rounds.passes - self.neighbours_after, 0), self.rotate_every or rounds.passes)
        if asked // self.refresh >= _MOST_QUESTIONS:
            found.append(
                f"{table}.refresh {self.refresh} with rounds.passes {rounds.passes}: a user would ask more than "
                f"{_MOST_QUESTIONS} times, which the third party refuses; expected {table}.refresh "
                f"{asked // _MOST_QUESTIONS + 1} or more, or {table}.rotate_every from {self.refresh} to "
                f"{_MOST_QUESTIONS * self.refresh - 1}"
            )
        if rounds.privacy.terms.on:
            found.append(
                f"{table}.neighbours {self.neighbours} with rounds.privacy: embeddings that users share with their "
                "neighbours have no noise, and no epsilon counts them; expected neighbours 0, or place 'none'"
            )
        return found

    def warnings(self, run: BaseRunSettings) -> list[str]:
        """Return warnings about what the cohorts and settings of a run disclose, a sentence each."""
        found = [NO_GROUPS] if random_cohorts(run) else []
        found += few_behind(run, self.min_touch)
        if run.secure_sum != "clear":
            if self.samples:
                found.append(
                    f"Under a {run.secure_sum} sum no contribution is seen, and pseudo-interacted items cost quality "
                    f"without hiding more; {run.description.table}.min_touch counts users who drew an item like those "
                    "who rated it."
                )
        elif self.samples:
            found.append(
                "Pseudo-interacted items hide which rows of a contribution are of rated ones, and not what the rows "
                "say: they count as rated with one value, so their errors tell them apart in clear."
            )
        else:
            found.append(
                "In a user's contribution the rows of items that it has not rated are zero: in clear it shows which it "
                "has rated."
            )
        return found
