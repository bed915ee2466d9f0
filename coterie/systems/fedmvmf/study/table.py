"""Table 4 of PrivMVMF (Mai and Pang), by FedMVMF: existing users and items, new users, new items.

The sums are those in clear: an encrypted sum is equal to them (``tests/processes/test_encrypted.py``).  The version
that counts is the one that is best on the validation part; a rating of 4 or more is relevant, as in the paper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.data import Dataset
from coterie.evaluation.selection import SelectedModel, best_of
from coterie.studies.run_data import Feed
from coterie.studies.tables.paper_table import MakePrintedTable, PaperTable
from coterie.studies.tables.printed_tables import PaperLine, beside, differences
from coterie.studies.tables.row import Options, Row, configured, with_options
from coterie.studies.tables.users_values import trained_with_values
from coterie.systems.fedmvmf.settings import PRESETS, FedMvmfSettings
from coterie.systems.shared.rated_measures import CHOOSE_BY
from coterie.systems.shared.study.references import rating_metrics, rating_values

__all__ = ["PAPER", "PRIVMVMF", "SCENARIOS", "trained_of"]

_NDCG, _PRECISION, _RECALL, _F1 = "ndcg_rated@10", "precision@10", "recall@10", "f1@10"
_SHOWN = {_NDCG: "NDCG@10 rated", _PRECISION: "P@10", _RECALL: "R@10", _F1: "F1@10"}

_COMPARED_BY = (_NDCG, _PRECISION, _RECALL)
"""Metrics of single users that are kept, and by which rows are compared."""

_TENTH: Options = {"split.train": 0.9, "split.validation": 0.02}
"""Split in which a tenth of the users or items is new, as in the paper, and a few more serve to choose versions: new
items are ranked among all new ones, and the paper has only the tenth."""

SCENARIOS: Mapping[str, tuple[str, Options]] = {
    "": ("existing users and items", {}),
    "cold-users": ("new users", {"split.kind": "cold-users", **_TENTH}),
    "cold-items": ("new items", {"split.kind": "cold-items", **_TENTH}),
}
"""Title and split of each scenario, by the suffix of its rows' names."""

PAPER: Mapping[str, Mapping[str, float]] = {
    "": {_NDCG: 0.8313, _PRECISION: 0.2931, _RECALL: 0.2208, _F1: 0.2519},
    "cold-users": {_NDCG: 0.7090, _PRECISION: 0.2728, _RECALL: 0.0423, _F1: 0.0733},
    "cold-items": {_NDCG: 0.8193, _PRECISION: 0.1735, _RECALL: 0.2563, _F1: 0.2064},
}
"""Figures of PrivMVMF on MovieLens 1M in the paper, by scenario and metric."""

_ROUNDS: Options = {
    "rounds.passes": 100,
    "rounds.evaluate_every": 5,
    "rounds.patience": 0,
    "rounds.cohorts": "all",
    "federation.hosts": 2,
}

_NEW_ITEMS: Options = {"mvmf.side": 10.0, "mvmf.min_touch": 1}
"""Options of the scenario of new items, whose features weigh more, as nothing else is known of them."""

_BESIDE = {"item_mean": "Damped item mean", "popularity": "Popularity", "random": "Random order"}


def _named(name: str, scenario: str) -> str:
    return f"{name}-{scenario}" if scenario else name


def _settings(preset: str) -> Options:
    """Return the values of a preset, by key."""
    return {f"mvmf.{name}": value for name, value in PRESETS[preset].items()}


_VARIANTS: Mapping[str, tuple[str, Options]] = {
    "paper": ("paper's weights", _settings("paper")),
    "top-n": ("weights on all items", _settings("top-n")),
    "both": ("between the two", _settings("both")),
    # Items drawn anew in each round show which ones were rated (`coterie.privacy.attacks.intersect`).
    "both-drawn-anew": (
        "the same, items drawn anew, weight .3",
        {**_settings("both"), "mvmf.uncertainty": 0.3, "mvmf.resample": True},
    ),
}
"""Label and options of each variant of the weights, by the part of its rows' names."""


def _federated(settings: RunSettings, feed: Feed, seed: int) -> SelectedModel:
    made, values = trained_with_values(settings, feed, seed)
    return dataclasses.replace(trained_of(settings, made.known), per_user=_compared_values(values))


def _compared_values(values: Mapping[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """Return the metrics of users by which rows are compared."""
    return {name: values[name] for name in _COMPARED_BY if name in values}


def trained_of(settings: RunSettings, known: Mapping[str, Any]) -> SelectedModel:
    """Return the result of a row from a run that was trained in this process.

    Parameters
    ----------
    settings : RunSettings
        Settings of the run.
    known : mapping
        `InProcess.known`.
    """
    history = [{"step": entry["epoch"], "metrics": entry["metrics"]} for entry in known["history"]]
    best = best_of(history, CHOOSE_BY)
    chosen = known["chosen"]
    facts: dict[str, Any] = {"secure_sum": settings.secure_sum, "abandoned": known["abandoned"]}
    return SelectedModel(history, best, chosen["metrics"], users=chosen["users"], facts=facts)


def _known(name: str) -> Any:
    def engine(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
        run = with_options(settings, options)
        floor = run.table(FedMvmfSettings).min_touch
        values = rating_values(run, feed, seed, min_touch=floor)[name]
        metrics = rating_metrics(name, values)
        return SelectedModel([{"step": 0, "metrics": metrics}], 0, metrics, per_user=_compared_values(values))

    return engine


def _rows() -> tuple[Row, ...]:
    rows = []
    for scenario, (title, held_out) in SCENARIOS.items():
        new_items: Options = _NEW_ITEMS if scenario == "cold-items" else {}
        for variant, (label, options) in _VARIANTS.items():
            # The paper has figures of the other scenarios for its own weights only.
            if scenario and variant != "paper":
                continue
            rows.append(
                Row(
                    _named(f"fedmvmf-{variant}", scenario),
                    f"FedMVMF, {label}, {title}",
                    configured(_federated),
                    options={**options, **_ROUNDS, **held_out, **new_items},
                    defaults=True,
                )
            )
        for name, label in _BESIDE.items():
            # New items have no ratings from which a mean could be made.
            if scenario == "cold-items" and name != "random":
                continue
            row = _named(name.replace("_", "-"), scenario)
            rows.append(Row(row, f"{label}, {title}", _known(name), options={**held_out, **new_items}))
    return tuple(rows)


def _section(scenario: str) -> MakePrintedTable:
    title, _ = SCENARIOS[scenario]
    lines = []
    for row in _rows():
        ends = next((one for one in SCENARIOS if one and row.name.endswith(one)), "")
        if ends == scenario:
            paper = PAPER[scenario] if row.name.startswith("fedmvmf-paper") else {}
            lines.append(PaperLine(row.name, row.label.removesuffix(f", {title}"), paper, variant=True))
    return beside(
        f"Table 4: {title}",
        {"": tuple(lines)},
        _SHOWN,
        {"rmse": "RMSE"},
        notes=(
            "NDCG among a user's rated test items, gain 2^(x - 1); P, R, F1: ratings of 4 or more among the best 10 "
            f"of all {'new' if scenario == 'cold-items' else 'unseen'} items.",
            "The paper's figures are those of MovieLens 1M, whichever data ours are of.",
        ),
    )


def _prepare(settings: RunSettings, dataset: Dataset) -> RunSettings:
    return settings


_COMPARED = tuple(
    (_named("fedmvmf-paper", scenario), _named(other, scenario))
    for scenario in SCENARIOS
    for other in ("item-mean", "popularity", "random")
    if scenario != "cold-items" or other == "random"
)
"""Rows that are compared user by user."""

PRIVMVMF = PaperTable(
    name="privmvmf",
    title="FedMVMF and PrivMVMF",
    paper="PrivMVMF (Mai and Pang), table 4: means of 5 runs on MovieLens 1M",
    settings={"secure_sum": "masked"},
    prepare=_prepare,
    rows=_rows,
    sections=(
        *(_section(scenario) for scenario in SCENARIOS),
        differences("Paired differences over users", _COMPARED, _COMPARED_BY),
    ),
    headline=_NDCG,
    choose_by=CHOOSE_BY,
    compared=_COMPARED,
    compared_by=_COMPARED_BY,
    seeds=(0, 1, 2, 3, 4),
    system="fedmvmf",
)
