"""coterie.net.close_connection."""

from __future__ import annotations

import contextlib
import socket

import pytest

from coterie.net.close_connection import cut_off


@contextlib.contextmanager
def connected(host: str, kind: socket.AddressFamily, listen: str | None = None):
    try:
        listening = socket.create_server((listen or host, 0), family=kind, dualstack_ipv6=listen == "::")
    except OSError:
        pytest.skip(f"no {kind.name} here")
    with listening, socket.create_connection((host, listening.getsockname()[1])) as caller:
        served, _ = listening.accept()
        with served:
            caller.settimeout(5)
            yield caller, served


@pytest.mark.parametrize(
    ("host", "kind", "listen", "form"),
    [
        ("127.0.0.1", socket.AF_INET, None, "ipv4:127.0.0.1:{}"),
        ("127.0.0.1", socket.AF_INET6, "::", "ipv4:127.0.0.1:{}"),
        ("::1", socket.AF_INET6, None, "ipv6:%5B::1%5D:{}"),
    ],
)
def test_the_connection_to_an_address_is_closed_and_no_other(
    host: str, kind: socket.AddressFamily, listen: str | None, form: str
) -> None:
    with connected(host, kind, listen) as (caller, served), connected(host, kind, listen) as (other, beside):
        caller.sendall(b"what nobody reads any more")
        assert cut_off(form.format(caller.getsockname()[1]))
        assert caller.recv(1) == b""
        assert served.recv(1) == b""
        beside.sendall(b"x")
        assert other.recv(1) == b"x"


@pytest.mark.parametrize("peer", ["ipv4:127.0.0.1:1", "unix:/tmp/socket", "unix:", "", "ipv4:nowhere:12"])
def test_what_is_not_there_or_no_address_is_left_alone(peer: str) -> None:
    assert not cut_off(peer)
