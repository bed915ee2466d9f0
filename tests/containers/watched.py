"""A run in containers, watched from outside as its operator would."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from coterie.config.base import Peer
from coterie.config.load import load
from coterie.config.operate import OperateSettings
from coterie.launch.operator_connection import OperatorConnection
from coterie.launch.order import Order
from coterie.wire.v1 import operator_pb2 as wire

from .engine import WAIT_S

_PAUSE_S = 0.01
_ROUNDS_AIMED_BY = 8


class Watched:
    """Follows a run by the operator's certificate, and remembers its rounds and evaluations.

    Parameters
    ----------
    folder : Path
        The operator's, as `coterie bootstrap` made it, with its certificate.
    cos : str
        Address of the orchestration server.
    """

    def __init__(self, folder: Path, cos: str) -> None:
        self._settings = load(OperateSettings, folder / "config.toml", relative_to=folder).settings
        self._cos = Peer(address=f"{cos}:7443", name=self._settings.cos.name)
        self.order = Order.load(self._settings.order)
        self.rounds: list[wire.RoundEvent] = []
        self.ended_at: list[float] = []
        """When each of them ended, seconds since 1970 by this machine."""
        self.measured: dict[int, dict[str, float]] = {}
        """Metrics by pass."""
        self.progress = wire.RoundProgress()
        self.state = wire.RunState()

    async def __aenter__(self) -> Self:
        """Begin."""
        self._operator = await OperatorConnection.enrolled(self._settings, self._cos)
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        """End."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._operator.close()

    async def _follow(self) -> None:
        async for event in self._operator.watch(self.order.run_id):
            self.state = event.state
            match event.WhichOneof("event"):
                case "progress":
                    self.progress = event.progress.round
                case "round":
                    self.rounds.append(event.round)
                    self.ended_at.append(event.time_ms / 1000.0)
                case "metrics":
                    one = event.metrics
                    self.measured[one.epoch] = dict(zip(one.names, one.means, strict=True))

    async def until(self, wanted: Callable[[], object], what: str, seconds: float = WAIT_S) -> None:
        """Wait for something to come true of the run."""
        deadline = time.monotonic() + seconds
        while not wanted():
            if self._task.done():
                self._task.result()
                raise AssertionError(f"the run ended before {what}: {self.state.reason or 'as planned'}")
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{what}: not within {seconds:.0f} s; round in progress: {self.progress}; "
                    f"last round that ended: {self.rounds[-1:]}"
                )
            await asyncio.sleep(_PAUSE_S)

    async def aim(self, phase: str) -> None:
        """Wait for the middle of a phase of the next round of training, as far as the last rounds tell when it will be.

        What an operator is told of a round in progress comes too seldom to see a phase in it.
        """
        seen = len(self.rounds)
        await self.until(lambda: len(self.rounds) > seen, "the end of a round")
        before, lengths = [], []
        for at, one in list(enumerate(self.rounds))[-_ROUNDS_AIMED_BY:]:
            if not at or one.reason or one.purpose != "train":
                continue
            between = self._began(at) - self.ended_at[at - 1]
            spent = dict(zip(one.phases, one.seconds, strict=True))
            names = list(spent)
            earlier = names[: names.index(phase)] if phase in names else []
            before.append(between + sum(spent[name] for name in earlier))
            lengths.append(spent.get(phase, 0.0))
        if before:
            middle = statistics.median(before) + statistics.median(lengths) / 2
            await asyncio.sleep(max(0.0, self.ended_at[-1] + middle - time.time()))

    def _began(self, at: int) -> float:
        """Return when a round began, seconds since 1970."""
        return self.ended_at[at] - sum(self.rounds[at].seconds)

    def applied(self) -> int:
        """Return how many rounds of training were applied."""
        return sum(one.purpose == "train" and not one.reason for one in self.rounds)

    def applied_after(self, moment: float) -> float:
        """Return when the first round ended that was applied after a moment, seconds since 1970."""
        return next(
            at
            for one, at in zip(self.rounds, self.ended_at, strict=True)
            if at > moment and one.purpose == "train" and not one.reason
        )

    def abandoned(self) -> int:
        """Return how many rounds were abandoned."""
        return sum(bool(one.reason) for one in self.rounds)

    def phase_at(self, moment: float) -> str:
        """Return the phase of a round in which a moment was, as the rounds that ended tell; empty between rounds."""
        for at, (one, end) in enumerate(zip(self.rounds, self.ended_at, strict=True)):
            begin = self._began(at)
            if begin <= moment <= end:
                for phase, seconds in zip(one.phases, one.seconds, strict=True):
                    begin += seconds
                    if moment <= begin:
                        return str(phase)
        return ""
