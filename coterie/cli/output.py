"""Output of commands: prose for people, and one JSON envelope for programs.

Without ``--json`` prose goes to standard output and errors to standard error.  If it is given, prose goes
to standard error and standard output carries one line: ``{"ok": true, "command": ..., "result": ...}`` or
``{"ok": false, "command": ..., "error": ...}``.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from importlib.util import find_spec
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from coterie.errors import CoterieError, PreflightError
from coterie.telemetry.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["Failure", "Output", "Status", "columns", "failure_of", "plain", "print_failure", "printable"]

_PIPED_WIDTH = 120
"""Columns for tables that go to a file or pipe, which has no width of its own."""


def columns(*names: str) -> Table:
    """Return an empty table without rules whose long cells are wrapped and never cut off."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    return table


class Status(enum.IntEnum):
    """Exit statuses other than those of a `CoterieError`; ``docs/exit-codes/`` describes all."""

    OK = 0
    USAGE = 2
    INTERNAL = 70
    INTERRUPTED = 130


class Output:
    """Printer of one command's prose and result.

    Parameters
    ----------
    command : str
        Name of the command, such as ``"data describe"``.
    as_json : bool
        Whether ``--json`` was given.
    """

    def __init__(self, command: str, *, as_json: bool = False) -> None:
        self.command = command
        self.as_json = as_json

    @cached_property
    def console(self) -> Console:
        """Console for prose, tables and progress: standard output, or standard error with ``--json``."""
        from rich.console import Console

        console = Console(stderr=self.as_json, highlight=False, soft_wrap=True)
        if not console.is_terminal and not os.environ.get("COLUMNS"):
            console.width = _PIPED_WIDTH
        return console

    def say(self, *prose: Any) -> None:
        """Print text, or anything that rich can print, for people."""
        for item in prose:
            if isinstance(item, str) and find_spec("rich") is None:
                # A light installation (docs/device.md) draws no tables.
                print(item, file=sys.stderr if self.as_json else sys.stdout)
                continue
            # Without markup: brackets in a file name stay as they are.
            self.console.print(item, markup=False)

    def finish(self, result: Mapping[str, Any], failure: Failure | None = None) -> None:
        """Print the JSON envelope with ``--json``, else nothing; to be called once, at the end.

        Parameters
        ----------
        result : mapping
            Result of the command.
        failure : Failure, optional
            Failure of a command that has a result all the same, such as checks of which some failed.
        """
        if not self.as_json:
            return
        envelope: dict[str, Any] = {"ok": failure is None, "command": self.command}
        if failure is not None:
            envelope["error"] = dataclasses.asdict(failure)
        _print_json({**envelope, "result": plain(result)})


@dataclasses.dataclass(frozen=True)
class Failure:
    """The error of a command, as in the JSON envelope."""

    code: str
    message: str
    hint: str | None
    exit_code: int


def failure_of(error: BaseException) -> Failure:
    """Return the failure that an exception means for a command's caller."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]  # a task group wraps what one task raised
    if isinstance(error, CoterieError):
        return Failure(error.code, error.message, error.hint, error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return Failure("interrupted", "interrupted", None, Status.INTERRUPTED)
    if isinstance(error, ModuleNotFoundError) and error.name is not None and _is_light():
        return Failure(
            PreflightError.code,
            f"this installation lacks {error.name}, which the command needs: it is the light one of a device",
            "install the whole of it: pip install coterie",
            PreflightError.exit_code,
        )
    return Failure(
        "internal",
        f"unexpected {type(error).__name__}: {error}",
        "this is a fault of Coterie; COTERIE_DEBUG=1 shows where it happened",
        Status.INTERNAL,
    )


def _is_light() -> bool:
    """Return whether this is the light installation of a device, which has a part of Coterie (docs/device.md)."""
    return find_spec("coterie.launch") is None


def print_failure(command: str, failure: Failure, *, as_json: bool) -> None:
    """Print a failure, as the JSON envelope or as prose on standard error."""
    if as_json:
        _print_json({"ok": False, "command": command, "error": dataclasses.asdict(failure)})
        return
    print(f"error: {failure.message}", file=sys.stderr)
    if failure.hint:
        print(f"  hint: {failure.hint}", file=sys.stderr)


def plain(value: Any) -> Any:
    """Return a value as plain JSON types; NaN and infinities become None, since strict parsers refuse them.

    Raises
    ------
    TypeError
        The value has no JSON form.
    """
    match value:
        case None | bool() | str():
            return value
        case enum.Enum():
            return plain(value.value)
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else None
        case PurePath():
            return str(value)
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case Set():
            return sorted(plain(item) for item in value)
        case Sequence():
            return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):  # NumPy arrays and scalars
        return plain(value.tolist())
    raise TypeError(f"{type(value).__name__} has no JSON form: {value!r}")


def _print_json(envelope: Mapping[str, Any]) -> None:
    print(json.dumps(envelope, ensure_ascii=False, allow_nan=False))
