"""Train one owner in DRIFT's published form: fetch rows for some blocks, compute and send their gradients.

An exchange asks for the rows of one update, or of the plan's ``local_updates``, each of ``theta`` blocks; the gradients
go out in the exchange that asks for the next rows.  The COS decides how far an owner has come: it stores each owner's
progress in the transaction that applies an exchange's gradients, all or none.  After a restart of either side the
trainer asks for its progress and goes on with the next block, so every block of a pass is applied exactly once.

A COS that was restored from a backup has lost exchanges that it acknowledged.  The trainer says which, and goes on from
the progress that is left: blocks of lost exchanges of the pass in progress are trained again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import structlog

from coterie.parties.party import Party
from coterie.store import data_owner as store
from coterie.store.engine import Writer
from coterie.systems.drift.mathematics import Block, NamedBlocks, Rows, learned_in_turn, owner_order, wanted
from coterie.systems.drift.published_run import MOST_EXCHANGED
from coterie.systems.drift.settings import DriftSettings
from coterie.telemetry.accounting import Accounting
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.tensor import from_wire, to_wire
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import RoundRef
from coterie_data_owner.drift.exchanges import Exchanges
from coterie_data_owner.drift.learning_owner import LearningOwner

__all__ = ["PassNotAskedError", "RunEndedError", "Trainer"]

_log = structlog.get_logger("coterie.trainer")

_NO_IDS = np.zeros(0, np.uint32)


class RunEndedError(Exception):
    """Raised by `Trainer` when the run ended while an update was on its way."""


class PassNotAskedError(Exception):
    """Raised by `Trainer` when the COS asks for another pass: it was set back, as by a restore from a backup."""


class _OutOfSequenceError(Exception):
    """Raised when the COS refuses an exchange that does not follow those it has; the cause is the refusal."""


class _Asked(NamedTuple):
    """The updates of an exchange, and the ids of all their rows, ascending."""

    updates: list[NamedBlocks]
    users: np.ndarray
    items: np.ndarray


@dataclass(frozen=True)
class _Computed:
    """Gradients that are not sent yet, and what they are of: they are computed again when refused as stale."""

    messages: Sequence[wire.Gradient]
    asked: _Asked


class Trainer:
    """Trains one owner: on blocks as they complete (`intake`), then a pass over all blocks per `epoch`.

    Parameters
    ----------
    owner : LearningOwner
        The owner whose blocks are trained.
    party : Party
        To the COS.
    exchanges : Exchanges
        Carries the exchanges of this owner and of the others in this process.
    writer : Writer
        The store's writer.
    accounting : Accounting
        Counts CPU time by activity.
    flush_due : callable
        Tells whether all records of the owner's first epoch have been delivered, so that trailing blocks may be closed.
    """

    def __init__(
        self,
        owner: LearningOwner,
        party: Party,
        exchanges: Exchanges,
        writer: Writer,
        accounting: Accounting,
        flush_due: Callable[[], bool],
    ) -> None:
        self._owner = owner
        self._party = party
        self._exchanges = exchanges
        self._settings = DriftSettings.from_plan(party.plan)
        self._writer = writer
        self._accounting = accounting
        self._flush_due = flush_due
        # Blocks of an exchange.
        self._most = self._settings.theta * self._settings.local_updates
        self._waiting: _Computed | None = None
        self._superseded = False

    def supersede(self) -> None:
        """Stop at the next update: the run went on without this owner, or has ended."""
        self._superseded = True
        self._owner.wake()

    async def intake(self, epoch: int) -> None:
        """Train on blocks as they complete, until all records are delivered and all blocks trained.

        Raises
        ------
        RunEndedError
            The run ended before.
        PassNotAskedError
            The COS asks for another pass by now.
        """
        await self._pass(epoch, self._take_blocks)

    async def _take_blocks(self, epoch: int, position: int) -> None:
        theta = self._party.plan.theta
        while not self._superseded:
            # Clear before looking, so that a change in between is not missed.
            self._owner.changed.clear()
            if self._flush_due() and not self._owner.flushed:
                await self._owner.flush(self._writer)
            # Negative at an owner restored from a backup that has fewer blocks than it trained before.
            available = len(self._owner.blocks) - position
            if not self._owner.flushed:
                available -= available % theta
            if available > 0:
                upto = position + min(available, self._most)
                position += await self._update(epoch, position, self._owner.blocks[position:upto])
            else:
                await self._send_waiting()
                if self._owner.flushed:
                    break
                await self._owner.changed.wait()
        await self._finish(epoch, position)

    async def epoch(self, epoch: int) -> None:
        """Pass once over the stored blocks, in the seeded order of this epoch.

        Raises
        ------
        RunEndedError
            The run ended before.
        PassNotAskedError
            The COS asks for another pass by now.
        """
        owner, plan = self._owner, self._party.plan
        if self._flush_due() and not owner.flushed:
            # Records came after the owner's first epoch: from a late host, or while the owner was away.
            await owner.flush(self._writer)
        count = await self._writer.run_when_possible(
            lambda connection: store.begin_pass(connection, owner.id, plan.run_id, epoch, len(owner.blocks))
        )
        order = owner_order(plan.seed, owner.slot, epoch, count)

        async def over_blocks(epoch: int, position: int) -> None:
            while position < count and not self._superseded:
                upto = position + self._most
                # Plain integers find an element of a list in half the time of those of an array.
                blocks = [owner.blocks[index] for index in order[position:upto].tolist()]
                position += await self._update(epoch, position, blocks)
            await self._finish(epoch, position)

        await self._pass(epoch, over_blocks)

    async def _pass(self, epoch: int, train: Callable[[int, int], Awaitable[None]]) -> None:
        """Train from the epoch's first block that is not applied, again after the COS was set back within the epoch."""
        position = await self._resume(epoch)
        while True:
            try:
                await train(epoch, position)
                return
            except _OutOfSequenceError as refused:
                known = self._owner.sequence
                position = await self._resume(epoch)
                if self._owner.sequence >= known:
                    # Nothing was set back: another process speaks for this owner.
                    raise refused.__cause__ or refused from None

    async def _resume(self, epoch: int) -> int:
        """Ask the COS for this owner's progress; return the epoch's first block that is not applied.

        Raises
        ------
        PassNotAskedError
            When a later pass has begun.
        """
        self._waiting, known = None, self._owner.sequence
        progress = (await self._exchange(_NO_IDS, _NO_IDS)).progress
        if progress.sequence < known:
            await self._say_lost(progress.sequence + 1, known)
        if progress.epoch > epoch:
            raise PassNotAskedError
        return progress.blocks if progress.epoch == epoch else 0

    async def _say_lost(self, first: int, last: int) -> None:
        """Tell the COS which exchanges it acknowledged and has no more."""
        _log.warning(
            "the COS has lost exchanges, as after a restore", owner=self._owner.name, first=first, last=last
        )
        request = wire.ExchangeRequest(
            run_id=self._party.plan.run_id,
            owner=self._owner.slot,
            sequence=last,
            users=to_wire(_NO_IDS),
            items=to_wire(_NO_IDS),
        )
        try:
            await self._exchanges.exchange(request)
        except Refusal as refusal:
            # By a COS of an earlier release.
            if refusal.reason != ErrorReason.ERROR_REASON_INVALID_FIELD:
                raise

    async def _update(self, epoch: int, position: int, blocks: Sequence[Block]) -> int:
        """Send what waits, and compute the gradients of the next blocks; return of how many.

        They are all of ``blocks``, or fewer where an exchange would be too large.
        """
        asked = self._asked(epoch, blocks)
        await self._compute(epoch, position, asked)
        return sum(len(update.blocks) for update in asked.updates)

    async def _compute(self, epoch: int, position: int, asked: _Asked) -> None:
        """Send what waits, and compute the gradients of an exchange, which wait then."""
        updates = asked.updates
        version, rows = await self._rows(asked.users, asked.items)
        with self._accounting.activity("gradients", sum(len(update.blocks) for update in updates)):
            found = learned_in_turn(updates, rows, self._settings)
        messages = []
        for update, (of, _, _) in zip(found, updates, strict=True):
            messages.append(
                wire.Gradient(
                    rows_version=version,
                    epoch=epoch,
                    first_block=position,
                    blocks=len(of),
                    interactions=sum(len(block.negatives) + len(block.positives) for block in of),
                    loss=update.loss,
                    users=to_wire(update.users.astype(np.uint32)),
                    items=to_wire(update.items.astype(np.uint32)),
                    user_gradient=to_wire(update.user_gradient),
                    item_gradient=to_wire(update.item_gradient),
                )
            )
            position += len(of)
        self._waiting = _Computed(messages, asked)

    def _asked(self, epoch: int, blocks: Sequence[Block]) -> _Asked:
        """Divide blocks into the updates of an exchange: as many as fit into a message, at least one."""
        theta, updates, size = self._settings.theta, list[NamedBlocks](), 0
        for at in range(0, len(blocks), theta):
            drawn = [self._owner.draw(block, epoch) for block in blocks[at : at + theta]]
            one = NamedBlocks(drawn, *wanted(drawn))
            # Ids and rows asked for, and as much for the gradient, 4 bytes a value.
            size += 8 * (len(one.users) + len(one.items)) * (1 + self._settings.dim)
            if updates and size > MOST_EXCHANGED:
                break
            updates.append(one)
        if len(updates) == 1:
            return _Asked(updates, updates[0].users, updates[0].items)
        users = np.unique(np.concatenate([one.users for one in updates]))
        items = np.unique(np.concatenate([one.items for one in updates]))
        return _Asked(updates, users, items)

    async def _rows(self, users: np.ndarray, items: np.ndarray) -> tuple[int, Rows]:
        """Send the waiting gradients, if any, and fetch the rows for the next ones."""
        response = await self._exchange(users, items)
        dim = self._party.plan.dim
        return response.version, Rows(
            users=users,
            items=items,
            user_rows=from_wire(response.user_rows, np.float32, (len(users), dim), field="user_rows"),
            item_rows=from_wire(response.item_rows, np.float32, (len(items), dim), field="item_rows"),
        )

    async def _send_waiting(self) -> None:
        if self._waiting is not None:
            await self._exchange(_NO_IDS, _NO_IDS)

    async def _exchange(self, users: np.ndarray, items: np.ndarray) -> wire.ExchangeResponse:
        while True:
            waiting = self._waiting
            request = wire.ExchangeRequest(
                run_id=self._party.plan.run_id,
                owner=self._owner.slot,
                sequence=self._owner.sequence + 1 if waiting else 0,
                users=to_wire(users.astype(np.uint32)),
                items=to_wire(items.astype(np.uint32)),
            )
            if waiting is not None:
                request.gradient.CopyFrom(waiting.messages[0])
                request.further.extend(waiting.messages[1:])
            try:
                response = await self._exchanges.exchange(request)
            except Refusal as refusal:
                if refusal.reason == ErrorReason.ERROR_REASON_WRONG_STATE:
                    raise RunEndedError from refusal
                if waiting is not None and refusal.reason == ErrorReason.ERROR_REASON_UNKNOWN_ROUND:
                    raise PassNotAskedError from refusal
                if waiting is not None and refusal.reason == ErrorReason.ERROR_REASON_SEQUENCE_MISMATCH:
                    raise _OutOfSequenceError from refusal
                if refusal.reason != ErrorReason.ERROR_REASON_STALE or waiting is None:
                    raise
                await self._recompute(waiting)
                continue
            self._waiting = None
            self._owner.sequence = response.progress.sequence
            return response

    async def _recompute(self, stale: _Computed) -> None:
        """Compute gradients that were refused as stale again, on fresh rows.

        They are of the same blocks, with the unseen items that were drawn then: records that came since would change
        the draw, and with it how many blocks fit into an exchange.
        """
        self._waiting = None
        first = stale.messages[0]
        await self._compute(first.epoch, first.first_block, stale.asked)

    async def _finish(self, epoch: int, blocks: int) -> None:
        await self._send_waiting()
        if not self._superseded:
            await self._report(epoch, blocks)

    async def _report(self, epoch: int, blocks: int) -> None:
        run_id = self._party.plan.run_id
        _log.info("pass done", owner=self._owner.name, epoch=epoch, blocks=blocks)
        try:
            await self._party.submit(
                wire.SubmitKind.SUBMIT_KIND_EPOCH_DONE,
                RoundRef(run_id=run_id, round=epoch),
                wire.EpochStatus(blocks=blocks, dropped=self._owner.dropped),
                slots=[self._owner.slot],
            )
        except Refusal as refusal:
            if refusal.reason != ErrorReason.ERROR_REASON_UNKNOWN_ROUND:
                raise
            raise PassNotAskedError from refusal
