"""Configuration of a page that a command serves (``--page FILE``)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from coterie.config.base import Address, ConfigModel

__all__ = ["PageSettings"]


class PageSettings(ConfigModel):
    """Address of a page, and what opens it to other machines."""

    listen: Address = Field(
        "127.0.0.1:0",
        description="Address that serves the page; port 0 takes one that is free. An address other than loopback "
        "takes `certificate_file`, `key_file` and `passwords_file`.",
    )
    names: tuple[str, ...] = Field(
        (),
        description="Names by which browsers call the page, without port; required to open it to other machines.",
    )
    certificate_file: Path | None = Field(
        None, description="PEM file with the page's certificate chain, for TLS."
    )
    key_file: Path | None = Field(None, description="PEM file with the certificate's private key.")
    passwords_file: Path | None = Field(
        None,
        description="File with hashed passwords, as `coterie certs password` writes it; else links open it.",
    )

    @model_validator(mode="after")
    def _together(self) -> PageSettings:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file go together: expected both or neither")
        return self

    def host_and_port(self) -> tuple[str, int]:
        """Return host and port of `listen`."""
        host, _, port = self.listen.rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)
