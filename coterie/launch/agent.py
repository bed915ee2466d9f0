"""The whole of ``coterie agent``: the client service of one person, and the person's own page beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import grpc
import structlog

from coterie.config.page import PageSettings
from coterie.config.services import ClientSettings
from coterie.errors import PeerError
from coterie.net.credentials import TlsFiles
from coterie.process.runtime import Runtime, Service, ServiceProcess, serve
from coterie.web.board import Board
from coterie.web.own_page import Device, OwnPage
from coterie.web.server import PageServer

__all__ = ["serve_agent"]

_log = structlog.get_logger("coterie.agent")

_LINK_S = 24 * 3600.0
"""How long the printed link can be used, seconds."""


class _OneUser(Protocol):
    """What a client service offers to an agent, beside what every service does."""

    def require_one(self, settings: ClientSettings) -> None: ...


class _WithDevice(Protocol):
    device: Device


class _AgentProcess:
    """A client process with its page, which outlives the process's part in the run."""

    def __init__(
        self,
        process: ServiceProcess,
        page: OwnPage,
        server: PageServer,
        said: Callable[[str], None],
    ) -> None:
        self._process, self._page, self._server, self._said = process, page, server, said

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the user agent to the gRPC server, and open the page."""
        self._process.add_to(server)
        self._server.__enter__()
        self._said(self._server.link(_LINK_S))

    async def run(self) -> None:
        """Take part in the run; a server that stays away ends that, and not the page."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._page.watch())
            try:
                await self._process.run()
            except* PeerError as errors:
                cause: BaseException = errors
                while isinstance(cause, BaseExceptionGroup):
                    cause = cause.exceptions[0]
                _log.error("takes no part any more", reason=str(cause))
                self._page.apart(str(cause))

    async def close(self) -> None:
        """Close the page and the process."""
        await asyncio.to_thread(self._server.__exit__, None, None, None)
        await self._process.close()


class _Agent:
    """The client service as a person's agent."""

    role = "client"

    def __init__(
        self,
        client: Service,
        page: PageSettings,
        titles: Mapping[str, str],
        said: Callable[[str], None],
    ) -> None:
        self._client, self._page, self._titles, self._said = client, page, titles, said

    async def enrol(self, settings: Any, tls: TlsFiles) -> None:
        """Obtain a certificate, as the client service does."""
        await self._client.enrol(settings, tls)

    def build(self, settings: Any, runtime: Runtime) -> ServiceProcess:
        """Build the client process and its page."""
        process = self._client.build(settings, runtime)
        device = cast(_WithDevice, process).device
        device.require_one()
        board = Board()
        page = OwnPage(device, board, self._titles)
        server = PageServer(board, page="own", settings=self._page, routes=page.routes())
        return _AgentProcess(process, page, server, self._said)


def serve_agent(
    client: Service,
    settings: ClientSettings,
    page: PageSettings,
    titles: Mapping[str, str],
    said: Callable[[str], None],
) -> None:
    """Run the client service of one person with the person's own page, until SIGTERM or SIGINT.

    Parameters
    ----------
    client : Service
        The client service.
    settings : ClientSettings
    page : PageSettings
    titles : mapping of str to str
        Titles of items by key.
    said : callable
        Receives the link that opens the page.

    Raises
    ------
    ConfigError
        The host has no user, or several.
    CoterieError
        As `coterie.process.runtime.serve`; except that the run's server may stay away.
    """
    cast(_OneUser, client).require_one(settings)
    serve(_Agent(client, page, titles, said), settings)
