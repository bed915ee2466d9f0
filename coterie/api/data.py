"""Data sets and their splits in the Python interface: `load`, `Data` and `DataSplit`."""

from __future__ import annotations

import csv
import html
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field

from coterie.api.checked import checked
from coterie.api.frames import html_table, polars_frame
from coterie.data import Dataset, Split, read_frame
from coterie.data.dataset import describe
from coterie.data.filters import Filter, filtered
from coterie.data.places import located
from coterie.errors import ConfigError
from coterie.studies.run_data import dataset_of, divided
from coterie.systems.run_settings import DataSettings, SplitSettings
from coterie.systems.settings import ConfigModel

__all__ = ["Data", "DataSplit", "load"]

_FRAME = "frame"
"""Name of a data set that was a table in memory, unless another one is given."""


class _Tables(ConfigModel):
    """The tables of a run that data and split decide, checked as those of a file are."""

    data: DataSettings = Field(default_factory=lambda: DataSettings())
    split: SplitSettings = Field(default_factory=lambda: SplitSettings())


class Data:
    """A data set, as `load` returns it.

    Attributes
    ----------
    dataset : Dataset
        Users, items and interactions as arrays.
    keys : dict
        Keys of the table ``[data]`` that were given.
    """

    def __init__(self, dataset: Dataset, keys: Mapping[str, Any], raw: Dataset | None = None) -> None:
        self.dataset = dataset
        self.keys = dict(keys)
        self._raw = raw

    @property
    def users(self) -> int:
        """Number of users."""
        return len(self.dataset.users)

    @property
    def items(self) -> int:
        """Number of items."""
        return len(self.dataset.items)

    @property
    def interactions(self) -> int:
        """Number of interactions."""
        return len(self.dataset)

    @property
    def in_memory(self) -> bool:
        """Whether the data set is on no disk, so that a run keeps a copy in its folder."""
        return self._raw is not None

    def split(self, kind: str = "leave-last-out", *, seed: int = 0, **keys: Any) -> DataSplit:
        """Split the interactions into training, validation and test.

        Parameters
        ----------
        kind : str
            As ``split.kind`` of a run's file: ``temporal``, ``random``, ``leave-last-out``, ``leave-random-out``...
        seed : int
            Seed of the split, and of what is trained on it.
        **keys
            Further keys of the table ``[split]``, such as ``validation=0.2``.

        Returns
        -------
        DataSplit

        Raises
        ------
        ConfigError
            An unknown key, or a value out of range, as in a file.
        DataError
            The data set lacks what the split needs, such as times.
        """
        settings = checked(_Tables, {"data": self.keys, "split": {"kind": kind, **keys}})
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(f"seed is {seed!r}; expected a whole number")
        return DataSplit(
            self, divided(settings.data, settings.split, self.dataset, seed), settings.split, seed
        )

    def write(self, folder: Path) -> Path:
        """Write a data set from memory as CSV into a folder, readable by its owner only, and return the file."""
        raw = self._raw or self.dataset
        path = folder / f"{raw.name}.csv"
        folder.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        timed, rated = raw.time is not None, not any(note.startswith("no ratings") for note in raw.notes)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["user", "item", *(["rating"] if rated else []), *(["time"] if timed else [])])
            for row in range(len(raw)):
                writer.writerow(
                    (
                        raw.users[raw.user[row]],
                        raw.items[raw.item[row]],
                        *((f"{raw.rating[row]:.9g}",) if rated else ()),
                        *((int(raw.time[row]),) if raw.time is not None else ()),
                    )
                )
        return path

    def describe(self) -> dict[str, Any]:
        """Return what ``coterie data describe`` prints: sizes, sparsity, times, ratings, what is missing."""
        return describe(self.dataset)

    def __repr__(self) -> str:
        notes = "".join(f"\n  {note}" for note in self.dataset.notes)
        sizes = f"{self.users} users, {self.items} items, {self.interactions} interactions"
        return f"Data {self.dataset.name}: {sizes}{notes}"

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.dataset.notes)
        sizes = (self.dataset.name, self.users, self.items, self.interactions)
        return html_table(("data set", "users", "items", "interactions"), [sizes]) + f"<ul>{notes}</ul>"


class DataSplit:
    """A data set with its split, as `Data.split` returns it.

    Attributes
    ----------
    data : Data
    split : Split
        Part of each interaction.
    settings : SplitSettings
        The table ``[split]`` that makes it.
    seed : int
    """

    def __init__(self, data: Data, split: Split, settings: SplitSettings, seed: int) -> None:
        self.data = data
        self.split = split
        self.settings = settings
        self.seed = seed

    @cached_property
    def sha256(self) -> str:
        """Digest of the split: equal on every machine for equal data and settings (`Split.sha256`)."""
        return self.split.sha256(self.data.dataset)

    @classmethod
    def require(cls, split: object) -> None:
        """Refuse anything but a split.

        Raises
        ------
        ConfigError
            The object is no split; says how one is made.
        """
        if not isinstance(split, cls):
            raise ConfigError(
                f"{type(split).__name__} is no split; expected what `data.split(...)` returns",
                hint='as in `model.fit(ct.load("ml-100k").split("leave-last-out"))`',
            )

    def tree(self, folder: Path | None = None) -> dict[str, Any]:
        """Return the tables ``data`` and ``split`` of a run on this split.

        Parameters
        ----------
        folder : Path, optional
            Folder of the run, in which a data set from memory is kept, as its settings have to name a file.
        """
        data = dict(self.data.keys)
        if folder is not None and self.data.in_memory:
            data |= {"path": self.data.write(folder), "layout": "csv"}
        return {"data": data, "split": self.settings.model_dump()}

    def _sizes(self) -> dict[str, int]:
        parts = {"train": self.split.train, "validation": self.split.validation, "test": self.split.test}
        return {name: int(rows.sum()) for name, rows in parts.items()}

    def __repr__(self) -> str:
        sizes = ", ".join(f"{count} {name}" for name, count in self._sizes().items())
        name = self.data.dataset.name
        return f"DataSplit {name}, {self.settings.kind}, seed {self.seed}: {sizes}; sha256 {self.sha256[:12]}"

    def _repr_html_(self) -> str:
        sizes = self._sizes()
        head = ("data set", "split", "seed", *sizes, "sha256")
        row = (self.data.dataset.name, self.settings.kind, self.seed, *sizes.values(), self.sha256)
        return html_table(head, [row])


def load(
    source: Any = None,
    *,
    user: str | None = None,
    item: str | None = None,
    rating: str | None = None,
    time: str | None = None,
    name: str | None = None,
    **keys: Any,
) -> Data:
    """Load a data set.

    Parameters
    ----------
    source : str, Path, or a pandas or polars frame, optional
        A path; a name below ``data`` or ``COTERIE_DATA``, such as ``ml-100k``; or a table with a column of users, one
        of items, and possibly ratings and times.  Without it, the embedded synthetic data set.
    user, item, rating, time : str, optional
        Names of the columns; without them the usual names are looked for.
    name : str, optional
        Name of a data set from memory, which its reports give: letters, digits, dots and hyphens.
    **keys
        Further keys of the table ``[data]``, such as ``k_core=5``.

    Returns
    -------
    Data

    Raises
    ------
    ConfigError
        An unknown key, or a value out of range, as in a file.
    DataError
        The data cannot be read: file or frame, row and column, what stands there and what was expected.

    Examples
    --------
    >>> import polars as pl
    >>> import coterie as ct
    >>> table = pl.DataFrame({"user": ["ann", "ann", "bob"], "item": ["tea", "jam", "tea"]})
    >>> ct.load(table, name="shop")
    Data shop: 2 users, 2 items, 3 interactions
      no ratings: every interaction counts as 1
    """
    named = {"user": user, "item": item, "rating": rating, "time": time}
    columns = {role: column for role, column in named.items() if column is not None}
    tree = {**keys, **({"columns": {**keys.get("columns", {}), **columns}} if columns else {})}
    if "path" in tree or ("synthetic" in tree and source is not None):
        wrong = "path" if "path" in tree else "synthetic"
        raise ConfigError(f"data.{wrong}: the first argument of load says which data set it is")
    if source is None or isinstance(source, str | Path):
        if name is not None:
            raise ConfigError(f"name {name!r}: a data set from a file has the file's name")
        found = {} if source is None else {"path": located(Path(source))}
        return Data(dataset_of(checked(_Tables, {"data": {**tree, **found}}).data), {**tree, **found})
    options = checked(_Tables, {"data": tree}).data
    if options.layout is not None:
        raise ConfigError(f"data.layout {options.layout!r}: a frame in memory has no layout")
    raw = read_frame(
        polars_frame(source),
        _file_name(name or _FRAME),
        columns=options.columns,
        rating_range=options.rating_range,
    )
    keep = Filter(options.min_user, options.min_item, options.k_core)
    return Data(filtered(raw, keep), {k: value for k, value in tree.items() if k != "columns"}, raw)


def _file_name(name: str) -> str:
    if not name or name.strip(".") == "" or not all(one.isalnum() or one in "-_." for one in name):
        raise ConfigError(f"name {name!r}; expected letters, digits, dots and hyphens")
    return name
