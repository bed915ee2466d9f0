"""Computations in a thread, and two things at once, end with the work that waits for them."""

import asyncio
import threading

import pytest

from coterie.studies.halting import Look, at_once, in_thread


def test_results_and_errors_are_those_of_the_computation() -> None:
    def wrong(look: Look) -> None:
        look()
        raise ValueError("no items")

    assert asyncio.run(in_thread(lambda look: 3)) == 3
    with pytest.raises(ValueError, match="no items"):
        asyncio.run(in_thread(wrong))


@pytest.mark.parametrize("cancellations", [1, 2])
def test_a_cancelled_computation_ends_at_its_next_look_before_the_caller_goes_on(cancellations: int) -> None:
    begun, steps = threading.Event(), []

    def train(look: Look) -> None:
        try:
            while True:
                begun.set()
                threading.Event().wait(0.05)
                look()
        finally:
            threading.Event().wait(0.2)
            steps.append("thread ended")

    async def main() -> None:
        task = asyncio.ensure_future(in_thread(train))
        await asyncio.to_thread(begun.wait)
        for _ in range(cancellations):
            task.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await task
        steps.append("caller goes on")

    asyncio.run(main())
    assert steps == ["thread ended", "caller goes on"]


def test_a_computation_that_ends_after_the_cancellation_is_not_taken_for_a_result() -> None:
    begun = threading.Event()

    def short(look: Look) -> int:
        begun.set()
        threading.Event().wait(0.1)
        return 1

    async def main() -> None:
        task = asyncio.ensure_future(in_thread(short))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_of_two_things_at_once_both_are_under_way_and_both_results_are_returned() -> None:
    async def main() -> tuple[str, int]:
        here, there = asyncio.Event(), asyncio.Event()

        async def one() -> str:
            here.set()
            await there.wait()
            return "one"

        async def other() -> int:
            there.set()
            await here.wait()
            return 2

        return await asyncio.wait_for(at_once(one(), other()), 30)

    assert asyncio.run(main()) == ("one", 2)


@pytest.mark.parametrize("fails_first", [True, False])
def test_when_one_of_two_fails_the_other_has_ended_before_its_error_is_raised(fails_first: bool) -> None:
    steps = []

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("no items")

    async def services() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            steps.append("stopped")

    both = (fails(), services()) if fails_first else (services(), fails())

    async def main() -> None:
        with pytest.raises(ValueError, match="no items"):
            await at_once(*both)
        steps.append("raised")

    asyncio.run(main())
    assert steps == ["stopped", "raised"]
