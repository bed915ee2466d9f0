from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.net.retry import Retry
from coterie.net.status import details_of
from coterie.wire.refusal import ErrorReason, Refusal

TRANSIENT = [
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
]
FINAL = [code for code in grpc.StatusCode if code not in (*TRANSIENT, grpc.StatusCode.OK)]


class Peer:
    """Fails with the given codes, one after the other, and then answers; keeps time by the pauses alone."""

    def __init__(self, codes: Sequence[grpc.StatusCode], *, call_s: float = 0.0) -> None:
        self.codes = list(codes)
        self.call_s = call_s
        self.attempts = 0
        self.pauses: list[float] = []
        self.now = 0.0

    async def __call__(self) -> str:
        self.attempts += 1
        self.now += self.call_s
        if self.codes:
            raise grpc.aio.AioRpcError(self.codes.pop(0), grpc.aio.Metadata(), grpc.aio.Metadata())
        return "answer"

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def retry(self, limit_s: float, first_s: float = 0.05, longest_s: float = 2.0) -> Retry:
        return Retry(limit_s, first_s, longest_s, sleep=self.sleep, clock=lambda: self.now)


@given(st.lists(st.sampled_from(TRANSIENT), max_size=10))
def test_what_may_pass_is_tried_again_until_it_has_passed(codes: list[grpc.StatusCode]) -> None:
    peer = Peer(codes)
    assert asyncio.run(peer.retry(limit_s=1e6)(peer)) == "answer"
    assert peer.attempts == len(codes) + 1
    assert len(peer.pauses) == len(codes)


@given(st.lists(st.sampled_from(TRANSIENT), max_size=5), st.sampled_from(FINAL))
def test_what_will_not_pass_is_raised_at_once(before: list[grpc.StatusCode], final: grpc.StatusCode) -> None:
    peer = Peer([*before, final])
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        asyncio.run(peer.retry(limit_s=1e6)(peer))
    assert failed.value.code() == final
    assert peer.attempts == len(before) + 1


@given(st.integers(1, 30), st.floats(0.001, 1.0), st.floats(1.0, 10.0))
def test_pauses_double_up_to_the_longest_and_a_part_of_each_is_waited(
    failures: int, first_s: float, longest_s: float
) -> None:
    peer = Peer([grpc.StatusCode.UNAVAILABLE] * failures)
    asyncio.run(peer.retry(1e9, first_s, longest_s)(peer))
    for n, pause in enumerate(peer.pauses):
        assert 0 <= pause <= min(first_s * 2**n, longest_s)


def test_a_status_that_was_lost_on_the_way_is_asked_for_again() -> None:
    metadata = grpc.aio.Metadata()
    failures = [
        grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL, metadata, metadata, details="Internal error from Core"
        ),
        grpc.aio.AioRpcError(grpc.StatusCode.PERMISSION_DENIED, metadata, metadata, details="no"),
    ]

    async def attempt() -> str:
        raise failures.pop(0)

    with pytest.raises(grpc.aio.AioRpcError) as failed:
        asyncio.run(Peer([]).retry(limit_s=1e6)(attempt))
    assert failed.value.code() == grpc.StatusCode.PERMISSION_DENIED


def test_pauses_differ_so_that_clients_do_not_come_back_together() -> None:
    pauses = []
    for _ in range(20):
        peer = Peer([grpc.StatusCode.UNAVAILABLE])
        asyncio.run(peer.retry(1e9)(peer))
        pauses += peer.pauses
    assert len(set(pauses)) > 10


@given(st.floats(0, 50), st.floats(0.01, 5))
def test_no_attempt_starts_after_the_time_is_up_and_the_last_failure_is_raised(
    limit_s: float, call_s: float
) -> None:
    peer = Peer([grpc.StatusCode.UNAVAILABLE] * 100_000, call_s=call_s)
    started: list[float] = []

    async def attempt() -> str:
        started.append(peer.now)
        return await peer()

    with pytest.raises(grpc.aio.AioRpcError) as failed:
        asyncio.run(peer.retry(limit_s)(attempt))
    assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
    # The pause before the last attempt may reach past the limit, by the longest pause at most.
    assert started[-1] <= limit_s + 2.0
    assert peer.now - call_s <= limit_s + 2.0


def test_a_limit_of_zero_is_one_attempt() -> None:
    peer = Peer([grpc.StatusCode.UNAVAILABLE])
    with pytest.raises(grpc.aio.AioRpcError):
        asyncio.run(peer.retry(0.0)(peer))
    assert (peer.attempts, peer.pauses) == (1, [])


def test_other_errors_are_not_the_networks() -> None:
    async def broken() -> None:
        raise ValueError("not a call")

    with pytest.raises(ValueError, match="not a call"):
        asyncio.run(Retry()(broken))


def told(seconds: float) -> grpc.aio.AioRpcError:
    """Return the failure of a call that a peer with too much to do has turned away."""
    refusal = Refusal(ErrorReason.ERROR_REASON_OVERLOADED, "too much", retry_after_s=seconds)
    details = (("grpc-status-details-bin", details_of(refusal)),)
    metadata = grpc.aio.Metadata(*details)
    return grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), metadata)


@given(st.lists(st.floats(0, 59), max_size=10))
def test_who_is_told_when_to_come_back_waits_so_long_and_comes_back(delays: list[float]) -> None:
    peer, failures = Peer([]), [told(seconds) for seconds in delays]

    async def attempt() -> str:
        if failures:
            raise failures.pop(0)
        return "answer"

    assert asyncio.run(peer.retry(limit_s=1e6)(attempt)) == "answer"
    for delay, pause in zip(delays, peer.pauses, strict=True):
        assert delay - 1e-6 <= pause <= delay + 2.0


def test_nobody_waits_for_longer_than_its_own_limit_whatever_it_is_told() -> None:
    peer = Peer([])

    async def attempt() -> str:
        raise told(50.0)

    with pytest.raises(grpc.aio.AioRpcError) as failed:
        asyncio.run(peer.retry(limit_s=10.0)(attempt))
    assert failed.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert peer.pauses == []


def test_a_caller_may_name_further_failures_that_may_pass() -> None:
    full = grpc.StatusCode.RESOURCE_EXHAUSTED
    peer = Peer([full, grpc.StatusCode.UNAVAILABLE, full])
    retry = Retry(1e6, also=lambda error: error.code() == full, sleep=peer.sleep, clock=lambda: peer.now)
    assert asyncio.run(retry(peer)) == "answer"
    peer.codes = [grpc.StatusCode.NOT_FOUND]
    with pytest.raises(grpc.aio.AioRpcError):
        asyncio.run(retry(peer))
