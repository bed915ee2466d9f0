"""Combine users' encrypted latent vectors: sealed uploads in, encrypted weighted means of a few users each out.

This service holds the public Paillier key of a run and no secret one.  Uploads come through the COS, so it never learns
who sent them.  Which users are in a combination, and with what weight, is in memory while combinations are formed, and
nowhere else.  Checks save a run from mistakes; holders of the key check records themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from coterie.crypto import clocks
from coterie.crypto.graph_requests import Kind
from coterie.crypto.key_record import KeyRecord
from coterie.crypto.latent_terms import LatentRecord
from coterie.crypto.latent_weights import draw_combinations, seeded
from coterie.crypto.verification import VerificationError
from coterie.errors import CryptoError, StoreError
from coterie.net.server import current_peer, current_skew_s
from coterie.net.uncancelled import completed
from coterie.parties.key_records import record_from_wire
from coterie.parties.latent_records import latent_record_from_wire, latent_record_to_wire
from coterie.parties.opened_requests import OpenedRequest, check_request, open_sealed, parsed
from coterie.parties.request_checks import check_run, refusal_of
from coterie.store.latents import KeptSet, LatentStore, SetState
from coterie.store.thirdparty import ThirdPartyStore
from coterie.telemetry.accounting import Accounting
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import expansion_pb2, thirdparty_pb2
from coterie.wire.v1 import latents_pb2 as wire
from coterie.wire.v1.latents_pb2_grpc import MetaLatentsServicer
from coterie_thirdparty.sealing_keys import SealingKeys
from coterie_thirdparty.storing import storing

if TYPE_CHECKING:
    from coterie.crypto.paillier import PublicKey

__all__ = ["MetaLatents"]

_log = structlog.get_logger("coterie.thirdparty")

_ID = 32
_HOLD_MS = 20_000
_ANSWER_BYTES = 1 << 20
_KEYS_HELD = 16
_PURGE_S = 3600.0


class _Opened(NamedTuple):
    """A sealed request about a set."""

    kept: KeptSet
    record: LatentRecord
    request: OpenedRequest


class MetaLatents(MetaLatentsServicer):
    """The gRPC servicer of meta-latents.

    Parameters
    ----------
    store : LatentStore
        Keeps sets, vectors and combinations.
    directory : ThirdPartyStore
        Knows Paillier keys, who speaks for whom, and who is revoked.
    keys : SealingKeys
        Open users' requests.
    accounting : Accounting
        Counts CPU time for opening requests and for combining.
    store_holds : callable
        Called with whether the store works.
    seed : int, optional
        Seed of members and weights, for experiments; the operating system's randomness if left out.
    """

    def __init__(
        self,
        store: LatentStore,
        directory: ThirdPartyStore,
        keys: SealingKeys,
        accounting: Accounting,
        store_holds: Callable[[bool], None],
        seed: int | None = None,
    ) -> None:
        self._store = store
        self._directory = directory
        self._keys = keys
        self._accounting = accounting
        self._store_holds = store_holds
        self._seed = seed
        self._changed = asyncio.Event()
        self._stopping = False
        self._public: dict[bytes, PublicKey] = {}
        self._purged = -_PURGE_S

    def release(self) -> None:
        """Answer all waiting callers, and hold no call from now on."""
        self._stopping = True
        self._wake()

    async def tend(self) -> None:
        """Combine the vectors of sets that are closed, or whose time has come; once an hour delete expired sets."""
        now = clocks.now()
        try:
            if time.monotonic() - self._purged >= _PURGE_S:
                if gone := await self._store.purge(now):
                    _log.info("deleted expired sets of meta-latents", sets=gone)
                self._purged = time.monotonic()
            for kept in await self._store.due(now):
                await self._combine(kept)
                self._wake()
        except StoreError as error:
            _log.error("the store of meta-latents does not work", message=error.message)
            self._store_holds(False)

    # --- sets --------------------------------------------------------------------------------------------------------

    async def OpenLatents(  # noqa: N802 - the contract's name
        self, request: wire.OpenLatentsRequest, context: Any
    ) -> wire.OpenLatentsResponse:
        """Open the set of an epoch, for a holder of the Paillier key."""
        await completed(self._open_set(str(current_peer()), request))
        return wire.OpenLatentsResponse()

    async def _open_set(self, party: str, request: wire.OpenLatentsRequest) -> None:
        _require_arithmetic()
        record = latent_record_from_wire(request.record)
        check_run(record.run, "record.run_id")
        if not 1 <= record.epoch < 1 << 31:
            raise _invalid("record.epoch", f"epoch {record.epoch}", "1 to 2^31 - 1")
        key = await self._paillier_key(record.run, record.epoch)
        # A caller states any time it likes; what is tolerated elsewhere is believed.
        ahead = round(min(max(current_skew_s(), -clocks.CLOCK_SKEW_S), clocks.CLOCK_SKEW_S))
        try:
            record.verify(key, clocks.now() + ahead)
            record.terms.packing(key.key.bits)
        except VerificationError as error:
            raise refusal_of(
                error, "record", "a record that a holder of the run's Paillier key signed"
            ) from error
        except CryptoError as error:
            raise _invalid("record.bits", error.message, "values that fit under the key") from error
        with storing(self._store_holds):
            await self._directory.check_speaks(party, record.opener, "record.opener_public")
            fresh = await self._store.open_set(
                record.run,
                record.epoch,
                # The opener's clock said when; a set is open for as long as the opener meant, by this clock.
                record.closes - ahead,
                record.expiry - ahead,
                latent_record_to_wire(record).SerializeToString(deterministic=True),
            )
        if fresh:
            _log.info("set of meta-latents opened", run=record.run, epoch=record.epoch, by=party)
            self._wake()

    async def LatentSet(  # noqa: N802 - the contract's name
        self, request: wire.LatentSetRequest, context: Any
    ) -> wire.LatentSetResponse:
        """Return a run's newest set, and how far it is."""
        check_run(request.run_id, "run_id")
        ends = time.monotonic() + min(request.hold_ms, _HOLD_MS) / 1000
        with storing(self._store_holds):
            while True:
                changed = self._changed
                kept = await self._store.newest(request.run_id)
                there = kept is not None and kept.epoch >= request.epoch
                busy = kept is not None and kept.state in (SetState.OPEN, SetState.CLOSED)
                left = ends - time.monotonic()
                if (there and not (request.until_ready and busy)) or left <= 0 or self._stopping:
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), left)
        if kept is None:
            return wire.LatentSetResponse()
        return wire.LatentSetResponse(
            record=wire.LatentRecord.FromString(kept.record),
            state=wire.LatentState.ValueType(kept.state),
            key_users=kept.key_users,
        )

    # --- requests of users, through the COS --------------------------------------------------------------------------

    async def PublishEncrypted(  # noqa: N802 - the contract's name
        self, request: wire.PublishEncryptedRequest, context: Any
    ) -> wire.PublishEncryptedResponse:
        """Take the encrypted vector of a key user."""
        return await completed(self._publish(request.request))

    async def _publish(self, request: expansion_pb2.SealedRequest) -> wire.PublishEncryptedResponse:
        opened = await self._open(Kind.PUBLISH_LATENT, request)
        upload = parsed(wire.LatentUpload, opened.request)
        public = await self._public_key(opened.record)
        await self._accounting.in_thread(
            "check latents", 1, _check_vector, upload.vector, public, opened.record
        )
        now, upload_id = clocks.now(), opened.request.place.upload_id
        with storing(self._store_holds):
            most = opened.record.terms.most
            await self._store.publish(opened.kept, upload_id, upload.vector, most, now)
        return wire.PublishEncryptedResponse()

    async def ForgetEncrypted(  # noqa: N802 - the contract's name
        self, request: wire.ForgetEncryptedRequest, context: Any
    ) -> wire.ForgetEncryptedResponse:
        """Delete the vector of a key user, and combinations that have a part of it."""
        return await completed(self._forget(request.request))

    async def _forget(self, request: expansion_pb2.SealedRequest) -> wire.ForgetEncryptedResponse:
        opened = await self._open(Kind.FORGET_LATENT, request)
        parsed(wire.LatentForgetOrder, opened.request)
        with storing(self._store_holds):
            state = await self._store.forget(opened.kept, opened.request.place.upload_id)
        if state is SetState.VOID:
            _log.info("meta-latents deleted", run=opened.kept.run_id, epoch=opened.kept.epoch)
            self._wake()
        return wire.ForgetEncryptedResponse()

    # --- whoever asks ------------------------------------------------------------------------------------------------

    async def PseudoMetaLatents(  # noqa: N802 - the contract's name
        self, request: wire.PseudoMetaLatentsRequest, context: Any
    ) -> wire.PseudoMetaLatentsResponse:
        """Return pseudo meta-latents of a set to a holder of its key, a part at a time."""
        check_run(request.run_id, "run_id")
        if len(request.participant) != _ID:
            raise _invalid("participant", f"{len(request.participant)} bytes", f"{_ID} bytes")
        with storing(self._store_holds):
            await self._directory.check_speaks(str(current_peer()), request.participant, "participant")
            kept = await self._store.at(request.run_id, request.epoch)
        record = _record_of(kept)
        key = await self._paillier_key(request.run_id, request.epoch)
        if request.participant not in key.holders:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
                "the participant does not hold the Paillier key of the set",
                field="participant",
                expected="a holder, which alone can decrypt pseudo meta-latents",
            )
        _check_ready(kept)
        if request.first >= record.terms.combinations:
            raise _invalid("first", str(request.first), f"below {record.terms.combinations}")
        size = record.terms.packing(key.key.bits).ciphertexts(record.terms.dimension) * key.key.bits // 4
        with storing(self._store_holds):
            found = await self._store.combinations(kept, request.first, max(_ANSWER_BYTES // size, 1))
        return wire.PseudoMetaLatentsResponse(vectors=found)

    # --- parts -------------------------------------------------------------------------------------------------------

    async def _combine(self, kept: KeptSet) -> None:
        record = _record_of(kept)
        if kept.key_users < record.terms.least:
            await self._store.void(kept)
            _log.warning(
                "too few key users: no meta-latents",
                run=kept.run_id,
                epoch=kept.epoch,
                key_users=kept.key_users,
                least=record.terms.least,
            )
            return
        public, vectors = await self._public_key(record), await self._store.vectors(kept)
        try:
            combined = await self._accounting.in_thread(
                "combine latents", record.terms.combinations, _combined, vectors, public, record, self._seed
            )
        except CryptoError as error:
            await self._store.void(kept)
            _log.error(
                "no meta-latents can be formed", run=kept.run_id, epoch=kept.epoch, message=error.message
            )
            return
        if await self._store.keep(kept, combined):
            _log.info(
                "meta-latents formed",
                run=kept.run_id,
                epoch=kept.epoch,
                key_users=len(vectors),
                count=len(combined),
            )

    async def _open(self, kind: Kind, request: expansion_pb2.SealedRequest) -> _Opened:
        check_request(request)
        with storing(self._store_holds):
            kept = await self._store.at(request.run_id, request.epoch)
        with self._accounting.activity("sealed"):
            found = open_sealed(kind, request, self._keys.find)
        return _Opened(kept, _record_of(kept), found)

    async def _paillier_key(self, run_id: str, epoch: int) -> KeyRecord:
        if not 1 <= epoch < 1 << 31:
            raise _invalid("epoch", f"epoch {epoch}", "1 to 2^31 - 1")
        with storing(self._store_holds):
            kept = await self._directory.paillier_key(run_id, epoch)
        if kept is None:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
                f"the run has no Paillier key of epoch {epoch}",
                field="epoch",
                expected="that of a complete key",
            )
        return record_from_wire(thirdparty_pb2.PaillierRecord.FromString(kept.record))

    async def _public_key(self, record: LatentRecord) -> PublicKey:
        held = self._public.get(record.key_id)
        if held is None:
            key = await self._paillier_key(record.run, record.epoch)
            held = await asyncio.to_thread(key.key.as_stated)
            if len(self._public) >= _KEYS_HELD:
                self._public.clear()
            self._public[record.key_id] = held
        return held

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _require_arithmetic() -> None:
    """Refuse sets where the library that combines vectors is not installed: other runs go on without it."""
    if find_spec("gmpy2") is None:
        raise Refusal(
            ErrorReason.ERROR_REASON_WRONG_STATE,
            "this third party combines no vectors: gmpy2 is not installed there",
            field="record",
            expected="a third party with Coterie's extra `paillier`",
        )


def _combined(vectors: list[bytes], public: PublicKey, record: LatentRecord, seed: int | None) -> list[bytes]:
    """Draw which key users are in each pseudo meta-latent, and form all of them."""
    # Only now: a third party without meta-latents needs no gmpy2.
    from coterie.crypto.paillier import PublicObfuscators, from_bytes, to_bytes
    from coterie.crypto.paillier.combination import combine

    terms = record.terms
    packing, obfuscators = terms.packing(public.bits), PublicObfuscators(public)
    parsed_ones = [from_bytes(one, public, packing, terms.dimension) for one in vectors]
    source = None if seed is None else seeded(seed, record.epoch)
    drawn = draw_combinations(len(vectors), terms.members, terms.combinations, source)
    return [
        to_bytes(combine([parsed_ones[at] for at in one.members], one.weights, obfuscators)) for one in drawn
    ]


def _check_vector(content: bytes, public: PublicKey, record: LatentRecord) -> None:
    from coterie.crypto.paillier import from_bytes

    terms = record.terms
    try:
        from_bytes(content, public, terms.packing(public.bits), terms.dimension)
    except VerificationError as error:
        raise refusal_of(
            error, "vector", f"{terms.dimension} values of {terms.bits} bits under the run's Paillier key"
        ) from error


def _check_ready(kept: KeptSet) -> None:
    if kept.state is SetState.VOID:
        raise Refusal(
            ErrorReason.ERROR_REASON_WRONG_STATE,
            f"the set of meta-latents of epoch {kept.epoch} is void: too few key users, or one of them was forgotten",
            field="epoch",
            expected="the set of the next epoch of the Paillier key",
        )
    if kept.state is not SetState.READY:
        raise Refusal(
            ErrorReason.ERROR_REASON_NOT_READY,
            f"the set of meta-latents of epoch {kept.epoch} has {kept.key_users} key users and is not combined yet",
            field="epoch",
            expected="the same request later",
        )


def _record_of(kept: KeptSet) -> LatentRecord:
    return latent_record_from_wire(wire.LatentRecord.FromString(kept.record))


def _invalid(field: str, message: str, expected: str) -> Refusal:
    return Refusal(ErrorReason.ERROR_REASON_INVALID_FIELD, message, field=field, expected=expected)
