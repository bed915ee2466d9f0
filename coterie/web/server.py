"""A page's server: a thread beside the command, on loopback unless the page is opened to other machines."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from coterie.config.page import PageSettings
from coterie.errors import ConfigError, PreflightError
from coterie.web.board import Board
from coterie.web.passwords import PasswordFile
from coterie.web.sessions import PageSessions

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

__all__ = ["PageServer", "is_loopback", "require_packages"]

_START_S = 10.0
_GRACE_S = 3
_MOST_CONNECTIONS = 256
"""Most connections at once; further ones are turned away."""


def require_packages() -> None:
    """Check that the packages of the extra ``web`` are installed.

    Raises
    ------
    PreflightError
        One is not.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise PreflightError(
            f"a page needs the package {error.name}, which is not installed",
            hint="pip install 'coterie[web]'",
        ) from error


class PageServer:
    """A page's server in a thread of its own, from ``with`` to its end.

    >>> # board = Board()
    >>> # with PageServer(board, page="live") as server:
    >>> #     print(server.link())
    >>> #     board.put("state", {"phase": "gathering parties"})

    Parameters
    ----------
    board : Board
        The parts that the page shows.
    page : str
        Name of the page's folder among the static files.
    settings : PageSettings, optional
        Address, and what opens the page to other machines; loopback and a free port if left out.
    routes : sequence of BaseRoute
        Further routes of the page; all of them need a session.
    sessions : PageSessions, optional
        Who may see the page; made from the settings if left out.

    Raises
    ------
    PreflightError
        The packages are missing, or the address cannot be bound.
    ConfigError
        The page is opened to other machines without TLS or without passwords, or these cannot be read.
    """

    def __init__(
        self,
        board: Board,
        *,
        page: str,
        settings: PageSettings | None = None,
        routes: Sequence[BaseRoute] = (),
        sessions: PageSessions | None = None,
    ) -> None:
        require_packages()
        settings = settings or PageSettings()
        host, port = settings.host_and_port()
        self.opened = not is_loopback(host)
        if self.opened and not (settings.certificate_file and settings.key_file and settings.passwords_file):
            raise ConfigError(
                f"listen {settings.listen!r} opens the page to other machines, which takes TLS and passwords",
                hint="name certificate_file, key_file and passwords_file, or listen on 127.0.0.1",
            )
        passwords = PasswordFile(settings.passwords_file) if settings.passwords_file else None
        self.sessions = sessions or PageSessions(passwords)
        self.scheme = "https" if settings.certificate_file else "http"
        tls = _tls(settings)
        self._socket = _bound(host, port)
        self.port = int(self._socket.getsockname()[1])
        names = settings.names or (_LOOPBACK if not self.opened else (host,))
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{self.scheme}://{names[0] if self.opened else shown}:{self.port}/"
        self._stopping = threading.Event()
        self._board = board

        import uvicorn

        from coterie.web.application import make_application

        standard = {"http": 80, "https": 443}[self.scheme] == self.port
        hosts = {f"{name}:{self.port}" for name in names} | (set(names) if standard else set())
        application = make_application(
            board,
            self.sessions,
            page=page,
            hosts=hosts,
            scheme=self.scheme,
            # Cookies know no ports: pages on two ports of one machine must not take each other's.
            cookie=f"{'__Host-' if self.scheme == 'https' else ''}coterie-{self.port}",
            ended=self._stopping.is_set,
            address=self.address,
            routes=routes,
        )
        config = uvicorn.Config(
            application,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=_GRACE_S,
            limit_concurrency=_MOST_CONNECTIONS,
            h11_max_incomplete_event_size=16_384,
        )
        config.load()
        if tls is not None:
            config.ssl = tls
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="page", daemon=True)
        self._failure: BaseException | None = None

    def link(self, lasting_s: float | None = None) -> str:
        """Return an address that opens the page in one browser; only the address where passwords open it.

        Parameters
        ----------
        lasting_s : float, optional
            How long the link can be used, seconds.
        """
        if self.sessions.passwords is not None:
            return self.address
        # A fragment stays in the browser: it is in no request, log or Referer header.
        return f"{self.address}#{self.sessions.new_link(lasting_s)}"

    def __enter__(self) -> Self:
        """Start to serve.

        Raises
        ------
        PreflightError
            The server does not start.
        """
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self._socket.close()
                raise PreflightError(f"the page's server does not start: {self._failure}")
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send browsers what changed last, and stop."""
        self._stopping.set()
        self._server.should_exit = True
        self._thread.join(_GRACE_S + 5)
        with contextlib.suppress(OSError):
            self._socket.close()

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except BaseException as error:
            self._failure = error


_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def is_loopback(host: str) -> bool:
    """Return whether a host, by name or address, is this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except OSError:
            made.close()
            raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise PreflightError(
            f"the page cannot listen on {host}:{port}: {reason}",
            hint="port 0 takes one that is free",
        ) from error
    return made


def _tls(settings: PageSettings) -> Any:
    """Return the TLS context of a page; None without a certificate."""
    if settings.certificate_file is None or settings.key_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.certificate_file, settings.key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"certificate {settings.certificate_file} and key {settings.key_file} cannot be used: {error}",
            hint="expected a PEM file each, the key without a password",
        ) from error
    return context
