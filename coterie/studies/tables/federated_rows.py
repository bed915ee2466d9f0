"""Rows of tables for any system in rounds, trained in one process and measured from its users' scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.errors import ConfigError, DataError, RunError
from coterie.evaluation.central import ScoreItems
from coterie.evaluation.selection import SelectedModel
from coterie.evaluation.threads import one_thread
from coterie.rounds.sides import HostSide
from coterie.rounds.training import Training
from coterie.studies.floors import fitted
from coterie.studies.host_scores import host_scores
from coterie.studies.in_process import HostMaker, InProcess, train_in_process
from coterie.studies.run_data import Feed, make_feed
from coterie.studies.study import study_of
from coterie.studies.tables.row import Options, Row, with_options
from coterie.studies.tables.tasks import ComparedTask
from coterie.systems.description import System

__all__ = [
    "PRIVATE_SUM",
    "federated_name",
    "federated_row",
    "run_facts",
    "score_of",
    "settings_of",
    "trained",
]

PRIVATE_SUM = "masked"
"""Secure sum of rows whose run names none."""


def federated_name(system: str) -> str:
    """Return the name of a system's row."""
    return f"fed-{system}"


def settings_of(system: System, given: Mapping[str, Any], task: ComparedTask) -> RunSettings:
    """Return the settings of a run of a system on a task's split; other keys have the system's defaults.

    The sum is masked, unless another one is given or the system has none: the private form is the one that is measured,
    and its figures are those of a sum in clear to the bit.  The version that counts is chosen by the task's validation
    metric, where the system measures it.

    Parameters
    ----------
    system : System
    given : mapping
        Nested values of a run's keys, such as the data's path.
    task : ComparedTask

    Raises
    ------
    ConfigError
        These make no run of the system; the message says why.
    """
    split = {**given.get("split", {}), "kind": task.split}
    sums = {"secure_sum": PRIVATE_SUM} if PRIVATE_SUM in system.sums else {}
    tree = {**sums, **given, "system": system.name, "split": split}
    chosen = {"choose_by": task.choose_by, **given.get("rounds", {})}
    try:
        return RunSettings.model_validate({**tree, "rounds": chosen})
    except ValueError:
        pass
    try:
        return RunSettings.model_validate(tree)
    except ValueError as error:
        raise ConfigError(f"{system.name}: {_reasons(error)}") from error


def federated_row(
    system: System, given: Mapping[str, Any], task: ComparedTask, most_passes: int | None = None
) -> Row:
    """Return the row of a system with its defaults, whose options are keys of a run.

    Parameters
    ----------
    system : System
    given : mapping
        As for `settings_of`.
    task : ComparedTask
    most_passes : int, optional
        Passes after which training ends at the latest.

    Raises
    ------
    ConfigError
        As `settings_of`.
    """
    own = settings_of(system, given, task)
    options = {} if most_passes is None else {"rounds.passes": min(own.rounds.passes, most_passes)}

    def engine(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
        run = with_options(own, options)
        # The data as the system's parties hold it; the split must be that of all other rows.
        mine = make_feed(run, feed.dataset, seed)
        if (mine.split.part != feed.split.part).any():
            raise DataError(f"{system.name} divides {feed.dataset.name} in another way than the other rows")
        with one_thread():
            return trained(fitted(run, mine), mine, seed, task)

    return Row(
        federated_name(system.name),
        own.own.label(own),
        engine,
        options=options,
        space=study_of(system.name).space,
        note=f"federated: {system.title}",
        defaults=True,
    )


def trained(
    run: RunSettings,
    feed: Feed,
    seed: int,
    task: ComparedTask,
    make_host: HostMaker | None = None,
    *,
    last: bool = False,
) -> SelectedModel:
    """Train a run and measure the version that its own validation metric chooses.

    A run that fails, or whose model diverges, has no figures; ``facts`` says why.

    Parameters
    ----------
    run : RunSettings
    feed : Feed
    seed : int
    task : ComparedTask
    make_host : callable, optional
        As for `train_in_process`.
    last : bool
        Whether the last version counts instead; the fact ``chosen`` is then the pass of the version that is chosen.
    """
    kept: list[NDArray[np.float32]] = []

    def keep(state: Training, hosts: Sequence[HostSide], model: Mapping[str, NDArray[np.float32]]) -> None:
        if last or state.best == len(state.evaluations) - 1:
            kept[:] = [host_scores(feed, run.federation.hosts, hosts, model)]

    facts: dict[str, Any] = {
        "system": run.system,
        "secure_sum": run.secure_sum,
        "form": run.form,
        "engine": "in one process",
    }
    try:
        made = train_in_process(
            run,
            feed,
            run_id="compare",
            seed=seed,
            see=lambda _: None,
            on_evaluation=keep,
            make_host=make_host,
        )
        if not kept:
            raise RunError("the run ended before its first evaluation")
        found = task.measured(feed, score_of(kept[0]))
    except RunError as error:
        return SelectedModel(({"step": 0, "metrics": {}},), 0, {}, facts={**facts, "failed": str(error)})
    versions = [entry["version"] for entry in made.known["history"]]
    # None where metrics with noise are those of no version.
    chosen = made.known["chosen"] and versions.index(made.known["chosen"]["version"])
    best = len(versions) - 1 if last else chosen
    history = [{"step": one["epoch"], "metrics": dict(one["metrics"])} for one in made.known["history"]]
    history[best]["metrics"].update(found.metrics)
    if last:
        facts["chosen"] = None if chosen is None else history[chosen]["step"]
    return SelectedModel(
        history, best, found.metrics, found.users, found.per_user, {**facts, **run_facts(run, made)}
    )


def score_of(table: NDArray[np.float32]) -> ScoreItems:
    """Return the function by which a table of users' scores, float32 (U, I), is measured."""

    def score(users: NDArray[np.integer], items: NDArray[np.integer] | None = None) -> NDArray[np.floating]:
        found: NDArray[np.floating] = table[users] if items is None else table[users[:, None], items]
        return found

    return score


def run_facts(run: RunSettings, made: InProcess) -> dict[str, Any]:
    """Return what a table says of a run beside its figures, JSON-ready."""
    known = made.known
    facts = {
        "cohorts": run.rounds.cohorts,
        "rounds": len(known["rounds"]),
        "abandoned": known["abandoned"],
        "passes": run.rounds.passes,
    }
    if known.get("privacy") is not None:
        facts |= {"epsilon": known["privacy"]["epsilon"], "sums": known["privacy"]["sums"]}
    return facts if known.get("closed_share") is None else {**facts, "withheld": known["closed_share"]}


def _reasons(error: ValueError) -> str:
    """Return the reasons for which settings were refused, without the validator's own words."""
    found = getattr(error, "errors", None)
    if not callable(found):
        return str(error)
    return "; ".join(str(one["msg"]).removeprefix("Value error, ") for one in found(include_url=False))
