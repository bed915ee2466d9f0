"""Renew the certificates of client hosts that were away when theirs expired, by a signature with its key."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from cryptography import x509

from coterie.crypto import clocks
from coterie.crypto.authority import PeerIdentity, issuer_of, validity_of
from coterie.crypto.clocks import CLOCK_SKEW_S, apart, moment
from coterie.crypto.late_renewal import check_late_request
from coterie.errors import CertificateError
from coterie.net.server import name_caller
from coterie.store.thirdparty import Renewed, ThirdPartyStore
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1.thirdparty_pb2 import RenewExpiredRequest
from coterie_thirdparty.certification import Certification
from coterie_thirdparty.storing import storing

__all__ = ["LateRenewal"]

_log = structlog.get_logger("coterie.thirdparty")

_ROLE = "client"
_DAY_S = 86_400
_TOKEN = "a new token (`coterie certs token`)"  # noqa: S105 - words for people


class LateRenewal:
    """Renews expired certificates; used by `Enrolment`.

    Parameters
    ----------
    certification : Certification
        Signs certificates.
    store : ThirdPartyStore
        Knows which certificates were issued and revoked.
    name : str
        The third party's, which requests name.
    days : float
        Time after a certificate's end in which it is renewed, days; 0 for none.
    trusted : callable
        Returns the authorities whose certificates are renewed, PEM.
    store_holds : callable
        Called with whether the store works.
    """

    def __init__(
        self,
        certification: Certification,
        store: ThirdPartyStore,
        name: str,
        days: float,
        trusted: Callable[[], bytes],
        store_holds: Callable[[bool], None],
    ) -> None:
        self._certification = certification
        self._store = store
        self._name = name
        self._days = days
        self._trusted = trusted
        self._store_holds = store_holds

    async def renew(self, request: RenewExpiredRequest) -> bytes:
        """Return the certificate chain that renews an expired certificate; the same one when it is asked again.

        Raises
        ------
        Refusal
            WRONG_STATE where only a token is of use, INVALID_FIELD for a request that is not of now or not of a
            certificate of this authority, BAD_SIGNATURE for one that its holder did not make, NOT_READY for one
            that is too young, REVOKED when any certificate of the same token is revoked.
        """
        party = self._holder(request)
        name_caller(str(party))
        self._check_time(request.time)
        try:
            check_late_request(
                request.certificate, request.certificate_request, self._name, request.time, request.signature
            )
        except CertificateError as error:
            raise Refusal(
                ErrorReason.ERROR_REASON_BAD_SIGNATURE,
                error.message,
                field="signature",
                expected="the signature of the certificate's holder, for the same key",
            ) from error
        self._check_window(request.certificate)
        self._certification.check_due(request.certificate)
        issued = self._certification.issue(request.certificate_request, party.role, party.name)
        renewed = Renewed(issued.fingerprint, issued.public_key_hash, issued.chain, clocks.now())
        with storing(self._store_holds):
            chain = await self._store.renew(party.fingerprint, renewed)
        _log.info("renewed an expired certificate", party=str(party))
        return chain

    def _holder(self, request: RenewExpiredRequest) -> PeerIdentity:
        """Return whose certificate it is, after checking that this authority made it, and that the role may ask."""
        try:
            party = PeerIdentity.from_certificate(request.certificate)
            issuer_of(x509.load_pem_x509_certificate(request.certificate), self._trusted())
        except (CertificateError, ValueError) as error:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "the certificate is not one of this authority",
                field="certificate",
                expected="the expired certificate of a party that enrolled here, PEM",
            ) from error
        if party.role != _ROLE:
            raise Refusal(
                ErrorReason.ERROR_REASON_WRONG_ROLE,
                f"an expired certificate of role {party.role} is not renewed",
                field="certificate",
                expected=f"a certificate of role {_ROLE}, or {_TOKEN}",
            )
        return party

    def _check_time(self, time: int) -> None:
        """Check that a request is of now: what was recorded earlier is worth nothing."""
        ahead = time - clocks.now_s()
        if abs(ahead) > CLOCK_SKEW_S:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                f"the request is of another time: its clock is {apart(ahead)}",
                field="time",
                expected=f"a request made within {CLOCK_SKEW_S} s of now",
            )

    def _check_window(self, certificate: bytes) -> None:
        end = validity_of(certificate)[1]
        late_s = clocks.now_s() - end
        # Also one that has not ended: its holder has a call of its own, over TLS with the certificate.
        if not self._days or late_s >= self._days * _DAY_S:
            raise Refusal(
                ErrorReason.ERROR_REASON_WRONG_STATE,
                f"the certificate expired at {moment(end)}, and this authority renews it for {self._days:g} days"
                if self._days
                else "this authority renews no expired certificate",
                field="certificate",
                expected=_TOKEN,
            )
