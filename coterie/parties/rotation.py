"""When a run's key is replaced: after so many rounds, and the old secrets go once nobody needs them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from coterie.crypto.custody import HeldKey
from coterie.errors import CoterieError
from coterie.parties.custody import Custody
from coterie.secure_sum.plan import SumPlan

__all__ = ["Rotation"]

_log = structlog.get_logger("coterie.key_holder")


class Rotation:
    """Of one holder.

    Parameters
    ----------
    custody : Custody
    every : int
        Rounds under one key; 0 for any number.
    begins : callable
        Whether this holder is the one that begins, as things stand.
    keeps : bool, optional
        Whether old secrets stay although no round needs them.
    """

    def __init__(
        self, custody: Custody, every: int, begins: Callable[[], bool], *, keeps: bool = False
    ) -> None:
        self._custody = custody
        self._every = every
        self._begins = begins
        self._keeps = keeps
        # The key of the rounds seen last, and the first of these.
        self._since: tuple[bytes, int] = (b"", 0)
        # Epoch of its key, and below which epoch nothing is held any more.
        self._serves = self._cleared = 0
        self._rotating: asyncio.Task[None] | None = None

    def serving(self, plan: SumPlan, held: HeldKey) -> None:
        """Take note of a round and of what is held of its key; replace that key when it has served for long enough."""
        if plan.key_id != self._since[0]:
            self._since = plan.key_id, plan.round
        self._serves = held.epoch
        self.clear()
        served = plan.round - self._since[1] + 1
        if self._every and served >= self._every and self._rotating is None and self._begins():
            self._rotating = asyncio.create_task(self._rotate())

    def clear(self) -> None:
        """Destroy what no round needs any more; to be called when this holder knows of another complete key, too."""
        if self._keeps:
            return
        current = self._custody.current
        # Rounds follow each other: those under the keys before are over.
        over = min(self._serves, current.record.epoch) if current is not None else 0
        if over > self._cleared:
            for epoch in self._custody.destroy_below(over):
                _log.info("an old key is destroyed", epoch=epoch)
            self._cleared = over

    async def _rotate(self) -> None:
        try:
            holding = await self._custody.rotate()
            _log.info("another key", epoch=holding.record.epoch)
        except CoterieError as error:
            # It is tried again with the next round.
            _log.warning("no other key", error=error.message)
        finally:
            self._rotating = None
