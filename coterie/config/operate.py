"""Configuration of an operator apart from the services (``coterie operate --config FILE``)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from coterie.config.base import ConfigModel, CosPeer, EnrolSettings, Label, Peer

__all__ = ["OperateSettings", "OperatorSettings"]


class OperatorSettings(ConfigModel):
    """An operator, who calls the COS; of a run to start it may say nothing."""

    name: Label = Field("operator", description="Name of the operator in its certificate.")
    state: Path = Field(description="Folder of the operator's key and certificate.")
    enrol: EnrolSettings | None = Field(
        None, description="Enrolment, needed while the state folder holds no certificate."
    )
    cos: CosPeer = Field(description="The orchestration server, which runs the training.")
    thirdparty: Peer | None = Field(
        None,
        description="The third party, which renews the operator's certificate. When absent, it is not renewed.",
    )
    order: Path | None = Field(None, description="As of an operator who starts a run; not used.")
    signs: Path | None = Field(None, description="As of an operator who starts a run; not used.")
    output: Path | None = Field(None, description="As of an operator who starts a run; not used.")


class OperateSettings(OperatorSettings):
    """An operator, who starts a run, watches it and gets its report."""

    order: Path = Field(description="File that describes the run to start, written by `coterie bootstrap`.")
    signs: Path = Field(
        description="File with the operator's key, which signs the run's plan; its public half is among the "
        "`operator_keys` of every party. `coterie bootstrap` writes it."
    )
    output: Path = Field(description="Folder for report.json and report.html.")
