"""Runs that a folder holds, each with how it stands: running, finished, failed or interrupted.

A run's folder is one that ``coterie run`` or ``fit`` of the Python interface made: it holds the run's settings and its
record (`coterie.studies.run_record`), and a report once the run has finished.  No other folder counts as a run.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from coterie.config.run import RunSettings
from coterie.errors import CoterieError, PreflightError, RunError, nearest
from coterie.launch.local_run import LocalRun
from coterie.process.runtime import alone_in, in_use
from coterie.studies.run_record import RUN_RECORD, RunRecord, kept_record
from coterie.studies.saved_settings import SAVED_SETTINGS, read_settings
from coterie.systems.reports import read_report
from coterie.telemetry.report import REPORT_FORMAT, Report

__all__ = [
    "KeptRun",
    "RunStatus",
    "finished_runs",
    "freed_by",
    "kept_runs",
    "prunable",
    "remove",
    "run_named",
]

RunStatus = Literal["running", "finished", "failed", "interrupted"]

_REPORT = "report.json"
_ID = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?-(\d{8}-\d{6})-[0-9a-f]{4}")
"""Id of a run: its name, the time and four random digits (`coterie.studies.run_plan.new_run_id`)."""


@dataclass(frozen=True)
class KeptRun:
    """One run in its folder.

    Attributes
    ----------
    folder : Path
    """

    folder: Path

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self.folder.name

    @cached_property
    def record(self) -> RunRecord | None:
        """The run's record; None where an older release kept none, or a newer one wrote it."""
        try:
            return kept_record(self.folder)
        except RunError:
            return None

    @cached_property
    def report(self) -> Report | None:
        """The run's report; None where there is none that can be read."""
        content = self._content
        return None if content is None else read_report(content)

    @cached_property
    def note(self) -> str:
        """What a reader of the report should know: another version wrote it, or it cannot be read; mostly empty."""
        if (self.folder / _REPORT).is_file() and self._content is None:
            return f"{_REPORT} cannot be read: it is damaged"
        if self._content is None:
            try:
                kept_record(self.folder)
            except RunError as error:
                return error.message
            return ""
        made, of = self._content.get("format"), self._written_by
        if made is None:
            return f"the report is of an older version{of}: what later ones added is absent"
        if isinstance(made, int) and made > REPORT_FORMAT:
            return (
                f"the report is of format {made}{of}, newer than {REPORT_FORMAT}, which this release reads: "
                "what it has beyond that is not shown"
            )
        return ""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings of the run as they were saved, without those that were not set; empty where they cannot be read."""
        try:
            found: Any = json.loads((self.folder / SAVED_SETTINGS).read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def run_settings(self) -> RunSettings:
        """Return the settings of the run, checked.

        Raises
        ------
        RunError
            They cannot be read, or this release has no such settings.
        """
        return read_settings(self.folder / SAVED_SETTINGS)

    @cached_property
    def status(self) -> RunStatus:
        """How the run stands now."""
        if in_use(self.folder) or any(in_use(lock.parent) for lock in self._locks()):
            return "running"
        if self._content is not None:
            return "finished"
        if self.record is not None:
            # A record that nobody works on any more is that of a launcher that was killed.
            return "failed" if self.record.status == "failed" else "interrupted"
        return "failed" if "failed" in self._phases() else "interrupted"

    @property
    def reason(self) -> str:
        """Why the run has failed; empty where it has not, or nobody wrote it down."""
        return self.record.reason if self.record is not None and self.status == "failed" else ""

    @cached_property
    def started(self) -> str:
        """Time at which the run began, ISO 8601; empty where it is not known."""
        if self.record is not None:
            return self.record.started
        if self.report is not None and self.report.started:
            return self.report.started
        found = _ID.fullmatch(self.run_id)
        try:
            return "" if found is None else datetime.strptime(found[2] + "Z", "%Y%m%d-%H%M%S%z").isoformat()
        except ValueError:
            return ""

    @property
    def began(self) -> datetime:
        """Time at which the run began; where it is not known, that of the folder."""
        try:
            found = datetime.fromisoformat(self.started)
        except ValueError:
            try:
                found = datetime.fromtimestamp(self.folder.stat().st_mtime, UTC)
            except FileNotFoundError:
                # Somebody removed it meanwhile.
                found = datetime.fromtimestamp(0, UTC)
        return found if found.tzinfo else found.replace(tzinfo=UTC)

    def size(self) -> int:
        """Return the bytes of all files in the folder; services that still run make and remove files meanwhile."""
        total = 0
        for one in self.folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                found = one.lstat()
                total += 0 if stat.S_ISDIR(found.st_mode) else found.st_size
        return total

    @cached_property
    def _content(self) -> dict[str, Any] | None:
        try:
            found: Any = json.loads((self.folder / _REPORT).read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    @property
    def _written_by(self) -> str:
        versions = (self._content or {}).get("versions")
        made = versions.get("coterie") if isinstance(versions, dict) else None
        return f" (Coterie {made})" if isinstance(made, str) else ""

    def _locks(self) -> list[Path]:
        """Return the locks of the run's services."""
        return [*self.folder.glob("*/state/lock"), *self.folder.glob("seed-*/*/state/lock")]

    def _phases(self) -> set[str | None]:
        """Return the phases of the run's federations, from the stores of their servers."""
        found: set[str | None] = set()
        for folder in (self.folder, *self.folder.glob("seed-*")):
            try:
                found.add(LocalRun.at(folder).phase())
            except CoterieError:
                continue
        return found


def _is_run(folder: Path) -> bool:
    """Whether a folder is one that a run made."""
    if folder.is_symlink() or not folder.is_dir() or not (folder / SAVED_SETTINGS).is_file():
        return False
    if (folder / RUN_RECORD).is_file():
        try:
            content = json.loads((folder / RUN_RECORD).read_bytes())
        except (OSError, ValueError):
            content = {}
        return isinstance(content, dict) and content.get("run_id") == folder.name
    # Runs of earlier releases: by the form of their id.
    return _ID.fullmatch(folder.name) is not None


def kept_runs(root: Path) -> list[KeptRun]:
    """Return the runs in a folder, in the order of their start; none where there is no such folder.

    Raises
    ------
    RunError
        The folder cannot be read.
    """
    try:
        found = [KeptRun(path) for path in sorted(root.absolute().iterdir()) if _is_run(path)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"cannot read the folder {root}: {error.strerror}") from error
    return sorted(found, key=lambda one: (one.began, one.run_id))


def finished_runs(folder: Path) -> list[tuple[dict[str, Any], dict[str, float | None]]]:
    """Return facts and mean metrics of each run of a folder that has a readable report, by the time of its start."""
    found = []
    for one in kept_runs(folder):
        if (report := one.report) is None:
            continue
        facts: dict[str, Any] = {
            "run": one.run_id,
            "system": report.system,
            "label": report.label,
            "secure_sum": report.secure_sum,
            "dataset": report.dataset.name,
            "started": one.started,
            "seconds": report.duration_s,
            "folder": str(one.folder),
        }
        found.append((facts, {name: metric.mean for name, metric in report.metrics.items()}))
    return found


def run_named(name: str, root: Path) -> KeptRun:
    """Return a run by its folder, its id, a part of its id that no other has, or ``newest``.

    Parameters
    ----------
    name : str
    root : Path
        Folder of the runs.

    Raises
    ------
    RunError
        There is no such run, or there are several.
    """
    path = Path(name)
    if _is_run(path):
        return KeptRun(path.absolute())
    runs = kept_runs(root)
    if not runs:
        raise RunError(
            f"there is no run in {root}", hint="`coterie run FILE` makes one; --in names another folder"
        )
    if name == "newest":
        return runs[-1]
    found = [one for one in runs if one.run_id == name] or [one for one in runs if name in one.run_id]
    if len(found) == 1:
        return found[0]
    if found:
        some = ", ".join(one.run_id for one in found[:3])
        raise RunError(
            f"{len(found)} runs in {root} have {name!r} in their id: {some}{', ...' if len(found) > 3 else ''}",
            hint="expected the id of one, or a part that no other has",
        )
    if path.is_dir():
        raise RunError(
            f"{path} is no folder of a run: {SAVED_SETTINGS} or {RUN_RECORD} of a run is missing",
            hint="expected a folder such as runs/ID, as `coterie run` leaves it",
        )
    near = nearest(name, [one.run_id for one in runs])
    raise RunError(
        f"there is no run {name!r} in {root}",
        hint=f"did you mean {near}?" if near else f"`coterie runs list` shows its {len(runs)} runs",
    )


# --- removal -----------------------------------------------------------------------------------------------------


def prunable(
    runs: Sequence[KeptRun],
    *,
    keep: int | None = None,
    older_than_s: float | None = None,
    failed: bool = False,
) -> list[KeptRun]:
    """Return the runs that fit all conditions given, oldest first; running ones are never among them.

    Parameters
    ----------
    runs : sequence of KeptRun
        In the order of their start.
    keep : int, optional
        How many of the newest runs stay.
    older_than_s : float, optional
        Age from which a run is removed, seconds since its start.
    failed : bool
        Whether only runs go that have failed or were interrupted.
    """
    found = list(runs) if keep is None else list(runs[: max(0, len(runs) - keep)])
    moment = datetime.now(UTC)
    if older_than_s is not None:
        found = [one for one in found if (moment - one.began).total_seconds() > older_than_s]
    allowed = ("failed", "interrupted") if failed else ("failed", "interrupted", "finished")
    return [one for one in found if one.status in allowed]


def freed_by(runs: Sequence[KeptRun]) -> int:
    """Return the bytes that the removal of some runs frees."""
    return sum(one.size() for one in runs)


def remove(run: KeptRun) -> None:
    """Remove the folder of a run that is not running.

    Raises
    ------
    RunError
        The folder is none of a run any more, or the run is going now.
    PreflightError
        A file cannot be removed.
    """
    fresh = KeptRun(run.folder)
    if not _is_run(run.folder):
        raise RunError(f"{run.folder} is no folder of a run")
    if fresh.status == "running":
        raise RunError(f"run {run.run_id} is still going", hint="stop it first")
    try:
        # Nobody takes the run up meanwhile.
        with alone_in(run.folder):
            shutil.rmtree(run.folder)
    except OSError as error:
        raise PreflightError(f"cannot remove {error.filename or run.folder}: {error.strerror}") from error
