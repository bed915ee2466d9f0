"""The rest of a device that is started again: it goes on, within bounds, unless its person has changed something."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from coterie.process.kept_rest import LONGEST_RESUMED_S, KeptRest
from coterie.process.next_wake import NEXT_WAKE, NextWake, write_next_wake
from coterie.rounds.stance import STANCE


class Clocks:
    """Two clocks that move when somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.wall = 100.0, 5_000.0

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds
        await asyncio.sleep(0)


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def start(tmp_path: Path, clocks: Clocks) -> Callable[..., KeptRest]:
    """Return a function that makes the rest of a new process."""

    def make(run: str = "run", configured: str = "{}") -> KeptRest:
        return KeptRest(
            tmp_path,
            run,
            configured,
            clock=lambda: clocks.now,
            wall=lambda: clocks.wall,
            sleep=clocks.sleep,
        )

    return make


async def killed(rest: KeptRest, clocks: Clocks, seconds: float, after: float) -> None:
    """Let a process rest, which ends after so many seconds."""
    until = clocks.wall + after
    resting = asyncio.create_task(rest.rest(seconds))
    while clocks.wall < until:
        await asyncio.sleep(0)
    resting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await resting


async def went_on(rest: KeptRest, clocks: Clocks) -> float:
    """Return for how long a process that was just started rests, seconds."""
    before = clocks.wall
    await rest.go_on()
    return clocks.wall - before


async def test_a_process_that_is_started_again_rests_until_the_time_at_which_it_was_told_to_come(
    start: Callable[..., KeptRest], clocks: Clocks
) -> None:
    await killed(start(), clocks, 200.0, 50.0)
    assert await went_on(start(), clocks) == pytest.approx(150.0)
    # It was late by a whole rest.
    clocks.wall += 200.0
    assert await went_on(start(), clocks) == 0.0


async def test_devices_that_are_started_at_once_come_within_minutes_in_the_order_of_their_times(
    start: Callable[..., KeptRest], clocks: Clocks
) -> None:
    waits = []
    for after in (10.0, 40_000.0, 80_000.0):
        await killed(start(), clocks, 86_400.0, after)
        waits.append(await went_on(start(), clocks))
    assert LONGEST_RESUMED_S > waits[0] > 1.5 * waits[1] > 0
    assert waits[1] > 5 * waits[2] > 0


async def test_a_rest_that_is_over_is_not_gone_on_with(
    start: Callable[..., KeptRest], tmp_path: Path
) -> None:
    await start().rest(30.0)
    assert not (tmp_path / NEXT_WAKE).exists()


async def test_a_process_of_another_run_or_with_other_settings_or_another_wish_of_its_person_does_not_rest(
    start: Callable[..., KeptRest], clocks: Clocks, tmp_path: Path
) -> None:
    await killed(start(), clocks, 200.0, 10.0)
    assert await went_on(start(run="another"), clocks) == 0.0
    assert await went_on(start(configured='{"consent": {}}'), clocks) == 0.0
    kept = (tmp_path / STANCE).with_name(STANCE)
    kept.write_text("{}")
    assert await went_on(start(), clocks) == 0.0
    kept.unlink()
    clocks.wall -= 3_600.0
    assert await went_on(start(), clocks) == 0.0
    clocks.wall += 3_600.0
    assert await went_on(start(), clocks) > 0.0


async def test_a_process_that_stays_begins_although_the_run_needs_its_wakes_no_more(
    start: Callable[..., KeptRest], clocks: Clocks, tmp_path: Path
) -> None:
    write_next_wake(tmp_path, NextWake("run", clocks.wall, clocks.wall, "the run has ended", start()._seen))
    assert await went_on(start(), clocks) == 0.0


async def test_a_device_that_cannot_keep_its_time_rests_all_the_same(
    start: Callable[..., KeptRest], clocks: Clocks, tmp_path: Path
) -> None:
    tmp_path.rmdir()
    before = clocks.wall
    await start().rest(30.0)
    assert clocks.wall - before == 30.0
    # Nor where it can remove nothing there.
    tmp_path.touch()
    await start().rest(30.0)
    assert clocks.wall - before == 60.0
