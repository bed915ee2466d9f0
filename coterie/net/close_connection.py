"""Closing a peer's connection by its socket: gRPC offers no call to close one connection of a server."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from pathlib import Path
from urllib.parse import unquote

__all__ = ["cut_off"]

_OPEN_FILES = Path("/dev/fd")


def cut_off(peer: str) -> bool:
    """Shut down this process's connections to one address; code that still uses one finds it ended.

    Parameters
    ----------
    peer : str
        Address and port as gRPC names them: ``ipv4:192.0.2.1:50000``, ``ipv6:%5B2001:db8::1%5D:50000``.

    Returns
    -------
    bool
        Whether there was such a connection.
    """
    _, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    try:
        wanted = _plain(host.strip("[]")), int(port)
    except ValueError:
        return False
    found = False
    for file in list(_OPEN_FILES.iterdir()):
        # Files come and go meanwhile, and a connection may have ended by itself.
        with contextlib.suppress(OSError):
            # Duplicated: the original number may stand for another file a moment later.
            own = os.dup(int(file.name))
            if not stat.S_ISSOCK(os.fstat(own).st_mode):
                os.close(own)
                continue
            with socket.socket(fileno=own) as one:
                if _end(one.getpeername()) == wanted:
                    found = True
                    one.shutdown(socket.SHUT_RDWR)
                    # Drain what has arrived already: gRPC would still read it.
                    while one.recv(1 << 20, socket.MSG_DONTWAIT | socket.MSG_TRUNC):
                        pass
    return found


def _end(name: object) -> tuple[str, int] | None:
    if not isinstance(name, tuple):
        return None
    return _plain(name[0]), name[1]


def _plain(host: str) -> str:
    """Return an IP address in canonical form; an IPv4-mapped IPv6 address becomes its IPv4 address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
