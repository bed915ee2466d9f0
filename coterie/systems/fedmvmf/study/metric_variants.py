"""Table 4 of PrivMVMF under several readings of its metrics: one training, a line for each reading.

The paper prints NDCG .8313, precision .2931 and recall .2208, and does not say among which items.  The table has every
reading that was tried.  Two rankers that are the same for every user, the damped mean of an item's ratings and
popularity, are compared with the model: they show what a reading rewards.

The study ``new-users`` measures the same for users without ratings to learn from.  The reading that the paper used has
to hold there, too; a reading that comes near by chance will not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.data import Dataset
from coterie.evaluation.baselines import damped_mean, popularity
from coterie.evaluation.leave_one_out import ScoreAll
from coterie.evaluation.selection import SelectedModel
from coterie.studies.in_process import InProcess, train_in_process
from coterie.studies.run_data import Feed
from coterie.studies.tables.paper_table import MakePrintedTable, PaperTable, PrintedTable, Results
from coterie.studies.tables.printed_tables import ABSENT, shown
from coterie.studies.tables.row import Engine, Options, Row, configured
from coterie.systems.fedmvmf.host import FedMvmfHost
from coterie.systems.fedmvmf.server import FedMvmfServer
from coterie.systems.fedmvmf.study.readings import (
    GAINS,
    OVER,
    RELEVANT,
    Candidates,
    Reading,
    candidates,
    graded_readings,
    measure_readings,
    readings,
)
from coterie.systems.fedmvmf.study.table import PAPER, PRIVMVMF, SCENARIOS, trained_of
from coterie.systems.shared.biases import predicted
from coterie.systems.shared.factors import scores
from coterie.systems.shared.rated_measures import CHOOSE_BY

__all__ = ["MODEL", "NEAR", "NEW_USERS", "PRIVMVMF_READINGS", "off_by", "predicted_by"]

MODEL = "fedmvmf-paper"
"""Name of the row whose readings are compared with the paper's figures."""

NEW_USERS = "cold-users"
"""Scenario of the study ``new-users``, a key of `coterie.systems.fedmvmf.study.table.SCENARIOS`."""

NEAR = 0.05
"""Largest relative difference of precision and recall from the paper's for a reading to be marked."""

_NEAREST = 8
"""Number of readings in the block of the nearest ones."""

_USUAL = ("unseen/liked/having", "rated/liked/having")
"""Readings whose figures other tables show; they are listed below the nearest ones."""

_NDCG, _PRECISION, _RECALL = "ndcg_rated@10", "precision@10", "recall@10"
_RANKERS = {MODEL: "FedMVMF", "item-mean": "means", "popularity": "pop."}
"""Headings by name of a row, short enough for one line to hold all."""

_NOTES = (
    "Off by: the larger of the shares by which FedMVMF's P and R differ from the paper's; * where that is at most "
    f"{NEAR:.0%}. The paper's figures are those of MovieLens 1M, whichever data ours are of.",
    "Means: the damped mean of an item's ratings. Pop.: by how many have rated it. NDCG: among the same candidates, "
    f"{GAINS['printed']}, to rank 10; of sets that differ only in what is recommended it stands with the first.",
    *(f"{name}: {sentence}." for name, sentence in OVER.items()),
    *(f"{one.name}: {one.sentence}." for one in candidates()),
)


def predicted_by(made: InProcess, feed: Feed, hosts: int, seed: int) -> ScoreAll:
    """Return a function that predicts ratings by FedMVMF's version that counts.

    Parameters
    ----------
    made : InProcess
        A run of FedMVMF.
    feed : Feed
        Data that the run was trained on.
    hosts : int
        Number of hosts over which the users were spread.
    seed : int
        Seed of the run.

    Returns
    -------
    callable
        Positions of users in the data set, (n,), to float32 (n, I).

    Raises
    ------
    TypeError
        The run is of another system.
    """
    data = feed.dataset
    remaining = list(made.hosts)
    factors: NDArray[np.float32] | None = None
    model, plan = None, None
    for number in range(hosts):
        # As `Feed.hosted` orders them.
        users = np.unique(data.user[feed.host[data.user] == number])
        if not len(users):
            continue
        side = remaining.pop(0)
        if not isinstance(side, FedMvmfHost):
            raise TypeError(f"a host of the run is a {type(side).__name__}; expected one of FedMVMF")
        plan = side.plan
        if model is None:
            model = FedMvmfServer(plan, len(data.items), seed, 0).model(made.trained.best)
        if factors is None:
            factors = np.zeros((len(data.users), plan.width), np.float32)
        factors[users] = side.factors(model, np.arange(len(users)))
    if model is None or factors is None or plan is None:
        raise TypeError("the run has no host; expected one of FedMVMF")
    found, rows = model, factors
    return lambda users: predicted(plan, scores(found, rows[users]))


def _federated(settings: RunSettings, feed: Feed, seed: int) -> SelectedModel:
    made = train_in_process(settings, feed, run_id="table", seed=seed, see=lambda _: None)
    trained = trained_of(settings, made.known)
    score_all = predicted_by(made, feed, settings.federation.hosts, seed)
    read = measure_readings(feed.rated(), score_all, seed=seed)
    return dataclasses.replace(trained, metrics={**trained.metrics, **read})


def _of_items(score: Callable[[Feed], NDArray[np.float32]], *, predicts: bool) -> Engine:
    """Return the engine of a row that scores items the same for every user."""

    def engine(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
        table = np.broadcast_to(score(feed), (len(feed.dataset.users), len(feed.dataset.items)))
        metrics = measure_readings(feed.rated(), table.__getitem__, seed=seed, predicts=predicts)
        # Under the paper's reading, which is the headline; the history needs no other.
        headline = {} if not metrics else {_NDCG: metrics["ndcg/rated/printed/10"]}
        return SelectedModel([{"step": 0, "metrics": headline}], 0, {**headline, **metrics})

    return engine


def _means(feed: Feed) -> NDArray[np.float32]:
    data, train = feed.dataset, feed.split.train
    return damped_mean(data.item[train], data.rating[train], len(data.items))


def _raters(feed: Feed) -> NDArray[np.float32]:
    data, train = feed.dataset, feed.split.train
    return popularity(data.item[train], np.ones(int(train.sum()), np.bool_), len(data.items))


def _named(row: str, scenario: str) -> str:
    return f"{row}-{scenario}" if scenario else row


def _rows() -> tuple[Row, ...]:
    engines = {
        MODEL: configured(_federated),
        "item-mean": _of_items(_means, predicts=True),
        "popularity": _of_items(_raters, predicts=False),
    }
    known = {row.name: row for row in PRIVMVMF.rows()}
    return tuple(
        dataclasses.replace(known[_named(name, scenario)], engine=engine)
        for scenario in ("", NEW_USERS)
        for name, engine in engines.items()
    )


def off_by(results: Results, reading: Reading, scenario: str = "") -> float | None:
    """Return the larger relative difference of the model's precision and recall from the paper's.

    Parameters
    ----------
    results : Results
    reading : Reading
    scenario : str
        ``""`` or `NEW_USERS`.

    Returns
    -------
    float or None
        0.05 for 5%; of means over the seeds.  None where the model has no figure.
    """
    found = [
        (results.values(_named(MODEL, scenario), f"{metric}/{reading.name}"), PAPER[scenario][metric])
        for metric in (_PRECISION, _RECALL)
    ]
    if not all(values for values, _ in found):
        return None
    return max(abs(float(np.mean(values)) / paper - 1) for values, paper in found)


def _near(results: Results, scenario: str) -> list[tuple[float, Reading]]:
    """Return each reading with its `off_by`, the nearest first."""
    every = [(off_by(results, reading, scenario), reading) for reading in readings()]
    return sorted(((off, reading) for off, reading in every if off is not None), key=lambda one: one[0])


def _columns(*metrics: str) -> tuple[str, ...]:
    return tuple(f"{ranker}\n{metric}" for ranker in _RANKERS.values() for metric in metrics)


def _title(text: str, results: Results, who: str = SCENARIOS[""][0]) -> str:
    seeds = f"seed {results.seeds[0]}" if len(results.seeds) == 1 else f"means of {len(results.seeds)} seeds"
    return f"{text}, {who}, {results.dataset}, {seeds}"


def _ndcg(one: Candidates) -> str:
    return f"ndcg/{one.name}/printed/10"


def _mark(off: float | None) -> str:
    return ABSENT if off is None else f"{off:.0%}{' *' if off <= NEAR else ''}"


def _block(
    title: str,
    results: Results,
    lines: Iterable[tuple[Reading, str]],
    notes: tuple[str, ...],
    scenario: str = "",
) -> PrintedTable:
    """Return a block with a line for each reading, below a line of the paper's figures."""
    found = [
        (
            "the paper's PrivMVMF",
            *(f"{PAPER[scenario][metric]:.3f}" for metric in (_PRECISION, _RECALL, _NDCG)),
            *(ABSENT,) * (3 * len(_RANKERS) - 2),
        )
    ]
    for reading, label in lines:
        names = (f"{_PRECISION}/{reading.name}", f"{_RECALL}/{reading.name}", _ndcg(reading.candidates))
        ours = [shown(results.values(_named(row, scenario), name)) for row in _RANKERS for name in names]
        found.append((label, *ours, _mark(off_by(results, reading, scenario))))
    columns = ("reading", *_columns("P@10", "R@10", "NDCG"), "off by")
    return PrintedTable(_title(title, results, SCENARIOS[scenario][0]), columns, tuple(found), notes)


def _nearest(scenario: str) -> MakePrintedTable:
    def section(results: Results) -> PrintedTable | None:
        near = _near(results, scenario)
        if not near:
            return None
        marked = [reading for off, reading in near if off <= NEAR]
        whole = sum(_off_ndcg(results, _ndcg(reading.candidates), scenario) <= NEAR for reading in marked)
        notes = (
            f"Among {len(near)} readings of precision and recall {len(marked)} come within {NEAR:.0%} of both; "
            f"in {whole} of these NDCG among the same candidates does, too.",
            f"The nearest {_NEAREST}, and below them {' and '.join(_USUAL)}, whose P and R, and whose NDCG, other "
            "tables show. A name says candidates, what is relevant, and what the figure is over; "
            "'relevant: rated 4 or more' explains them.",
        )
        first = [reading for _, reading in near[:_NEAREST]]
        usual = [reading for _, reading in near[_NEAREST:] if reading.name in _USUAL]
        lines = [(reading, reading.name) for reading in (*first, *usual)]
        return _block("Readings nearest to the paper's P and R", results, lines, notes, scenario)

    return section


def _off_ndcg(results: Results, name: str, scenario: str) -> float:
    """Return the relative difference of the model's NDCG from the paper's; infinite without a figure."""
    values = results.values(_named(MODEL, scenario), name)
    return abs(float(np.mean(values)) / PAPER[scenario][_NDCG] - 1) if values else np.inf


def _known(results: Results) -> bool:
    return any(row in results.cells for row in _RANKERS)


def _relevant(relevant: str) -> MakePrintedTable:
    def section(results: Results) -> PrintedTable | None:
        if not _known(results):
            return None
        lines = [
            (one, f"{one.candidates.name}, {one.over}") for one in readings() if one.relevant == relevant
        ]
        title = f"Precision and recall, relevant: {RELEVANT[relevant]}"
        return _block(title, results, lines, _NOTES if relevant == next(iter(RELEVANT)) else ())

    return section


def _graded(results: Results) -> PrintedTable | None:
    if not _known(results):
        return None
    paper = ("the paper's PrivMVMF", f"{PAPER[''][_NDCG]:.3f}", *(ABSENT,) * len(_RANKERS))
    lines = [paper]
    for one in graded_readings():
        name = f"ndcg/{one.name}"
        off = _off_ndcg(results, name, "")
        ours = [shown(results.values(row, name)) for row in _RANKERS]
        lines.append(
            (
                f"{one.candidates.name}, {one.gain}, {one.ranks}",
                *ours,
                _mark(off if np.isfinite(off) else None),
            )
        )
    gains = (f"{name}: {sentence}." for name, sentence in GAINS.items())
    notes = ("A reading's name: candidates, gain, rank at which the sums stop.", *gains)
    return PrintedTable(
        _title("NDCG", results), ("reading", *_columns("NDCG"), "off by"), tuple(lines), notes
    )


def _together(results: Results) -> PrintedTable | None:
    """Return a block of the readings nearest to the paper in both scenarios, by the larger `off_by` of the two."""
    known, new = ({one: off for off, one in _near(results, scenario)} for scenario in ("", NEW_USERS))
    both = sorted((max(known[one], new[one]), one.name, one) for one in known if one in new)
    if not both:
        return None
    metrics = [(scenario, metric) for scenario in ("", NEW_USERS) for metric in (_PRECISION, _RECALL)]
    lines = [
        ("the paper's PrivMVMF", *(f"{PAPER[scenario][metric]:.3f}" for scenario, metric in metrics), ABSENT)
    ]
    for off, name, _ in both[:_NEAREST]:
        ours = (shown(results.values(_named(MODEL, end), f"{metric}/{name}")) for end, metric in metrics)
        lines.append((name, *ours, _mark(off)))
    notes = (
        f"{sum(off <= NEAR for off, _, _ in both)} of {len(both)} readings come within {NEAR:.0%} of precision and "
        "recall for existing users and for new ones. Off by: the largest of the four shares.",
    )
    columns = (
        "reading",
        *(f"{who}\n{what}" for who in ("existing", "new") for what in ("P@10", "R@10")),
        "off by",
    )
    title = _title("Readings nearest to the paper's P and R", results, "existing and new users")
    return PrintedTable(title, columns, tuple(lines), notes)


def _prepare(settings: RunSettings, dataset: Dataset) -> RunSettings:
    return settings


PRIVMVMF_READINGS = PaperTable(
    name="privmvmf-readings",
    title="Readings of PrivMVMF's precision and recall",
    paper="PrivMVMF (Mai and Pang), table 4: means of 5 runs on MovieLens 1M",
    settings={},
    prepare=_prepare,
    rows=_rows,
    sections=(
        _nearest(""),
        *(_relevant(name) for name in RELEVANT),
        _graded,
        _nearest(NEW_USERS),
        _together,
    ),
    headline=_NDCG,
    choose_by=CHOOSE_BY,
    seeds=(0,),
    studies={"new-users": tuple(_named(row, NEW_USERS) for row in _RANKERS)},
    system="fedmvmf",
)
