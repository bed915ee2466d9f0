"""What a decrypting client does when it is asked: sign who submitted, decrypt a part of a sum.

Tasks are level-triggered: what was missed is asked again, and a round with a higher number means that those below are
over.  What decides is in ``coterie.secure_sum.key_holder``; what it signed is on disk before it leaves.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from coterie.crypto.custody import HeldKey
from coterie.crypto.identity import Bundle, Identity
from coterie.crypto.keyfile import read_private_file, write_private_file
from coterie.errors import CertificateError, CoterieError, PeerError
from coterie.net.party import Item, Party
from coterie.rounds.consent import Consent
from coterie.rounds.holder import HolderRound
from coterie.rounds.party import Decline, Effect, Journal, Keep, Send, SitOut
from coterie.secure_sum.key_holder import KeyHolder
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Declined, Step
from coterie.secure_sum.steps import DECLINED, KIND_OF, STEP_IN_TASK, TASK_STEP
from coterie.telemetry.accounting import Accounting
from coterie.wire.refusal import reason_name
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1 import rounds_pb2
from coterie.wire.v1.common_pb2 import RoundRef

__all__ = ["Decryption"]

_log = structlog.get_logger("coterie.decrypting_client")

_ACTIVITIES = {Step.CONFIRM: "signatures", Step.DECRYPT: "decryption"}

Bundles = Callable[[Iterable[bytes]], Awaitable[Mapping[bytes, Bundle]]]
"""Gives verified bundles of participants, without those that are unknown or revoked."""


class _Open:
    """The round in progress, as this holder takes part in it."""

    def __init__(self, plan: SumPlan, position: int) -> None:
        self.plan = plan
        self.position = position
        self.machine: HolderRound | None = None
        self.taken: dict[tuple[int, Step], float] = {}
        self.declined_at = -1.0


class Decryption:
    """One key holder in the sums of a run.

    Parameters
    ----------
    party : Party
        Registered.
    identity : Identity
    secrets : callable
        Returns what is held of a key, by its id; raises `CoterieError` when it is not held.
    bundles : callable
    consent : Consent
        Which sums it helps to form.
    journal : Path
        File that keeps what it confirmed last.
    accounting : Accounting
        Where CPU time is counted.
    serving : callable, optional
        Is told of each plan in which this holder takes part.

    Raises
    ------
    CertificateError
        The journal is damaged, or readable by others.
    """

    def __init__(
        self,
        party: Party,
        identity: Identity,
        secrets: Callable[[bytes], HeldKey],
        bundles: Bundles,
        consent: Consent,
        journal: Path,
        accounting: Accounting,
        serving: Callable[[SumPlan], None] = lambda plan: None,
    ) -> None:
        self._party = party
        self._identity = identity
        self._secrets = secrets
        self._bundles = bundles
        self._consent = consent
        self._path = journal
        self._journal = _read_journal(journal)
        self._accounting = accounting
        self._serving = serving
        self._tasks: tuple[Sequence[wire.Task], float] = ((), 0.0)
        self._news = asyncio.Event()
        self._over = False
        self._open: _Open | None = None
        # Contributors' keys of their tags, of one Paillier key.
        self._tag_keys: tuple[bytes, dict[bytes, bytes]] = (b"", {})

    def told(self, tasks: Sequence[wire.Task]) -> None:
        """Take note of the tasks that are open now."""
        self._tasks = tasks, self._party.asked_at
        self._news.set()

    def finish(self) -> None:
        """Take part in nothing more."""
        self._over = True
        self._news.set()

    async def run(self) -> None:
        """Answer what is asked until `finish`."""
        self._party.attach = [wire.FetchKind.FETCH_KIND_SUM_PLAN, wire.FetchKind.FETCH_KIND_BRIEFINGS]
        while not self._over:
            await self._news.wait()
            self._news.clear()
            tasks, asked_at = self._tasks
            for task in tasks:
                if task.kind != wire.TaskKind.TASK_KIND_ROUND or self._over:
                    continue
                try:
                    await self._asked(task, asked_at)
                except PeerError as error:
                    # It is asked again for as long as it is open.
                    _log.info("a step is not answered", round=task.round.round, error=error.message)

    async def _asked(self, task: wire.Task, asked_at: float) -> None:
        number, step = task.round.round, STEP_IN_TASK.get(task.step)
        if step is None:
            raise PeerError("the COS asks for an unknown step of a sum", hint="is it of another release?")
        if self._open is None or number > self._open.plan.round:
            self._open = await self._begin(number)
        current = self._open
        if number != current.plan.round:
            return
        if current.machine is None or current.machine.reason:
            if current.declined_at < asked_at:
                await self._submit(current, step, [Item(DECLINED, self._party.slots, b"")])
                current.declined_at = time.monotonic()
            return
        briefings = await self._party.briefings(number, TASK_STEP[step])
        for respondent, briefing in sorted(briefings.items()):
            # A task that was on its way before an answer was taken asks for it once more.
            if current.taken.get((respondent, step), -1.0) >= asked_at:
                continue
            with self._accounting.process_activity(_ACTIVITIES.get(step, "rounds")):
                effects = await asyncio.to_thread(current.machine.asked, step, briefing)
            if not await self._carry_out(current, step, effects):
                return
            current.taken[respondent, step] = time.monotonic()

    async def _begin(self, number: int) -> _Open:
        _, payload = await self._party.fetch(wire.FetchKind.FETCH_KIND_SUM_PLAN, version=number)
        plan = SumPlan.from_wire(_read(payload))
        if plan.round != number:
            raise PeerError(f"the COS sent the plan of sum {plan.round}, asked was for {number}")
        own = self._identity.participant_id
        position = next((n for n, one in enumerate(plan.holders) if one.participant == own), -1)
        current = _Open(plan, position)
        try:
            current.machine = await self._accept(plan, position)
        except Declined as declined:
            _log.warning("sits out", round=number, reason=str(declined))
        return current

    async def _accept(self, plan: SumPlan, position: int) -> HolderRound:
        if position < 0 or plan.run_id != self._party.plan.run_id:
            raise Declined("the plan is of another run, or does not name this holder")
        # Of days nothing is kept: a holder serves every round of the run.
        objections = self._consent.objections_to_round(plan, 0)
        if objections:
            raise Declined("; ".join(objections))
        try:
            held = self._secrets(plan.key_id)
        except CoterieError as error:
            raise Declined(error.message) from None
        if self._tag_keys[0] != plan.key_id:
            self._tag_keys = plan.key_id, {}
        bundles = await self._bundles([member.participant for member in plan.members])
        half = partial(KeyHolder, plan, position, self._identity, held, bundles, self._tag_keys[1])
        found = HolderRound(plan, self._journal, half)
        if found.reason:
            raise Declined(found.reason)
        self._serving(plan)
        return found

    async def _carry_out(self, current: _Open, step: Step, effects: Sequence[Effect]) -> bool:
        """Carry out effects in order; return whether the COS has the answer, or the refusal to give one."""
        items = []
        for effect in effects:
            match effect:
                case Keep(journal):
                    await asyncio.to_thread(_write_journal, self._path, journal)
                    self._journal = journal
                case Send(_, message):
                    items.append(Item(KIND_OF[step], self._party.slots, message))
                case SitOut(reason):
                    _log.warning("sits out", round=current.plan.round, reason=reason)
                case Decline():
                    items.append(Item(DECLINED, self._party.slots, b""))
                    current.declined_at = time.monotonic()
                case _:
                    raise AssertionError(f"a key holder has no effect {effect}")
        await self._submit(current, step, items)
        return True

    async def _submit(self, current: _Open, step: Step, items: Sequence[Item]) -> None:
        if not items:
            return
        reference = RoundRef(run_id=self._party.plan.run_id, round=current.plan.round)
        for refused in await self._party.submit_many(reference, items):
            _log.warning(
                "the COS refused a message",
                round=current.plan.round,
                step=step.value,
                reason=reason_name(refused.reason),
                message=refused.message,
            )


def _read(payload: bytes | None) -> rounds_pb2.SumPlan:
    try:
        return rounds_pb2.SumPlan.FromString(payload or b"")
    except DecodeError as error:
        raise PeerError("the COS sent what is no SumPlan") from error


def _read_journal(path: Path) -> Journal:
    if not path.exists():
        return Journal()
    try:
        content = json.loads(read_private_file(path))
        return Journal(int(content["joined"]), bytes.fromhex(content["confirmed"]))
    except (ValueError, TypeError, KeyError):
        raise CertificateError(
            f"{path} is damaged: it does not say what this holder confirmed last"
        ) from None


def _write_journal(path: Path, journal: Journal) -> None:
    content = {"joined": journal.joined, "confirmed": journal.contribution.hex()}
    write_private_file(path, json.dumps(content).encode())
