"""Settings of FedNCF: a table in a run's file, its part of a plan, and the input of the mathematics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from coterie.errors import ConfigError
from coterie.evaluation.leave_one_out import metric_names
from coterie.systems.fedncf.mathematics import layout
from coterie.systems.fedncf.networks import Architecture, ModelName
from coterie.systems.run_settings import BaseRunSettings
from coterie.systems.settings import SystemSettings
from coterie.systems.shared.metric_segments import measure_segments
from coterie.systems.shared.optimisers import ServerOptimiser
from coterie.systems.shared.popularity import PopularityWeight
from coterie.systems.shared.problems import (
    one_held_out_problems,
    random_cohorts,
    rounds_problems,
    uncounted,
)

__all__ = ["Aggregation", "FedNcfSettings", "Touch", "published", "tuned"]

Aggregation = Literal["simple", "fedavg", "mf-fedavg"]
Touch = Literal["once", "exact"]

_TUNED: Mapping[str, Mapping[str, float]] = {
    "gmf": {"server_rate": 0.02, "private_rate": 0.05, "decay": 1.0},
    "mlp": {"server_rate": 0.02, "private_rate": 0.03, "decay": 0.98},
    "neumf": {"server_rate": 0.01, "private_rate": 0.05, "decay": 0.97},
}
"""Rates by model, found on the validation items of MovieLens 100K with 9 fixed groups."""


class FedNcfSettings(SystemSettings):
    r"""FedNCF: neural collaborative filtering in rounds.

    All parties of a run must agree on these settings.  The description of a field gives its meaning; the symbols of the
    paper and of this package are

    ====================  ==========================================================================================
    ``negatives``         :math:`\nu`, sampled items per interaction
    ``local_epochs``      :math:`E`
    ``n_cap``             the bound of :math:`n_c`, the instances by which a user is weighted
    ``proximal``          FedProx's :math:`\mu`
    ``server_rate``       :math:`\eta`; ``server_beta1`` :math:`\beta_1`, ``server_beta2`` :math:`\beta_2`,
                          ``server_tau`` :math:`\tau` (`coterie.systems.shared.optimisers`)
    ``user_bound``        the bound of the initial :math:`p_u`
    ====================  ==========================================================================================

    Rates that are not given are those found for the model (`tuned`).

    Raises
    ------
    ValidationError
        An unknown key, a value out of its range, or values that do not go together.
    """

    omitted: ClassVar[frozenset[str]] = frozenset({"metric_bits", "popularity"})

    model: ModelName = Field(
        "gmf",
        description="Model to train: generalised matrix factorisation (gmf), a multilayer perceptron (mlp), or "
        "both in one (neumf).",
    )
    dim: int = Field(12, ge=1, le=1024, description="Width of GMF's embeddings, D in the paper.")
    mlp_embedding: int = Field(12, ge=1, le=1024, description="Width of the MLP's embeddings.")
    layers: tuple[int, ...] = Field(
        (48, 24, 12, 6), min_length=1, description="Widths of the MLP's hidden layers, each at least 1."
    )
    negatives: int = Field(
        4,
        ge=1,
        le=1000,
        description="Negative items sampled for each interaction: anew in each local epoch, with replacement, "
        "from the items that are not in the user's training data.",
    )
    local_epochs: int = Field(1, ge=1, le=1000, description="Passes over a user's own data in a round (E).")
    batch_size: int = Field(
        0,
        ge=0,
        description="Instances (interactions and negatives) of a local step. 0: all of a user's data in one "
        "step.",
    )
    local_optimiser: Literal["sgd", "adam"] = Field(
        "sgd",
        description="Optimiser of a user's copies of item embeddings and network. adam starts without moments in "
        "each round.",
    )
    local_rate: float = Field(
        1.0,
        gt=0,
        description="Step size of the local optimiser. adam uses gradients of a batch's mean loss. sgd does so "
        "for the network, and gradients of the summed loss for item embeddings: few instances of a "
        "batch have the same item, and its step should not shrink with the size of the batch.",
    )
    private_optimiser: Literal["sgd", "adam"] = Field(
        "adam",
        description="Optimiser of a user's own embedding, on gradients of the mean loss. adam's moments stay "
        "with the user from round to round.",
    )
    private_rate: float = Field(
        0.05, gt=0, description="Step size of the private optimiser; 0.03 for mlp unless given."
    )
    proximal: float = Field(0.0, ge=0, description="Weight of FedProx's proximal term, mu; 0: none.")
    scaffold: bool = Field(
        False,
        description="Whether SCAFFOLD's control variates correct local steps of the network. Item embeddings "
        "have none, because theirs would tell which items a user touched. Needs local_optimiser sgd.",
    )
    aggregation: Aggregation = Field(
        "mf-fedavg",
        description="How the server averages contributions. simple: over users. fedavg: weighted by users' "
        "instances. mf-fedavg, the paper's Alg. 1: the network weighted so, each item embedding over "
        "the users who touched it.",
    )
    touch: Touch = Field(
        "once",
        description="mf-fedavg: how the server counts who touched an item. once: each group is asked for its "
        "items once. exact: users send in every round which rows they touched, as in the paper; a "
        "server that sees many rounds then learns every user's items.",
    )
    min_touch: int = Field(
        3,
        ge=1,
        description="touch = once: smallest number of users of a group that must have an item for the group to "
        "train it. Other items stay closed.",
    )
    popularity: PopularityWeight = 0.0
    server_optimiser: Literal["fedsgd", "fedavg", "fedadagrad", "fedadam", "fedyogi"] = Field(
        "fedadam", description="Optimiser by which the server moves the model along the average."
    )
    server_rate: float = Field(
        0.02,
        gt=0,
        description="Step size of the server's optimiser; 0.01 for neumf unless given. fedavg has none.",
    )
    server_beta1: float = Field(
        0.9, ge=0, lt=1, description="Decay of the first moment of the server's optimiser."
    )
    server_beta2: float = Field(
        0.99, ge=0, lt=1, description="Decay of the second moment of the server's optimiser."
    )
    server_tau: float = Field(
        1e-8, gt=0, description="Added to the root of the second moment of the server's optimiser."
    )
    decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Factor by which the step sizes of the server and of users' own embeddings are multiplied "
        "after each pass; 0.98 for mlp and 0.97 for neumf unless given.",
    )
    n_cap: int = Field(4096, ge=1, description="Largest number of instances by which a user is weighted.")
    bits: int = Field(16, ge=8, le=31, description="Bits to which each value of a contribution is rounded.")
    metric_bits: int = Field(
        16,
        ge=8,
        le=16,
        description="Bits to which each metric of a user is rounded. A sum has room for 65,537 users with 16 bits, "
        "for 1,048,832 with 12, where `bits` is as low and `n_cap` at most 2047.",
    )
    row_bound: float = Field(
        8.0,
        gt=0,
        description="Largest change of a value of an item embedding by one user; larger ones are clipped before "
        "they are sent.",
    )
    network_bound: float = Field(
        1.0,
        gt=0,
        description="Largest change of a network weight by one user; larger ones are clipped before they are "
        "sent.",
    )
    user_bound: float = Field(
        0.08,
        gt=0,
        description="Bound of users' initial embeddings, which are uniform between minus and plus this. Xavier's "
        "bound for a table of all users would be sqrt(6 / (users + width)).",
    )
    output_bias: Literal["log-odds", "zero"] = Field(
        "log-odds",
        description="Initial bias of the output. log-odds: the logarithm of the odds of an interaction among the "
        "instances. zero: 0; a small MLP may then lose units and score many items alike.",
    )

    @model_validator(mode="before")
    @classmethod
    def _rates_of_the_model(cls, given: Any) -> Any:
        """Fill in rates that are not given, by the model."""
        model = given.get("model") if isinstance(given, Mapping) else None
        return {**_TUNED[model], **given} if isinstance(model, str) and model in _TUNED else given

    @field_validator("layers", mode="before")
    @classmethod
    def _array_of_json(cls, given: Any) -> Any:
        """Convert a list into a tuple: strict validation of a plan does not, once a validator above has run."""
        return tuple(given) if isinstance(given, list) else given

    @model_validator(mode="after")
    def _goes_together(self) -> FedNcfSettings:
        try:
            _ = self.architecture
        except ConfigError as error:
            raise ValueError(error.message) from error
        if self.scaffold and self.local_optimiser != "sgd":
            raise ValueError(f"scaffold needs local_optimiser 'sgd'; it is {self.local_optimiser!r}")
        return self

    @property
    def architecture(self) -> Architecture:
        """Model and its sizes, built by each access: bind it to a local before a loop."""
        return Architecture(self.model, self.dim, self.mlp_embedding, self.layers)

    @property
    def server(self) -> ServerOptimiser:
        """Server optimiser, built by each access."""
        return ServerOptimiser(
            self.server_optimiser, self.server_rate, self.server_beta1, self.server_beta2, self.server_tau
        )

    @property
    def asks_supports(self) -> bool:
        """Whether each group is asked for its items before it trains."""
        return self.aggregation == "mf-fedavg" and self.touch == "once"

    def rate_factor(self, global_round: float) -> float:
        """Return the factor of the rates of server and private embeddings.

        The rates decay once for each completed global round, in which every participant takes part once.
        """
        return float(self.decay ** math.floor(global_round))

    @property
    def variant(self) -> str:
        """Name of the model."""
        return self.model

    def label(self, run: BaseRunSettings) -> str:
        """Return the name of the model that is trained, as the paper writes it."""
        return {"gmf": "FedGMF", "mlp": "FedMLP", "neumf": "FedNeuMF"}[self.model]

    @property
    def width(self) -> int:
        """Number of values in a row of the model."""
        return self.architecture.width

    @property
    def room(self) -> int:
        """Largest number of users in a sum of training whose codes cannot overflow."""
        return layout(self, 1, measure_segments(("metric",), self.metric_bits)).capacity

    def narrower(self, run: BaseRunSettings) -> str:
        """Return, in words, which settings to change so that a sum may have more users."""
        return "fewer fedncf.bits and fedncf.metric_bits, a lower fedncf.n_cap"

    def problems(self, run: BaseRunSettings) -> list[str]:
        """Return the conflicts between a run and these settings, a sentence each."""
        uses = "fedncf.aggregation 'mf-fedavg' with touch 'once'"
        return [
            *one_held_out_problems(run),
            *uncounted(self.popularity, "fedncf", counted=self.asks_supports, otherwise=uses),
            *rounds_problems(
                run,
                chosen_by=[name for name in metric_names() if name.startswith("validation_")],
                wide=f"fedncf.bits {self.bits} and n_cap {self.n_cap}",
            ),
        ]

    def warnings(self, run: BaseRunSettings) -> list[str]:
        """Return warnings about what the cohorts and settings of a run disclose, a sentence each."""
        counted = self.aggregation == "mf-fedavg"
        random = random_cohorts(run)
        found = []
        if counted and self.touch == "exact":
            found.append(
                "Exact counts: each round tells the server how many of the cohort have, or drew, each item"
                + ("; with random cohorts many rounds give every user's items away." if random else ".")
            )
        if counted and self.touch == "once" and random:
            found.append(
                "touch = once asks groups for their items, but cohorts are no groups: an item that enough users of a "
                "group have may have a single one in a cohort, whose row the sum then shows."
            )
        if not counted:
            found.append(
                f"{self.aggregation}: no item is closed to a cohort in which a single user has it; its row is that "
                "user's."
            )
        return found


def tuned(model: str) -> FedNcfSettings:
    """Return settings found on the validation items of MovieLens 100K, for 9 fixed groups.

    Participants take one SGD step over all their data; its size does not matter, as the server's Adam rescales it.
    Private embeddings have an Adam of their own, whose moments last over the rounds.

    Raises
    ------
    ValidationError
        There is no such model.
    """
    return FedNcfSettings.model_validate({"model": model})


def published(model: str) -> FedNcfSettings:
    """Return the paper's settings of MF-FedAvg: local Adam at 1e-3, touch counts in every round, plain means.

    Raises
    ------
    ValidationError
        There is no such model.
    """
    return FedNcfSettings.model_validate(
        {
            "model": model,
            "local_epochs": 2,
            "local_optimiser": "adam",
            "local_rate": 1e-3,
            "private_rate": 1e-3,
            "touch": "exact",
            "server_optimiser": "fedavg",
            "server_rate": 0.01,
            "decay": 1.0,
            "row_bound": 0.01,
            "network_bound": 0.01,
            "output_bias": "zero",
        }
    )
