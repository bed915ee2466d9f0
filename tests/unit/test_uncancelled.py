from __future__ import annotations

import asyncio
import gc

import pytest

from coterie.net.uncancelled import completed, to_the_end


async def test_the_result_and_the_failure_of_the_work_are_the_callers() -> None:
    async def answer() -> int:
        return 7

    async def fails() -> None:
        raise ValueError("no")

    assert await completed(answer()) == 7
    with pytest.raises(ValueError, match="no"):
        await completed(fails())


async def test_work_goes_on_to_its_end_when_its_caller_is_cancelled() -> None:
    begun, proceed, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await proceed.wait()
        ended.set()

    caller = asyncio.create_task(completed(work()))
    await begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not ended.is_set()
    del caller
    gc.collect()  # nobody but the module holds the task now
    proceed.set()
    await asyncio.wait_for(ended.wait(), 10)


async def test_a_failure_that_nobody_waits_for_any_more_is_not_reported_as_forgotten() -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    begun, proceed = asyncio.Event(), asyncio.Event()

    async def fails() -> None:
        begun.set()
        await proceed.wait()
        raise ValueError("nobody hears this")

    caller = asyncio.create_task(completed(fails()))
    await begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    proceed.set()
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert reported == []


async def test_what_puts_things_in_order_is_waited_for_however_often_the_caller_is_cancelled() -> None:
    steps: list[str] = []
    begun, proceed = asyncio.Event(), asyncio.Event()

    async def order() -> None:
        begun.set()
        await proceed.wait()
        steps.append("in order")

    async def call() -> None:
        try:
            await to_the_end(order())
        finally:
            steps.append("over")

    caller = asyncio.create_task(call())
    await begun.wait()
    for _ in range(2):
        caller.cancel()
        await asyncio.sleep(0)
        assert steps == []
    proceed.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert steps == ["in order", "over"]


async def test_a_failure_to_put_things_in_order_is_the_callers() -> None:
    async def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await to_the_end(fails())
