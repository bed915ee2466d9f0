"""``coterie check``: verify the state folder of a service, and print what to do about what is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.options import JsonOption
from coterie.cli.output import Output, failure_of
from coterie.cli.preflight import findings_table
from coterie.errors import StoreError

if TYPE_CHECKING:
    from coterie.launch.finding import Finding

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
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="Configuration of a COS with [objects]: verify its versions of models in the store of objects, too; "
            "another COS may use them meanwhile. With --repair, old objects that nothing names are removed.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Verify the state folder of a service.

    Checks stores, certificates, secrets, models, users' private arrays and journals against their checksums and
    signatures, and prints for each damaged file what to restore. Without --repair and --accept nothing is changed.
    """
    from coterie.launch.state_check import check_state

    findings = [*_of_objects(config, repair=repair), *check_state(state, repair=repair, accept=accept)]
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


def _of_objects(config: Path | None, *, repair: bool) -> list[Finding]:
    if config is None:
        return []
    from coterie.config.load import load_service
    from coterie.config.services import CosSettings
    from coterie.launch.object_check import check_objects

    settings = load_service("cos", config).settings
    if not isinstance(settings, CosSettings):
        raise AssertionError("settings of a COS")
    return check_objects(settings, repair=repair)
