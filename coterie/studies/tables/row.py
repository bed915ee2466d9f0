"""Rows of a table: what is trained, with which options, and among which others it is tuned."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from coterie.config.run import RunSettings
from coterie.errors import ConfigError, nearest
from coterie.evaluation.selection import Trained
from coterie.studies.run_data import Feed

__all__ = [
    "Choices",
    "Engine",
    "LogUniform",
    "Options",
    "Row",
    "Space",
    "TrainRun",
    "configured",
    "draw",
    "enumerated",
    "with_options",
]

Options = Mapping[str, Any]
"""Settings of a row by name; for rows that are runs by dotted key, as in ``drift.rate``."""


class Engine(Protocol):
    """Trains one row once."""

    def __call__(self, settings: RunSettings, options: Options, feed: Feed, seed: int) -> Trained:
        """Train.

        Parameters
        ----------
        settings : RunSettings
            What holds for the whole table: data, split, federation.
        options : mapping
            What holds for this row.
        feed : Feed
            The data, divided with this seed.
        seed : int
        """


class TrainRun(Protocol):
    """Trains a run that its settings describe in full: a federation, over the network or in one process."""

    def __call__(self, settings: RunSettings, feed: Feed, seed: int) -> Trained:
        """Train; what the table wants of the row is in the settings."""


@dataclass(frozen=True)
class Choices:
    """One of some values, each as likely."""

    values: tuple[Any, ...]

    def sample(self, rng: np.random.Generator) -> Any:
        """Return one of the values."""
        return self.values[int(rng.integers(len(self.values)))]


@dataclass(frozen=True)
class LogUniform:
    """A number between two others, each order of magnitude as likely."""

    low: float
    high: float

    def sample(self, rng: np.random.Generator) -> float:
        """Return a number, with three significant digits so that it can be written down."""
        return float(f"{math.exp(rng.uniform(math.log(self.low), math.log(self.high))):.3g}")


Space = Mapping[str, Choices | LogUniform]
"""What is tuned, by the names that options have."""


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Parameters
    ----------
    name : str
        Key in the JSON, lower case with hyphens.
    label : str
        What is printed.
    engine : Engine
    options : mapping
        Before tuning.
    space : mapping
        What tuning may change; empty for a row without anything to tune.
    like : str, optional
        Name of another row, whose tuned options this one takes beneath its own: variants that differ by one setting.
    found : mapping of str to mapping
        By data set, what to change in ``options`` there: found on its validation items before `coterie tune` ever
        ran on this row.
    note : str
        What a reader must know beside the figures.
    """

    name: str
    label: str
    engine: Engine
    options: Options = field(default_factory=dict)
    space: Space = field(default_factory=dict)
    like: str | None = None
    found: Mapping[str, Options] = field(default_factory=dict)
    note: str = ""

    def on(self, dataset: str) -> Row:
        """Return the row as it begins on a data set."""
        return replace(self, options={**self.options, **self.found.get(dataset, {})})


def draw(row: Row, trials: int, seed: int) -> Iterator[Options]:
    """Yield options to try: those of the row, then random ones.

    Each row has a random stream of its own, so that the trials of one do not depend on which others there are, and more
    trials begin with the fewer.

    Parameters
    ----------
    row : Row
    trials : int
        How many in all.
    seed : int
        Not negative.
    """
    rng = np.random.default_rng([seed, *row.name.encode()])
    for trial in range(trials):
        # Drawn for the first trial, too: a stream that does not depend on its number.
        drawn = {name: row.space[name].sample(rng) for name in sorted(row.space)}
        yield {**row.options, **(drawn if trial else {})}


def enumerated(row: Row) -> Iterator[Options]:
    """Yield every combination of a space of choices.

    Raises
    ------
    TypeError
        The space has something else than choices.
    """
    values: list[tuple[Any, ...]] = []
    for name, one in row.space.items():
        if not isinstance(one, Choices):
            raise TypeError(f"{name} of row {row.name} is {one}; expected choices, which can be enumerated")
        values.append(one.values)
    for combination in itertools.product(*values):
        yield {**row.options, **dict(zip(row.space, combination, strict=True))}


def with_options(settings: RunSettings, options: Options) -> RunSettings:
    """Return settings with some keys changed.

    Parameters
    ----------
    settings : RunSettings
    options : mapping
        Values by dotted key.

    Raises
    ------
    ConfigError
        No such key, or a value that it does not take.
    """
    content = settings.model_dump()
    for key, value in options.items():
        place: Any = content
        *path, last = key.split(".")
        for part in path:
            place = _inside(place, part, key)[part]
        _inside(place, last, key)[last] = value
    try:
        return RunSettings.model_validate(content)
    except ValueError as error:
        raise ConfigError(f"the options {dict(options)} make no run: {error}") from error


def configured(train: TrainRun) -> Engine:
    """Return the engine of rows whose options are keys of a run."""

    def engine(settings: RunSettings, options: Options, feed: Feed, seed: int) -> Trained:
        return train(with_options(settings, options), feed, seed)

    return engine


def _inside(place: Any, part: str, key: str) -> dict[str, Any]:
    """Return the table that holds a part of a key."""
    if isinstance(place, dict) and part in place:
        return place
    guess = nearest(part, place) if isinstance(place, dict) else None
    raise ConfigError(
        f"a row sets {key}, but a run has no such key", hint=f"did you mean {guess!r}?" if guess else None
    )
