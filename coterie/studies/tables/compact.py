"""Compact JSON of tables of figures, with one line for each row, for files in the repository."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["row_lines"]


def row_lines(made: Mapping[str, Any]) -> str:
    """Return a table, or trials, as JSON with one line for each key and for each entry of a list of records.

    A change of one row is then a change of one line.

    Parameters
    ----------
    made : mapping
        The table, as ``coterie evaluate`` made it.  Values that JSON does not support become floats.

    Returns
    -------
    str
        JSON that ends with a newline.
    """
    parts = [f"{_line(str(key))}:{_value(value)}" for key, value in made.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _value(value: Any) -> str:
    if isinstance(value, Mapping) and value and all(map(_is_records, value.values())):
        return "{\n" + ",\n".join(f"{_line(str(key))}:{_value(one)}" for key, one in value.items()) + "\n}"
    if not _is_records(value):
        return _line(value)
    return "[\n" + ",\n".join(_line(one) for one in value) + "\n]"


def _is_records(value: Any) -> bool:
    """Return whether a value is a list with records in it."""
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return listed and any(isinstance(one, Mapping) for one in value)


def _line(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), default=float)
