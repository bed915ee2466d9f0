"""Figures of a run as event files of TensorBoard."""

from __future__ import annotations

from pathlib import Path

from coterie.errors import PreflightError
from coterie.telemetry.report import Report
from coterie.telemetry.report_facts import flatten
from coterie.telemetry.run_export import began_at, cost_figures, final_figures, plain_name, points

__all__ = ["to_tensorboard"]


def to_tensorboard(report: Report, folder: Path) -> Path:
    """Write the curves, final figures, costs and settings of a run as event files.

    Parameters
    ----------
    report : Report
    folder : Path
        Log folder of TensorBoard; the run gets a folder of its own in it, a further one for each of several seeds and
        for each baseline.

    Returns
    -------
    Path
        Folder of the run.

    Raises
    ------
    PreflightError
        The package is not installed, the run is there already, or the folder cannot be written.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise PreflightError(
            f"export to TensorBoard needs {error.name}", hint="pip install 'coterie[tensorboard]'"
        ) from error
    made = folder / report.run_id
    if any(made.glob("**/events.out.tfevents.*")):
        raise PreflightError(
            f"{made} holds events of this run already",
            hint="remove it first, or name another folder by --out",
        )
    begun = began_at(report)
    ended = begun + (report.duration_s or 0.0)
    several = len(report.seeds) > 1
    writers = {}

    def writer_of(*names: str) -> SummaryWriter:
        path = made.joinpath(*names)
        if path not in writers:
            writers[path] = SummaryWriter(str(path))
        return writers[path]

    try:
        for one in points(report):
            to = writer_of(f"seed-{one.seed}") if several else writer_of()
            to.add_scalar(plain_name(one.metric), one.value, one.step, walltime=begun + one.time_s)
        for row, metric, mean, _ in final_figures(report):
            to = writer_of() if row == "run" else writer_of(f"baseline-{row}")
            to.add_scalar(f"final/{plain_name(metric)}", mean, 0, walltime=ended)
        for name, value in cost_figures(report).items():
            writer_of().add_scalar(f"cost/{name}", value, 0, walltime=ended)
        rows = "\n".join(f"| {key} | {value} |" for key, value in flatten(report.settings))
        writer_of().add_text("settings", f"| key | value |\n| --- | --- |\n{rows}", 0, walltime=begun)
    except OSError as error:
        raise PreflightError(f"cannot write into {made}: {error.strerror}") from error
    finally:
        for one_writer in writers.values():
            one_writer.close()
    return made
