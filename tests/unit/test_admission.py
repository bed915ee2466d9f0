from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.config.base import LimitSettings
from coterie.net.admission import Admission, Limits
from coterie.wire.refusal import Refusal


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def admission(**limits: Any) -> tuple[Admission, Clock]:
    clock = Clock()
    usual: dict[str, Any] = {
        "connections_per_peer": 2,
        "calls": 5,
        "calls_per_peer": 4,
        "calls_per_s": 10.0,
        "burst": 1000,
        "uploads_per_peer": 1,
    }
    return Admission(Limits(**{**usual, **limits}), clock), clock


def limit_of(admitted: Admission, *how: Any, **further: Any) -> tuple[str, float]:
    """Return which limit turns a call away, and when it says to come back."""
    with pytest.raises(Refusal) as refused:
        admitted.enter(*how, **further)
    assert refused.value.name == "OVERLOADED"
    assert refused.value.retry_after_s is not None
    return refused.value.field.removeprefix("limits."), refused.value.retry_after_s


def test_the_settings_are_the_limits() -> None:
    assert LimitSettings().model_dump() == dataclasses.asdict(Limits())


def test_a_caller_has_so_many_calls_at_once_and_others_have_theirs() -> None:
    admitted, _ = admission()
    places = [admitted.enter("one", "a") for _ in range(4)]
    assert limit_of(admitted, "one", "a")[0] == "calls_per_peer"
    admitted.enter("other", "b")
    admitted.leave(places[0])
    admitted.enter("one", "a")


def test_all_together_have_so_many_and_a_health_check_is_answered_all_the_same() -> None:
    admitted, _ = admission()
    for caller in range(5):
        admitted.enter(caller, "a")
    assert limit_of(admitted, "one", "a")[0] == "calls"
    admitted.enter("one", "a", essential=True)


def test_connections_and_uploads_of_a_caller_are_counted_by_what_is_open() -> None:
    admitted, _ = admission()
    first, second = admitted.enter("one", "a"), admitted.enter("one", "b", upload=True)
    assert limit_of(admitted, "one", "c")[0] == "connections_per_peer"
    assert limit_of(admitted, "one", "a", upload=True)[0] == "uploads_per_peer"
    admitted.leave(first)
    admitted.leave(second)
    admitted.enter("one", "c", upload=True)


def test_who_was_too_slow_sends_no_stream_for_a_while_and_may_call() -> None:
    admitted, clock = admission(message_s=7.0)
    place = admitted.enter("one", "a", upload=True)
    refusal = admitted.too_slow(place, "nothing arrived")
    admitted.leave(place)
    assert (refusal.name, refusal.retry_after_s) == ("TOO_SLOW", 7.0)
    clock.now = 3.0
    assert limit_of(admitted, "one", "a", upload=True) == ("message_s", 4.0)
    admitted.enter("one", "a")
    admitted.enter("other", "a", upload=True)
    clock.now = 7.0
    admitted.enter("one", "a", upload=True)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=300), st.integers(1, 50))
def test_in_no_time_more_calls_are_taken_than_the_rate_gives(gaps: list[float], burst: int) -> None:
    admitted, clock = admission(burst=burst)
    taken = 0
    for gap in gaps:
        clock.now += gap
        try:
            admitted.leave(admitted.enter("one", "a"))
            taken += 1
        except Refusal:
            assert admitted.calls == 0
    assert taken <= burst + clock.now * 10.0 + 1e-6
    assert taken + admitted.turned_away["calls_per_s", ""] == len(gaps)


def test_who_comes_back_when_told_is_taken() -> None:
    admitted, clock = admission(burst=1, calls_per_s=0.5)
    admitted.leave(admitted.enter("one", "a"))
    limit, after = limit_of(admitted, "one", "a")
    assert (limit, after) == ("calls_per_s", 2.0)
    clock.now += after
    admitted.enter("one", "a")


def test_callers_who_have_gone_are_forgotten() -> None:
    admitted, clock = admission(burst=2)
    stays = admitted.enter("stays", "a")
    for caller in range(10_000):
        clock.now += 0.2
        admitted.leave(admitted.enter(caller, "a"))
    assert admitted.callers < 3000
    admitted.leave(stays)


def test_a_caller_is_not_forgotten_before_it_may_call_as_often_as_a_new_one() -> None:
    admitted, _ = admission(burst=3)
    for _ in range(3):
        admitted.leave(admitted.enter("one", "a"))
    for caller in range(5000):
        admitted.leave(admitted.enter(caller, "a"))
    assert limit_of(admitted, "one", "a")[0] == "calls_per_s"


def test_who_gives_up_more_than_it_may_have_open_is_cut_off_until_that_is_forgotten() -> None:
    admitted, clock = admission(resets_per_s=2.0)
    admitted.enter("one", "a")
    # Twice what it may have open, and no more.
    assert [admitted.gave_up("one", "client") for _ in range(8)] == [False] * 7 + [True]
    assert admitted.turned_away["resets_per_s", "client"] == 1
    limit, after_s = limit_of(admitted, "one", "b")
    assert (limit, after_s) == ("resets_per_s", 4.0)
    admitted.enter("other", "c")
    clock.now += 3.9
    assert limit_of(admitted, "one", "b")[0] == "resets_per_s"
    clock.now += 0.2
    admitted.enter("one", "b")
    assert not admitted.gave_up("one")


@given(gaps=st.lists(st.floats(0.5, 5.0), max_size=50))
def test_who_gives_up_no_more_in_a_second_than_it_may_is_never_cut_off(gaps: list[float]) -> None:
    admitted, clock = admission(resets_per_s=2.0)
    for gap in gaps:
        clock.now += gap
        assert not admitted.gave_up("one")


def test_nobody_is_remembered_for_ever_who_gave_up_calls() -> None:
    admitted, clock = admission(resets_per_s=2.0)
    for caller in range(3000):
        clock.now += 10
        admitted.leave(admitted.enter(caller, "a"))
        for _ in range(8):
            admitted.gave_up(caller)
    assert admitted.callers < 1100
