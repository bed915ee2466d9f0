"""Delivery: a host's outboxes, sealed user by user, straight to the owners; never through the COS."""

from __future__ import annotations

import asyncio
import itertools
import time
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import structlog

from coterie.crypto.identity import Bundle, Identity, PublicPrekey
from coterie.crypto.sealed import (
    Agreement,
    Direction,
    SealingSession,
    SenderProcess,
    encode_records,
)
from coterie.errors import PeerError
from coterie.launch.process import Runtime
from coterie.net.bundles import bundle_from_wire
from coterie.net.channel import Channel
from coterie.net.retry import Retry
from coterie.net.status import from_rpc_error
from coterie.store import client as store
from coterie.store.engine import Writer
from coterie.wire.refusal import ErrorReason, Refusal, reason_name
from coterie.wire.v1 import data_owner_pb2 as wire
from coterie.wire.v1.data_owner_pb2_grpc import DataOwnerStub
from coterie.wire.v1.orchestrator_pb2 import CatalogueOwner
from coterie_client.history import Catalogued, Histories, Outbox

__all__ = ["Delivery", "Recipient"]

_log = structlog.get_logger("coterie.delivery")

RECORDS_PER_BATCH = 1024
_BATCHES_PER_MESSAGE = 64
_STREAM_S = 600.0
_AT_ONCE = 4
_RETRY_S = 5.0
_PAUSE_S = 1.0
_LATER = frozenset({ErrorReason.ERROR_REASON_STORE_FULL, ErrorReason.ERROR_REASON_NOT_READY})
"""Reasons for which the same batches may be taken later."""


@dataclass
class Recipient:
    """A data owner that is sent to."""

    owner: bytes
    name: str
    bundle: Bundle
    channel: Channel
    prekey: PublicPrekey | None = None


@dataclass(frozen=True)
class _Batch:
    """A sealed batch and the outbox range that it carries."""

    user: int
    outbox: Outbox
    last: int
    message: wire.SealedBatch


class Delivery:
    """Sends outboxes.

    Parameters
    ----------
    runtime : Runtime
        For channels and accounts.
    run_id : str
        The run.
    identities : sequence of Identity
        Keys of the users; user ``n`` at position ``n - 1``.
    histories : Histories
        What there is to send.
    writer : Writer
        The store's writer.
    directory_key : bytes
        The directory's public key; owners' bundles must carry its countersignature.
    seed : int
        Seed of the order in which users are sent (experiments).
    """

    def __init__(
        self,
        runtime: Runtime,
        run_id: str,
        identities: Sequence[Identity],
        histories: Histories,
        writer: Writer,
        directory_key: bytes,
        seed: int,
    ) -> None:
        self._runtime = runtime
        self._run_id = run_id
        self._identities = identities
        self._histories = histories
        self._writer = writer
        self._directory_key = directory_key
        self._seed = seed
        self._process = SenderProcess()
        self._recipients: dict[bytes, Recipient] = {}
        self._channels: dict[tuple[str, str], Channel] = {}
        self._sessions: dict[tuple[int, bytes, bytes], SealingSession] = {}
        self._retry = Retry(limit_s=_RETRY_S)
        self._sending: dict[bytes, asyncio.Task[None]] = {}
        self._present: set[bytes] = set()
        self._newest = 0
        self._lock = asyncio.Lock()

    def know(self, version: int, owners: Sequence[CatalogueOwner]) -> None:
        """Learn the owners of a catalogue; nobody waits any longer for an owner that is not in the newest one.

        Raises
        ------
        VerificationError
            When an owner's bundle does not carry the directory's countersignature.
        """
        present = set()
        for owner in owners:
            bundle = bundle_from_wire(owner.bundle)
            bundle.verify(self._directory_key, int(time.time()))
            place = (owner.address, owner.tls_name)
            if place not in self._channels:
                self._channels[place] = self._runtime.connect_to(
                    owner.address, tls_name=owner.tls_name, peer=f"data-owner/{owner.name}"
                )
            held = self._recipients.get(bundle.participant_id)
            if held is None or held.channel is not self._channels[place]:
                self._recipients[bundle.participant_id] = Recipient(
                    bundle.participant_id, owner.name, bundle, self._channels[place]
                )
                self._histories.acknowledged_before(bundle.participant_id, f"data-owner/{owner.name}")
            present.add(bundle.participant_id)
        if version < self._newest:
            return
        self._newest, self._present = version, present
        for participant in self._sending.keys() - present:
            self._sending[participant].cancel()

    async def deliver(self, catalogue: Catalogued) -> int:
        """Send everything that waits to the owners of a catalogue; return the records acknowledged in all.

        Raises
        ------
        PeerError
            When an owner refuses.  One that cannot be reached, or is full, is waited for until `know` gets a catalogue
            without it.
        """
        async with self._lock:
            await self._histories.queue(catalogue)
            turns = asyncio.Semaphore(_AT_ONCE)

            async with asyncio.TaskGroup() as tasks:
                # The catalogue may have grown old while another delivery was under way.
                for owner in filter(self._present.__contains__, catalogue.owners):
                    sending = self._send(self._recipients[owner], catalogue, turns)
                    self._sending[owner] = tasks.create_task(sending)
        return sum(
            outbox.acknowledged
            for by_user in self._histories.outboxes.values()
            for outbox in by_user.values()
        )

    async def _send(self, recipient: Recipient, catalogue: Catalogued, turns: asyncio.Semaphore) -> None:
        while True:
            try:
                async with turns:
                    return await self._retry(lambda: self._attempt(recipient, catalogue))
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error, recipient.channel.peer)
                if isinstance(failure, Refusal) and failure.reason not in _LATER:
                    raise failure from error
            _log.warning("waiting for a data owner", owner=recipient.name, error=failure.message)
            await asyncio.sleep(_PAUSE_S)

    async def _attempt(self, recipient: Recipient, catalogue: Catalogued) -> None:
        """Send until nothing waits; a broken stream starts again with what is not acknowledged."""
        stub: Any = recipient.channel.stub(DataOwnerStub)
        while self._histories.waiting(recipient.owner):
            recipient.prekey = await self._prekey(stub, recipient)
            under_way: asyncio.Queue[list[_Batch]] = asyncio.Queue()

            async def requests(
                recipient: Recipient = recipient, under_way: asyncio.Queue[list[_Batch]] = under_way
            ) -> AsyncIterator[wire.SubmitInteractionsRequest]:
                for batches in self._messages(recipient, catalogue):
                    under_way.put_nowait(batches)
                    yield wire.SubmitInteractionsRequest(
                        run_id=self._run_id,
                        owner=recipient.owner,
                        batches=[batch.message for batch in batches],
                    )
                    # Lets answers, polls and the health check have their turn.
                    await asyncio.sleep(0)

            async for response in stub.SubmitInteractions(requests(), timeout=_STREAM_S):
                await self._acknowledged(recipient, under_way.get_nowait(), response)

    async def _prekey(self, stub: Any, recipient: Recipient) -> PublicPrekey:
        held = recipient.prekey
        if held is not None and held.expiry > time.time():
            return held
        request = wire.OwnerInfoRequest(run_id=self._run_id, owner=recipient.owner)
        offered = (await stub.OwnerInfo(request)).prekey
        prekey = PublicPrekey(
            self._run_id, offered.prekey_id, offered.public, offered.expiry, offered.signature
        )
        prekey.verify(recipient.bundle.signing_public, int(time.time()))
        return prekey

    def _messages(self, recipient: Recipient, catalogue: Catalogued) -> Iterator[list[_Batch]]:
        """Yield what waits, sealed, a message at a time; users in a seeded order, each user's records in theirs."""
        ranges = self._ranges(recipient)
        while chosen := list(itertools.islice(ranges, _BATCHES_PER_MESSAGE)):
            sessions = self._sessions_with(recipient, [user for user, _, _, _ in chosen])
            records = [encode_records(*self._histories.records(rows, catalogue)) for _, _, _, rows in chosen]
            # One account for the whole message: reading the CPU clock costs as much as sealing a batch.
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
                        user=self._identities[user - 1].participant_id,
                        header=batch.header,
                        ciphertext=batch.ciphertext,
                    ),
                )
                for batch, (user, outbox, first, rows) in zip(sealed, chosen, strict=True)
            ]

    def _ranges(self, recipient: Recipient) -> Iterator[tuple[int, Outbox, int, npt.NDArray[np.uint32]]]:
        """Yield user, outbox, first sequence number and history rows of every batch to send."""
        waiting = self._histories.waiting(recipient.owner)
        rng = np.random.default_rng([self._seed, zlib.crc32(recipient.name.encode())])
        for index in rng.permutation(len(waiting)):
            user, outbox = waiting[index]
            for first in range(outbox.acknowledged + 1, len(outbox.rows) + 1, RECORDS_PER_BATCH):
                yield user, outbox, first, outbox.rows[first - 1 : first - 1 + RECORDS_PER_BATCH]

    def _sessions_with(self, recipient: Recipient, users: Sequence[int]) -> list[SealingSession]:
        prekey = recipient.prekey
        if prekey is None:
            raise PeerError(f"{recipient.name} has offered no prekey")
        keys = [(user, recipient.owner, prekey.prekey_id) for user in users]
        missing = {key for key in keys if key not in self._sessions}
        if missing:
            with self._runtime.accounting.activity("key agreement", len(missing)):
                for key in missing:
                    agreement = Agreement.of_user(self._identities[key[0] - 1], recipient.owner, prekey)
                    self._sessions[key] = SealingSession(agreement, Direction.TO_OWNER, self._process)
        return [self._sessions[key] for key in keys]

    async def _acknowledged(
        self, recipient: Recipient, batches: list[_Batch], response: wire.SubmitInteractionsResponse
    ) -> None:
        now = time.time_ns() // 1_000_000
        sent = []
        # An owner says what it holds of a user only in answer to a batch that opens.
        silent = {
            refused.index
            for refused in response.refused
            if refused.reason != ErrorReason.ERROR_REASON_SEQUENCE_MISMATCH
        }
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
            # An owner that was restored from a backup holds less than it once acknowledged: send the rest again.
            # The store follows it down, so that a host that restarts in between does not take it for delivered.
            batch.outbox.acknowledged = durable
            size = len(batch.message.header) + len(batch.message.ciphertext)
            sent.append(
                store.Sent(batch.user, f"data-owner/{recipient.name}", "interaction", gained, size, now)
            )
        await self._writer.run(lambda connection: store.add_sent(connection, sent))
        for refused in response.refused:
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
