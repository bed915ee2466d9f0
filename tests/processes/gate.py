"""A gate on the way to a service: connections are taken at once and go through when it opens."""

import asyncio
import contextlib
from typing import Self


class Gate:
    """A port that stands before another one.

    Parameters
    ----------
    target : str
        Where connections lead, ``host:port``.
    """

    def __init__(self, target: str = "") -> None:
        self.target = target
        self.address = ""
        self._opened = asyncio.Event()
        self._under_way: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Listen on a port of its own."""
        self._server = await asyncio.start_server(self._enter, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close every connection."""
        self._server.close()
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    def open(self) -> None:
        """Let everything through, what waits included."""
        self._opened.set()

    async def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        with contextlib.suppress(OSError), contextlib.closing(writer):
            await self._opened.wait()
            host, _, port = self.target.rpartition(":")
            onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
            with contextlib.closing(onward_writer):
                await asyncio.gather(copy(reader, onward_writer), copy(onward_reader, writer))
        self._under_way.discard(task)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Hand on what comes, until there is no more."""
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
