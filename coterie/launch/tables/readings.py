"""Table 4 of PrivMVMF under every reading of its precision, recall and NDCG: one training, a line for each reading.

The paper prints NDCG .8313 beside precision .2931 and recall .2208, and does not say among which items.  Here is every
reading that was tried.  Beside the model stand two rankers that know no user, the damped mean of an item's ratings and
popularity: what a reading rewards is seen in them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.data import Dataset
from coterie.evaluation.baselines import damped_mean, popularity
from coterie.evaluation.leave_one_out import ScoreAll
from coterie.evaluation.readings import (
    GAINS,
    OVER,
    RELEVANT,
    GradedReading,
    Reading,
    candidates,
    graded_readings,
    measure_readings,
    readings,
)
from coterie.evaluation.selection import Trained
from coterie.launch.feed import Feed
from coterie.launch.in_process import InProcess, train_in_process
from coterie.launch.tables.blocks import ABSENT, shown
from coterie.launch.tables.privmvmf import PAPER, PRIVMVMF, trained_of
from coterie.launch.tables.row import Engine, Options, Row, configured
from coterie.launch.tables.table import Block, Results, Section, Table
from coterie.learning.mvmf import scores
from coterie.rounds.mvmf import CHOOSE_BY, MvmfServer
from coterie.rounds.mvmf_host import MvmfHost

__all__ = ["MODEL", "NEAR", "PRIVMVMF_READINGS", "off_by", "predicted_by"]

MODEL = "fedmvmf-paper"
"""The row whose readings are compared with the paper's."""

NEAR = 0.05
"""Precision and recall that both differ by no more than this share of the paper's are marked."""

_NEAREST = 8
"""Readings in the block of the nearest ones."""

_NDCG, _PRECISION, _RECALL = "ndcg_rated@10", "precision@10", "recall@10"
_PAPER = PAPER[""]
_RANKERS = {MODEL: "FedMVMF", "item-mean": "means", "popularity": "popular"}
"""Headings by row, short enough for a line to have them all."""

_NOTES = (
    "Off by: the larger of the shares by which FedMVMF's P and R differ from the paper's; * where that is at most "
    f"{NEAR:.0%}. The paper's figures are those of MovieLens 1M, whichever data ours are of.",
    "Means: the damped mean of an item's ratings. Popular: by how many have rated it. NDCG: among the same candidates, "
    f"{GAINS['printed']}, to rank 10; of sets that differ only in what is recommended it stands with the first.",
    *(f"{name}: {sentence}." for name, sentence in OVER.items()),
    *(f"{one.name}: {one.sentence}." for one in candidates()),
)


def predicted_by(made: InProcess, feed: Feed, hosts: int, seed: int) -> ScoreAll:
    """Return the ratings that FedMVMF predicts at the version that counts.

    Parameters
    ----------
    made : InProcess
        A run of FedMVMF.
    feed : Feed
        What it was trained on.
    hosts : int
        Over which the users were spread.
    seed : int
        Of the run.

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
    model = None
    for number in range(hosts):
        # As `Feed.hosted` orders them.
        users = np.unique(data.user[feed.host[data.user] == number])
        if not len(users):
            continue
        side = remaining.pop(0)
        if not isinstance(side, MvmfHost):
            raise TypeError(f"a host of the run is a {type(side).__name__}; expected one of FedMVMF")
        if model is None:
            model = MvmfServer(side.plan, len(data.items), seed, 0).model(made.trained.best)
        if factors is None:
            factors = np.zeros((len(data.users), side.plan.learning.factors), np.float32)
        factors[users] = side.factors(model, np.arange(len(users)))
    if model is None or factors is None:
        raise TypeError("the run has no host; expected one of FedMVMF")
    found, rows = model, factors
    return lambda users: scores(found, rows[users])


def _federated(settings: RunSettings, feed: Feed, seed: int) -> Trained:
    made = train_in_process(settings, feed, run_id="table", seed=seed, see=lambda _: None)
    trained = trained_of(settings, made.known)
    score_all = predicted_by(made, feed, settings.federation.hosts, seed)
    read = measure_readings(feed.rated(), score_all, seed=seed)
    return dataclasses.replace(trained, metrics={**trained.metrics, **read})


def _of_items(score: Callable[[Feed], NDArray[np.float32]], *, predicts: bool) -> Engine:
    """Return the engine of a row that scores items, the same for everybody."""

    def engine(settings: RunSettings, options: Options, feed: Feed, seed: int) -> Trained:
        table = np.broadcast_to(score(feed), (len(feed.dataset.users), len(feed.dataset.items)))
        metrics = measure_readings(feed.rated(), table.__getitem__, seed=seed, predicts=predicts)
        # Under the paper's reading, which is the headline; the history needs no other.
        headline = {} if not metrics else {_NDCG: metrics["ndcg/rated/printed/10"]}
        return Trained([{"step": 0, "metrics": headline}], 0, {**headline, **metrics})

    return engine


def _means(feed: Feed) -> NDArray[np.float32]:
    data, train = feed.dataset, feed.split.train
    return damped_mean(data.item[train], data.rating[train], len(data.items))


def _raters(feed: Feed) -> NDArray[np.float32]:
    data, train = feed.dataset, feed.split.train
    return popularity(data.item[train], np.ones(int(train.sum()), np.bool_), len(data.items))


def _rows() -> tuple[Row, ...]:
    model = next(row for row in PRIVMVMF.rows() if row.name == MODEL)
    return (
        dataclasses.replace(model, engine=configured(_federated)),
        Row("item-mean", "Damped item mean", _of_items(_means, predicts=True)),
        Row("popularity", "Popularity", _of_items(_raters, predicts=False)),
    )


def off_by(results: Results, reading: Reading) -> float | None:
    """Return the larger of the shares by which the model's precision and recall differ from the paper's.

    Parameters
    ----------
    results : Results
    reading : Reading

    Returns
    -------
    float or None
        0.05 for 5%; of means over the seeds.  None where the model has no figure.
    """
    found = [
        (results.values(MODEL, f"{metric}/{reading.name}"), _PAPER[metric])
        for metric in (_PRECISION, _RECALL)
    ]
    if not all(values for values, _ in found):
        return None
    return max(abs(float(np.mean(values)) / paper - 1) for values, paper in found)


def _columns(*metrics: str) -> tuple[str, ...]:
    return tuple(f"{ranker}\n{metric}" for ranker in _RANKERS.values() for metric in metrics)


def _title(text: str, results: Results) -> str:
    seeds = f"seed {results.seeds[0]}" if len(results.seeds) == 1 else f"means of {len(results.seeds)} seeds"
    return f"{text}, {results.dataset}, {seeds}"


def _ndcg(reading: Reading) -> str:
    return f"ndcg/{reading.candidates.name}/printed/10"


def _line(results: Results, reading: Reading, label: str) -> tuple[str, ...]:
    off = off_by(results, reading)
    names = (
        f"{_PRECISION}/{reading.name}",
        f"{_RECALL}/{reading.name}",
        _ndcg(reading),
    )
    return (
        label,
        *(shown(results.values(row, name)) for row in _RANKERS for name in names),
        ABSENT if off is None else f"{off:.0%}{' *' if off <= NEAR else ''}",
    )


_OTHERS = (ABSENT,) * 3 * (len(_RANKERS) - 1)
_OF_THE_PAPER = (
    "the paper's PrivMVMF",
    *(f"{_PAPER[metric]:.3f}" for metric in (_PRECISION, _RECALL, _NDCG)),
    *_OTHERS,
    ABSENT,
)


def _block(title: str, results: Results, lines: Sequence[tuple[str, ...]], notes: tuple[str, ...]) -> Block:
    columns = ("reading", *_columns("P@10", "R@10", "NDCG"), "off by")
    return Block(_title(title, results), columns, (_OF_THE_PAPER, *lines), notes)


def _known(results: Results) -> bool:
    return any(row in results.cells for row in _RANKERS)


def _nearest(results: Results) -> Block | None:
    near = [(off, reading) for reading in readings() if (off := off_by(results, reading)) is not None]
    if not near:
        return None
    near.sort(key=lambda one: one[0])
    lines = [_line(results, reading, reading.name) for _, reading in near[:_NEAREST]]
    marked = [reading for off, reading in near if off <= NEAR]
    whole = sum(_near_ndcg(results, reading) for reading in marked)
    notes = (
        f"Of {len(near)} readings of precision and recall {len(marked)} come within {NEAR:.0%} of both; in {whole} of "
        "these NDCG among the same candidates does, too.",
        "A reading's name: candidates, what is relevant, what the figure is over; explained below the next table.",
    )
    return _block("Readings nearest to the paper's precision and recall", results, lines, notes)


def _near_ndcg(results: Results, reading: Reading) -> bool:
    """Return whether NDCG among the same candidates is near the paper's, too."""
    values = results.values(MODEL, _ndcg(reading))
    return bool(values) and abs(float(np.mean(values)) / _PAPER[_NDCG] - 1) <= NEAR


def _relevant(relevant: str) -> Section:
    def section(results: Results) -> Block | None:
        if not _known(results):
            return None
        lines = [
            _line(results, one, f"{one.candidates.name}, {one.over}")
            for one in readings()
            if one.relevant == relevant
        ]
        title = f"Precision and recall, relevant: {RELEVANT[relevant]}"
        return _block(title, results, lines, _NOTES if relevant == next(iter(RELEVANT)) else ())

    return section


def _graded(results: Results) -> Block | None:
    if not _known(results):
        return None

    def line(one: GradedReading) -> tuple[str, ...]:
        values = results.values(MODEL, f"ndcg/{one.name}")
        off = abs(float(np.mean(values)) / _PAPER[_NDCG] - 1) if values else None
        return (
            f"{one.candidates.name}, {one.gain}, {one.ranks}",
            *(shown(results.values(row, f"ndcg/{one.name}")) for row in _RANKERS),
            ABSENT if off is None else f"{off:.0%}{' *' if off <= NEAR else ''}",
        )

    paper = (_OF_THE_PAPER[0], f"{_PAPER[_NDCG]:.3f}", *(ABSENT,) * len(_RANKERS))
    gains = (f"{name}: {sentence}." for name, sentence in GAINS.items())
    notes = ("A reading's name: candidates, gain, rank at which the sums stop.", *gains)
    columns = ("reading", *_columns("NDCG"), "off by")
    return Block(_title("NDCG", results), columns, (paper, *map(line, graded_readings())), notes)


def _prepare(settings: RunSettings, dataset: Dataset) -> RunSettings:
    return settings


PRIVMVMF_READINGS = Table(
    name="privmvmf-readings",
    title="Readings of PrivMVMF's precision and recall",
    paper="PrivMVMF (Mai and Pang), table 4, existing users and items: means of 5 runs on MovieLens 1M",
    file=None,
    prepare=_prepare,
    rows=_rows,
    sections=(_nearest, *(_relevant(name) for name in RELEVANT), _graded),
    headline=_NDCG,
    choose_by=CHOOSE_BY,
    seeds=(0,),
    system="fedmvmf",
)
