"""The driver of a party's members in sums: batches, what is stored before what is sent, and who declines."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from coterie.crypto.identity import Identity
from coterie.errors import PeerError, StoreError
from coterie.parties import member_driver
from coterie.parties.member_driver import MemberDriver
from coterie.parties.party import Item
from coterie.parties.sum_party import Contributed, Seat, SumRecords, Withheld, check_place
from coterie.rounds.member_round import Journal
from coterie.rounds.plan_hash import plan_hash
from coterie.rounds.standing import Standing
from coterie.secure_sum.plan import Member, SumPlan
from coterie.secure_sum.protocol import Declined, Step
from coterie.secure_sum.registry import Signer
from coterie.secure_sum.steps import DECLINED
from coterie.telemetry.accounting import Accounting
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import RoundRef, SlotRange

MEMBERS = 4
IDENTITIES = [Identity.generate() for _ in range(MEMBERS)]
CODES = np.arange(8, dtype=np.uint32)


RUN = wire.RunPlan(run_id="run", secure_sum="clear")


def plan_of(number: int) -> SumPlan:
    return SumPlan(
        run_id="run",
        round=number,
        purpose="train",
        secure_sum="clear",
        run_plan_sha256=plan_hash(RUN),
        model_sha256=bytes(32),
        layout_sha256=bytes(32),
        members=tuple(Member(one.participant_id, "here") for one in IDENTITIES),
    )


class Cos:
    """The party's connection: answers with plans, and takes or loses what is sent."""

    def __init__(self, log: list[Any]) -> None:
        self.plan = RUN
        self.slots = list(range(MEMBERS))
        self.asked_at = 0.0
        self.attach: Sequence[int] = ()
        self.log = log
        self.fails = 0
        """Number of streams that are lost."""

    async def fetch(self, kind: int, *, version: int = 0) -> tuple[int, bytes]:
        assert kind == wire.FetchKind.FETCH_KIND_SUM_PLAN
        return version, plan_of(version).to_wire().SerializeToString()

    async def submit_many(
        self, round_: RoundRef, items: Sequence[Item], *, last: bool = False
    ) -> list[wire.RefusedItem]:
        declined = sorted(slot for item in items if item.kind == DECLINED for slot in item.slots)
        sent = sorted(slot for item in items if item.kind != DECLINED for slot in item.slots)
        self.log.append(("send", sent, declined, last))
        if self.fails:
            self.fails -= 1
            raise PeerError("gone")
        return []

    def idle(self) -> None:
        """There is no poll that could be made at once."""


class Party:
    """Members in memory; ``broken`` withhold their contribution, and those that ``refuse`` object to each plan."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.journals: dict[bytes, Journal] = {}
        self.broken: set[int] = set()
        self.refuse: set[int] = set()
        self.declines = ""
        self.raises: Exception | None = None
        self.held = False

    async def accept(self, plan: SumPlan, version: int) -> Sum:
        if self.declines:
            raise Declined(self.declines)
        seats = {}
        for member, identity in enumerate(IDENTITIES):
            journal = self.journals.get(identity.participant_id, Journal())
            signer = Signer(identity, identity.bundle(1, (0, 1 << 40)), bytes(32), 0, None)  # type: ignore[arg-type]
            seats[member] = Seat([member], journal, signer, ["no"] if member in self.refuse else [])
        return Sum(self, seats)

    @contextlib.asynccontextmanager
    async def undisturbed(self) -> AsyncIterator[None]:
        assert not self.held
        self.held = True
        yield
        self.held = False

    async def keep(self, records: SumRecords[int]) -> None:
        assert self.held
        self.journals |= records.journals
        number = {one.participant_id: member for member, one in enumerate(IDENTITIES)}
        assert all(records.beside[one] == number[one] for one in records.beside)
        self.log.append(
            (
                "keep",
                sorted(number[one] for one in records.journals),
                sorted(number[one.participant] for one in records.leaving),
                sorted(records.joining),
                [(number.get(one.participant), one.reason) for one in records.sat_out],
            )
        )


@dataclasses.dataclass
class Sum:
    party: Party
    seats: Mapping[int, Seat]

    def contributions(self, members: Sequence[int]) -> Iterator[Contributed[int] | Withheld]:
        for member in members:
            assert self.party.held
            if member in self.party.broken:
                yield Withheld(member, "nothing to give")
                continue
            yield Contributed(member, CODES, member)
            if self.party.raises is not None:
                raise self.party.raises

    async def conclude(self, members: Sequence[int]) -> None:
        self.party.log.append(("conclude", list(members)))

    async def save(self, members: Sequence[int]) -> None:
        assert not self.party.held
        self.party.log.append(("save", list(members)))


class Stand:
    def __init__(self) -> None:
        self.log: list[Any] = []
        self.cos, self.party = Cos(self.log), Party(self.log)
        self.restart()

    def restart(self) -> None:
        self.driver = MemberDriver(self.cos, self.party, Accounting().activity)  # type: ignore[arg-type]

    async def asked(self, number: int, at: float | None = None, slots: int = MEMBERS) -> list[Any]:
        """Ask for the contributions of a sum; return what was done."""
        self.log.clear()
        task = wire.Task(round=RoundRef(run_id="run", round=number), slots=[SlotRange(first=0, count=slots)])
        await self.driver._asked(task, Step.SUBMIT, time.monotonic() if at is None else at)
        return list(self.log)


@pytest.fixture(params=[True, False], ids=["in-sets", "in-arrays"])
def stand(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Stand:
    """Few slots are compared in sets, and very many in arrays."""
    if not request.param:
        monkeypatch.setattr(member_driver, "_FEW_SLOTS", 0)
    return Stand()


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a batch be full with two contributions."""
    monkeypatch.setattr(member_driver, "_BATCH_BYTES", 2 * CODES.nbytes)


async def test_all_members_are_stored_in_one_transaction_and_then_sent_in_one_stream(stand: Stand) -> None:
    everybody = [0, 1, 2, 3]
    assert await stand.asked(1) == [
        ("conclude", everybody),
        ("keep", everybody, everybody, everybody, []),
        ("send", everybody, [], True),
        ("save", everybody),
    ]


async def test_each_batch_is_stored_sent_and_saved_before_the_next_is_made(stand: Stand, pairs: None) -> None:
    assert await stand.asked(1) == [
        ("keep", [0, 1, 2, 3], [0, 1], [0, 1, 2, 3], []),
        ("send", [0, 1], [], False),
        ("save", [0, 1]),
        ("conclude", [0, 1, 2, 3]),
        ("keep", [2, 3], [2, 3], [], []),
        ("send", [2, 3], [], True),
        ("save", [2, 3]),
    ]


async def test_a_batch_that_cannot_be_sent_does_not_stop_the_storing_of_later_ones(
    stand: Stand, pairs: None
) -> None:
    stand.cos.fails = 2
    with pytest.raises(PeerError):
        await stand.asked(1)
    assert [one[0] for one in stand.log] == ["keep", "send", "save", "conclude", "keep", "send", "save"]
    assert all(journal.contribution for journal in stand.party.journals.values())
    # What is stored is sent when it is asked for again; nothing new is to be stored.
    assert await stand.asked(1) == [("send", [0, 1, 2, 3], [], True)]


async def test_slots_that_take_no_part_decline_with_the_last_batch(stand: Stand, pairs: None) -> None:
    stand.party.refuse, stand.party.broken = {0}, {2}
    assert [one for one in await stand.asked(1) if one[0] in ("keep", "send")] == [
        ("keep", [], [], [], [(0, "no")]),
        ("keep", [1, 2, 3], [1, 3], [1, 2, 3], [(2, "nothing to give")]),
        ("send", [1, 3], [0, 2], True),
    ]


async def test_a_plan_that_a_party_declines_is_declined_for_all_its_slots(stand: Stand) -> None:
    stand.party.declines = "another run"
    assert await stand.asked(1) == [
        ("keep", [], [], [], [(None, "another run")]),
        ("send", [], [0, 1, 2, 3], True),
    ]
    assert await stand.asked(1, at=0.0) == []


async def test_members_left_by_a_local_step_that_fails_sit_out_and_no_private_value_is_shown(
    stand: Stand,
) -> None:
    stand.party.raises = ArithmeticError("a private value: 4.2")
    _, (_, kept, leaving, _, sat_out), (_, sent, declined, last), _ = await stand.asked(1)
    assert (kept, leaving) == ([0, 1, 2, 3], [0])
    assert sat_out == [(member, "the local step failed: ArithmeticError") for member in (1, 2, 3)]
    assert (sent, declined, last) == ([0], [1, 2, 3], True)


async def test_members_sit_out_while_a_store_has_trouble_that_passes(
    stand: Stand,
) -> None:
    stand.party.raises = StoreError("no room for users.records", trouble="full")
    _, (_, _, leaving, _, sat_out), *_ = await stand.asked(1)
    assert leaving == [0]
    assert {reason for _, reason in sat_out} == {"the local step failed: StoreError"}


async def test_a_damaged_file_of_a_local_step_ends_the_service_by_its_name(stand: Stand) -> None:
    stand.party.raises = StoreError("users.records is damaged")
    with pytest.raises(StoreError, match=r"users\.records is damaged"):
        await stand.asked(1)


async def test_an_answer_that_the_cos_has_taken_since_a_task_left_is_not_repeated(stand: Stand) -> None:
    before = time.monotonic()
    await stand.asked(1)
    assert await stand.asked(1, at=before) == []
    assert await stand.asked(1) == [("send", [0, 1, 2, 3], [], True)]


async def test_after_a_restart_the_stored_contribution_is_sent_and_no_record_names_it_again(
    stand: Stand,
) -> None:
    await stand.asked(1)
    stand.restart()
    assert await stand.asked(1) == [("send", [0, 1, 2, 3], [], True)]


async def test_a_sum_is_closed_by_the_next_one_and_by_the_end_of_the_run(stand: Stand) -> None:
    await stand.asked(1, slots=2)
    before, first = time.monotonic(), IDENTITIES[0].participant_id
    assert stand.party.journals[first].joined == 1
    await stand.asked(2, slots=1)
    assert stand.party.journals[first].joined == 2
    assert not stand.party.journals[IDENTITIES[1].participant_id].contribution
    assert await stand.asked(1, before) == []
    stand.driver.finish()
    await stand.driver.run()
    assert not any(journal.contribution for journal in stand.party.journals.values())


async def test_members_that_are_further_than_a_restored_cos_decline_and_say_where_they_are(
    stand: Stand,
) -> None:
    await stand.asked(5)
    declined = []

    async def submit_many(round_: RoundRef, items: Sequence[Item], *, last: bool = False) -> list[Any]:
        declined.extend((round_.round, one) for one in items if one.kind == DECLINED)
        return []

    stand.driver._party.submit_many = submit_many  # type: ignore[method-assign, assignment]
    await stand.asked(2)
    ((number, item),) = declined
    assert number == 2
    assert list(item.slots) == list(range(MEMBERS))
    assert Standing.from_bytes(item.payload) == Standing(5)


@pytest.mark.parametrize(
    ("changes", "device", "words"),
    [
        ({}, "there", "another connection"),
        ({"run_id": "other"}, "here", "of run 'other'"),
        ({"secure_sum": "masked"}, "here", "a sum 'masked'"),
        ({"run_plan_sha256": bytes(32)}, "here", "another plan"),
    ],
)
def test_a_plan_of_another_run_sum_or_connection_is_declined(
    changes: dict[str, Any], device: str, words: str
) -> None:
    check_place(plan_of(1), 0, RUN, "here")
    with pytest.raises(Declined, match=words):
        check_place(dataclasses.replace(plan_of(1), **changes), 0, RUN, device)


@pytest.mark.parametrize(
    ("secure_sum", "degree", "members", "short"),
    [
        ("clear", 0, 64, True),
        ("clear", 0, 65, False),
        ("masked", 1, 1, True),
        ("masked", 2, 2, True),
        ("masked", 49, 1, False),
        ("masked", 3, 2, False),
        ("encrypted", 0, 1, False),
    ],
)
def test_only_a_step_that_takes_about_as_long_as_a_thread_holds_up_the_loop(
    secure_sum: str, degree: int, members: int, short: bool
) -> None:
    plan = dataclasses.replace(plan_of(1), secure_sum=secure_sum, degree=degree)
    assert member_driver._is_short(plan, members) is short
