"""Deliver a host's outboxes to data owners directly, sealed user by user, never through the COS."""

from __future__ import annotations

import asyncio
import itertools
import time
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import structlog

from coterie.crypto.identity import Bundle, Identity, PublicPrekey
from coterie.crypto.sealed import (
    encode_records,
)
from coterie.errors import PeerError
from coterie.net.retry import Retry
from coterie.net.status import from_rpc_error
from coterie.process.runtime import Runtime
from coterie.store import client as store
from coterie.store.engine import Writer
from coterie.telemetry.seldom import Seldom
from coterie.wire.refusal import LATER, ErrorReason, Refusal, reason_name
from coterie.wire.v1 import data_owner_pb2 as wire
from coterie.wire.v1.data_owner_pb2_grpc import DataOwnerStub
from coterie.wire.v1.orchestrator_pb2 import CatalogueOwner
from coterie_client.choice import Choice
from coterie_client.drift.recipients import Recipient, Recipients
from coterie_client.history import Catalogued, Histories, Outbox

__all__ = ["Delivery"]

_log = structlog.get_logger("coterie.delivery")

RECORDS_PER_BATCH = 1024
_BATCHES_PER_MESSAGE = 64
_STREAM_S = 600.0
_AT_ONCE = 4
_RETRY_S = 5.0
_PAUSE_S = 1.0
"""Pause before an owner that cannot be reached is tried again, seconds."""


@dataclass(frozen=True)
class _Batch:
    """A sealed batch and the outbox range that it carries."""

    user: int
    outbox: Outbox
    last: int
    message: wire.SealedBatch


class Delivery:
    """Sends users' outboxes to data owners; used by `PublishedDrift`.

    Parameters
    ----------
    runtime : Runtime
        For channels and accounts.
    run_id : str
        The run.
    identities : sequence of Identity
        Keys of the users; user ``n`` at position ``n - 1``.
    bundles : sequence of Bundle
        Their bundles, in the same order, which tell their ids without making their keys.
    histories : Histories
        Histories with the outboxes to send.
    writer : Writer
        The store's writer.
    directory_key : bytes
        The directory's public key; owners' bundles must carry its countersignature.
    seed : int
        Seed of the order in which users are sent (experiments).
    choice : Choice
        What the person of the device has chosen: nothing is sent while it objects.
    """

    def __init__(
        self,
        runtime: Runtime,
        run_id: str,
        identities: Sequence[Identity],
        bundles: Sequence[Bundle],
        histories: Histories,
        writer: Writer,
        directory_key: bytes,
        seed: int,
        choice: Choice,
    ) -> None:
        self._runtime = runtime
        self._choice = choice
        self._run_id = run_id
        self._bundles = bundles
        self._histories = histories
        self._writer = writer
        self._seed = seed
        self._recipients = Recipients(runtime, run_id, identities, directory_key)
        self._retry = Retry(limit_s=_RETRY_S)
        self._sending: dict[bytes, asyncio.Task[None]] = {}
        self._present: set[bytes] = set()
        self._newest = 0
        self._catalogue = Catalogued(version=0, index={}, owners=(), member=np.zeros((0, 0), bool))
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._revoked: set[int] = set()

    def know(self, version: int, owners: Sequence[CatalogueOwner]) -> None:
        """Learn the owners of a catalogue; sending stops to owners that are not in the newest one.

        Raises
        ------
        VerificationError
            When an owner's bundle does not carry the directory's countersignature.
        """
        present, new = self._recipients.know(owners)
        for recipient in new:
            recipient.latest = self._histories.acknowledged_before(
                recipient.owner, f"data-owner/{recipient.name}"
            )
        if version < self._newest:
            return
        self._newest, self._present = version, present
        for participant in self._sending.keys() - present:
            self._sending[participant].cancel()

    async def deliver(self, catalogue: Catalogued) -> int:
        """Send all waiting records to the owners of a catalogue; return how many records are acknowledged in all.

        Raises
        ------
        PeerError
            When an owner refuses.  An owner that cannot be reached, or is full, is awaited until `know` gets a
            catalogue without it.
        """
        # A new catalogue may mean that an owner came back from a backup: put its acknowledgements in doubt.
        for owner in catalogue.owners:
            latest = self._recipients[owner].latest
            if latest is not None:
                latest.doubtful = True
        await self.begin(catalogue)
        sending = [self._sending[owner] for owner in catalogue.owners if owner in self._sending]
        if sending:
            await asyncio.wait(sending)
        for task in sending:
            # A cancelled task belongs to an owner that is not in the newest catalogue.
            if not task.cancelled():
                task.result()
        return sum(
            outbox.acknowledged
            for by_user in self._histories.outboxes.values()
            for outbox in by_user.values()
        )

    async def begin(self, catalogue: Catalogued) -> None:
        """Queue new interactions, durably, and start sending them; return before they have arrived."""
        if catalogue.version >= self._catalogue.version:
            self._catalogue = catalogue
        await self._histories.queue(catalogue)
        # The catalogue may be outdated by now: send to owners of the newest only.
        for owner in filter(self._present.__contains__, catalogue.owners):
            held = self._sending.get(owner)
            if (held is None or held.done()) and self._waiting(owner):
                self._sending[owner] = task = asyncio.create_task(self._send(owner))
                task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stop sending; records that are not acknowledged stay in the outboxes."""
        for task in self._sending.values():
            task.cancel()
        await asyncio.gather(*self._sending.values(), return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        # Report the error here: there may be no caller waiting for the task.
        if not task.cancelled() and (error := task.exception()) is not None:
            self._runtime.fail(error)

    def _waiting(self, owner: bytes) -> list[tuple[int, Outbox]]:
        waiting = [pair for pair in self._histories.waiting(owner) if pair[0] not in self._revoked]
        return waiting if waiting and not self._choice.objections() else []

    async def _send(self, owner: bytes) -> None:
        silence = Seldom(_log)
        while True:
            # Look up again each time: the owner may have come back at another address.
            recipient = self._recipients[owner]
            try:
                async with self._turns:
                    await self._retry(partial(self._attempt, recipient))
                silence.over("a data owner is back", owner=recipient.name)
                return
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error, recipient.channel.peer)
                if isinstance(failure, Refusal) and failure.reason not in LATER:
                    raise failure from error
            silence.warning("waiting for a data owner", owner=recipient.name, error=failure.message)
            await asyncio.sleep(_PAUSE_S)

    async def _attempt(self, recipient: Recipient) -> None:
        """Send until nothing waits; a broken stream starts again at the first record that is not acknowledged."""
        stub: Any = recipient.channel.stub(DataOwnerStub)
        while self._waiting(recipient.owner):
            prekey = await self._recipients.prekey(recipient)
            under_way: asyncio.Queue[list[_Batch]] = asyncio.Queue()
            failed: list[Exception] = []
            # An answer may ask for another prekey: batches under way still use this one, and are sent again.
            requests = self._requests(recipient, self._messages(recipient, prekey), under_way, failed)
            try:
                async for response in stub.SubmitInteractions(requests, timeout=_STREAM_S):
                    await self._acknowledged(recipient, under_way.get_nowait(), response)
            except asyncio.CancelledError:
                if failed:
                    raise failed[0] from None
                raise

    async def _requests(
        self,
        recipient: Recipient,
        messages: Iterator[list[_Batch]],
        under_way: asyncio.Queue[list[_Batch]],
        failed: list[Exception],
    ) -> AsyncIterator[wire.SubmitInteractionsRequest]:
        try:
            for batches in messages:
                under_way.put_nowait(batches)
                yield wire.SubmitInteractionsRequest(
                    run_id=self._run_id,
                    owner=recipient.owner,
                    batches=[batch.message for batch in batches],
                )
                # Give answers, polls and the health check their turn.
                await asyncio.sleep(0)
        except Exception as error:
            # gRPC cancels a call whose requests cannot be made, as if that had been asked for.
            failed.append(error)
            raise

    def _messages(self, recipient: Recipient, prekey: PublicPrekey) -> Iterator[list[_Batch]]:
        """Yield messages of sealed batches: users in a seeded order, each user's records in sequence."""
        ranges = self._ranges(recipient)
        while chosen := list(itertools.islice(ranges, _BATCHES_PER_MESSAGE)):
            catalogue = self._catalogue
            users = [user for user, _, _, _ in chosen]
            sessions = [one.sealing for one in self._recipients.sessions(recipient, prekey, users)]
            records = [encode_records(*self._histories.records(rows, catalogue)) for _, _, _, rows in chosen]
            # One CPU account for the whole message: reading the clock costs as much as sealing a batch.
            with self._runtime.accounting.activity("seal", sum(len(rows) for _, _, _, rows in chosen)):
                sealed = [
                    session.seal(first, payload, len(rows))
                    for session, payload, (_, _, first, rows) in zip(sessions, records, chosen, strict=True)
                ]
            yield [
                _Batch(
                    user,
                    outbox,
                    first + len(rows) - 1,
                    wire.SealedBatch(
                        user=self._bundles[user - 1].participant_id,
                        header=batch.header,
                        ciphertext=batch.ciphertext,
                    ),
                )
                for batch, (user, outbox, first, rows) in zip(sealed, chosen, strict=True)
            ]

    def _ranges(self, recipient: Recipient) -> Iterator[tuple[int, Outbox, int, npt.NDArray[np.uint32]]]:
        """Yield user, outbox, first sequence number and history rows of every batch to send."""
        waiting = self._waiting(recipient.owner)
        rng = np.random.default_rng([self._seed, zlib.crc32(recipient.name.encode())])
        for index in rng.permutation(len(waiting)):
            user, outbox = waiting[index]
            for first in range(outbox.first, len(outbox.rows) + 1, RECORDS_PER_BATCH):
                yield user, outbox, first, outbox.rows[first - 1 : first - 1 + RECORDS_PER_BATCH]

    async def _acknowledged(
        self, recipient: Recipient, batches: list[_Batch], response: wire.SubmitInteractionsResponse
    ) -> None:
        now = time.time_ns() // 1_000_000
        sent = []
        # An owner states how many records it holds of a user only in answer to a batch that opens.
        silent = {
            refused.index
            for refused in response.refused
            if refused.reason != ErrorReason.ERROR_REASON_SEQUENCE_MISMATCH
        }
        # A record acknowledged before and sent again is a duplicate, unless the owner has lost it.
        again = sum(batch.last <= batch.outbox.acknowledged for batch in batches)
        lost = response.duplicates + len(response.refused) < again
        for index, (batch, durable) in enumerate(zip(batches, response.durable, strict=True)):
            if index in silent:
                continue
            if durable > len(batch.outbox.rows):
                raise PeerError(
                    f"OUTBOX_BEHIND: {recipient.name} holds {durable} records of a user whose outbox has "
                    f"{len(batch.outbox.rows)}",
                    hint="this host was restored from an old backup; enrol its users anew",
                )
            gained = durable - batch.outbox.acknowledged
            lost = lost or gained < 0
            # Lower the stored count, too, so that after a restart the host does not count lost records as delivered.
            batch.outbox.acknowledged, batch.outbox.doubtful = durable, False
            recipient.latest = batch.outbox
            size = len(batch.message.header) + len(batch.message.ciphertext)
            sent.append(
                store.Sent(batch.user, f"data-owner/{recipient.name}", "interaction", gained, size, now)
            )
        if lost:
            # The owner was restored from a backup: only users in this answer are certain, all others in doubt.
            _log.warning("a data owner has lost records", owner=recipient.name)
            answered = {id(batch.outbox) for batch in batches}
            for outbox in self._histories.outboxes[recipient.owner].values():
                outbox.doubtful = id(outbox) not in answered
        await self._writer.run(lambda connection: store.add_sent(connection, sent))
        for refused in response.refused:
            if refused.reason == ErrorReason.ERROR_REASON_REVOKED:
                # The revoked user sends nothing more; the host's others do.
                self._revoked.add(batches[refused.index].user)
                _log.warning("a user was revoked", owner=recipient.name)
                continue
            if refused.reason in (
                ErrorReason.ERROR_REASON_SEQUENCE_MISMATCH,
                ErrorReason.ERROR_REASON_UNKNOWN_PREKEY,
            ):
                # The next attempt starts from what the owner holds, under a fresh prekey.
                recipient.prekey = None
                continue
            raise Refusal(
                refused.reason,
                f"{recipient.name} refused a batch: {reason_name(refused.reason)}",
                field="batches",
            )
