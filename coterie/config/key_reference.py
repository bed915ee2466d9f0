"""The reference of all configuration, written from the models.

``python -m coterie.config.key_reference`` prints it; ``--write docs/configuration.md`` writes it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel

from coterie.config.base import ServiceSettings
from coterie.config.key_paths import Key, keys, toml_text
from coterie.config.load import ROLES
from coterie.config.operate import OperateSettings
from coterie.config.page import PageSettings
from coterie.config.run import RunSettings
from coterie.config.services import settings_model
from coterie.systems.registry import systems

__all__ = ["markdown"]

_INTRODUCTION = """\
# Configuration

<!-- Written by `python -m coterie.config.key_reference --write docs/configuration.md`: edit the models. -->

Reference of every key of a configuration file, for whoever writes one: its type, its default and its meaning. A run,
each service process and an operator read one TOML file each. `coterie config show` prints a file's resulting values and
where each came from; `coterie config reference` prints this page.

## Sources of values

Each key takes its value from the last of these sources that gives one:

1. the **default** in the tables below;
2. the **file**;
3. the **environment**: `COTERIE_`, then the key in capitals, two underscores for each dot.
   `COTERIE_LOG_LEVEL=debug` sets `log_level`; `COTERIE_FEDERATION__HOSTS=3` sets `federation.hosts`;
   `COTERIE_OWNERS__0__NAME=films` sets the name of the first entry of `[[owners]]`;
4. **`--set`** on the command line, any number of times: `--set federation.hosts=3`.

Values of the environment and of `--set` are TOML (`3`, `true`, `[0, 1, 2]`, `{users = 50}`). A value that is
not TOML, or that is given for a key that takes text, is taken as text, so `--set name=night-1` needs no
quotes. An empty variable counts as unset. Variables whose first part is no key (`COTERIE_DEBUG`) are ignored,
and so is a variable that names a table and holds no inline table (`COTERIE_DATA=...`). A variable that looks
like a misspelt key is an error.

All errors are reported together, each with the key, its value, what was expected and the nearest right
key; the command then ends with status [10](exit-codes/10-19.md).

Relative paths in the file of a service or an operator start from the folder of that file; everywhere else
(the file of a run, the environment, `--set`) they start from the current directory. Secrets are never values:
a key that ends in `_file` names the file that holds one.
"""


def markdown() -> str:
    """Return the reference page in Markdown, with type, default and meaning of every key."""
    shared = [key.name for key in keys(ServiceSettings)]
    sections = [
        _INTRODUCTION,
        _section("A run", "`coterie run FILE.toml`", RunSettings),
        _section("Every service", "`coterie serve ROLE --config FILE`, whatever the role", ServiceSettings),
    ]
    sections.append(_usual())
    for role in ROLES:
        about = f"`coterie serve {role} --config FILE`; besides the keys of every service"
        sections.append(_section(f"Service `{role}`", about, settings_model(role), leave_out=shared))
    sections.append(_section("An operator", "`coterie operate --config FILE`", OperateSettings))
    sections.append(
        _section("A page", "`coterie run --page FILE`, and the other commands with a page", PageSettings)
    )
    return "\n".join(sections)


def _section(title: str, about: str, model: type[BaseModel], *, leave_out: Iterable[str] = ()) -> str:
    left_out = frozenset(leave_out)
    lines = [f"## {title}", "", f"{_summary(model)} ({about}.)", ""]
    lines += ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
    listed = [key for key in keys(model) if key.name not in left_out]
    optional = [f"{key.name}." for key in listed if key.is_table and not key.required and key.default is None]
    for key in listed:
        holder = next((table for table in optional if key.name.startswith(table)), None)
        lines.append(_line(key, holder))
    return "\n".join([*lines, ""])


def _usual() -> str:
    """Return the section on defaults that systems set for keys of shared tables."""
    lines = ["## Defaults of the systems", ""]
    lines += [
        "Some systems have defaults of their own for keys of the table *A run*; a value that is given wins over both."
    ]
    lines += ["", "| key | system | default | otherwise |", "| --- | --- | --- | --- |"]
    otherwise = {key.name: key.default for key in keys(RunSettings)}
    for system in systems().values():
        for table, values in system.usual.items():
            for name, value in values.items():
                key = f"{table}.{name}"
                lines.append(f"| `{key}` | {system.title} | `{toml_text(value)}` | `{otherwise[key]}` |")
    return "\n".join([*lines, ""])


def _summary(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().partition("\n")[0]


def _line(key: Key, holder: str | None) -> str:
    """Return one row; ``holder`` is the optional table around the key, with a dot at its end, if there is one."""
    if key.required:
        default = f"required in `[{holder[:-1]}]`" if holder else "**required**"
    elif key.default is None:
        default = "absent"
    else:
        default = f"`{key.default}`"
    name = f"[{key.name}]" if key.is_table else key.name
    cells = (f"`{name}`", key.takes, default, key.description)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m coterie.config.key_reference", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PATH", help="write to this file instead of printing")
    target: Path | None = parser.parse_args().write
    if target is None:
        print(markdown(), end="")
    else:
        target.write_text(markdown(), encoding="utf-8")


if __name__ == "__main__":
    _main()
