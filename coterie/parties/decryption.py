"""Answers of a key holder to the tasks of sums: sign the list of submitters, decrypt a part of the sum, or apply it.

``coterie.secure_sum.key_holder`` makes the checks; a signed list is on disk before the signature leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from coterie.crypto.custody import HeldKey
from coterie.crypto.identity import Bundle, Identity
from coterie.crypto.keyfile import read_checked_json, write_checked_json
from coterie.errors import CertificateError, CoterieError
from coterie.parties.party import Bundles, Item, Party
from coterie.parties.sum_tasks import Activity, SumInProgress, SumTasks
from coterie.rounds.consent import Consent
from coterie.rounds.holder_round import HolderRound
from coterie.rounds.inputs import check_run
from coterie.rounds.ledger import Ledger
from coterie.rounds.member_round import Decline, Effect, Journal, Keep, Send, SitOut
from coterie.rounds.standing import Standing
from coterie.rounds.training import Purpose
from coterie.secure_sum.key_holder import KeyHolder
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Declined, Step
from coterie.secure_sum.steps import DECLINED, KIND_OF, TASK_STEP
from coterie.store.engine import Keeping, keep_files
from coterie.systems.registry import fewest_users
from coterie.telemetry.audit_log import record
from coterie.wire.v1 import orchestrator_pb2 as wire

__all__ = ["Bundles", "Decryption", "MakeHalf", "last_confirmed"]

_log = structlog.get_logger("coterie.key_holder")

_CONTRIBUTORS = "client/"
"""Beginning of the names of parties whose participants contribute to encrypted sums."""

_ACTIVITIES = {Step.CONFIRM: "signatures", Step.DECRYPT: "decryption"}

MakeHalf = Callable[
    [SumPlan, int, Identity, HeldKey, Sequence[bytes], Mapping[bytes, Bundle], dict[bytes, bytes]], KeyHolder
]
"""Makes a holder's half of a sum, from plan, position, identity, secrets of the key, its holders by the key's record,
contributors' bundles, and a cache of contributors' pad keys."""


@dataclass
class _Sum(SumInProgress):
    """The sum in progress, with this holder's state machine; None where the holder takes no part."""

    machine: HolderRound | None = None
    standing: bytes = b""
    """What this holder says of its journal, when it takes no part because it is further than the server."""


class Decryption(SumTasks[_Sum]):
    """A key holder in the sums of a run: answers their tasks through the holder's machine, and keeps its journal.

    Parameters
    ----------
    party : Party
        The holder's registered party.
    identity : Identity
    secrets : callable
        Returns the secrets of a key, by its id; raises `CoterieError` when the key is not held.
    holders : callable
        Returns all holders of a key as its record names them, by its id; raises `CoterieError` when there is none.
    bundles : callable
    consent : Consent
        Conditions under which the holder helps to form a sum.
    journal : Path
        File with the last list that the holder confirmed, and the ledger of sums that it confirmed.
    activity : callable
        Counts CPU time by activity.
    serving : callable, optional
        Called with each plan in which this holder takes part, and the secrets of its key.
    half : callable, optional
        Makes the holder's half of a sum; that of the encrypted sum when absent.
    keeping : callable, optional
        Writes the journal; on a full volume it waits for room, and so does the answer.

    Raises
    ------
    CertificateError
        When the journal is damaged, or readable by others.
    """

    def __init__(
        self,
        party: Party,
        identity: Identity,
        secrets: Callable[[bytes], HeldKey],
        holders: Callable[[bytes], Sequence[bytes]],
        bundles: Bundles,
        consent: Consent,
        journal: Path,
        activity: Activity,
        serving: Callable[[SumPlan, HeldKey], None] = lambda plan, held: None,
        half: MakeHalf = KeyHolder,
        keeping: Keeping = keep_files,
    ) -> None:
        super().__init__(party)
        self._identity = identity
        self._secrets = secrets
        self._holders = holders
        self._bundles = bundles
        self._consent = consent
        self._path = journal
        self._journal = _read_journal(journal)
        self._activity = activity
        self._serving = serving
        self._half = half
        self._keeping = keeping
        # Id of a Paillier key, and contributors' pad keys under it.
        self._pad_keys: tuple[bytes, dict[bytes, bytes]] = (b"", {})

    async def _asked(self, task: wire.Task, step: Step, asked_at: float) -> None:
        if not any(
            part.first <= slot < part.first + part.count for slot in self._party.slots for part in task.slots
        ):
            # The task is for other participants on the same connection.
            return
        await super()._asked(task, step, asked_at)

    async def _begin(self, plan: SumPlan, version: int) -> _Sum:
        own = self._identity.participant_id
        position = next((n for n, one in enumerate(plan.holders) if one.participant == own), -1)
        current = _Sum(plan)
        try:
            current.machine = await self._accept(plan, position)
            if current.machine.ahead:
                current.standing = Standing.of([self._journal]).to_bytes()
                raise Declined(current.machine.reason)
            self._serving(plan, self._secrets(plan.key_id))
        except Declined as declined:
            _log.warning("sits out", round=plan.round, reason=str(declined))
        return current

    async def _answer(self, current: _Sum, task: wire.Task, step: Step, asked_at: float) -> None:
        if current.machine is None or current.machine.reason:
            if not current.took_declining(asked_at):
                await self._submit(current, step, [Item(DECLINED, self._party.slots, current.standing)])
            return
        briefings = await self._party.briefings(current.plan.round, TASK_STEP[step])
        for respondent, briefing in sorted(briefings.items()):
            if current.took(respondent, step, asked_at):
                continue
            with self._activity(_ACTIVITIES.get(step, "rounds")):
                effects = await asyncio.to_thread(current.machine.asked, step, briefing)
            await self._carry_out(current, step, respondent, effects)

    async def _accept(self, plan: SumPlan, position: int) -> HolderRound:
        if position < 0:
            raise Declined("the plan does not name this holder")
        check_run(plan, self._party.plan)
        if strange := [one.device for one in plan.members if not one.device.startswith(_CONTRIBUTORS)]:
            raise Declined(f"{strange[0]!r} is to contribute, which is no client host")
        bundles = await self._bundles([member.participant for member in plan.members])
        revoked = plan.positions(lambda participant: participant not in bundles)
        # Rounds per day are not counted: a holder serves every round of the run.
        objections = self._consent.objections_to_round(plan, 0, revoked)
        run = self._party.plan
        if plan.purpose == Purpose.TRAIN.value:
            fewest = fewest_users(run.system, run.settings)
            if plan.min_sum < fewest:
                objections.append(
                    f"a sum over {plan.min_sum} users may be solved for them; of {run.system} with these settings "
                    f"{fewest} users are decrypted at least"
                )
        if objections:
            raise Declined("; ".join(objections))
        try:
            held, holders = self._secrets(plan.key_id), self._holders(plan.key_id)
        except CoterieError as error:
            raise Declined(error.message) from None
        if self._pad_keys[0] != plan.key_id:
            self._pad_keys = plan.key_id, {}
        known = self._pad_keys[1]
        return HolderRound(
            plan,
            self._journal,
            lambda: self._half(plan, position, self._identity, held, holders, bundles, known),
        )

    async def _carry_out(self, current: _Sum, step: Step, respondent: int, effects: Sequence[Effect]) -> None:
        """Carry out the effects of a briefing in order; they complete the answer to it."""
        items = []
        for effect in effects:
            match effect:
                case Keep(journal):
                    await self._keeping("keep the journal", partial(_write_journal, self._path, journal))
                    for one in journal.ledger.entries:
                        if one not in self._journal.ledger.entries:
                            record("reveal", round=current.plan.round, **one.told())
                    self._journal = journal
                case Send(_, message):
                    items.append(Item(KIND_OF[step], self._party.slots, message))
                case SitOut(reason):
                    _log.warning("sits out", round=current.plan.round, reason=reason)
                case Decline():
                    items.append(Item(DECLINED, self._party.slots, b""))
                case _:
                    raise AssertionError(f"a key holder has no effect {effect}")
        await self._submit(current, step, items, [(respondent, step)])


def last_confirmed(path: Path) -> int:
    """Return the last round that a holder confirmed, by its journal; 0 before the first.

    Raises
    ------
    CertificateError
        When the journal is damaged, or readable by others.
    """
    return _read_journal(path).joined


def _read_journal(path: Path) -> Journal:
    if not path.exists():
        return Journal()
    content = read_checked_json(path, "what this holder confirmed last")
    try:
        ledger = Ledger.from_text(content["ledger"])
        return Journal(int(content["joined"]), bytes.fromhex(content["confirmed"]), ledger)
    except (ValueError, TypeError, KeyError):
        raise CertificateError(
            f"{path} is damaged: it does not say what this holder confirmed last"
        ) from None


def _write_journal(path: Path, journal: Journal) -> None:
    content = {
        "joined": journal.joined,
        "confirmed": journal.contribution.hex(),
        "ledger": journal.ledger.to_text(),
    }
    write_checked_json(path, content)
