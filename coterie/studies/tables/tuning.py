"""Random search over rows' options for ``coterie tune``: equally many trials per row, scored on validation data."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from coterie.config.run import RunSettings
from coterie.errors import ConfigError, DataError, RunError
from coterie.evaluation.selection import SelectedModel, lower_is_better
from coterie.studies.run_data import Feed
from coterie.studies.services_run import RunServices
from coterie.studies.tables.bayesian import proposed
from coterie.studies.tables.kept_file import write_whole
from coterie.studies.tables.row import Options, Row, draw

__all__ = ["Search", "Trials", "recomputed", "search_of", "tune"]

Say = Callable[[str], None]

Search = Literal["random", "tpe"]
"""How options to try are found; a trial that was not drawn at random says so in its key ``search``."""


def search_of(name: str) -> Search:
    """Return the search of a name.

    Raises
    ------
    ConfigError
        There is none.
    """
    for one in get_args(Search):
        if one == name:
            found: Search = one
            return found
    raise ConfigError(f"search {name!r}; expected {' or '.join(get_args(Search))}")


@dataclass
class Trials:
    """Trials of a table's rows, with their scores.

    Parameters
    ----------
    about : dict
        JSON-ready: ``table``, ``dataset``, ``split_sha256``, ``choose_by``, ``seed``.
    rows : dict of str to list of dict
        Trials by row, in the order of trying: ``options``; ``score``, the validation metric at the best version, None
        when training ended without one (``failed`` says why); ``step`` of that version; ``seconds``.
    """

    about: dict[str, Any]
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def best(self, row: str) -> Options | None:
        """Return the options of a row's best trial, the first among equals; None for a row without a score."""
        scored = [trial for trial in self.rows.get(row, ()) if trial["score"] is not None]
        if not scored:
            return None
        # Both `min` and `max` return the first among equals.
        best = min if lower_is_better(str(self.about.get("choose_by"))) else max
        options: Options = best(scored, key=lambda trial: trial["score"])["options"]
        return options

    def budget(self, row: str) -> int:
        """Return the number of trials of a row."""
        return len(self.rows.get(row, ()))

    def write(self, path: Path) -> None:
        """Write the trials as JSON."""
        write_whole(path, json.dumps({**self.about, "rows": self.rows}, indent=1, default=float))

    @classmethod
    def continued(cls, path: Path, about: Mapping[str, Any]) -> Trials:
        """Return the trials of a search that a file holds; none yet where there is no file.

        Parameters
        ----------
        path : Path
        about : mapping
            As in `Trials`.

        Raises
        ------
        ConfigError
            The file holds trials of another search.
        DataError
            The file holds no trials.
        """
        if not path.exists():
            return cls(dict(about))
        known = cls.read(path)
        if known.about != about:
            differing = ", ".join(name for name in about if known.about.get(name) != about[name])
            raise ConfigError(
                f"{path} holds trials of another search (other {differing})",
                hint="--out names another folder",
            )
        return known

    @classmethod
    def read(cls, path: Path) -> Trials:
        """Read trials that `write` wrote.

        Raises
        ------
        DataError
            The file does not exist, or holds no trials.
        """
        try:
            content = json.loads(path.read_text())
            rows = content.pop("rows")
            for trials in rows.values():
                for trial in trials:
                    _ = trial["options"], trial["score"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"cannot read trials from {path}: {error}", hint="`coterie tune` writes such a file"
            ) from error
        return cls(content, rows)


def tune(
    rows: Sequence[Row],
    settings: RunSettings,
    feed: Feed,
    seed: int,
    *,
    trials: int,
    choose_by: str,
    known: Trials,
    services: RunServices | None = None,
    keep: Callable[[Trials], None] = lambda _: None,
    say: Say = lambda _: None,
    search: Search = "random",
) -> Trials:
    """Tune rows, with the same number of trials for every row that has a space.

    The first trial of a row is its own options. Only the validation metric of each trial is kept, so nothing is chosen
    by the test part.

    Parameters
    ----------
    rows : sequence of Row
    settings, feed, seed
        As in `Engine`; the seed also draws the options.
    trials : int
        Number of trials for each row, at least 1.
    choose_by : str
        Metric on validation data.
    known : Trials
        Earlier trials, which are not repeated; completed in place.
    services : callable, optional
        Runs federations, for rows that are trained over services.
    keep : callable
        Called with all trials after each one, to write them.
    say : callable
        Receives a line about every trial.
    search : {"random", "tpe"}
        How options are found: drawn at random, or from those that were tried (`coterie.studies.tables.bayesian`).

    Returns
    -------
    Trials
        ``known``, completed.

    Raises
    ------
    PreflightError
        The search needs a package that is not installed.
    DataError
        There is no validation data to tune by.
    ValueError
        ``choose_by`` is no metric on validation data.
    """
    if not choose_by.startswith("validation_"):
        raise ValueError(f"choose_by is {choose_by!r}; expected a metric on validation data")
    if not feed.split.validation.any():
        raise DataError(
            f"the split of {feed.dataset.name} holds out nothing to validate by, so nothing can be tuned",
            hint="split.validation above 0",
        )
    for row in rows:
        if not row.space or row.like is not None:
            continue
        done = known.rows.setdefault(row.name, [])
        for number, options in _to_try(row, done, trials, seed, choose_by, search):
            # Options that are drawn twice are two trials of the budget, of which one is trained.
            same = [trial for trial in done if trial["options"] == dict(options)]
            begun = time.perf_counter()
            found = dict(same[0]) if same else _try(row, options, settings, feed, seed, choose_by, services)
            seconds = round(time.perf_counter() - begun, 1)
            how = {} if search == "random" else {"search": search}
            done.append({"options": dict(options), **found, "seconds": seconds, **how})
            keep(known)
            shown = found.get("failed") or f"{found['score']:.4f} at step {found['step']}"
            say(f"{row.name} trial {number + 1}/{trials}: {choose_by} {shown}  {_brief(row, options)}")
    return known


def _to_try(
    row: Row, done: list[dict[str, Any]], trials: int, seed: int, choose_by: str, search: Search
) -> Iterator[tuple[int, Options]]:
    """Yield number and options of each trial that is still to be made; each is among ``done`` before the next."""
    if search == "random":
        left = [trial["options"] for trial in done]
        for number, options in enumerate(draw(row, trials, seed)):
            if dict(options) in left:
                left.remove(dict(options))
            # Trials of another search count, too.
            elif len(done) < trials:
                yield number, options
        return
    for number in range(len(done), trials):
        yield number, proposed(row, done, choose_by=choose_by, seed=seed) if number else row.options


def recomputed(
    known: Trials, row: Row, number: int, settings: RunSettings, feed: Feed, seed: int
) -> tuple[float | None, float | None]:
    """Train a kept trial once more, to check that its score is what its options give.

    Parameters
    ----------
    known : Trials
    row : Row
        Row of the trial.
    number : int
        Position among the row's trials.
    settings, feed, seed
        As in `tune`.

    Returns
    -------
    kept, again : float or None
        The score that was kept and the one computed now; None where training ends without one.

    Raises
    ------
    DataError
        The feed is divided in another way than in the search, the seed is another one, or there is no such trial.
    """
    split = feed.split.sha256(feed.dataset)
    if (known.about["split_sha256"], known.about["seed"]) != (split, seed):
        raise DataError(
            f"the trials were made on another split, or with another seed than {seed}",
            hint=f"the same data and split, and the seed {known.about['seed']}",
        )
    trials = known.rows.get(row.name, [])
    if not 0 <= number < len(trials):
        raise DataError(f"row {row.name} has no trial {number}; it has {len(trials)}, from 0")
    trial = trials[number]
    again = _try(row, trial["options"], settings, feed, seed, str(known.about["choose_by"]), None)
    return trial["score"], again["score"]


def _try(
    row: Row,
    options: Options,
    settings: RunSettings,
    feed: Feed,
    seed: int,
    choose_by: str,
    services: RunServices | None,
) -> dict[str, Any]:
    try:
        trained: SelectedModel = row.train(settings, options, feed, seed, services)
    except (RunError, FloatingPointError) as error:
        return {"score": None, "step": None, "failed": str(error)}
    entry: Mapping[str, Any] = trained.history[trained.best]
    score = float(entry["metrics"].get(choose_by, math.nan))
    if math.isnan(score):
        return {"score": None, "step": None, "failed": f"no value of {choose_by}"}
    return {"score": score, "step": int(entry["step"])}


def _brief(row: Row, options: Options) -> str:
    return ", ".join(f"{name} {options[name]}" for name in sorted(row.space) if name in options)
