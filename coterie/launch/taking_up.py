"""Taking up a run of this machine whose launcher was killed, or whose machine went down.

Seeds that had finished are taken from the folder of the run.  A federation in progress goes on from the stores of its
services where that comes to the figures of an undisturbed run; otherwise it begins anew, which comes to them as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from coterie.config.run import RunSettings
from coterie.errors import CertificateError, DataError, RunError
from coterie.launch.federation import Federation, run_federation
from coterie.launch.kept_runs import KeptRun
from coterie.launch.laid_out import laid_out_in
from coterie.launch.local_run import LocalRun
from coterie.launch.preflight import require_room
from coterie.net.credentials import TlsFiles
from coterie.studies import experiment
from coterie.studies.experiment import Stage, Watcher
from coterie.studies.run_record import RunRecord, changed_file
from coterie.systems.description import Driver
from coterie.telemetry.report import Report

__all__ = ["Interrupted", "interrupted"]

_TOKEN_S = 23 * 3600.0
"""Age up to which a token still enrols, seconds: a little less than its 24 hours."""

_EXACT = ("clear",)
"""Sums in which a member that was restarted sends the same contribution again, so that no sum is lost."""


@dataclass(frozen=True)
class Interrupted:
    """A run that can be taken up.

    Attributes
    ----------
    run : KeptRun
    settings : RunSettings
    record : RunRecord
    goes_on : bool
        Whether a federation in progress goes on from its stores; otherwise it begins anew.
    why : str
        Why it does what it does, a sentence; empty where no federation was in progress.
    """

    run: KeptRun
    settings: RunSettings
    record: RunRecord
    goes_on: bool
    why: str

    async def take_up(
        self,
        watcher: Watcher,
        warn: Callable[[str], None],
        stage: Stage | None = None,
        begun: Callable[[Federation], None] | None = None,
    ) -> tuple[Report, Path]:
        """Run the rest of the run, and return the report and the folder; raises as `coterie.studies.experiment.run`."""
        services = (
            None if self.record.in_process else partial(run_federation, go_on=self.goes_on, begun=begun)
        )
        return await experiment.run(
            self.settings,
            self.run.run_id,
            watcher,
            services,
            warn=warn,
            stage=stage,
            check=require_room,
            taken_up=self.record,
        )


def interrupted(run: KeptRun, *, go_on: bool = False) -> Interrupted:
    """Return an interrupted run, ready to be taken up.

    Parameters
    ----------
    run : KeptRun
        Not finished.
    go_on : bool
        Whether a federation in progress goes on from its stores even where a sum may be lost by that.

    Raises
    ------
    RunError
        The run is still going, has no record, or lies elsewhere than where it began.
    DataError
        A file that the run reads has changed.
    """
    if run.status == "running":
        raise RunError(f"run {run.run_id} is still going", hint="`coterie runs show` shows how far it is")
    record = run.record
    if record is None:
        why = run.note or "an older release of Coterie made it, without run.json"
        raise RunError(
            f"run {run.run_id} cannot be taken up: {why}",
            hint=f"`coterie run` with its settings, {run.folder / 'settings.json'}, begins it anew",
        )
    settings = run.run_settings()
    if changed := changed_file(record, settings):
        raise DataError(
            f"run {run.run_id} began with other data: {changed}",
            hint="put the file back as it was, or begin a new run: figures of two data sets do not go together",
        )
    if (settings.output / run.run_id).absolute() != run.folder.absolute():
        raise RunError(
            f"run {run.run_id} was moved from {settings.output}", hint="move its folder back to take it up"
        )
    goes_on, why = _way(run, settings, record, go_on=go_on)
    return Interrupted(run, settings, record, goes_on, why)


def _way(run: KeptRun, settings: RunSettings, record: RunRecord, *, go_on: bool) -> tuple[bool, str]:
    """Return whether the federation in progress goes on from its stores, and why."""
    folder = next((one for one in _federations(run, settings) if laid_out_in(one) is not None), None)
    if record.in_process or folder is None:
        return False, ""
    phase = _phase(folder)
    if not _trusted(folder):
        return False, "certificates or tokens of its services have expired: the federation begins anew"
    if phase == "failed":
        return False, "the federation had failed: it begins anew"
    if settings.federation.transcripts or settings.federation.attacks:
        return (
            False,
            "the messages of all services are recorded from the first one, so the federation begins anew",
        )
    if phase in (None, "done", "gather"):
        # Nothing was being summed.
        return True, "the federation goes on from its stores"
    if settings.driver is not Driver.ROUNDS or settings.secure_sum in _EXACT:
        return True, "the federation goes on from its stores"
    if go_on:
        return True, (
            "the federation goes on from its stores; if a sum was in progress its masks or shares are gone and it is "
            "lost, and figures differ a little from those of an undisturbed run"
        )
    return False, (
        f"secrets of a {settings.secure_sum} sum in progress are gone with the processes: the federation begins anew, "
        "which comes to the figures of an undisturbed run (--go-on goes on without that sum)"
    )


def _federations(run: KeptRun, settings: RunSettings) -> list[Path]:
    """Return the folders of federations that did not come to their end."""
    several = len(settings.seeds) > 1
    folders = [run.folder / f"seed-{seed}" if several else run.folder for seed in settings.seeds]
    return [one for one in folders if not (one / experiment.COURSE).is_file()]


def _trusted(folder: Path) -> bool:
    """Whether services of a federation still trust each other, by valid certificates, or by tokens before these."""
    if TlsFiles(folder / "operator" / "tls").complete():
        try:
            LocalRun.at(folder).operator()
        except CertificateError:
            return False
        return True
    return time.time() - (folder / "operator" / "token").stat().st_mtime < _TOKEN_S


def _phase(folder: Path) -> str | None:
    try:
        return LocalRun.at(folder).phase()
    except RunError:
        # The server had not made its store yet.
        return None
