"""Preflight checks of one peer: the certificate it shows, its health, and the offset of its clock."""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import NamedTuple

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coterie.config.base import Peer
from coterie.crypto.authority import (
    PeerIdentity,
    issuer_of,
    logical_name,
)
from coterie.crypto.clocks import CLOCK_SKEW_S
from coterie.errors import CertificateError
from coterie.launch.finding import Finding, passed
from coterie.net.clocks import CLOCK_KEY, NOTED_S

__all__ = ["Clock", "ask", "check_clock", "met", "mismatch"]


class Clock(NamedTuple):
    """Offset of a peer's clock from this machine's."""

    ahead_s: float
    """How far the peer's clock is ahead, seconds; negative when it is behind."""
    within_s: float
    """Error bound of the offset, seconds: half of the call's round-trip time."""


async def met(address: str, timeout_s: float) -> x509.Certificate | None:
    """Return the certificate that the peer at an address shows, unverified; None when no peer there speaks TLS.

    Only the TLS handshake is sent.  The certificate is for diagnosis only: nothing may rely on it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    except (OSError, TimeoutError):  # ssl.SSLError is an OSError
        return None
    try:
        shown: bytes | None = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return None if shown is None else x509.load_der_x509_certificate(shown)
    except ValueError:
        return None
    finally:
        writer.transport.abort()


def mismatch(shown: x509.Certificate, role: str, name: str, authority: bytes, now: float) -> Finding | None:
    """Return what is wrong with a peer's certificate, as a finding without a check's name; None when nothing is.

    Parameters
    ----------
    shown : x509.Certificate
    role, name : str
        The expected party.
    authority : bytes
        The authority's certificate, PEM.
    now : float
        This machine's time, Unix seconds.
    """
    try:
        who = str(PeerIdentity.from_certificate(shown.public_bytes(Encoding.PEM)))
    except CertificateError:
        who = "no service of Coterie"
    try:
        issuer_of(shown, authority)
    except (CertificateError, ValueError):
        return _failure(
            f"{who} of another authority ({shown.issuer.rfc4514_string()})",
            "is it another federation's, or was the authority made anew? Then everybody enrols again",
        )
    if who != f"{role}/{name}":
        return _failure(f"{who}", "is the address right, and the name in the configuration?")
    begin, end = shown.not_valid_before_utc, shown.not_valid_after_utc
    clock = f"this machine's clock says {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(now))} UTC"
    if now < begin.timestamp():
        return _failure(
            f"{who} with a certificate that is valid from {begin:%Y-%m-%d %H:%M:%S} UTC, and {clock}",
            "set the clock of this machine, or of the third party's",
        )
    if now >= end.timestamp():
        return _failure(
            f"{who} with a certificate that ended at {end:%Y-%m-%d %H:%M:%S} UTC, and {clock}",
            "it needs a new token, unless this machine's clock is ahead",
        )
    return None


def _failure(problem: str, fix: str) -> Finding:
    return Finding("", "fail", problem, fix)


async def ask(
    peer: Peer, role: str, credentials: grpc.ChannelCredentials, timeout_s: float
) -> tuple[int, Clock | None]:
    """Return a peer's health status (by mutual TLS) and the offset of its clock; None when it tells no time.

    Raises
    ------
    grpc.aio.AioRpcError
        The peer does not answer, or refuses.
    """
    name = logical_name(role, peer.name)
    channel = grpc.aio.secure_channel(
        peer.address, credentials, options=[("grpc.ssl_target_name_override", name)]
    )
    try:
        # The first call makes the connection; the second one is timed.
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        before = time.time()
        call = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        response = await call
        after = time.time()
        told = dict(await call.trailing_metadata() or ()).get(CLOCK_KEY)
    finally:
        await channel.close()
    return int(response.status), None if told is None else _clock(str(told), before, after)


def _clock(told: str, before: float, after: float) -> Clock | None:
    try:
        there = int(told) / 1e3
    except ValueError:
        return None
    return Clock(there - (before + after) / 2, (after - before) / 2)


def check_clock(party: str, clock: Clock) -> Finding:
    """Check that a peer's clock is near enough to this machine's: warn above 30 s, fail above `CLOCK_SKEW_S`."""
    check = f"clock of {party}"
    off = abs(clock.ahead_s)
    text = (
        f"the clock of {party} is {off:.1f} s {'ahead of' if clock.ahead_s > 0 else 'behind'} this machine's, "
        f"within {clock.within_s:.1f} s"
    )
    least = off - clock.within_s
    fix = "set one of the two: let both follow the same time servers"
    if least > CLOCK_SKEW_S:
        return Finding(check, "fail", f"{text}; {CLOCK_SKEW_S} s are tolerated", fix)
    if least > NOTED_S:
        return Finding(check, "warn", text, fix)
    return passed(check, text)
