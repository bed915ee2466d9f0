"""Table rows of federated NCF, trained in one process by the same state machines and sums as over the network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.evaluation.holdout import headline
from coterie.evaluation.selection import SelectedModel
from coterie.studies.in_process import InProcess
from coterie.studies.run_data import Feed
from coterie.studies.tables.row import Choices, LogUniform, Options, Row, Space, configured
from coterie.studies.tables.users_values import trained_with_values
from coterie.systems.fedncf.settings import FedNcfSettings, published, tuned

__all__ = ["PRINTED", "SPACE", "exact_row", "federated_row", "printed_row", "train_run"]

SPACE: Space = {
    "fedncf.server_rate": LogUniform(3e-3, 0.1),
    "fedncf.private_rate": LogUniform(5e-3, 0.2),
    "fedncf.decay": Choices((1.0, 0.98, 0.97, 0.96)),
    "fedncf.local_epochs": Choices((1, 2, 3)),
}
"""Search space of the options; the sizes of the model are the paper's in every row."""

_FIFTY: Options = {"fedncf.touch": "exact", "rounds.cohorts": "random", "rounds.cohort": 50}

_FIFTY_RATES = {"gmf": (0.02, 0.05, 1.0), "mlp": (0.005, 0.03, 0.97), "neumf": (0.005, 0.05, 0.96)}
"""Rates of server and private embeddings, and their decay, found for random cohorts of 50 of MovieLens 100K."""

_ON_1M: Mapping[str, Options] = {
    "gmf": {"rounds.passes": 60, "rounds.cohort": 100, "fedncf.server_rate": 0.01},
    "mlp": {"rounds.passes": 60},
    "neumf": {"rounds.passes": 60},
}
"""Further options found for random cohorts on MovieLens 1M, whose passes have more rounds."""

_OF_THE_PAPER = (
    "local_epochs",
    "local_optimiser",
    "local_rate",
    "private_optimiser",
    "private_rate",
    "touch",
    "row_bound",
    "network_bound",
    "output_bias",
    "server_optimiser",
    "server_rate",
)

PRINTED: Options = {
    "fedncf.decay": 1.0,
    "rounds.cohorts": "random",
    "rounds.cohort": 20,
    "rounds.passes": 200,
    "rounds.evaluate_every": 10,
    "rounds.patience": 0,
}
"""Random cohorts of 20 (6.2); 200 of the paper's 400 passes (appendix D), which does not name batches."""


def federated_row(name: str, model: str, label: str) -> Row:
    """Return the row of a model with our settings: fixed groups, items asked for once, FedAdam at the server.

    Cohorts, passes and the secure sum are those of the table's settings.

    Parameters
    ----------
    name : str
    model : {"gmf", "mlp", "neumf"}
    label : str
    """
    found = tuned(model)
    options = _begun(model, (found.server_rate, found.private_rate, found.decay))
    return Row(name, label, configured(train_run), options=options, space=SPACE, found={"ml-100k": {}})


def exact_row(name: str, model: str, label: str) -> Row:
    """Return the row of a model with touch counts in every round, and random cohorts of 50 or the size found."""
    return Row(
        name,
        label,
        configured(train_run),
        options={**_begun(model, _FIFTY_RATES[model]), **_FIFTY},
        space=SPACE,
        found={"ml-100k": {}, "ml-1m": _ON_1M[model]},
        note="random cohorts and exact counts, which give every user's items away",
    )


def _begun(model: str, rates: tuple[float, float, float]) -> Options:
    """Return the options that tuning begins with."""
    server, private, decay = rates
    return {
        "fedncf.model": model,
        "fedncf.server_rate": server,
        "fedncf.private_rate": private,
        "fedncf.decay": decay,
        "fedncf.local_epochs": 1,
    }


def printed_row(name: str, model: str, label: str, more: Options | None = None) -> Row:
    """Return the row of a model with the paper's settings, except the options in ``more``."""
    paper = published(model)
    options = {
        "fedncf.model": model,
        **{f"fedncf.{key}": getattr(paper, key) for key in _OF_THE_PAPER},
        **PRINTED,
        **(more or {}),
    }
    return Row(name, label, configured(train_run), options=options, note="the paper's settings")


def train_run(settings: RunSettings, feed: Feed, seed: int) -> SelectedModel:
    """Train a run in this process and keep the users' figures at the version that counts.

    Parameters
    ----------
    settings : RunSettings
        Settings of a run of a system in rounds.
    feed : Feed
    seed : int

    Raises
    ------
    RunError
        When the run fails; the message says why.
    """
    run, found = trained_with_values(settings, feed, seed)
    history = [{"step": entry["epoch"], "metrics": entry["metrics"]} for entry in run.known["history"]]
    chosen = run.known["chosen"]
    versions = [entry["version"] for entry in run.known["history"]]
    values = found if _complete(feed, found) else None
    return SelectedModel(
        history=history,
        best=versions.index(chosen["version"]),
        metrics=chosen["metrics"] if values is None else headline(values),
        users=chosen["users"],
        per_user=values,
        facts=_facts(settings, run),
    )


def _complete(feed: Feed, found: Mapping[str, NDArray[np.float64]]) -> bool:
    """Return whether hosts measured all their users at once."""
    held = feed.leave_one_out().validation >= 0
    return bool(found) and all(
        not np.isnan(values[held]).any() for name, values in found.items() if name.startswith("validation_")
    )


def _facts(settings: RunSettings, run: InProcess) -> Mapping[str, Any]:
    fedncf, rounds = settings.table(FedNcfSettings), settings.rounds
    facts: dict[str, Any] = {
        "secure_sum": settings.secure_sum,
        "parties": settings.form,
        "cohorts": rounds.cohorts,
        "touch": fedncf.touch,
        "rounds": len(run.known["rounds"]),
        "abandoned": run.known["abandoned"],
        "engine": "in one process",
    }
    if run.known["closed_share"] is not None:
        facts["withheld"] = run.known["closed_share"]
    return facts
