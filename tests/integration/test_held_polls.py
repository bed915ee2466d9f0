"""Polls that intakes hold, and what they keep of a round, at the sockets of a real coordinator and real intakes."""

import asyncio
import contextlib
import hashlib
import time

import grpc
import pytest
from coterie_cos.held_polls import MOST_CALLERS
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from coterie.crypto.authority import Authority, make_csr, new_tls_key
from coterie.net.credentials import TlsFiles
from coterie.net.vouching import claim
from coterie.wire.v1 import intakes_pb2
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.intakes_pb2_grpc import IntakesStub
from coterie.wire.v1.orchestrator_pb2_grpc import OrchestratorStub

from .. import postgres
from .playing import SOON_S, Host, World

KINDS = wire.FetchKind
CALLS = 2000
"""Most polls of an intake at the coordinator."""
AWAY_S = 4.0
"""Polls wait a little longer than this for the next coordinator, seconds."""
ALL = [
    KINDS.FETCH_KIND_SUM_PLAN,
    KINDS.FETCH_KIND_MODEL,
    KINDS.FETCH_KIND_OPEN_ITEMS,
    KINDS.FETCH_KIND_BRIEFINGS,
]


@pytest.fixture(scope="module")
def server():
    with postgres.running() as one:
        yield one


@pytest.fixture(scope="module")
def people(shared_third_party):
    async def enrol():
        return {
            "left": await shared_third_party.enrol("client", "held-left", 3),
            "right": await shared_third_party.enrol("client", "held-right", 3),
            "owner": await shared_third_party.enrol("data-owner", "held-owner", 1),
        }

    return asyncio.run(enrol())


class Spread:
    """A coordinator and two intakes."""

    def __init__(self, made, server):
        database = server.keys(server.database(), timeout_s=5.0)
        self.coordinator = made(part="coordinator", database=database, limits={"calls": CALLS})
        keys = {"part": "intake", "coordinator": [self.coordinator.address], "database": database}
        self.intakes = [made(**keys) for _ in range(2)]

    def start(self):
        for one in (self.coordinator, *self.intakes):
            one.start(healthy=False)
        for one in (self.coordinator, *self.intakes):
            one.wait_for_health(True)

    def metric(self, name, **labels):
        return self.coordinator.metric(name, **labels)

    def served(self, rpc):
        """Return how often the coordinator answered an RPC."""
        return self.coordinator.metric("coterie_rpc_calls_total", side="server", rpc=rpc)


@pytest.fixture(scope="module")
def processes(shared_third_party, server, calls, tmp_path_factory):
    """The processes of this module; a test that ends the coordinator starts it again."""

    def made(**keys):
        return calls.Member("cos", "held", shared_third_party, tmp_path_factory.mktemp("held"), **keys)

    spread = Spread(made, server)
    spread.start()
    yield spread
    for one in (*spread.intakes, spread.coordinator):
        one.stop()


@pytest.fixture
async def spread(processes):
    yield processes
    for one in (processes.coordinator, *processes.intakes):
        await one.release()
        await asyncio.to_thread(one.wait_for_health, True)


class Apart(World):
    """A run whose hosts come through an intake each, while the operator asks the coordinator."""

    def __init__(self, spread, operator, people, calls, **how):
        super().__init__(spread.intakes[0], operator, people, calls, **how)
        self.intakes = dict(zip(("left", "right"), spread.intakes, strict=True))

    def host(self, who):
        through, self.cos = self.cos, self.intakes[who]
        try:
            return Host(self, who)
        finally:
            self.cos = through


@pytest.fixture
def apart(spread, certificates, people, calls):
    def make(**how):
        return Apart(
            spread, calls.Operating(spread.coordinator, certificates["operator"]), people, calls, **how
        )

    return make


def asking(host, cursor=0, hold_s=2.0, **asked):
    """Make one poll."""
    request = wire.PollRequest(run_id=host.world.run, cursor=cursor, hold_ms=int(1000 * hold_s), **asked)
    return host.stub.Poll(request)


async def polled(host, **asked):
    """Poll until there is a task."""
    cursor = 0
    async with asyncio.timeout(SOON_S):
        while not (response := await asking(host, cursor, **asked)).tasks:
            cursor = response.revision
    return response


async def answered(host, cursor):
    """Poll until there is a coordinator."""
    while True:
        try:
            return await asking(host, cursor)
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.1)


def attached(response):
    return {one.request.kind: one.response for one in response.attached}


async def until(condition, what):
    async with asyncio.timeout(SOON_S):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.05)
    assert condition(), what


async def test_an_intake_answers_as_the_coordinator_does_and_asks_for_what_many_are_told_once(
    spread, apart, people, calls
):
    before = {rpc: spread.served(rpc) for rpc in ("Poll", "Shared")}
    run = await apart(secure_sum="masked", per_user=True).begin("left", "right")
    left, right = run.hosts["left"], run.hosts["right"]
    direct = calls.party_at(spread.coordinator, people["left"], run.run)
    task = (await polled(left)).tasks[0]
    own = await direct.stub.Poll(wire.PollRequest(run_id=run.run, attach=ALL))
    held = await polled(left, attach=ALL)
    assert list(held.tasks) == list(own.tasks)
    assert list(held.attached) == list(own.attached)
    plan = attached(held)[KINDS.FETCH_KIND_SUM_PLAN]
    model = attached(held)[KINDS.FETCH_KIND_MODEL]
    assert hashlib.sha256(model.chunk.data).digest() == model.sha256
    again = attached(await polled(left, attach=ALL, held_sha256=[model.sha256]))[KINDS.FETCH_KIND_MODEL]
    assert again.unchanged
    assert not again.HasField("chunk")
    assert not (await polled(left, attach=ALL, round=task.round.round)).attached

    for host in (left, right):
        fetched = await host.party.fetch(KINDS.FETCH_KIND_SUM_PLAN, version=task.round.round)
        assert fetched[1] == plan.chunk.data
        await host.answer(task if host is left else (await polled(host)).tasks[0])
    # Briefings are a party's own.
    told = attached(await polled(right, attach=ALL, round=task.round.round))
    assert set(told) == {KINDS.FETCH_KIND_BRIEFINGS}
    assert spread.served("Poll") - before["Poll"] == 1
    # Plan, model and open items, once for each intake.
    assert 4 <= spread.served("Shared") - before["Shared"] <= 6


async def test_polls_are_held_over_the_end_of_a_coordinator_and_answered_by_the_next_one(spread, apart):
    run = await apart().begin("left", "right", users=7)
    left = run.hosts["left"]
    first = await asking(left)
    assert not first.tasks
    asked = spread.served("Hold")
    waiting = asyncio.ensure_future(asking(left, first.revision, hold_s=20.0))
    await until(lambda: spread.served("Hold") > asked, "the coordinator knows the poll")
    killed = time.monotonic()
    spread.coordinator.kill()
    spread.coordinator.start()
    took_s = time.monotonic() - killed
    # Nothing has changed but who answers, whose revisions are others.
    async with asyncio.timeout(SOON_S):
        try:
            answer = await waiting
        except grpc.aio.AioRpcError:
            # On a busy machine the next one may be there later than polls wait for it: the party polls again.
            assert took_s > AWAY_S
            answer = await answered(left, first.revision)
    assert answer.revision != first.revision
    assert not answer.tasks


async def test_a_round_goes_on_after_a_restart_where_the_plan_names_the_beacon(spread, apart):
    run = await apart().begin("left", "right")
    left = run.hosts["left"]
    before = (await polled(left)).tasks
    spread.coordinator.kill()
    spread.coordinator.start()
    async with asyncio.timeout(SOON_S):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                if (after := await asking(left)).tasks:
                    break
            await asyncio.sleep(0.1)
    assert list(after.tasks) == list(before)


async def test_polls_of_an_intake_that_dies_are_held_by_another_one(spread, apart, people):
    run = await apart().begin("left", users=6)
    left = run.hosts["left"]
    first = await asking(left)
    asked = spread.served("Hold")
    waiting = asyncio.ensure_future(asking(left, first.revision, hold_s=20.0))
    await until(lambda: spread.served("Hold") > asked, "the coordinator knows the poll")
    intake, other = spread.intakes
    intake.kill()
    with pytest.raises(grpc.aio.AioRpcError):
        await waiting
    stub = other.channel(people["left"]).stub(OrchestratorStub)
    request = wire.PollRequest(run_id=run.run, cursor=first.revision, hold_ms=20_000)
    waiting = asyncio.ensure_future(stub.Poll(request))
    await run.host("right").register()
    async with asyncio.timeout(SOON_S):
        while not (answer := await waiting).tasks:
            request.cursor = answer.revision
            waiting = asyncio.ensure_future(stub.Poll(request))
    intake.start()


async def test_a_poll_without_a_coordinator_is_refused_and_not_answered_from_memory(spread, apart, calls):
    run = await apart().begin("left", "right")
    left = run.hosts["left"]
    response = await polled(left, attach=ALL)
    (task,) = response.tasks
    spread.coordinator.kill()
    for call in (
        lambda: asking(left, response.revision, hold_s=20.0),
        lambda: asking(left),
        # The intake has the bytes, and nobody who says that they are the present ones.
        lambda: anext(
            aiter(
                left.stub.Fetch(
                    wire.FetchRequest(run_id=run.run, kind=KINDS.FETCH_KIND_MODEL, version=task.version)
                )
            )
        ),
    ):
        refusal = await calls.refused(call)
        assert refusal.reason == "NOT_READY"
    spread.coordinator.start()


async def test_the_coordinator_forgets_a_poll_whose_caller_has_given_it_up(spread, apart):
    run = await apart().begin("left", "right", users=7)
    left = run.hosts["left"]
    first = await asking(left)
    asked = spread.served("Hold")
    waiting = asyncio.ensure_future(asking(left, first.revision, hold_s=20.0))
    await until(lambda: spread.served("Hold") > asked, "the coordinator knows the poll")
    waiting.cancel()
    # Nothing else happens that an intake would tell.
    await until(lambda: spread.served("Hold") > asked + 1, "the coordinator is told that the poll has ended")


async def test_a_party_that_gives_its_poll_up_is_not_held_any_more_and_is_heard_through_its_polls(
    spread, apart
):
    run = await apart().begin("left", "right", users=7, party_s=3.0)
    left, right = run.hosts["left"], run.hosts["right"]

    async def polls(host):
        cursor = 0
        while True:
            cursor = (await asking(host, cursor, hold_s=20.0)).revision

    polling = [asyncio.create_task(polls(host)) for host in (left, right)]

    async def changes():
        return {(one["party"], one["change"]) for one in (await run.report())["parties"]}

    try:
        async with asyncio.timeout(SOON_S):
            # The owner asks for nothing, and is lost: so would be hosts whose polls the coordinator did not hear of.
            while ("data-owner/held-owner", "lost") not in await changes():
                await asyncio.sleep(0.1)
            polling[0].cancel()
            while ("client/held-left", "lost") not in await changes():
                await asyncio.sleep(0.1)
        assert ("client/held-right", "lost") not in await changes()
    finally:
        for one in polling:
            one.cancel()
        await asyncio.gather(*polling, return_exceptions=True)


async def test_a_poll_of_any_length_keeps_no_other_one_from_the_coordinator(spread, apart, calls):
    run = await apart().begin("left", "right", users=7)
    left, right = run.hosts["left"], run.hosts["right"]
    # All that a message may have: the coordinator takes no more, and is told of several polls in one message.
    long = (4 << 20) - 300
    invented = wire.SubmitRequest(poll=wire.PollRequest(run_id="x" * long, hold_ms=20_000))
    assert (await calls.refused(lambda: left.stub.Submit(iter([invented])))).reason == "UNKNOWN_ROUND"
    # A field that nobody knows.
    later = wire.PollRequest.FromString(
        wire.PollRequest(run_id=run.run).SerializeToString()
        + bytes([0xA2, 0x06, *_varint(long)])
        + bytes(long)
    )
    sessions = spread.served("Follow")
    async with asyncio.timeout(SOON_S):
        answers = await asyncio.gather(
            left.stub.Submit(iter([wire.SubmitRequest(poll=later)])), asking(left), asking(right)
        )
    assert answers[0].next.revision
    assert spread.served("Follow") == sessions


def _varint(number):
    found = []
    while number >= 1 << 7:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return [*found, number]


async def fetched(stub, run, kind, held=b""):
    """Fetch a payload; return its version, whether it is unchanged, and its bytes."""
    answers = [
        one async for one in stub.Fetch(wire.FetchRequest(run_id=run.run, kind=kind, held_sha256=held))
    ]
    return answers[0].version, answers[0].unchanged, b"".join(one.chunk.data for one in answers)


async def test_what_all_parties_fetch_comes_from_the_coordinator_once_and_to_whom_it_lets_have_it(
    spread, apart, people, calls
):
    run = await apart(per_user=True).begin("left", "right")
    left = run.hosts["left"]
    await polled(left)
    direct = calls.party_at(spread.coordinator, people["right"], run.run).stub
    for kind in (KINDS.FETCH_KIND_POPULATION, KINDS.FETCH_KIND_CATALOGUE):
        own = await fetched(direct, run, kind)
        told = spread.metric("coterie_rpc_bytes_total", side="server", rpc="Fetch", direction="out")
        # Together, and once more.
        found = await asyncio.gather(*(fetched(left.stub, run, kind) for _ in range(8)))
        found.append(await fetched(left.stub, run, kind))
        assert found == [own] * 9
        sent = spread.metric("coterie_rpc_bytes_total", side="server", rpc="Fetch", direction="out") - told
        # The bytes once, and nine times their hash.
        assert sent < len(own[2]) + 9 * 64 < 9 * len(own[2])
        held = hashlib.sha256(own[2]).digest()
        assert await fetched(left.stub, run, kind, held) == (own[0], True, b"")
    # The intake has the population, and the coordinator gives it to hosts only.
    owner = spread.intakes[0].channel(people["owner"]).stub(OrchestratorStub)
    refused = await calls.refused(lambda: fetched(owner, run, KINDS.FETCH_KIND_POPULATION))
    assert refused.reason == "INVALID_FIELD"


async def test_a_fetch_has_the_present_bytes_once_the_coordinator_has_others(spread, apart, people, calls):
    run = await apart().begin("left", "right", users=7, party_s=3.0)
    left = run.hosts["left"].stub
    direct = calls.party_at(spread.coordinator, people["left"], run.run).stub
    first = await fetched(left, run, KINDS.FETCH_KIND_CATALOGUE)
    assert first == await fetched(direct, run, KINDS.FETCH_KIND_CATALOGUE)
    async with asyncio.timeout(SOON_S):
        # The owner asks for nothing, and is lost with its items.
        while (await fetched(direct, run, KINDS.FETCH_KIND_CATALOGUE)) == first:
            await asyncio.sleep(0.1)
    now = await fetched(direct, run, KINDS.FETCH_KIND_CATALOGUE)
    assert (
        await asyncio.gather(*(fetched(left, run, KINDS.FETCH_KIND_CATALOGUE) for _ in range(3))) == [now] * 3
    )


# --- nobody else -----------------------------------------------------------------------------------------------


async def test_nobody_but_an_intake_of_the_coordinator_holds_polls_for_others(
    spread, apart, people, certificates, calls
):
    await apart().begin("left", "right")
    called = {
        "a party": people["left"],
        # A COS, and not this one.
        "another service": certificates["cos"],
    }
    for name, who in called.items():
        stub = spread.coordinator.channel(who).stub(IntakesStub)
        for call in (
            lambda stub=stub: stub.Hold(intakes_pb2.HoldRequest()),
            lambda stub=stub: anext(aiter(stub.Follow(intakes_pb2.FollowRequest()))),
            lambda stub=stub: anext(aiter(stub.Shared(intakes_pb2.SharedRequest()))),
        ):
            assert (await calls.refused(call)).reason == "WRONG_ROLE", name


@contextlib.asynccontextmanager
async def a_session(spread):
    """Begin a session as the first intake; yield its id, what holds polls, and the coordinator's answers."""
    channel = spread.coordinator.channel(TlsFiles(spread.intakes[0].state / "tls"))
    follow = channel.pass_on("/coterie.v1.Intakes/Follow")
    hold = channel.pass_one_on("/coterie.v1.Intakes/Hold")

    async def one(message):
        yield message.SerializeToString()

    answers = follow(one(intakes_pb2.FollowRequest()), timeout=SOON_S, metadata=claim())
    async with contextlib.aclosing(answers):
        yield intakes_pb2.FollowResponse.FromString(await anext(answers)).session, hold, answers


async def test_an_intake_speaks_only_for_certificates_of_the_authority_and_in_its_own_session(
    spread, apart, people
):
    run = await apart().begin("left", "right")
    await polled(run.hosts["left"])

    def der(pem):
        return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)

    stranger = der(Authority.create("coterie", 30).issue(make_csr(new_tls_key()), "client", "held-left", 1))
    known = der(people["left"].tls.chain.read_bytes())
    async with a_session(spread) as (session, hold, answers):
        request = intakes_pb2.HoldRequest(session=session)
        for number, certificate in enumerate((stranger, b"none", known), 1):
            request.callers.add(number=number, certificate=certificate)
            request.polls.add(number=number, caller=number, poll=wire.PollRequest(run_id=run.run))
        # A caller whom nobody named.
        request.polls.add(number=4, caller=4, poll=wire.PollRequest(run_id=run.run))
        await hold(request.SerializeToString(), timeout=SOON_S, metadata=claim())
        found = {}
        while len(found) < 4:
            for answer in intakes_pb2.FollowResponse.FromString(await anext(answers)).answers:
                found[answer.number] = answer
        assert [number for number, answer in found.items() if not answer.refused] == [3]
        assert found[3].answer.tasks

        # More callers than a session takes: none of them is kept.
        many = intakes_pb2.HoldRequest(session=session)
        for number in range(MOST_CALLERS):
            many.callers.add(number=10 + number, certificate=b"none")
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await hold(many.SerializeToString(), timeout=SOON_S, metadata=claim())
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        few = intakes_pb2.HoldRequest(session=session)
        few.callers.add(number=5, certificate=known)
        await hold(few.SerializeToString(), timeout=SOON_S, metadata=claim())

        # Of another session, which is another intake's.
        other = spread.coordinator.channel(TlsFiles(spread.intakes[1].state / "tls")).pass_one_on(
            "/coterie.v1.Intakes/Hold"
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await other(request.SerializeToString(), timeout=SOON_S, metadata=claim())
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_the_session_of_an_intake_that_does_not_read_its_answers_ends(spread, apart):
    run = await apart().begin("left", "right")
    async with a_session(spread) as (session, hold, answers):
        number, refused = 0, None
        async with asyncio.timeout(SOON_S):
            while refused is None:
                request = intakes_pb2.HoldRequest(session=session)
                for number in range(number + 1, number + 1 + CALLS // 4):  # noqa: B020 - goes on
                    # A caller whom nobody named: its poll is refused at once.
                    request.polls.add(number=number, caller=1, poll=wire.PollRequest(run_id=run.run))
                try:
                    await hold(request.SerializeToString(), timeout=SOON_S, metadata=claim())
                except grpc.aio.AioRpcError as error:
                    refused = error
        # There is no such session any more.
        assert refused.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert number < 50 * CALLS
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in answers:
                pass
    # The intakes' own sessions go on.
    assert (await polled(run.hosts["left"])).tasks
