"""Run a client host in DRIFT's shielded form: visits with users' sealed rows, evaluation, recommendation."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence

import numpy as np
import structlog
from numpy.typing import NDArray

from coterie.errors import PeerError
from coterie.evaluation.holdout import ranked_names
from coterie.parties.sums import SumMembers, Trained
from coterie.rounds import policy
from coterie.rounds.conductor import model_from_bytes
from coterie.rounds.member_round import Journal
from coterie.secure_sum.bundles import bundle_from_wire
from coterie.secure_sum.contribution import Contribution
from coterie.secure_sum.plan import SumPlan, layout_hash
from coterie.secure_sum.protocol import Declined, Step
from coterie.store import client as store
from coterie.systems.drift.mathematics import score
from coterie.systems.drift.settings import MIN_MASKED, DriftSettings
from coterie.systems.drift.shielded_run import LOSSES, ShieldedPurpose, add_measured, evaluation_layout
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import RoundRef
from coterie_client.drift.visits import Visits
from coterie_client.history import Catalogued
from coterie_client.host import Host, Recommended, best_unseen, catalogued, now_ms
from coterie_client.journals import Journals
from coterie_client.learner import user_keys

__all__ = ["ShieldedDrift"]

_log = structlog.get_logger("coterie.client")

_ROUNDING = 7
"""First element of the seed for rounding metrics; `Visits` and `coterie.systems.drift` use lower ones."""

_DAY_S = 24 * 3600

_SENT = {
    Step.ADVERTISE: "round keys",
    Step.SHARE: "sealed shares",
    Step.CONFIRM: "confirmation",
    Step.UNMASK: "revealed shares",
}


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
        settings = DriftSettings.from_plan(host.party.plan)
        keys = user_keys(host.settings.state, host.histories.names, host.settings.seed)
        self._visits = Visits(host, settings, keys)
        self._seat = _Evaluation(self, host, keys)
        self._members = SumMembers(host.party, host.runtime.party, [self._seat], host.directory_key)
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
        running.create_task(self._members.run())
        self._working = running.create_task(self._work())

    async def told(self, tasks: Sequence[wire.Task]) -> None:
        """Make visits and take part in evaluations, as the COS's open tasks ask."""
        for task in tasks:
            if task.kind == wire.TaskKind.TASK_KIND_VISIT:
                if task.version > self._known:
                    # Fetch at once, so that visits stop waiting for owners that are gone.
                    await self.catalogue(fresh=True)
                self._asked = task.round.round, task.version
                self._news.set()
        self._members.hear(tasks)

    async def finished(self) -> None:
        """Stop membership in evaluations; interactions that users record later still go to their owners."""
        self._members.finish()

    async def catalogue(self, *, fresh: bool = False) -> Catalogued:
        """Return the catalogue: the COS's present one if ``fresh``, otherwise the last that was fetched."""
        if fresh or self._catalogue is None:
            message = await self._host.fetch_catalogue()
            self._visits.know(message.version, message.owners)
            owners = [bundle_from_wire(owner.bundle).participant_id for owner in message.owners]
            self._catalogue = catalogued(message, owners)
            self._items = list(message.items)
            self._known = max(self._known, message.version)
        return self._catalogue

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
        await self._party.submit(wire.SubmitKind.SUBMIT_KIND_DELIVERED, round_, status)
        await self._host.note_sent("cos", "record count", 1, status.ByteSize())

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

    async def measure(self, items: NDArray[np.float32], epoch: int) -> dict[str, NDArray[np.float64]]:
        """Return each user's metrics, float64 (users,) by name; they leave in sums only."""
        catalogue = await self.catalogue()

        def measured() -> dict[str, NDArray[np.float64]]:
            with self._host.runtime.accounting.activity("evaluate", len(self._visits.rows)):
                holdout = self._host.histories.holdout(catalogue, at_most=len(items))
                found = holdout.measure(
                    lambda chosen: score(self._visits.rows[chosen], items[: holdout.n_items])
                )
                return {**found, "train_loss": self._visits.losses(epoch)}

        return await asyncio.to_thread(measured)

    async def recommend(self, user: int, k: int) -> Recommended:
        """Return the best unseen items for a user, scored at this host."""
        version, _, items = await self.model()
        catalogue = await self.catalogue()
        if len(items) > len(self._items):
            # The model has items of an owner that came after this catalogue.
            catalogue = await self.catalogue(fresh=True)
        scores = score(self._visits.rows[[user - 1]], items)[0][: len(self._items)]
        seen = self._host.histories.seen(user, catalogue)
        best, values = best_unseen(self._items, scores, seen, k)
        return best, values, version

    async def stop(self) -> None:
        """Stop visits; a visit without a reply is repeated after a restart."""
        if self._working is not None:
            self._working.cancel()

    def close(self) -> None:
        """Close the files."""
        self._seat.close()


class _Evaluation:
    """The host as one member of evaluations, for all its users."""

    def __init__(self, drift: ShieldedDrift, host: Host, keys: NDArray[np.uint64]) -> None:
        self._drift = drift
        self._host = host
        self._plan = host.party.plan
        self._keys = keys
        self._consent = host.consent
        self._journals = Journals(
            host.engine, host.writer, host.settings.state / "contributions.bin", self._plan.run_id
        )
        self._items: NDArray[np.float32] = np.zeros((0, self._plan.dim), np.float32)
        self.identity = host.identities[0]
        self.bundle = host.bundles[0]
        self.slots: Sequence[int] = host.party.slots

    def journal(self) -> Journal:
        """Return the journal as it stands on disk."""
        return self._journals.of(self.identity.participant_id)

    async def keep(self, journal: Journal) -> None:
        """Store a journal."""
        await self._journals.keep({self.identity.participant_id: journal})

    async def accept(self, plan: SumPlan, member: int) -> None:
        """Check the plan of an evaluation.

        Raises
        ------
        Declined
            When the plan is not an evaluation of this run, or is outside the consent of the host's users.
        """
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
        for objection in self._consent.objections_to_round(plan, self._most_today()):
            raise Declined(objection)
        _, sha256, self._items = await self._drift.model()
        if sha256 != plan.model_sha256:
            raise Declined("the model that the server sent is not the one of the sum's plan")

    def _most_today(self) -> int:
        if not self._consent.rounds_per_day:
            return 0
        with self._host.engine.connect() as connection:
            return max(store.load_taken_part(connection, int(time.time()) // _DAY_S).values(), default=0)

    async def contribute(self, plan: SumPlan, trained: Trained) -> None:
        """Measure the users, add up their metrics, and store the contribution before it is sent."""
        measured = await self._drift.measure(self._items, plan.pass_number)
        if self._host.settings.per_user_metrics:
            self._host.write_per_user(plan.pass_number, measured)

        def added() -> Contribution:
            contribution = Contribution(evaluation_layout())
            for user, key in enumerate(self._keys.tolist()):
                seed = np.random.SeedSequence(key, spawn_key=(_ROUNDING, self._plan.seed, plan.round))
                values = {name: float(value[user]) for name, value in measured.items()}
                add_measured(contribution, values, np.random.default_rng(seed))
            return contribution

        journal = trained((await asyncio.to_thread(added)).codes())
        if journal is not None:
            taking_part = list(range(1, len(self._keys) + 1)) if self._consent.rounds_per_day else []
            await self._journals.keep(
                {self.identity.participant_id: journal},
                taking_part=taking_part,
                day=int(time.time()) // _DAY_S,
            )

    async def left(self, plan: SumPlan, step: Step, size: int) -> None:
        """Add a sent message to the disclosure receipt."""
        kind = _SENT.get(step, f"metrics ({plan.secure_sum})")
        await self._host.note_sent("cos", kind, 1, size)

    async def sat_out(self, plan: SumPlan, reason: str) -> None:
        """Add the reason for taking no part to the disclosure receipt."""
        things = [store.Refused(0, "cos", reason, now_ms())]
        await self._host.writer.run(lambda connection: store.add_declined(connection, things))

    def close(self) -> None:
        """Close the file of contributions."""
        self._journals.close()
