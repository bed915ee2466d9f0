"""Table of FedRec and FedRec++ beside FedMF: errors over the five folds that are published with MovieLens 100K.

Seeds are folds: seed 0 tests by the first one.  FedMF and FedRec are tuned with the same budget on the validation part
of a fold's training ratings; FedRec++ has FedMF's settings, because it is to come to the same model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.data import Dataset
from coterie.evaluation.rated import figures
from coterie.evaluation.selection import SelectedModel
from coterie.studies.run_data import Feed
from coterie.studies.tables.paper_table import PaperTable, PrintedTable, Results
from coterie.studies.tables.printed_tables import differences, shown
from coterie.studies.tables.row import Engine, Options, Row, with_options
from coterie.studies.tables.users_values import trained_with_values
from coterie.systems.fedmf.settings import CHOOSE_BY
from coterie.systems.fedmf.study.references import values_of_means
from coterie.systems.fedmf.study.space import SPACE
from coterie.systems.fedmf.study.table import means_engine, trained_model

__all__ = ["FEDREC"]

PASSES = 100
TRIALS = 3
"""Settings that are tried for each row and fold."""

_DRAWN_BY = 1
"""Seed of the settings that are tried."""

_ERRORS = ("user_rmse", "user_mae")
_SHOWN: Mapping[str, str] = {"rmse": "RMSE", "mae": "MAE"}
_COMPARED = (
    ("fedrec-hybrid", "fedmf"),
    ("fedrec-average", "fedmf"),
    ("fedrec++", "fedmf"),
    ("fedrec++", "fedrec-hybrid"),
    ("fedmf", "means"),
)
_SAMPLES = 1.0
_FILLED: Mapping[str, Options] = {
    "average": {"fedmf.samples": _SAMPLES},
    "hybrid": {"fedmf.samples": _SAMPLES, "fedmf.filling": "hybrid"},
}
_MEANS = {"means": "mean of the item and of the user", "item-mean": "mean of the item"}


def _tried() -> list[Options]:
    """Return the settings that are tried for every row: FedMF's own, then random ones."""
    rng = np.random.default_rng(_DRAWN_BY)
    drawn = [{name: SPACE[name].sample(rng) for name in sorted(SPACE)} for _ in range(TRIALS - 1)]
    return [{}, *drawn]


def _searched(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
    """Train with every setting, and return the outcome of the one that the fold's validation part prefers."""
    outcomes = [(given, _trained(settings, {**options, **given}, feed, seed)) for given in _tried()]
    given, best = min(outcomes, key=lambda one: one[1].metrics[CHOOSE_BY])
    trials = [{"options": dict(each), CHOOSE_BY: found.metrics[CHOOSE_BY]} for each, found in outcomes]
    return replace(best, facts={**best.facts, "chosen": dict(given), "trials": trials})


def _denoised(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
    """Train FedRec++ with the settings that FedMF has on the fold."""
    chosen = _searched(settings, {}, feed, seed).facts["chosen"]
    found = _trained(settings, {**options, **chosen}, feed, seed)
    return replace(found, facts={**found.facts, "chosen": chosen})


def _trained(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
    run = with_options(settings, options)
    made, values = trained_with_values(run, feed, seed)
    known = made.known
    facts = {
        "secure_sum": run.secure_sum,
        "abandoned": known["abandoned"],
        "withdrawn": sum(len(one["withdrawn"]) for one in known["rounds"]),
        "engine": "in one process",
    }
    history = [(one["version"], one["metrics"]) for one in known["history"]]
    chosen = known["chosen"]["version"]
    return _with_mae(trained_model(history, run.rounds.choose_by, facts, {chosen: values}), values)


def _means(name: str) -> Engine:
    made = means_engine(name)

    def engine(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
        return _with_mae(made(settings, options, feed, seed), values_of_means(feed)[name])

    return engine


def _with_mae(found: SelectedModel, values: Mapping[str, NDArray[np.float64]]) -> SelectedModel:
    """Add the mean absolute error of the version that counts, which evaluations do not measure."""
    return replace(found, metrics={**found.metrics, "mae": figures(values)["mae"]})


def _rows() -> tuple[Row, ...]:
    note = f"of {TRIALS} settings the one that the fold's validation part prefers"
    rows = [Row("fedmf", "FedMF", _searched, note=note)]
    rows += [
        Row(f"fedrec-{name}", f"FedRec, {name}", _searched, options=options, note=note)
        for name, options in _FILLED.items()
    ]
    denoised: Options = {**_FILLED["hybrid"], "secure_sum": "denoised", "rounds.party_per_user": True}
    rows.append(Row("fedrec++", "FedRec++, hybrid", _denoised, options=denoised, note="settings of FedMF"))
    rows += [Row(name, label, _means(name)) for name, label in _MEANS.items()]
    return tuple(rows)


def _errors(results: Results) -> PrintedTable | None:
    rows = [row for row in results.rows if row.name in results.cells]
    if not rows:
        return None
    folds = [f"fold {seed % 5 + 1}" for seed in results.seeds]
    lines = []
    for row in rows:
        each = results.values(row.name, "rmse")
        means = [shown(results.values(row.name, metric)) for metric in _SHOWN]
        lines.append((row.label, *means, *(f"{value:.4f}" for value in each)))
    return PrintedTable(
        f"FedRec and FedRec++, test errors over {len(folds)} published folds, {results.dataset}",
        ("", *_SHOWN.values(), *(f"RMSE\n{fold}" for fold in folds)),
        tuple(lines),
        (
            "Versions and settings are chosen in each fold by its validation part, a tenth of its training ratings: "
            f"of {TRIALS} settings for each row.",
            "FedRec++ has FedMF's settings, and its noise is taken out of every sum.",
        ),
    )


def _prepare(settings: RunSettings, dataset: Dataset) -> RunSettings:
    return settings


FEDREC = PaperTable(
    name="fedrec",
    title="FedRec and FedRec++ beside FedMF",
    paper="Lin et al., FedRec, 2021, and Liang et al., FedRec++, 2021: errors over five folds, no figure compared",
    settings={
        "split": {"kind": "published"},
        "rounds": {"cohorts": "all", "passes": PASSES, "evaluate_every": 5, "patience": 4},
        "federation": {"hosts": 3},
    },
    prepare=_prepare,
    rows=_rows,
    sections=(_errors, differences("Paired differences over users", _COMPARED, _ERRORS)),
    headline="rmse",
    choose_by=CHOOSE_BY,
    compared=_COMPARED,
    compared_by=_ERRORS,
    seeds=(0, 1, 2, 3, 4),
    system="fedmf",
)
