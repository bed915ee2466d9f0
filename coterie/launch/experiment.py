"""The whole of ``coterie run``: one federation for each seed, the reference rows, and the report."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa

from coterie.config.run import FederationSettings, RunSettings
from coterie.errors import ConfigError, RunError
from coterie.evaluation.holdout import TRAIN
from coterie.launch.federation import Federation
from coterie.launch.local_run import save_settings
from coterie.net.enrolment import saved_bundles
from coterie.net.meter import merge
from coterie.privacy import visibility
from coterie.privacy.attacks.scoring import Truth
from coterie.store import cos as cos_store
from coterie.store.client import load_users
from coterie.studies.in_process import train_in_process
from coterie.studies.outcome import SeedOutcome, about, from_cos, network, together, write
from coterie.studies.protection import fragile, protection, require_cohorts
from coterie.studies.run_data import Feed, load, make_feed
from coterie.studies.study import Further, Recorded, study_of
from coterie.systems.description import Driver
from coterie.systems.visibility import matrix
from coterie.telemetry.report import Course, CpuAccount, FurtherRun, Report
from coterie.wire.v1 import operator_pb2 as wire

__all__ = ["new_run_id", "run", "unrecorded"]

Watcher = Callable[[int, wire.WatchRunResponse], None]
"""Callback of a run: receives the seed and each event."""


def new_run_id(name: str) -> str:
    """Return a new run id: a DNS label from a name, the time in UTC and four random digits."""
    return f"{name}-{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


async def run(
    settings: RunSettings,
    run_id: str,
    watcher: Watcher,
    *,
    in_process: bool = False,
    warn: Callable[[str], None] | None = None,
) -> tuple[Report, Path]:
    """Run a federation for each seed, then write and return the report.

    Parameters
    ----------
    settings : RunSettings
    run_id : str
    watcher : callable
        Receives the seed and each event.
    in_process : bool
        Train a rounds-based system in this process, without services.
    warn : callable, optional
        Receives, before anything is started, each warning about what may end the run early.

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
        When the data set cannot be read or divided.
    """
    if in_process and not settings.description.in_rounds:
        raise ConfigError(
            f"{settings.system} does not run in one process: its owners work side by side",
            hint="without --in-process every service is a process of its own",
        )
    one = _in_process if in_process else _one
    started = datetime.datetime.now(datetime.UTC)
    begun = time.perf_counter()
    folder = (settings.output / run_id).absolute()
    dataset = await asyncio.to_thread(load, settings)
    save_settings(settings, folder)
    singles: list[SeedOutcome] = []
    for seed in settings.seeds:
        feed = make_feed(settings, dataset, seed)
        single = folder / f"seed-{seed}" if len(settings.seeds) > 1 else folder
        if settings.description.in_rounds:
            require_cohorts(settings, sum(feed.users_of_hosts()))
        if warn is not None and not in_process and seed == settings.seeds[0]:
            for warning in fragile(settings, feed.users_of_hosts()):
                warn(warning)
        singles.append(await one(settings, feed, single, run_id, seed, watcher))
    report = together(settings, about(dataset), run_id, singles)
    further: dict[str, list[FurtherRun]] = defaultdict(list)
    for one_more in study_of(settings.system).further(settings):
        feed = make_feed(settings, dataset, settings.seeds[0])
        made = await _further(one_more, feed, folder / one_more.folder, run_id, watcher)
        further[one_more.section].append(made)
    report = report.having(
        **further,
        started=started.isoformat(timespec="seconds"),
        duration_s=round(time.perf_counter() - begun, 1),
    )
    write(report, folder)
    return report, folder


def unrecorded(settings: RunSettings) -> FederationSettings:
    """Return a run's federation settings without transcripts and attacks, for runs that are only compared."""
    return settings.federation.model_copy(update={"transcripts": False, "attacks": False})


async def _one(
    settings: RunSettings, feed: Feed, folder: Path, run_id: str, seed: int, watcher: Watcher
) -> SeedOutcome:
    async with Federation(settings, feed, folder, run_id=run_id, seed=seed) as federation:
        await federation.start()
        async with contextlib.aclosing(federation.watch()) as events:
            async for event in events:
                watcher(seed, event)
        known = await federation.report()
        start_seconds = federation.start_seconds
    if known["phase"] != "done":
        raise RunError(
            f"the run ended before its time: {known['reason']}", hint=f"logs of all processes: {folder}"
        )
    accounts = federation.accounts()
    course = from_cos(known)
    recorded = {
        party: list(child.state.glob("transcript*.bin")) for party, child in federation.children.items()
    }
    course = course.having(
        start_seconds=round(start_seconds, 2),
        traffic=merge(account["called"] for account in accounts.values()),
        network=network(course, accounts),
        cpu_seconds={party: account["cpu_seconds"] for party, account in accounts.items()},
        counts={party: account["counts"] for party, account in accounts.items()},
        peak_rss_mb={party: account["peak_rss_mb"] for party, account in accounts.items()},
        visibility=await asyncio.to_thread(_visibility, settings, recorded),
    )
    if settings.federation.attacks:
        attacks = await asyncio.to_thread(_attack, settings, federation, feed, recorded["cos/cos"])
        course = course.having(attacks=attacks)
    return await _completed(settings, feed, seed, course)


async def _in_process(
    settings: RunSettings, feed: Feed, folder: Path, run_id: str, seed: int, watcher: Watcher
) -> SeedOutcome:
    begun = time.process_time()

    def see(event: wire.WatchRunResponse) -> None:
        watcher(seed, event)

    trained = await asyncio.to_thread(train_in_process, settings, feed, run_id=run_id, seed=seed, see=see)
    spent = CpuAccount(total=round(time.process_time() - begun, 3), start=0.0)
    course = from_cos(trained.known).having(in_process=True, cpu_seconds={"in process": spent})
    return await _completed(settings, feed, seed, course)


async def _completed(settings: RunSettings, feed: Feed, seed: int, course: Course) -> SeedOutcome:
    """Return a seed's outcome: its course with the facts of protection, its split's digest and reference rows."""
    if settings.driver is not Driver.ASYNCHRONOUS:
        course = course.having(protection=protection(settings, feed.users_of_hosts()))
    reference = None
    if settings.reference:
        reference = await asyncio.to_thread(study_of(settings.system).references, settings, feed, seed)
    return SeedOutcome(seed, feed.split.sha256(feed.dataset), course, reference)


def _visibility(settings: RunSettings, recorded: Mapping[str, Sequence[Path]]) -> dict[str, dict[str, str]]:
    """Return which party saw which kind of datum by the transcripts; without transcripts, which it may see."""
    if any(recorded.values()):
        seen = visibility.observed(recorded)
        return {
            party: {kind: "seen" if yes else "not seen" for kind, yes in kinds.items()}
            for party, kinds in seen.items()
        }
    declared = matrix(settings.system, settings.form, settings.secure_sum)
    return {
        party: {
            kind: "may see" if access.allowed else "may not see"
            for kind, access in declared[party.partition("/")[0]].items()
        }
        for party in recorded
    }


async def _further(asked: Further, feed: Feed, folder: Path, run_id: str, watcher: Watcher) -> FurtherRun:
    """Run a further federation that a study asks for, without references, and return its entry in the report."""
    settings = asked.settings.model_copy(
        update={"reference": False, "federation": unrecorded(asked.settings)}
    )
    course = (await _one(settings, feed, folder, run_id, settings.seeds[0], watcher)).course
    cpu = course.cpu_seconds.values()
    return FurtherRun(
        **asked.facts,
        metrics=course.history[-1].metrics,
        rpcs=sum(rpc.calls or 0 for rpc in course.traffic.values()),
        cpu_seconds=round(sum((one.total or 0.0) - (one.start or 0.0) for one in cpu), 3),
    )


# --- attacks ---------------------------------------------------------------------------------------------------


def _attack(
    settings: RunSettings, federation: Federation, feed: Feed, transcripts: Sequence[Path]
) -> dict[str, Any]:
    """Run the system's attacks on the COS's transcript and score them by the true interactions in the feed."""
    slots, items = _numbering(federation)
    data = feed.dataset
    train = feed.split.part == TRAIN
    user_slot = np.array([slots.get(name, -1) for name in data.users])
    item_index = np.array([items.get(key, -1) for key in data.items])
    user, item = user_slot[data.user[train]], item_index[data.item[train]]
    known = (user >= 0) & (item >= 0)
    truth = Truth(
        n_users=max(slots.values()) + 1,
        n_items=len(items),
        users=user[known],
        items=item[known],
        positive=feed.positive[train][known],
    )
    told = np.full((truth.n_users, len(feed.attribute_names)), np.nan)
    if feed.attributes is not None:
        told[user_slot[user_slot >= 0]] = feed.attributes.values[user_slot >= 0]
    recorded = Recorded(transcripts, federation.plan(), truth, data.rating[train][known], told)
    return dict(study_of(settings.system).attack(recorded))


def _numbering(federation: Federation) -> tuple[dict[str, int], dict[str, int]]:
    """Return the COS's slot of each user name and catalogue index of each item key, from the stores."""
    by_participant: dict[bytes, int] = {}
    with sa.create_engine(f"sqlite:///{federation.cos.state / 'cos.db'}").connect() as connection:
        for row in connection.execute(sa.select(cos_store.participants)):
            by_participant[row.participant] = row.slot
        items = {row.key: row.item for row in connection.execute(sa.select(cos_store.items))}
    slots: dict[str, int] = {}
    for child in federation.children.values():
        if child.role == "client":
            with sa.create_engine(f"sqlite:///{child.state / 'client.db'}").connect() as connection:
                names = load_users(connection)
            # A host that holds the key of sums has one more participant, listed after its users.
            for name, bundle in zip(names, saved_bundles(child.state)[: len(names)], strict=True):
                slots[name] = by_participant[bundle.participant_id]
    return slots, items
