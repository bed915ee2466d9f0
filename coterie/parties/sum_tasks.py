"""Tasks of sums at a party, as member or key holder: receive tasks, fetch the sum's plan, submit answers.

The COS repeats a task until it is answered or the step is over.  A sum with a higher number means that sums with lower
numbers are over.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import structlog
from google.protobuf.message import DecodeError

from coterie.errors import PeerError
from coterie.parties.party import Item, Party
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Step
from coterie.secure_sum.steps import STEP_IN_TASK
from coterie.wire.refusal import reason_name
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1 import rounds_pb2
from coterie.wire.v1.common_pb2 import RoundRef

__all__ = ["Activity", "StaleError", "SumTasks"]

_log = structlog.get_logger("coterie.sums")

Activity = Callable[[str], AbstractContextManager[None]]
"""Context manager that counts the process's CPU time as that of the named activity."""


class StaleError(Exception):
    """A task is out of date: the COS has gone on to another sum since it sent the task."""


class SumTasks(ABC):
    """Base class of a party's loop over the tasks of sums; a subclass answers the single step.

    Parameters
    ----------
    party : Party
        The registered party.
    """

    def __init__(self, party: Party) -> None:
        self._party = party
        self._tasks: tuple[Sequence[wire.Task], float] = ((), 0.0)
        self._news = asyncio.Event()
        self._over = False

    def hear(self, tasks: Sequence[wire.Task]) -> None:
        """Replace the tasks to answer by those that are open now."""
        self._tasks = tasks, self._party.asked_at
        self._news.set()

    def finish(self) -> None:
        """End `run` after the task in progress."""
        self._over = True
        self._news.set()

    attached: Sequence[wire.FetchKind.ValueType] = (
        wire.FetchKind.FETCH_KIND_SUM_PLAN,
        wire.FetchKind.FETCH_KIND_BRIEFINGS,
    )
    """Kinds of payload that the COS attaches to a task, so that they need not be fetched."""

    async def run(self) -> None:
        """Answer tasks until `finish`."""
        self._party.attach = list(self.attached)
        while not self._over:
            await self._news.wait()
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
                    await self._asked(task, step, asked_at)
                except StaleError:
                    _log.debug("a task was out of date", round=task.round.round)
                except PeerError as error:
                    # The COS repeats the task for as long as the step is open.
                    _log.warning("a step is not answered yet", round=task.round.round, error=error.message)
            self._answered()

    def _answered(self) -> None:  # noqa: B027 - most parties have nothing to do then
        """Do what a party does after all open tasks are answered, as far as they can be now."""

    @abstractmethod
    async def _asked(self, task: wire.Task, step: Step, asked_at: float) -> None:
        """Answer a step of a sum; ``asked_at`` is when the poll was sent whose answer has the task.

        Raises
        ------
        PeerError
            When the step cannot be answered now.
        """

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

    async def _submit(self, number: int, step: Step, items: Sequence[Item], *, last: bool = False) -> None:
        """Submit answers to a step of a sum in one stream; log those that the COS refuses.

        Parameters
        ----------
        number : int
            Number of the sum.
        step : Step
        items : sequence of Item
            The answers; nothing is sent when there are none.
        last : bool
            Whether nothing else follows for this step, as in `Party.submit_many`.

        Raises
        ------
        PeerError
            When the COS cannot be reached.
        """
        if not items:
            return
        reference = RoundRef(run_id=self._party.plan.run_id, round=number)
        refused = await self._party.submit_many(reference, items, last=last)
        for (reason, message), count in Counter((one.reason, one.message) for one in refused).items():
            _log.warning(
                "the COS refused messages",
                round=number,
                step=step.value,
                messages=count,
                reason=reason_name(reason),
                message=message,
            )
