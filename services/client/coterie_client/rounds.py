"""Drive a host's members through the rounds of a run, with `coterie.rounds.member_round` as their state machine.

The COS is polled beside the work.  Only its newest tasks count: they are level-triggered, so a missed task is asked
again, and a round with a higher number means that all lower ones are over.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import structlog
from numpy.typing import NDArray

from coterie.crypto.verification import VerificationError
from coterie.crypto.verified import Verified
from coterie.errors import PeerError
from coterie.parties.party import Item
from coterie.parties.sum_tasks import SumTasks
from coterie.rounds.member_round import Decline, Effect, Journal, Keep, MemberRound, Send, SitOut, Train
from coterie.rounds.membership import Membership
from coterie.rounds.sides import HostSide, User
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Layout, UnboundedValueError
from coterie.secure_sum.plan import SumPlan, layout_hash
from coterie.secure_sum.protocol import Declined, Step
from coterie.secure_sum.registry import KEYED, Signer, member_half
from coterie.secure_sum.steps import DECLINED, KIND_OF, TASK_STEP
from coterie.store import client as store
from coterie.systems.registry import server_side
from coterie.wire.refusal import ErrorReason, Refusal, reason_name
from coterie.wire.tensor import from_wire
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import RoundRef
from coterie_client.encryption import Encryption
from coterie_client.host import Host, Recommended, best_unseen, now_ms, read
from coterie_client.journals import Journals
from coterie_client.learner import Learner, Model

if TYPE_CHECKING:
    from coterie.crypto.paillier import Obfuscators

__all__ = ["CONTRIBUTIONS", "Rounds"]

_log = structlog.get_logger("coterie.rounds")

_SENT = {
    Step.ADVERTISE: "round keys",
    Step.SHARE: "sealed shares",
    Step.CONFIRM: "confirmation",
    Step.UNMASK: "revealed shares",
}
"""Name on receipts of the message of each step but SUBMIT."""

CONTRIBUTIONS = {
    Purpose.TRAIN: "model update",
    Purpose.EVALUATE: "metrics",
    Purpose.SUPPORTS: "items of the history",
}
"""Name on receipts of the message of SUBMIT, by purpose; the secure sum follows in parentheses."""

_ACTIVITIES = {
    Step.ADVERTISE: "round keys",
    Step.SHARE: "shares",
    Step.CONFIRM: "signatures",
    Step.UNMASK: "shares",
}

_HIDING = {"masked": "masks", "encrypted": "encryption", "shared-key": "encryption"}
"""CPU-account label for protecting contributions before they leave, by secure sum."""

_TRAIN = Purpose.TRAIN.value

_BATCH_BYTES = 32 << 20
"""Contributions that are stored and sent together, bytes."""

_DAY_S = 24 * 3600


@dataclass
class _Round:
    """The round in progress at this host; ``rounds`` has the state machine of each member that takes part."""

    number: int
    plan: SumPlan | None = None
    covered: dict[int, list[User]] = field(default_factory=dict)
    rounds: dict[int, MemberRound] = field(default_factory=dict)
    slots: dict[int, list[int]] = field(default_factory=dict)
    side: HostSide | None = None
    model: Model | None = None
    opened: NDArray[np.bool_] | None = None
    taking_part: list[int] = field(default_factory=list)
    sent: set[tuple[int, Step]] = field(default_factory=set)
    """Messages that are on the receipt already."""
    taken: dict[tuple[int, Step], float] = field(default_factory=dict)
    """When the COS acknowledged each message, ``time.monotonic`` seconds."""
    waited_for: set[int] = field(default_factory=set)
    """Slots of this host that the COS waits for, until the host has declined for those that take no part."""
    declined_at: float = -1.0
    """When the COS last acknowledged declining slots, ``time.monotonic`` seconds."""

    @property
    def passive(self) -> list[int]:
        """Slots that the COS waits for and that take no part, ascending."""
        active = {
            slot for member, one in self.rounds.items() if not one.reason for slot in self.slots[member]
        }
        return sorted(self.waited_for - active)


class Rounds(SumTasks):
    """A client host's part in a run of a rounds-based system.

    Parameters
    ----------
    host : Host
        Registered.
    """

    def __init__(self, host: Host) -> None:
        super().__init__(host.party)
        self._host = host
        self._plan = host.party.plan
        # Metric names and `asks_supports` depend on nothing but the system and its settings: any sizes do.
        server = server_side(self._plan.system, self._plan.settings, 1, self._plan.seed, 1)
        self.metrics: Sequence[str] = server.metrics
        self._asks_supports = server.asks_supports
        self._consent = host.consent
        state = host.settings.state
        self._journals = Journals(host.engine, host.writer, state / "contributions.bin", self._plan.run_id)
        self._learner = Learner(host, self._journals)
        self._verified = Verified()
        self._encryption = Encryption(host) if self._plan.secure_sum in KEYED else None
        self._membership: Membership | None = None
        # Version of the best evaluation so far; once the run is over, the chosen version.
        self._best = 0
        self._chosen: int | None = None
        self._settled = asyncio.Event()
        self._round: _Round | None = None
        # Waiting to be written with the next journals.
        self._pending: dict[bytes, Journal] = {}
        self._private: dict[bytes, bytes] = {}
        self._sent: list[store.Sent] = []
        self._refused: list[store.Refused] = []

    async def begin(self, running: asyncio.TaskGroup) -> None:
        """Start answering the COS's tasks in a background task."""
        fetches = wire.FetchKind
        self.attached = (
            fetches.FETCH_KIND_SUM_PLAN,
            fetches.FETCH_KIND_MODEL,
            *([fetches.FETCH_KIND_OPEN_ITEMS] if self._asks_supports else []),
            *([fetches.FETCH_KIND_BRIEFINGS] if self._plan.secure_sum == "masked" else []),
        )
        self._party.carries = True
        running.create_task(self.run())

    async def told(self, tasks: Sequence[wire.Task]) -> None:
        """Take the COS's open tasks, and the best or chosen version that they name."""
        for task in tasks:
            if task.kind == wire.TaskKind.TASK_KIND_FINISH:
                self._chosen = task.version
            elif task.kind == wire.TaskKind.TASK_KIND_ROUND:
                self._best = task.best
        self.hear(tasks)

    async def finished(self) -> None:
        """Stop answering: the run is over."""
        self.finish()

    def recorded(self, item: str) -> int:
        """Return 0: an interaction stays at this host, and enters training with the next round."""
        return 0

    async def stop(self) -> None:
        """Do nothing: no work outlives the process."""

    def close(self) -> None:
        """Close the files."""
        self._journals.close()
        self._learner.close()

    # --- the rounds, one after the other ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Answer tasks until `finish`; then restore users' private arrays for the chosen version."""
        await super().run()
        self._leave_round()
        await self._keep()
        if self._chosen is not None and self._journals.joined:
            await self._learner.adopt(self._chosen)
        self._settled.set()

    def _answered(self) -> None:
        self._party.idle()

    async def _asked(self, task: wire.Task, step: Step, asked_at: float) -> None:
        number = task.round.round
        if self._round is None or number > self._round.number:
            self._leave_round()
            self._round = await self._begin_round(number, task.version)
        current = self._round
        if number != current.number:
            return
        slots = {slot for part in task.slots for slot in range(part.first, part.first + part.count)}
        members = [
            member
            for member in current.rounds
            if current.slots[member][0] in slots
            # A task that left the COS before it took an answer asks for it again: skip it.
            and current.taken.get((member, step), -1.0) < asked_at
        ]
        current.waited_for = (
            slots.intersection(self._party.slots) if current.declined_at < asked_at else set()
        )
        if members:
            await self._answer(current, step, members)
        if current.passive:
            await self._hand_in(current, (), last=True)

    def _leave_round(self) -> None:
        if self._round is None or self._round.plan is None:
            return
        for member, one in self._round.rounds.items():
            for effect in one.close():
                if isinstance(effect, Keep):
                    self._pending[self._round.plan.members[member].participant] = effect.journal
        self._round = None

    async def _begin_round(self, number: int, version: int) -> _Round:
        plan = await self._sum_plan(number)
        try:
            found = await self._accept(plan, version)
        except Declined as declined:
            self._sit_out(number, str(declined))
            found = _Round(number)
        if self._refused:
            await self._keep()
        return found

    async def _accept(self, plan: SumPlan, version: int) -> _Round:
        """Check a plan and return the round under it.

        Raises
        ------
        Declined
            When the plan is outside the run's plan or the consent, or does not fit the model, layout or list of items.
        """
        if self._membership is None:
            self._membership = await self._find_places()
        covered = self._membership.covered(plan)
        current = _Round(plan.round, plan, covered)
        today = self._today()
        obfuscators = None if self._encryption is None else await self._encryption.for_plan(plan)
        purpose = Purpose(plan.purpose)
        current.side = await self._learner.side()
        layout = current.side.layout(purpose)
        for member, users in covered.items():
            self._admit(current, plan, member, users, today, obfuscators, layout)
        if layout_hash(layout) != plan.layout_sha256:
            raise Declined("the layout of the sum is not the one that this host computes")
        try:
            current.model = await self._learner.model(version, plan.model_sha256)
        except VerificationError as error:
            raise Declined(f"the model of the plan does not open: {error.message}") from None
        if purpose is Purpose.TRAIN and self._asks_supports:
            current.opened = await self._learner.opened(current.model)
        return current

    def _admit(
        self,
        current: _Round,
        plan: SumPlan,
        member: int,
        users: Sequence[User],
        today: Mapping[int, int],
        obfuscators: Obfuscators | None,
        layout: Layout,
    ) -> None:
        """Let a member take part, unless its users' consent or its journal forbids it."""
        participant = plan.members[member].participant
        journal = self._pending.get(participant, self._journals.of(participant))
        fresh = journal.joined < plan.round
        most = max(today.get(user.index + 1, 0) for user in users) if fresh else 0
        objections = self._consent.objections_to_round(plan, most)
        first = users[0].index
        signer = Signer(
            self._host.identities[first],
            self._host.bundles[first],
            self._host.directory_key,
            int(time.time()),
            self._verified,
            obfuscators,
            layout,
        )
        one = MemberRound(plan, journal, partial(member_half, plan, member, signer))
        if one.reason:
            objections = [one.reason]
        if objections:
            for reason in objections:
                self._sit_out(plan.round, reason, self._receipt_of(users))
            return
        if fresh and self._consent.rounds_per_day:
            current.taking_part += [user.index + 1 for user in users]
        if not fresh:
            # Its contribution was sent, or about to be, before a restart.
            current.sent.add((member, Step.SUBMIT))
        current.slots[member] = [self._party.slots[user.index] for user in users]
        current.rounds[member] = one

    def _receipt_of(self, users: Sequence[User]) -> int:
        """Return the user on whose receipt a member's messages belong; 0 for all users of the host."""
        return users[0].index + 1 if self._plan.rounds.party_per_user else 0

    def _today(self) -> dict[int, int]:
        """Return the number of today's rounds by user; empty unless consent limits rounds per day."""
        if not self._consent.rounds_per_day:
            return {}
        with self._host.engine.connect() as connection:
            return store.load_taken_part(connection, int(time.time()) // _DAY_S)

    async def _find_places(self) -> Membership:
        _, payload = await self._party.fetch(wire.FetchKind.FETCH_KIND_PLACES)
        message = read(wire.Places, payload)
        table = from_wire(message.places, np.uint32, (None, 3), field="places").astype(np.int64)
        at = {slot: index for index, slot in enumerate(self._party.slots)}
        if not set(table[:, 0].tolist()) <= at.keys():
            raise Declined("the server names places of users that are not this host's")
        return Membership(
            self._plan,
            self._host.runtime.party,
            message.users,
            np.array([at[slot] for slot in table[:, 0].tolist()], np.int64),
            table[:, 1],
            table[:, 2],
            [identity.participant_id for identity in self._host.identities],
            self._host.directory_key,
        )

    # --- one step --------------------------------------------------------------------------------------------------

    async def _answer(self, current: _Round, step: Step, members: Sequence[int]) -> None:
        briefings = await self._briefings(current, step)

        def ask() -> list[tuple[int, list[Effect]]]:
            activity = self._host.runtime.accounting.activity
            found = []
            for member in members:
                with activity(_ACTIVITIES.get(step, "rounds")):
                    found.append((member, current.rounds[member].asked(step, briefings.get(member, b""))))
            return found

        asked = await asyncio.to_thread(ask)
        training = [member for member, effects in asked if any(isinstance(one, Train) for one in effects)]
        await self._carry_out(current, asked, last=not training)
        if training:
            await self._train(current, training)

    async def _briefings(self, current: _Round, step: Step) -> dict[int, bytes]:
        if self._plan.secure_sum != "masked" or step is Step.ADVERTISE:
            return {}
        return await self._party.briefings(current.number, TASK_STEP[step])

    async def _train(self, current: _Round, members: Sequence[int]) -> None:
        """Compute contributions of some members as one batch; store and send them piece by piece."""
        side, model, plan = current.side, current.model, current.plan
        if side is None or model is None or plan is None:
            raise AssertionError("a round was begun without its model")
        covered = {member: current.covered[member] for member in members}
        waiting = set(members)
        made = side.contributions(plan, model.arrays, current.opened, covered)
        failure: PeerError | None = None
        while waiting:
            batch = await asyncio.to_thread(self._some, current, made, waiting)
            if plan.purpose == Purpose.EVALUATE.value and not waiting:
                users = [user.index for each in covered.values() for user in each]
                await self._evaluated(plan, model.version, side, users)
            trained = [user.index for member, _ in batch for user in current.covered[member]]
            try:
                await self._carry_out(
                    current, batch, trained if plan.purpose == _TRAIN else (), last=not waiting
                )
            except PeerError as error:
                # Go on storing the others, so that they can be sent when the COS can be reached again.
                failure = error
        if failure is not None:
            raise failure

    async def _evaluated(self, plan: SumPlan, version: int, side: HostSide, users: Sequence[int]) -> None:
        """Keep private arrays of an evaluated version before its metrics are sent to the COS."""
        await self._host.writer.files_when_possible(
            "write the private state", partial(self._learner.evaluated, version, self._best)
        )
        if self._host.settings.per_user_metrics:
            await asyncio.to_thread(self._host.write_per_user, plan.pass_number, dict(side.measured), users)

    def _some(
        self, current: _Round, made: Iterator[tuple[int, NDArray[np.uint32]]], waiting: set[int]
    ) -> list[tuple[int, list[Effect]]]:
        """Return the next contributions as effects; members left when the local step fails sit out."""
        if current.plan is None:
            raise AssertionError("a round without a plan has no contributions")
        activity = self._host.runtime.accounting.activity
        batch: list[tuple[int, list[Effect]]] = []
        size, reason = 0, "the local step made no contribution"
        while size < _BATCH_BYTES:
            try:
                # An overflow is found and reported when the contribution is rounded.
                with activity("local step"), np.errstate(over="ignore", invalid="ignore"):
                    member, codes = next(made)
            except StopIteration:
                break
            except UnboundedValueError as error:
                # The error's message names a segment and no value.
                _log.error("the local step failed", round=current.number, error=str(error))
                reason = f"the local step failed: {error}"
                break
            except Exception as error:
                # The run goes on without these members.  The error's message is not logged: it may hold private values.
                _log.error("the local step failed", round=current.number, error=type(error).__name__)
                reason = f"the local step failed: {type(error).__name__}"
                break
            with activity(_HIDING.get(self._plan.secure_sum, "rounds")):
                effects = current.rounds[member].trained(codes)
            if current.plan.purpose == _TRAIN:
                rows = self._learner.rows([user.index for user in current.covered[member]])
                self._private[current.plan.members[member].participant] = rows
            batch.append((member, effects))
            waiting.discard(member)
            size += codes.nbytes
        else:
            return batch
        batch += [(member, current.rounds[member].failed(reason)) for member in sorted(waiting)]
        waiting.clear()
        return batch

    async def _carry_out(
        self,
        current: _Round,
        batch: Sequence[tuple[int, list[Effect]]],
        trained: Sequence[int] = (),
        *,
        last: bool,
    ) -> None:
        """Make all journals of a batch durable in one transaction, then send everything in one stream.

        The ``last`` batch of a step also declines for members that take no part.
        """
        if current.plan is None:
            raise AssertionError("a round without a plan has no effects")
        sends: list[tuple[int, Send]] = []
        for member, effects in batch:
            participant = current.plan.members[member].participant
            for effect in effects:
                match effect:
                    case Keep(journal):
                        self._pending[participant] = journal
                    case Send():
                        sends.append((member, effect))
                    case SitOut(reason):
                        who = self._receipt_of(current.covered[member])
                        self._sit_out(current.number, reason, who)
                    case Train() | Decline():
                        # `_hand_in` declines for all such members at the end of the step.
                        pass
        for member, send in sends:
            self._note(current, member, send)
        if (sends and self._pending) or self._refused:
            # A member that is only asked to train is journalled with its contribution: before that nothing leaves.
            await self._keep(current)
        saving = (
            asyncio.create_task(
                self._host.writer.files_when_possible(
                    "write the private state", partial(self._learner.save, trained)
                )
            )
            if trained
            else None
        )
        try:
            await self._hand_in(current, sends, last=last)
        finally:
            # Finish before the next round overwrites the journal, which has the same rows.
            if saving is not None:
                await saving

    def _note(self, current: _Round, member: int, send: Send) -> None:
        """Put a message on the receipt, once."""
        if current.plan is None or (member, send.step) in current.sent:
            return
        current.sent.add((member, send.step))
        kind = (
            _SENT.get(send.step)
            or f"{CONTRIBUTIONS[Purpose(current.plan.purpose)]} ({current.plan.secure_sum})"
        )
        who = self._receipt_of(current.covered[member])
        self._sent.append(store.Sent(who, "cos", kind, 1, len(send.message), now_ms()))

    async def _keep(self, current: _Round | None = None) -> None:
        pending, private, sent, refused = self._pending, self._private, self._sent, self._refused
        taking_part: list[int] = []
        if current is not None:
            taking_part, current.taking_part = current.taking_part, []
        self._pending, self._private, self._sent, self._refused = {}, {}, [], []
        if pending or sent or refused or taking_part:
            day = int(time.time()) // _DAY_S
            await self._journals.keep(pending, private, sent, refused, taking_part, day)

    async def _hand_in(self, current: _Round, sends: Sequence[tuple[int, Send]], *, last: bool) -> None:
        items = [Item(KIND_OF[send.step], current.slots[member], send.message) for member, send in sends]
        passive = current.passive if last else []
        if passive:
            items.append(Item(DECLINED, passive, b""))
        if not items:
            return
        refused = await self._party.submit_many(
            RoundRef(run_id=self._plan.run_id, round=current.number), items, last=last
        )
        now = time.monotonic()
        for member, send in sends:
            current.taken[member, send.step] = now
        if passive:
            current.waited_for, current.declined_at = set(), now
        for (reason, message), count in Counter((one.reason, one.message) for one in refused).items():
            _log.warning(
                "the COS refused items",
                round=current.number,
                items=count,
                reason=reason_name(reason),
                message=message,
            )

    def _sit_out(self, number: int, reason: str, user: int = 0) -> None:
        _log.warning("sits out", round=number, reason=reason, user=user)
        # Receipts count equal reasons: leave out round numbers, which would make each one different.
        reason = re.sub(r"\bround \d+( is not above \d+)?", "a round", reason)
        self._refused.append(store.Refused(user, "cos", reason, now_ms()))

    # --- recommendation --------------------------------------------------------------------------------------------

    async def recommend(self, user: int, k: int) -> Recommended:
        """Recommend by scores computed here, from the newest model or, after the run, the chosen one."""
        if self._chosen is not None:
            await self._settled.wait()
        try:
            model = await self._learner.newest()
        except Refusal as refusal:
            raise Refusal(
                ErrorReason.ERROR_REASON_NOT_READY,
                "there is no model yet: the run is still gathering",
                field="user",
            ) from refusal
        side = await self._learner.side()
        catalogue = self._learner.catalogue
        if catalogue is None:
            raise AssertionError("a side was made without a catalogue")
        scores = await asyncio.to_thread(side.recommend, model.arrays, user - 1)
        seen = self._host.histories.seen(user, catalogue)
        items, values = best_unseen(self._learner.items, scores, seen, k)
        return items, values, model.version
