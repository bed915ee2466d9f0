"""Run a client host in DRIFT's shielded form: visits with users' sealed rows, evaluation, recommendation."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray

from coterie.crypto import clocks, restored
from coterie.crypto.verified import Verified
from coterie.errors import PeerError
from coterie.evaluation.holdout import ranked_names
from coterie.evaluation.unseen import best_unseen
from coterie.parties.member_driver import MemberDriver
from coterie.parties.stored_host import user_keys
from coterie.parties.sum_party import Contributed, Seat, SumRecords, check_place
from coterie.rounds import policy
from coterie.rounds.conductor import model_from_bytes
from coterie.rounds.inputs import CATALOGUE, check_inputs
from coterie.rounds.plan_hash import keys_hash
from coterie.rounds.sides import Likeness
from coterie.secure_sum.bundles import bundle_from_wire
from coterie.secure_sum.contribution import Contribution
from coterie.secure_sum.plan import SumPlan, layout_hash
from coterie.secure_sum.protocol import Declined
from coterie.secure_sum.registry import Signer
from coterie.store import client as store
from coterie.systems.drift.mathematics import score
from coterie.systems.drift.rankings import Ranked, measure, weigh
from coterie.systems.drift.settings import MIN_MASKED, DriftSettings
from coterie.systems.drift.shielded_run import LOSSES, ShieldedPurpose, add_measured, evaluation_layout
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import RoundRef
from coterie_client.choice import Choice
from coterie_client.drift.visits import Visits
from coterie_client.history import Catalogued
from coterie_client.host import Host, Recommended, catalogued
from coterie_client.journals import Journals
from coterie_client.receipts import refused_entry, sent_entry

__all__ = ["ShieldedDrift"]

_log = structlog.get_logger("coterie.client")

_ROUNDING = 7
"""First element of the seed for rounding metrics; `Visits` and `coterie.systems.drift` use lower ones."""

_DAY_S = 24 * 3600


class ShieldedDrift:
    """A client host's part in a run of DRIFT's shielded form; users' rows are kept and scored at the host.

    Parameters
    ----------
    host : Host
        Registered.
    """

    metrics: Sequence[str] = (*ranked_names(), *LOSSES)

    def __init__(self, host: Host) -> None:
        self._host = host
        self._party = host.party
        settings = self._settings = DriftSettings.from_plan(host.party.plan)
        keys = user_keys(host.settings.state, host.histories.names, host.settings.seed)
        self._choice = Choice(host.settings.state)
        self._visits = Visits(host, settings, keys, self._choice)
        self._evaluations = _Evaluations(self, host, keys, self._choice)
        self._driver = MemberDriver(host.party, self._evaluations, host.runtime.accounting.activity)
        self._catalogue: Catalogued | None = None
        self._items: list[str] = []
        self._known = -1
        self._epoch = 0
        self._asked: tuple[int, int] | None = None
        self._news = asyncio.Event()
        self._over = False
        self._working: asyncio.Task[None] | None = None

    async def begin(self, running: asyncio.TaskGroup) -> None:
        """Fetch the catalogue, and start visits and membership in evaluations."""
        await self.catalogue(fresh=True)
        running.create_task(self._driver.run())
        self._working = running.create_task(self._work())
        running.create_task(self._choice.going_on(self._news.set))

    async def told(self, tasks: Sequence[wire.Task]) -> None:
        """Make visits and take part in evaluations, as the COS's open tasks ask."""
        for task in tasks:
            if task.kind == wire.TaskKind.TASK_KIND_VISIT:
                if task.version > self._known:
                    # Fetch at once, so that visits stop waiting for owners that are gone.
                    await self.catalogue(fresh=True)
                self._asked = task.round.round, task.version
                self._news.set()
        self._driver.hear(tasks)

    async def finished(self) -> None:
        """Stop membership in evaluations; interactions that users record later still go to their owners."""
        self._driver.finish()

    async def catalogue(self, *, fresh: bool = False) -> Catalogued:
        """Return the catalogue: the COS's present one if ``fresh``, otherwise the last that was fetched."""
        if fresh or self._catalogue is None:
            message = await self._host.fetch_recipients()
            self._visits.know(message.version, message.owners)
            owners = [bundle_from_wire(owner.bundle).participant_id for owner in message.owners]
            self._catalogue = catalogued(message, owners)
            self._items = list(message.items)
            self._known = max(self._known, message.version)
        return self._catalogue

    async def items(self, count: int) -> tuple[Catalogued, Sequence[str]]:
        """Return a catalogue that names a model's first ``count`` items, and their keys in the model's order."""
        catalogue = await self.catalogue()
        if count > len(self._items):
            # The model has items of an owner that came after this catalogue.
            catalogue = await self.catalogue(fresh=True)
        return catalogue, self._items[:count]

    # --- visits ------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            asked, self._asked = self._asked, None
            if asked is not None:
                self._epoch = max(self._epoch, asked[0])
            if not self._epoch:
                # No visit was asked for yet: new records go with the first one.
                continue
            catalogue = await self.catalogue()
            await self._visits.make(self._epoch, catalogue)
            if asked is not None:
                await self._report(self._epoch, catalogue.version)

    async def _report(self, epoch: int, catalogue: int) -> None:
        records = self._visits.records
        _log.info("visited", epoch=epoch, catalogue=catalogue, records=records)
        status = wire.DeliveryStatus(catalogue_version=catalogue, records=records)
        round_ = RoundRef(run_id=self._party.plan.run_id, round=epoch)
        await self._host.note_sent("cos", "record count", 1, status.ByteSize())
        await self._party.submit(wire.SubmitKind.SUBMIT_KIND_DELIVERED, round_, status)

    def recorded(self, item: str) -> int:
        """Send a new interaction to the owners of the item; return how many there are."""
        catalogue = self._catalogue
        if catalogue is None:
            return 0
        self._news.set()
        index = catalogue.index.get(item)
        return 0 if index is None else int(catalogue.member[index].sum())

    # --- evaluation, recommendation ----------------------------------------------------------------------------

    async def model(self) -> tuple[int, bytes, NDArray[np.float32]]:
        """Return version, SHA-256 and rows of the newest model."""
        version, payload = await self._party.fetch(wire.FetchKind.FETCH_KIND_MODEL)
        items = model_from_bytes(payload or b"").get("items")
        if items is None or items.ndim != 2 or items.shape[1] != self._party.plan.dim:
            raise PeerError(
                "the COS sent a model that has no rows of items", hint="is it of another release?"
            )
        return version, hashlib.sha256(payload or b"").digest(), items

    def measure(
        self, items: NDArray[np.float32], catalogue: Catalogued, epoch: int
    ) -> dict[str, NDArray[np.float64]]:
        """Return each user's metrics, float64 (users,) by name; they leave in sums only."""
        with self._host.runtime.accounting.activity("evaluate", len(self._visits.rows)):
            ranked = self._ranked(items, catalogue)
            return {**ranked.metrics, "train_loss": self._visits.losses(epoch)}

    def _ranked(self, items: NDArray[np.float32], catalogue: Catalogued) -> Ranked:
        holdout = self._host.histories.holdout(catalogue, at_most=len(items))
        return measure(holdout, self._visits.rows, items, self._settings)

    async def recommend(self, user: int, k: int) -> Recommended:
        """Return the best unseen items for a user, scored at this host."""
        version, _, items = await self.model()
        catalogue, _ = await self.items(len(items))
        row = self._visits.rows[[user - 1]]
        if self._settings.ranks_by_odds:
            ranked = await asyncio.to_thread(self._ranked, items, catalogue)
            row = weigh(row, ranked.unseen, self._settings)
        scores = score(row, items)[0][: len(self._items)]
        seen = self._host.histories.seen(user, catalogue)
        best, values = best_unseen(self._items, scores, seen, k)
        return best, values, version

    async def forget_published(self) -> int:
        """Return 0: nothing is published at the third party."""
        return 0

    async def because(self, user: int, items: Sequence[str]) -> Likeness | None:
        """Return None: this part of a host does not compare items."""
        return None

    async def stop(self) -> None:
        """Stop visits; a visit without a reply is repeated after a restart."""
        if self._working is not None:
            self._working.cancel()

    def close(self) -> None:
        """Close the files."""
        self._evaluations.close()


class _Evaluations:
    """The host as one member of evaluations, for all its users; `MemberDriver` drives it."""

    def __init__(self, drift: ShieldedDrift, host: Host, keys: NDArray[np.uint64], choice: Choice) -> None:
        self._drift = drift
        self._choice = choice
        self._host = host
        self._plan = host.party.plan
        self._keys = keys
        self._consent = host.consent
        self._verified = Verified(note=host.runtime.note)
        self._journals = Journals(
            host.engine, host.writer, host.settings.state / "contributions.bin", self._plan.run_id
        )

    async def accept(self, plan: SumPlan, version: int) -> _Evaluation:
        """Check the plan of an evaluation.

        Raises
        ------
        Declined
            When the plan is not an evaluation of this run, or is outside the consent of the host's users.
        """
        own = self._host.identities[0].participant_id
        found = [member for member, one in enumerate(plan.members) if one.participant == own]
        for member in found:
            check_place(plan, member, self._plan, self._host.runtime.party)
            self._check(plan, member)
        _, sha256, items = await self._drift.model()
        if found and sha256 != plan.model_sha256:
            raise Declined("the model that the server sent is not the one of the sum's plan")
        catalogue, keys = await self._drift.items(len(items))
        if found:
            check_inputs(plan, (CATALOGUE,), {CATALOGUE: keys_hash(keys)})
        seats = {
            member: Seat(self._host.party.slots, self._journals.of(own), self._signer()) for member in found
        }
        return _Evaluation(self._drift, self._host, self._keys, plan, seats, items, catalogue)

    def _check(self, plan: SumPlan, member: int) -> None:
        users, rounds, masked = len(self._host.identities), self._plan.rounds, plan.secure_sum == "masked"
        if plan.purpose != ShieldedPurpose.EVALUATE.value:
            raise Declined(f"a sum for {plan.purpose!r}; hosts take part in evaluations only")
        if plan.members[member].users != users:
            raise Declined(f"this host is said to have {plan.members[member].users} users; it has {users}")
        if not masked and users < self._plan.min_users:
            raise Declined(f"this host has {users} users; a sum in clear needs {self._plan.min_users}")
        if masked and len(plan.members) < MIN_MASKED:
            raise Declined(f"a masked sum over {len(plan.members)} hosts; expected at least {MIN_MASKED}")
        floor = policy.min_sum(plan.users, rounds.min_sum)
        if plan.min_sum != floor:
            raise Declined(f"a floor of {plan.min_sum} users for the sum; by the plan's rule it is {floor}")
        if layout_hash(evaluation_layout()) != plan.layout_sha256:
            raise Declined("the layout of the sum is not the one that this host computes")
        revoked = plan.positions(self._host.revoked().__contains__)
        for objection in self._consent.objections_to_round(plan, self._most_today(), revoked):
            raise Declined(objection)
        for objection in self._choice.objections():
            raise Declined(objection)
        for objection in restored.objections(
            self._host.settings.state, self._plan.run_id, plan.secure_sum, self._journals.joined
        ):
            raise Declined(objection)

    def _signer(self) -> Signer:
        host = self._host
        return Signer(
            host.identities[0],
            host.bundles[0],
            host.directory_key,
            clocks.now(),
            self._verified,
            revoked=host.revoked(),
        )

    def _most_today(self) -> int:
        if not self._consent.rounds_per_day:
            return 0
        with self._host.engine.connect() as connection:
            return max(store.load_taken_part(connection, clocks.now() // _DAY_S).values(), default=0)

    def undisturbed(self) -> AbstractAsyncContextManager[object]:
        """Return a context that does nothing: metrics are computed at once, from users' rows as they are."""
        return nullcontext()

    async def keep(self, records: SumRecords[None]) -> None:
        """Store journals and entries of the receipts; a round counts for all users once they contribute."""
        counted = records.beside and self._consent.rounds_per_day
        await self._journals.keep(
            records.journals,
            sent=[sent_entry(one, self._plan.secure_sum, 0) for one in records.leaving],
            refused=[refused_entry(one, 0) for one in records.sat_out],
            taking_part=range(1, len(self._keys) + 1) if counted else (),
            day=clocks.now() // _DAY_S,
        )

    def close(self) -> None:
        """Close the file of contributions."""
        self._journals.close()


@dataclass(frozen=True, eq=False)
class _Evaluation:
    """An evaluation in which the host takes part, over rows of the items and a catalogue."""

    drift: ShieldedDrift
    host: Host
    keys: NDArray[np.uint64]
    plan: SumPlan
    seats: Mapping[int, Seat]
    items: NDArray[np.float32]
    catalogue: Catalogued

    def contributions(self, members: Sequence[int]) -> Iterator[Contributed[None]]:
        """Measure the users, and add up their metrics."""
        for member in members:
            measured = self.drift.measure(self.items, self.catalogue, self.plan.pass_number)
            if self.host.settings.per_user_metrics:
                self.host.write_per_user(self.plan.pass_number, measured)
            yield Contributed(member, self._added(measured).codes(), None)

    def _added(self, measured: Mapping[str, NDArray[np.float64]]) -> Contribution:
        contribution = Contribution(evaluation_layout())
        for user, key in enumerate(self.keys.tolist()):
            seed = np.random.SeedSequence(
                key, spawn_key=(_ROUNDING, self.host.party.plan.seed, self.plan.round)
            )
            values = {name: float(value[user]) for name, value in measured.items()}
            add_measured(contribution, values, np.random.default_rng(seed))
        return contribution

    async def conclude(self, members: Sequence[int]) -> None:
        """Do nothing: metrics are no state."""

    async def save(self, members: Sequence[int]) -> None:
        """Do nothing: metrics are no state."""
