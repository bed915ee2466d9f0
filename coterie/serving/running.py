"""The process of ``coterie serve-model``: both servers of a model, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from coterie.errors import CertificateError, ConfigError, PreflightError
from coterie.serving.answers import ModelAnswers
from coterie.serving.http import model_app
from coterie.serving.rpc import start_rpc

__all__ = ["ServingAddresses", "serve_model"]

_GRACE_S = 5.0


@dataclass(frozen=True)
class ServingAddresses:
    """Where a model is served.

    Attributes
    ----------
    rpc, http : str or None
        ``host:port`` of gRPC and of HTTP; None for none.
    certificate, key : Path or None
        Files of the server's certificate chain and key, PEM, for both.
    """

    rpc: str | None
    http: str | None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        """Check the addresses.

        Raises
        ------
        ConfigError
            No address, one that is none, or one beyond this machine without TLS; a certificate without a key.
        """
        if self.rpc is None and self.http is None:
            raise ConfigError(
                "neither gRPC nor HTTP: nothing would be served", hint="leave --http or --grpc at an address"
            )
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("a certificate and its key go together; expected both or neither")
        for address in (self.rpc, self.http):
            if address is None:
                continue
            host, colon, port = address.rpartition(":")
            if not colon or not host or not port.isdecimal() or int(port) > 65_535:
                raise ConfigError(f"address {address!r}; expected HOST:PORT, as 127.0.0.1:8080")
            if self.certificate is None and not _is_loopback(host):
                raise ConfigError(
                    f"address {address!r} is open to other machines, and histories would cross the network in clear",
                    hint="--certificate and --key, or an address of this machine such as 127.0.0.1:8080",
                )

    def credentials(self) -> grpc.ServerCredentials | None:
        """Return the credentials of gRPC; None for plain connections.

        Raises
        ------
        CertificateError
            A file cannot be read, holds something else, or belongs to another certificate.
        """
        if self.certificate is None or self.key is None:
            return None
        try:
            pair = (self.key.read_bytes(), self.certificate.read_bytes())
        except OSError as error:
            raise CertificateError(f"cannot read {error.filename}: {error.strerror}") from error
        _require_pair(*pair, self.key, self.certificate)
        return grpc.ssl_server_credentials([pair])


def _require_pair(key: bytes, chain: bytes, key_path: Path, chain_path: Path) -> None:
    """Require that a key is that of the first certificate of a chain; the libraries of TLS do not say what is wrong."""
    try:
        certificate = x509.load_pem_x509_certificates(chain)[0]
    except ValueError as error:
        raise CertificateError(f"{chain_path} holds no certificate; expected a chain in PEM") from error
    try:
        private = serialization.load_pem_private_key(key, None)
    except TypeError as error:
        raise CertificateError(f"the key in {key_path} has a passphrase; expected one without") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise CertificateError(f"{key_path} holds no private key; expected one in PEM") from error
    if private.public_key() != certificate.public_key():
        raise CertificateError(f"the key in {key_path} is not that of the certificate in {chain_path}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


async def serve_model(
    answers: ModelAnswers, at: ServingAddresses, ready: Callable[[str | None, str | None], None]
) -> None:
    """Serve a model until the process is told to stop.

    Parameters
    ----------
    answers : ModelAnswers
    at : ServingAddresses
    ready : callable
        Receives the addresses of gRPC and HTTP, with their ports, once both answer.

    Raises
    ------
    PreflightError
        An address cannot be bound, or a package is missing.
    CertificateError
        A file of TLS cannot be used.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    rpc: grpc.aio.Server | None = None
    web: asyncio.Task[None] | None = None
    http: Any = None
    try:
        rpc_address, http_address = None, None
        credentials = at.credentials()
        if at.http is not None:
            http, listening = _http_server(answers, at)
            http_address = _named(at.http, listening.getsockname()[1])
            web = asyncio.create_task(http.serve(sockets=[listening]))
            while not http.started:
                if web.done():
                    await web
                    raise PreflightError(f"cannot serve HTTP at {at.http}")
                await asyncio.sleep(0.01)
        if at.rpc is not None:
            rpc, port = await start_rpc(answers, at.rpc, credentials)
            rpc_address = _named(at.rpc, port)
        ready(rpc_address, http_address)
        await stopping.wait()
    finally:
        if rpc is not None:
            await rpc.stop(_GRACE_S)
        if web is not None:
            http.should_exit = True
            await web


def _named(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"


def _http_server(answers: ModelAnswers, at: ServingAddresses) -> tuple[Any, socket.socket]:
    host, _, port = (at.http or "").rpartition(":")
    local = _is_loopback(host)
    app = model_app(answers, ["127.0.0.1", "localhost", "[::1]", host] if local else None)
    try:
        import uvicorn
    except ImportError as error:
        raise PreflightError(f"HTTP needs {error.name}", hint="pip install 'coterie[serve]'") from error

    class Server(uvicorn.Server):
        """Server whose signals are the process's own."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host.strip("[]"), int(port)))
    except OSError as error:
        listening.close()
        raise PreflightError(
            f"cannot listen on {at.http} for HTTP: {error.strerror}", hint="--http names another address"
        ) from error
    try:
        config = uvicorn.Config(
            app,
            # Nothing of requests is logged.
            log_level="critical",
            access_log=False,
            server_header=False,
            limit_concurrency=256,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=round(_GRACE_S),
            h11_max_incomplete_event_size=64 << 10,
            ssl_certfile=None if at.certificate is None else str(at.certificate),
            ssl_keyfile=None if at.key is None else str(at.key),
        )
        config.load()
    except OSError as error:
        listening.close()
        raise CertificateError(f"the certificate or key cannot be used: {error}") from error
    return Server(config), listening
