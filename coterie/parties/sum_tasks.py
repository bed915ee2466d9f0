"""What a party does about the tasks of sums, whatever it is in them: hear of them, fetch the plan, hand answers in.

Tasks are level-triggered: what was missed is asked again, and a sum with a higher number means that those below are
over.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence

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

__all__ = ["StaleError", "SumTasks"]

_log = structlog.get_logger("coterie.sums")


class StaleError(Exception):
    """A task is out of date: the COS has gone on since it was told."""


class SumTasks(ABC):
    """The tasks of one party.

    Parameters
    ----------
    party : Party
        Registered.
    """

    def __init__(self, party: Party) -> None:
        self._party = party
        self._tasks: tuple[Sequence[wire.Task], float] = ((), 0.0)
        self._news = asyncio.Event()
        self._over = False

    def hear(self, tasks: Sequence[wire.Task]) -> None:
        """Take note of the tasks that are open now."""
        self._tasks = tasks, self._party.asked_at
        self._news.set()

    def finish(self) -> None:
        """Take part in nothing more."""
        self._over = True
        self._news.set()

    attached: Sequence[wire.FetchKind.ValueType] = (
        wire.FetchKind.FETCH_KIND_SUM_PLAN,
        wire.FetchKind.FETCH_KIND_BRIEFINGS,
    )
    """What the COS sends along with a task, so that it need not be fetched."""

    async def run(self) -> None:
        """Answer what is asked until `finish`."""
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
                    # It is asked again for as long as it is open.
                    _log.warning("a step is not answered yet", round=task.round.round, error=error.message)
            self._answered()

    def _answered(self) -> None:  # noqa: B027 - most parties have nothing to do then
        """Take note that everything that was asked is answered, as far as it can be now."""

    @abstractmethod
    async def _asked(self, task: wire.Task, step: Step, asked_at: float) -> None:
        """Answer a step of a sum; the COS told of it in answer to what was asked at this time.

        Raises
        ------
        PeerError
            It cannot be answered now.
        """

    async def _sum_plan(self, number: int) -> SumPlan:
        """Return the plan of a sum.

        Raises
        ------
        PeerError
            What the COS sends is not that, or it sends nothing.
        StaleError
            Another sum is open by now.
        """
        _, payload = await self._party.fetch(wire.FetchKind.FETCH_KIND_SUM_PLAN, version=number)
        try:
            plan = SumPlan.from_wire(rounds_pb2.SumPlan.FromString(payload or b""))
        except DecodeError as error:
            raise PeerError("the COS sent what is no SumPlan") from error
        if plan.round != number:
            raise StaleError(f"the COS sent the plan of sum {plan.round}, asked was for {number}")
        return plan

    async def _submit(self, number: int, step: Step, items: Sequence[Item]) -> None:
        """Hand in answers to a step of a sum; what the COS refuses is logged.

        Raises
        ------
        PeerError
            It cannot be reached.
        """
        if not items:
            return
        reference = RoundRef(run_id=self._party.plan.run_id, round=number)
        for refused in await self._party.submit_many(reference, items):
            _log.warning(
                "the COS refused a message",
                round=number,
                step=step.value,
                reason=reason_name(refused.reason),
                message=refused.message,
            )
