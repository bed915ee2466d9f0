"""Commands that make tables again, as they are printed below them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from coterie.studies.tables.paper_table import Results
from coterie.studies.tables.row import Row

__all__ = ["command_of"]

_SPOKEN = ("system", "split.kind", "data.path")
"""Keys that other options of the command give."""


def command_of(
    table: str, system: str, rows: Sequence[Row], given: Mapping[str, Any], results: Results
) -> str:
    """Return the command that makes a table of one system again.

    Parameters
    ----------
    table, system : str
    rows : sequence of Row
        All rows of the table, of which the results may have some.
    given : mapping
        Nested values of a run's keys.
    results : Results
    """
    chosen = "" if len(results.rows) == len(rows) else f" --rows {','.join(row.name for row in results.rows)}"
    seeds = ",".join(map(str, results.seeds))
    return (
        f"`coterie evaluate --table {table} --systems {system} --data {results.dataset} --seeds {seeds}"
        f"{_set(given)}{chosen}`"
    )


def _set(given: Mapping[str, Any], prefix: str = "") -> str:
    """Return the options of a command that give a run these values, but for data set, system and split."""
    found = ""
    for key, value in given.items():
        name = prefix + key
        if isinstance(value, Mapping):
            found += _set(value, f"{name}.")
        elif name not in _SPOKEN:
            found += f" --set {name}={json.dumps(value, default=str)}"
    return found
