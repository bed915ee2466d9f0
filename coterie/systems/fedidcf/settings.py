"""Settings of FedIDCF, its metrics, and the figure by which a version is chosen."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from pydantic import Field, model_validator

from coterie.rounds.policy import min_sum
from coterie.systems.fedmf import settings as fedmf
from coterie.systems.fedmf.settings import FedMfSettings
from coterie.systems.run_settings import BaseRunSettings
from coterie.systems.shared.metric_segments import LARGEST, Measure

__all__ = ["CHOOSE_BY", "ERRORS", "MEASURES", "SPREAD", "WITH_LATENTS", "FedIdcfSettings", "Stage"]

WITH_LATENTS = "with_latents"
"""Metric: whether a user's host knows the pseudo meta-latents, from the pass on in which it should."""

SPREAD = "query_spread"
"""Figure: spread of the vectors of query users, over that of key users."""

ERRORS: Mapping[str, str] = MappingProxyType(
    {
        "key": "",
        "query": "",
        "attention_key": "key_",
        "biases_key": "key_",
        "biases_query": "query_",
        "fold_in_key": "key_",
        "fold_in_query": "query_",
        "validation_attention": "",
    }
)
"""Predictions that are measured beside those that users are served, each with the prefix of its number of ratings;
where that is empty, it has one of its own."""

MEASURES: tuple[str | Measure, ...] = (
    WITH_LATENTS,
    *fedmf.MEASURES,
    *(Measure(f"{name}_squared_error", LARGEST) for name in ERRORS),
    *(Measure(f"{name}_ratings", LARGEST) for name, behind in ERRORS.items() if not behind),
)
"""Metrics measured for each user."""

CHOOSE_BY = "validation_attention_rmse"
"""Figure whose lowest value decides the version that counts: attention's error on validation items of key users."""

_PREPARING = 2
"""Passes between the two phases: moments of key users are summed, then their vectors are published."""


_FEW_KEY_USERS = 5
"""Key users that a sum should have, about."""


class Stage(enum.Enum):
    """What the users of a run do in a pass."""

    FACTORS = "factors"
    MOMENTS = "moments"
    PUBLISH = "publish"
    ATTENTION = "attention"


class FedIdcfSettings(FedMfSettings):
    """FedIDCF: FedMF of key users; then an attention over means of their vectors, for users who never trained.

    In the first ``factor_passes`` passes key users train FedMF with biases, by the keys of ``[fedmf]``.  Then they
    publish their vectors encrypted, the third party combines them (`coterie.parties.latents`), and further passes train
    an attention by which any user is described by what it likes.
    """

    choices: ClassVar[Sequence[str]] = (CHOOSE_BY,)

    query: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="Share of the users who are query users: they do not train, and are predicted by attention. Each "
        "user draws it by its own number.",
    )
    factor_passes: int = Field(
        0,
        ge=0,
        le=100_000,
        description="Passes over all users in which key users train factors. 0: two fifths of `rounds.passes`.",
    )
    latents: int = Field(
        256,
        ge=1,
        le=4096,
        description="Number of pseudo meta-latents; with fewer key users, as many as there are key users.",
    )
    members: int = Field(5, ge=3, le=100, description="Key users behind a pseudo meta-latent.")
    cap: float = Field(
        1.0,
        ge=0,
        description="Longest vector that a key user publishes, in root mean squares of all key users' lengths; longer "
        "ones are shortened. 0: no such cap.",
    )
    vector_bound: float = Field(
        2.0,
        gt=0,
        le=1000,
        description="Largest value of a vector of a key user; larger ones are clipped before they are sent.",
    )
    hidden: int = Field(16, ge=1, le=1024, description="Length of the attention's inner vectors.")
    attention_rate: float = Field(0.02, gt=0, description="Step size of the attention (Adam).")
    gradient_bound: float = Field(
        0.05,
        gt=0,
        description="Largest value of a user's gradient of the attention; larger ones are clipped before they are "
        "sent.",
    )

    @model_validator(mode="after")
    def _with_biases(self) -> FedIdcfSettings:
        if not self.biases or self.steps != "mean":
            raise ValueError(
                f"biases {self.biases}, steps {self.steps!r}: users who never trained have biases fitted by "
                "themselves; expected biases true and steps 'mean'"
            )
        if self.scaffold:
            raise ValueError("scaffold: further passes train no factors; expected scaffold false")
        return self

    def resolved(self, run: BaseRunSettings) -> FedIdcfSettings:
        """Return the settings with the number of passes of the first phase in a run."""
        return self.model_copy(
            update={"factor_passes": self.factor_passes or max(2 * run.rounds.passes // 5, 1)}
        )

    def for_plan(self, run: BaseRunSettings, attributes: Sequence[str] = ()) -> str:
        """Return the settings as ``RunPlan.settings`` carries them, JSON: without a 0 for the passes."""
        return self.resolved(run).to_json()

    def stage(self, pass_number: int) -> Stage:
        """Return what users do in a pass, counted from 0."""
        after = pass_number - self.factor_passes
        if after < 0:
            return Stage.FACTORS
        return (Stage.MOMENTS, Stage.PUBLISH, Stage.ATTENTION)[min(after, _PREPARING)]

    @property
    def combines(self) -> bool:
        """True: hosts hold a Paillier key and read pseudo meta-latents."""
        return True

    @property
    def variant(self) -> str:
        """Name of the combinations, and of variants of FedMF."""
        return f"means of {self.members}; factors by {super().variant}"

    def problems(self, run: BaseRunSettings) -> list[str]:
        """Return the conflicts between a run and these settings, a sentence each."""
        found, rounds, table = super().problems(run), run.rounds, run.description.table
        first = self.resolved(run).factor_passes
        if rounds.passes <= (least := first + _PREPARING):
            found.append(
                f"rounds.passes {rounds.passes} with {table}.factor_passes {first}: no pass is left for "
                f"the attention; expected rounds.passes above {least}"
            )
        if rounds.patience:
            found.append(
                f"rounds.patience {rounds.patience}: a run that ends early may have no second phase; expected 0"
            )
        if rounds.privacy.terms.on:
            found.append(
                f"{table} with rounds.privacy: vectors that key users publish have no noise, and no epsilon counts "
                "them; expected place 'none'"
            )
        if run.secure_sum == "shared-key" and run.encryption.rotate_every:
            found.append(
                f"encryption.rotate_every {run.encryption.rotate_every}: pseudo meta-latents are combined once, under "
                "the key of the sums; expected 0"
            )
        if not rounds.aggregation.terms.adds:
            found.append(
                f"rounds.aggregation.rule {rounds.aggregation.rule!r}: moments of key users are sums over all of "
                "them; expected rule 'sum'"
            )
        return found

    def warnings(self, run: BaseRunSettings) -> list[str]:
        """Return warnings about what the cohorts and settings of a run disclose, a sentence each."""
        found, rounds = super().warnings(run), run.rounds
        least = min_sum(rounds.cohort, rounds.min_sum)
        if rounds.cohorts != "all" and (1 - self.query) * least < _FEW_KEY_USERS:
            found.append(
                f"{run.description.table}.query {self.query:g} with rounds.cohort {rounds.cohort}: a sum over as few "
                f"as {least} users may have fewer than {_FEW_KEY_USERS} key users, and that of moments then tells "
                "their vectors, or nearly so."
            )
        if run.secure_sum == "clear":
            found.append("In clear, a contribution of one key user in the pass of moments is its vector.")
        return found
