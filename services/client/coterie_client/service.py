"""A client host as a service: keep histories, deliver, evaluate, recommend."""

from __future__ import annotations

import asyncio
import csv
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import structlog

from coterie.config.services import ClientSettings
from coterie.crypto.identity import Bundle
from coterie.errors import PeerError
from coterie.evaluation.holdout import sums
from coterie.launch.process import Runtime
from coterie.learning.drift import score
from coterie.net.bundles import bundle_from_wire
from coterie.net.credentials import TlsFiles
from coterie.net.enrolment import enrol, identities, saved_bundles
from coterie.net.party import Member, Party
from coterie.net.retry import Retry
from coterie.net.revocation import RevocationWatch
from coterie.store import client as store
from coterie.store.engine import Writer, open_sqlite
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.tensor import from_wire, to_wire
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.client_pb2_grpc import add_UserAgentServicer_to_server
from coterie.wire.v1.common_pb2 import RoundRef, Tensor
from coterie_client.agent import Agent, Recommended
from coterie_client.delivery import Delivery
from coterie_client.history import Catalogued, Histories, read_histories

__all__ = ["SERVICE"]

_log = structlog.get_logger("coterie.client")

_RETRY_S = 120.0


class ClientProcess:
    """A running client host."""

    def __init__(self, settings: ClientSettings, runtime: Runtime) -> None:
        self._settings = settings
        self._runtime = runtime
        runtime.require(["store", "directory", "run"])
        self._engine = open_sqlite(settings.state / "client.db", "client")
        self._writer = Writer(self._engine)
        runtime.holds("store")
        self._bundles: tuple[Bundle, ...] = saved_bundles(settings.state)
        self._identities = identities(settings.state, len(self._bundles))
        self._histories = Histories(self._engine, self._writer)
        self._revocations = RevocationWatch(
            runtime.connect(settings.thirdparty, "thirdparty"),
            runtime.guard,
            lambda current: runtime.holds("directory", current),
        )
        self._party = Party(
            runtime.connect(settings.cos, "cos"),
            settings.run,
            runtime.tls.identity().fingerprint,
            Retry(limit_s=_RETRY_S),
            lambda reached: runtime.holds("run", reached),
        )
        self._delivery = Delivery(
            runtime,
            settings.run,
            self._identities,
            self._histories,
            self._writer,
            (settings.state / "directory.key").read_bytes(),
            settings.seed,
        )
        self._catalogue: Catalogued | None = None
        self._news = asyncio.Event()
        self._delivering = -1
        self._evaluated = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the user agent."""
        agent = Agent(self._histories, self._engine, self._recommend, self._recorded)
        add_UserAgentServicer_to_server(agent, server)

    async def run(self) -> None:
        """Take up the histories, join, then do what the COS asks."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._revocations.run())
            tasks.create_task(self._runtime.watch_store(self._writer))
            tasks.create_task(self._take_part(tasks))
            tasks.create_task(self._send_news())

    async def _take_part(self, running: asyncio.TaskGroup) -> None:
        if self._settings.histories is not None and not self._histories.names:
            names, interactions = read_histories(self._settings.histories)
            await self._histories.take(names, interactions)
        members = [
            Member(identity, bundle, wire.ParticipantKind.PARTICIPANT_KIND_USER)
            for identity, bundle in zip(self._identities, self._bundles, strict=True)
        ]
        size = await self._party.wait_and_register(members)
        await self._note_sent("cos", "registration", len(members), size)
        _log.info("joined", users=len(members))
        self._runtime.holds("run")
        await self._fetch_catalogue()
        if self._histories.outboxes:
            # Before a restart something was sent; what was recorded then may not have arrived.
            self._news.set()
        async for tasks in self._party.tasks():
            for task in tasks:
                match task.kind:
                    case wire.TaskKind.TASK_KIND_DELIVER:
                        if task.version > self._delivering:
                            self._delivering = task.version
                            # Beside everything else: an owner that is away holds up nothing but its own records.
                            running.create_task(self._deliver())
                    case wire.TaskKind.TASK_KIND_EVALUATE:
                        await self._evaluate(task)
                    case wire.TaskKind.TASK_KIND_FINISH:
                        _log.info("the run has ended", reason=task.reason)
                        return

    # --- delivery ----------------------------------------------------------------------------------------------

    async def _deliver(self) -> None:
        catalogue = await self._fetch_catalogue()
        self._delivering = max(self._delivering, catalogue.version)
        records = await self._delivery.deliver(catalogue)
        _log.info("delivered", catalogue=catalogue.version, records=records)
        status = wire.DeliveryStatus(catalogue_version=catalogue.version, records=records)
        round_ = RoundRef(run_id=self._party.plan.run_id)
        await self._party.submit(wire.SubmitKind.SUBMIT_KIND_DELIVERED, round_, status)
        await self._note_sent("cos", "record count", 1, status.ByteSize())

    async def _fetch_catalogue(self) -> Catalogued:
        _, payload = await self._party.fetch(wire.FetchKind.FETCH_KIND_CATALOGUE)
        message = wire.Catalogue.FromString(payload or b"")
        self._delivery.know(message.version, message.owners)
        member = np.zeros((len(message.items), len(message.owners)), bool)
        item = np.repeat(np.arange(len(message.items)), np.array(message.owner_counts, np.int64))
        member[item, np.array(message.owner_positions, np.int64)] = True
        self._catalogue = Catalogued(
            version=message.version,
            index={key: n for n, key in enumerate(message.items)},
            owners=tuple(bundle_from_wire(owner.bundle).participant_id for owner in message.owners),
            member=member,
        )
        return self._catalogue

    async def _send_news(self) -> None:
        """Send what users record themselves, beside what the COS asks for."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._catalogue is not None:
                await self._delivery.begin(self._catalogue)

    def _recorded(self, item: str) -> int:
        catalogue = self._catalogue
        if catalogue is None:
            # Not joined yet: it will be sent with everything else.
            return 0
        self._news.set()
        index = catalogue.index.get(item)
        return 0 if index is None else int(catalogue.member[index].sum())

    # --- evaluation --------------------------------------------------------------------------------------------

    async def _evaluate(self, task: wire.Task) -> None:
        if task.round.point <= self._evaluated:
            return
        payload = wire.MetricSums(version=task.version)
        if len(self._identities) >= self._party.plan.min_users:
            users, items = await self._factors(task.version)
            # None after a restart when everything was delivered before.
            catalogue = self._catalogue or await self._fetch_catalogue()
            measured = await asyncio.to_thread(self._measure, users, items, catalogue)
            names, table = sums(measured)
            payload.names.extend(names)
            payload.sums.CopyFrom(to_wire(table))
            if self._settings.per_user_metrics:
                self._write_per_user(task.round.point, measured)
        await self._party.submit(wire.SubmitKind.SUBMIT_KIND_METRICS, task.round, payload)
        self._evaluated = task.round.point
        await self._note_sent("cos", "metric sum", 1, payload.ByteSize())

    async def _factors(self, version: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        dim = self._party.plan.dim
        _, rows = await self._party.fetch(wire.FetchKind.FETCH_KIND_USER_ROWS, version=version)
        _, model = await self._party.fetch(wire.FetchKind.FETCH_KIND_MODEL, version=version)
        users = from_wire(Tensor.FromString(rows or b""), np.float32, (None, dim), field="user rows")
        items = from_wire(Tensor.FromString(model or b""), np.float32, (None, dim), field="model")
        if len(users) != len(self._party.slots):
            raise PeerError("the COS sent rows of other users than this host's")
        # Rows come in the order of the slots, users stand in the order of their registration.
        order = np.argsort(np.argsort(self._party.slots))
        return users[order], items

    def _measure(
        self, users: npt.NDArray[np.float32], items: npt.NDArray[np.float32], catalogue: Catalogued
    ) -> dict[str, npt.NDArray[np.float64]]:
        with self._runtime.accounting.activity("evaluate", len(users)):
            # Either may be newer than the other: items are only ever added at the end.
            holdout = self._histories.holdout(catalogue, at_most=len(items))
            return holdout.measure(lambda chosen: score(users[chosen], items[: holdout.n_items]))

    def _write_per_user(self, point: int, measured: dict[str, npt.NDArray[np.float64]]) -> None:
        path = Path(self._settings.state / "metrics.csv")
        fresh = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if fresh:
                writer.writerow(["point", "slot", "metric", "value"])
            for name, values in measured.items():
                for slot, value in zip(self._party.slots, values, strict=True):
                    writer.writerow([point, slot, name, value])

    # --- recommendation ----------------------------------------------------------------------------------------

    async def _recommend(self, user: int, k: int) -> Recommended:
        if not self._party.slots:
            raise Refusal(
                ErrorReason.ERROR_REASON_NOT_READY, "this host has not joined the run yet", field="user"
            )
        catalogue = self._catalogue or await self._fetch_catalogue()
        seen = self._histories.seen(user, catalogue)
        # Asking for as many more as were seen leaves k whatever the COS returns; it learns how many, not which.
        slot, asked = self._party.slots[user - 1], k + len(seen)
        response = await self._party.recommend(slot, asked)
        request = wire.RecommendRequest(run_id=self._party.plan.run_id, slot=slot, k=asked)
        await self._note_sent("cos", "recommendation request", 1, request.ByteSize(), user)
        items = from_wire(response.items, np.uint32, (None,), field="items")
        scores = from_wire(response.scores, np.float32, (len(items),), field="scores")
        if items.size and int(items.max()) >= len(catalogue.index):
            # The model has items of an owner that came after this catalogue.
            catalogue = await self._fetch_catalogue()
        keys = list(catalogue.index)
        best = [(keys[i], float(s)) for i, s in zip(items, scores, strict=True) if int(i) not in seen][:k]
        return [key for key, _ in best], [value for _, value in best], response.version

    async def _note_sent(self, recipient: str, kind: str, count: int, size: int, user: int = 0) -> None:
        now = time.time_ns() // 1_000_000
        thing = store.Sent(user, recipient, kind, count, size, now)
        await self._writer.run(lambda connection: store.add_sent(connection, [thing]))

    async def close(self) -> None:
        """Stop sending and close the store."""
        await self._delivery.close()
        self._writer.close()
        self._engine.dispose()


class _Client:
    role = "client"

    async def enrol(self, settings: ClientSettings, tls: TlsFiles) -> None:
        users = len(read_histories(settings.histories)[0]) if settings.histories is not None else 1
        await enrol(self.role, settings, tls, identities(settings.state, users))

    def build(self, settings: Any, runtime: Runtime) -> ClientProcess:
        return ClientProcess(settings, runtime)


SERVICE = _Client()
