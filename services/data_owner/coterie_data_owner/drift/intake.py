"""Take users' sealed interactions: open them, check their sequence, store them, then acknowledge."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coterie.crypto.identity import Bundle, Prekey
from coterie.crypto.sealed import (
    RECORD_DTYPE,
    Agreement,
    Decision,
    Direction,
    Header,
    OpeningSession,
    SealingSession,
    SenderProcess,
    SequenceGate,
    decode_records,
)
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CertificateError, CoterieError, StoreError
from coterie.net.status import not_kept
from coterie.net.uncancelled import completed
from coterie.store import data_owner as store
from coterie.store.engine import Writer
from coterie.telemetry.accounting import Accounting
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import data_owner_pb2 as wire
from coterie.wire.v1.data_owner_pb2_grpc import DataOwnerServicer
from coterie.wire.v1.orchestrator_pb2 import RunPlan
from coterie.wire.visit import Visit
from coterie_data_owner.drift.holdings import Arrival, Holdings
from coterie_data_owner.drift.learning_owner import LearningOwner
from coterie_data_owner.drift.users import Users

__all__ = ["Intake"]

_MAX_BATCHES = 1024
_MAX_RECORDS = 1024


@dataclass
class _Opened:
    """The outcome for one batch: opened and judged, or refused."""

    batch: store.Batch | None = None
    duplicate: bool = False
    refused: ErrorReason.ValueType = ErrorReason.ERROR_REASON_UNSPECIFIED


class Intake(DataOwnerServicer):
    """The gRPC servicer that client hosts call, for all data owners of this process.

    Parameters
    ----------
    run_id : str
        The run.
    owners : mapping
        Owners by participant id.
    users : Users
        Slots and bundles of users.
    writer : Writer
        The store's writer.
    accounting : Accounting
        Counts CPU time by activity.
    """

    def __init__(
        self,
        run_id: str,
        owners: Mapping[bytes, LearningOwner],
        users: Users,
        writer: Writer,
        accounting: Accounting,
    ) -> None:
        self._run_id = run_id
        self._owners = owners
        self._users = users
        self._writer = writer
        self._accounting = accounting
        self._plan = RunPlan()
        self.holdings: Mapping[bytes, Holdings] = {}
        """Holdings by owner id; filled in DRIFT's shielded form only."""
        self._sessions: dict[tuple[bytes, bytes, bytes], OpeningSession] = {}
        self._replying: dict[tuple[bytes, bytes, bytes], SealingSession] = {}
        self._process = SenderProcess()
        self.ready = asyncio.Event()

    def shield(self, plan: RunPlan, holdings: Mapping[bytes, Holdings]) -> None:
        """Switch to DRIFT's shielded form: records come only with visits."""
        self._plan, self.holdings = plan, holdings

    async def SubmitInteractions(  # noqa: N802
        self, request_iterator: AsyncIterator[wire.SubmitInteractionsRequest], context: Any
    ) -> AsyncIterator[wire.SubmitInteractionsResponse]:
        """Take batches of records; answer each message when its accepted batches are durable."""
        async for request in request_iterator:
            owner = self._owner(request.run_id, request.owner)
            if owner.id in self.holdings:
                taken = await self._visited(owner, request.batches)
                yield wire.SubmitInteractionsResponse(
                    durable=taken.durable,
                    refused=taken.refused,
                    duplicates=taken.duplicates,
                    replies=taken.replies,
                )
            else:
                yield await self._take(owner, request.batches)

    async def UpdateVector(  # noqa: N802
        self, request: wire.UpdateVectorRequest, context: Any
    ) -> wire.UpdateVectorResponse:
        """Run the blocks of users who bring their rows and no records; each block runs once in an epoch."""
        owner = self._owner(request.run_id, request.owner)
        if owner.id not in self.holdings:
            raise _wrong_form("published")
        taken = await self._visited(owner, request.visits, epoch=request.epoch)
        return wire.UpdateVectorResponse(
            replies=taken.replies,
            refused=taken.refused,
            duplicates=taken.duplicates,
            durable=taken.durable,
        )

    def _owner(self, run_id: str, owner: bytes) -> LearningOwner:
        if not self.ready.is_set():
            raise Refusal(
                ErrorReason.ERROR_REASON_NOT_READY, "this owner has not joined the run yet", field="run_id"
            )
        found = self._owners.get(owner)
        if run_id != self._run_id or found is None:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
                "no such run or owner at this address",
                field="owner",
                expected=f"an owner of run {self._run_id} from the catalogue",
            )
        return found

    # --- DRIFT, shielded form: users visit with their rows -------------------------------------------------------

    async def _visited(
        self, owner: LearningOwner, batches: Sequence[wire.SealedBatch], *, epoch: int | None = None
    ) -> _Visits:
        """Take visits with records, or without records where an ``epoch`` is given."""
        _check_number(batches)
        holdings = self.holdings[owner.id]
        bundles = await self._bundles(batches)
        opened = await asyncio.to_thread(self._open_visits, owner, batches, bundles, epoch)
        # Wait before a lock is held, so that other calls go on.
        await holdings.room()
        return await completed(self._take_visits(holdings, batches, opened))

    async def _bundles(self, batches: Sequence[wire.SealedBatch]) -> Mapping[bytes, Bundle]:
        try:
            return await self._users.bundles([batch.user for batch in batches])
        except StoreError as error:
            raise _not_kept(error) from error

    def _open_visits(
        self,
        owner: LearningOwner,
        batches: Sequence[wire.SealedBatch],
        bundles: Mapping[bytes, Bundle],
        epoch: int | None,
    ) -> list[Arrival | ErrorReason.ValueType]:
        self._agree(owner, batches, bundles)
        with self._accounting.activity("open", len(batches)):
            opened = [self._open(owner, batch, batch.user in bundles) for batch in batches]
        with self._accounting.activity("check records", len(batches)):
            return [
                self._arrival(owner, batch, payload, epoch)
                for batch, payload in zip(batches, opened, strict=True)
            ]

    def _arrival(
        self,
        owner: LearningOwner,
        batch: wire.SealedBatch,
        payload: bytes | ErrorReason.ValueType,
        epoch: int | None,
    ) -> Arrival | ErrorReason.ValueType:
        slot = owner.slot_of(batch.user)
        if not isinstance(payload, bytes):
            return payload
        if slot is None:
            return ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT
        header, plan = Header.parse(batch.header), self._plan
        cut = header.count * RECORD_DTYPE.itemsize
        try:
            visit = Visit.from_bytes(payload[cut:], plan.dim)
            items, _ = decode_records(payload[:cut], header.count)
        except Refusal as refusal:
            return refusal.reason
        except CoterieError:
            return ErrorReason.ERROR_REASON_INVALID_FIELD
        if not owner.knows_items(items):
            return ErrorReason.ERROR_REASON_UNKNOWN_ITEM
        without = epoch is not None and (header.count or visit.epoch != epoch)
        if without or visit.epoch > plan.epochs or (plan.item_bias and visit.row[-1] != 1):
            return ErrorReason.ERROR_REASON_INVALID_FIELD
        return Arrival(batch.user, slot, visit, header.first_sequence, header.count, payload[:cut])

    async def _take_visits(
        self,
        holdings: Holdings,
        batches: Sequence[wire.SealedBatch],
        opened: Sequence[Arrival | ErrorReason.ValueType],
    ) -> _Visits:
        arrivals = [one for one in opened if isinstance(one, Arrival)]
        try:
            answers = iter(await holdings.take(arrivals))
        except StoreError as error:
            raise _not_kept(error) from error
        found = _Visits()
        for index, (batch, one) in enumerate(zip(batches, opened, strict=True)):
            reply = wire.SealedReply()
            if isinstance(one, Arrival):
                answer = next(answers)
                found.duplicates += answer.duplicate
                if answer.reply:
                    reply = self._sealed(holdings.owner_id, batch, one.visit.number, answer.reply)
                else:
                    mismatch = ErrorReason.ERROR_REASON_SEQUENCE_MISMATCH
                    found.refused.append(
                        wire.RefusedBatch(index=index, reason=mismatch, expected=answer.expected)
                    )
                found.durable.append(holdings.durable(one.slot))
            else:
                found.refused.append(wire.RefusedBatch(index=index, reason=one))
                found.durable.append(0)
            found.replies.append(reply)
        return found

    def _sealed(self, owner: bytes, batch: wire.SealedBatch, number: int, reply: bytes) -> wire.SealedReply:
        """Seal a reply for a batch's user, under the prekey to which the batch was sealed."""
        session = self._replying[owner, batch.user, Header.parse(batch.header).prekey_id]
        sealed = session.seal(number, reply, 0)
        return wire.SealedReply(header=sealed.header, ciphertext=sealed.ciphertext)

    # --- the published form --------------------------------------------------------------------------------------

    async def _take(
        self, owner: LearningOwner, batches: Sequence[wire.SealedBatch]
    ) -> wire.SubmitInteractionsResponse:
        _check_number(batches)
        bundles = await self._bundles(batches)
        payloads = await asyncio.to_thread(self._open_all, owner, batches, bundles)
        return await completed(self._store(owner, batches, payloads))

    def _open_all(
        self, owner: LearningOwner, batches: Sequence[wire.SealedBatch], bundles: Mapping[bytes, Bundle]
    ) -> list[bytes | ErrorReason.ValueType]:
        self._agree(owner, batches, bundles)
        with self._accounting.activity("open", len(batches)):
            opened = [self._open(owner, batch, batch.user in bundles) for batch in batches]
        with self._accounting.activity("check records", len(batches)):
            return [
                self._checked(owner, batch, payload) for batch, payload in zip(batches, opened, strict=True)
            ]

    def _agree(
        self, owner: LearningOwner, batches: Sequence[wire.SealedBatch], bundles: Mapping[bytes, Bundle]
    ) -> None:
        """Run key agreement for sessions that are missing, so that its CPU time is counted apart from opening."""
        missing: dict[tuple[bytes, bytes, bytes], tuple[Prekey, Bundle, bytes]] = {}
        for batch in batches:
            try:
                header = Header.parse(batch.header)
            except VerificationError:
                continue
            prekey, bundle = owner.prekeys.find(header.prekey_id), bundles.get(batch.user)
            key = (owner.id, batch.user, header.prekey_id)
            if prekey is not None and bundle is not None and key not in self._sessions:
                missing[key] = (prekey, bundle, header.session_id)
        if missing:
            with self._accounting.activity("key agreement", len(missing)):
                for key, (prekey, bundle, session_id) in missing.items():
                    agreement = Agreement.of_owner(prekey, owner.id, bundle)
                    session = OpeningSession(agreement, Direction.TO_OWNER)
                    session.prepare(session_id)
                    self._sessions[key] = session
                    if owner.id in self.holdings:
                        self._replying[key] = SealingSession(agreement, Direction.TO_USER, self._process)

    def _open(
        self, owner: LearningOwner, batch: wire.SealedBatch, known: bool
    ) -> bytes | ErrorReason.ValueType:
        if not known:
            revoked = self._users.is_revoked(batch.user)
            return (
                ErrorReason.ERROR_REASON_REVOKED if revoked else ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT
            )
        try:
            header = Header.parse(batch.header)
            session = self._sessions.get((owner.id, batch.user, header.prekey_id))
            if session is None:
                return ErrorReason.ERROR_REASON_UNKNOWN_PREKEY
            least = 0 if owner.id in self.holdings else 1
            if not least <= header.count <= _MAX_RECORDS:
                return ErrorReason.ERROR_REASON_INVALID_FIELD
            return session.open(batch.header, batch.ciphertext)
        except VerificationError as error:
            malformed = error.reason in (Reason.MALFORMED, Reason.BAD_VERSION)
            return (
                ErrorReason.ERROR_REASON_INVALID_FIELD
                if malformed
                else ErrorReason.ERROR_REASON_NOT_AUTHENTIC
            )

    @staticmethod
    def _checked(
        owner: LearningOwner, batch: wire.SealedBatch, payload: bytes | ErrorReason.ValueType
    ) -> bytes | ErrorReason.ValueType:
        if not isinstance(payload, bytes):
            return payload
        try:
            items, _ = decode_records(payload, Header.parse(batch.header).count)
        except CoterieError:
            return ErrorReason.ERROR_REASON_INVALID_FIELD
        return payload if owner.knows_items(items) else ErrorReason.ERROR_REASON_UNKNOWN_ITEM

    async def _store(
        self,
        owner: LearningOwner,
        batches: Sequence[wire.SealedBatch],
        payloads: Sequence[bytes | ErrorReason.ValueType],
    ) -> wire.SubmitInteractionsResponse:
        async with owner.intake:
            return await self._judge_and_keep(owner, batches, payloads)

    async def _judge_and_keep(
        self,
        owner: LearningOwner,
        batches: Sequence[wire.SealedBatch],
        payloads: Sequence[bytes | ErrorReason.ValueType],
    ) -> wire.SubmitInteractionsResponse:
        response = wire.SubmitInteractionsResponse()
        durable: dict[bytes, int] = {}
        accepted: list[store.Batch] = []
        known: list[bytes | None] = []
        for index, (batch, payload) in enumerate(zip(batches, payloads, strict=True)):
            # Only the user may know how many of its records are held, and only the user can seal a batch that opens.
            known.append(batch.user if isinstance(payload, bytes) else None)
            if not isinstance(payload, bytes):
                response.refused.append(wire.RefusedBatch(index=index, reason=payload))
                continue
            at = durable.get(batch.user, owner.durable.get(batch.user, 0))
            header = Header.parse(batch.header)
            match _judge(at, header):
                case Decision.ACCEPT:
                    accepted.append(store.Batch(batch.user, header.first_sequence, header.count, payload))
                    durable[batch.user] = header.last_sequence
                case Decision.DUPLICATE:
                    response.duplicates += 1
                case Decision.MISMATCH:
                    mismatch = ErrorReason.ERROR_REASON_SEQUENCE_MISMATCH
                    response.refused.append(wire.RefusedBatch(index=index, reason=mismatch, expected=at + 1))
        if accepted:
            await self._keep(owner, accepted)
        response.durable.extend(owner.durable.get(user, 0) if user is not None else 0 for user in known)
        return response

    async def _keep(self, owner: LearningOwner, accepted: Sequence[store.Batch]) -> None:
        """Store batches, then form blocks from them."""
        try:
            await self._writer.run(lambda connection: store.add_batches(connection, owner.id, accepted))
        except StoreError as error:
            raise _not_kept(error) from error
        with self._accounting.activity("blocks", sum(batch.length for batch in accepted)):
            for taken in accepted:
                owner.add(taken)
        owner.wake()

    async def OwnerInfo(self, request: wire.OwnerInfoRequest, context: Any) -> wire.OwnerInfoResponse:  # noqa: N802
        """Return how many items an owner holds and its current prekey, to which clients seal records."""
        owner = self._owner(request.run_id, request.owner)
        try:
            public = owner.prekeys.current().public
        except CertificateError as error:
            full = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ENOSPC
            raise Refusal(
                ErrorReason.ERROR_REASON_STORE_FULL if full else ErrorReason.ERROR_REASON_NOT_READY,
                "the owner cannot keep a new prekey",
                field="owner",
                expected="the same question again, later",
            ) from error
        return wire.OwnerInfoResponse(
            items=len(owner.items),
            prekey=wire.Prekey(
                prekey_id=public.prekey_id,
                public=public.public,
                expiry=public.expiry,
                signature=public.signature,
            ),
        )

    async def Flush(self, request: wire.FlushRequest, context: Any) -> wire.FlushResponse:  # noqa: N802
        """Close the trailing blocks of one owner, or of all owners when none is named."""
        if self.holdings:
            raise _wrong_form("shielded")
        owners = (
            [self._owner(request.run_id, request.owner)] if request.owner else list(self._owners.values())
        )
        closed = [await completed(owner.flush(self._writer)) for owner in owners]
        return wire.FlushResponse(blocks=sum(closed))


@dataclass
class _Visits:
    """The response to a message of visits, with an entry for each visit."""

    durable: list[int] = field(default_factory=list)
    replies: list[wire.SealedReply] = field(default_factory=list)
    refused: list[wire.RefusedBatch] = field(default_factory=list)
    duplicates: int = 0


def _check_number(batches: Sequence[wire.SealedBatch]) -> None:
    if len(batches) > _MAX_BATCHES:
        raise Refusal(
            ErrorReason.ERROR_REASON_TOO_LARGE,
            f"{len(batches)} batches in one message",
            field="batches",
            expected=f"at most {_MAX_BATCHES}",
        )


def _not_kept(error: StoreError) -> Refusal:
    return Refusal(
        not_kept(error).reason,
        f"{error.message}; nothing of this message was kept",
        field="batches",
        expected="the same message again, later",
    )


def _wrong_form(form: str) -> Refusal:
    return Refusal(
        ErrorReason.ERROR_REASON_WRONG_SYSTEM,
        f"the run is drift, {form}",
        field="run_id",
        expected="shielded for UpdateVector, published for Flush",
    )


def _judge(durable: int, header: Header) -> Decision:
    try:
        return SequenceGate(durable).judge(header.first_sequence, header.last_sequence)
    except VerificationError:
        return Decision.MISMATCH
