"""Options to try next, by those that were tried: Optuna's tree-structured Parzen estimator (Bergstra et al. 2011)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coterie.errors import PreflightError
from coterie.evaluation.search import Choices
from coterie.evaluation.selection import lower_is_better
from coterie.studies.tables.row import Options, Row

__all__ = ["proposed"]

_RANDOM = 4
"""Trials before the estimator is used; until then options are drawn at random, by Optuna, too."""


def proposed(row: Row, done: Sequence[Mapping[str, Any]], *, choose_by: str, seed: int) -> Options:
    """Return the options that a row should try next.

    They follow from the row, its trials so far and the seed alone, so that a search that was interrupted goes on as an
    undisturbed one.

    Parameters
    ----------
    row : Row
        With a space.
    done : sequence of mapping
        Trials so far, each with ``options`` and ``score``, None for one that failed.
    choose_by : str
        Metric of the scores.
    seed : int

    Raises
    ------
    PreflightError
        Optuna is not installed.
    """
    try:
        import optuna
        from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
    except ImportError as error:
        raise PreflightError(
            f"this search needs {error.name}", hint="pip install 'coterie[tune]', or --search random"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    names = sorted(row.space)
    # Choices by their place: values may be of any kind.
    within: dict[str, BaseDistribution] = {
        name: CategoricalDistribution(list(range(len(space.values))))
        if isinstance(space, Choices)
        else FloatDistribution(space.low, space.high, log=True)
        for name in names
        if (space := row.space[name])
    }
    state = np.random.SeedSequence([seed, len(done), zlib.crc32(row.name.encode())]).generate_state(1)
    study = optuna.create_study(
        direction="minimize" if lower_is_better(choose_by) else "maximize",
        sampler=optuna.samplers.TPESampler(seed=int(state[0]), n_startup_trials=_RANDOM, multivariate=True),
    )
    for trial in done:
        params = {name: _placed(row, name, trial["options"].get(name)) for name in names}
        # The row's own options may lie outside of what is searched.
        if trial["score"] is None or None in params.values():
            continue
        study.add_trial(
            optuna.trial.create_trial(params=params, distributions=within, value=float(trial["score"]))
        )
    asked = study.ask(within)
    return {**row.options, **{name: _value(row, name, asked.params[name]) for name in names}}


def _placed(row: Row, name: str, value: Any) -> Any:
    """Return a value as Optuna knows it; None for one outside of the space."""
    space = row.space[name]
    if isinstance(space, Choices):
        return space.values.index(value) if value in space.values else None
    inside = isinstance(value, int | float) and space.low <= value <= space.high
    return float(value) if inside else None


def _value(row: Row, name: str, found: Any) -> Any:
    space = row.space[name]
    if isinstance(space, Choices):
        return space.values[found]
    # Three digits, as those that are drawn at random, and never outside for being rounded.
    return min(max(float(f"{found:.3g}"), space.low), space.high)
