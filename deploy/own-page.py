#!/usr/bin/env python3
"""Open the page of one person of docker-compose.people.yml to browsers of this machine, until Ctrl-C.

    deploy/own-page.py host-3
    deploy/own-page.py host-3 --project coterie-b

A person's page is on loopback of the person's container, where no other container and no port of this machine lead.
The script takes connections on the same port of this machine's loopback, carries each through `docker exec`, and prints
the link that the agent printed.  It needs the standard library and the program `docker`, on any system.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys

_DOCKER = shutil.which("docker") or "docker"
_LINK = re.compile(r"own page: (http://127\.0\.0\.1:(\d+)/#\S+)")

_INSIDE = """
import os, socket, sys, threading
page = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def asked():
    while part := os.read(0, 65536):
        page.sendall(part)
    page.shutdown(socket.SHUT_WR)
threading.Thread(target=asked, daemon=True).start()
while part := page.recv(65536):
    while part:
        part = part[os.write(1, part):]
os._exit(0)
"""
"""Carries one connection between its standard streams and the page, in the container."""


class NotThereError(Exception):
    """There is no such container, or no page in it."""


def docker(*arguments: str) -> str:
    """Return what a command of Docker prints.

    Raises
    ------
    NotThereError
        Docker refuses, or is not installed.
    """
    try:
        ended = subprocess.run(  # noqa: S603  Docker of this machine, asked by its user
            [_DOCKER, *arguments], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise NotThereError(f"docker cannot be called: {error.strerror}") from error
    if ended.returncode:
        raise NotThereError(ended.stderr.strip())
    return ended.stdout


def container_of(service: str, project: str) -> str:
    """Return the id of the running container of a service.

    Raises
    ------
    NotThereError
        There is none, or there are several.
    """
    labels = [f"com.docker.compose.service={service}"]
    labels += [f"com.docker.compose.project={project}"] if project else []
    filters = [word for label in labels for word in ("--filter", f"label={label}")]
    found = docker("ps", "--quiet", "--no-trunc", *filters).split()
    if len(found) != 1:
        raise NotThereError(
            f"{len(found)} running containers of {service}; expected one"
            + (": name the project by --project" if len(found) > 1 else "")
        )
    return found[0]


def link_of(container: str) -> tuple[str, int]:
    """Return the link that the agent of a container printed last, and the port in it.

    Raises
    ------
    NotThereError
        It has printed none.
    """
    found = _LINK.findall(docker("logs", container))
    if not found:
        raise NotThereError("no link in its log: it is no agent, or its page is not up yet")
    link, port = found[-1]
    return link, int(port)


async def serve(container: str, link: str, port: int) -> None:
    """Carry connections until cancelled."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        command = [_DOCKER, "exec", "--interactive", container, "python3", "-I", "-S", "-c", _INSIDE]
        inside = await asyncio.create_subprocess_exec(
            *command, str(port), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        if inside.stdin is None or inside.stdout is None:
            raise NotThereError("docker has no standard streams")
        asking = asyncio.create_task(pass_on(reader, inside.stdin))
        try:
            await pass_on(inside.stdout, writer)
        finally:
            asking.cancel()
            with contextlib.suppress(ProcessLookupError):
                inside.kill()
            await inside.wait()

    server = await asyncio.start_server(carry, "127.0.0.1", port)
    print(f"own page: {link}", flush=True)
    print("the link opens one browser, once; Ctrl-C ends", flush=True)
    async with server:
        await server.serve_forever()


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Write what is read, until either side ends."""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(65536):
            writer.write(part)
            await writer.drain()
    with contextlib.suppress(ConnectionError):
        writer.close()
        await writer.wait_closed()


def main(arguments: list[str] | None = None) -> None:
    """Find the container and serve its page."""
    parser = argparse.ArgumentParser(
        prog="deploy/own-page.py",
        description="Open the page of one person of docker-compose.people.yml to browsers of this machine.",
    )
    parser.add_argument("service", metavar="SERVICE", help="the person's service, host-0 to host-9")
    parser.add_argument(
        "--project",
        default=os.environ.get("COMPOSE_PROJECT_NAME", ""),
        help="project of compose, where several run (default: COMPOSE_PROJECT_NAME)",
    )
    given = parser.parse_args(arguments)
    try:
        container = container_of(given.service, given.project)
        link, port = link_of(container)
        asyncio.run(serve(container, link, port))
    except NotThereError as error:
        sys.exit(f"error: {given.service}: {error}")
    except OSError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
