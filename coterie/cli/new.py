"""``coterie new``: write a small project for runs of one system."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import JsonOption
from coterie.cli.output import Output

__all__ = ["new"]


def new(
    project: Annotated[
        Path, typer.Argument(metavar="PROJECT", help="Folder to make; its name names the runs.")
    ],
    system: Annotated[
        str, typer.Option("--system", metavar="NAME", help="Learning system, of those of `coterie systems`.")
    ],
    json: JsonOption = False,
) -> None:
    """Write a small project for runs of one system.

    It has run.toml, a place for data, a compose file and a README, and runs at once, on synthetic data that is there
    to be replaced.
    """
    output = Output("new", as_json=json)
    from coterie.launch.project import new_project

    made = new_project(project, system)
    output.say(*(str(path) for path in made), f"next: cd {project} && coterie run run.toml")
    output.finish({"project": project, "system": system, "files": made})
