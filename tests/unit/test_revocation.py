"""The watch over revocations, with a list of answers for a directory and a clock of our own."""

import asyncio
import time

import grpc
import pytest

from coterie.net.rest import Rest
from coterie.net.revocation import HOLD_S, STALE_S, RevocationWatch
from coterie.wire.v1.common_pb2 import Protocol
from coterie.wire.v1.thirdparty_pb2 import RevocationsResponse
from coterie.wire.versions import UnsupportedVersionError, own

MARIE, PAUL = b"m" * 32, b"p" * 32
CERTIFICATE = b"c" * 32


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds
        await asyncio.sleep(0)


class Guard:
    def __init__(self):
        self.closed = None
        self.certificates = frozenset()

    def revoke(self, fingerprints):
        self.certificates = fingerprints

    def fail_closed(self, closed):
        self.closed = closed


class Directory:
    """Answers as told, then holds the call for ever; an answer may be a number of seconds without one."""

    peer = "thirdparty/directory"

    def __init__(self, clock, *answers):
        self.clock = clock
        self.answers = list(answers)
        self.silent_until = None
        self.requests = []
        self.done = asyncio.Event()

    def stub(self, factory):
        return factory(self)

    def unary_unary(self, method, request_serializer, response_deserializer, **_):
        async def call(request, timeout):
            self.requests.append(request)
            if not self.answers:
                self.done.set()
                await asyncio.Event().wait()
            answer = self.answers[0]
            if isinstance(answer, RevocationsResponse):
                self.clock.now += HOLD_S if request.held_revision == answer.revision else 0.1
                return self.answers.pop(0)
            if self.silent_until is None:
                self.silent_until = self.clock.now + answer
            self.clock.now = min(self.silent_until, self.clock.now + timeout)
            if self.clock.now >= self.silent_until:
                self.answers.pop(0)
                self.silent_until = None
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())

        return call

    stream_unary = unary_stream = unary_unary


def answer(revision, participants=(), certificates=()):
    return RevocationsResponse(revision=revision, participants=participants, certificates=certificates)


class Watched:
    """Runs a watch until its directory has no more answers."""

    def __init__(self, *answers, rest=None):
        self.clock = Clock()
        self.guard = Guard()
        self.directory = Directory(self.clock, *answers)
        self.reports = []
        self.revoked = []
        self.watch = RevocationWatch(
            self.directory,
            self.guard,
            lambda fresh: self.reports.append((fresh, self.clock.now)),
            on_revoked=self.revoked.append,
            clock=self.clock,
            sleep=self.clock.sleep,
            rest=rest,
        )

    async def run(self):
        running = asyncio.create_task(self.watch.run())
        await asyncio.wait_for(self.directory.done.wait(), 10)
        running.cancel()
        return self


@pytest.mark.parametrize(
    "said", [Protocol(), Protocol(oldest=1, newest=1, release="0.1.0")], ids=["nothing", "1"]
)
async def test_a_directory_that_speaks_too_low_a_version_is_named_to_whoever_needs_a_higher_one(said):
    watched = Watched(RevocationsResponse(revision=1, protocol=said))
    # Nothing is known before it has answered.
    watched.watch.require_version(2)
    await watched.run()
    watched.watch.require_version(1)
    with pytest.raises(
        UnsupportedVersionError, match="speaks version 1 of the protocol, and version 2 is asked for"
    ):
        watched.watch.require_version(2)


async def test_a_directory_that_was_upgraded_meanwhile_speaks_the_higher_version():
    old, new = RevocationsResponse(revision=1), RevocationsResponse(revision=2, protocol=own())
    watched = await Watched(old, new).run()
    watched.watch.require_version(2)


async def test_nobody_is_trusted_before_the_first_answer():
    watched = Watched()
    assert watched.guard.closed is True
    assert watched.reports == [(False, 0.0)]
    watched = await Watched(answer(1)).run()
    assert watched.guard.closed is False
    assert [fresh for fresh, _ in watched.reports] == [False, True]


async def test_the_first_call_asks_for_an_answer_at_once_and_later_ones_name_what_is_held():
    watched = await Watched(answer(7), answer(9)).run()
    assert [request.held_revision for request in watched.directory.requests] == [0, 7, 9]
    assert {request.hold_ms for request in watched.directory.requests} == {20_000}


async def test_revoked_certificates_reach_the_guard_and_participants_are_remembered():
    watched = await Watched(
        answer(1), answer(2, [MARIE], [CERTIFICATE]), answer(2, [MARIE], [CERTIFICATE])
    ).run()
    assert watched.guard.certificates == {CERTIFICATE}
    assert watched.watch.is_revoked(MARIE)
    assert not watched.watch.is_revoked(PAUL)
    assert watched.revoked == [{MARIE}]


async def test_what_was_revoked_stays_so_when_a_directory_comes_back_from_a_backup():
    watched = await Watched(answer(5, [MARIE], [CERTIFICATE]), answer(3)).run()
    assert watched.watch.is_revoked(MARIE)
    assert watched.guard.certificates == {CERTIFICATE}
    assert watched.directory.requests[-1].held_revision == 3


@pytest.mark.parametrize("silence", [STALE_S - 20, STALE_S + 1, 3 * STALE_S])
async def test_the_service_shuts_after_ten_minutes_without_an_answer_and_opens_with_the_next(silence):
    watched = await Watched(answer(1), silence, answer(2)).run()
    shut = [at for fresh, at in watched.reports[2:] if not fresh]
    if silence < STALE_S:
        assert shut == []
    else:
        first_answer = watched.reports[1][1]
        assert shut == [pytest.approx(first_answer + STALE_S, abs=0.5)]
    assert watched.guard.closed is False


async def test_a_device_that_rests_asks_when_the_rest_is_over_and_holds_no_call():
    rest = Rest()
    watched = Watched(answer(1), answer(2, [MARIE], [CERTIFICATE]), rest=rest)
    running = asyncio.create_task(watched.watch.run())
    async with asyncio.timeout(10):
        while watched.guard.closed:
            await asyncio.sleep(0)
        # By the time that a rest returns, what was revoked meanwhile is known.
        await rest.rest(0.05)
    assert watched.watch.is_revoked(MARIE)
    assert [request.hold_ms for request in watched.directory.requests] == [0, 0]
    running.cancel()


async def test_a_list_that_gets_too_old_while_a_device_rests_is_trusted_no_more_and_it_stays_healthy(
    monkeypatch,
):
    monkeypatch.setattr("coterie.net.revocation.STALE_S", 0.2)
    rest = Rest()
    watched = Watched(answer(1), 1_000.0, rest=rest)
    watched.watch._clock = time.monotonic
    running = asyncio.create_task(watched.watch.run())
    async with asyncio.timeout(10):
        while watched.guard.closed:
            await asyncio.sleep(0)
        resting = asyncio.create_task(rest.rest(1.0))
        while not watched.guard.closed:
            await asyncio.sleep(0.01)
        assert not rest.awake
        assert [fresh for fresh, _ in watched.reports] == [False, True]
        # Nobody answers when it wakes.
        await resting
    assert [fresh for fresh, _ in watched.reports] == [False, True, False]
    running.cancel()
