"""Figures of a run for a tracking server or file of MLflow."""

from __future__ import annotations

import os
from pathlib import Path

from coterie.errors import PeerError, PreflightError
from coterie.telemetry.report import Report
from coterie.telemetry.report_facts import flatten
from coterie.telemetry.run_export import began_at, cost_figures, final_figures, plain_name, points

__all__ = ["to_mlflow"]

_EXPERIMENT = "coterie"
_TAG = "coterie.run_id"
_WHOLE = "coterie.exported"
"""Tag of a run whose export came to its end."""
_LONGEST = 500
"""Characters of a parameter's value; stores of older servers hold no more."""
_AT_ONCE = 100
"""Parameters, and metrics, of one call, the most that servers take."""


def to_mlflow(report: Report, to: str, artifacts: tuple[Path, ...] = ()) -> str:
    """Write parameters, curves, final figures and costs of a run into a store of MLflow.

    Parameters
    ----------
    report : Report
    to : str
        Address of a tracking server (``http://...``), another address that MLflow takes, or the path of a file of
        SQLite, which is made when missing; files of runs go beside it.
    artifacts : tuple of Path
        Files to keep with the run.

    Returns
    -------
    str
        MLflow's id of the run.

    Raises
    ------
    PreflightError
        MLflow is not installed, the run is in the store already, or the store cannot be written.
    PeerError
        The server does not answer, or refuses.
    """
    # Nothing is told to anybody but the store that was asked for.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise PreflightError(
            f"export to MLflow needs {error.name}", hint="pip install 'coterie[mlflow]'"
        ) from error
    remote = "://" in to
    try:
        place: str | None = None
        if not remote:
            path = Path(to).absolute()
            path.parent.mkdir(parents=True, exist_ok=True)
            to, place = f"sqlite:///{path}", (path.parent / f"{path.stem}-artifacts").as_uri()
        client = MlflowClient(to)
        found = client.get_experiment_by_name(_EXPERIMENT)
        experiment = client.create_experiment(_EXPERIMENT, place) if found is None else found.experiment_id
        for one in client.search_runs([experiment], f"tags.`{_TAG}` = '{report.run_id}'"):
            if one.data.tags.get(_WHOLE):
                raise PreflightError(
                    f"run {report.run_id} is in {to} already",
                    hint="delete it there first, or name another store by --out",
                )
            # An export that was cut off: this one takes its place.
            client.delete_run(one.info.run_id)
        begun = round(began_at(report) * 1000)
        ended = begun + round((report.duration_s or 0.0) * 1000)
        made = client.create_run(
            experiment, start_time=begun, tags=dict(_tags(report)), run_name=report.run_id
        ).info.run_id
        params = [Param(key, value[:_LONGEST]) for key, value in flatten(report.settings)]
        metrics = [Metric(*one) for one in _metrics(report, begun, ended)]
        for first in range(0, len(params), _AT_ONCE):
            client.log_batch(made, params=params[first : first + _AT_ONCE])
        for first in range(0, len(metrics), _AT_ONCE):
            client.log_batch(made, metrics=metrics[first : first + _AT_ONCE])
        for file in artifacts:
            client.log_artifact(made, str(file))
        client.set_terminated(made, end_time=ended)
        # Last of all: an export without it was cut off.
        client.log_batch(made, tags=[RunTag(_WHOLE, "whole")])
    except MlflowException as error:
        kind = PeerError if remote else PreflightError
        raise kind(f"MLflow cannot use {to}: {str(error).splitlines()[0]}") from error
    except OSError as error:
        raise PreflightError(f"cannot write into {to}: {error.strerror or error}") from error
    return str(made)


def _tags(report: Report) -> list[tuple[str, str]]:
    known = {
        _TAG: report.run_id,
        "coterie.version": report.versions.get("coterie", ""),
        "system": report.system,
        "label": report.label,
        "secure_sum": report.secure_sum,
        "dataset": report.dataset.name,
        "split_sha256": report.dataset.split_sha256,
    }
    return [(name, value) for name, value in known.items() if value]


def _metrics(report: Report, begun: int, ended: int) -> list[tuple[str, float, int, int]]:
    """Return name, value, time in milliseconds and step of each figure."""
    several = len(report.seeds) > 1
    found: list[tuple[str, float, int, int]] = []
    for one in points(report):
        name = f"seed_{one.seed}/{plain_name(one.metric)}" if several else plain_name(one.metric)
        found.append((name, one.value, begun + round(one.time_s * 1000), one.step))
    for row, metric, mean, _ in final_figures(report):
        prefix = "final" if row == "run" else f"baseline_{row}"
        found.append((f"{prefix}/{plain_name(metric)}", mean, ended, 0))
    found += [(f"cost/{name}", value, ended, 0) for name, value in cost_figures(report).items()]
    return found
