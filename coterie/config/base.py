"""Fields and tables shared by several configuration models."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from coterie.systems.settings import ConfigModel, Label

__all__ = [
    "Address",
    "ConfigModel",
    "CosPeer",
    "EnrolSettings",
    "Label",
    "LimitSettings",
    "Peer",
    "ServiceSettings",
]


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
    """Address of another service and the name that its certificate must carry."""

    address: Address = Field(description="Address at which the service listens, `host:port`.")
    name: Label = Field(
        description="Name of the service in its certificate; TLS verifies it together with the role."
    )


class CosPeer(Peer):
    """Address of the orchestration server and of its standbys; all have the same name in their certificates."""

    standbys: tuple[Address, ...] = Field(
        (),
        description="Further addresses at which the COS may be found, `host:port`: those of its standbys. The caller "
        "asks each how it is, and calls the one that is healthy.",
    )

    @model_validator(mode="before")
    @classmethod
    def _of_a_peer(cls, value: Any) -> Any:
        # A service without standbys, as code that knows one address gives it.
        return value.model_dump() if type(value) is Peer else value


class EnrolSettings(ConfigModel):
    """Enrolment, by which a process gets its first certificate."""

    address: Address = Field(description="Address at which the third party takes enrolments, `host:port`.")
    name: Label = Field("directory", description="Name of the third party in its certificate.")
    ca_file: Path = Field(
        description="File with the authority's certificate (PEM), handed over with the token."
    )
    token_file: Path = Field(
        description="File with the one-time enrolment token, made for this role and name; or, for a client host, with "
        "an ID token (docs/oidc.md)."
    )
    timeout_s: float = Field(60.0, gt=0, description="Longest time for which enrolment is retried, seconds.")


class LimitSettings(ConfigModel):
    """Limits on connections, calls and messages. Requests over a limit are refused unread, with a retry delay."""

    connections: int = Field(
        8192,
        ge=1,
        description="Most open connections of all callers; further ones are closed. Each takes an open file "
        "(`ulimit -n`).",
    )
    connections_per_peer: int = Field(
        64,
        ge=1,
        description="Most connections of one caller that carry calls. A caller is known by its certificate, or "
        "by its address while it has none.",
    )
    calls: int = Field(
        16384, ge=1, description="Most concurrent calls of all callers. Health checks are answered beyond it."
    )
    calls_per_peer: int = Field(256, ge=1, description="Most concurrent calls of one caller.")
    calls_per_s: float = Field(
        2000.0,
        gt=0,
        description="Calls per second of one caller in the long run; `burst` allows more for a short time.",
    )
    burst: int = Field(
        4000, ge=1, description="Calls that one caller may make at once before `calls_per_s` limits it."
    )
    uploads_per_peer: int = Field(
        16, ge=1, description="Most concurrent uploads (request streams) of one caller."
    )
    resets_per_s: float = Field(
        50.0,
        gt=0,
        description="Calls per second that one caller may cancel in the long run, and twice `calls_per_peer` at "
        "once. The connections of a caller that cancels more are closed.",
    )
    message_kib: int = Field(
        4096,
        ge=64,
        le=4096,
        description="Largest message, KiB. Requests of calls that carry no vectors may have at most 64 KiB, "
        "whatever this is.",
    )
    headers_kib: int = Field(16, ge=4, le=1024, description="Largest size of a call's headers, KiB.")
    message_s: float = Field(
        60.0,
        gt=0,
        description="Longest time that a caller may take to send its next message, or to accept one, seconds. "
        "The call of a slower caller ends, and its uploads are refused for as long again.",
    )
    least_kib_s: float = Field(
        4.0,
        ge=0,
        description="Lowest average rate of an upload that has taken `message_s` or longer, KiB per second. A "
        "slower one ends.",
    )
    handshake_s: float = Field(20.0, gt=0, description="Longest duration of a TLS handshake, seconds.")
    keepalive_s: float = Field(
        60.0,
        ge=1,
        description="Time between two keepalive pings on a silent connection, seconds. A connection that does "
        "not answer within half of it is closed.",
    )
    ping_s: float = Field(
        5.0,
        gt=0,
        le=25,
        description="Least time between two keepalive pings of a caller to which nothing is sent meanwhile, seconds. A "
        "connection with more of them is closed. Parties ping each 30 seconds.",
    )
    idle_s: float = Field(
        600.0, gt=0, description="Time without calls after which a connection is closed, seconds."
    )
    age_s: float = Field(
        14400.0,
        gt=0,
        description="Time after which a connection is closed, so that its caller makes a new one, seconds. Calls "
        "under way have `message_s` to end.",
    )


class ServiceSettings(ConfigModel):
    """Settings that every service process has."""

    name: Label = Field(description="Name of the process in its certificate; unique within its role.")
    state: Path = Field(description="Folder of the stores, keys and certificates of this process alone.")
    listen: Address = Field(description="Address at which the service listens, `host:port`.")
    metrics: Address | None = Field(
        None,
        description="Address at which Prometheus metrics and `/healthz` are served, `host:port`. When absent, "
        "neither is served.",
    )
    log_level: str = Field(
        "info",
        pattern="^(debug|info|warning|error)$",
        description="Lowest level of messages that are logged.",
    )
    reflection: bool = Field(
        False, description="Whether operators may list the service's RPCs by gRPC server reflection."
    )
    transcript: bool = Field(
        False,
        description="Whether every message is recorded in the state folder, private data included, for audits "
        "and experiments.",
    )
    traces: bool = Field(
        False,
        description="Whether spans of calls and rounds are exported by OpenTelemetry, to where the variables `OTEL_*` "
        "say (docs/traces.md).",
    )
    limits: LimitSettings = Field(
        default_factory=LimitSettings, description="Limits on the connections, calls and messages of callers."
    )
    audit_mb: int = Field(
        64,
        ge=0,
        le=1 << 20,
        description="Size of the audit log in the state folder, MiB; its oldest quarter is removed beyond it. "
        "0 for none (docs/audit-log.md).",
    )
    latency_mb: int = Field(
        1024,
        ge=0,
        le=1 << 20,
        description="Most data that one measurement (`coterie latency`) may send to and from this process, MiB.",
    )
    backup_before_migration: bool = Field(
        True,
        description="Whether the whole state is written to `before-REVISION.tar` in the state folder before a store "
        "of an earlier release is migrated. Without it there is no way back to that release.",
    )
    enrol: EnrolSettings | None = Field(
        None, description="Enrolment, needed while the state folder holds no certificate."
    )

    def private_files(self) -> list[Path]:
        """Return the files outside the state folder that only the service's own user may read."""
        return []
