"""Gates on the way to a service: connections go through while the gate is open."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Self


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
                await asyncio.gather(self._copy(reader, onward_writer), self._copy(onward_reader, writer))
        self._under_way.discard(task)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await copy(reader, writer)


class Cable(Gate):
    """A gate that can be cut: nothing comes through any more, and nobody is told, until it is mended."""

    def __init__(self, target: str = "") -> None:
        super().__init__(target)
        self.open()

    def mend(self) -> None:
        """Let everything through again, what was held back included."""
        self.open()

    def cut(self) -> None:
        """Let nothing through; connections stay open."""
        self._opened.clear()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._opened.wait()
            writer.write(data)
            await writer.drain()
        await self._opened.wait()
        writer.write_eof()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Hand on what comes, until there is no more."""
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


class Balancer(Gate):
    """A TCP balancer: each new connection goes to the next of several ports that takes it.

    Parameters
    ----------
    targets : sequence of str
        Where connections lead, each ``host:port``.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        super().__init__()
        self.targets = list(targets)
        self.open()
        self._turn = 0
        self._left: dict[asyncio.Task[None], int] = {}

    async def listen(self, address: str) -> None:
        """Listen on a given address."""
        host, _, port = address.rpartition(":")
        self._server = await asyncio.start_server(self._enter, host, int(port))
        self.address = address

    async def close(self) -> None:
        """Close every connection."""
        await self.__aexit__()

    def move(self) -> None:
        """End every connection; the callers' next ones go to the next ports."""
        for task in self._under_way:
            task.cancel()

    def cut_within(self, most: int) -> list[asyncio.Task[None]]:
        """End each open connection once its caller has sent so many bytes more; return what waits for that."""
        self._left = dict.fromkeys(self._under_way, most)
        return list(self._left)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: Any) -> None:
        while data := await reader.read(1 << 12):
            writer.write(data)
            await writer.drain()
            if task in self._left:
                self._left[task] -= len(data)
                if self._left[task] <= 0:
                    task.cancel()
        writer.write_eof()

    async def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError), contextlib.closing(writer):
            for _ in self.targets:
                self._turn = (self._turn + 1) % len(self.targets)
                host, _, port = self.targets[self._turn].rpartition(":")
                with contextlib.suppress(OSError):
                    onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
                    with contextlib.closing(onward_writer):
                        await asyncio.gather(
                            self._forward(reader, onward_writer, task), self._copy(onward_reader, writer)
                        )
                    break
        self._under_way.discard(task)
