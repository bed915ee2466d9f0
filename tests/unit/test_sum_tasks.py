"""The loop over tasks of sums that members and key holders share: one sum at a time, and what the COS has taken."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from coterie.crypto.identity import Identity
from coterie.errors import PeerError
from coterie.parties.decryption import Decryption
from coterie.parties.party import Item
from coterie.parties.sum_tasks import StaleError, SumInProgress, SumTasks
from coterie.rounds.consent import Consent
from coterie.rounds.plan_hash import plan_hash
from coterie.secure_sum.plan import Member, SumPlan
from coterie.secure_sum.protocol import Declined, Step
from coterie.secure_sum.steps import DECLINED
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import RoundRef, SlotRange

HOLDER = Identity.generate()

RUN = wire.RunPlan(run_id="run", secure_sum="encrypted")


def plan_of(number: int) -> SumPlan:
    return SumPlan(
        run_id="run",
        round=number,
        purpose="evaluate",
        secure_sum="encrypted",
        run_plan_sha256=plan_hash(RUN),
        model_sha256=bytes(32),
        layout_sha256=bytes(32),
        members=tuple(Member(bytes([n]) * 32, f"client/host-{n}") for n in range(30)),
        min_sum=25,
        key_id=bytes(32),
        code_bits=24,
        holders=(Member(HOLDER.participant_id, "holder"),),
    )


class Cos:
    """The party's connection: sends the plan of the sum that is open, and takes or loses what is sent."""

    def __init__(self) -> None:
        self.plan = RUN
        self.slots = [7]
        self.open = 1
        self.fails = 0
        self.sent: list[tuple[int, list[Any]]] = []

    async def fetch(self, kind: int, *, version: int = 0) -> tuple[int, bytes]:
        return version, plan_of(self.open).to_wire().SerializeToString()

    async def briefings(self, number: int, step: Any) -> dict[int, bytes]:
        return {0: b"who submitted"}

    async def submit_many(self, round_: RoundRef, items: Sequence[Item], *, last: bool = False) -> list[Any]:
        if self.fails:
            self.fails -= 1
            raise PeerError("gone")
        self.sent.append((round_.round, [one.kind for one in items]))
        return []


class Tasks(SumTasks[SumInProgress]):
    """A party that answers each step with one message for its only place in the plan."""

    begun = 0

    async def _begin(self, plan: SumPlan, version: int) -> SumInProgress:
        self.begun += 1
        return SumInProgress(plan)

    async def _answer(self, current: SumInProgress, task: wire.Task, step: Step, asked_at: float) -> None:
        if not current.took(0, step, asked_at):
            await self._submit(current, step, [Item(1, [7], b"a message")], [(0, step)])


def task(number: int, slot: int = 7) -> wire.Task:
    return wire.Task(round=RoundRef(run_id="run", round=number), slots=[SlotRange(first=slot, count=1)])


@pytest.fixture
def cos() -> Cos:
    return Cos()


async def test_an_answer_is_given_once_for_all_tasks_that_left_before_it_was_taken(cos: Cos) -> None:
    tasks, before = Tasks(cos), time.monotonic()  # type: ignore[arg-type]
    for _ in range(2):
        await tasks._asked(task(1), Step.CONFIRM, before)
    assert cos.sent == [(1, [1])]
    await tasks._asked(task(1), Step.DECRYPT, before)
    await tasks._asked(task(1), Step.CONFIRM, time.monotonic())
    assert cos.sent == [(1, [1])] * 3
    assert tasks.begun == 1


async def test_an_answer_that_was_lost_is_given_again(cos: Cos) -> None:
    tasks, before = Tasks(cos), time.monotonic()  # type: ignore[arg-type]
    cos.fails = 1
    with pytest.raises(PeerError):
        await tasks._asked(task(1), Step.CONFIRM, before)
    await tasks._asked(task(1), Step.CONFIRM, before)
    assert cos.sent == [(1, [1])]


async def test_a_new_sum_ends_those_before_it(cos: Cos) -> None:
    tasks, before = Tasks(cos), time.monotonic()  # type: ignore[arg-type]
    await tasks._asked(task(1), Step.CONFIRM, 0.0)
    cos.open = 3
    with pytest.raises(StaleError):
        await tasks._asked(task(2), Step.CONFIRM, 0.0)
    await tasks._asked(task(3), Step.CONFIRM, 0.0)
    # The COS had sent this task before it went on.
    await tasks._asked(task(1), Step.CONFIRM, before)
    assert [number for number, _ in cos.sent] == [1, 3]


async def test_a_sum_before_the_present_one_is_taken_up_again_for_a_cos_that_was_restored(cos: Cos) -> None:
    tasks = Tasks(cos)  # type: ignore[arg-type]
    cos.open = 3
    await tasks._asked(task(3), Step.CONFIRM, time.monotonic())
    cos.open = 2
    await tasks._asked(task(2), Step.CONFIRM, time.monotonic())
    assert [number for number, _ in cos.sent] == [3, 2]
    assert tasks.begun == 2


# --- A key holder --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def activity(name: str) -> Iterator[None]:
    yield


@pytest.fixture
def holder(cos: Cos, tmp_path: Path) -> Decryption:
    """A holder whose half has nothing to say to any briefing."""

    async def bundles(participants: Any) -> dict[bytes, Any]:
        return dict.fromkeys(participants)

    def half(*about: Any) -> Any:
        raise Declined("no such half")

    def secrets(key: bytes) -> Any:
        return None

    def holders(key: bytes) -> list[bytes]:
        return [HOLDER.participant_id]

    consent, journal = Consent(experiment=True), tmp_path / "journal.json"
    return Decryption(
        cos,  # type: ignore[arg-type]
        HOLDER,
        secrets,
        holders,
        bundles,
        consent,
        journal,
        activity,
        half=half,
    )


async def test_a_holder_that_sits_out_declines_again_until_the_cos_has_taken_it(
    cos: Cos, holder: Decryption
) -> None:
    before, cos.fails = time.monotonic(), 1
    with pytest.raises(PeerError):
        await holder._asked(task(1), Step.CONFIRM, before)
    assert holder._sum is not None
    assert holder._sum.machine is not None
    for _ in range(2):
        await holder._asked(task(1), Step.CONFIRM, before)
    assert cos.sent == [(1, [DECLINED])]


async def test_a_holder_takes_up_no_sum_by_a_task_for_others_on_its_connection(
    cos: Cos, holder: Decryption
) -> None:
    await holder._asked(task(1, slot=3), Step.CONFIRM, 0.0)
    assert (holder._sum, cos.sent) == (None, [])
