"""Cells of a table: one row trained with one seed, with its figures and the files that keep them."""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.errors import DataError
from coterie.evaluation.holdout import headline
from coterie.evaluation.selection import SelectedModel, best_of
from coterie.studies.run_data import Feed
from coterie.studies.services_run import RunServices
from coterie.studies.tables.kept_file import write_whole
from coterie.studies.tables.row import Options, Row

__all__ = ["Also", "Cell", "read_pairs", "train_cell", "write_pairs"]

Values = Mapping[str, NDArray[np.float64]]
"""Metrics of single users by name, float64 (U,) each."""

Also = Callable[[Values], Values]
"""Function that computes further metrics of users from the measured ones."""


@dataclass(frozen=True)
class Cell:
    """One row of a table, trained with one seed.

    Parameters
    ----------
    record : mapping
        JSON-ready: ``row``, ``label``, ``seed``, ``options``, ``tuned``, ``step`` of the chosen version, its
        ``metrics`` and ``users`` by metric, ``history``, ``best_on_test`` (``step`` and ``metrics`` of the version with
        the best test result, which no honest row may choose), ``split_sha256``, ``per_user`` (name of the file of
        users' values, or None), ``seconds``, ``facts``, and ``key``, a digest of all that the cell depends on but the
        code.
    per_user : mapping of str to ndarray of float64, shape (U,), or None
        Metrics of each user, for paired comparison.
    taken_over : bool
        Whether the cell is of an earlier evaluation.
    """

    record: Mapping[str, Any]
    per_user: Values | None
    taken_over: bool = False


def train_cell(
    row: Row,
    options: Options,
    settings: RunSettings,
    feed: Feed,
    seed: int,
    *,
    tuned: str,
    best_by: str,
    folder: Path,
    resume: bool = False,
    also: Also | None = None,
    services: RunServices | None = None,
) -> Cell:
    """Train a row with a seed and keep its files, or load the cell of an earlier evaluation.

    Parameters
    ----------
    row : Row
    options : mapping
        Options of this cell.
    settings, feed, seed
        As in `Engine`.
    tuned : str
        ``"tuned"``, ``"found before"``, ``"untuned"`` or ``"fixed"``.
    best_by : str
        Test metric by which ``best_on_test`` is found.
    folder : Path
        Folder of the cell's files, ``ROW-seed-N.json`` and ``.csv``.
    resume : bool
        Whether to load an existing cell of the same options, settings, data and version of Coterie.
    also : callable, optional
        Computes further metrics of users.
    services : callable, optional
        Runs federations, for rows that are trained over services.

    Returns
    -------
    Cell

    Raises
    ------
    CoterieError
        Training fails.
    """
    split = feed.split.sha256(feed.dataset)
    key = _key(row, options, settings, split, seed)
    stem = f"{row.name}-seed-{seed}"
    if resume and (known := _known(folder, stem, key)) is not None:
        return Cell({**known.record, "label": row.label, "tuned": tuned}, known.per_user, taken_over=True)
    begun = time.perf_counter()
    trained = _completed(row.train(settings, options, feed, seed, services), also)
    record = {
        "row": row.name,
        "label": row.label,
        "seed": seed,
        "options": dict(options),
        "tuned": tuned,
        "step": trained.history[trained.best]["step"],
        "metrics": dict(trained.metrics),
        "users": dict(trained.users),
        "best_on_test": _best_on_test(trained, best_by),
        "history": [dict(entry) for entry in trained.history],
        "split_sha256": split,
        "per_user": None if trained.per_user is None else f"{stem}.csv",
        "seconds": round(time.perf_counter() - begun, 1),
        "facts": dict(trained.facts),
        "key": key,
    }
    folder.mkdir(parents=True, exist_ok=True)
    if trained.per_user is not None:
        write_pairs(folder / f"{stem}.csv", feed.dataset.users, trained.per_user)
    # Written last, so that a cell with a record is complete.
    write_whole(folder / f"{stem}.json", json.dumps(record, indent=1, default=float))
    return Cell(record, trained.per_user)


def write_pairs(path: Path, users: Sequence[str], values: Values) -> None:
    """Write users' metrics as CSV: a column ``user`` and one for each metric, with empty fields for NaN."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["user", *values])
        columns = [[f"{x:.6g}" if not math.isnan(x) else "" for x in one.tolist()] for one in values.values()]
        writer.writerows(zip(users, *columns, strict=True))


def read_pairs(path: Path) -> tuple[tuple[str, ...], dict[str, NDArray[np.float64]]]:
    """Read users' metrics that `write_pairs` wrote.

    Returns
    -------
    users : tuple of str
    values : dict of str to ndarray of float64, shape (U,)

    Raises
    ------
    DataError
        The file does not exist or is malformed.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = list(csv.reader(file))
        users = tuple(row[0] for row in rows)
        values = {
            name: np.array([float(row[column]) if row[column] else math.nan for row in rows])
            for column, name in enumerate(header)
            if column
        }
    except (OSError, ValueError, IndexError) as error:
        raise DataError(f"cannot read the values of users in {path}: {error}") from error
    return users, values


def _completed(trained: SelectedModel, also: Also | None) -> SelectedModel:
    if also is None or trained.per_user is None:
        return trained
    more = also(trained.per_user)
    users = {name: int(np.count_nonzero(~np.isnan(values))) for name, values in more.items()}
    return replace(
        trained,
        per_user={**trained.per_user, **more},
        metrics={**trained.metrics, **headline(dict(more))},
        users={**trained.users, **users},
    )


def _best_on_test(trained: SelectedModel, best_by: str) -> dict[str, Any] | None:
    """Return step and metrics of the version that is best on the test part, as papers report; None without any."""
    if not any(best_by in entry["metrics"] for entry in trained.history):
        return None
    entry = trained.history[best_of(trained.history, best_by)]
    return {"step": entry["step"], "metrics": dict(entry["metrics"])}


def _known(folder: Path, stem: str, key: str) -> Cell | None:
    try:
        record = json.loads((folder / f"{stem}.json").read_text())
    except (OSError, ValueError):
        return None
    if record.get("key") != key:
        return None
    if record["per_user"] is None:
        return Cell(record, None)
    try:
        return Cell(record, read_pairs(folder / record["per_user"])[1])
    except DataError:
        return None


def _key(row: Row, options: Options, settings: RunSettings, split: str, seed: int) -> str:
    about = {
        "row": row.name,
        "options": dict(options),
        # Defaults are left out, so that a setting added by a later release does not change the keys of cells.
        "settings": settings.model_dump(
            mode="json", exclude={"output", "name", "seeds"}, exclude_defaults=True
        ),
        "split": split,
        "seed": seed,
        "version": importlib.metadata.version("coterie"),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()
