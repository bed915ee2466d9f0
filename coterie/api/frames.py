"""Tables of the Python interface: polars frames, and their HTML for notebooks."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coterie.data.tables import polars
from coterie.errors import DataError

if TYPE_CHECKING:
    import polars as pl

__all__ = ["frame_of", "html_table", "polars_frame", "records_frame", "text_table"]

_WIDTH = 160
"""Characters of a line of text, beyond which cells are folded."""


def frame_of(columns: Mapping[str, Sequence[Any]]) -> pl.DataFrame:
    """Return a polars frame of some columns."""
    made: pl.DataFrame = polars().DataFrame(dict(columns), strict=False)
    return made


def records_frame(records: Iterable[Mapping[str, Any]], first: Sequence[str] = ()) -> pl.DataFrame:
    """Return a polars frame of some records; values that a record lacks are null.

    Parameters
    ----------
    records : iterable of mapping
    first : sequence of str
        Columns that come first, and that are there without any record.
    """
    rows = list(records)
    names = dict.fromkeys([*first, *(name for row in rows for name in row)])
    return frame_of({name: [row.get(name) for row in rows] for name in names})


def polars_frame(table: Any) -> pl.DataFrame:
    """Return a pandas or polars table as a polars frame.

    Raises
    ------
    DataError
        It is neither.
    """
    module = polars()
    if isinstance(table, module.LazyFrame):
        table = table.collect()
    if isinstance(table, module.DataFrame):
        found: pl.DataFrame = table
        return found
    columns, values = getattr(table, "columns", None), getattr(table, "to_dict", None)
    if columns is None or values is None:
        raise DataError(
            f"{type(table).__name__} is no data set; expected a name, a path, or a pandas or polars frame"
        )
    # Column by column: polars reads a frame of pandas at once with pyarrow only, which nothing else here needs.
    return frame_of({str(name): _values(table[name]) for name in columns})


def _values(column: Any) -> Any:
    """Return a column of pandas as an array that polars reads; None where pandas has no value."""
    if column.dtype.kind in "ifubM" and not column.hasnans:
        return column.to_numpy()
    return [None if missing else value for value, missing in zip(column, column.isna(), strict=True)]


def html_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as HTML, with every value escaped."""
    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(str(value))}</td>' for value in row)}</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def text_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as plain text, a line for each row."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(Text(str(name)))
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row))
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
    with console.capture() as printed:
        console.print(table)
    return "\n".join(line.rstrip() for line in printed.get().splitlines()).strip("\n")
