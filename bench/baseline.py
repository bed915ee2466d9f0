"""Compare rows with those of an earlier run, and say what moved."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.rows import Row

__all__ = ["Baseline", "Moved", "moved", "read"]

_LEAST = 0.1
"""Changes below a tenth are those of a machine that is not quiet."""


@dataclass(frozen=True)
class Baseline:
    """Rows of an earlier run, and the machine that it was on."""

    machine: Mapping[str, Any]
    rows: Mapping[str, Row]


@dataclass(frozen=True)
class Moved:
    """A row whose figure is another one than in an earlier run.

    Parameters
    ----------
    name : str
    what : str
        ``ratio`` where both runs have one, as it depends least on the machine; else the unit of the row.
    before, now : float
    """

    name: str
    what: str
    before: float
    now: float

    @property
    def change(self) -> float:
        """Relative change: 0.2 for a figure that is a fifth larger."""
        return self.now / self.before - 1


def read(path: Path) -> Baseline:
    """Read the rows that ``--json`` wrote.

    Raises
    ------
    ValueError
        The file cannot be read, or has no rows of a run.
    """
    try:
        content = json.loads(path.read_text())
        rows = [Row(**row) for row in content["rows"]]
        return Baseline(dict(content["machine"]), {row.name: row for row in rows})
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} has no rows as `python -m bench --json FILE` writes them: {error!r}"
        ) from error


def moved(rows: Sequence[Row], baseline: Baseline) -> list[Moved]:
    """Return the rows that moved by a tenth or more, those that moved most first."""
    return sorted(_moved(rows, baseline), key=lambda one: -abs(one.change))


def _moved(rows: Sequence[Row], baseline: Baseline) -> Iterator[Moved]:
    for row in rows:
        before = baseline.rows.get(row.name)
        if before is None:
            continue
        if row.ratio is not None and before.ratio is not None:
            one = Moved(row.name, "ratio", before.ratio, row.ratio)
        else:
            one = Moved(row.name, row.unit, before.ours, row.ours)
        if one.before and abs(one.change) >= _LEAST:
            yield one
