"""``coterie preferences``: show and change what a user has set for itself at its host in a local run."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from coterie.cli.options import JsonOption
from coterie.cli.output import Output, columns
from coterie.cli.recommend import RunOption, UserOption, chosen

__all__ = ["preferences"]


def preferences(
    user: UserOption,
    preferred: Annotated[
        list[str] | None,
        typer.Option("--prefer", metavar="NAME=NUMBER", help="Set one, as in pi=0.3; may be repeated."),
    ] = None,
    forgotten: Annotated[
        list[str] | None,
        typer.Option("--forget", metavar="NAME", help="Let the run's plan decide again; may be repeated."),
    ] = None,
    run: RunOption = None,
    json: JsonOption = False,
) -> None:
    """Show what a user has set for itself, and change it.

    Such as pi, in FPL: the share of the updates of its own items that the user sends. The user's host keeps it and
    tells nobody. Changes hold from the next round on.
    """
    import asyncio

    from rich.text import Text

    from coterie.launch import local_run
    from coterie.telemetry.logs import configure

    changes = _changes(preferred or [], forgotten or [])
    configure("error", service="launcher")
    output = Output("preferences", as_json=json)
    known = asyncio.run(local_run.preferences(chosen(output, run), user, changes))
    if known:
        table = columns("preference", "own setting", "range", "meaning")
        for one in known:
            own = f"{one.value:g}" if one.HasField("value") else "none: the plan's"
            limits = f"{one.lowest:g} to {one.highest:g}" if one.meaning else "-"
            table.add_row(Text(one.name), own, limits, Text(one.meaning or "unknown to this run's system"))
        output.say(table)
    else:
        output.say("the system of this run has no preferences")
    output.finish(
        {
            "user": user,
            "preferences": [
                {
                    "name": one.name,
                    "value": one.value if one.HasField("value") else None,
                    "lowest": one.lowest,
                    "highest": one.highest,
                    "meaning": one.meaning,
                }
                for one in known
            ],
        }
    )


def _changes(preferred: list[str], forgotten: list[str]) -> dict[str, float | None]:
    """Return the changes that a command line names.

    Raises
    ------
    ConfigError
        A setting is no NAME=NUMBER, or a preference is named twice.
    """
    from coterie.errors import ConfigError

    found: dict[str, float | None] = {}
    for text in (*preferred, *forgotten):
        name, _, number = text.partition("=")
        try:
            value = float(number) if text in preferred else None
        except ValueError:
            value = math.nan
        if name in found or (value is not None and not (name and math.isfinite(value))):
            raise ConfigError(
                f"{text!r} is no change of a preference",
                hint="expected NAME=NUMBER, as in pi=0.3, each name once",
            )
        found[name] = value
    return found
