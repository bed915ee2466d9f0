"""Pieces that several configuration models share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

__all__ = ["Address", "EnrolSettings", "Label", "Model", "Peer", "ServiceSettings"]

Label = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
"""A DNS label: lower-case letters, digits and hyphens, at most 63 characters."""

Address = Annotated[str, StringConstraints(pattern=r"^(\[[0-9a-fA-F:]+\]|[^:\s\[\]]+):\d{1,5}$")]
"""``host:port``; an IPv6 host stands in brackets."""


class Model(BaseModel):
    """Base of all configuration: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Peer(Model):
    """Another service, by address and by the name that its certificate must carry."""

    address: Address = Field(description="Where it listens, `host:port`.")
    name: Label = Field(description="Its name; with its role it makes the TLS name that is verified.")


class EnrolSettings(Model):
    """How a process gets its certificate the first time."""

    address: Address = Field(description="Where the third party takes enrolments.")
    name: Label = Field("directory", description="Name of the third party.")
    ca_file: Path = Field(description="Certificate of the authority, PEM; handed over with the token.")
    token_file: Path = Field(description="One-time token made for this role and name.")
    timeout_s: float = Field(60.0, gt=0, description="How long to keep trying, seconds.")


class ServiceSettings(Model):
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
    latency_mb: int = Field(
        1024,
        ge=0,
        le=1 << 20,
        description="Most that one measurement (`coterie latency`) may have carried from and to this process, MiB.",
    )
    enrol: EnrolSettings | None = Field(
        None, description="How to enrol when the state folder holds no certificate."
    )
