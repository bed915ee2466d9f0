"""Table of FedGNN beside the same model with all data in one place, simpler models and means, over published folds.

Seeds are folds of MovieLens 100K: seed 0 tests by the first one.  Versions are chosen by the validation part, a tenth
of a fold's training ratings.  ``coterie tune`` gives every row that learns the same number of trials on one fold; all
rows with the graph share those of own items with all ratings in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from coterie.config.run import RunSettings
from coterie.data import Dataset
from coterie.evaluation.central import BiasedMf, GlobalMean, Idcf, RidgeFoldIn, UserItemBiases
from coterie.evaluation.rated import figures, user_errors
from coterie.evaluation.selection import SelectedModel, best_of
from coterie.studies.run_data import Feed
from coterie.studies.tables.central_rows import central_row
from coterie.studies.tables.paper_table import PaperTable, PrintedTable, Results
from coterie.studies.tables.printed_tables import differences, shown
from coterie.studies.tables.row import Choices, LogUniform, Options, Row, Space, with_options
from coterie.studies.tables.tasks import RATING
from coterie.studies.tables.users_values import trained_with_values
from coterie.systems.fedgnn.central import Form
from coterie.systems.fedgnn.settings import CHOOSE_BY, FIGURES
from coterie.systems.fedgnn.study.references import UserValues, central_values
from coterie.systems.shared.study.references import only

__all__ = ["FEDGNN", "SPACE"]

PASSES = 160
NEIGHBOURS = 32

_TUNED = "central"
"""Row whose tuned settings all rows of FedGNN have."""

_ERRORS = ("user_rmse", "user_mae")
_COMPARED = (
    ("fedgnn-neighbours", "fedgnn"),
    ("fedgnn-neighbours", "central-neighbours"),
    ("fedgnn", "central"),
    ("fedgnn", "product"),
    ("fedgnn", "biases"),
    ("fedgnn-neighbours", "biased-mf"),
)
_BIASES: Space = {
    "fedgnn.rate": LogUniform(0.1, 1.0),
    "fedgnn.private_rate": LogUniform(0.1, 1.0),
    "fedgnn.ridge": LogUniform(0.005, 0.1),
}
_PRODUCT: Space = {**_BIASES, "fedgnn.factors": Choices((8, 16, 32))}
SPACE: Space = {**_PRODUCT, "fedgnn.layer_rate": LogUniform(1.0, 30.0)}
"""Settings of FedGNN that tuning searches, in its table and beside other systems."""

_FORMS: Mapping[str, tuple[Form, str, Space]] = {
    "product": (
        "product",
        "MF by the same steps, centralised",
        _PRODUCT,
    ),
    "bias-steps": ("biases", "biases by the same steps, centralised", _BIASES),
}
"""Form, label and space of models that take the same steps, by row."""
_CENTRAL = (BiasedMf, Idcf, RidgeFoldIn, UserItemBiases, GlobalMean)
"""Models that learn in other ways, with all ratings in one place."""


def _federated(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
    run = with_options(settings, options)
    made, values = trained_with_values(run, feed, seed)
    known = made.known
    history = [{"step": one["version"], "metrics": dict(one["metrics"])} for one in known["history"]]
    facts = {"secure_sum": run.secure_sum, "abandoned": known["abandoned"], "engine": "in one process"}
    return _selected(history, run.rounds.choose_by, facts, {known["chosen"]["version"]: values})


def _central(form: Form, settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
    run = with_options(settings, options)
    found = dict(central_values(run, feed, seed, form))
    history = [{"step": step, "metrics": only(figures(values), FIGURES)} for step, values in found.items()]
    return _selected(history, run.rounds.choose_by, {}, found)


def _selected(
    history: list[dict[str, object]],
    choose_by: str,
    facts: Mapping[str, object],
    values: Mapping[int, UserValues],
) -> SelectedModel:
    """Return a row's outcome; ``values`` has the metrics of single users by version, at least of the best one."""
    best = best_of(history, choose_by)
    metrics, step = history[best]["metrics"], history[best]["step"]
    if not isinstance(metrics, dict) or not isinstance(step, int):
        raise AssertionError("a history has a step and metrics for each version")
    return SelectedModel(history, best, metrics, per_user=user_errors(values[step]), facts=facts)


def _rows() -> tuple[Row, ...]:
    around: Options = {"fedgnn.neighbours": NEIGHBOURS}
    rows = [
        Row("fedgnn", "FedGNN, own items alone", _federated, like=_TUNED),
        Row(
            "fedgnn-neighbours",
            f"FedGNN, up to {NEIGHBOURS} neighbours",
            _federated,
            options=around,
            like=_TUNED,
        ),
        Row(
            _TUNED,
            "GAT, own items alone, centralised",
            partial(_central, "graph"),
            space=SPACE,
            defaults=True,
        ),
        Row(
            "central-neighbours",
            f"GAT, {NEIGHBOURS} exact neighbours, centralised",
            partial(_central, "graph"),
            options=around,
            like=_TUNED,
        ),
    ]
    rows += [
        Row(name, label, partial(_central, form), space=space, defaults=True)
        for name, (form, label, space) in _FORMS.items()
    ]
    return (*rows, *(central_row(model, RATING) for model in _CENTRAL))


def _errors(results: Results) -> PrintedTable | None:
    rows = [row for row in results.rows if row.name in results.cells]
    if not rows:
        return None
    folds = [f"fold {seed % 5 + 1}" for seed in results.seeds]
    lines = []
    for row in rows:
        each = results.values(row.name, "rmse")
        tuned = str(results.cells[row.name][0].record["tuned"])
        how = f"{results.budgets[row.name]} trials" if row.name in results.budgets else tuned
        lines.append((row.label, how, shown(each), *(f"{value:.4f}" for value in each)))
    return PrintedTable(
        f"FedGNN, test RMSE over {len(folds)} published folds, {results.dataset}",
        ("", "settings", "mean", *folds),
        tuple(lines),
        (
            "Versions are chosen in each fold by its validation part, a tenth of its training ratings.",
            "Settings: the number of trials by `coterie tune` on one fold, whose validation part decides; untuned: the "
            "row's own; fixed: there are none.",
            "The paper prints 0.92 for its own split, with noise.",
        ),
    )


def _prepare(settings: RunSettings, dataset: Dataset) -> RunSettings:
    return settings


FEDGNN = PaperTable(
    name="fedgnn",
    title="FedGNN beside models with all ratings in one place",
    paper="Wu et al., FedGNN, 2021: RMSE 0.92 on MovieLens 100K",
    settings={
        "split": {"kind": "published"},
        "rounds": {"cohorts": "all", "passes": PASSES, "evaluate_every": 10, "patience": 0},
        "secure_sum": "clear",
        "federation": {"hosts": 1},
    },
    prepare=_prepare,
    rows=_rows,
    sections=(_errors, differences("Paired differences over users", _COMPARED, _ERRORS)),
    headline="rmse",
    choose_by=CHOOSE_BY,
    compared=_COMPARED,
    compared_by=_ERRORS,
    seeds=(0, 1, 2, 3, 4),
    system="fedgnn",
)
