"""Renewal of a running process's TLS certificate, before the current certificate ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import grpc
import structlog
from cryptography import x509

from coterie.crypto import clocks
from coterie.crypto.authority import (
    PeerIdentity,
    authorities,
    issuer_of,
    load_tls_key,
    make_csr,
    renewal_time,
    validity_of,
)
from coterie.crypto.keyfile import write_private_file
from coterie.errors import CertificateError, CoterieError
from coterie.net.channel import Channel
from coterie.net.credentials import TlsFiles
from coterie.net.enrolment import check_begun, check_chain
from coterie.net.status import from_rpc_error
from coterie.wire.v1.thirdparty_pb2 import RenewCertificateRequest, RenewCertificateResponse
from coterie.wire.v1.thirdparty_pb2_grpc import KeyDirectoryStub

if TYPE_CHECKING:
    from coterie.wire.v1.thirdparty_pb2_grpc import KeyDirectoryAsyncStub

__all__ = ["Renewal"]

_log = structlog.get_logger("coterie.renewal")

_FIRST, _LAST = 2 / 3, 3 / 4
"""Shares of a certificate's validity between which it is renewed, at random: parties do not all renew at once."""
_LOOK_S = 60.0
"""Longest time between two looks at the clock and at the certificate's file, seconds."""
_LONGEST_PAUSE_S = 300.0
_CALL_S = 30.0


class Renewal:
    """Renews the certificate of one process in time, and tells the process when a new certificate is in place.

    The private key stays the same.  A chain that an operator puts into the folder is taken up, too.

    Parameters
    ----------
    tls : TlsFiles
        Key and certificate of the process.
    open_channel : callable
        Opens a channel to the third party with the current certificate.
    on_renewed : callable
        Called when there is another certificate; the process then makes its connections anew.
    on_change : callable, optional
        Called with whether the certificate is valid, whenever that changes; at first it is valid.
    enrol : callable, optional
        Gets another certificate once the current one has ended: by a new token, if there is one.
    clock : callable
        Unix seconds.
    sleep : callable
        Waits the given seconds.
    """

    def __init__(
        self,
        tls: TlsFiles,
        open_channel: Callable[[], Channel],
        on_renewed: Callable[[], None],
        on_change: Callable[[bool], None] | None = None,
        enrol: Callable[[], Awaitable[None]] | None = None,
        *,
        clock: Callable[[], float] = clocks.now_s,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._tls = tls
        self._open_channel = open_channel
        self._on_renewed = on_renewed
        self._on_change = on_change
        self._enrol = enrol
        self._clock = clock
        self._sleep = sleep
        self._chain = b""
        self._doubted: bytes | None = None
        self._holds = True
        self._take_up(tls.chain.read_bytes())
        self._authorities = self._refused = tls.authority.read_bytes()
        self._looked = asyncio.Event()
        self.renewed = 0
        """Number of renewals."""
        self.failed = 0
        """Number of failed attempts to renew."""

    @property
    def end(self) -> float:
        """End of the current certificate's validity, Unix seconds."""
        return self._end

    @property
    def due(self) -> float:
        """When the certificate is to be renewed, Unix seconds."""
        return self._due

    async def looked(self) -> None:
        """Wait until the certificate was looked at, and renewed if it was due, or tried to be once."""
        await self._looked.wait()

    async def run(self) -> None:
        """Renew the certificate whenever it is due, until cancelled."""
        while True:
            self._look_at_the_files()
            now = self._clock()
            self._report(now < self._end)
            if now < self._due:
                self._looked.set()
                await self._sleep(min(self._due - now, _LOOK_S))
                continue
            try:
                if now >= self._end and self._enrol is not None:
                    await self._enrol()  # the next turn of the loop reads the new chain
                    continue
                await self._renew()
            except CoterieError as error:
                self.failed += 1
                self._looked.set()
                await self._sleep(self._put_off(error))

    def _put_off(self, error: CoterieError) -> float:
        """Log that the certificate was not renewed, and return the pause before the next attempt, seconds."""
        left = self._end - self._clock()
        self._report(left > 0)
        if left > 0:
            _log.warning("cannot renew the certificate yet", error=error.message, left_s=round(left))
        else:
            _log.error(
                "the certificate has ended, nobody takes it any more",
                error=error.message,
                hint="put a new token into enrol.token_file (`coterie certs token`)",
            )
        pause = min(max(0.1, (self._end - self._issued) / 30), _LONGEST_PAUSE_S)
        pause = random.uniform(pause / 2, pause)  # noqa: S311 - jitter
        # No pause goes past the certificate's end: it is reported when it comes.
        return min(pause, left) if left > 0 else pause

    async def _renew(self) -> None:
        request = RenewCertificateRequest(certificate_request=make_csr(load_tls_key(self._tls.key)))
        channel = self._open_channel()
        stub: KeyDirectoryAsyncStub = channel.stub(lambda inner: KeyDirectoryStub(inner))
        timeout = min(_CALL_S, max(1.0, (self._end - self._issued) / 10))
        try:
            response: RenewCertificateResponse = await stub.RenewCertificate(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, channel.peer) from error
        finally:
            await channel.close()
        chain = response.certificate_chain
        held = PeerIdentity.from_certificate(self._chain)
        check_chain(held.role, held.name, self._tls, chain, self._tls.authority.read_bytes())
        check_begun(chain, channel.peer, self._clock())
        if validity_of(chain)[1] <= self._end:
            raise CertificateError("the third party answered with a certificate that ends no later")
        write_private_file(self._tls.chain, chain)
        self.renewed += 1
        self._take_up(chain)
        _log.info("renewed the certificate", left_s=round(self._end - self._clock()))
        self._on_renewed()

    def _look_at_the_files(self) -> None:
        self._look_at_the_authorities()
        chain: bytes | None = None
        try:
            chain = self._tls.chain.read_bytes()
            if chain == self._chain:
                self._doubted = None
                return
            self._take_up(chain)
        except (OSError, CertificateError):
            # The file may be half-written; the current certificate stays in use.
            self._put_back(chain)
            return
        self._doubted = None
        _log.info("took up another certificate")
        self._on_renewed()

    def _look_at_the_authorities(self) -> None:
        """Take up other authorities that an operator wrote into the folder, if they issued the certificate in use."""
        try:
            found = self._tls.authority.read_bytes()
            if found == self._authorities:
                return
            issuer_of(x509.load_pem_x509_certificate(self._chain), found)
        except (OSError, ValueError):
            # The file may be half-written.
            return
        except CertificateError as error:
            if found != self._refused:
                _log.error(
                    "other authorities are not taken up", error=error.message, file=str(self._tls.authority)
                )
            self._refused = found
            return
        self._authorities = found
        _log.info("took up other authorities", authorities=len(authorities(found)))
        self._on_renewed()

    def _put_back(self, found: bytes | None) -> None:
        """Write the certificate in use to its file, if that was damaged in the same way at the look before."""
        if found is None or found != self._doubted:
            self._doubted = found
            return
        self._doubted = None
        try:
            write_private_file(self._tls.chain, self._chain)
        except CertificateError as error:
            _log.warning("a damaged certificate file cannot be written", error=error.message)
        else:
            _log.warning("a damaged certificate file was put back", file=str(self._tls.chain))

    def _take_up(self, chain: bytes) -> None:
        self._issued, self._end = validity_of(chain)
        self._due = renewal_time(chain, random.uniform(_FIRST, _LAST))  # noqa: S311 - jitter
        self._chain = chain

    def _report(self, holds: bool) -> None:
        if holds != self._holds and self._on_change is not None:
            self._on_change(holds)
        self._holds = holds
