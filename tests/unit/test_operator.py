"""The operator's end of a federation: what it leaves open at the orchestration server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from coterie.launch.operator_connection import OperatorConnection
from coterie.wire.v1 import operator_pb2 as wire


class Cos:
    """Sends events without end, and knows when a watch has ended."""

    def __init__(self) -> None:
        self.open = 0

    def stub(self, factory: Any) -> Any:
        return SimpleNamespace(WatchRun=self.watch)

    async def watch(
        self, request: wire.WatchRunRequest, timeout: float
    ) -> AsyncIterator[wire.WatchRunResponse]:
        self.open += 1
        try:
            number = request.from_event
            while True:
                yield wire.WatchRunResponse(number=number)
                number += 1
        finally:
            self.open -= 1


async def test_a_watch_that_is_left_ends_its_call_at_once_and_not_some_time_later() -> None:
    cos = Cos()
    async with contextlib.aclosing(OperatorConnection(cos).watch("run")) as events:  # type: ignore[arg-type]
        async for event in events:
            assert cos.open == 1
            if event.number == 3:
                break
    assert cos.open == 0


async def test_a_watch_that_is_left_by_a_failure_ends_its_call_at_once() -> None:
    cos = Cos()

    def fail() -> None:
        raise RuntimeError("a process has ended")

    operator = OperatorConnection(cos, check=fail)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        async for _ in operator.watch("run"):
            pass
    assert cos.open == 0
