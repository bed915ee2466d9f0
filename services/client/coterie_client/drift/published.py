"""Run a client host in DRIFT's published form: deliver sealed records, evaluate, ask the COS for recommendations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import structlog

from coterie.errors import PeerError
from coterie.evaluation.holdout import sums
from coterie.evaluation.unseen import best_unseen
from coterie.rounds.sides import Likeness
from coterie.secure_sum.bundles import bundle_from_wire
from coterie.systems.drift.mathematics import score
from coterie.systems.drift.rankings import Ranked, measure, weigh
from coterie.systems.drift.settings import DriftSettings
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.tensor import from_wire, to_wire
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import RoundRef, Tensor
from coterie_client.choice import Choice
from coterie_client.drift.delivery import Delivery
from coterie_client.history import Catalogued
from coterie_client.host import Host, Recommended, catalogued

__all__ = ["PublishedDrift"]

_log = structlog.get_logger("coterie.client")


class PublishedDrift:
    """A client host's part in a run of DRIFT's published form.

    Parameters
    ----------
    host : Host
        Registered.
    """

    metrics: Sequence[str] = ()

    def __init__(self, host: Host) -> None:
        self._host = host
        self._party = host.party
        self._settings = DriftSettings.from_plan(host.party.plan)
        self._histories = host.histories
        self._choice = Choice(host.settings.state)
        self._delivery = Delivery(
            host.runtime,
            host.settings.run,
            host.identities,
            host.bundles,
            host.histories,
            host.writer,
            host.directory_key,
            host.settings.seed or 0,
            self._choice,
        )
        self._catalogue: Catalogued | None = None
        self._news = asyncio.Event()
        self._delivering = -1
        self._evaluated = 0
        self._running: asyncio.TaskGroup | None = None

    async def begin(self, running: asyncio.TaskGroup) -> None:
        """Fetch the catalogue, and start sending interactions that users record."""
        self._running = running
        running.create_task(self._send_news())
        running.create_task(self._choice.going_on(self._news.set))
        await self._fetch_catalogue()
        if self._histories.outboxes:
            # Records queued before a restart may not have arrived.
            self._news.set()

    async def told(self, tasks: Sequence[wire.Task]) -> None:
        """Deliver records and evaluate, as the COS's open tasks ask."""
        for task in tasks:
            match task.kind:
                case wire.TaskKind.TASK_KIND_DELIVER:
                    if task.version > self._delivering and self._running is not None:
                        self._delivering = task.version
                        # In a task of its own, so that an absent owner delays only its own records.
                        self._running.create_task(self._deliver())
                case wire.TaskKind.TASK_KIND_EVALUATE:
                    try:
                        await self._evaluate(task)
                    except Refusal as refusal:
                        # The evaluation was closed while this host stood still; the next tasks name what is open.
                        if refusal.reason != ErrorReason.ERROR_REASON_UNKNOWN_ROUND:
                            raise
                        _log.warning("an evaluation was over before its answer", point=task.round.point)

    async def finished(self) -> None:
        """Do nothing: interactions that users record later still go to their owners."""

    # --- delivery ----------------------------------------------------------------------------------------------

    async def _deliver(self) -> None:
        catalogue = await self._fetch_catalogue()
        self._delivering = max(self._delivering, catalogue.version)
        records = await self._delivery.deliver(catalogue)
        _log.info("delivered", catalogue=catalogue.version, records=records)
        status = wire.DeliveryStatus(catalogue_version=catalogue.version, records=records)
        round_ = RoundRef(run_id=self._party.plan.run_id)
        await self._host.note_sent("cos", "record count", 1, status.ByteSize())
        await self._party.submit(wire.SubmitKind.SUBMIT_KIND_DELIVERED, round_, status)

    async def _fetch_catalogue(self) -> Catalogued:
        message = await self._host.fetch_recipients()
        self._delivery.know(message.version, message.owners)
        owners = [bundle_from_wire(owner.bundle).participant_id for owner in message.owners]
        self._catalogue = catalogued(message, owners)
        return self._catalogue

    async def _send_news(self) -> None:
        """Send interactions that users record, without waiting for a task."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._catalogue is not None:
                await self._delivery.begin(self._catalogue)

    def recorded(self, item: str) -> int:
        """Send a new interaction to the owners of the item; return how many there are."""
        catalogue = self._catalogue
        if catalogue is None:
            # Not joined yet: the interaction is sent with the rest later.
            return 0
        self._news.set()
        index = catalogue.index.get(item)
        return 0 if index is None else int(catalogue.member[index].sum())

    # --- evaluation --------------------------------------------------------------------------------------------

    async def _evaluate(self, task: wire.Task) -> None:
        if task.round.point <= self._evaluated:
            return
        payload = wire.MetricSums(version=task.version)
        if len(self._host.identities) >= self._party.plan.min_users:
            _, users, items = await self._factors(task.version)
            # The catalogue is not held after a restart when everything was delivered before.
            catalogue = self._catalogue or await self._fetch_catalogue()
            measured = await asyncio.to_thread(self._measure, users, items, catalogue)
            names, table = sums(measured)
            payload.names.extend(names)
            payload.sums.CopyFrom(to_wire(table))
            if self._host.settings.per_user_metrics:
                self._host.write_per_user(task.round.point, measured)
        await self._host.note_sent("cos", "metric sum", 1, payload.ByteSize())
        await self._party.submit(wire.SubmitKind.SUBMIT_KIND_METRICS, task.round, payload)
        self._evaluated = task.round.point

    async def _factors(self, version: int) -> tuple[int, npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return the number of a model version, 0 for the newest, with the host's user rows and all item rows."""
        dim = self._party.plan.dim
        _, rows = await self._party.fetch(wire.FetchKind.FETCH_KIND_USER_ROWS, version=version)
        version, model = await self._party.fetch(wire.FetchKind.FETCH_KIND_MODEL, version=version)
        users = from_wire(Tensor.FromString(rows or b""), np.float32, (None, dim), field="user rows")
        items = from_wire(Tensor.FromString(model or b""), np.float32, (None, dim), field="model")
        if len(users) != len(self._party.slots):
            raise PeerError("the COS sent rows of other users than this host's")
        # Rows come in the order of slots; users are in the order of registration.
        order = np.argsort(np.argsort(self._party.slots))
        return version, users[order], items

    def _measure(
        self, users: npt.NDArray[np.float32], items: npt.NDArray[np.float32], catalogue: Catalogued
    ) -> dict[str, npt.NDArray[np.float64]]:
        with self._host.runtime.accounting.activity("evaluate", len(users)):
            return self._ranked(users, items, catalogue).metrics

    def _ranked(
        self, users: npt.NDArray[np.float32], items: npt.NDArray[np.float32], catalogue: Catalogued
    ) -> Ranked:
        # Either may be newer than the other: items are only ever added at the end.
        holdout = self._histories.holdout(catalogue, at_most=len(items))
        return measure(holdout, users, items, self._settings)

    # --- recommendation ----------------------------------------------------------------------------------------

    async def recommend(self, user: int, k: int) -> Recommended:
        """Return the best unseen items for a user, scored by the COS; with log-odds, which it cannot weigh, here."""
        catalogue = self._catalogue or await self._fetch_catalogue()
        if self._settings.ranks_by_odds:
            return await self._recommend_here(user, k, catalogue)
        seen = self._histories.seen(user, catalogue)
        # Ask for as many extra items as the user has seen, so that k remain; the COS learns that number only.
        slot, asked = self._party.slots[user - 1], k + len(seen)
        request = wire.RecommendRequest(run_id=self._party.plan.run_id, slot=slot, k=asked)
        await self._host.note_sent("cos", "recommendation request", 1, request.ByteSize(), user)
        response: wire.RecommendResponse = await self._party.call(lambda: self._party.stub.Recommend(request))
        items = from_wire(response.items, np.uint32, (None,), field="items")
        scores = from_wire(response.scores, np.float32, (len(items),), field="scores")
        if items.size and int(items.max()) >= len(catalogue.index):
            # The model has items of an owner that came after this catalogue.
            catalogue = await self._fetch_catalogue()
        keys = list(catalogue.index)
        best = [(keys[i], float(s)) for i, s in zip(items, scores, strict=True) if int(i) not in seen][:k]
        return [key for key, _ in best], [value for _, value in best], response.version

    async def _recommend_here(self, user: int, k: int, catalogue: Catalogued) -> Recommended:
        """Return the best unseen items for a user, scored with the weight that is best for this host's users."""
        version, users, items = await self._factors(0)
        if len(items) > len(catalogue.index):
            catalogue = await self._fetch_catalogue()
        ranked = await asyncio.to_thread(self._ranked, users, items, catalogue)
        keys = list(catalogue.index)[: len(items)]
        row = weigh(users[[user - 1]], ranked.unseen, self._settings)
        best, values = best_unseen(keys, score(row, items)[0], self._histories.seen(user, catalogue), k)
        return best, values, version

    async def forget_published(self) -> int:
        """Return 0: nothing is published at the third party."""
        return 0

    async def because(self, user: int, items: Sequence[str]) -> Likeness | None:
        """Return None: this part of a host does not compare items."""
        return None

    async def stop(self) -> None:
        """Stop sending; records that are not acknowledged stay in the outboxes."""
        await self._delivery.close()

    def close(self) -> None:
        """Close nothing: the store is the host's."""
