"""Renewal of an expired certificate by a client host that was away when it ended."""

from __future__ import annotations

import grpc

from coterie.crypto import clocks
from coterie.crypto.authority import load_tls_key, logical_name, make_csr, validity_of
from coterie.crypto.late_renewal import sign_late_request
from coterie.errors import CertificateError
from coterie.net.channel import connect
from coterie.net.credentials import TlsFiles
from coterie.net.meter import Meter
from coterie.net.retry import Retry
from coterie.net.status import from_rpc_error, waits_for_store
from coterie.wire.v1.thirdparty_pb2 import RenewCertificateResponse, RenewExpiredRequest
from coterie.wire.v1.thirdparty_pb2_grpc import EnrolmentStub

__all__ = ["renew_expired"]

_CALL_S = 30.0
_MOST = 100
"""Most certificates of one line that are gone through: a restored folder may have one that was renewed before."""


async def renew_expired(address: str, name: str, tls: TlsFiles, timeout_s: float) -> bytes:
    """Return a certificate chain that holds, for the key and the expired certificate of a folder.

    The caller checks the chain and writes it.

    Parameters
    ----------
    address, name : str
        Address of the third party's enrolment service, and the third party's name.
    tls : TlsFiles
    timeout_s : float
        Time for which to keep trying, seconds.

    Raises
    ------
    CertificateError
        The certificates that the third party answers with end no later.
    PeerError
        The third party cannot be reached, or refuses; among others a Refusal WRONG_STATE beyond its window.
    """
    key, chain = load_tls_key(tls.key), tls.chain.read_bytes()
    request = make_csr(key)
    peer = f"thirdparty/{name}"
    channel = connect(
        address,
        grpc.ssl_channel_credentials(root_certificates=tls.authority.read_bytes()),
        tls_name=logical_name("thirdparty", name),
        peer=peer,
        meter=Meter(),
    )
    stub = channel.stub(EnrolmentStub)
    try:
        for _ in range(_MOST):
            end = validity_of(chain)[1]

            async def attempt(held: bytes = chain) -> RenewCertificateResponse:
                now = clocks.now()
                message = RenewExpiredRequest(
                    certificate=held,
                    certificate_request=request,
                    time=now,
                    signature=sign_late_request(key, held, request, name, now),
                )

                answer: RenewCertificateResponse = await stub.RenewExpired(
                    message, timeout=min(_CALL_S, timeout_s)
                )
                return answer

            response = await Retry(limit_s=timeout_s, also=waits_for_store)(attempt)
            chain = response.certificate_chain
            if validity_of(chain)[1] <= end:
                break
            if clocks.now_s() < validity_of(chain)[1]:
                return chain
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, peer) from error
    finally:
        await channel.close()
    raise CertificateError(f"{peer} answered with a certificate that ends no later")
