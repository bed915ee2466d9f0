"""Text and Parquet tables as checked NumPy columns; every fault names the file, the line and the column.

The fast path leaves parsing to polars, with every field as text. Only when a field turns out to be wrong is
the file read a second time, slowly, to find out on which line it stands.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import DataError, nearest

if TYPE_CHECKING:
    import polars as pl

__all__ = ["Dialect", "FileTable", "polars", "read_parquet", "read_text"]

_TIME_FORMATS = ("%Y-%m-%dT%H:%M:%S%#z", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%a %b %d %H:%M:%S %z %Y")
"""Formats tried, in this order, on times that are no numbers; the last is that of Twitter and Foursquare dumps."""
_LATEST_TIME = 1e11
"""Largest accepted time, in the year 5138, Unix seconds: a larger number is probably milliseconds."""


@dataclass(frozen=True)
class Dialect:
    """The rules by which a text file is cut into fields.

    Parameters
    ----------
    separator : str
        One character, or the ``::`` of MovieLens' .dat files.
    quoted : bool
        Whether ``"`` protects separators inside a field.
    latin1 : bool
        Whether bytes that are not UTF-8 are ISO 8859-1, as in the older MovieLens sets.
    """

    separator: str
    quoted: bool = False
    latin1: bool = False


@dataclass(frozen=True, eq=False)
class FileTable:
    """A table from a file, whose columns are read one by one and checked.

    Parameters
    ----------
    path : Path
        File, named in errors.
    frame : polars.DataFrame
        Text throughout if ``dialect`` is given.
    dialect : Dialect or None
        None for files that are no text: errors then name rows.
    header : bool
        Whether line 1 names the columns.
    place : callable, optional
        Names a row in errors, by its position from 0, where the file has no rows of its own.
    """

    path: Path
    frame: pl.DataFrame
    dialect: Dialect | None
    header: bool
    place: Callable[[int], str] | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.frame.height

    def has(self, column: str) -> bool:
        """Return whether the column exists."""
        return column in self.frame.columns

    def require(self, column: str) -> pl.Series:
        """Return a column.

        Raises
        ------
        DataError
            It does not exist; names the columns that do and the nearest of them.
        """
        if not self.has(column):
            guess = nearest(column, self.frame.columns)
            raise DataError(
                f"{self.path} has no column {column!r}; it has {', '.join(map(repr, self.frame.columns))}",
                hint=f"did you mean {guess!r}?"
                if guess
                else f"--column {column}=NAME says which it is, in a run `--set data.columns.{column}=NAME`",
            )
        return self.frame[column]

    def keys(self, column: str) -> tuple[tuple[str, ...], NDArray[np.int32]]:
        """Return the distinct keys of a column, in order, and the index of each row's key.

        Keys that are all plain integers are ordered as numbers, others by code point.

        Returns
        -------
        keys : tuple of str
        index : ndarray of int32, shape (rows,)
        """
        import polars as pl

        text = self._text(column)
        self._refuse(column, text.is_null() | (text == ""), "a key")
        number = text.cast(pl.Int64, strict=False)
        if not number.null_count() and bool((number.cast(pl.String) == text).all()):
            values, index = np.unique(number.to_numpy(), return_inverse=True)
            return tuple(map(str, values.tolist())), index.astype(np.int32)
        distinct = text.unique().sort()
        rank = pl.Series(np.arange(len(distinct), dtype=np.int32))
        return tuple(distinct.to_list()), text.replace_strict(distinct, rank).to_numpy().astype(np.int32)

    def numbers(
        self, column: str, low: float | None = None, high: float | None = None, *, blank: bool = False
    ) -> NDArray[np.float64]:
        """Return a column of finite numbers, refusing any outside ``low`` to ``high`` (inclusive).

        If ``blank`` is set, an empty field is NaN.

        Returns
        -------
        ndarray of float64, shape (rows,)
        """
        import polars as pl

        value = self._numeric(column)
        wrong = value.is_null() | ~value.fill_null(0).is_finite()
        if blank:
            wrong = wrong & (self._text(column).fill_null("") != "")
        self._refuse(column, wrong, "a finite number")
        if low is not None and high is not None:
            outside = ~value.is_between(low, high).fill_null(blank)
            self._refuse(column, outside, f"a number from {low:g} to {high:g}")
        return value.cast(pl.Float64).fill_null(np.nan).to_numpy()

    def choices(self, column: str, known: Sequence[str]) -> NDArray[np.int32]:
        """Return the index of each row's value in ``known``, -1 for an empty field, refusing any other value.

        Returns
        -------
        ndarray of int32, shape (rows,)
        """
        import polars as pl

        place = {value: index for index, value in enumerate(known)} | {"": -1}
        found = [place.get(value) for value in self.texts(column)]
        wrong = pl.Series([each is None for each in found], dtype=pl.Boolean)
        self._refuse(column, wrong, f"one of {', '.join(known)}")
        return np.array(found, np.int32)

    def seconds(self, column: str) -> NDArray[np.int64]:
        """Return a column of times in seconds since 1970-01-01 UTC.

        Accepts numbers of seconds (a fraction is dropped), ISO 8601 (UTC if no zone is given) and
        ``Tue Apr 03 18:07:30 +0000 2012``; in Parquet also date-time types.

        Returns
        -------
        ndarray of int64, shape (rows,)
        """
        import polars as pl

        source = self.require(column)
        if source.dtype == pl.Date or isinstance(source.dtype, pl.Datetime):
            moment = source
        elif source.dtype == pl.String and self._numeric(column).null_count() == len(self) > 0:
            moment = self._moments(column)
        else:
            value = self.numbers(column)
            self._refuse(
                column, pl.Series(np.abs(value) > _LATEST_TIME), "seconds since 1970, not a finer unit"
            )
            return np.floor(value).astype(np.int64)
        self._refuse(column, moment.is_null(), "a time")
        return moment.dt.epoch("s").to_numpy().astype(np.int64)

    def texts(self, column: str) -> list[str]:
        """Return a column as text, empty where nothing stands."""
        return self._text(column).fill_null("").to_list()

    def _text(self, column: str) -> pl.Series:
        import polars as pl

        source = self.require(column)
        if source.dtype.is_float() and bool((source == source.floor()).all()):
            # Whole numbers with gaps are often stored as floats: 12.0 is key 12.  NaN is no key.
            source = source.cast(pl.Int64, strict=False)
        return self._cast(source, pl.String).str.strip_chars()

    def _numeric(self, column: str) -> pl.Series:
        import polars as pl

        source = self.require(column)
        text = source.str.strip_chars() if source.dtype == pl.String else source
        return self._cast(text, pl.Float64)

    def _cast(self, source: pl.Series, dtype: type[pl.DataType]) -> pl.Series:
        """Convert a column, with null for a value that does not fit."""
        import polars as pl

        try:
            return source.cast(dtype, strict=False)
        except pl.exceptions.PolarsError as error:
            raise DataError(
                f"{self.path}, column {source.name!r} is of type {source.dtype}; expected text or numbers"
            ) from error

    def _moments(self, column: str) -> pl.Series:
        """Parse times by the format that leaves the fewest rows without a time."""
        import polars as pl

        text = self._text(column)
        parsed = [
            text.str.to_datetime(form, time_unit="ms", time_zone="UTC", strict=False)
            for form in _TIME_FORMATS
        ]
        best = min(parsed, key=lambda moment: moment.null_count())
        return (
            best if best.null_count() < len(self) else pl.Series([None] * len(self), dtype=pl.Datetime("ms"))
        )

    def _refuse(self, column: str, wrong: pl.Series, expected: str) -> None:
        """Raise for the first row that is marked wrong."""
        if (row := wrong.arg_max()) is None or not wrong[row]:
            return
        value = self.frame[column][row]
        shown = "nothing" if value is None else repr(value)
        raise DataError(f"{self.path}, {self._place(row)}, column {column!r}: {shown}; expected {expected}")

    def _place(self, row: int) -> str:
        if self.place is not None:
            return self.place(row)
        if self.dialect is None:
            return f"row {row + 1}"
        records = _records(_decoded(self.path, self.dialect), self.dialect)
        for position, (line, _) in enumerate(records):
            if position == row + self.header:
                return f"line {line}"
        return f"row {row + 1}"


def read_text(path: Path, dialect: Dialect, names: Sequence[str] | None = None) -> FileTable:
    """Read a delimited text file; blank lines are skipped, a byte order mark is dropped.

    Parameters
    ----------
    path : Path
    dialect : Dialect
    names : sequence of str, optional
        Names of all the columns; without them line 1 is the header.

    Returns
    -------
    Table

    Raises
    ------
    DataError
        The file cannot be read, is not UTF-8, holds no rows, or a line has another number of fields.
    """
    pl = polars()
    content = _decoded(path, dialect)
    if not content.strip():
        raise DataError(f"{path} is empty; expected a table")
    separator = _one_character(dialect.separator)
    try:
        frame = pl.read_csv(
            content.replace(dialect.separator, separator).encode(),
            separator=separator,
            quote_char='"' if dialect.quoted else None,
            has_header=names is None,
            infer_schema=False,
        )
    except (pl.exceptions.PolarsError, ValueError) as error:
        _refuse_uneven(path, content, dialect, names)
        first_line = str(error).splitlines()[0]
        raise DataError(f"{path} cannot be read as a table: {first_line}") from error
    if names is not None:
        if frame.width != len(names):
            _refuse_uneven(path, content, dialect, names)
        frame.columns = list(names)
    else:
        frame.columns = [column.strip() for column in frame.columns]
    frame = frame.filter(~pl.all_horizontal(pl.all().is_null()))
    if not frame.height:
        raise DataError(f"{path} has a header but no rows; expected interactions")
    return FileTable(path, frame, dialect, header=names is None)


def read_parquet(path: Path) -> FileTable:
    """Read a Parquet file.

    Raises
    ------
    DataError
        It cannot be read or holds no rows.
    """
    pl = polars()
    try:
        frame = pl.read_parquet(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}") from error
    if not frame.height:
        raise DataError(f"{path} has no rows; expected interactions")
    return FileTable(path, frame, dialect=None, header=False)


def polars() -> Any:
    """Return the module polars.

    Raises
    ------
    DataError
        It is not installed.
    """
    try:
        import polars
    except ImportError as error:
        raise DataError(
            "reading data sets needs polars, which is not installed", hint="pip install 'coterie[data]'"
        ) from error
    return polars


def _decoded(path: Path, dialect: Dialect) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if dialect.latin1:
            return raw.decode("latin-1")
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: byte 0x{raw[error.start]:02x}; expected UTF-8 text") from error


def _one_character(separator: str) -> str:
    # polars and csv cut at one character; no file of the sets that use "::" holds this control character.
    return separator if len(separator) == 1 else "\x1f"


def _records(content: str, dialect: Dialect) -> Iterator[tuple[int, list[str]]]:
    """Yield the records that are not blank, with the number of the line on which each ends."""
    separator = _one_character(dialect.separator)
    lines = io.StringIO(content.replace(dialect.separator, separator), newline="")
    reader = csv.reader(
        lines, delimiter=separator, quoting=csv.QUOTE_MINIMAL if dialect.quoted else csv.QUOTE_NONE
    )
    for fields in reader:
        if any(fields):
            yield reader.line_num, fields


def _refuse_uneven(path: Path, content: str, dialect: Dialect, names: Sequence[str] | None) -> None:
    """Raise for the first line with too many or too few fields."""
    expected = len(names) if names is not None else None
    for line, fields in _records(content, dialect):
        if expected is None:
            expected = len(fields)
        elif len(fields) != expected:
            raise DataError(f"{path}, line {line}: {len(fields)} fields; expected {expected}")
