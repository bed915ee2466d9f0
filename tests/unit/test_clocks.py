"""Clocks that differ: what is tolerated, a time that does not go back, and the differences that calls show."""

import time
from types import SimpleNamespace

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from coterie.crypto import clocks
from coterie.crypto.identity import GRACE_SECONDS
from coterie.net import clocks as net_clocks
from coterie.net.clocks import CLOCK_KEY, NOTED_S, Skews, ahead_s, bridge, explained, stated
from coterie.net.meter import Meter
from coterie.net.server import Guard
from coterie.process.runtime import _clock_skew
from coterie.wire.refusal import ErrorReason, Refusal


@pytest.fixture
def clock(monkeypatch):
    """Let this process's clock be moved by some seconds, and time pass; the clock is one that another agreed with."""
    moved = SimpleNamespace(by=0.0, passed=0.0)
    monkeypatch.setattr(
        clocks,
        "time",
        SimpleNamespace(
            **vars(time)
            | {
                "time": lambda: time.time() + moved.by + moved.passed,
                "monotonic": lambda: time.monotonic() + moved.passed,
            }
        ),
    )
    monkeypatch.setattr(clocks, "_held", clocks._set(time.time(), time.monotonic()))
    monkeypatch.setattr(net_clocks, "_bridged", False)
    clocks.compared(0.0)
    return moved


@pytest.fixture
def begun(clock):
    """Let the clock be that of a process that has just begun, as `clock`."""
    clocks._held = clocks._set(time.time(), time.monotonic())
    return clock


def test_two_parties_that_are_both_off_still_open_what_they_seal():
    assert clocks.CLOCK_SKEW_S == 600
    assert 2 * clocks.CLOCK_SKEW_S < GRACE_SECONDS
    assert clocks.BACKDATED_S > clocks.CLOCK_SKEW_S


@pytest.mark.parametrize("by", [-20, -600, -3600, -86_300])
def test_the_time_does_not_follow_a_clock_that_jumps_back(clock, by):
    before = clocks.now_s()
    clock.by = by
    assert abs(clocks.now_s() - before) < 5
    assert abs(clocks.now() - before) < 6


def test_small_corrections_are_followed_one_after_the_other_and_a_jump_after_them_is_not(clock):
    for by in (-4, -8, -12):
        clock.by = by
        assert abs(clocks.now_s() - time.time() - by) < 2
    clock.by = -600
    assert abs(clocks.now_s() - time.time() + 12) < 2
    clock.by = 0
    clocks.now_s()


@pytest.mark.parametrize("by", [600, 86_400, -2 * 86_400])
def test_the_time_follows_a_clock_that_was_slow_or_far_too_fast(clock, by):
    clock.by = by
    assert abs(clocks.now_s() - time.time() - by) < 5


@pytest.mark.parametrize("differing", [[], [-3600.0], [-3600.0, -3500.0]])
def test_a_clock_that_is_fast_at_the_start_and_then_set_right_is_followed(begun, differing):
    for ahead in differing:
        clocks.compared(ahead)
    begun.passed = clocks.SETTLED_S - 5 if not differing else 1000.0
    begun.by = -3600
    assert abs(clocks.now_s() - time.time() - begun.passed + 3600) < 2
    assert clocks.bridged_s() == 0


def test_a_clock_that_no_other_was_compared_with_counts_as_right_after_a_while(begun):
    begun.passed = clocks.SETTLED_S
    begun.by = -3600
    assert abs(clocks.now_s() - time.time() - begun.passed) < 2


def test_a_clock_that_agreed_stays_right_when_another_differs(clock):
    clocks.compared(-3600.0)
    clock.by = -3600
    assert abs(clocks.now_s() - time.time()) < 2


def test_a_clock_that_jumps_forward_and_back_again_is_followed(clock):
    clock.by = 3600
    clocks.now_s()
    clock.by = 0
    assert abs(clocks.now_s() - time.time()) < 2


def test_a_clock_that_was_set_forward_and_agreed_then_is_held_to(clock):
    clock.by = 3600
    clocks.now_s()
    clocks.compared(1.0)
    clock.by = 0
    assert abs(clocks.now_s() - time.time() - 3600) < 2


def test_a_bridge_is_stated_told_once_and_ends_when_the_clock_comes_back(clock):
    clock.by = -600
    with structlog.testing.capture_logs() as said:
        _, stated_ms = stated()
        stated()
        assert abs(int(stated_ms) / 1e3 - time.time()) < 2
        assert abs(bridge() - 600) < 2
    (warned,) = said
    assert warned["log_level"] == "warning"
    assert "restart this service" in warned["hint"]
    clock.by = 0
    with structlog.testing.capture_logs() as said:
        assert bridge() == 0
    assert [one["log_level"] for one in said] == ["info"]


def test_a_small_bridge_is_not_told(clock):
    clock.by = -20
    with structlog.testing.capture_logs() as said:
        assert abs(bridge() - 20) < 2
    assert not said


def test_a_bridge_is_exported_under_the_name_of_the_service(clock):
    guard = Guard(Meter())
    guard.skews.heard("client/fast", 90.0)
    metric = _clock_skew(guard, "cos/cos")
    assert metric.read() == {("client/fast",): 90.0}
    clock.by = -600
    found = metric.read()
    assert abs(found.pop(("cos/cos",)) + 600) < 2
    assert found == {("client/fast",): 90.0}


@pytest.mark.parametrize("seconds", [-1e30, 1e30, float("inf"), 1 << 62])
def test_a_moment_beyond_every_calendar_is_a_number(seconds):
    assert clocks.moment(seconds).endswith("after 1970")


def test_a_call_shows_how_far_its_clock_is_ahead():
    assert abs(ahead_s([("other", b"x"), stated()])) < 5
    assert abs(ahead_s([(CLOCK_KEY, str(int((time.time() + 700) * 1e3)))]) - 700) < 5
    assert ahead_s(None) is None
    assert ahead_s([("other", "1")]) is None


@given(st.one_of(st.text(), st.binary()))
def test_whatever_a_caller_writes_for_its_clock_is_a_number_or_nothing(value):
    found = ahead_s([(CLOCK_KEY, value)])
    assert found is None or isinstance(found, float)


def test_a_caller_that_is_behind_counts_after_two_calls_and_is_forgotten_with_the_right_clock():
    skews = Skews()
    skews.heard("client/slow", -700.0)
    assert skews.worst() == {}
    skews.heard("client/slow", -650.0)
    skews.heard("client/fast", 90.0)
    skews.heard("client/right", NOTED_S)
    assert skews.worst() == {("client/slow",): -650.0, ("client/fast",): 90.0}
    skews.heard("client/slow", -1.0)
    skews.heard("client/fast", 0.0)
    assert skews.worst() == {}


def test_a_call_that_waited_once_on_its_way_is_no_wrong_clock():
    skews = Skews()
    for _ in range(3):
        skews.heard("client/one", -90.0)
        skews.heard("client/one", -0.2)
    assert skews.worst() == {}


def test_a_party_that_changes_its_clock_at_each_call_is_logged_once_a_minute(monkeypatch):
    skews, passed = Skews(), SimpleNamespace(s=0.0)
    monkeypatch.setattr(net_clocks, "time", SimpleNamespace(monotonic=lambda: passed.s))
    with structlog.testing.capture_logs() as said:
        for number in range(600):
            passed.s = number / 2
            skews.heard("client/changing", 90.0 + 90.0 * number % 1000 if number % 3 else 0.0)
        assert 4 <= len(said) <= 5
        # What the log said last comes true in the end.
        passed.s += net_clocks.QUIET_S
        skews.heard("client/changing", 0.0)
        passed.s += net_clocks.QUIET_S
        skews.heard("client/changing", 0.0)
    assert said[-1]["event"] == "the clock of a party is right again"
    assert not skews._said


def test_the_ten_largest_differences_are_shown():
    skews = Skews()
    for number in range(30):
        skews.heard(f"client/{number}", 100.0 + number)
    assert list(skews.worst().values()) == [129.0 - one for one in range(10)]


def test_a_refusal_names_the_party_and_its_clock_where_that_may_be_the_cause():
    refusal = Refusal(
        ErrorReason.ERROR_REASON_BAD_SIGNATURE, "it is over", field="a", expected="b", retry_after_s=2
    )
    told = explained(refusal, "client/host-1", -86_400.0)
    assert told.message == (
        "it is over; the clock of client/host-1 is 86400 s behind that of this service, 600 s are tolerated: set one "
        "of the two"
    )
    assert (told.reason, told.field, told.expected, told.retry_after_s) == (refusal.reason, "a", "b", 2)


@pytest.mark.parametrize(
    ("reason", "ahead"),
    [
        (ErrorReason.ERROR_REASON_BAD_SIGNATURE, None),
        (ErrorReason.ERROR_REASON_BAD_SIGNATURE, 600.0),
        (ErrorReason.ERROR_REASON_TOO_LARGE, 86_400.0),
    ],
)
def test_other_refusals_stay_as_they_are(reason, ahead):
    refusal = Refusal(reason, "no")
    assert explained(refusal, "client/host-1", ahead) is refusal
