"""Configuration of rounds-based runs: cohorts and floors, and FedNCF's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from coterie.config.base import Model
from coterie.errors import ConfigError
from coterie.evaluation.leave_one_out import CHOOSE_BY
from coterie.rounds.policy import LEAST_REDRAW, min_sum
from coterie.systems.fedncf.mathematics import FedNcfSettings, tuned
from coterie.systems.fedncf.networks import MODELS, Architecture
from coterie.systems.fedncf.sides import FedNcfPlan
from coterie.systems.shared.optimisers import ServerOptimiser

__all__ = ["FedNcfOptions", "RoundsSettings"]

_FIXED_GROUP = 200
"""Fewest users of a fixed group unless the run says otherwise."""


class FedNcfOptions(Model):
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


class RoundsSettings(Model):
    """Rounds of a rounds-based system: who is in them, and when the run ends."""

    cohorts: Literal["groups", "random", "independent", "all"] = Field(
        "groups",
        description="Whole fixed groups of users; users at random as in the papers, each once in a pass, or drawn "
        "anew in each round (independent); or everybody in each round: fedmvmf, fedmf and fcf unless given.",
    )
    cohort: int = Field(
        _FIXED_GROUP, ge=1, description="Users of a cohort: at least (groups), exactly (random, independent)."
    )
    group: int = Field(
        _FIXED_GROUP,
        ge=1,
        description="Fewest users of a fixed group; 1000 for fedmvmf, fedmf and fcf unless given.",
    )
    redraw: int = Field(
        0,
        ge=0,
        description="Passes after which fixed groups are drawn anew and asked for their items again. 0: never. "
        "Fewer than 50 in an experiment only: sums over groups that overlap can be subtracted from one another.",
    )
    passes: int = Field(
        60,
        ge=1,
        le=100_000,
        description="Most passes over all users (the paper's global rounds); 300 for fedncf unless given, which "
        "patience ends long before.",
    )
    evaluate_every: int = Field(5, ge=1, description="Passes between two evaluations of all users.")
    patience: int = Field(
        5,
        ge=0,
        description="Evaluations without a better one after which the run ends. 0: all passes are made.",
    )
    choose_by: str = Field(
        CHOOSE_BY,
        pattern="^validation_",
        description="Metric on the validation items by which the version that counts is chosen; "
        "of errors the lowest counts. validation_ndcg_rated@10 for fedmvmf, validation_rmse for fedmf, "
        "validation_ndcg@10 for fcf unless given.",
    )
    min_cohort: int = Field(20, ge=1, description="A cohort of fewer is refused by its members.")
    min_sum: int = Field(
        20, ge=1, description="A sum over fewer, or over less than two thirds of the cohort, is not formed."
    )
    step_timeout_s: float = Field(120.0, gt=0, description="Longest time for one step of a round, seconds.")
    experiment: bool = Field(
        True,
        description="Floors count users; false: they count devices, as they must where a host is one of many "
        "people's devices. One host of this machine stands for many devices.",
    )
    party_per_user: bool = Field(
        False,
        description="Every user is a party of its own, to measure devices honestly. false: a host is one party and "
        "adds up its users before anything leaves it.",
    )

    @model_validator(mode="after")
    def _floors(self) -> RoundsSettings:
        if self.redraw and self.cohorts != "groups":
            raise ValueError(
                f"redraw {self.redraw} with cohorts {self.cohorts!r}: there are no groups to draw anew"
            )
        if 0 < self.redraw < LEAST_REDRAW and not self.experiment:
            raise ValueError(
                f"redraw {self.redraw} is below {LEAST_REDRAW}: members refuse groups that are drawn anew so often"
            )
        if self.cohorts == "all":
            return self
        if self.cohort < self.min_cohort:
            raise ValueError(
                f"cohort {self.cohort} is below min_cohort {self.min_cohort}: every round would be refused"
            )
        if self.cohorts == "groups" and self.group < self.min_cohort:
            raise ValueError(
                f"group {self.group} is below min_cohort {self.min_cohort}: groups are asked for their items one "
                "by one, and that sum would be refused"
            )
        if min_sum(self.cohort, self.min_sum) > self.cohort:
            raise ValueError(f"min_sum {self.min_sum} is above cohort {self.cohort}: no sum would be formed")
        return self
