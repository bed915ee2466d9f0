"""The rest of a device between two check-ins: its length by two clocks, and what waits meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from coterie.net.rest import Rest


class Clocks:
    """Two clocks that move when somebody sleeps; a suspended machine's monotonic clock stands still."""

    def __init__(self) -> None:
        self.now, self.wall, self.suspended = 100.0, 5_000.0, False
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.wall += 1_000 if self.suspended else seconds
        self.now += seconds
        await asyncio.sleep(0)


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def rest(clocks: Clocks) -> Rest:
    return Rest(clock=lambda: clocks.now, wall=lambda: clocks.wall, sleep=clocks.sleep)


async def test_a_rest_lasts_as_long_as_was_asked(rest: Rest, clocks: Clocks) -> None:
    await rest.rest(25.0)
    assert sum(clocks.slept) == 25.0
    assert rest.awake


async def test_a_machine_that_was_suspended_notices_that_the_time_has_come(
    rest: Rest, clocks: Clocks
) -> None:
    clocks.suspended = True
    await rest.rest(600.0)
    assert sum(clocks.slept) <= 10.0


async def test_a_clock_that_is_set_back_prolongs_no_rest(rest: Rest, clocks: Clocks) -> None:
    resting = asyncio.create_task(rest.rest(60.0))
    await asyncio.sleep(0)
    clocks.wall -= 3600
    await resting
    assert sum(clocks.slept) == 60.0


async def test_what_comes_first_is_done_before_the_rest_returns_and_background_work_waits(
    rest: Rest,
) -> None:
    done = []

    async def first() -> None:
        # As a call does: others run meanwhile.
        for _ in range(3):
            await asyncio.sleep(0)
        assert not rest.awake
        done.append("first")

    async def background() -> None:
        await rest.over()
        done.append("background")

    rest.first(first)
    resting = asyncio.create_task(rest.rest(30.0))
    await asyncio.sleep(0)
    assert not rest.awake
    waiting = asyncio.create_task(background())
    await resting
    assert done[0] == "first"
    await waiting
    assert done == ["first", "background"]


async def test_a_rest_begins_the_time_awake_anew() -> None:
    rest = Rest()
    waiting = asyncio.create_task(rest.awake_for(0.2))
    await asyncio.sleep(0)
    await rest.rest(0.3)
    assert not waiting.done()
    await asyncio.wait_for(waiting, 20)
