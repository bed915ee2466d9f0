"""``coterie check``: verify the state folder of a service, and print what to do about what is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import JsonOption
from coterie.cli.output import Output, failure_of
from coterie.cli.preflight import findings_table
from coterie.errors import StoreError

__all__ = ["check"]


def check(
    state: Annotated[
        Path, typer.Argument(metavar="STATE", help="State folder of a service that does not run.")
    ],
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Make damaged indices of stores again, and remove damaged older versions of models.",
        ),
    ] = False,
    accept: Annotated[
        bool,
        typer.Option(
            "--accept", help="Take stores as they are that were changed since their service stopped."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Verify the state folder of a service.

    Checks stores, certificates, secrets, models, users' private arrays and journals against their checksums and
    signatures, and prints for each damaged file what to restore. Without --repair and --accept nothing is changed.
    """
    from coterie.launch.state_check import check_state

    findings = check_state(state, repair=repair, accept=accept)
    output = Output("check", as_json=json)
    output.say(findings_table(findings))
    result = {"state": state, "findings": findings}
    failed = list(dict.fromkeys(finding.check for finding in findings if finding.status == "fail"))
    if not failed:
        output.finish(result)
        return
    error = StoreError(
        f"{state} is damaged: {', '.join(failed)}",
        hint="the table says what to restore" if not json else "each finding says what to restore",
    )
    if json:
        output.finish(result, failure_of(error))
        raise typer.Exit(error.exit_code)
    raise error
