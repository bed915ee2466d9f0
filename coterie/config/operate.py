"""Configuration of an operator apart from the services (``coterie operate --config FILE``)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from coterie.config.base import ConfigModel, EnrolSettings, Label, Peer

__all__ = ["OperateSettings"]


class OperateSettings(ConfigModel):
    """An operator: who it is, where the COS is, what to run and where the report goes."""

    name: Label = Field("operator", description="Name of the operator.")
    state: Path = Field(description="Folder of its key and certificate.")
    enrol: EnrolSettings | None = Field(
        None, description="How to enrol when the state folder holds no certificate."
    )
    cos: Peer = Field(description="The orchestration server.")
    thirdparty: Peer | None = Field(
        None, description="The third party, which renews the certificate; when absent it is not renewed."
    )
    order: Path = Field(description="What to run, written by `coterie bootstrap`.")
    output: Path = Field(description="Folder for report.json and report.html.")
