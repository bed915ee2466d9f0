"""Enrol parties: exchange a one-time token, or an issuer's ID token, for a certificate and countersigned bundles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import structlog

from coterie.crypto import clocks
from coterie.crypto.authority import TokenRecord, requested_key, token_hash
from coterie.crypto.id_tokens import id_token_hash, is_id_token, is_subject_name
from coterie.errors import CertificateError, PeerError
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
from coterie_thirdparty.certification import (
    PER_MESSAGE,
    Certification,
    Countersigned,
    check_count,
    unusable_request,
)
from coterie_thirdparty.id_tokens import IdTokens
from coterie_thirdparty.late_renewal import LateRenewal
from coterie_thirdparty.storing import storing

__all__ = ["Enrolment"]

_log = structlog.get_logger("coterie.thirdparty")

_PER_CALL = 50_000
"""Most bundles in one call, so that their countersignatures fit into one answer."""
_DEVICE = "client"
"""Role that ID tokens give."""


class _Admitted(NamedTuple):
    """What a request may enrol."""

    record: TokenRecord
    """Of an ID token, too: its hash, and what it gives."""
    names: tuple[str, ...] = ()
    """Parties that the subject of an ID token may have; none where the request has an enrolment token."""
    origin: Mapping[str, str] = MappingProxyType({})
    """Issuer and hash of the subject, for records."""


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
    id_tokens : IdTokens, optional
        Checks ID tokens; without it none is taken.
    """

    def __init__(
        self,
        certification: Certification,
        tokens: TokenFile,
        store: ThirdPartyStore,
        accounting: Accounting,
        store_holds: Callable[[bool], None],
        late: LateRenewal,
        id_tokens: IdTokens | None = None,
    ) -> None:
        self._id_tokens = id_tokens
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
        admitted: _Admitted | None = None
        done: list[Countersigned] = []
        async for request in request_iterator:
            if head is None or admitted is None:
                head, admitted = request, await self._admit(request)
                record = admitted.record
                name_caller(_party(record))
                agree(_party(record), request.protocol)
            check_count(len(request.bundles), PER_MESSAGE, "bundles")
            check_count(len(done) + len(request.bundles), min(record.max_participants, _PER_CALL), "bundles")
            done += await asyncio.to_thread(self._countersign, request.bundles, _party(record))
        if head is None or admitted is None:
            raise Refusal(ErrorReason.ERROR_REASON_INVALID_FIELD, "an empty enrolment", field="token")
        chain = await self._redeem(admitted, head.certificate_request, [one.published for one in done])
        _log.info("enrolled", party=_party(record), participants=len(done), **admitted.origin)
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

    async def _admit(self, request: EnrolRequest) -> _Admitted:
        """Return what the request's token allows, after checking that it is valid for the role and name."""
        if is_id_token(request.token):
            return await self._admit_device(request)
        try:
            key = token_hash(request.token)
        except CertificateError as error:
            raise _bad_token(error.message) from error
        record = self._tokens.find(key)
        if record is None:
            raise _bad_token("no such token")
        if (request.role, request.name) != (record.role, record.name):
            raise _bad_token("this token was made for another role or name")
        if record.role == _DEVICE and is_subject_name(record.name):
            raise _bad_token("this name belongs to a subject of an issuer, which no enrolment token enrols")
        if record.expired(clocks.now_s()):
            with storing(self._store_holds):
                redeemed = await self._store.redeemed(key)
            # A party that redeemed the token in time may ask again with the same key if the answer was lost.
            if redeemed is None:
                raise _bad_token("this token has expired")
        return _Admitted(record)

    async def _admit_device(self, request: EnrolRequest) -> _Admitted:
        """Return what an ID token allows."""
        if self._id_tokens is None:
            raise _bad_id_token("this third party takes no ID tokens")
        if request.role != _DEVICE:
            raise _bad_id_token(f"an ID token enrols the role {_DEVICE} alone")
        try:
            public = requested_key(request.certificate_request)
        except CertificateError as error:
            raise unusable_request(error) from error
        key = id_token_hash(request.token)
        with storing(self._store_holds):
            redeemed = await self._store.redeemed(key)
        if redeemed is not None and redeemed.party == f"{_DEVICE}/{request.name}":
            # It was checked when it was redeemed, and gives the same key the same certificate, also after its end.
            return _Admitted(TokenRecord(key, _DEVICE, request.name, 0, redeemed.participants))
        try:
            subject = await self._id_tokens.check(request.token.strip(), public)
        except PeerError as error:
            raise Refusal(ErrorReason.ERROR_REASON_NOT_READY, error.message, field="token") from error
        except CertificateError as error:
            raise _bad_id_token(f"{error.message}; {error.hint}" if error.hint else error.message) from error
        if request.name not in subject.names:
            raise _bad_id_token(
                f"this ID token does not enrol {request.name[:63]!r}, but {' or '.join(subject.names[:2])}"
            )
        record = TokenRecord(key, _DEVICE, request.name, 0, self._id_tokens.participants)
        return _Admitted(
            record,
            tuple(f"{_DEVICE}/{name}" for name in subject.names),
            {"issuer": self._id_tokens.issuer, "subject_sha256": subject.digest},
        )

    def _countersign(self, bundles: Sequence[KeyBundle], party: str) -> list[Countersigned]:
        with self._accounting.activity("signatures", len(bundles)):
            return self._certification.countersign(bundles, party)

    async def _redeem(self, admitted: _Admitted, request: bytes, published: Sequence[Published]) -> bytes:
        record = admitted.record
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
            if admitted.names:
                return await self._store.enrol_device(redemption, published, admitted.names)
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


def _bad_id_token(message: str) -> Refusal:
    return Refusal(
        ErrorReason.ERROR_REASON_BAD_TOKEN,
        message,
        field="token",
        expected="an ID token of the configured issuer, for this key and name",
    )
