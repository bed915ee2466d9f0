"""Clocks that differ: what is tolerated, a time that does not go back, and the differences that calls show."""

import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.crypto import clocks
from coterie.crypto.identity import GRACE_SECONDS
from coterie.net.clocks import CLOCK_KEY, NOTED_S, Skews, ahead_s, explained, stated
from coterie.wire.refusal import ErrorReason, Refusal


@pytest.fixture
def clock(monkeypatch):
    """Let this process's clock be moved; the monotonic one goes on."""
    monkeypatch.setattr(clocks, "_started", time.time() - time.monotonic())
    moved = SimpleNamespace(by=0.0)
    monkeypatch.setattr(
        clocks, "time", SimpleNamespace(**vars(time) | {"time": lambda: time.time() + moved.by})
    )
    return moved


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
