"""Ports for services that have not started yet."""

import asyncio
import errno
import socket
import subprocess
import sys

import pytest

from coterie.launch import children
from coterie.launch.children import free_port

HOST = "127.0.0.1"
linux = pytest.mark.skipif(sys.platform != "linux", reason="kept on Linux only")


def refused(port: int) -> bool:
    """Whether a program that asks for a port does not get it."""
    ask = f"import socket; socket.socket().bind(('{HOST}', {port}))"
    ended = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    assert not ended.returncode or f"[Errno {errno.EADDRINUSE}]" in ended.stderr
    return bool(ended.returncode)


@linux
def test_a_port_that_was_given_is_given_to_nobody_else_before_its_service_starts() -> None:
    assert refused(free_port())


async def test_the_service_has_its_port_and_has_it_again_when_it_is_started_again() -> None:
    port = free_port()
    for _ in range(2):
        server = await asyncio.start_server(lambda reader, writer: writer.close(), HOST, port)
        async with server:
            reader, writer = await asyncio.open_connection(HOST, port)
            assert await reader.read() == b""
            writer.close()


def test_no_port_is_given_twice_and_nobody_answers_there() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, ports[0]))


@linux
def test_only_the_last_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_given", {})
    monkeypatch.setattr(children, "_KEPT_PORTS", 2)
    first, second, third = (free_port() for _ in range(3))
    assert [refused(port) for port in (first, second, third)] == [False, True, True]
    for kept in children._given.values():
        kept.close()
