"""Rotation of a run's key at a holder: replaces the key after a number of rounds, and destroys old secrets."""

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
    """Decides when a holder makes a new key, and when it destroys the secrets of old ones.

    Parameters
    ----------
    custody : Custody
    every : int
        Rounds under one key; 0 for any number.
    begins : callable
        Returns whether this holder is now the one that makes new keys.
    keeps : bool, optional
        Whether old secrets are kept although no round needs them.
    """

    def __init__(
        self, custody: Custody, every: int, begins: Callable[[], bool], *, keeps: bool = False
    ) -> None:
        self._custody = custody
        self._every = every
        self._begins = begins
        self._keeps = keeps
        # Id of the key of the last round seen, and the first round under this key.
        self._since: tuple[bytes, int] = (b"", 0)
        # Epoch of the last round's key, and the epoch below which all secrets are destroyed.
        self._serves = self._cleared = 0
        self._rotating: asyncio.Task[None] | None = None

    def serving(self, plan: SumPlan, held: HeldKey) -> None:
        """Note a round and the secrets of its key; start a rotation when the key has served for enough rounds."""
        if plan.key_id != self._since[0]:
            self._since = plan.key_id, plan.round
        self._serves = held.epoch
        self.clear()
        served = plan.round - self._since[1] + 1
        if self._every and served >= self._every and self._is_newest(held) and self._begins():
            self._rotating = asyncio.create_task(self._rotate())

    def _is_newest(self, held: HeldKey) -> bool:
        """Return whether no newer key is made or was made.

        A round that the server planned before it took the newer key starts no second rotation: contributors
        would then find the second key published while the server still plans under the first.
        """
        current = self._custody.current
        return self._rotating is None and (current is None or current.record.epoch <= held.epoch)

    def clear(self) -> None:
        """Destroy secrets that no round needs any more; call it also when this holder has a new complete key."""
        if self._keeps:
            return
        current = self._custody.current
        # Rounds follow each other, so rounds under lower epochs are over.
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
            # The next round tries again.
            _log.warning("no other key", error=error.message)
        finally:
            self._rotating = None
