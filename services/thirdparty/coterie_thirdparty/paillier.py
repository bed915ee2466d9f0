"""Relay Paillier keys between their holders, and publish the public keys to all parties.

Checks here save a run from mistakes and the store from being filled; no party relies on them.  Holders and contributors
check signatures, roster and keys themselves, and only its holder can open a sealed envelope.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import structlog

from coterie.crypto import clocks
from coterie.crypto.key_record import Countersignature, KeyRecord, countersigners_needed
from coterie.crypto.roster import Roster, load_roster_key
from coterie.crypto.verification import VerificationError
from coterie.errors import CertificateError
from coterie.parties.key_records import record_from_wire, record_to_wire, roster_from_wire
from coterie.parties.request_checks import check_run, refusal_of
from coterie.store.thirdparty import ThirdPartyStore
from coterie.store.thirdparty_keys import KeptKey, NewKey
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import thirdparty_pb2 as wire
from coterie_thirdparty.storing import storing

__all__ = ["ROSTER_KEY", "PaillierRelay"]

_log = structlog.get_logger("coterie.thirdparty")

T = TypeVar("T")

ROSTER_KEY = "roster.pub"
"""The operator's public key for rosters, in the state folder."""
_MOST_SEALED = 1 << 13
_DIGEST_BYTES = 32
_HOLD_MS = 20_000


class PaillierRelay:
    """Relays Paillier keys; the key directory passes its calls about them here.

    Parameters
    ----------
    store : ThirdPartyStore
        Keeps records, envelopes and countersignatures.
    roster_key : Path
        File with the operator's public key for rosters; read at each publication, so that it may come later.
    store_holds : callable
        Called with whether the store works.
    """

    def __init__(self, store: ThirdPartyStore, roster_key: Path, store_holds: Callable[[bool], None]) -> None:
        self._store = store
        self._roster_key = roster_key
        self._store_holds = store_holds
        self._changed = asyncio.Event()
        self._stopping = False

    def release(self) -> None:
        """Answer all waiting callers, and hold no call from now on."""
        self._stopping = True
        self._wake()

    async def publish(self, party: str, request: wire.PublishPaillierKeyRequest) -> None:
        """Store a new key; publishing the same record again changes nothing.

        Raises
        ------
        Refusal
            NOT_READY without the operator's key, BAD_SIGNATURE, INVALID_FIELD, UNKNOWN_PARTICIPANT, REVOKED,
            BELOW_FLOOR, TOO_LARGE, CONFLICT or SEQUENCE_MISMATCH.
        """
        record, roster = record_from_wire(request.record), roster_from_wire(request.roster)
        check_run(record.run, "record.key.run_id")
        with storing(self._store_holds):
            revoked = frozenset((await self._store.revocations()).participants)
        await asyncio.to_thread(self._check, record, roster, revoked)
        sealed = _envelopes(record, request)
        new = NewKey(
            record.run,
            record.epoch,
            record.generator,
            countersigners_needed(len(roster.eligible(revoked))),
            record_to_wire(record).SerializeToString(deterministic=True),
        )
        with storing(self._store_holds):
            fresh = await self._store.publish_key(party, new, sealed)
        if fresh:
            _log.info(
                "paillier key", run=record.run, epoch=record.epoch, by=party, holders=len(record.holders)
            )
            self._wake()

    async def countersign(self, party: str, request: wire.CountersignPaillierKeyRequest) -> bool:
        """Store a holder's countersignature; return whether the key is complete.

        Raises
        ------
        Refusal
            UNKNOWN_ROUND for an unknown key, UNKNOWN_PARTICIPANT, BAD_SIGNATURE, REVOKED or CONFLICT.
        """
        check_run(request.run_id, "run_id")
        _check_epoch(request.epoch)
        kept = await self._key(request.run_id, request.epoch)
        if kept is None:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
                f"the run has no key of epoch {request.epoch}",
                field="epoch",
                expected="that of a published key",
            )
        given = Countersignature(request.countersignature.signing_public, request.countersignature.signature)
        record = record_from_wire(_message(kept))
        try:
            record.check_countersignature(given)
        except VerificationError as error:
            raise refusal_of(
                error, "countersignature", "the signature of another holder of the key"
            ) from error
        with storing(self._store_holds):
            complete = await self._store.countersign_key(
                party,
                request.run_id,
                request.epoch,
                given.participant,
                given.signing_public,
                given.signature,
            )
        self._wake()
        return complete

    async def public_key(self, request: wire.PaillierPublicKeyRequest) -> wire.PaillierPublicKeyResponse:
        """Return a key with its countersignatures, as `KeyDirectory.PaillierPublicKey` says."""
        check_run(request.run_id, "run_id")
        if request.epoch:
            _check_epoch(request.epoch)

        async def look() -> KeptKey | None:
            return await self._key(request.run_id, request.epoch)

        def newer(kept: KeptKey | None) -> bool:
            return bool(request.epoch) or (kept is not None and kept.epoch > request.held_epoch)

        kept = await self._held(look, newer, request.hold_ms)
        return wire.PaillierPublicKeyResponse(record=None if kept is None else _message(kept))

    async def envelope(
        self, party: str, request: wire.PaillierEnvelopeRequest
    ) -> wire.PaillierEnvelopeResponse:
        """Return the newest key and the envelope sealed for one of the caller's participants.

        Raises
        ------
        Refusal
            UNKNOWN_PARTICIPANT for another party's participant, REVOKED.
        """
        check_run(request.run_id, "run_id")
        if len(request.participant) != _DIGEST_BYTES:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                f"{len(request.participant)} bytes",
                field="participant",
                expected=f"{_DIGEST_BYTES} bytes",
            )

        async def look() -> tuple[KeptKey | None, bytes]:
            with storing(self._store_holds):
                return await self._store.paillier_envelope(party, request.run_id, request.participant)

        def newer(found: tuple[KeptKey | None, bytes]) -> bool:
            return found[0] is not None and found[0].epoch > request.held_epoch

        kept, sealed = await self._held(look, newer, request.hold_ms)
        return wire.PaillierEnvelopeResponse(record=None if kept is None else _message(kept), sealed=sealed)

    async def _held(self, look: Callable[[], Awaitable[T]], newer: Callable[[T], bool], hold_ms: int) -> T:
        """Call ``look`` until ``newer`` accepts its result or the time is up; return the last result."""
        ends = time.monotonic() + min(hold_ms, _HOLD_MS) / 1000
        while True:
            # Take the event before looking, so that a change meanwhile ends the wait at once.
            changed = self._changed
            found = await look()
            left = ends - time.monotonic()
            if newer(found) or left <= 0 or self._stopping:
                return found
            try:
                await asyncio.wait_for(changed.wait(), left)
            except TimeoutError:
                return found

    async def _key(self, run_id: str, epoch: int) -> KeptKey | None:
        with storing(self._store_holds):
            return await self._store.paillier_key(run_id, epoch)

    def _check(self, record: KeyRecord, roster: Roster, revoked: frozenset[bytes]) -> None:
        try:
            operator = load_roster_key(self._roster_key)
        except CertificateError as error:
            raise Refusal(
                ErrorReason.ERROR_REASON_NOT_READY,
                "the third party does not know the operator's key for rosters",
                field="roster",
                expected=f"{ROSTER_KEY} in its state folder",
            ) from error
        try:
            record.verify_statement(
                roster, operator, run=record.run, now=clocks.now(), revoked=revoked, complete=False
            )
        except VerificationError as error:
            raise refusal_of(error, "record", "a record and a roster that hold now") from error

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _envelopes(record: KeyRecord, request: wire.PublishPaillierKeyRequest) -> dict[bytes, bytes]:
    if record.countersignatures:
        raise Refusal(
            ErrorReason.ERROR_REASON_INVALID_FIELD,
            "a new record with countersignatures",
            field="record.countersignatures",
            expected="none",
        )
    others = [holder for holder in record.holders if holder != record.generator]
    if [one.holder for one in request.envelopes] != others:
        raise Refusal(
            ErrorReason.ERROR_REASON_INVALID_FIELD,
            f"{len(request.envelopes)} envelopes for {len(others)} other holders, or in another order",
            field="envelopes",
            expected="one for each holder but the generator, in the order of the record",
        )
    for one in request.envelopes:
        if not 0 < len(one.sealed) <= _MOST_SEALED:
            raise Refusal(
                ErrorReason.ERROR_REASON_TOO_LARGE,
                f"an envelope of {len(one.sealed)} bytes",
                field="envelopes.sealed",
                expected=f"1 to {_MOST_SEALED} bytes",
            )
    return {one.holder: one.sealed for one in request.envelopes}


def _message(kept: KeptKey) -> wire.PaillierRecord:
    message = wire.PaillierRecord.FromString(kept.record)
    for signing_public, signature in kept.countersignatures:
        message.countersignatures.add(signing_public=signing_public, signature=signature)
    return message


def _check_epoch(epoch: int) -> None:
    if not 1 <= epoch < 1 << 32:
        raise Refusal(
            ErrorReason.ERROR_REASON_INVALID_FIELD, f"epoch {epoch}", field="epoch", expected="1 to 2^32 - 1"
        )
