"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["JsonOption", "SetOption"]

JsonOption = Annotated[
    bool, typer.Option("--json", help="One JSON object on standard output, prose on standard error.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key, as in federation.hosts=3. May be repeated."),
]
