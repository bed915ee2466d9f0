"""The whole of ``coterie run``: one federation for each seed, the reference rows, and the report."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from coterie.config.run import FederationSettings, RunSettings
from coterie.data import Dataset
from coterie.errors import ConfigError, CoterieError, DataError, RunError
from coterie.net.meter import merge
from coterie.studies import beside
from coterie.studies.floors import Floors, fitted, floors, require_open
from coterie.studies.halting import Look, at_once, in_thread
from coterie.studies.in_process import InProcess, train_in_process
from coterie.studies.judges import references
from coterie.studies.kept_course import COURSE, keep_course, kept_course
from coterie.studies.outcome import SeedOutcome, about, counting, from_cos, network, together, write
from coterie.studies.protection import fragile, protection, require_cohorts, require_pads
from coterie.studies.recorded_run import attack, seen_by_parties
from coterie.studies.reference import Reference
from coterie.studies.run_data import Feed, load, make_feed
from coterie.studies.run_record import RunRecord, files_of, now, recorded
from coterie.studies.saved_settings import BESIDE_SETTINGS, save_settings
from coterie.studies.services_run import FinishedRun, RunServices
from coterie.studies.study import Further, study_of
from coterie.studies.users_figures import UsersAtBest, measured_by_hosts, over_users, write_users
from coterie.systems.description import Driver
from coterie.telemetry import plots
from coterie.telemetry.report import BesidePart, Course, CpuAccount, FloorsPart, Report
from coterie.wire.v1 import operator_pb2 as wire

__all__ = ["COURSE", "Check", "Finished", "Stage", "Watcher", "run", "unrecorded"]

Watcher = Callable[[int, wire.WatchRunResponse], None]
"""Callback of a run: receives the seed and each event."""

Stage = Callable[[str, RunSettings | None], None]
"""Callback of a run: receives what begins, in words, and the settings of the federation that follows, if one does."""

Check = Callable[[RunSettings, Feed], None]
"""Callback of a run: receives its settings and the divided data before anything is written, and raises what speaks
against the run."""

Finished = Callable[[int, Feed, FinishedRun | InProcess], None]
"""Callback of a run: receives the seed, the divided data and the federation that has ended."""


class _Stages:
    """Tells what begins; what begins beside a federation over services is told once its services have stopped."""

    def __init__(self, tell: Stage) -> None:
        self._tell = tell
        self._services = False
        self._later = ""

    def __call__(self, text: str, federation: RunSettings | None) -> None:
        if self._services:
            self._later = text
        else:
            self._tell(text, federation)

    @contextlib.contextmanager
    def services(self) -> Iterator[None]:
        """Leave the display to a federation's own progress."""
        self._services = True
        try:
            yield
        finally:
            self._services = False
            if self._later:
                self._tell(self._later, None)
                self._later = ""


@dataclass(frozen=True)
class _Callbacks:
    """Who is told what of a run."""

    watcher: Watcher
    warn: Callable[[str], None]
    stage: _Stages
    finished: Finished | None
    computing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whatever computes much in this process: linear algebra's number of threads is one for all of it."""


async def run(
    settings: RunSettings,
    run_id: str,
    watcher: Watcher,
    services: RunServices | None,
    *,
    warn: Callable[[str], None] | None = None,
    stage: Stage | None = None,
    check: Check | None = None,
    dataset: Dataset | None = None,
    finished: Finished | None = None,
    taken_up: RunRecord | None = None,
) -> tuple[Report, Path]:
    """Run a federation for each seed, then write and return the report.

    Parameters
    ----------
    settings : RunSettings
    run_id : str
    watcher : callable
        Receives the seed and each event.
    services : callable or None
        Runs a federation over services; None trains a rounds-based system in this process, without services.
    warn : callable, optional
        Receives, before anything is started, each warning about what may end the run early, or what its floors cost.
    stage : callable, optional
        Receives what begins, from reading the data to writing the report.
    check : callable, optional
        Receives settings and divided data of the first seed before anything is written.
    dataset : Dataset, optional
        The data set; read as the settings say if left out.
    finished : callable, optional
        Receives each seed's federation when it has ended; users' private arrays are then kept in process.
    taken_up : RunRecord, optional
        Record of the run where it was interrupted: seeds that have finished are not trained again.

    Returns
    -------
    report : Report
        The content of ``report.json``.
    folder : Path
        Folder of the run: stores, logs and report.

    Raises
    ------
    ConfigError
        When the users cannot fill the rounds, the system cannot run in one process, or ``beside`` asks for something
        that cannot be compared.
    RunError
        When a run ends without a result.
    DataError
        When the data set cannot be read or divided, or no item of it can be learned.
    """
    if services is None and not settings.description.in_rounds:
        raise ConfigError(
            f"{settings.system} does not run in one process: its owners work side by side",
            hint="without --in-process every service is a process of its own",
        )
    begun = time.perf_counter()
    folder = (settings.output / run_id).absolute()
    stages = _Stages(stage or (lambda text, federation: None))
    told = _Callbacks(watcher, warn or (lambda text: None), stages, finished)
    # What it refuses is refused before anything is read.
    second = beside.beside(settings) if taken_up is None else beside.kept_beside(settings, folder)
    if taken_up is None:
        files = await asyncio.to_thread(files_of, settings)
        record = RunRecord(run_id=run_id, in_process=services is None, started=now(), files=files)
    else:
        record = taken_up.again()
    if dataset is None:
        told.stage("reading the data set", None)
        dataset = await asyncio.to_thread(load, settings)
    first = make_feed(settings, dataset, settings.seeds[0])
    if taken_up is None:
        settings = await asyncio.to_thread(fitted, settings, first)
    _require_rounds(settings, first)
    if second is not None:
        # Its users may be at other hosts.
        spread = make_feed(second, dataset, second.seeds[0])
        if taken_up is None:
            second = await asyncio.to_thread(fitted, second, spread)
        try:
            _require_rounds(second, spread)
        except (ConfigError, DataError) as error:
            raise type(error)(f"the second federation (beside): {error.message}", hint=error.hint) from error
    if check is not None:
        check(settings, first)
    save_settings(settings, folder)
    if second is not None:
        save_settings(second, folder, BESIDE_SETTINGS)
    with recorded(record, folder):
        report = await _experiment(settings, second, dataset, folder, run_id, services, told)
        told.stage("writing the report", None)
        report = report.having(started=record.started, duration_s=round(time.perf_counter() - begun, 1))
        if record.taken_up:
            report = report.having(taken_up=record.taken_up)
        if lacking := write(report, folder):
            told.warn(lacking)
    return report, folder


def _require_rounds(settings: RunSettings, feed: Feed) -> None:
    """Require that users fill the cohorts of a system in rounds, and that something can be learned."""
    if settings.description.in_rounds:
        require_cohorts(settings, sum(feed.users_of_hosts()))
        require_pads(settings, sum(feed.users_of_hosts()), len(feed.dataset.items))
        require_open(settings, feed)


async def _experiment(
    settings: RunSettings,
    second: RunSettings | None,
    dataset: Dataset,
    folder: Path,
    run_id: str,
    services: RunServices | None,
    told: _Callbacks,
) -> Report:
    """Run a federation for each seed, and those that are compared with it; return the report.

    What is computed of the last seed's federation once it has ended takes its time beside the second federation, of
    which the report has no times.
    """
    singles: list[SeedOutcome] = []
    # Nobody asks for what is private of federations that are only compared.
    compared = dataclasses.replace(told, finished=None)
    part: BesidePart | None = None
    for seed in settings.seeds:
        feed = make_feed(settings, dataset, seed)
        single = folder / f"seed-{seed}" if len(settings.seeds) > 1 else folder
        if seed != settings.seeds[0]:
            _require_rounds(settings, feed)
        if services is not None and seed == settings.seeds[0]:
            for warning in fragile(settings, feed.users_of_hosts()):
                told.warn(warning)
        expected = None
        if settings.description.in_rounds and seed == settings.seeds[0]:
            expected = await asyncio.to_thread(floors, settings, feed)
        if expected is not None and expected.costly:
            told.warn(f"{expected} (`coterie preflight` says which groups would do)")
        which = f"seed {seed}: " if len(settings.seeds) > 1 else ""
        trained = await _trained(settings, feed, single, run_id, seed, services, told, which)
        outcome = _outcome(settings, feed, single, seed, trained, expected, told)
        if second is None or seed != settings.seeds[-1]:
            singles.append(await outcome)
            continue
        other = partial(_beside, settings, second, dataset, folder, run_id, services, compared)
        if services is None:
            # Both compute in this process.
            singles.append(await outcome)
            part = await other()
        else:
            last, part = await at_once(outcome, other())
            singles.append(last)
    report = together(settings, about(dataset), run_id, singles)
    further: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one_more in study_of(settings.system).further(settings):
        feed = make_feed(settings, dataset, settings.seeds[0])
        made = await _further(one_more, feed, folder / one_more.folder, run_id, services, compared)
        further[one_more.section].append(made)
    if part is not None:
        report = report.having(beside=part)
    return report.having(**further)


async def _beside(
    settings: RunSettings,
    second: RunSettings,
    dataset: Dataset,
    folder: Path,
    run_id: str,
    services: RunServices | None,
    told: _Callbacks,
) -> BesidePart:
    """Run the second federation and return what the report says of it; one that fails costs the run no report."""
    seed = settings.seeds[0]
    feed = make_feed(second, dataset, seed)
    which = f"beside it, {settings.beside.label or 'with changes'}: "
    try:
        trained = await _trained(second, feed, folder / "beside", run_id, seed, services, told, which)
        course = await _course_of(second, feed, folder / "beside", trained, told)
    except Exception as error:
        why = (
            error.message
            if isinstance(error, CoterieError)
            else f"unexpected {type(error).__name__}: {error}"
        )
        told.warn(f"the second federation (beside) failed, so that there is nothing to compare with: {why}")
        return beside.as_report(settings, None, {}, failed=why)
    return beside.as_report(settings, course, counting(course).metrics)


def unrecorded(settings: RunSettings) -> FederationSettings:
    """Return a run's federation settings without transcripts and attacks, for runs that are only compared."""
    off = {"transcripts": False, "attacks": False, "per_user_metrics": False}
    return settings.federation.model_copy(update=off)


async def _trained(
    settings: RunSettings,
    feed: Feed,
    folder: Path,
    run_id: str,
    seed: int,
    services: RunServices | None,
    told: _Callbacks,
    which: str = "",
) -> FinishedRun | Course:
    """Train one federation, and return it.

    Its course in the place of it, where it was trained in this process or has finished before an interruption.
    """
    if (kept := kept_course(folder)) is not None:
        return kept

    def see(event: wire.WatchRunResponse) -> None:
        told.watcher(seed, event)

    if services is None:
        told.stage(f"{which}training in this process", settings)
        course = await _in_process(settings, feed, folder, run_id, seed, see, told)
        keep_course(course, folder)
        return course
    told.stage(f"{which}starting the services, secure sum {settings.secure_sum}", settings)
    with told.stage.services():
        training = services(settings, feed, folder, run_id=run_id, seed=seed, see=see)
        finished, _ = await at_once(training, asyncio.to_thread(plots.ready))
    if told.finished is not None:
        told.finished(seed, feed, finished)
    return finished


async def _in_process(
    settings: RunSettings,
    feed: Feed,
    folder: Path,
    run_id: str,
    seed: int,
    see: Callable[[wire.WatchRunResponse], None],
    told: _Callbacks,
) -> Course:
    """Train one federation in this process, and return its course."""
    begun = time.process_time()
    figures = UsersAtBest(feed, settings.federation.hosts)

    def train(look: Look) -> InProcess:
        def looked(event: wire.WatchRunResponse) -> None:
            look()
            see(event)

        return train_in_process(
            settings,
            feed,
            run_id=run_id,
            seed=seed,
            see=looked,
            keep=told.finished is not None,
            on_evaluation=figures if settings.federation.per_user_metrics else None,
        )

    trained = await in_thread(train)
    if told.finished is not None:
        told.finished(seed, feed, trained)
    spent = CpuAccount(total=round(time.process_time() - begun, 3), start=0.0)
    course = from_cos(trained.known, settings.description.report).having(
        in_process=True, cpu_seconds={"in process": spent}
    )
    if settings.federation.per_user_metrics:
        write_users(figures.kept, folder)
        course = course.having(over_users=over_users(figures.kept, feed))
    return course


async def _course_of(
    settings: RunSettings, feed: Feed, folder: Path, trained: FinishedRun | Course, told: _Callbacks
) -> Course:
    """Return the course of a federation that has ended, and keep it in its folder."""
    if not isinstance(trained, FinishedRun):
        return trained
    async with told.computing:
        course = await _course(settings, feed, folder, trained, told)
        if settings.federation.per_user_metrics:
            kept = await asyncio.to_thread(measured_by_hosts, trained.states, course)
            write_users(kept, folder)
            course = course.having(over_users=over_users(kept, feed))
    keep_course(course, folder)
    return course


async def _course(
    settings: RunSettings,
    feed: Feed,
    folder: Path,
    finished: FinishedRun,
    told: _Callbacks,
) -> Course:
    """Return what a federation over services did, cost and revealed."""
    known, accounts = finished.known, finished.accounts
    if known["phase"] != "done":
        raise RunError(
            f"the run ended before its time: {known['reason']}", hint=f"logs of all processes: {folder}"
        )
    course = from_cos(known, settings.description.report)
    if settings.federation.transcripts or settings.federation.attacks:
        told.stage("reading what every party received", None)
    course = course.having(
        start_seconds=round(finished.start_seconds, 2),
        traffic=merge(account["called"] for account in accounts.values()),
        network=network(course, accounts),
        cpu_seconds={party: account["cpu_seconds"] for party, account in accounts.items()},
        counts={party: account["counts"] for party, account in accounts.items()},
        peak_rss_mb={party: account["peak_rss_mb"] for party, account in accounts.items()},
        restarted={
            party: again for party, account in accounts.items() if (again := account.get("restarted"))
        },
        visibility=await asyncio.to_thread(seen_by_parties, settings, finished.states),
    )
    if settings.federation.attacks:
        told.stage("attacking what the server received", None)
        try:
            course = course.having(attacks=await asyncio.to_thread(attack, settings, finished, feed))
        except ModuleNotFoundError as error:
            # What was trained stays; a package of an extra costs the attacks alone.
            told.warn(f"no attacks were run, which need {error.name} (pip install 'coterie[attacks]')")
    return course


async def _outcome(
    settings: RunSettings,
    feed: Feed,
    folder: Path,
    seed: int,
    trained: FinishedRun | Course,
    expected: Floors | None,
    told: _Callbacks,
) -> SeedOutcome:
    """Return a seed's outcome: its course with the facts of protection, its split's digest and reference rows."""
    course = await _course_of(settings, feed, folder, trained, told)
    if expected is not None:
        known = dataclasses.asdict(expected)
        course = course.having(
            floors=FloorsPart(**known, fitted=settings.rounds.fit_groups, text=str(expected))
        )
    if settings.driver is not Driver.ASYNCHRONOUS:
        course = course.having(protection=protection(settings, feed.users_of_hosts()))
    reference = None
    if settings.reference:

        def judge(look: Look) -> dict[str, Reference]:
            def say(name: str) -> None:
                look()
                told.stage(f"baselines on the same data: {name}", None)

            return references(settings, feed, seed, say=say)

        async with told.computing:
            reference = await in_thread(judge)
    return SeedOutcome(seed, feed.split.sha256(feed.dataset), course, reference)


async def _further(
    asked: Further, feed: Feed, folder: Path, run_id: str, services: RunServices | None, told: _Callbacks
) -> dict[str, Any]:
    """Run a further federation that a study asks for, unrecorded, and return its entry in the report."""
    settings = asked.settings.model_copy(update={"federation": unrecorded(asked.settings)})
    seed = settings.seeds[0]
    trained = await _trained(settings, feed, folder, run_id, seed, services, told, f"{asked.folder}: ")
    course = await _course_of(settings, feed, folder, trained, told)
    cpu = course.cpu_seconds.values()
    return {
        **asked.facts,
        "metrics": course.history[-1].metrics,
        "rpcs": sum(rpc.calls or 0 for rpc in course.traffic.values()),
        "cpu_seconds": round(sum((one.total or 0.0) - (one.start or 0.0) for one in cpu), 3),
    }
