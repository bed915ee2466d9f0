"""The whole of ``coterie run``: one federation for each seed, the reference rows, and the report."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie.config.run import FederationSettings, RunSettings
from coterie.data import Dataset
from coterie.errors import ConfigError, RunError
from coterie.net.meter import merge
from coterie.studies.floors import fitted, floors, require_open
from coterie.studies.in_process import InProcess, train_in_process
from coterie.studies.judges import references
from coterie.studies.kept_course import COURSE, keep_course, kept_course
from coterie.studies.outcome import SeedOutcome, about, from_cos, network, together, write
from coterie.studies.protection import fragile, protection, require_cohorts
from coterie.studies.recorded_run import attack, seen_by_parties
from coterie.studies.run_data import Feed, load, make_feed
from coterie.studies.run_record import RunRecord, files_of, now, recorded
from coterie.studies.saved_settings import save_settings
from coterie.studies.services_run import FinishedRun, RunServices
from coterie.studies.study import Further, study_of
from coterie.studies.users_figures import UsersAtBest, measured_by_hosts, write_users
from coterie.systems.description import Driver
from coterie.telemetry.report import Course, CpuAccount, FloorsPart, Report
from coterie.wire.v1 import operator_pb2 as wire

__all__ = ["COURSE", "Finished", "Watcher", "run", "unrecorded"]

Watcher = Callable[[int, wire.WatchRunResponse], None]
"""Callback of a run: receives the seed and each event."""

Finished = Callable[[int, Feed, FinishedRun | InProcess], None]
"""Callback of a run: receives the seed, the divided data and the federation that has ended."""


async def run(
    settings: RunSettings,
    run_id: str,
    watcher: Watcher,
    services: RunServices | None,
    *,
    warn: Callable[[str], None] | None = None,
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
        When the users cannot fill the rounds, or the system cannot run in one process.
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
    if taken_up is None:
        files = await asyncio.to_thread(files_of, settings)
        record = RunRecord(run_id=run_id, in_process=services is None, started=now(), files=files)
    else:
        record = taken_up.again()
    if dataset is None:
        dataset = await asyncio.to_thread(load, settings)
    if settings.rounds.fit_groups:
        first = make_feed(settings, dataset, settings.seeds[0])
        settings = await asyncio.to_thread(fitted, settings, first)
    save_settings(settings, folder)
    with recorded(record, folder):
        report = await _experiment(settings, dataset, folder, record, watcher, services, warn, finished)
        report = report.having(started=record.started, duration_s=round(time.perf_counter() - begun, 1))
        if record.taken_up:
            report = report.having(taken_up=record.taken_up)
        if (lacking := write(report, folder)) and warn is not None:
            warn(lacking)
    return report, folder


async def _experiment(
    settings: RunSettings,
    dataset: Dataset,
    folder: Path,
    record: RunRecord,
    watcher: Watcher,
    services: RunServices | None,
    warn: Callable[[str], None] | None,
    finished: Finished | None,
) -> Report:
    """Run a federation for each seed, and those that a study asks for beside them; return the report."""
    run_id = record.run_id
    singles: list[SeedOutcome] = []
    for seed in settings.seeds:
        feed = make_feed(settings, dataset, seed)
        single = folder / f"seed-{seed}" if len(settings.seeds) > 1 else folder
        if settings.description.in_rounds:
            require_cohorts(settings, sum(feed.users_of_hosts()))
            require_open(settings, feed)
        if warn is not None and services is not None and seed == settings.seeds[0]:
            for warning in fragile(settings, feed.users_of_hosts()):
                warn(warning)
        expected = None
        if settings.description.in_rounds and seed == settings.seeds[0]:
            expected = await asyncio.to_thread(floors, settings, feed)
        if warn is not None and expected is not None and expected.costly:
            warn(f"{expected} (`coterie preflight` says which groups would do)")
        course = await _trained(settings, feed, single, run_id, seed, watcher, services, finished, warn)
        if expected is not None:
            known = dataclasses.asdict(expected)
            course = course.having(
                floors=FloorsPart(**known, fitted=settings.rounds.fit_groups, text=str(expected))
            )
        singles.append(await _completed(settings, feed, seed, course))
    report = together(settings, about(dataset), run_id, singles)
    further: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one_more in study_of(settings.system).further(settings):
        feed = make_feed(settings, dataset, settings.seeds[0])
        made = await _further(one_more, feed, folder / one_more.folder, run_id, watcher, services)
        further[one_more.section].append(made)
    return report.having(**further)


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
    watcher: Watcher,
    services: RunServices | None,
    told: Finished | None = None,
    warn: Callable[[str], None] | None = None,
) -> Course:
    """Train one federation and return its course; one that has finished before an interruption is read instead."""
    if (kept := kept_course(folder)) is not None:
        return kept
    course = await _federation(settings, feed, folder, run_id, seed, watcher, services, told, warn)
    keep_course(course, folder)
    return course


async def _federation(
    settings: RunSettings,
    feed: Feed,
    folder: Path,
    run_id: str,
    seed: int,
    watcher: Watcher,
    services: RunServices | None,
    told: Finished | None,
    warn: Callable[[str], None] | None,
) -> Course:
    """Train one federation and return its course."""

    def see(event: wire.WatchRunResponse) -> None:
        watcher(seed, event)

    if services is not None:
        finished = await services(settings, feed, folder, run_id=run_id, seed=seed, see=see)
        if told is not None:
            told(seed, feed, finished)
        course = await _course(settings, feed, folder, finished, warn)
        if settings.federation.per_user_metrics:
            kept = await asyncio.to_thread(measured_by_hosts, finished.states, course)
            write_users(kept, folder)
        return course
    begun = time.process_time()
    figures = UsersAtBest(feed, settings.federation.hosts)
    trained = await asyncio.to_thread(
        train_in_process,
        settings,
        feed,
        run_id=run_id,
        seed=seed,
        see=see,
        keep=told is not None,
        on_evaluation=figures if settings.federation.per_user_metrics else None,
    )
    if settings.federation.per_user_metrics:
        write_users(figures.kept, folder)
    if told is not None:
        told(seed, feed, trained)
    spent = CpuAccount(total=round(time.process_time() - begun, 3), start=0.0)
    return from_cos(trained.known, settings.description.report).having(
        in_process=True, cpu_seconds={"in process": spent}
    )


async def _course(
    settings: RunSettings,
    feed: Feed,
    folder: Path,
    finished: FinishedRun,
    warn: Callable[[str], None] | None,
) -> Course:
    """Return what a federation over services did, cost and revealed."""
    known, accounts = finished.known, finished.accounts
    if known["phase"] != "done":
        raise RunError(
            f"the run ended before its time: {known['reason']}", hint=f"logs of all processes: {folder}"
        )
    course = from_cos(known, settings.description.report)
    course = course.having(
        start_seconds=round(finished.start_seconds, 2),
        traffic=merge(account["called"] for account in accounts.values()),
        network=network(course, accounts),
        cpu_seconds={party: account["cpu_seconds"] for party, account in accounts.items()},
        counts={party: account["counts"] for party, account in accounts.items()},
        peak_rss_mb={party: account["peak_rss_mb"] for party, account in accounts.items()},
        visibility=await asyncio.to_thread(seen_by_parties, settings, finished.states),
    )
    if settings.federation.attacks:
        try:
            course = course.having(attacks=await asyncio.to_thread(attack, settings, finished, feed))
        except ModuleNotFoundError as error:
            # What was trained stays; a package of an extra costs the attacks alone.
            if warn is not None:
                warn(f"no attacks were run, which need {error.name} (pip install 'coterie[attacks]')")
    return course


async def _completed(settings: RunSettings, feed: Feed, seed: int, course: Course) -> SeedOutcome:
    """Return a seed's outcome: its course with the facts of protection, its split's digest and reference rows."""
    if settings.driver is not Driver.ASYNCHRONOUS:
        course = course.having(protection=protection(settings, feed.users_of_hosts()))
    reference = None
    if settings.reference:
        reference = await asyncio.to_thread(references, settings, feed, seed)
    return SeedOutcome(seed, feed.split.sha256(feed.dataset), course, reference)


async def _further(
    asked: Further, feed: Feed, folder: Path, run_id: str, watcher: Watcher, services: RunServices | None
) -> dict[str, Any]:
    """Run a further federation that a study asks for, unrecorded, and return its entry in the report."""
    settings = asked.settings.model_copy(update={"federation": unrecorded(asked.settings)})
    course = await _trained(settings, feed, folder, run_id, settings.seeds[0], watcher, services)
    cpu = course.cpu_seconds.values()
    return {
        **asked.facts,
        "metrics": course.history[-1].metrics,
        "rpcs": sum(rpc.calls or 0 for rpc in course.traffic.values()),
        "cpu_seconds": round(sum((one.total or 0.0) - (one.start or 0.0) for one in cpu), 3),
    }
