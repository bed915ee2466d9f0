"""Exchanges of several owners in one message: each is checked by itself, and counts once whatever breaks."""

import asyncio
import json
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from coterie_data_owner.drift.exchanges import Exchanges

from coterie.errors import PeerError
from coterie.net.retry import Retry
from coterie.parties.party import Party
from coterie.systems.drift.published_run import MOST_EXCHANGED, MOST_EXCHANGES
from coterie.wire.refusal import ErrorReason, Refusal, reason_name
from coterie.wire.v1 import operator_pb2 as operating
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.orchestrator_pb2_grpc import (
    OrchestratorServicer,
    add_OrchestratorServicer_to_server,
)

from .test_orchestrator import BAD_GRADIENTS, DIM, NUMBERS, RATE, World, floats, members, numbers

ITEMS = ["zebra", "yak", "xerus"]
OWNERS = 3
LOCAL_UPDATES = 3
SOON_S = 60.0


@pytest.fixture(scope="module")
def people(shared_third_party):
    """A host of three users, and a process with three owners."""

    async def enrol():
        return {
            "host": await shared_third_party.enrol("client", "exchanging-host", 3),
            "owner": await shared_third_party.enrol("data-owner", "exchanging-owners", OWNERS),
        }

    return asyncio.run(enrol())


class Several(World):
    """A run with three owners of one process, all of which hold the same items."""

    async def begin(self, **changes):
        changes.setdefault("settings", f'{{"local_updates":{LOCAL_UPDATES}}}')
        changes.setdefault("max_staleness", OWNERS * LOCAL_UPDATES)
        await self.operator.start(self.run, owners=OWNERS, users=3, **changes)
        await self.owner.register(members(self.people["owner"], ITEMS))
        await self.host.register(members(self.people["host"]))
        return self

    def of(self, owner, number, *, gradients=1, **fields):
        """Return the exchange of an owner of that number, where each has as many gradients."""
        first, *further = (
            self.gradient(first_block=(number - 1) * gradients + place, value=1.0 + owner, **fields)
            for place in range(gradients)
        )
        request = self.request(first, number, users=(3, 4), items=(0, 1), owner=self.owner.slots[owner])
        request.further.extend(further)
        return request

    async def many(self, *messages):
        """Return the answers to messages of one stream, each a list of exchanges."""

        async def requests():
            for one in messages:
                yield wire.ExchangeManyRequest(exchanges=one)

        return [answer async for answer in self.at_owner.ExchangeMany(requests())]

    async def progress(self):
        """Return how far each owner is: number of its last exchange with a gradient, and blocks."""
        asked = [self.request(owner=slot) for slot in self.owner.slots]
        (answer,) = await self.many(asked)
        assert not answer.refused
        return [(one.progress.sequence, one.progress.blocks) for one in answer.answers]


@pytest.fixture
async def world(cos, operator, people, calls):
    return await Several(cos, operator, people, calls).begin()


@pytest.fixture
async def own_cos(start_member, third_party, certificates, people, calls):
    cos = await asyncio.to_thread(start_member, "cos", f"exchanges-{next(NUMBERS)}", third_party)

    async def world(run_id=None):
        await cos.release()
        return Several(cos, calls.Operating(cos, certificates["operator"]), people, calls, run_id)

    return cos, world


def refused(answer):
    return [(one.index, reason_name(one.reason)) for one in answer.refused]


async def test_exchanges_in_one_message_do_what_the_same_exchanges_do_one_by_one(
    world, cos, operator, people, calls
):
    alone = await Several(cos, operator, people, calls).begin()
    first, second = await world.many(
        [world.of(owner, 1) for owner in range(OWNERS)],
        [world.of(owner, 2, rows_version=3) for owner in range(OWNERS)],
    )
    for number, version in ((1, 0), (2, 3)):
        for owner in range(OWNERS):
            last = await alone.at_owner.Exchange(alone.of(owner, number, rows_version=version))
    assert not first.refused
    assert not second.refused
    assert [one.version for one in [*first.answers, *second.answers]] == [3, 3, 3, 6, 6, 6]
    assert second.answers[-1] == last
    assert np.array_equal(await world.model(), await alone.model())
    assert np.array_equal(await world.rows(), await alone.rows())
    assert await world.progress() == [(2, 2)] * OWNERS


async def test_each_bad_exchange_of_a_message_is_refused_by_itself(world):
    # With three owners the user that these take for unknown is one of the host's.
    cases = [case for name, case in BAD_GRADIENTS.items() if name != "unknown user"]
    bad = [world.request(world.gradient(**fields)) for fields, _, _ in cases]
    strange = {
        "UNKNOWN_PARTICIPANT": world.request(world.gradient(), owner=99),
        "UNKNOWN_ROUND": world.request(world.gradient(), run_id="none"),
        "INVALID_FIELD": world.request(world.gradient(), sequence=0),
        "UNKNOWN_ITEM": world.request(items=(4,)),
        "CONFLICT": world.request(world.gradient(value=9.0), 1),
    }
    (answer,) = await world.many([*bad, world.of(0, 1), *strange.values(), world.of(1, 1)])
    expected = [reason for _, reason, _ in cases]
    positions = [*range(len(bad)), *range(len(bad) + 1, len(bad) + 1 + len(strange))]
    assert refused(answer) == list(zip(positions, [*expected, *strange], strict=True))
    assert [place for place, one in enumerate(answer.answers) if one.ByteSize()] == [
        len(bad),
        len(answer.answers) - 1,
    ]
    assert (await world.state()).version == 2
    assert await world.progress() == [(1, 1), (1, 1), (0, 0)]


async def test_gradients_of_one_exchange_do_what_the_same_gradients_do_one_by_one(
    world, cos, operator, people, calls
):
    alone = await Several(cos, operator, people, calls).begin()
    first, second = await world.many(
        [world.of(owner, 1, gradients=LOCAL_UPDATES) for owner in range(2)],
        [world.of(0, 2, gradients=LOCAL_UPDATES, rows_version=3), world.of(2, 1)],
    )
    assert not first.refused
    assert not second.refused
    assert [one.version for one in [*first.answers, *second.answers]] == [6, 6, 10, 10]
    for owner, first, last in ((0, 1, 3), (1, 1, 3), (0, 4, 6), (2, 1, 1)):
        for number in range(first, last + 1):
            answer = await alone.at_owner.Exchange(alone.of(owner, number))
    assert answer.version == 10
    assert np.array_equal(await world.model(), await alone.model())
    assert np.array_equal(await world.rows(), await alone.rows())
    assert await world.progress() == [(2, 6), (1, 3), (1, 1)]
    report = json.loads(
        (await world.operator.stub.GetReport(operating.GetReportRequest(run_id=world.run))).json
    )
    # Of the last message, the second exchange comes after three updates of the first.
    assert report["staleness"]["histogram"] == {"0": 3, "3": 6, "9": 1}


async def test_an_exchange_with_a_gradient_that_does_not_fit_the_others_is_refused_whole(world):
    def bad(**fields):
        request = world.of(0, 1, gradients=LOCAL_UPDATES)
        for name, value in fields.items():
            setattr(request.further[-1], name, value)
        return request

    nan, foreign, none, unordered = bad(), bad(), bad(), bad()
    nan.further[0].item_gradient.CopyFrom(floats(2, DIM, value=np.nan))
    foreign.further[0].items.CopyFrom(numbers(0, 9))
    none.ClearField("gradient")
    unordered.further.reverse()
    cases = [
        (world.of(0, 1, gradients=LOCAL_UPDATES + 1), "TOO_LARGE"),
        (nan, "NOT_FINITE"),
        (foreign, "UNKNOWN_ITEM"),
        (none, "INVALID_FIELD"),
        (unordered, "SEQUENCE_MISMATCH"),
        (bad(first_block=1), "SEQUENCE_MISMATCH"),
        (bad(blocks=0), "SEQUENCE_MISMATCH"),
        (bad(epoch=2), "INVALID_FIELD"),
        (bad(rows_version=1), "INVALID_FIELD"),
        (world.of(0, 1, gradients=LOCAL_UPDATES, rows_version=1), "STALE"),
        (world.of(0, 2, gradients=LOCAL_UPDATES), "SEQUENCE_MISMATCH"),
    ]
    (answer,) = await world.many([request for request, _ in cases])
    assert refused(answer) == [(place, reason) for place, (_, reason) in enumerate(cases)]
    assert (await world.state()).version == 0
    assert await world.progress() == [(0, 0)] * OWNERS


async def test_without_local_updates_in_the_plan_an_exchange_has_one_gradient(cos, operator, people, calls):
    world = await Several(cos, operator, people, calls).begin(settings="")
    why = await calls.refused(world.at_owner.Exchange(world.of(0, 1, gradients=2)))
    assert (why.reason, why.field) == ("TOO_LARGE", "further")
    assert "at most 1" in why.expected
    assert (await world.state()).version == 0


async def test_a_repeated_exchange_of_several_gradients_counts_once_and_with_others_it_is_a_conflict(
    world, calls
):
    request = world.of(0, 1, gradients=LOCAL_UPDATES)
    answer = await world.at_owner.Exchange(request)
    assert await world.at_owner.Exchange(request) == answer
    for other in (world.of(0, 1), world.of(0, 1, gradients=2)):
        why = await calls.refused(world.at_owner.Exchange(other))
        assert why.reason == "CONFLICT"
    assert (await world.state()).version == LOCAL_UPDATES


async def test_a_message_with_more_exchanges_than_allowed_is_refused_whole(world, calls):
    message = wire.ExchangeManyRequest(exchanges=[world.of(0, 1)] * (MOST_EXCHANGES + 1))
    why = await calls.refused(world.at_owner.ExchangeMany(calls.each(message)))
    assert (why.reason, why.field) == ("TOO_LARGE", "exchanges")
    assert (await world.state()).version == 0


async def test_a_message_whose_exchanges_ask_together_for_more_than_a_mebibyte_is_refused_before_rows_are_read(
    cos, operator, people, calls
):
    """Alone, 64 exchanges that each ask for all rows would be as many copies of the model in the COS's memory."""
    world = await Several(cos, operator, people, calls).begin(dim=1024)
    everything = world.request(users=world.host.slots, items=range(len(ITEMS)))
    fits, too_large, after = await world.many(
        [everything] * (MOST_EXCHANGES // 2), [everything] * MOST_EXCHANGES, [everything]
    )
    assert not fits.refused
    assert refused(too_large) == [(place, "TOO_LARGE") for place in range(MOST_EXCHANGES)]
    assert too_large.ByteSize() < MOST_EXCHANGED < 2 * fits.ByteSize()
    assert after.answers[0].user_rows.data == fits.answers[0].user_rows.data


async def test_an_evaluation_is_opened_at_its_update_also_in_the_middle_of_a_message(
    cos, operator, people, calls
):
    world = await Several(cos, operator, people, calls).begin(limits={"evaluate_every": 2})
    await world.many([world.of(owner, 1) for owner in range(OWNERS)])
    tasks = (await world.at_host.Poll(wire.PollRequest(run_id=world.run))).tasks
    assert [one.version for one in tasks if one.kind == wire.TaskKind.TASK_KIND_EVALUATE] == [2]


async def test_exchanges_of_owners_that_are_ready_together_go_in_one_message(world):
    exchanges = Exchanges(world.owner)
    answers = await asyncio.gather(*(exchanges.exchange(world.of(owner, 1)) for owner in range(OWNERS)))
    await exchanges.close()
    assert [one.version for one in answers] == [3] * OWNERS
    totals = world.owner.channel.meter["/coterie.v1.Orchestrator/ExchangeMany"]
    assert totals.bytes_out > 0
    assert await world.progress() == [(1, 1)] * OWNERS


async def test_a_refusal_reaches_the_owner_whose_exchange_it_is(world):
    exchanges = Exchanges(world.owner)
    found = await asyncio.gather(
        exchanges.exchange(world.of(0, 1)),
        exchanges.exchange(world.of(1, 3)),
        exchanges.exchange(world.of(2, 1, rows_version=9)),
        return_exceptions=True,
    )
    await exchanges.close()
    assert found[0].progress.sequence == 1
    assert [one.reason for one in found[1:]] == [
        ErrorReason.ERROR_REASON_SEQUENCE_MISMATCH,
        ErrorReason.ERROR_REASON_STALE,
    ]


async def test_exchanges_go_on_over_another_stream_after_a_lull(world):
    exchanges = Exchanges(world.owner)
    for number in (1, 2):
        await exchanges.exchange(world.of(0, number))
        async with asyncio.timeout(SOON_S):
            while exchanges._stream is not None:
                await asyncio.sleep(0.05)
    await exchanges.close()
    assert (await world.progress())[0] == (2, 2)


@pytest.mark.parametrize(("kind", "gradients"), [("killed", 1), ("killed", LOCAL_UPDATES), ("stopped", 1)])
async def test_exchanges_under_way_when_the_cos_goes_away_count_once_when_it_is_back(
    own_cos, people, kind, gradients
):
    cos, new_world = own_cos
    world = await (await new_world()).begin()
    before = await world.rows()
    party = Party(
        cos.channel(people["owner"]), world.run, lambda: people["owner"].fingerprint, Retry(limit_s=SOON_S)
    )
    party.plan.CopyFrom(world.owner.plan)
    exchanges = Exchanges(party)
    made = [0] * OWNERS
    enough = asyncio.Event()

    async def owner(place, until):
        version = 0
        for number in range(1, until + 1):
            try:
                answer = await exchanges.exchange(
                    world.of(place, number, gradients=gradients, rows_version=version)
                )
            except Refusal as refusal:
                if refusal.reason != ErrorReason.ERROR_REASON_STALE:
                    raise
                # Rows of an update that was not durable when the server was killed: computed again, as a trainer does.
                fresh = await exchanges.exchange(world.request(owner=world.owner.slots[place]))
                answer = await exchanges.exchange(
                    world.of(place, number, gradients=gradients, rows_version=fresh.version)
                )
            version, made[place] = answer.version, number
            if min(made) >= 20:
                enough.set()

    owners = asyncio.gather(*(owner(place, 120) for place in range(OWNERS)))
    await asyncio.wait_for(enough.wait(), SOON_S)
    await asyncio.to_thread(cos.kill if kind == "killed" else cos.stop)
    await asyncio.to_thread(cos.start)
    await asyncio.wait_for(owners, SOON_S)
    await exchanges.close()
    assert await world.progress() == [(120, 120 * gradients)] * OWNERS
    assert (await world.state()).version == 120 * gradients * OWNERS
    # Each gradient of an owner has moved its two users once, by a quarter of 1, 2 or 3.
    moved = 120 * gradients * RATE * sum(range(1, OWNERS + 1))
    assert before - await world.rows() == pytest.approx(np.outer([moved, moved, 0], np.ones(DIM)), rel=1e-4)


async def test_an_exchange_without_an_answer_ends_when_its_process_stops_and_counts_once_later(
    own_cos, calls
):
    cos, new_world = own_cos
    world = await (await new_world()).begin()
    exchanges, request = Exchanges(world.owner), world.of(0, 1)
    with cos.store_held("cos.db"):
        async with cos.asked("ExchangeMany", wire.ExchangeManyRequest(exchanges=[request])):
            waiting = asyncio.ensure_future(exchanges.exchange(request))
        await exchanges.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    (answer,) = await world.many([request])
    assert (answer.answers[0].version, answer.answers[0].progress.sequence) == (1, 1)


class Before(OrchestratorServicer):
    """A server of a release without streams of exchanges: generated code answers them with UNIMPLEMENTED."""

    def __init__(self):
        self.calls = 0

    async def Exchange(self, request, context):  # noqa: N802
        self.calls += 1
        return wire.ExchangeResponse(version=request.sequence)


class Confused(OrchestratorServicer):
    """A server that answers fewer exchanges than it was sent, or ends the stream without an answer."""

    def __init__(self, answers):
        self.answers = answers

    async def ExchangeMany(self, request_iterator, context):  # noqa: N802
        async for _ in request_iterator:
            for _ in range(self.answers):
                yield wire.ExchangeManyResponse()
            return


class Cutting(OrchestratorServicer):
    """A server whose first two streams break at their second message."""

    def __init__(self):
        self.streams = 0

    async def ExchangeMany(self, request_iterator, context):  # noqa: N802
        self.streams += 1
        breaks, came = self.streams < 3, 0
        async for request in request_iterator:
            came += 1
            if breaks and came == 2:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream breaks")
            yield wire.ExchangeManyResponse(answers=[wire.ExchangeResponse() for _ in request.exchanges])


class Counting(OrchestratorServicer):
    """A server that notes how many exchanges each message has, and keeps its first answer back until it may go."""

    def __init__(self):
        self.came, self.may_go, self.sizes = asyncio.Event(), asyncio.Event(), []

    async def ExchangeMany(self, request_iterator, context):  # noqa: N802
        async for request in request_iterator:
            self.sizes.append(len(request.exchanges))
            self.came.set()
            await self.may_go.wait()
            yield wire.ExchangeManyResponse(answers=[wire.ExchangeResponse() for _ in request.exchanges])


@pytest.fixture
async def at():
    """Return a function that serves a servicer without TLS, and returns exchanges with it."""
    servers, channels, carried = [], [], []

    async def serve(servicer, limit_s=0.5):
        server = grpc.aio.server()
        add_OrchestratorServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        channels.append(channel)
        reached = SimpleNamespace(peer="cos/played", stub=lambda factory: factory(channel))
        exchanges = Exchanges(Party(reached, "run", bytes, Retry(limit_s=limit_s)))
        carried.append(exchanges)
        return exchanges

    yield serve
    for one in carried:
        await one.close()
    for channel in channels:
        await channel.close()
    for server in servers:
        await server.stop(None)


async def test_owners_that_began_at_different_times_soon_share_each_message(at):
    server = Counting()
    exchanges = await at(server, SOON_S)

    async def owner(slot):
        for _ in range(5):
            await exchanges.exchange(wire.ExchangeRequest(owner=slot))

    owners = [asyncio.create_task(owner(0))]
    await asyncio.wait_for(server.came.wait(), SOON_S)
    owners += [asyncio.create_task(owner(slot)) for slot in (1, 2)]
    while len(exchanges._waiting) < 2:
        await asyncio.sleep(0)
    server.may_go.set()
    await asyncio.wait_for(asyncio.gather(*owners), SOON_S)
    # The first owner waits for nobody; the others, which asked meanwhile, go with its second exchange.
    assert server.sizes == [1, 3, 3, 3, 3, 2]


async def test_a_server_of_the_release_before_is_called_for_each_exchange(at):
    server = Before()
    exchanges = await at(server)
    for _ in range(2):
        requests = [wire.ExchangeRequest(run_id="run", owner=owner, sequence=owner) for owner in range(3)]
        answers = await asyncio.gather(*map(exchanges.exchange, requests))
        assert [one.version for one in answers] == [0, 1, 2]
    assert server.calls == 6


@pytest.mark.parametrize("answers", [0, 1])
async def test_a_server_that_answers_other_exchanges_than_it_was_sent_is_an_error(at, answers):
    exchanges = await at(Confused(answers))
    with pytest.raises(PeerError):
        await exchanges.exchange(wire.ExchangeRequest(run_id="run"))


async def test_exchanges_do_not_wait_for_a_stream_that_broke(at):
    exchanges = await at(Cutting(), limit_s=60)
    for number in range(4):
        # A stream takes exchanges for 20 s: those of the one that broke would be waited for as long.
        async with asyncio.timeout(10):
            await exchanges.exchange(wire.ExchangeRequest(run_id="run", sequence=number))
