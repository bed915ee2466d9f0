"""``coterie config``: print the values in effect, and the reference of all keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.exits import exits
from coterie.cli.options import JsonOption, SetOption
from coterie.cli.output import Output, columns
from coterie.errors import ConfigError

__all__ = ["app"]

app = typer.Typer(help="Show configuration values and their sources; describe keys.", no_args_is_help=True)


@app.command(epilog=exits(ConfigError))
def show(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="Configuration file. Absent: defaults, environment and --set alone."
        ),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE",
            help="Role that FILE configures: cos, data-owner, client, decrypting-client, thirdparty or operator.",
        ),
    ] = None,
    run: Annotated[bool, typer.Option("--run", help="FILE configures a run, as without --role.")] = False,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print every configuration value and where it comes from.

    Sources are the default, the file, the environment and --set; a later one wins.
    """
    from rich.markup import escape

    from coterie.config.base import ServiceSettings
    from coterie.config.key_paths import toml_text
    from coterie.config.load import Loaded, load, load_service
    from coterie.config.operate import OperateSettings
    from coterie.config.run import RunSettings

    if role is not None and run:
        raise typer.BadParameter("--role and --run exclude each other", param_hint="--run")
    loaded: Loaded[RunSettings] | Loaded[OperateSettings] | Loaded[ServiceSettings]
    if role is None:
        loaded = load(RunSettings, file, sets=sets or ())
    elif role == "operator":
        loaded = load(OperateSettings, file, sets=sets or (), relative_to=file.parent if file else None)
    else:
        loaded = load_service(role, file, sets=sets or ())

    output = Output("config show", as_json=as_json)
    table = columns("key", "value", "from")
    for key, source in loaded.origin.items():
        value = loaded.values[key]
        cells = (key, "-" if value is None else toml_text(value), source)
        # Escaped, because brackets in a value are no markup.
        table.add_row(*map(escape, cells), style="dim" if source == "default" else None)
    output.say(table)
    output.finish(
        {
            "file": file,
            "configures": role or "run",
            "values": {
                key: {"value": loaded.values[key], "origin": source} for key, source in loaded.origin.items()
            },
        }
    )


@app.command(epilog=exits())
def reference(as_json: JsonOption = False) -> None:
    """Print the reference of all configuration keys, in Markdown."""
    from coterie.config.key_reference import markdown

    text = markdown()
    if not as_json:
        typer.echo(text, nl=False)
    Output("config reference", as_json=as_json).finish({"markdown": text})
