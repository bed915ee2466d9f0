from __future__ import annotations

import asyncio

import pytest

from coterie.net.waits import Waits

AT_MOST_S = 30.0


async def test_a_wait_that_takes_too_long_ends_in_a_timeout() -> None:
    patience = Waits(0.02)
    with pytest.raises(TimeoutError), patience:
        await asyncio.wait_for(asyncio.Event().wait(), AT_MOST_S)
    assert patience.waited_s >= 0.02


async def test_the_timer_of_an_earlier_wait_neither_ends_a_later_one_nor_lets_it_go_on_for_ever() -> None:
    patience = Waits(0.4)
    loop = asyncio.get_running_loop()
    with patience:
        await asyncio.sleep(0)
    # The timer of the first wait rings during the second.
    await asyncio.sleep(0.2)
    began = loop.time()
    with pytest.raises(TimeoutError), patience:
        await asyncio.wait_for(asyncio.Event().wait(), AT_MOST_S)
    assert loop.time() - began >= 0.39


async def test_time_between_waits_does_not_count() -> None:
    patience = Waits(0.05)
    with patience:
        await asyncio.sleep(0)
    await asyncio.sleep(0.2)
    waited = patience.waited_s
    assert waited < 0.2
    with pytest.raises(TimeoutError), patience:
        await asyncio.wait_for(asyncio.Event().wait(), AT_MOST_S)


async def test_a_cancelled_wait_is_cancelled_and_not_late() -> None:
    begun = asyncio.Event()

    async def waits() -> None:
        with Waits(AT_MOST_S):
            begun.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(waits())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_failure_in_a_wait_is_the_callers() -> None:
    patience = Waits(AT_MOST_S)
    with pytest.raises(ValueError, match="no"), patience:
        raise ValueError("no")
    with patience:
        await asyncio.sleep(0)


async def test_a_call_that_is_over_has_no_timer() -> None:
    patience = Waits(AT_MOST_S)
    with patience:
        await asyncio.sleep(0)
    assert patience._timer is not None
    patience.close()
    assert patience._timer is None
