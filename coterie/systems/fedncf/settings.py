"""Settings of FedNCF."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from coterie.errors import ConfigError
from coterie.evaluation.leave_one_out import metric_names
from coterie.systems.fedncf.mathematics import FedNcfSettings, layout, tuned
from coterie.systems.fedncf.networks import MODELS, Architecture
from coterie.systems.fedncf.sides import FedNcfPlan
from coterie.systems.run import Run
from coterie.systems.settings import SystemSettings
from coterie.systems.shared.optimisers import ServerOptimiser
from coterie.systems.shared.problems import random_cohorts, rounds_problems

__all__ = ["FedNcfOptions"]


class FedNcfOptions(SystemSettings):
    """FedNCF: neural collaborative filtering in rounds."""

    model: Literal["gmf", "mlp", "neumf"] = Field("gmf", description="Which of the paper's three models.")
    dim: int = Field(12, ge=1, le=1024, description="Width of the embeddings of GMF, the paper's D.")
    mlp_embedding: int = Field(12, ge=1, le=1024, description="Width of the embeddings of the MLP.")
    layers: tuple[int, ...] = Field(
        (48, 24, 12, 6), min_length=1, description="Outputs of the MLP's hidden layers."
    )
    negatives: int = Field(4, ge=1, le=1000, description="Sampled items per interaction.")
    local_epochs: int = Field(1, ge=1, le=1000, description="Passes over a user's own data in a round (E).")
    batch_size: int = Field(
        0, ge=0, description="Instances of a local step. 0: all of a user's data in one step."
    )
    local_optimiser: Literal["sgd", "adam"] = Field(
        "sgd", description="What moves a user's copies of item embeddings and network."
    )
    local_rate: float = Field(1.0, gt=0, description="Its step size.")
    private_optimiser: Literal["sgd", "adam"] = Field(
        "adam", description="What moves a user's own embedding."
    )
    private_rate: float = Field(0.05, gt=0, description="Its step size; 0.03 for mlp unless given.")
    proximal: float = Field(0.0, ge=0, description="FedProx: weight of the proximal term (mu).")
    scaffold: bool = Field(False, description="SCAFFOLD: control variates of the network.")
    aggregation: Literal["simple", "fedavg", "mf-fedavg"] = Field(
        "mf-fedavg", description="How contributions are averaged; the paper's Alg. 1 is mf-fedavg."
    )
    touch: Literal["once", "exact"] = Field(
        "once",
        description="mf-fedavg: whether users are asked once for their items, by group, or send in every round "
        "which rows they touched, as the paper does. The latter gives a server that sees many rounds every "
        "user's items.",
    )
    min_touch: int = Field(
        3,
        ge=1,
        description="touch = once: fewest users of a group that must have an item for it to be trained.",
    )
    server_optimiser: Literal["fedsgd", "fedavg", "fedadagrad", "fedadam", "fedyogi"] = Field(
        "fedadam", description="What the server makes of the average."
    )
    server_rate: float = Field(
        0.02,
        gt=0,
        description="Its step size; 0.01 for neumf unless given. fedavg has none.",
    )
    server_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of its first moment.")
    server_beta2: float = Field(0.99, ge=0, lt=1, description="Decay of its second moment.")
    server_tau: float = Field(1e-8, gt=0, description="Added to the root of its second moment.")
    decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Multiplies the rates of server and own embeddings once in each pass; 0.98 for mlp and 0.97 for "
        "neumf unless given.",
    )
    n_cap: int = Field(4096, ge=1, description="Largest number of instances by which a user is weighted.")
    bits: int = Field(16, ge=8, le=31, description="Bits of a transmitted value.")
    row_bound: float = Field(
        8.0, gt=0, description="Largest transmitted change of an item embedding's value."
    )
    network_bound: float = Field(1.0, gt=0, description="Largest transmitted change of a network weight.")
    user_bound: float = Field(
        0.08, gt=0, description="Users' embeddings start uniform between plus and minus this."
    )
    output_bias: Literal["log-odds", "zero"] = Field(
        "log-odds",
        description="Where the bias of the output begins: at the logarithm of the odds of an interaction among the "
        "instances, or at zero, from where a small MLP may lose units and score many items alike.",
    )

    def plan(self) -> FedNcfPlan:
        """Return the settings as the plan of a run carries them.

        Raises
        ------
        ConfigError
            Settings that do not go together.
        """
        architecture = Architecture(self.model, self.dim, self.mlp_embedding, self.layers)
        server = ServerOptimiser(
            self.server_optimiser, self.server_rate, self.server_beta1, self.server_beta2, self.server_tau
        )
        learning = FedNcfSettings(
            architecture=architecture,
            negatives=self.negatives,
            local_epochs=self.local_epochs,
            batch_size=self.batch_size,
            local_optimiser=self.local_optimiser,
            local_rate=self.local_rate,
            private_optimiser=self.private_optimiser,
            private_rate=self.private_rate,
            proximal=self.proximal,
            scaffold=self.scaffold,
            aggregation=self.aggregation,
            touch=self.touch,
            server=server,
            decay=self.decay,
            n_cap=self.n_cap,
            bits=self.bits,
            row_bound=self.row_bound,
            network_bound=self.network_bound,
            user_bound=self.user_bound,
            output_bias=self.output_bias,
        )
        return FedNcfPlan(learning, self.min_touch)

    @model_validator(mode="before")
    @classmethod
    def _of_the_model(cls, given: Any) -> Any:
        """Take the rates that are not given from those found for the model."""
        model = given.get("model") if isinstance(given, Mapping) else None
        if model not in MODELS:
            return given
        found = tuned(model)
        rates = {"server_rate": found.server.rate, "private_rate": found.private_rate, "decay": found.decay}
        return {**rates, **given}

    @model_validator(mode="after")
    def _together(self) -> FedNcfOptions:
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
        return self.model

    def label(self, run: Run) -> str:
        """Return the name of the model that is trained, as the paper writes it."""
        return {"gmf": "FedGMF", "mlp": "FedMLP", "neumf": "FedNeuMF"}[self.model]

    @property
    def width(self) -> int:
        """How many values a row of the model has."""
        return self.plan().learning.architecture.width

    @property
    def room(self) -> int:
        """Largest number of users over which a sum of training has room."""
        return layout(self.plan().learning, n_items=1).capacity

    def narrower(self, run: Run) -> str:
        """Return which settings would leave room for sums over more users, in words."""
        return "fewer fedncf.bits, a lower fedncf.n_cap"

    def problems(self, run: Run) -> list[str]:
        """Return what of a run does not go together with these settings, a sentence each."""
        found = []
        if run.split.kind not in ("leave-last-out", "published"):
            found.append(
                f"split.kind {run.split.kind!r}: fedncf is measured by one held-out item of each user; expected "
                "'leave-last-out' or 'published'"
            )
        return found + rounds_problems(
            run,
            chosen_by=[name for name in metric_names() if name.startswith("validation_")],
            wide=f"fedncf.bits {self.bits} and n_cap {self.n_cap}",
        )

    def warnings(self, run: Run) -> list[str]:
        """Return what the cohorts and settings of a run give away, a sentence each."""
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
