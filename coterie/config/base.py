"""Fields and tables shared by several configuration models."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from coterie.systems.settings import ConfigModel, Label

__all__ = ["Address", "ConfigModel", "EnrolSettings", "Label", "LimitSettings", "Peer", "ServiceSettings"]


def _address(text: str) -> str:
    """Check host and port of an address, beyond its pattern, and return it."""
    host, _, port = text.rpartition(":")
    if int(port) > _LAST_PORT:
        raise ValueError(f"{text!r} has the port {port}, expected at most {_LAST_PORT}")
    bracketed = host.startswith("[") and host.endswith("]")
    if _NO_HOST.search(host):
        raise ValueError(
            f"{text!r}: {host} is no host, expected a name or an address without a scheme or a path"
        )
    if ":" in host and not bracketed:
        raise ValueError(f"{text!r}: an IPv6 host stands in brackets, expected [{host.strip('[]')}]:{port}")
    try:
        if bracketed:
            IPv6Address(host[1:-1])
        elif _NUMBERS.fullmatch(host):
            IPv4Address(host)
    except ValueError:
        raise ValueError(
            f"{text!r}: {host} is no address, expected one such as 10.0.0.1 or [2001:db8::1]"
        ) from None
    return text


_LAST_PORT = 65_535
_NUMBERS = re.compile(r"[0-9.]+")
_NO_HOST = re.compile(r"[\s/@]")

Address = Annotated[str, StringConstraints(pattern=r"^.+:[0-9]{1,5}$"), AfterValidator(_address)]
"""``host:port``; an IPv6 host stands in brackets."""


class Peer(ConfigModel):
    """Another service, by address and by the name that its certificate must carry."""

    address: Address = Field(description="Where it listens, `host:port`.")
    name: Label = Field(description="Its name; with its role it makes the TLS name that is verified.")


class EnrolSettings(ConfigModel):
    """How a process gets its certificate the first time."""

    address: Address = Field(description="Where the third party takes enrolments.")
    name: Label = Field("directory", description="Name of the third party.")
    ca_file: Path = Field(description="Certificate of the authority, PEM; handed over with the token.")
    token_file: Path = Field(description="One-time token made for this role and name.")
    timeout_s: float = Field(60.0, gt=0, description="How long to keep trying, seconds.")


class LimitSettings(ConfigModel):
    """What a service takes on at once. Who asks for more is told so, and when to come back; nothing of it is read."""

    connections: int = Field(
        8192,
        ge=1,
        description="Connections in all; further ones are closed. Each is an open file (`ulimit -n`).",
    )
    connections_per_peer: int = Field(
        64, ge=1, description="Connections with calls of one caller: by certificate, without one by address."
    )
    calls: int = Field(16384, ge=1, description="Calls at once in all; health checks are answered beyond it.")
    calls_per_peer: int = Field(256, ge=1, description="Calls at once of one caller.")
    calls_per_s: float = Field(
        2000.0, gt=0, description="Calls of one caller in a second, over a longer time."
    )
    burst: int = Field(4000, ge=1, description="Calls that one caller may make at a stretch.")
    uploads_per_peer: int = Field(16, ge=1, description="Streams that one caller sends at once.")
    resets_per_s: float = Field(
        50.0,
        gt=0,
        description="Calls that one caller may give up in a second, over a longer time; twice `calls_per_peer` at a "
        "stretch. The connections of who gives up more are cut off.",
    )
    message_kib: int = Field(
        4096,
        ge=64,
        le=4096,
        description="Largest message, KiB; the requests of many calls may have 64 KiB only.",
    )
    headers_kib: int = Field(16, ge=4, le=1024, description="Most headers of a call, KiB.")
    message_s: float = Field(
        60.0,
        gt=0,
        description="How long a caller may take to send the next message, or to take one, seconds. Who was slower "
        "sends no stream for as long again.",
    )
    least_kib_s: float = Field(
        4.0, ge=0, description="What has to arrive of a stream on average from then on, KiB in a second."
    )
    handshake_s: float = Field(20.0, gt=0, description="How long a TLS handshake may take, seconds.")
    keepalive_s: float = Field(
        60.0,
        ge=1,
        description="How often silent connections are asked for a sign of life, seconds; within half of it it must "
        "come.",
    )
    idle_s: float = Field(
        600.0, gt=0, description="After how long a connection without calls is closed, seconds."
    )
    age_s: float = Field(
        14400.0,
        gt=0,
        description="After how long a connection is replaced, seconds; calls then have `message_s` to end.",
    )


class ServiceSettings(ConfigModel):
    """What every service process has."""

    name: Label = Field(description="Name of this process; unique within its role.")
    state: Path = Field(description="Folder of its stores, keys and certificates; private to the process.")
    listen: Address = Field(description="Address to listen on.")
    metrics: Address | None = Field(
        None, description="Address for Prometheus metrics and `/healthz`; nothing is served when absent."
    )
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="Lowest level logged.")
    reflection: bool = Field(False, description="Offer gRPC server reflection to operators.")
    transcript: bool = Field(
        False,
        description="Record everything received in the state folder. Holds private data: off by default.",
    )
    limits: LimitSettings = Field(
        default_factory=LimitSettings, description="What this process takes on at once."
    )
    latency_mb: int = Field(
        1024,
        ge=0,
        le=1 << 20,
        description="Most that one measurement (`coterie latency`) may have carried from and to this process, MiB.",
    )
    enrol: EnrolSettings | None = Field(
        None, description="How to enrol when the state folder holds no certificate."
    )
