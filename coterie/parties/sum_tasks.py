"""Tasks of sums at a party, as member or key holder: receive tasks, take up one sum after the other, submit answers.

The COS repeats a task until it is answered or the step is over.  A task may have left before the COS took the answer:
`SumInProgress` keeps what was taken, so that no answer is repeated for such a task.  A sum with a higher number means
that sums with lower numbers are over, unless the COS was restored from a backup.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import structlog
from google.protobuf.message import DecodeError

from coterie.errors import PeerError
from coterie.net import tracing
from coterie.parties.party import Item, Party
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Step
from coterie.secure_sum.steps import DECLINED, STEP_IN_TASK
from coterie.wire.refusal import reason_name
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1 import rounds_pb2
from coterie.wire.v1.common_pb2 import RoundRef

__all__ = ["Activity", "StaleError", "SumInProgress", "SumTasks"]

_log = structlog.get_logger("coterie.sums")

Activity = Callable[[str], AbstractContextManager[None]]
"""Context manager that counts the process's CPU time as that of the named activity."""


class StaleError(Exception):
    """A task is out of date: the COS has gone on to another sum since it sent the task."""


@dataclass
class SumInProgress:
    """The sum in progress at a party, with the answers to it that the COS has taken.

    Subclasses add the state machines of those who take part.

    Parameters
    ----------
    plan : SumPlan
    """

    plan: SumPlan
    _taken: dict[tuple[int, Step], float] = field(default_factory=dict, init=False)
    """When the COS acknowledged each answer, ``time.monotonic`` seconds, by place in the plan and step."""
    _declined_at: float = field(default=-1.0, init=False)
    """When the COS last acknowledged declining slots."""

    def took(self, place: int, step: Step, asked_at: float) -> bool:
        """Return whether the COS has taken an answer since it was asked for tasks at ``asked_at``."""
        return self._taken.get((place, step), -1.0) >= asked_at

    def took_declining(self, asked_at: float) -> bool:
        """Return whether the COS has taken since ``asked_at`` that slots decline."""
        return self._declined_at >= asked_at

    def acknowledge(self, answers: Iterable[tuple[int, Step]], *, declined: bool) -> None:
        """Note that the COS takes these answers now, and with ``declined`` that slots decline."""
        now = time.monotonic()
        self._taken.update(dict.fromkeys(answers, now))
        if declined:
            self._declined_at = now


P = TypeVar("P", bound=SumInProgress)


class SumTasks(ABC, Generic[P]):
    """Base class of a party's loop over the tasks of sums; a subclass takes up a sum and answers its steps.

    Parameters
    ----------
    party : Party
        The registered party.
    """

    def __init__(self, party: Party) -> None:
        self._party = party
        self._tasks: tuple[Sequence[wire.Task], float] = ((), 0.0)
        self._news = asyncio.Event()
        self._quiet = asyncio.Event()
        self._over = False
        self._sum: P | None = None
        self._begun_at = 0.0

    def hear(self, tasks: Sequence[wire.Task]) -> None:
        """Replace the tasks to answer by those that are open now."""
        self._quiet.clear()
        self._tasks = tasks, self._party.asked_at
        self._news.set()

    async def quiet(self) -> None:
        """Wait until the tasks heard so far are answered, as far as they can be now."""
        await self._quiet.wait()

    def finish(self) -> None:
        """End `run` after the task in progress."""
        self._over = True
        self._news.set()

    @property
    def finished(self) -> bool:
        """Whether `finish` was called."""
        return self._over

    attached: Sequence[wire.FetchKind.ValueType] = (
        wire.FetchKind.FETCH_KIND_SUM_PLAN,
        wire.FetchKind.FETCH_KIND_BRIEFINGS,
    )
    """Kinds of payload that the COS attaches to a task, so that they need not be fetched."""

    async def run(self) -> None:
        """Answer tasks until `finish`."""
        if self.attached:
            self._party.attach = list(self.attached)
        while not self._over:
            if not self._news.is_set():
                self._quiet.set()
            await self._news.wait()
            self._quiet.clear()
            self._news.clear()
            tasks, asked_at = self._tasks
            for task in tasks:
                if task.kind != wire.TaskKind.TASK_KIND_ROUND or self._over:
                    continue
                try:
                    step = STEP_IN_TASK.get(task.step)
                    if step is None:
                        raise PeerError(
                            "the COS asks for an unknown step of a sum", hint="is it of another release?"
                        )
                    with tracing.in_round(f"answer {step.value}", self._party.plan.run_id, task.round.round):
                        await self._asked(task, step, asked_at)
                except StaleError:
                    _log.debug("a task was out of date", round=task.round.round)
                except PeerError as error:
                    # The COS repeats the task for as long as the step is open.
                    _log.warning("a step is not answered yet", round=task.round.round, error=error.message)
            self._answered()

    def _answered(self) -> None:
        """Do what a party does after all open tasks are answered, as far as they can be now."""

    async def _asked(self, task: wire.Task, step: Step, asked_at: float) -> None:
        """Answer a step of a sum, after taking up the sum if it is a new one; do nothing for one that is over.

        ``asked_at`` is when the poll was sent whose answer has the task.

        Raises
        ------
        PeerError
            When the step cannot be answered now.
        StaleError
            When another sum is open by now.
        """
        number = task.round.round
        if self._sum is None or number > self._sum.plan.round or self._is_behind(number, asked_at):
            self._leave()
            self._begun_at = time.monotonic()
            self._sum = await self._begin(await self._sum_plan(number), task.version)
        if number == self._sum.plan.round:
            await self._answer(self._sum, task, step, asked_at)

    def _is_behind(self, number: int, asked_at: float) -> bool:
        """Return whether the COS asks for a sum before the one in progress although it was asked since that began.

        It was restored from a backup.  Journals decide then who takes part, and say how far they are.
        """
        return self._sum is not None and number < self._sum.plan.round and asked_at > self._begun_at

    @abstractmethod
    async def _begin(self, plan: SumPlan, version: int) -> P:
        """Take up a sum over a version of the model; whether the party takes part is decided here.

        Raises
        ------
        PeerError, StaleError
            When that cannot be decided now.
        """

    @abstractmethod
    async def _answer(self, current: P, task: wire.Task, step: Step, asked_at: float) -> None:
        """Answer a step of the sum in progress; raises as `_asked`."""

    def _leave(self) -> None:
        """Close the sum in progress, if there is one."""
        self._sum = None

    async def _sum_plan(self, number: int) -> SumPlan:
        """Return the plan of a sum.

        Raises
        ------
        PeerError
            When the COS sends nothing, or no valid plan.
        StaleError
            When another sum is open by now.
        """
        _, payload = await self._party.fetch(wire.FetchKind.FETCH_KIND_SUM_PLAN, version=number)
        try:
            plan = SumPlan.from_wire(rounds_pb2.SumPlan.FromString(payload or b""))
        except DecodeError as error:
            raise PeerError("the COS sent what is no SumPlan") from error
        if plan.round != number:
            raise StaleError(f"the COS sent the plan of sum {plan.round}, asked was for {number}")
        return plan

    async def _submit(
        self,
        current: P,
        step: Step,
        items: Sequence[Item],
        answers: Iterable[tuple[int, Step]] = (),
        *,
        last: bool = False,
    ) -> None:
        """Submit items for a step of a sum in one stream, note what the COS takes, and log what it refuses.

        Parameters
        ----------
        current : SumInProgress
        step : Step
        items : sequence of Item
            Messages and declined slots; nothing is sent when there are none.
        answers : iterable of (int, Step)
            Answers that are complete with these items, by place in the plan and step.
        last : bool
            Whether nothing else follows for this step, as in `Party.submit_many`.

        Raises
        ------
        PeerError
            When the COS cannot be reached.
        """
        number = current.plan.round
        refused: Sequence[wire.RefusedItem] = ()
        if items:
            reference = RoundRef(run_id=self._party.plan.run_id, round=number)
            refused = await self._party.submit_many(reference, items, last=last)
        current.acknowledge(answers, declined=any(item.kind == DECLINED for item in items))
        for (reason, message), count in Counter((one.reason, one.message) for one in refused).items():
            _log.warning(
                "the COS refused messages",
                round=number,
                step=step.value,
                messages=count,
                reason=reason_name(reason),
                message=message,
            )
