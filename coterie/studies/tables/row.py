"""Rows of a table: a method, its options, and the space in which its options are tuned."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from coterie.config.run import RunSettings
from coterie.errors import ConfigError, nearest
from coterie.evaluation.search import Choices, LogUniform, Space
from coterie.evaluation.selection import SelectedModel
from coterie.studies.run_data import Feed
from coterie.studies.services_run import RunServices

__all__ = [
    "PASSES",
    "QUICK_PASSES",
    "Choices",
    "Engine",
    "LogUniform",
    "Options",
    "OverServices",
    "Row",
    "Space",
    "TrainRun",
    "configured",
    "draw",
    "enumerated",
    "limited",
    "quick_note",
    "shortened",
    "with_options",
]

QUICK_PASSES = 10
"""Passes after which the rows of a quick table end at the latest."""

PASSES = "rounds.passes"
"""Key of a run in rounds that says how long it trains."""

Options = Mapping[str, Any]
"""Options of a row by name; the names of rows that are runs are dotted keys, as ``drift.rate``."""


class Engine(Protocol):
    """Function that trains a row of a table once."""

    def __call__(self, settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
        """Train a row with some options and a seed.

        Parameters
        ----------
        settings : RunSettings
            Settings of the whole table: data, split, federation.
        options : mapping
            Options of this row.
        feed : Feed
            The data, divided with this seed.
        seed : int
        """


@dataclass(frozen=True)
class OverServices:
    """Engine of a row that is trained over services, before it is told how to run them.

    Attributes
    ----------
    bind : callable
        Makes the engine from the function that runs a federation.
    """

    bind: Callable[[RunServices], Engine]


class TrainRun(Protocol):
    """Function that trains a run described by its settings alone, over services or in one process."""

    def __call__(self, settings: RunSettings, feed: Feed, seed: int) -> SelectedModel:
        """Train a run; its settings already contain the row's options."""


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Parameters
    ----------
    name : str
        Key in the JSON, lower case with hyphens.
    label : str
        Name that is printed.
    engine : Engine or OverServices
    options : mapping
        Options before tuning.
    space : mapping
        Options that tuning may change; empty for a row without anything to tune.
    like : str, optional
        Name of another row, whose tuned options this row takes where it has none of its own; for variants that
        differ by one setting.
    found : mapping of str to mapping
        Changes of ``options`` by data set, found on its validation items before `coterie tune` ran on this row.
    note : str
        Remark for readers of the figures.
    defaults : bool
        Whether the options are a system's own defaults: without trials the row is marked as untuned, even if it has no
        space.
    """

    name: str
    label: str
    engine: Engine | OverServices
    options: Options = field(default_factory=dict)
    space: Space = field(default_factory=dict)
    like: str | None = None
    found: Mapping[str, Options] = field(default_factory=dict)
    note: str = ""
    defaults: bool = False

    def on(self, dataset: str) -> Row:
        """Return the row with the options found before for a data set."""
        return replace(self, options={**self.options, **self.found.get(dataset, {})})

    def train(
        self,
        settings: RunSettings,
        options: Options,
        feed: Feed,
        seed: int,
        services: RunServices | None = None,
    ) -> SelectedModel:
        """Train the row once; ``services`` runs federations, for a row that is trained over services.

        Raises
        ------
        ConfigError
            When the row needs services and there is no function that runs them.
        """
        engine = self.engine
        if isinstance(engine, OverServices):
            if services is None:
                raise ConfigError(f"the row {self.name} is trained over services, which are not run here")
            engine = engine.bind(services)
        return engine(settings, options, feed, seed)


def draw(row: Row, trials: int, seed: int) -> Iterator[Options]:
    """Yield options to try: the row's own, then random ones from its space.

    Each row has a random stream of its own: its trials do not depend on other rows, and a larger number of trials
    begins with those of a smaller one.

    Parameters
    ----------
    row : Row
    trials : int
        Number of trials, the row's own options included.
    seed : int
        Seed of the draws, not negative.
    """
    rng = np.random.default_rng([seed, *row.name.encode()])
    for trial in range(trials):
        # Options are drawn (and not used) for the first trial as well, to keep the stream in step.
        drawn = {name: row.space[name].sample(rng) for name in sorted(row.space)}
        yield {**row.options, **(drawn if trial else {})}


def enumerated(row: Row) -> Iterator[Options]:
    """Yield a row's options with every combination of its space, which must consist of `Choices`.

    Raises
    ------
    TypeError
        The space has an entry other than `Choices`.
    """
    values: list[tuple[Any, ...]] = []
    for name, one in row.space.items():
        if not isinstance(one, Choices):
            raise TypeError(f"{name} of row {row.name} is {one}; expected choices, which can be enumerated")
        values.append(one.values)
    for combination in itertools.product(*values):
        yield {**row.options, **dict(zip(row.space, combination, strict=True))}


def with_options(settings: RunSettings, options: Options) -> RunSettings:
    """Return a run's settings with some keys changed.

    Parameters
    ----------
    settings : RunSettings
    options : mapping
        Values by dotted key.

    Raises
    ------
    ConfigError
        There is no such key, or the settings are not valid with the value.
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


def quick_note(most_passes: int) -> str:
    """Return the remark below a table whose rows train for few passes."""
    return f"Quick: rows that are runs train for at most {most_passes} passes."


def shortened(row: Row, most_passes: int, key: str = PASSES) -> Row:
    """Return a row for a quick table: few passes of its own at most, and the middle one of several choices.

    Parameters
    ----------
    row : Row
    most_passes : int
    key : str
        Option that is the number of passes; a row without it has the table's.
    """
    space = {
        name: Choices((one.values[len(one.values) // 2],)) if isinstance(one, Choices) else one
        for name, one in row.space.items()
    }
    options = dict(row.options)
    if key in options:
        options[key] = min(options[key], most_passes)
    return replace(row, options=options, space=space)


def limited(settings: RunSettings, key: str, most: int) -> RunSettings:
    """Return a run's settings with the number under a dotted key at most ``most``."""
    value: Any = settings.model_dump()
    for part in key.split("."):
        value = _inside(value, part, key)[part]
    return with_options(settings, {key: min(value, most)})


def configured(train: TrainRun) -> Engine:
    """Return an engine that trains runs, for rows whose options are keys of a run's settings."""

    def engine(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
        return train(with_options(settings, options), feed, seed)

    return engine


def _inside(place: Any, part: str, key: str) -> dict[str, Any]:
    """Return ``place`` if it is a table that has the key's part; raise a `ConfigError` otherwise."""
    if isinstance(place, dict) and part in place:
        return place
    guess = nearest(part, place) if isinstance(place, dict) else None
    raise ConfigError(
        f"a row sets {key}, but a run has no such key", hint=f"did you mean {guess!r}?" if guess else None
    )
