"""The model of a finished run, read from the store of the run's orchestration server by whoever holds the run's folder.

Participants fetch the same model from the server.  Nothing is started, asked or written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from safetensors import SafetensorError

from coterie.errors import RunError, StoreError
from coterie.launch.local_run import LocalRun
from coterie.rounds.sides import Arrays
from coterie.rounds.training import Training, TrainingPhase
from coterie.store import cos as cos_store
from coterie.store.reading import read_store
from coterie.store.versions import Versions
from coterie.systems.registry import in_rounds
from coterie.systems.server_step import planned_server_side
from coterie.wire.v1.operator_pb2 import StartRunRequest
from coterie.wire.v1.orchestrator_pb2 import RunPlan

__all__ = ["FinalModel", "finished_plan", "gives_model", "refuse_sealed", "released"]

_STORE = "cos.db"
_MODELS = "models"
_SEALED = "shared-key"


@dataclass(frozen=True)
class FinalModel:
    """The model that participants of a finished run fetch.

    Attributes
    ----------
    plan : RunPlan
    items : tuple of str
        Keys of the model's items, in order.
    version : int
        The chosen version, or the last one where none was evaluated.
    model : mapping of str to ndarray of float32
    """

    plan: RunPlan
    items: tuple[str, ...]
    version: int
    model: Mapping[str, NDArray[np.float32]]


def finished_plan(run: LocalRun) -> RunPlan:
    """Return the plan of a finished run.

    Raises
    ------
    RunError
        The run was not started, has not finished, or has failed; or its store cannot be read.
    """
    phase = run.phase()
    if phase != TrainingPhase.DONE.value:
        raise RunError(
            f"run {run.run_id} has no final model: {_standing(phase)}",
            hint="--run names another run; `coterie resume` goes on with one that failed for a cause that may pass",
        )
    row = read_store(
        run.folder / "cos" / "state" / _STORE,
        lambda connection: connection.execute(sa.select(cos_store.runs.c.request)).one(),
    )
    return StartRunRequest.FromString(row.request).plan


def released(run: LocalRun) -> FinalModel:
    """Return the model of a finished run in rounds.

    Raises
    ------
    RunError
        As `finished_plan`; the run's model is sealed for its participants, or is no model of rounds; or its file is
        not there, or damaged.
    """
    plan = finished_plan(run)
    if not in_rounds(plan.system):
        raise RunError(f"the model of run {run.run_id} is not one of rounds: {plan.system} has none")
    refuse_sealed(plan)
    state = run.folder / "cos" / "state"

    def read(connection: sa.Connection) -> tuple[Training, int, tuple[str, ...]]:
        row = connection.execute(sa.select(cos_store.runs)).one()
        keys = sa.select(cos_store.items.c.key).order_by(cos_store.items.c.item)
        return (
            Training.from_json(row.state),
            int(row.snapshot),
            tuple(connection.execute(keys).scalars()),
        )

    training, snapshot, items = read_store(state / _STORE, read)
    side = planned_server_side(plan, len(items), training.groups)
    chosen = training.chosen
    version = training.version if chosen is None else chosen.version
    folder = state / _MODELS / plan.run_id
    if not folder.is_dir():
        raise RunError(f"{folder} is not there", hint="the folder of the run is not whole")
    damaged = f"version {version} of the model in {folder} is missing or damaged"
    try:
        arrays = _arrays(Versions(folder), version, snapshot if version == training.version else 0)
    except StoreError as error:
        raise RunError(f"{damaged}: {error.message}") from error
    if arrays is None and version == 0:
        arrays = side.initial()
    if arrays is None:
        raise RunError(damaged)
    return FinalModel(plan, items, version, side.model(arrays))


def gives_model(run: LocalRun) -> bool:
    """Return whether the folder of a finished run has a model of rounds that is not sealed.

    Raises
    ------
    RunError
        As `finished_plan`.
    """
    plan = finished_plan(run)
    return in_rounds(plan.system) and plan.secure_sum != _SEALED


def refuse_sealed(plan: RunPlan) -> None:
    """Refuse a run whose model only its participants may open.

    Raises
    ------
    RunError
        The participants share the key of sums.
    """
    if plan.secure_sum == _SEALED:
        raise RunError(
            f"the model of run {plan.run_id} is sealed for its participants, who share the key (secure_sum shared-key)",
            hint="a new user takes part in a further run; runs under other sums give their model to new users",
        )


def _arrays(versions: Versions, version: int, snapshot: int) -> Arrays | None:
    """Return the arrays that round ``snapshot`` made, or those of a version; None where they are not whole."""
    if not snapshot:
        return versions.load_version(version)
    try:
        return versions.load(snapshot)
    except (SafetensorError, OSError):
        return None


def _standing(phase: str | None) -> str:
    if phase is None:
        return "it was not started"
    if phase == TrainingPhase.FAILED.value:
        return "it failed"
    return f"it has not finished, and is in phase {phase}"
