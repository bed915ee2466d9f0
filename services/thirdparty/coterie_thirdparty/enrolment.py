"""Enrol parties: exchange a one-time token for a certificate and countersigned bundles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import structlog

from coterie.crypto import clocks
from coterie.crypto.authority import TokenRecord, token_hash
from coterie.errors import CertificateError
from coterie.net.server import name_caller
from coterie.store.thirdparty import Published, Redemption, ThirdPartyStore
from coterie.store.tokens import TokenFile
from coterie.telemetry.accounting import Accounting
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1.common_pb2 import KeyBundle
from coterie.wire.v1.thirdparty_pb2 import (
    EnrolRequest,
    EnrolResponse,
    RenewCertificateResponse,
    RenewExpiredRequest,
)
from coterie.wire.v1.thirdparty_pb2_grpc import EnrolmentServicer
from coterie.wire.versions import agree, own
from coterie_thirdparty.certification import PER_MESSAGE, Certification, Countersigned, check_count
from coterie_thirdparty.late_renewal import LateRenewal
from coterie_thirdparty.storing import storing

__all__ = ["Enrolment"]

_log = structlog.get_logger("coterie.thirdparty")

_PER_CALL = 50_000
"""Most bundles in one call, so that their countersignatures fit into one answer."""


class Enrolment(EnrolmentServicer):
    """The gRPC servicer for parties that have a token and no certificate yet.

    Parameters
    ----------
    certification : Certification
        Signs certificates and bundles.
    tokens : TokenFile
        The operator's tokens.
    store : ThirdPartyStore
        Keeps redeemed tokens and published bundles.
    accounting : Accounting
        Counts CPU time for signatures.
    store_holds : callable
        Called with whether the store works.
    late : LateRenewal
        Renews expired certificates.
    """

    def __init__(
        self,
        certification: Certification,
        tokens: TokenFile,
        store: ThirdPartyStore,
        accounting: Accounting,
        store_holds: Callable[[bool], None],
        late: LateRenewal,
    ) -> None:
        self._late = late
        self._certification = certification
        self._tokens = tokens
        self._store = store
        self._accounting = accounting
        self._store_holds = store_holds

    async def Enrol(  # noqa: N802 - the contract's name
        self, request_iterator: AsyncIterator[EnrolRequest], context: Any
    ) -> EnrolResponse:
        """Enrol a party, all or nothing; its token is checked before bundles are read."""
        head: EnrolRequest | None = None
        record: TokenRecord | None = None
        done: list[Countersigned] = []
        async for request in request_iterator:
            if head is None or record is None:
                head, record = request, await self._admit(request)
                name_caller(_party(record))
                agree(_party(record), request.protocol)
            check_count(len(request.bundles), PER_MESSAGE, "bundles")
            check_count(len(done) + len(request.bundles), min(record.max_participants, _PER_CALL), "bundles")
            done += await asyncio.to_thread(self._countersign, request.bundles, _party(record))
        if head is None or record is None:
            raise Refusal(ErrorReason.ERROR_REASON_INVALID_FIELD, "an empty enrolment", field="token")
        chain = await self._redeem(record, head.certificate_request, [one.published for one in done])
        _log.info("enrolled", party=_party(record), participants=len(done))
        return EnrolResponse(
            certificate_chain=chain,
            directory_key=self._certification.directory_key,
            countersignatures=[one.signature for one in done],
            protocol=own(),
        )

    async def RenewExpired(  # noqa: N802 - the contract's name
        self, request: RenewExpiredRequest, context: Any
    ) -> RenewCertificateResponse:
        """Renew the certificate of a client host that was away when it expired."""
        return RenewCertificateResponse(certificate_chain=await self._late.renew(request))

    async def _admit(self, request: EnrolRequest) -> TokenRecord:
        """Return the record of the request's token, after checking that it is valid for the role and name."""
        try:
            key = token_hash(request.token)
        except CertificateError as error:
            raise _bad_token(error.message) from error
        record = self._tokens.find(key)
        if record is None:
            raise _bad_token("no such token")
        if (request.role, request.name) != (record.role, record.name):
            raise _bad_token("this token was made for another role or name")
        if record.expired(clocks.now_s()):
            with storing(self._store_holds):
                redeemed = await self._store.redeemed(key)
            # A party that redeemed the token in time may ask again with the same key if the answer was lost.
            if redeemed is None:
                raise _bad_token("this token has expired")
        return record

    def _countersign(self, bundles: Sequence[KeyBundle], party: str) -> list[Countersigned]:
        with self._accounting.activity("signatures", len(bundles)):
            return self._certification.countersign(bundles, party)

    async def _redeem(self, record: TokenRecord, request: bytes, published: Sequence[Published]) -> bytes:
        issued = self._certification.issue(request, record.role, record.name)
        redemption = Redemption(
            token_hash=record.token_hash,
            party=_party(record),
            participants=record.max_participants,
            public_key_hash=issued.public_key_hash,
            fingerprint=issued.fingerprint,
            chain=issued.chain,
            redeemed=clocks.now(),
        )
        with storing(self._store_holds):
            return await self._store.enrol(redemption, published)


def _party(record: TokenRecord) -> str:
    return f"{record.role}/{record.name}"


def _bad_token(message: str) -> Refusal:
    return Refusal(
        ErrorReason.ERROR_REASON_BAD_TOKEN,
        message,
        field="token",
        expected="an unused token that was made for this role and name",
    )
