"""Run the COS service: put stores and servicers together, restore runs, drive their clock, report health."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import grpc
import sqlalchemy as sa
import structlog

from coterie.config.services import CosSettings
from coterie.crypto.beacon import BEACON_BYTES
from coterie.crypto.transparency import FalseLogError, LogBreach
from coterie.errors import ConfigError, CryptoError, PeerError, StoreError
from coterie.net.credentials import TlsFiles
from coterie.net.directory import Directory
from coterie.net.enrolment import enrol
from coterie.net.latency import measure_each
from coterie.net.uncancelled import completed
from coterie.parties.paillier_directory import HOLD_S, PaillierDirectory
from coterie.process.memory import return_freed_memory
from coterie.process.migration import backed_up
from coterie.process.runtime import Runtime
from coterie.rounds.conductor import aggregation_of, cohort_rule
from coterie.rounds.open_population import objection_to_growth
from coterie.rounds.plan_hash import plan_hash
from coterie.rounds.plan_versions import check_whole, field_version
from coterie.rounds.policy import LEAST_REDRAW, largest_cohort
from coterie.rounds.privacy import check_plan as check_privacy_of
from coterie.rounds.training import Purpose
from coterie.secure_sum.aggregation import check_aggregation
from coterie.secure_sum.chains import MOST_SUMS
from coterie.secure_sum.registry import SUMS
from coterie.store import contributions
from coterie.store import cos as store
from coterie.store.announcements import Listener
from coterie.store.engine import Term, Writer, failure, file_failure, is_current, open_sqlite
from coterie.store.objects import ObjectAddress
from coterie.store.postgres import DatabaseAddress, bounded, engines_of, prepare
from coterie.store.room import MARGIN, has_room
from coterie.store.tenure import Succession, Tenure, taken_over
from coterie.store.version_objects import VersionObjects, needed_objects, own_folder
from coterie.store.versions import VersionRows, Versions
from coterie.systems import registry
from coterie.systems.description import Driver
from coterie.systems.registry import combination, driver_of, in_rounds, system_named
from coterie.systems.server_step import objection_to_optimiser, optimiser_of, planned_server_side
from coterie.telemetry.gauges import PrometheusMetric
from coterie.telemetry.seldom import Seldom
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1.expansion_pb2_grpc import add_ExpansionRelayServicer_to_server
from coterie.wire.v1.intakes_pb2_grpc import add_IntakesServicer_to_server
from coterie.wire.v1.latency_pb2_grpc import add_LatencyServicer_to_server
from coterie.wire.v1.latents_pb2_grpc import add_LatentRelayServicer_to_server
from coterie.wire.v1.operator_pb2 import ResumeRunRequest, RunPhase, StartRunRequest
from coterie.wire.v1.operator_pb2_grpc import add_OperatorServicer_to_server
from coterie.wire.v1.orchestrator_pb2 import CohortKind, RoundsPlan, RunPlan
from coterie.wire.v1.orchestrator_pb2_grpc import add_OrchestratorServicer_to_server
from coterie_cos.drift.asynchronous import AsynchronousRun
from coterie_cos.drift.model import kept_files
from coterie_cos.drift.plan_checks import check_plan
from coterie_cos.drift.windows_run import ShieldedRun
from coterie_cos.expansion import ExpansionRelay
from coterie_cos.held_polls import HeldPolls
from coterie_cos.intake import IntakeProcess
from coterie_cos.latency import Latency
from coterie_cos.latents import LatentRelay
from coterie_cos.operator import Operator
from coterie_cos.orchestrator import Orchestrator
from coterie_cos.plan_ranges import check_ranges
from coterie_cos.rounds_run import RoundsRun
from coterie_cos.run import Run
from coterie_cos.summing import Surroundings

__all__ = ["SERVICE"]

_log = structlog.get_logger("coterie.cos")

_TICK_S = 0.5

_PAUSES_S = 0.5, 10.0
"""First and longest pause before a failed store is tried again, seconds."""

_READ_S = 3.0
"""Longest time for which a version of a model is read from the database, seconds; less than a tenure lasts."""

_AWAY_S = 5.0
"""Pause of a COS that cannot reach the store of objects before it tries to come into office again, seconds."""

_CLEAN_S = 6 * 3600.0
"""Time between two searches of the store of objects for what nothing names, seconds."""

IN_OFFICE = "office"
"""Condition of health: this process serves, and no other one that shares its database."""

_STORE_CACHE_KIB = 256
"""Cache of the store.  Small, because messages of rounds are written once and deleted: a large one would fill with rows
that are never read."""


class CosProcess:
    """A running COS."""

    def __init__(self, settings: CosSettings, runtime: Runtime) -> None:
        self._settings = settings
        self._runtime = runtime
        runtime.require(["store", "directory", *([IN_OFFICE] if settings.standby else [])])
        self._limit_s: float | None = None
        # The tenure over a shared database, and how a standby waits for its own.
        self._tenure: Tenure | None = None
        self._succession: Succession | None = None
        self._prepare: Callable[[], None] | None = None
        # The store of objects with versions of models, where there is one.
        self._objects: VersionObjects | None = None
        if settings.objects is not None:
            self._objects = VersionObjects(ObjectAddress(**settings.objects.model_dump()).open())
        if settings.database is None:
            before = backed_up("cos", settings)
            self._engine = writing = open_sqlite(
                settings.state / "cos.db", "cos", cache_kib=_STORE_CACHE_KIB, before=before
            )
        else:
            database = DatabaseAddress(**settings.database.model_dump())
            self._engine, writing = engines_of(database)
            before = backed_up("cos", settings, database)
            self._limit_s = 3 * settings.database.timeout_s
            self._tenure = Tenure()
            self._prepare = partial(prepare, database, self._engine, writing, "cos", before=before)
            if settings.standby:
                self._succession = Succession(self._engine, self._tenure)
            else:
                self._prepare()
        self._writer = Writer(writing, tenure=self._tenure, waits=settings.standby)
        if self._tenure is not None:
            self._tenure.keep_up(self._engine)
        self._term = Term(self._writer)
        self._runs: dict[str, Run] = {}
        self._starting = asyncio.Lock()
        # When the store was last restored, and the pause before that.
        self._since, self._pause = -1e9, _PAUSES_S[0]
        self._directory_key = (settings.state / "directory.key").read_bytes()
        thirdparty = runtime.connect(settings.thirdparty, "thirdparty")
        self._directory = Directory(thirdparty, self._directory_key)
        self._paillier = PaillierDirectory(thirdparty)
        self._revocations = runtime.watch_revocations(thirdparty)
        self._log = runtime.watch_log(thirdparty)
        self._operator = Operator(self._runs, self._start, self._resume, lambda: self._term.check())
        self._orchestrator = Orchestrator(
            self._operator.find,
            self._directory_key,
            self._revocations.is_revoked,
            self._log.among,
            runtime.accounting,
            max_uploads=settings.max_uploads,
            max_payload=settings.max_payload_mb << 20,
            stopping=runtime.stopping,
        )
        self._expansion = ExpansionRelay(self._operator.find, thirdparty, self._reading)
        self._latents = LatentRelay(self._operator.find, thirdparty, self._reading)
        self._latency = Latency(
            runtime.party,
            lambda order: measure_each(runtime.calls, runtime.tls, order, runtime.latency_bytes),
            runtime.stopping,
        )
        if settings.standby:
            # `run` waits for the turn of this process.
            self._term.lose(_waits())
        else:
            try:
                self._restore()
            except OSError as error:
                raise StoreError(
                    f"a version of a model that the store names cannot be read: {error.strerror or error}",
                    hint=f"the database and {settings.state / 'models'} belong together",
                ) from error
        runtime.measures += _of_the_runs(self._runs)

    def _restore(self) -> None:
        """Replace all runs by those in the store."""
        in_touch = self._in_touch if self._settings.standby else None
        self._term = Term(self._writer, self._limit_s, self._term.largest, in_touch)
        found: dict[str, Run] = {}
        if self._settings.part == "coordinator":
            with self._engine.begin() as connection:
                contributions.make_tables(connection)
        try:
            with self._engine.connect() as connection, self._in_time(connection):
                for row in connection.execute(sa.select(store.runs)).all():
                    run = found[row.run_id] = self._new(StartRunRequest.FromString(row.request))
                    run.restore(connection, row.state, row.snapshot)
                    if not run.over:
                        # A later release began it, and this one may know less of its plan.
                        check_whole(run.plan, "the operator", "the cos")
            self._check_office()
        except Exception:
            # Runs restored before the failure have begun to work: stop their writes.
            self._term.lose(StoreError("the store cannot be read", trouble="away"))
            raise
        self._runs.clear()
        self._runs.update(found)
        self._runtime.holds("store")
        if self._settings.standby:
            self._runtime.holds(IN_OFFICE)

    def _in_touch(self) -> bool:
        """Return whether the database has lately confirmed that this process is in office."""
        return self._tenure is not None and self._tenure.in_force

    def _check_office(self) -> None:
        """Require of a process that may have a standby that it is still in office after it restored the runs.

        Raises
        ------
        StoreError
            Another process is in office, or may be.
        """
        if self._settings.standby and not self._in_touch():
            raise taken_over() if self._tenure is not None and self._tenure.over else _out_of_touch()

    def _version_rows(self, run_id: str) -> VersionRows:
        def read(work: Callable[[sa.Connection], Any]) -> Any:
            # The event loop waits for it: rarely, as versions are kept in memory once they were read.
            try:
                with self._engine.connect() as connection, bounded(connection, _READ_S):
                    return work(connection)
            except sa.exc.DBAPIError as error:
                raise failure(error) from error

        return VersionRows(run_id, read, kept=self._settings.standby, objects=self._objects)

    async def _fetch_objects(self, run_id: str | None = None) -> None:
        """Fetch the present models of all runs, or of one, so that these can be restored without a wait for objects."""
        if self._objects is not None:
            self._objects.drop()
            needed = await self._reading(lambda connection: needed_objects(connection, run_id))
            await self._objects.fetch(needed)

    async def _reading(self, work: Callable[[sa.Connection], Any]) -> Any:
        def read() -> Any:
            with self._engine.connect() as connection, self._in_time(connection):
                return work(connection)

        try:
            return await asyncio.to_thread(read)
        except sa.exc.DBAPIError as error:
            raise failure(error) from error

    def _in_time(self, connection: sa.Connection) -> contextlib.AbstractContextManager[None]:
        """Return a context that ends a read of a hanging database after a time limit."""
        return contextlib.nullcontext() if self._limit_s is None else bounded(connection, self._limit_s)

    def _new(self, request: StartRunRequest) -> Run:
        # A run that is taken up again may be of a system that was uninstalled: said so, or why it cannot be used.
        registry.system_named(request.plan.system)
        meter, folder, revoked = self._runtime.guard.meter, self._settings.state, self._revocations.is_revoked

        def traffic() -> tuple[int, int]:
            return meter.bytes_in, meter.bytes_out

        accounting = self._runtime.accounting
        commit = self._directory.commit_population
        rows = self._version_rows if self._settings.standby else None
        around = Surroundings(
            folder,
            self._term,
            traffic,
            accounting,
            self._directory_key,
            revoked,
            commit,
            rows,
            intakes=self._settings.part == "coordinator",
            learn_waves=self._directory.signed_waves,
        )
        match driver_of(request.plan.system, request.plan.form):
            case Driver.ROUNDS:
                return RoundsRun(request, around)
            case Driver.WINDOWS:
                return ShieldedRun(request, around)
            case _:
                every, run_id = self._settings.snapshot_every, request.plan.run_id
                kept = None if rows is None else rows(run_id)
                return AsynchronousRun(request, folder, self._term, every, traffic, kept)

    async def _start(self, request: StartRunRequest) -> Run:
        return await completed(self._start_in_turn(request))

    async def _start_in_turn(self, request: StartRunRequest) -> Run:
        # An operator may repeat its request while the first one is being written.
        async with self._starting:
            return await self._start_alone(request)

    async def _start_alone(self, request: StartRunRequest) -> Run:
        plan, term = request.plan, self._term
        term.check()
        self._require_one_log("plan.run_id")
        held = self._runs.get(plan.run_id)
        if held is not None:
            if plan_hash(held.plan) != plan_hash(plan):
                raise Refusal(
                    ErrorReason.ERROR_REASON_CONFLICT,
                    "there is a run of this id with another plan",
                    field="plan.run_id",
                    expected="a new id",
                )
            return held
        check_whole(plan, "the operator", "the cos")
        if plan.rounds.most_users:
            # One of an earlier release refuses every wave, for as long as the run takes.
            self._revocations.require_version(field_version("rounds.most_users"))
        if in_rounds(plan.system):
            _check_rounds(request)
        elif combination(plan.system, plan.secure_sum, plan.form).allowed:
            check_plan(request)
        else:
            raise Refusal(
                ErrorReason.ERROR_REASON_WRONG_SYSTEM,
                f"no such combination: {plan.system}, {plan.form}, {plan.secure_sum}",
                field="plan",
                expected="one that `coterie systems` lists",
            )
        with term.keeping("make the folder of a run"):
            run = self._new(request)
        row = {
            "run_id": plan.run_id,
            "request": request.SerializeToString(),
            "plan_hash": plan_hash(plan),
            "state": run.state_json(),
        }
        await term.run(lambda connection: connection.execute(store.runs.insert(), row))
        term.check()
        self._runs[plan.run_id] = run
        return run

    def _require_one_log(self, field: str) -> None:
        if self._log.found is not None:
            raise Refusal(
                ErrorReason.ERROR_REASON_WRONG_STATE,
                self._log.found.message,
                field=field,
                expected="a third party whose log only grows",
            )

    async def _resume(self, request: ResumeRunRequest) -> None:
        await completed(self._resume_in_turn(request))

    async def _resume_in_turn(self, request: ResumeRunRequest) -> None:
        async with self._starting:
            term = self._term
            term.check()
            run = _to_resume(self._operator.find(request.run_id), request)
            if run is None:
                return
            self._require_one_log("run_id")
            try:
                await run.resume()
                term.check()
                await self._fetch_objects(request.run_id)
                fresh = self._restored(run)
            except Exception as error:
                _log.warning("a run is not resumed yet", run=request.run_id, error=type(error).__name__)
                # The run's memory is gone: it is restored with all others.
                term.lose(StoreError("a run cannot be restored from the store", trouble="away"))
                raise
            finally:
                if self._objects is not None:
                    self._objects.drop()
            await fresh.gather_again()

    def _restored(self, run: Run) -> Run:
        """Replace a run that was resumed by one restored from the store, as after a restart of this server."""
        run_id = run.plan.run_id
        fresh = self._new(run.request)
        fresh.away = run.silent()
        with self._engine.connect() as connection, self._in_time(connection):
            row = connection.execute(sa.select(store.runs).where(store.runs.c.run_id == run_id)).one()
            fresh.restore(connection, row.state, row.snapshot)
        self._runs[run_id] = fresh
        run.replaced()
        return fresh

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add all servicers to the gRPC server."""
        add_OrchestratorServicer_to_server(self._orchestrator, server)
        add_OperatorServicer_to_server(self._operator, server)
        add_LatencyServicer_to_server(self._latency, server)
        add_ExpansionRelayServicer_to_server(self._expansion, server)
        add_LatentRelayServicer_to_server(self._latents, server)
        self._runtime.offer_gossip(server, self._log)
        if self._settings.part == "coordinator":
            held = HeldPolls(self._orchestrator, self._runtime.guard, self._runtime.stopping)
            add_IntakesServicer_to_server(held, server)

    async def run(self) -> None:
        """Drive the clock, and watch the revocation list and the keys of encrypted runs."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._revocations.run())
            tasks.create_task(self._watch_log())
            tasks.create_task(self._tick(tasks))
            if self._settings.database is not None:
                tasks.create_task(self._watch_database(self._settings.database.timeout_s))
                tasks.create_task(self._watch_lease())
            if self._settings.part == "coordinator":
                tasks.create_task(self._hear_intakes())
            if self._objects is not None:
                tasks.create_task(self._clean_objects(self._objects))

    async def _clean_objects(self, objects: VersionObjects) -> None:
        """Remove old objects that nothing names, in office and now and then."""
        pause = 0.0
        while True:
            await asyncio.sleep(pause or _TICK_S)
            if self._term.lost is None and objects.folder:
                objects.clean(self._reading)
                pause = _CLEAN_S

    async def _watch_log(self) -> None:
        """Follow the third party's log; once the third party is caught, stop all runs and start none any more.

        Runs that a log set back has stopped may be resumed once the operator has said that it was a restoration, by
        removing the evidence.
        """
        try:
            await self._log.run()
        except FalseLogError as error:
            self._runtime.holds("log", False)
            went_back = error.evidence.finding is LogBreach.WENT_BACK
            for run in list(self._runs.values()):
                if not run.over:
                    await completed(run.stop(error.message, may_pass=went_back))

    async def _watch_database(self, every_s: float) -> None:
        """Probe the database, so that one that is gone or hangs is noticed also while nothing is written."""
        while True:
            await asyncio.sleep(every_s)
            if self._term.lost is None:
                await self._term.probe()

    async def _hear_intakes(self) -> None:
        """Take contributions as soon as intakes say that there are some; each tick of a run looks without that, too."""
        loop, under_way = asyncio.get_running_loop(), set[asyncio.Task[None]]()

        async def gather(run_id: str) -> None:
            run = self._runs.get(run_id)
            if run is not None:
                with contextlib.suppress(StoreError):
                    await run.gather()

        def heard(run_id: str) -> None:
            task = loop.create_task(gather(run_id))
            under_way.add(task)
            task.add_done_callback(under_way.discard)

        def announced(run_id: str) -> None:
            loop.call_soon_threadsafe(heard, run_id)

        listener = Listener(self._engine, contributions.CHANNEL, announced)
        try:
            await self._runtime.stopping.wait()
        finally:
            await asyncio.to_thread(listener.close)

    async def _watch_lease(self) -> None:
        """Stop to serve when another process is in office, or the database has not confirmed that none is."""
        while True:
            await asyncio.sleep(_TICK_S)
            if self._term.lost is not None or self._tenure is None:
                continue
            if self._tenure.over:
                self._out_of_office(self._term, taken_over())
            elif self._settings.standby and not self._in_touch():
                self._out_of_office(self._term, _out_of_touch())

    def _out_of_office(self, term: Term, why: StoreError) -> None:
        """End a term because another process is in office, or may be."""
        term.lose(why)
        if self._settings.standby:
            self._runtime.holds(IN_OFFICE, False)

    async def _tick(self, tasks: asyncio.TaskGroup) -> None:
        watched: dict[str, Run] = {}
        while True:
            for run in list(self._runs.values()):
                await run.tick()
                if (
                    isinstance(run, RoundsRun)
                    and run.key_epoch is not None
                    and watched.get(run.plan.run_id) is not run
                ):
                    watched[run.plan.run_id] = run
                    tasks.create_task(self._watch_key(run))
            if self._term.lost is not None:
                await self._taken_up_again(self._term.lost)
            await asyncio.sleep(_TICK_S)

    async def _taken_up_again(self, lost: StoreError) -> None:
        """Wait until the store takes writes again, and restore all runs from it, as memory may be ahead of the store.

        Meanwhile every call about a run is refused.

        Raises
        ------
        StoreError
            When the store's failure is permanent.
        """
        if self._succession is None:
            self._runtime.holds("store", False)
        else:
            self._runtime.holds(IN_OFFICE, False)
        # Wait for room for a whole model version, not only for some rows.
        needed = self._term.largest + MARGIN
        # A standby that starts has lost nothing.
        if self._succession is None or self._tenure is None or self._tenure.holder:
            _log.error(
                "the store takes no writes", message=lost.message, trouble=lost.trouble, needed_bytes=needed
            )
        first, longest = _PAUSES_S
        pause = first if time.monotonic() - self._since > 2 * longest else min(2 * self._pause, longest)
        waits = False
        while True:
            if not lost.trouble:
                raise lost
            for run in self._runs.values():
                await run.drop()
            await asyncio.sleep(first if self._succession is not None else pause)
            pause = min(2 * pause, longest)
            try:
                if not await self._takes_writes():
                    if self._succession is not None and not waits:
                        _log.warning("another COS serves: this one waits as its standby")
                        waits = True
                    continue
                full = lost.trouble == "full"
                if full and not await asyncio.to_thread(has_room, self._settings.state, needed):
                    continue
                await self._fetch_present()
                self._restore()
            except sa.exc.DBAPIError as error:
                self._runtime.holds("store", False)
                lost = failure(error)
            except OSError as error:
                lost = file_failure("read the state of a run", error)
            except StoreError as error:
                lost = error
            else:
                break
            finally:
                if self._objects is not None:
                    self._objects.drop()
        self._since, self._pause = time.monotonic(), pause
        said = "the store takes writes again" if self._succession is None else "this COS is in office"
        _log.info(said, runs=len(self._runs))

    async def _fetch_present(self) -> None:
        """Fetch the present models of all runs; where they cannot be had now, let another process try.

        Raises
        ------
        StoreError
            One of them is lost or damaged, or the store of objects is away.
        """
        try:
            await self._fetch_objects()
        except StoreError as error:
            if error.trouble and self._succession is not None:
                _log.warning("runs are not restored yet", because=error.message)
                await asyncio.to_thread(self._succession.end_own)
                await asyncio.sleep(_AWAY_S)
            raise

    async def _takes_writes(self) -> bool:
        """Return whether the store takes writes; where services share it, begin a tenure first.

        Raises
        ------
        StoreError, sqlalchemy.exc.DBAPIError
            The store's failure.
        """
        succession = self._succession
        if succession is None:
            with contextlib.suppress(StoreError):
                await self._writer.take()
                await self._writer.probe()
            return not self._writer.failed
        free = await asyncio.to_thread(succession.free)
        self._runtime.holds("store")
        if not free:
            return False
        try:
            # While this process waited, one of another release may have migrated the tables.
            if self._prepare is not None and not await asyncio.to_thread(self._is_current):
                await asyncio.to_thread(self._prepare)
            await self._writer.take()
            # Only now nobody can migrate them any more.
            if not await asyncio.to_thread(self._is_current):
                raise StoreError("the store was migrated just now", trouble="away")
        except StoreError:
            await asyncio.to_thread(succession.end_own)
            raise
        await self._take_versions()
        return True

    def _is_current(self) -> bool:
        with self._engine.connect() as connection, self._in_time(connection):
            return is_current(connection, "cos")

    async def _take_versions(self) -> None:
        """Write versions of models into the database that are in files only, as of a COS that had no standby before."""
        await self._writer.run(store.shared.create_all)
        models = self._settings.state / "models"
        for folder in sorted(models.iterdir()) if models.is_dir() else []:
            rows, files = self._version_rows(folder.name), [*Versions(folder).files(), *kept_files(folder)]
            await self._writer.run(partial(rows.take_files, files=files))
        if self._objects is not None:
            self._objects.folder = await self._writer.run(own_folder)

    async def _watch_key(self, run: RoundsRun) -> None:
        """Pass each new key of an encrypted run from the third party to the run, until it ends."""
        silence = Seldom(_log)
        while not (run.over or run.dropped):
            try:
                held = run.key_epoch or 0
                record = await self._paillier.public_key(run.plan.run_id, held_epoch=held, hold_s=HOLD_S)
                silence.over(
                    "the third party says which paillier key is the newest again", run=run.plan.run_id
                )
                if record is not None and record.epoch > held and not run.dropped:
                    await run.new_key(record)
            except StoreError as error:
                # The run will be restored from the store, and its key fetched again then.
                _log.warning("a paillier key is not taken up", run=run.plan.run_id, error=error.message)
                return
            except (PeerError, CryptoError) as error:
                silence.warning("no new paillier key", run=run.plan.run_id, error=error.message)
                await asyncio.sleep(1.0)

    async def close(self) -> None:
        """Close the store."""
        self._writer.close()
        if self._tenure is not None:
            self._tenure.close()
        self._engine.dispose()


def _waits() -> StoreError:
    return StoreError("this COS is a standby: another one serves, or will in a moment", trouble="away")


def _out_of_touch() -> StoreError:
    return StoreError("the database has not answered for a while, and another COS may serve", trouble="away")


def _to_resume(run: Run, request: ResumeRunRequest) -> Run | None:
    """Return the run that a request resumes; None when the same request has resumed it already.

    Raises
    ------
    Refusal
        WRONG_STATE when it has not failed, or failed for good.
    """
    if run.resumes == request.resumes + 1:
        return None
    phase = RunPhase.Name(run.phase).removeprefix("RUN_PHASE_").lower()
    why = ""
    if not run.over:
        why = f"the run has not failed: it is in phase {phase}"
    elif not run.reason:
        why = "the run is done"
    elif not run.resumable:
        why = f"the run has failed for good: {run.reason}"
    elif run.resumes != request.resumes:
        why = f"the run was resumed {run.resumes} times before, the request says {request.resumes}"
    if why:
        raise Refusal(
            ErrorReason.ERROR_REASON_WRONG_STATE,
            why,
            field="run_id",
            expected="a run that gave up, for a cause that may pass",
        )
    return run


def _of_the_runs(runs: Mapping[str, Run]) -> list[PrometheusMetric]:
    """Return gauges and counters over all runs; run ids are no labels, as their number grows without bound."""

    def rounds() -> dict[tuple[str, ...], float]:
        found = Counter[tuple[str, ...]]()
        for run in list(runs.values()):
            found.update(run.rounds)
        return dict(found)

    def in_progress() -> float:
        idle = (RunPhase.RUN_PHASE_GATHER,)
        return sum(not run.over and run.phase not in idle for run in list(runs.values()))

    def ended() -> dict[tuple[str, ...], float]:
        # Each outcome from the beginning, so that the first one of its kind is seen as a change.
        found: dict[tuple[str, ...], float] = {(one,): 0 for one in ("done", "resumable", "failed")}
        for run in list(runs.values()):
            if run.over:
                found["resumable" if run.resumable else "failed" if run.reason else "done",] += 1
        return found

    return [
        PrometheusMetric(
            "coterie_rounds", "Rounds that ended.", rounds, ("purpose", "outcome"), counter=True
        ),
        PrometheusMetric(
            "coterie_runs_in_progress", "Runs past their gathering that have not ended.", in_progress
        ),
        PrometheusMetric(
            "coterie_runs_waiting",
            "Runs that wait, because too few parties are present for the next sum.",
            lambda: sum(bool(run.waiting) and not run.over for run in list(runs.values())),
        ),
        PrometheusMetric(
            "coterie_runs_resumable",
            "Runs that failed, and that the operator may resume.",
            lambda: sum(run.resumable for run in list(runs.values())),
        ),
        PrometheusMetric(
            "coterie_runs_ended",
            "Runs that have ended, by outcome: done, resumable, failed for good.",
            ended,
            ("outcome",),
        ),
        PrometheusMetric(
            "coterie_model_versions",
            "Versions of models that were made.",
            lambda: sum(run.version for run in list(runs.values())),
            counter=True,
        ),
    ]


def _may_redraw(rounds: RoundsPlan) -> bool:
    grouped = rounds.cohorts == CohortKind.COHORT_KIND_GROUPS
    return grouped and (rounds.experiment or rounds.redraw >= LEAST_REDRAW)


def _check_rounds(request: StartRunRequest) -> None:
    """Check an operator's request to start a run of a rounds-based system.

    Raises
    ------
    Refusal
        INVALID_FIELD names the first field that is out of its range; WRONG_SYSTEM when system and sum do not combine.
    """
    plan, rounds = request.plan, request.plan.rounds
    if not combination(plan.system, plan.secure_sum).allowed:
        raise Refusal(
            ErrorReason.ERROR_REASON_WRONG_SYSTEM,
            f"{plan.system} does not run with the sum {plan.secure_sum!r}",
            field="plan.secure_sum",
            expected=f"one of {', '.join(SUMS)}",
        )
    form = "users" if rounds.party_per_user else "hosts"
    check_ranges(
        request,
        {
            "plan.form": (plan.form == form, f"{form}, as party_per_user says"),
            "plan.rounds.cohorts": (rounds.cohorts in CohortKind.values()[1:], "groups, random or all"),
            "plan.rounds.cohort": (rounds.cohort >= 1, "at least 1"),
            "plan.rounds.group": (rounds.group >= 1, "at least 1"),
            "plan.rounds.beacon": (
                len(rounds.beacon) in ((0, BEACON_BYTES) if rounds.experiment else (0,)),
                f"empty; in an experiment also {BEACON_BYTES} bytes",
            ),
            "plan.rounds.beacon_signature": (not rounds.beacon_signature, "empty: it is not used"),
            "plan.rounds.redraw": (
                rounds.redraw == 0 or _may_redraw(rounds),
                f"0; with groups also {LEAST_REDRAW} or more, in an experiment any",
            ),
            "plan.rounds.channel_rounds": (
                rounds.channel_rounds <= (MOST_SUMS if plan.secure_sum == "masked" else 0),
                f"0; in a masked sum up to {MOST_SUMS}",
            ),
            "plan.rounds.passes": (1 <= rounds.passes <= 100_000, "1 to 100000"),
            "plan.rounds.evaluate_every": (rounds.evaluate_every >= 1, "at least 1"),
            "plan.rounds.step_timeout_ms": (rounds.step_timeout_ms > 0, "at least 1"),
        },
    )
    _check_growth(request)
    _check_optimiser(plan)
    try:
        check_aggregation(aggregation_of(rounds), plan.secure_sum)
    except ConfigError as error:
        raise Refusal(
            ErrorReason.ERROR_REASON_INVALID_FIELD,
            error.message,
            field="plan.rounds.aggregation",
            expected="terms that the sum can meet",
        ) from error
    try:
        check_privacy_of(plan)
    except ConfigError as error:
        raise Refusal(
            ErrorReason.ERROR_REASON_INVALID_FIELD,
            error.message,
            field="plan.rounds.privacy",
            expected="terms that the sums can meet",
        ) from error
    try:
        planned_server_side(plan, 1, 1).initial()
    except ConfigError as error:
        raise Refusal(
            ErrorReason.ERROR_REASON_INVALID_FIELD,
            error.message,
            field="plan.settings",
            expected=f"settings of {plan.system}",
        ) from error


def _check_growth(request: StartRunRequest) -> None:
    """Check that a run which takes in users who come later can do so, and that its sums hold all of them.

    Raises
    ------
    Refusal
        INVALID_FIELD.
    """
    plan, most = request.plan, request.plan.rounds.most_users
    if not most:
        return
    why = objection_to_growth(plan.rounds, plan.secure_sum)
    if not why and not system_named(plan.system).grows:
        why = f"the users of {plan.system} are fixed when a run begins"
    if not why and most < request.expect_users:
        why = f"at most {most} users, and the run waits for {request.expect_users}"
    if not why:
        why = _overflow(plan, request.expect_users)
    if why:
        raise Refusal(
            ErrorReason.ERROR_REASON_INVALID_FIELD,
            f"most_users {most}: {why}",
            field="plan.rounds.most_users",
            expected="0, or a plan whose population may be open",
        )


def _overflow(plan: RunPlan, fewest: int) -> str:
    """Return why a sum may overflow once users have come later; empty where none can.

    ``fewest`` users at least are there at the beginning.
    """
    most = plan.rounds.most_users
    cohort = largest_cohort(cohort_rule(plan.rounds, b""), most, fewest)
    try:
        side = planned_server_side(plan, 1, 1)
    except ConfigError:
        # It is refused by its settings.
        return ""
    for purpose, users in (
        (Purpose.TRAIN, cohort),
        (Purpose.EVALUATE, cohort if plan.rounds.party_per_user else most),
    ):
        if users > (room := side.layout(purpose).capacity):
            return f"a sum has room for {room} users, and one may come to {users}"
    return ""


def _check_optimiser(plan: RunPlan) -> None:
    """Check the optimiser of a plan, and whether the system takes one.

    Raises
    ------
    Refusal
        INVALID_FIELD, with the field of the optimiser.
    """
    try:
        optimiser = optimiser_of(plan.rounds)
        problem = optimiser and objection_to_optimiser(system_named(plan.system), optimiser)
    except ConfigError as error:
        problem = error.message
    if problem:
        raise Refusal(
            ErrorReason.ERROR_REASON_INVALID_FIELD,
            problem,
            field="plan.rounds.server_optimiser",
            expected="an optimiser of a system that steps along sums, or none",
        )


class _Cos:
    role = "cos"

    async def enrol(self, settings: CosSettings, tls: TlsFiles) -> None:
        # Must come first: threads that exist before keep heaps of their own.
        return_freed_memory()
        await enrol(self.role, settings, tls, [])

    def build(self, settings: Any, runtime: Runtime) -> CosProcess | IntakeProcess:
        return (
            IntakeProcess(settings, runtime) if settings.part == "intake" else CosProcess(settings, runtime)
        )


SERVICE = _Cos()
