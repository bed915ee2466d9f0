"""Command-line options shared by several commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "DataOption",
    "HostsOption",
    "JsonOption",
    "PageOption",
    "SetOption",
    "WatchOption",
    "located",
    "with_data",
]

DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="Data set: a path, or a name below data/ or COTERIE_DATA. Absent: a synthetic one.",
    ),
]

JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object on standard output, and prose on standard error."),
]
WatchOption = Annotated[
    bool,
    typer.Option("--watch", help="Serve a live page of the run, and print the link that opens it."),
]
PageOption = Annotated[
    Path | None,
    typer.Option(
        "--page",
        metavar="FILE",
        help="File with the live page's address, TLS and passwords; implies --watch.",
    ),
]
HostsOption = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        metavar="CLUSTER",
        help="Run the client hosts on a Ray cluster: ray://HOST:PORT, or ray for the one that this machine is part "
        "of. Needs coterie[ray].",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a configuration key, as in federation.hosts=3. May be repeated.",
    ),
]


def with_data(sets: Sequence[str] | None, data: Path | None) -> list[str]:
    """Return the ``--set`` values, then the data set's path: of ``--data``, or found below ``data`` or COTERIE_DATA."""
    chosen = [] if data is None else [f"data.path={str(located(data))!r}"]
    return [*(sets or ()), *chosen]


def located(data: Path) -> Path:
    """Return the path of a data set, or of the one with this name below ``data`` or COTERIE_DATA if there is one."""
    from coterie.data import places

    return places.located(data)
