"""One sum at the COS: what it keeps elsewhere than in memory, what a restart finds, what members are told at once."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import inspect
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coterie_cos import open_sum, sums
from coterie_cos.open_sum import OpenSum
from coterie_cos.participants import ranges
from coterie_cos.sums import SumAbandoned, SumDone, SumFormed, SumOpened, Sums
from numpy.typing import NDArray

from coterie.rounds.server_round import RoundState
from coterie.secure_sum.masked import MaskedServer
from coterie.secure_sum.plan import Member, SumPlan, layout_hash
from coterie.secure_sum.protocol import Applied, MemberHalf, ServerHalf, Step
from coterie.secure_sum.steps import KIND_OF, TASK_STEP
from coterie.store import cos as store
from coterie.store import spool
from coterie.store.engine import Term, Writer, open_sqlite
from coterie.store.spool import Spool, Spooled
from coterie.telemetry.accounting import Accounting
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import RoundRef, SlotRange
from tests.simulation.rig.sums import LAYOUT, halves, identity, layout_of

SOON_S = 60.0
PARTIES = ("client/left", "client/right")
MEMBERS = 6


class Owner:
    """The run that owns the sums: it takes note of what becomes of them."""

    def __init__(self) -> None:
        self.sums: list[NDArray[np.uint32]] = []
        self.abandonments: list[str] = []
        self.outcomes: list[str] = []
        self.applies = True

    async def follow(self, own: Sums) -> None:
        while (outcome := await own.outcome()) is not None:
            self.outcomes.append(type(outcome).__name__)
            match outcome:
                case SumOpened():
                    await own.save_opening(outcome, "{}")
                case SumFormed(current, formed):
                    assert not isinstance(formed, Applied)
                    self.sums.append(formed)
                    if self.applies:
                        await own.applied(current, "")
                    del current
                case SumAbandoned(reason):
                    self.abandonments.append(reason)
                    own.close()
                case SumDone():
                    own.close()
            del outcome


class Round:
    """A cohort of users as members, half of them at either host, and the server's side."""

    def __init__(self, folder: Path, secure_sum: str = "masked") -> None:
        self.folder = folder
        self.keep()
        self.owner = Owner()
        self.server, member = self.halves(secure_sum)
        half = self.server()
        self.layout = layout_of(secure_sum)
        self.plan = SumPlan(
            "run",
            1,
            "train",
            secure_sum,
            bytes(32),
            layout_hash(self.layout),
            tuple(Member(identity(n).participant_id, PARTIES[n % 2], 1) for n in range(MEMBERS)),
            min_sum=2,
            **half.plan_fields(MEMBERS, self.layout)._asdict(),
        )
        self.members: list[MemberHalf] = [member(self.plan, n) for n in range(MEMBERS)]
        self.codes = self.drawn(np.random.default_rng(0))
        self.slots = self.covered()
        self.sums = self.made()
        self.sums.open(RoundState.begin(self.plan, self.layout, half, 60.0), self.slots)
        self.worker = asyncio.create_task(self.owner.follow(self.sums))

    def halves(
        self, secure_sum: str
    ) -> tuple[Callable[[], ServerHalf], Callable[[SumPlan, int], MemberHalf]]:
        """Return two functions that make the server's half, and a member's half of a plan."""
        return halves(secure_sum)

    def covered(self) -> dict[int, list[int]]:
        """Return the slots of everybody who is asked, by number."""
        return {n: [n] for n in range(MEMBERS)}

    def drawn(self, rng: np.random.Generator) -> list[NDArray[np.uint32]]:
        """Return the codes of each member."""
        return [rng.integers(0, 2**32, self.layout.size, dtype=np.uint32) for _ in range(MEMBERS)]

    def keep(self) -> None:
        self.engine = open_sqlite(self.folder / "cos.db", "cos")
        self.writer = Writer(self.engine)

    def made(self) -> Sums:
        return Sums(
            "run",
            self.server(),
            self.folder,
            Term(self.writer),
            Accounting(),
            lambda participant: False,
        )

    def restart(self) -> None:
        """Go on with what is in the store, as another process would."""
        self.worker.cancel()
        self.sums = self.made()
        with self.engine.connect() as connection:
            saved = self.sums.load(connection)
        assert saved is not None
        assert saved.plan == self.plan
        self.sums.resume(saved, self.layout, self.slots, 60.0)
        self.worker = asyncio.create_task(self.owner.follow(self.sums))

    @property
    def open(self) -> OpenSum:
        assert self.sums.current is not None
        return self.sums.current

    async def reached(self, step: Step) -> None:
        async with asyncio.timeout(SOON_S):
            while self.open.durable is not step:
                await asyncio.sleep(0.001)

    def told(self, party: str, step: Step, first: int = 0) -> wire.Briefings:
        request = wire.FetchRequest(version=1, step=TASK_STEP[step], first=first)
        return wire.Briefings.FromString(self.sums.briefings(party, request))

    def briefings(self, step: Step, parties: Iterable[str] = PARTIES) -> dict[int, bytes]:
        """Return what each member of some parties is told, in as many answers as it takes."""
        found = {}
        for party in parties:
            first, more = 0, True
            while more:
                message = self.told(party, step, first)
                for one in message.briefings:
                    parts = [message.parts[place] for place in one.of]
                    found[one.member] = message.common + b"".join(parts) + one.payload
                first, more = message.next, bool(message.next)
        return found

    def submit(self, step: Step, member: int, message: bytes) -> None:
        head = wire.SubmitRequest(
            round=RoundRef(run_id="run", round=1),
            kind=KIND_OF[step],
            sha256=hashlib.sha256(message).digest(),
        )
        self.sums.submitted(head, self.slots[member], message)

    def answer(self, step: Step, members: range = range(MEMBERS)) -> dict[int, bytes]:
        told = self.briefings(step)
        sent = {}
        for member in members:
            codes = self.codes[member] if step is Step.SUBMIT else None
            sent[member] = self.members[member].answer(step, told[member], codes)
            self.submit(step, member, sent[member])
        return sent

    async def total(self) -> NDArray[np.uint32]:
        async with asyncio.timeout(SOON_S):
            while not self.owner.sums and not self.owner.abandonments:
                await asyncio.sleep(0.001)
        assert self.owner.abandonments == []
        (total,) = self.owner.sums
        return total

    @property
    def clear(self) -> NDArray[np.uint32]:
        return sum(self.codes, np.zeros(self.layout.size, np.uint32))


@pytest.fixture
async def sum_of_six(tmp_path: Path) -> AsyncIterator[Round]:
    one = Round(tmp_path)
    await one.reached(Step.ADVERTISE)
    yield one
    one.sums.end()
    await one.worker
    await one.sums.written()
    one.writer.close()


@pytest.fixture
def all_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is so small that it stays in memory."""
    monkeypatch.setattr(spool, "_SMALL", 1)
    monkeypatch.setattr(sums, "Spool", lambda folder: Spool(folder, 0))


def in_the_file(messages: object) -> bool:
    return isinstance(messages, Spooled) and all(isinstance(one, tuple) for one in messages.places().values())


@pytest.mark.usefixtures("all_in_the_file")
@pytest.mark.parametrize("killed", MaskedServer.steps, ids=lambda step: step.value)
async def test_a_sum_whose_messages_are_in_a_file_goes_on_after_a_restart_in_each_step(
    sum_of_six: Round, killed: Step
) -> None:
    one, sent = sum_of_six, {}
    for step in MaskedServer.steps:
        await one.reached(step)
        if step is killed:
            # Of a step that is not closed, nothing is there afterwards, and members send the same again.
            one.answer(step, range(2))
            one.restart()
            assert one.open.state.asked == tuple(range(MEMBERS))
            assert set(one.open.state.closed) == set(sent)
            for done, messages in sent.items():
                if done is not Step.SUBMIT:
                    assert dict(one.open.state.closed[done]) == messages
        sent[step] = one.answer(step)
        assert all(in_the_file(messages) for messages in one.open.state.closed.values())
    assert np.array_equal(await one.total(), one.clear)


async def test_a_sum_of_one_step_that_a_crash_keeps_from_being_applied_asks_its_members_again(
    tmp_path: Path,
) -> None:
    one = Round(tmp_path, "clear")
    await one.reached(Step.SUBMIT)
    rng = np.random.default_rng(1)
    # Within the bounds of a user, as a sum in clear requires.
    one.codes = [rng.integers(1, LAYOUT._span + 1, dtype=np.uint32) for _ in range(MEMBERS)]
    one.owner.applies = False
    sent = one.answer(Step.SUBMIT)
    expected = await one.total()
    # Nothing of the step was written, for nothing has followed from it.
    with one.engine.connect() as connection:
        found = store.load_sum(connection, "run")
    assert found is not None
    assert (found[0].phase, found[0].running, found[1]) == ("collect", None, {})
    one.owner = Owner()
    one.restart()
    assert one.open.state.asked == tuple(range(MEMBERS))
    for member, message in sent.items():
        one.submit(Step.SUBMIT, member, message)
    assert np.array_equal(await one.total(), expected)
    assert np.array_equal(expected, one.clear)
    one.sums.end()
    await one.worker
    one.writer.close()


@pytest.mark.usefixtures("all_in_the_file")
async def test_a_repeated_message_is_compared_with_the_one_in_the_file(sum_of_six: Round) -> None:
    sent = sum_of_six.answer(Step.ADVERTISE)
    await sum_of_six.reached(Step.SHARE)
    sum_of_six.submit(Step.ADVERTISE, 3, sent[3])
    with pytest.raises(Refusal, match="another message") as caught:
        sum_of_six.submit(Step.ADVERTISE, 3, sent[3] + b"\x48\x01")
    assert caught.value.reason is ErrorReason.ERROR_REASON_CONFLICT


async def test_a_small_sum_makes_no_file(sum_of_six: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file(*given: object, **more: object) -> None:
        raise AssertionError("a file was made")

    monkeypatch.setattr(spool.tempfile, "TemporaryFile", no_file)
    for step in MaskedServer.steps:
        await sum_of_six.reached(step)
        sum_of_six.answer(step)
    assert np.array_equal(await sum_of_six.total(), sum_of_six.clear)


@pytest.mark.parametrize("limit", ["_OWN_BYTES", "_BRIEFINGS_BYTES"])
async def test_members_are_told_the_same_in_several_answers_as_in_one(
    sum_of_six: Round, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    for step in MaskedServer.steps:
        await sum_of_six.reached(step)
        whole = sum_of_six.briefings(step)
        state = sum_of_six.open.state
        assert whole == {member: state.briefing(member) for member in range(MEMBERS)}
        assert [one.member for one in sum_of_six.told(PARTIES[0], step).briefings] == [0, 2, 4]
        with monkeypatch.context() as tight:
            tight.setattr(open_sum, limit, 1)
            assert sum_of_six.briefings(step) == whole
            # What members share alone does not count as their own.
            alone = step is Step.SUBMIT or (step is not Step.ADVERTISE and limit == "_BRIEFINGS_BYTES")
            told = sum_of_six.told(PARTIES[0], step)
            assert [one.member for one in told.briefings] == ([0] if alone else [0, 2, 4])
            assert told.next == (2 if alone else 0)
        sum_of_six.answer(step)
    assert np.array_equal(await sum_of_six.total(), sum_of_six.clear)


async def test_nothing_of_a_sum_is_held_once_it_is_over(sum_of_six: Round) -> None:
    over = weakref.ref(sum_of_six.open)
    for step in MaskedServer.steps:
        await sum_of_six.reached(step)
        sum_of_six.answer(step)
    await sum_of_six.total()
    async with asyncio.timeout(SOON_S):
        while sum_of_six.sums.busy:
            await asyncio.sleep(0.001)
    held: list[object] = []
    waiting: Any = sum_of_six.worker.get_coro()
    while inspect.iscoroutine(waiting):
        held += waiting.cr_frame.f_locals.values()
        waiting = waiting.cr_await
    assert not [value for value in held if isinstance(value, (OpenSum, RoundState, SumFormed, SumDone))]
    gc.collect()
    assert over() is None


@pytest.mark.usefixtures("all_in_the_file")
def test_saved_messages_are_read_back_however_many_there_are(tmp_path: Path) -> None:
    engine = open_sqlite(tmp_path / "cos.db", "cos")
    messages = {
        "advertise": {n: b"%d" % n for n in range(3 * store._ROWS + 1)},
        "share": {n: b"%d" % n * 500 for n in range(store._ROWS)},
    }
    keep = Spool(tmp_path, 0).keep
    shares: Mapping[int, bytes] = {}
    for member, message in messages["share"].items():
        shares = keep(shares, member, message)
    row = store.SavedSum(4, b"plan", "submit", "collect", "", None)
    with engine.begin() as connection:
        store.save_sum(connection, "run", row, {"advertise": messages["advertise"], "share": shares})
    with engine.connect() as connection:
        plain, again = store.load_sum(connection, "run"), store.load_sum(connection, "run", keep)
        assert store.load_sum(connection, "another") is None
    assert plain == (row, messages)
    assert again == (row, messages)
    assert again is not None
    assert all(in_the_file(one) for one in again[1].values())


def test_progress_counts_key_holders_in_the_steps_that_ask_them_though_there_are_more_than_members(
    tmp_path: Path,
) -> None:
    one: Round = Round.__new__(Round)
    one.folder, one.owner, one.writer = tmp_path, Owner(), Writer(open_sqlite(tmp_path / "cos.db", "cos"))
    one.server, _ = halves("encrypted")
    members, holders = (
        tuple(Member(identity(n).participant_id, f"{kind}/{n}", 20) for n in range(first, first + count))
        for kind, first, count in (("client", 0, 2), ("decrypting-client", 2, 3))
    )
    plan = SumPlan(
        "run",
        1,
        "train",
        "encrypted",
        bytes(32),
        layout_hash(LAYOUT),
        members,
        holders=holders,
        key_id=bytes(32),
    )
    own = [plan.respondent(n, n) for n in range(3)]
    opening = RoundState.begin(plan, LAYOUT, one.server(), 60.0)
    own_sums = one.made()

    def counted(step: Step, **keys: object) -> tuple[int, int, int]:
        own_sums.current = OpenSum(replace(opening, step=step, **keys), {})  # type: ignore[arg-type]
        found = own_sums.progress()
        assert found is not None
        return found.members, found.answered, found.dropped

    assert counted(Step.SUBMIT, expected=frozenset({0, 1}), arrived={1: b""}) == (2, 1, 0)
    assert counted(Step.CONFIRM, expected=frozenset(own), arrived={own[0]: b""}) == (3, 1, 0)
    assert counted(Step.CONFIRM, expected=frozenset(own), lost=frozenset(own[2:])) == (3, 0, 1)
    # The first holder has decrypted its own part, and is asked for that of the third one, which is gone.
    asked = frozenset([*own, plan.respondent(0, 2)])
    done = {own[0]: b"", own[1]: b""}
    gone = frozenset(plan.numbers_of(own[2]))
    assert counted(Step.DECRYPT, expected=asked, arrived=done, lost=gone) == (3, 2, 1)
    one.writer.close()


async def test_a_poll_names_the_slots_of_a_party_without_going_through_them_again(
    sum_of_six: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sum_of_six.reached(Step.ADVERTISE)
    counted: list[list[int]] = []

    def counting(slots: Iterable[int]) -> list[SlotRange]:
        counted.append(list(slots))
        return ranges(counted[-1])

    monkeypatch.setattr(open_sum, "ranges", counting)
    left, right = PARTIES
    (task,) = sum_of_six.open.tasks(left, 1, 0)
    assert [(part.first, part.count) for part in task.slots] == [(0, 1), (2, 1), (4, 1)]
    assert sum_of_six.open.tasks(left, 1, 0) == [task]
    assert counted == [[0, 2, 4]]
    sum_of_six.answer(Step.ADVERTISE, range(1, 2))
    # Only a party that is asked for others is counted again.
    assert sum_of_six.open.tasks(left, 1, 0) == [task]
    assert counted == [[0, 2, 4]]
    (less,) = sum_of_six.open.tasks(right, 1, 0)
    assert [(part.first, part.count) for part in less.slots] == [(3, 1), (5, 1)]
