"""``coterie preflight``: check that a run or a service can start, and print how to mend what fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.options import DataOption, JsonOption, SetOption, with_data
from coterie.cli.output import Output, columns, failure_of
from coterie.errors import PreflightError

if TYPE_CHECKING:
    from coterie.launch.preflight import Finding

__all__ = ["findings_table", "preflight"]

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def preflight(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="File that describes a run, or with --role configures a service."
        ),
    ],
    role: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE",
            help="Role of the service: cos, data-owner, client, decrypting-client or thirdparty.",
        ),
    ] = None,
    data: DataOption = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=60.0, help="Longest time to wait for each peer.")
    ] = 5.0,
    sets: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Check that a run or a service can start here.

    Checks packages, data, memory, disk, ports, stores, certificates and peers, and prints for each failure how to mend
    it. Nothing is started or changed. Warnings do not change the exit status.
    """
    from coterie.config.load import load, load_service
    from coterie.config.run import RunSettings
    from coterie.launch import preflight as checks

    if role is None:
        given = with_data(sets, data)
        findings = checks.check_run(load(RunSettings, file, sets=given).settings)
    else:
        if data is not None:
            raise typer.BadParameter("a service has no data set", param_hint="--data")
        import asyncio

        settings = load_service(role, file, sets=sets or ()).settings
        findings = asyncio.run(checks.check_service(role, settings, timeout_s=timeout))

    output = Output("preflight", as_json=json)
    output.say(findings_table(findings))
    result = {"file": file, "checks": role or "run", "findings": findings}
    failed = [finding.check for finding in findings if finding.status == "fail"]
    if not failed:
        output.finish(result)
        return
    error = PreflightError(
        f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}",
        hint="the table says how to put each right" if not json else "each finding says how to put it right",
    )
    if json:
        # The findings are the result, so the one envelope has both them and the error.
        output.finish(result, failure_of(error))
        raise typer.Exit(error.exit_code)
    raise error


def findings_table(findings: Sequence[Finding]) -> Any:
    """Return a table of findings, each with how to put it right."""
    from rich.text import Text

    table = columns("check", "", "found")
    for finding in findings:
        found = Text(finding.problem or finding.note)
        if finding.fix:
            found.append(f"\n{finding.fix}", style="dim")
        table.add_row(finding.check, Text(finding.status, style=_STYLES[finding.status]), found)
    return table
