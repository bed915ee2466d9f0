"""Tables of FedMF after a survey of federated recommenders (chapter 7.1): participation and local epochs.

The survey prints curves of MovieLens latest-small and no figures: accuracy falls the fewer users take part in a round,
and with more local epochs test and training errors part and the error grows.  The tables show the ends of such curves,
with the printed steps, which are sums, and with mean steps, both without biases as printed, and participation also with
biases.  Curves count rounds, whatever share of users is in each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.crypto.beacon import BEACON_BYTES
from coterie.data import Dataset
from coterie.evaluation.rated import figures, user_errors
from coterie.evaluation.selection import SelectedModel, best_of
from coterie.rounds import policy
from coterie.studies.run_data import Feed
from coterie.studies.tables.paper_table import MakePrintedTable, PaperTable, PrintedTable, Results
from coterie.studies.tables.printed_tables import ABSENT, differences, shown
from coterie.studies.tables.row import Engine, Options, Row, with_options
from coterie.studies.tables.users_values import trained_with_values
from coterie.systems.fedmf.settings import CHOOSE_BY, FIGURES, FedMfSettings
from coterie.systems.fedmf.study.references import central_values, values_of_means
from coterie.systems.shared.study.references import only

__all__ = [
    "EPOCHS",
    "FEDMF",
    "PARTICIPATION",
    "ROUNDS",
    "STEPS",
    "means_engine",
    "trained_model",
]

PARTICIPATION = (0.3, 0.5, 0.7)
"""Shares of the users in a round that are studied, besides all users."""

EPOCHS = (2, 5, 10, 20)
"""Numbers of local epochs that are studied, besides one."""

ROUNDS = 30
_EVERY = 6
"""Rounds between two evaluations: a multiple of the 1, 2 or 3 cohorts that a pass may have."""

_SUM_ROUNDS = 6

_RMSE, _TRAIN = "rmse", "train_rmse"
_ERRORS = ("user_rmse", "user_mae")
"""Errors of each user's own test ratings, by which rows are compared."""

_COMPARED = (
    ("fedmf", "fedmf-central"),
    ("fedmf", "means"),
    ("printed", "printed-central"),
    ("printed", "means"),
    ("biased", "biased-central"),
    ("biased", "means"),
)
"""Rows that are compared user by user."""


def _steps(settings: FedMfSettings) -> Options:
    names = ("biases", "factors", "local_epochs", "steps", "rate", "private_rate", "change_bound")
    return {f"fedmf.{name}": getattr(settings, name) for name in names}


STEPS: Mapping[str, tuple[str, Options]] = {
    "fedmf": ("mean steps", _steps(FedMfSettings(biases=False))),
    "printed": ("printed steps", _steps(FedMfSettings(steps="sum"))),
    "biased": ("mean steps with biases", _steps(FedMfSettings())),
}
"""Label and settings of each kind of steps, by the prefix of its rows' names."""

_BY_EPOCHS = ("fedmf", "printed")
"""Kinds of steps whose local epochs are studied, from one epoch on, as in the survey."""


def _cohorts(share: float, rounds: int, users: int) -> Options:
    """Return the settings of rounds in which a share of the users takes part, drawn anew for each round."""
    everybody: Options = {"rounds.patience": 0, "rounds.cohorts": "all", "rounds.passes": rounds}
    if share == 1:
        return {**everybody, "rounds.evaluate_every": min(_EVERY, rounds)}
    size = round(share * users)
    # The number of cohorts in a pass does not depend on the draw.
    per = len(policy.cohorts(policy.CohortRule("independent", size, users, bytes(BEACON_BYTES)), users, 0))
    return {
        **everybody,
        "rounds.cohorts": "independent",
        "rounds.cohort": size,
        "rounds.passes": max(rounds // per, 1),
        "rounds.evaluate_every": max(min(_EVERY, rounds) // per, 1),
    }


def _federated(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
    given = dict(options)
    share, rounds = given.pop("participate"), given.pop("rounds")
    users = len(np.unique(feed.dataset.user))
    run = with_options(settings, {**given, **_cohorts(share, rounds, users)})
    made, values = trained_with_values(run, feed, seed)
    known = made.known
    facts = {"secure_sum": run.secure_sum, "abandoned": known["abandoned"], "engine": "in one process"}
    history = [(one["version"], one["metrics"]) for one in known["history"]]
    return trained_model(history, run.rounds.choose_by, facts, {known["chosen"]["version"]: values})


def _central(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
    given = dict(options)
    rounds = given.pop("rounds")
    run = with_options(settings, {**given, **_cohorts(1, rounds, 1)})
    found = dict(central_values(run, feed, seed))
    history = [(step, only(figures(values), FIGURES)) for step, values in found.items()]
    return trained_model(history, run.rounds.choose_by, {}, found)


def trained_model(
    measured: Sequence[tuple[int, Mapping[str, float]]],
    choose_by: str,
    facts: Mapping[str, Any],
    values: Mapping[int, Mapping[str, NDArray[np.float64]]],
) -> SelectedModel:
    """Return a row's outcome; ``values`` has the metrics of single users by version, at least of the best one."""
    history = [{"step": step, "metrics": dict(metrics)} for step, metrics in measured]
    best = best_of(history, choose_by)
    metrics = history[best]["metrics"]
    per_user = user_errors(values[measured[best][0]])
    return SelectedModel(
        history, best, metrics if isinstance(metrics, dict) else {}, per_user=per_user, facts=facts
    )


def means_engine(name: str) -> Engine:
    """Return the engine of a row that predicts by means: ``means`` of item and user, or ``item-mean``."""

    def engine(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
        values = values_of_means(feed)[name]
        return trained_model([(0, only(figures(values), FIGURES))], CHOOSE_BY, {}, {0: values})

    return engine


def _participation(begin: str, share: float) -> str:
    return begin if share == 1 else f"{begin}-p{round(100 * share)}"


def _epochs(begin: str, epochs: int) -> str:
    return begin if epochs == 1 else f"{begin}-e{epochs}"


def _rows() -> tuple[Row, ...]:
    rows = []
    for begin, (label, steps) in STEPS.items():
        # The survey prints its own rates; those of mean steps are ours, and nothing has tuned them.
        own = begin != "printed"
        for share in (*PARTICIPATION, 1):
            options = {**steps, "participate": share, "rounds": ROUNDS}
            name = _participation(begin, share)
            rows.append(
                Row(
                    name,
                    f"{label}, {round(100 * share)}% of the users",
                    _federated,
                    options=options,
                    defaults=own,
                )
            )
        for epochs in EPOCHS if begin in _BY_EPOCHS else ():
            options = {**steps, "fedmf.local_epochs": epochs, "participate": 1, "rounds": ROUNDS}
            rows.append(
                Row(
                    _epochs(begin, epochs),
                    f"{label}, {epochs} local epochs",
                    _federated,
                    options=options,
                    defaults=own,
                )
            )
        central = {**steps, "rounds": ROUNDS}
        rows.append(
            Row(
                _central_name(begin),
                f"{label}, all ratings in one place",
                _central,
                options=central,
                defaults=own,
            )
        )
    for name, label in _MEANS.items():
        rows.append(Row(name, label, means_engine(name)))
    mean = STEPS["fedmf"][1]
    for secure_sum in _SUMS:
        options = {
            **mean,
            "secure_sum": secure_sum,
            "encryption.obfuscators": "short",
            "federation.hosts": 3,
            "participate": 1,
            "rounds": _SUM_ROUNDS,
        }
        rows.append(Row(f"sum-{secure_sum}", f"sum {secure_sum}", _federated, options=options))
    rows.append(
        Row("sum-none", "all ratings in one place", _central, options={**mean, "rounds": _SUM_ROUNDS})
    )
    return tuple(rows)


_SUMS = ("clear", "masked", "encrypted")
_MEANS = {"means": "mean of the item and of the user", "item-mean": "mean of the item"}


def _central_name(begin: str) -> str:
    return f"{begin}-central"


def _beside(begin: str) -> list[tuple[str, str]]:
    return [(_central_name(begin), "all ratings in one place"), *_MEANS.items()]


def _ends(title: str, begin: str, named: Mapping[str, str], notes: tuple[str, ...]) -> MakePrintedTable:
    """Return a section of the figures after the last round, for the named rows and the baselines."""
    lines = [*named.items(), *_beside(begin)]

    def section(results: Results) -> PrintedTable | None:
        rows = [(row, label) for row, label in lines if row in results.cells]
        if not any(row in results.cells for row in named):
            return None
        columns = (
            "",
            "training RMSE",
            "test RMSE",
            "difference",
            "test RMSE, version that counts",
            "its round",
        )
        return PrintedTable(
            f"{title}, {STEPS[begin][0]}, after {ROUNDS} rounds, {results.dataset}, {_seeds(results)}",
            columns,
            tuple(_line(row, label, results) for row, label in rows),
            notes,
        )

    return section


def _line(row: str, label: str, results: Results) -> tuple[str, ...]:
    ends = [cell.record["history"][-1]["metrics"] for cell in results.cells[row]]
    train, test = ([one[name] for one in ends if name in one] for name in (_TRAIN, _RMSE))
    steps = sorted({int(cell.record["step"]) for cell in results.cells[row]})
    return (
        label,
        shown(train),
        shown(test),
        shown([b - a for a, b in zip(train, test, strict=True)]),
        shown(results.values(row, _RMSE)),
        ABSENT if row in _MEANS else " to ".join(str(one) for one in dict.fromkeys((steps[0], steps[-1]))),
    )


def _sums(results: Results) -> PrintedTable | None:
    """Compare secure sums to seven digits, to show that only rounding tells them apart."""
    named = {f"sum-{one}": f"sum {one}" for one in _SUMS} | {
        "sum-none": "all ratings in one place, nothing rounded"
    }
    rows = {row: label for row, label in named.items() if row in results.cells}
    if not any(row in rows for row in named if row != "sum-none"):
        return None
    lines = []
    for row, label in rows.items():
        ends = [cell.record["history"][-1]["metrics"] for cell in results.cells[row]]
        values = [float(np.mean([one[name] for one in ends])) for name in (_TRAIN, _RMSE)]
        lines.append((label, *(f"{value:.7f}" for value in values), shown(results.values(row, _RMSE))))
    return PrintedTable(
        f"Sums, {STEPS['fedmf'][0]}, after {_SUM_ROUNDS} rounds, {results.dataset}, {_seeds(results)}",
        ("", "training RMSE", "test RMSE", "test RMSE, rounded"),
        tuple(lines),
        (
            "Codes of 16 bits are summed whatever hides them: clear, masked and encrypted sums are equal to the bit.",
            "Ratings in one place differ by the rounding of codes, and of errors in a sum.",
        ),
    )


def _seeds(results: Results) -> str:
    count = len(results.seeds)
    return "1 seed" if count == 1 else f"means of {count} seeds ±standard deviation"


_COUNTED = (
    "The survey shows curves only. It claims that accuracy falls with fewer users in a round; cohorts are drawn anew "
    "for each round, and an error is over everybody, whoever was in the last one."
)
_LOCAL = "The survey shows curves only. It claims that with more local epochs test and training errors part, and grow."


def _sections() -> tuple[MakePrintedTable, ...]:
    sections: list[MakePrintedTable] = []
    for begin in STEPS:
        shares = {
            _participation(begin, share): f"{round(100 * share)}% of the users"
            for share in (*PARTICIPATION, 1)
        }
        epochs = {_epochs(begin, n): "1 local epoch" if n == 1 else f"{n} local epochs" for n in (1, *EPOCHS)}
        sections.append(_ends("Participation, figure 7.1", begin, shares, (_COUNTED,)))
        if begin in _BY_EPOCHS:
            sections.append(_ends("Local epochs, figures 7.2 to 7.7", begin, epochs, (_LOCAL,)))
    return (*sections, _sums, differences("Paired differences over users", _COMPARED, _ERRORS))


def _prepare(settings: RunSettings, dataset: Dataset) -> RunSettings:
    return settings


FEDMF = PaperTable(
    name="fedmf",
    title="FedMF: participation and local epochs",
    paper="a survey of federated recommender systems, chapter 7.1: curves on MovieLens latest-small, no figures",
    settings={},
    prepare=_prepare,
    rows=_rows,
    sections=_sections(),
    headline=_RMSE,
    choose_by=CHOOSE_BY,
    compared=_COMPARED,
    compared_by=_ERRORS,
    seeds=(0, 1, 2, 3, 4),
    studies={"encrypted": ("sum-encrypted",)},
    system="fedmf",
)
