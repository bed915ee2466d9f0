"""A party's calls: what was attached is not fetched, a step's last submission waits for the next task."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from coterie.crypto.identity import Delegation, Identities, Identity, KeptBundles
from coterie.crypto.roll import roll_of
from coterie.errors import PeerError
from coterie.net.rest import Rest
from coterie.net.retry import Retry
from coterie.net.status import details_of, status_code
from coterie.parties.party import HostedUsers, Item, Party, Registrant
from coterie.rounds.plan_hash import plan_hash
from coterie.wire.chunks import CHUNK_BYTES
from coterie.wire.pieces import TOGETHER, TOGETHER_BYTES, pieces
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import Chunk, RoundRef, SlotRange
from coterie.wire.v1.common_pb2 import RollDelegation as RollMessage

SUM_PLAN, MODEL = wire.FetchKind.FETCH_KIND_SUM_PLAN, wire.FetchKind.FETCH_KIND_MODEL
BRIEFINGS, SHARE = wire.FetchKind.FETCH_KIND_BRIEFINGS, wire.RoundStep.ROUND_STEP_SHARE
ITEM = Item(wire.SubmitKind.SUBMIT_KIND_ADVERT, [3], b"bytes")
ROUND = RoundRef(run_id="run", round=4)
LONG_S = 60.0


def task(step: wire.RoundStep.ValueType) -> wire.Task:
    return wire.Task(kind=wire.TaskKind.TASK_KIND_ROUND, round=ROUND, step=step)


def attached(kind: wire.FetchKind.ValueType, version: int, /, **answer: Any) -> wire.Attachment:
    return wire.Attachment(
        request=wire.FetchRequest(kind=kind, version=version), response=wire.FetchResponse(**answer)
    )


class Server:
    """The callable of a stub, whose answers the test gives."""

    peer = "cos/cos"

    def __init__(self) -> None:
        self.polls: asyncio.Queue[wire.PollResponse] = asyncio.Queue()
        self.asked: list[wire.PollRequest] = []
        self.fetched: list[wire.FetchRequest] = []
        self.payloads: list[wire.FetchResponse] = []
        self.submitted: list[list[wire.SubmitRequest]] = []
        self.answers: asyncio.Queue[wire.SubmitResponse | Exception] = asyncio.Queue()

    def stub(self, _: Callable[..., Any]) -> Server:
        return self

    async def Poll(self, request: wire.PollRequest, timeout: float) -> wire.PollResponse:  # noqa: N802
        self.asked.append(request)
        return await self.polls.get()

    async def Fetch(  # noqa: N802
        self, request: wire.FetchRequest, timeout: float
    ) -> AsyncIterator[wire.FetchResponse]:
        self.fetched.append(request)
        yield self.payloads.pop(0)

    async def Submit(  # noqa: N802
        self, requests: AsyncIterator[wire.SubmitRequest], timeout: float = 0.0
    ) -> wire.SubmitResponse:
        self.submitted.append([request async for request in requests])
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def party(server: Server) -> Party:
    async def at_once(_: float) -> None:
        await asyncio.sleep(0)

    return Party(server, "run", lambda: bytes(32), Retry(sleep=at_once))  # type: ignore[arg-type]


def payload(data: bytes) -> wire.FetchResponse:
    return wire.FetchResponse(sha256=hashlib.sha256(data).digest(), chunk=Chunk(data=data, last=True))


async def test_what_an_answer_has_attached_is_not_fetched_and_only_once(server: Server, party: Party) -> None:
    party.attach = [SUM_PLAN, MODEL]
    await server.polls.put(
        wire.PollResponse(
            revision=1,
            attached=[
                attached(SUM_PLAN, 4, chunk=Chunk(data=b"plan", last=True), version=4),
                attached(MODEL, 7, chunk=Chunk(data=b"model", last=True), version=7, sha256=b"m" * 32),
            ],
        )
    )
    tasks = party.tasks()
    await anext(tasks)
    assert await party.fetch(MODEL, version=7) == (7, b"model")
    assert await party.fetch(SUM_PLAN, version=4) == (4, b"plan")
    assert server.fetched == []
    server.payloads = [payload(b"plan again")]
    assert await party.fetch(SUM_PLAN, version=4) == (0, b"plan again")
    await server.polls.put(wire.PollResponse(revision=2))
    await anext(tasks)
    # The next poll says what need not be sent again.
    assert (server.asked[1].round, list(server.asked[1].held_sha256)) == (4, [b"m" * 32])


async def test_that_a_payload_is_unchanged_counts_only_for_who_holds_it(server: Server, party: Party) -> None:
    unchanged = attached(MODEL, 7, unchanged=True, sha256=b"m" * 32, version=7)
    tasks = party.tasks()
    for held, expected in ((b"m" * 32, (7, None)), (b"", (0, b"model"))):
        await server.polls.put(wire.PollResponse(revision=1, attached=[unchanged]))
        await anext(tasks)
        server.payloads = [payload(b"model")]
        assert await party.fetch(MODEL, version=7, held_sha256=held) == expected


async def test_the_last_submission_of_a_step_brings_the_next_task(server: Server, party: Party) -> None:
    party.carries = True
    tasks = party.tasks()
    await server.polls.put(wire.PollResponse(revision=1, tasks=[task(SHARE)]))
    await anext(tasks)
    coming = asyncio.create_task(anext(tasks))
    await server.answers.put(wire.SubmitResponse(accepted=1))
    await party.submit_many(ROUND, [ITEM])
    assert not server.submitted[0][0].HasField("poll")

    following = task(wire.RoundStep.ROUND_STEP_SUBMIT)
    await server.answers.put(
        wire.SubmitResponse(accepted=2, next=wire.PollResponse(revision=2, tasks=[following]))
    )
    await party.submit_many(ROUND, [ITEM, ITEM], last=True)
    party.idle()
    assert server.submitted[1][0].poll.cursor == 1
    # Only the first message of a stream asks.
    assert not server.submitted[1][1].HasField("poll")
    async with asyncio.timeout(LONG_S):
        assert await coming == [following]
    assert len(server.asked) == 1


async def sent_by(party: Party, server: Server, sizes: list[int]) -> list[wire.SubmitRequest]:
    """Submit payloads of these sizes; return the messages that came."""
    items = [Item(ITEM.kind, [slot], bytes([slot % 256]) * size) for slot, size in enumerate(sizes)]
    await server.answers.put(wire.SubmitResponse(accepted=len(items)))
    await party.submit_many(ROUND, items)
    return [wire.SubmitRequest.FromString(one.SerializeToString()) for one in server.submitted.pop()]


async def test_items_travel_together_without_hashes_where_the_cos_speaks_version_2(
    server: Server, party: Party
) -> None:
    sizes = [10, 0, TOGETHER_BYTES - 10, 1, CHUNK_BYTES + 1, 5]
    apart = await sent_by(party, server, sizes)
    assert [len(one.chunk.data) for one in apart] == [10, 0, TOGETHER_BYTES - 10, 1, CHUNK_BYTES, 1, 5]
    assert all(not one.more and len(one.sha256) == 32 * (not one.chunk.offset) for one in apart)
    party.protocol = 2
    messages = await sent_by(party, server, sizes)
    assert [len(one.more) for one in messages] == [2, 0, 0, 1]
    together = [one for message in messages for one in pieces(message)]
    # Only what comes in several messages needs a hash.
    assert [len(one.sha256) for one in together] == [0, 0, 0, 0, 32, 0, 0]
    for one, other in zip(together, apart, strict=True):
        other.sha256 = one.sha256
        assert one == other


async def test_no_message_has_more_pieces_than_are_taken(server: Server, party: Party) -> None:
    party.protocol = 2
    messages = await sent_by(party, server, [1] * 5000)
    assert [len(one.more) + 1 for one in messages] == [TOGETHER, 5000 - TOGETHER]
    assert sum(1 for message in messages for _ in pieces(message)) == 5000


async def test_while_a_poll_is_under_way_a_submission_asks_for_nothing(server: Server, party: Party) -> None:
    party.carries = True
    tasks = party.tasks()
    coming = asyncio.create_task(anext(tasks))
    async with asyncio.timeout(LONG_S):
        while not server.asked:
            await asyncio.sleep(0)
    assert len(server.asked) == 1
    await server.answers.put(wire.SubmitResponse(accepted=1))
    await party.submit_many(ROUND, [ITEM], last=True)
    assert not server.submitted[0][0].HasField("poll")
    coming.cancel()


async def test_who_has_nothing_to_submit_polls_at_once(server: Server, party: Party) -> None:
    party.carries = True
    tasks = party.tasks()
    await server.polls.put(wire.PollResponse(revision=1))
    await anext(tasks)
    await server.polls.put(wire.PollResponse(revision=2))
    party.idle()
    assert await anext(tasks) == []
    assert server.asked[1].cursor == 1


async def test_a_submission_that_breaks_is_repeated_without_waiting_and_tasks_are_polled_for(
    server: Server, party: Party
) -> None:
    party.carries = True
    tasks = party.tasks()
    await server.polls.put(wire.PollResponse(revision=1, tasks=[task(SHARE)]))
    await anext(tasks)
    coming = asyncio.create_task(anext(tasks))
    broken = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
    await server.answers.put(broken)
    submitting = asyncio.create_task(party.submit_many(ROUND, [ITEM], last=True))
    await server.polls.put(wire.PollResponse(revision=5))
    async with asyncio.timeout(LONG_S):
        assert await coming == []
    assert not submitting.done()
    await server.answers.put(wire.SubmitResponse(accepted=1))
    assert await submitting == []
    first, again = server.submitted
    assert first[0].HasField("poll")
    assert not again[0].HasField("poll")
    assert again[0].chunk.data == b"bytes"


async def test_briefings_are_joined_from_what_is_common_from_parts_and_from_their_own(
    server: Server, party: Party
) -> None:
    pages = [
        wire.Briefings(
            common=b"c",
            parts=[b"x", b"y"],
            briefings=[wire.Briefing(member=0, of=[1, 0], payload=b"0"), wire.Briefing(member=2)],
            next=5,
        ),
        wire.Briefings(briefings=[wire.Briefing(member=5, payload=b"5")]),
    ]
    server.payloads = [payload(page.SerializeToString()) for page in pages]
    assert await party.briefings(4, SHARE) == {0: b"cyx0", 2: b"c", 5: b"5"}
    assert [request.first for request in server.fetched] == [0, 5]


@pytest.mark.parametrize(
    "pages",
    [
        [wire.Briefings(briefings=[wire.Briefing(of=[0])])],
        [wire.Briefings(next=3), wire.Briefings(next=3)],
    ],
)
async def test_briefings_that_cannot_be_are_a_fault_of_the_server(
    server: Server, party: Party, pages: list[wire.Briefings]
) -> None:
    server.payloads = [payload(page.SerializeToString()) for page in pages]
    with pytest.raises(PeerError):
        await party.briefings(4, SHARE)


class Registering(Server):
    """A server that is away at first, while the caller renews its certificate."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = b"1" * 32
        self.came: list[wire.Participant] = []

    async def Register(  # noqa: N802
        self, requests: AsyncIterator[wire.RegisterRequest]
    ) -> wire.RegisterResponse:
        self.came = [one async for request in requests for one in request.participants]
        if self.shown == b"1" * 32:
            self.shown = b"2" * 32
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "away"
            )
        plan = wire.RunPlan(run_id="run")
        return wire.RegisterResponse(plan=plan, plan_hash=plan_hash(plan))


async def test_who_registers_delegates_to_the_certificate_that_is_shown_at_that_attempt() -> None:
    server, identity = Registering(), Identity.generate()
    party = Party(server, "run", lambda: server.shown, Retry(sleep=lambda _: asyncio.sleep(0)))  # type: ignore[arg-type]
    bundle = identity.bundle(1, (0, 2_000_000_000))
    await party.register([Registrant(identity, bundle, wire.ParticipantKind.PARTICIPANT_KIND_USER)])
    (one,) = server.came
    claim = one.delegation
    Delegation(claim.certificate_fingerprint, claim.run_id, claim.expiry, claim.signature).verify(
        bundle.signing_public, b"2" * 32, "run", 1
    )


class Before(Registering):
    """A server of the release before rolls: each user needs a delegation."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = b"2" * 32
        self.attempts: list[bool] = []

    async def Register(  # noqa: N802
        self, requests: AsyncIterator[wire.RegisterRequest]
    ) -> wire.RegisterResponse:
        asked = [request async for request in requests]
        self.attempts.append(asked[0].HasField("roll"))
        if all(one.delegation.signature for request in asked for one in request.participants):
            return await super().Register(each(asked))
        refusal = Refusal(ErrorReason.ERROR_REASON_BAD_SIGNATURE, "no delegation", field="participants")
        raise grpc.aio.AioRpcError(
            status_code(refusal.reason),
            grpc.aio.Metadata(),
            grpc.aio.Metadata(("grpc-status-details-bin", details_of(refusal))),
            refusal.message,
        )


async def each(requests: list[wire.RegisterRequest]) -> AsyncIterator[wire.RegisterRequest]:
    for request in requests:
        yield request


@pytest.mark.parametrize(("users", "attempts"), [(1, [False]), (2, [True, False])])
async def test_users_sign_one_by_one_where_the_server_does_not_take_a_roll(
    users: int, attempts: list[bool]
) -> None:
    server = Before()
    party = Party(server, "run", lambda: server.shown, Retry(sleep=lambda _: asyncio.sleep(0)))  # type: ignore[arg-type]
    people = [Identity.generate() for _ in range(users)]
    kind = wire.ParticipantKind.PARTICIPANT_KIND_USER
    await party.register([Registrant(one, one.bundle(1, (0, 2_000_000_000)), kind) for one in people])
    assert server.attempts == attempts
    for one, came in zip(people, server.came, strict=True):
        claim = came.delegation
        Delegation(claim.certificate_fingerprint, claim.run_id, claim.expiry, claim.signature).verify(
            one.signing_public, server.shown, "run", 1
        )


async def test_users_of_a_host_are_sent_as_a_list_of_them_is_and_their_keys_are_not_made_for_it() -> None:
    drawn = Identities().more(1203)
    bundles = KeptBundles(one.bundle(1, (0, 2_000_000_000)) for one in drawn)
    made = []

    class Looked(Identities):
        def __getitem__(self, at):  # type: ignore[no-untyped-def]
            made.append(at)
            return super().__getitem__(at)

    class Taking(Registering):
        roll = RollMessage()

        async def Register(self, requests: AsyncIterator[wire.RegisterRequest]) -> wire.RegisterResponse:  # noqa: N802
            asked = [wire.RegisterRequest.FromString(one.SerializeToString()) async for one in requests]
            assert [len(one.participants) for one in asked] == [500, 500, 203]
            self.roll = asked[0].roll
            return await super().Register(each(asked))

    came, sizes = list[list[wire.Participant]](), list[int]()
    kind = wire.ParticipantKind.PARTICIPANT_KIND_USER
    one_by_one = [Registrant(one, bundle, kind) for one, bundle in zip(drawn, bundles, strict=True)]
    for members in (HostedUsers(Looked(drawn._secrets), bundles), one_by_one):
        server = Taking()
        party = Party(server, "run", lambda at=server: at.shown, Retry(sleep=lambda _: asyncio.sleep(0)))  # type: ignore[arg-type]
        sizes.append(await party.register(members))
        came.append(server.came)
        assert server.roll.certificate_fingerprint == b"2" * 32
        assert server.roll.size == 1203
        assert server.roll.root == roll_of(bundles.ids()).root()
    assert came[0] == came[1]
    # The size of a roll's message hangs on the seconds of its expiry at most.
    assert sizes[0] == sizes[1] == sum(one.ByteSize() for one in came[0]) + server.roll.ByteSize()
    assert made == [0, 0], "the first user signs, for each of the two certificates"


class Busy(Server):
    """A COS whose second call of a registration takes too long at first; slots run on from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.rolls: list[RollMessage] = []
        self.late = True

    async def Register(self, requests: AsyncIterator[wire.RegisterRequest]) -> wire.RegisterResponse:  # noqa: N802
        asked = [request async for request in requests]
        if self.rolls and self.late:
            self.late = False
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata(), grpc.aio.Metadata(), "late"
            )
        slots = SlotRange(first=sum(roll.size for roll in self.rolls), count=asked[0].roll.size)
        self.rolls.append(asked[0].roll)
        plan = wire.RunPlan(run_id="run")
        return wire.RegisterResponse(plan=plan, plan_hash=plan_hash(plan), slots=[slots])


async def test_a_host_of_very_many_users_registers_by_parts_and_a_call_that_fails_is_repeated_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("coterie.parties.party._TOGETHER", 40)
    drawn = Identities().more(100)
    bundles = KeptBundles(one.bundle(1, (0, 2_000_000_000)) for one in drawn)
    server = Busy()
    party = Party(server, "run", lambda: b"2" * 32, Retry(sleep=lambda _: asyncio.sleep(0)))  # type: ignore[arg-type]
    await party.register(HostedUsers(drawn, bundles))
    ids = list(bundles.ids())
    assert [roll.root for roll in server.rolls] == [
        roll_of(ids[first : first + 40]).root() for first in (0, 40, 80)
    ]
    assert not server.late
    assert party.slots == list(range(100))


class Forgetting(Server):
    """A COS that was restored from an older backup: its polls are refused, and it takes parties in anew.

    Parameters
    ----------
    slots : list of int
        First slot of the party at each registration; 0 where it is refused because the run is unknown.
    """

    def __init__(self, slots: list[int]) -> None:
        super().__init__()
        self.slots = slots
        self.refusals: list[ErrorReason] = []

    async def Register(self, requests: AsyncIterator[wire.RegisterRequest]) -> wire.RegisterResponse:  # noqa: N802
        assert [request.run_id async for request in requests] == ["run"]
        if not self.slots[0]:
            self.slots.pop(0)
            raise Refusal(ErrorReason.ERROR_REASON_UNKNOWN_ROUND, "it does not know the run", field="run_id")
        plan = wire.RunPlan(run_id="run")
        slots = [SlotRange(first=self.slots.pop(0), count=1)]
        return wire.RegisterResponse(plan=plan, plan_hash=plan_hash(plan), slots=slots)

    async def Poll(self, request: wire.PollRequest, timeout: float) -> wire.PollResponse:  # noqa: N802
        if self.refusals:
            raise Refusal(self.refusals.pop(0), "it does not know of this", field="run_id")
        return await super().Poll(request, timeout)


async def registered(server: Forgetting, reached: list[bool]) -> Party:
    """Return a party that has registered."""
    retry = Retry(sleep=lambda _: asyncio.sleep(0))  # type: ignore[arg-type,return-value]
    party = Party(server, "run", lambda: bytes(32), retry, reached.append)  # type: ignore[arg-type]
    identity = Identity.generate()
    bundle = identity.bundle(1, (0, 2_000_000_000))
    await party.register([Registrant(identity, bundle, wire.ParticipantKind.PARTICIPANT_KIND_USER)])
    return party


@pytest.mark.parametrize("slots", [[3, 3], [3, 0, 3]])
async def test_a_party_that_the_cos_has_forgotten_registers_again_as_soon_as_it_can(slots: list[int]) -> None:
    server = Forgetting(slots)
    party = await registered(server, [])
    server.refusals = [ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT]
    await server.polls.put(wire.PollResponse(revision=1))
    await anext(party.tasks())
    assert party.slots == [3]
    assert server.slots == []


async def test_a_party_that_got_other_slots_from_the_cos_says_why_it_ends() -> None:
    server = Forgetting([3, 4])
    party = await registered(server, [])
    server.refusals = [ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT]
    with pytest.raises(PeerError, match="restored from a backup of before this party registered"):
        await anext(party.tasks())


async def test_a_party_waits_while_the_cos_has_lost_the_run() -> None:
    server, reached = Forgetting([3]), list[bool]()
    party = await registered(server, reached)
    server.refusals = [ErrorReason.ERROR_REASON_UNKNOWN_ROUND]
    await server.polls.put(wire.PollResponse(revision=1))
    with capture_logs() as logged:
        await anext(party.tasks())
    assert reached == [False, True]
    (line,) = logged
    assert (line["log_level"], line["run"]) == ("error", "run")
    assert "restored from a backup of before the run" in line["hint"]


# --- check-ins ---------------------------------------------------------------------------------------------------


class Resting(Rest):
    """A rest whose ends the test gives."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float] = []
        self.ends = asyncio.Event()

    async def rest(self, seconds: float) -> None:
        self.asked.append(seconds)
        await self.ends.wait()
        self.ends.clear()


def resting_party(server: Server, rest: Rest) -> Party:
    return Party(server, "run", lambda: bytes(32), Retry(), rest=rest)  # type: ignore[arg-type]


async def test_a_device_that_checks_in_polls_again_when_it_was_told_to(server: Server) -> None:
    rest = Resting()
    tasks = resting_party(server, rest).tasks()
    await server.polls.put(wire.PollResponse(revision=1, come_back_ms=1500))
    assert await anext(tasks) == []
    waiting = asyncio.ensure_future(anext(tasks))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (rest.asked, len(server.asked)) == ([1.5], 1)
    rest.ends.set()
    await server.polls.put(wire.PollResponse(revision=2, tasks=[task(SHARE)]))
    assert [one.step for one in await waiting] == [SHARE]
    assert [(one.checks_in, one.hold_ms) for one in server.asked] == [(True, 20_000)] * 2
    # While something is asked, polls follow each other as those of everybody.
    await server.polls.put(wire.PollResponse(revision=3))
    assert await anext(tasks) == []
    assert rest.asked == [1.5]


@pytest.mark.parametrize(("told_ms", "rests_s"), [(1, 1.0), (4_294_967_295, 86_400.0)])
async def test_a_device_rests_for_no_less_than_a_second_and_no_more_than_a_day_whatever_it_is_told(
    server: Server, told_ms: int, rests_s: float
) -> None:
    rest = Resting()
    tasks = resting_party(server, rest).tasks()
    await server.polls.put(wire.PollResponse(revision=1, come_back_ms=told_ms))
    await anext(tasks)
    rest.ends.set()
    await server.polls.put(wire.PollResponse(revision=2))
    await anext(tasks)
    assert rest.asked == [rests_s]


async def test_a_server_of_before_check_ins_holds_the_polls_of_a_device(server: Server) -> None:
    rest = Resting()
    tasks = resting_party(server, rest).tasks()
    for revision in (1, 2, 3):
        await server.polls.put(wire.PollResponse(revision=revision))
        await anext(tasks)
    assert rest.asked == []


async def test_a_party_that_does_not_check_in_does_not_rest(server: Server, party: Party) -> None:
    tasks = party.tasks()
    for revision in (1, 2):
        await server.polls.put(wire.PollResponse(revision=revision, come_back_ms=60_000))
        async with asyncio.timeout(20):
            await anext(tasks)
    assert not any(one.checks_in for one in server.asked)
