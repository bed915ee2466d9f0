"""Answers of a host as a denoiser to the tasks of sums: open noise that members of other hosts sealed, and add it up.

``coterie.secure_sum.denoised`` makes the checks; the list of members is on disk before their sum leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from coterie.crypto.identity import Identity
from coterie.crypto.keyfile import read_checked_json, write_checked_json
from coterie.errors import CertificateError
from coterie.parties.party import Bundles, Item, Party
from coterie.parties.sum_tasks import Activity, SumInProgress, SumTasks
from coterie.rounds.denoiser_round import DenoiserRound, refusal
from coterie.rounds.ledger import Ledger
from coterie.rounds.member_round import Effect, Journal, Keep, Send, SitOut
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.denoised import Denoiser
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Declined, Step
from coterie.secure_sum.steps import KIND_OF, STEP_IN_TASK, TASK_STEP
from coterie.store.engine import Keeping, keep_files
from coterie.wire.v1 import orchestrator_pb2 as wire

__all__ = ["DENOISING", "AcceptedNoise", "Denoising"]

_log = structlog.get_logger("coterie.denoiser")

DENOISING = (Step.CONFIRM, Step.UNMASK)
"""Steps of a denoised sum that ask denoisers."""


@dataclass(frozen=True, eq=False)
class AcceptedNoise:
    """A sum in which a host denoises.

    Parameters
    ----------
    identity : Identity
        Keys of the host's first member in the plan, for which noise is sealed.
    slots : sequence of int
        Slots of this member.
    layout : Layout
        Layout of a contribution, as the host computes it.
    """

    identity: Identity
    slots: Sequence[int]
    layout: Layout


@dataclass
class _Sum(SumInProgress):
    """The sum in progress, with this denoiser's state machine; None where it refuses the plan."""

    machine: DenoiserRound | None = None
    slots: Sequence[int] = ()
    reason: str = ""
    """Why it refuses the plan; empty where it takes part."""


class Denoising(SumTasks[_Sum]):
    """A host as a denoiser in the sums of a run: answers through the denoiser's machine, and keeps its journal.

    Parameters
    ----------
    party : Party
        The host's registered party.
    device : str
        Name of its connection.
    accept : callable
        Checks a plan and returns the sum as this host denoises in it; raises `Declined` where it does not.
    slots : callable
        Returns the slots of the host's first member in a plan, by which it answers although it refuses the plan.
    bundles : callable
        Gives verified bundles of participants by id, without unknown or revoked ones.
    journal : Path
        File with the ledger of the lists whose noise was added up.
    activity : callable
        Counts CPU time by activity.
    noted : callable
        Notes durably, before it leaves, that a sum of noise of so many bytes leaves the host.
    keeping : callable, optional
        Writes the journal; on a full volume it waits for room, and so does the answer.

    Raises
    ------
    CertificateError
        When the journal is damaged, or readable by others.
    """

    attached = ()

    def __init__(
        self,
        party: Party,
        device: str,
        accept: Callable[[SumPlan], Awaitable[AcceptedNoise]],
        slots: Callable[[SumPlan], Sequence[int]],
        bundles: Bundles,
        journal: Path,
        activity: Activity,
        noted: Callable[[int], Awaitable[None]],
        keeping: Keeping = keep_files,
    ) -> None:
        super().__init__(party)
        self._device = device
        self._accept = accept
        self._slots = slots
        self._bundles = bundles
        self._path = journal
        self._run = party.plan.run_id
        self._journal = _read_journal(journal, self._run)
        self._activity = activity
        self._noted = noted
        self._keeping = keeping

    @staticmethod
    def is_asked(task: wire.Task) -> bool:
        """Return whether a task is a denoiser's."""
        return task.kind == wire.TaskKind.TASK_KIND_ROUND and STEP_IN_TASK.get(task.step) in DENOISING

    def _answered(self) -> None:
        self._party.idle()

    async def _begin(self, plan: SumPlan, version: int) -> _Sum:
        current = _Sum(plan)
        try:
            accepted = await self._accept(plan)
            denoisers = plan.denoisers
            place = denoisers.place_of(self._device)
            serves = () if place is None else denoisers.served_by(place)
            served = [
                member.participant
                for member, group in zip(plan.members, denoisers.groups, strict=True)
                if group in serves
            ]
            bundles = await self._bundles(served)
        except Declined as declined:
            current.reason, current.slots = str(declined), self._slots(plan)
            _log.warning("denoises for nobody", round=plan.round, reason=current.reason)
            return current
        current.slots = accepted.slots
        current.machine = DenoiserRound(
            plan,
            self._journal,
            lambda: Denoiser(plan, self._device, accepted.identity, accepted.layout, bundles),
        )
        return current

    async def _answer(self, current: _Sum, task: wire.Task, step: Step, asked_at: float) -> None:
        plan, machine = current.plan, current.machine
        place = plan.denoisers.place_of(self._device)
        if place is None:
            return
        number = plan.denoiser(place)
        if current.took(number, step, asked_at):
            return
        if machine is None:
            effects: Sequence[Effect] = [Send(step, refusal(step, current.reason))]
        else:
            briefings = await self._party.briefings(plan.round, TASK_STEP[step])
            if number not in briefings:
                return
            with self._activity("denoising"):
                effects = await asyncio.to_thread(machine.asked, step, briefings[number])
        items = []
        for effect in effects:
            match effect:
                case Keep(journal):
                    write = partial(_write_journal, self._path, self._run, journal)
                    await self._keeping("keep the denoiser's journal", write)
                    self._journal = journal
                case Send(_, message):
                    if step is Step.UNMASK:
                        await self._noted(len(message))
                    items.append(Item(KIND_OF[step], current.slots, message))
                case SitOut(reason):
                    _log.warning("refuses to denoise", round=plan.round, reason=reason)
                case _:
                    raise AssertionError(f"a denoiser has no effect {effect}")
        await self._submit(current, step, items, [(number, step)])


def _read_journal(path: Path, run: str) -> Journal:
    if not path.exists():
        return Journal()
    content = read_checked_json(path, "whose noise this host added up last")
    try:
        return Journal(ledger=Ledger.from_text(content["ledger"])) if content["run"] == run else Journal()
    except (ValueError, TypeError, KeyError):
        raise CertificateError(
            f"{path} is damaged: it does not say whose noise this host added up last"
        ) from None


def _write_journal(path: Path, run: str, journal: Journal) -> None:
    write_checked_json(path, {"run": run, "ledger": journal.ledger.to_text()})
