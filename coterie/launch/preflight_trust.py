"""Preflight checks of a service's trust: its certificate or token, the authority, and the peers it calls."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from grpc_health.v1 import health_pb2

from coterie.config.base import EnrolSettings, Peer, ServiceSettings
from coterie.config.services import (
    ClientSettings,
    CosSettings,
    DataOwnerSettings,
    DecryptingClientSettings,
    ThirdPartySettings,
)
from coterie.crypto.authority import (
    issuer_of,
    load_tls_key,
    logical_name,
    renewal_time,
    token_hash,
)
from coterie.crypto.id_tokens import is_id_token
from coterie.crypto.keyfile import read_private_file
from coterie.errors import CertificateError, CoterieError
from coterie.launch.finding import Finding, failed, passed
from coterie.launch.preflight_peer import ask, check_clock, met, mismatch
from coterie.net.credentials import TlsFiles
from coterie.store.authority import load_secrets, secrets_exist

__all__ = ["check_authority", "check_certificate", "check_enrolment", "check_peers"]


def check_authority(settings: ThirdPartySettings) -> Iterator[Finding]:
    """Check the third party's authority (keys and certificate) and its file of tokens."""
    if not secrets_exist(settings.state):
        if (settings.state / "directory.db").exists():
            yield Finding(
                "authority",
                "fail",
                f"{settings.state} holds a directory but no authority",
                "restore ca.pem, ca-key.pem and directory-signing.key from a backup",
            )
        else:
            yield passed("authority", "will be made at the first start")
        return
    try:
        secrets = load_secrets(settings.state)
    except CoterieError as error:
        yield failed("authority", error, "restore it from a backup")
        return
    certificate = x509.load_pem_x509_certificate(secrets.authority.certificate_pem)
    yield _validity("authority", certificate, "a new authority is a new federation")
    path = settings.tokens or settings.state / "tokens.jsonl"
    if path.exists() and not os.access(path, os.R_OK):
        yield Finding("tokens", "fail", f"{path} cannot be read", "give it to the user that runs the service")
    elif path.exists():
        yield passed("tokens", str(path))
    else:
        yield Finding(
            "tokens", "warn", f"{path} is not there: nobody can enrol yet", "`coterie certs token` makes it"
        )


def check_certificate(role: str, settings: ServiceSettings, tls: TlsFiles) -> Iterator[Finding]:
    """Check a service's certificate: name, key, authority and validity; without one, its token to enrol."""
    if not tls.complete():
        yield from _token(role, settings, "no certificate yet")
        return
    party = f"{role}/{settings.name}"
    again = f"remove {tls.folder} and enrol with a new token"
    try:
        held = tls.identity()
        certificate = x509.load_pem_x509_certificate(tls.chain.read_bytes())
        if str(held) != party:
            yield Finding(
                "certificate",
                "fail",
                f"the certificate in {tls.folder} is {held}'s, and this is {party}",
                "give every process a state folder of its own",
            )
            return
        if certificate.public_key() != load_tls_key(tls.key).public_key():
            yield Finding("certificate", "fail", f"{tls.key} is not the certificate's key", again)
            return
        try:
            issuer_of(certificate, tls.authority.read_bytes())
        except CertificateError as error:
            problem = f"the certificate in {tls.folder} is not of the authority in ca.pem: {error.message}"
            yield Finding("certificate", "fail", problem, again)
            return
    except CoterieError as error:
        yield failed("certificate", error, again)
        return
    except (OSError, ValueError, TypeError, InvalidSignature):
        yield Finding(
            "certificate", "fail", f"the certificate in {tls.folder} is not of the authority in ca.pem", again
        )
        return
    validity = _validity("certificate", certificate, again, tls.chain.read_bytes(), party)
    if validity.status == "fail" and settings.enrol is not None:
        # A service with a token replaces its expired certificate when it starts.
        yield Finding("certificate", "warn", validity.problem, "a new token in enrol.token_file renews it")
        yield from _token(role, settings, "the certificate does not hold")
    else:
        yield validity
    if not (settings.state / "directory.key").is_file():
        yield Finding(
            "directory key",
            "fail",
            f"{settings.state / 'directory.key'} is missing",
            "enrol again, with a new token",
        )


def _validity(
    check: str, certificate: x509.Certificate, fix: str, pem: bytes | None = None, whose: str = ""
) -> Finding:
    now = time.time()
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begin.timestamp():
        return Finding(
            check,
            "fail",
            f"it is valid from {begin:%Y-%m-%d %H:%M} UTC, and this machine's clock says "
            f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(now))} UTC",
            "set the clock of this machine, or of the one that made the certificate",
        )
    if now >= end.timestamp():
        return Finding(check, "fail", f"it expired at {end:%Y-%m-%d %H:%M} UTC", fix)
    text = f"{whose} until {end:%Y-%m-%d %H:%M} UTC".strip()
    if pem is not None and now >= renewal_time(pem):
        return Finding(
            check,
            "warn",
            f"{text}: it is due for renewal",
            "start the process, which renews it where the third party is reached; after its end it takes a new token",
        )
    return passed(check, text)


def _token(role: str, settings: ServiceSettings, why: str) -> Iterator[Finding]:
    enrol: EnrolSettings | None = settings.enrol
    if enrol is None:
        yield Finding(
            "certificate",
            "fail",
            f"{why}, and the configuration does not say how to enrol",
            "add the section [enrol] with address, ca_file and token_file",
        )
        return
    yield passed("certificate", f"{why}: enrols at {enrol.address}")
    make = f"`coterie certs token --role {role} --name {settings.name}` at the third party makes one"
    try:
        text = read_private_file(enrol.token_file).decode().strip()
        if not (role == "client" and is_id_token(text)):
            token_hash(text)
    except UnicodeDecodeError:
        yield Finding("token", "fail", f"{enrol.token_file} holds no token", make)
    except CoterieError as error:
        yield Finding("token", "fail", error.message, error.hint or make)
    else:
        yield passed("token", f"{enrol.token_file}; whether it is unused only the third party knows")
    try:
        authority = x509.load_pem_x509_certificate(enrol.ca_file.read_bytes())
    except OSError as error:
        yield Finding(
            "ca_file",
            "fail",
            f"cannot read {enrol.ca_file}: {error.strerror}",
            "copy ca.pem of the third party",
        )
    except ValueError:
        yield Finding(
            "ca_file", "fail", f"{enrol.ca_file} is no certificate in PEM", "copy ca.pem of the third party"
        )
    else:
        yield _validity("ca_file", authority, "copy ca.pem of the third party again")


_Parties = DataOwnerSettings | ClientSettings | DecryptingClientSettings


async def check_peers(settings: ServiceSettings, tls: TlsFiles, timeout_s: float) -> AsyncIterator[Finding]:
    """Check that each service that this one calls answers within ``timeout_s`` seconds, with the right certificate."""
    wanted: list[tuple[str, Peer]] = []
    if isinstance(settings, CosSettings | _Parties):
        wanted.append(("thirdparty", settings.thirdparty))
    if isinstance(settings, _Parties):
        wanted.append(("cos", settings.cos))
    authority = _authority(settings, tls)
    for role, peer in wanted:
        async for finding in _peer(role, peer, tls, authority, timeout_s):
            yield finding
    if not tls.complete() and settings.enrol is not None and wanted:
        yield await check_enrolment(settings.enrol, timeout_s)


def _authority(settings: ServiceSettings, tls: TlsFiles) -> bytes | None:
    """Return the authority's certificate, PEM; None when there is no readable one."""
    places = [tls.authority, *([settings.enrol.ca_file] if settings.enrol is not None else [])]
    for path in places:
        try:
            pem = path.read_bytes()
            x509.load_pem_x509_certificate(pem)
        except (OSError, ValueError):
            continue
        return pem
    return None


async def _peer(
    role: str, peer: Peer, tls: TlsFiles, authority: bytes | None, timeout_s: float
) -> AsyncIterator[Finding]:
    party = f"{role}/{peer.name}"
    check = f"peer {party}"
    problem = await _reaches(peer.address, timeout_s)
    if problem is not None:
        yield Finding(
            check,
            "fail",
            f"nothing answers at {peer.address}: {problem}",
            f"start {party} there, or correct {role}.address; is a firewall between?",
        )
        return
    shown = await met(peer.address, timeout_s)
    if shown is not None and authority is not None:
        wrong = mismatch(shown, role, peer.name, authority, time.time())
        if wrong is not None:
            who = f"what listens at {peer.address} is not {party} of this federation as it should be"
            yield Finding(check, "fail", f"{who}: it is {wrong.problem}", wrong.fix)
            return
    if not tls.complete():
        yield passed(check, f"{peer.address}, {_shown(shown)}; mutual TLS after enrolment")
        return
    try:
        load_tls_key(tls.key)  # for a clear error: gRPC reports a bad key only as a failed handshake
        status, clock = await ask(peer, role, tls.channel_credentials(), timeout_s)
    except CoterieError as error:
        yield failed(check, error, "enrol first")
        return
    except grpc.aio.AioRpcError as error:
        yield _refused(check, party, peer.address, error, known=shown is not None and authority is not None)
        return
    if status == health_pb2.HealthCheckResponse.SERVING:
        yield passed(check, f"{peer.address}, {_shown(shown)}, mutual TLS, healthy")
    else:
        yield Finding(
            check, "warn", f"{party} at {peer.address} is not ready yet", "its log says what it waits for"
        )
    if clock is not None:
        yield check_clock(party, clock)


def _shown(certificate: x509.Certificate | None) -> str:
    if certificate is None:
        return "takes connections"
    return f"certificate until {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"


def _refused(check: str, party: str, address: str, error: grpc.aio.AioRpcError, *, known: bool) -> Finding:
    details = (error.details() or "").splitlines()[0][:200] if error.details() else ""
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        if known:
            return Finding(
                check,
                "fail",
                f"{party} answers at {address}, and does not take this machine's certificate: {details}",
                "is it of the same authority, and does it still hold by the clock of both machines?",
            )
        return Finding(
            check,
            "fail",
            f"what listens at {address} is not {party} of this federation: {details}",
            "is the name right, the certificate of the same authority, and the clock of both machines?",
        )
    return Finding(
        check,
        "fail",
        f"{party} at {address} refused: {error.code().name}: {details}",
        "was this certificate revoked, or made for another role?",
    )


async def check_enrolment(enrol: EnrolSettings, timeout_s: float) -> Finding:
    """Check that the third party takes enrolments at the configured address, within ``timeout_s`` seconds."""
    check = "enrolment"
    problem = await _reaches(enrol.address, timeout_s)
    if problem is not None:
        return Finding(
            check,
            "fail",
            f"nothing answers at {enrol.address}: {problem}",
            "start the third party there, or correct enrol.address",
        )
    try:
        credentials = grpc.ssl_channel_credentials(root_certificates=enrol.ca_file.read_bytes())
    except OSError as error:
        return Finding(check, "fail", f"cannot read {enrol.ca_file}: {error.strerror}", "copy ca.pem there")
    channel = grpc.aio.secure_channel(
        enrol.address,
        credentials,
        options=[("grpc.ssl_target_name_override", logical_name("thirdparty", enrol.name))],
    )
    try:
        async with asyncio.timeout(timeout_s):
            await channel.channel_ready()
    except TimeoutError:
        shown = await met(enrol.address, timeout_s)
        try:
            authority = enrol.ca_file.read_bytes()
            wrong = shown and mismatch(shown, "thirdparty", enrol.name, authority, time.time())
        except (OSError, ValueError):
            wrong = None
        it_is = f": it is {wrong.problem}" if wrong else ""
        return Finding(
            check,
            "fail",
            f"what listens at {enrol.address} is not the third party {enrol.name!r} of {enrol.ca_file}{it_is}",
            "is enrol.name right, and ca_file the third party's ca.pem?",
        )
    finally:
        await channel.close()
    return passed(check, f"{enrol.address}, verified by {enrol.ca_file}")


async def _reaches(address: str, timeout_s: float) -> str | None:
    """Return why no TCP connection to an address is made within ``timeout_s`` seconds; None when one is."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except socket.gaierror as error:  # its error numbers are unknown to `os.strerror`
        return error.strerror or str(error)
    except (OSError, OverflowError, UnicodeError) as error:  # the last: a name that is no host's
        number = getattr(error, "errno", None)
        return os.strerror(number) if number else str(error)
    writer.close()
    return None
