"""Comparison of recommenders on one split: ``ct.compare``, by the code of ``coterie evaluate --table compare``."""

from __future__ import annotations

import dataclasses
import html
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.api.data import DataSplit
from coterie.api.frames import html_table, records_frame, text_table
from coterie.api.recommenders import CentralRecommender, FederatedRecommender, Recommender
from coterie.errors import ConfigError
from coterie.studies.run_plan import new_run_id
from coterie.studies.tables.central_rows import central_row
from coterie.studies.tables.compare import divided_by, fitting
from coterie.studies.tables.compared_table import compared_table
from coterie.studies.tables.federated_rows import federated_row
from coterie.studies.tables.paper_table import evaluate
from coterie.studies.tables.row import Row
from coterie.studies.tables.tasks import TASKS, ComparedTask

if TYPE_CHECKING:
    import polars as pl

__all__ = ["ComparedRecommenders", "compare"]

_RANKED_BY = ("leave-last-out", "leave-random-out")
"""Splits with one held-out item of each user."""


class ComparedRecommenders:
    """The table of a comparison; it shows itself as text, and in a notebook as HTML.

    Attributes
    ----------
    content : mapping
        Content of the table's file (docs/metrics.md).
    path : Path
        The file.
    """

    def __init__(self, content: Mapping[str, Any], path: Path) -> None:
        self.content = content
        self.path = path

    @property
    def verdict(self) -> str:
        """The best central and the best federated row, and their difference, in one sentence."""
        return str(self.content["verdict"]["text"])

    @property
    def table(self) -> pl.DataFrame:
        """A line for each row and metric: mean and standard deviation over seeds, difference to the best central row.

        ``difference``, ``low`` and ``high`` are the paired difference over users to the central row that is best on
        validation data, with its 95% interval; null for that row itself and for metrics that are not compared.
        """
        differences = {(one["first"], one["metric"]): one for one in self.content["differences"]}
        lines = []
        for row in self.content["summary"]:
            for metric, value in row["metrics"].items():
                found = differences.get((row["row"], metric), {})
                lines.append(
                    {
                        "row": row["label"],
                        "metric": metric,
                        **value,
                        "difference": found.get("mean"),
                        "low": found.get("low"),
                        "high": found.get("high"),
                    }
                )
        return records_frame(lines, ("row", "metric"))

    def __repr__(self) -> str:
        blocks = self.content["blocks"]
        parts = [f"{block['title']}\n{text_table(block['columns'], block['rows'])}" for block in blocks]
        return "\n\n".join([*parts, self.verdict])

    def _repr_html_(self) -> str:
        parts = []
        for block in self.content["blocks"]:
            notes = "".join(f"<li>{html.escape(note)}</li>" for note in block["notes"])
            parts.append(f"<p>{html.escape(block['title'])}</p>")
            parts.append(html_table(block["columns"], block["rows"]) + f"<ul>{notes}</ul>")
        return "".join(parts)


def compare(
    models: Sequence[Recommender],
    split: DataSplit,
    *,
    seeds: int | Sequence[int] = 1,
    output: str | Path = "runs",
) -> ComparedRecommenders:
    """Compare recommenders on one data set: the same split, candidates and users for all.

    Federated systems are trained in this process; their numbers are those of services.  Versions are chosen on
    validation data.  Nothing is tuned: each model has the settings that it was made with.

    Parameters
    ----------
    models : sequence of Recommender
        Models that rank items, or models that predict ratings.
    split : DataSplit
        For models that rank, one with a held-out item of each user; for others any.
    seeds : int or sequence of int
        Number of seeds, counted from the split's; or the seeds.  Each divides the data and trains every model.
    output : str or Path
        Folder in which the comparison gets a folder of its own.

    Raises
    ------
    ConfigError
        No model, models of both kinds, or a model that cannot be measured by the split.
    """
    DataSplit.require(split)
    task = _task(models, split)
    dataset, notes = fitting(task, split.data.dataset)
    chosen = _seeds(seeds, split.seed)
    # Everything that can be refused is, before there is a folder.
    for model in models:
        _row(model, task, split.tree())
    out = (Path(output) / new_run_id("compare")).absolute()
    out.mkdir(parents=True, exist_ok=True)
    tables = split.tree(out)
    rows = _named_apart([_row(model, task, tables) for model in models])
    settings = divided_by(task, tables)
    table = compared_table(task, tuple(rows), tuple(notes))
    made, path = evaluate(table, settings, seeds=chosen, out=out, dataset=dataset)
    return ComparedRecommenders(made, path)


def _task(models: Sequence[Recommender], split: DataSplit) -> ComparedTask:
    """Return the task that all models solve, with the split's kind."""
    if not models:
        raise ConfigError("there is no model to compare; expected at least one")
    solved = [[task for task in TASKS if _solves(model, task)] for model in models]
    for model, tasks in zip(models, solved, strict=True):
        if not tasks:
            raise ConfigError(
                f"{model!r} cannot be compared: it is not trained in one process, or learns from likes and dislikes"
            )
    task = solved[0][0]
    for model, tasks in zip(models, solved, strict=True):
        if task not in tasks:
            raise ConfigError(
                f"{models[0]!r} and {model!r} solve other tasks; expected models that rank, or models that predict "
                "ratings"
            )
    if not task.ratings and split.settings.kind not in _RANKED_BY:
        raise ConfigError(
            f"split {split.settings.kind!r}: rankings are compared by one held-out item of each user",
            hint=f"expected {' or '.join(map(repr, _RANKED_BY))}",
        )
    return dataclasses.replace(task, split=split.settings.kind)


def _solves(model: Recommender, task: ComparedTask) -> bool:
    if isinstance(model, CentralRecommender):
        return model.model in task.models
    return isinstance(model, FederatedRecommender) and task.solved_by(model.system)


def _row(model: Recommender, task: ComparedTask, tables: Mapping[str, Any]) -> Row:
    if isinstance(model, CentralRecommender):
        row = central_row(model.model, task)
        return dataclasses.replace(row, options={**row.options, **model.hyperparameters})
    if not isinstance(model, FederatedRecommender):
        raise ConfigError(f"{model!r} is no recommender; expected one such as ct.Popularity()")
    # The sum that the model was made with, where tables without settings take a masked one.
    own = {"secure_sum": "clear", **model.tree(), **tables}
    return federated_row(model.system, own, task)


def _named_apart(rows: Sequence[Row]) -> list[Row]:
    """Return rows with a number at the names and labels of those that share them."""
    shared = Counter(row.name for row in rows)
    seen: Counter[str] = Counter()
    found = []
    for row in rows:
        seen[row.name] += 1
        number = seen[row.name]
        alike = shared[row.name] > 1
        found.append(
            dataclasses.replace(row, name=f"{row.name}-{number}", label=f"{row.label} ({number})")
            if alike
            else row
        )
    return found


def _seeds(seeds: int | Sequence[int], first: int) -> tuple[int, ...]:
    if (
        isinstance(seeds, bool)
        or (isinstance(seeds, int) and seeds < 1)
        or (not isinstance(seeds, int) and not seeds)
    ):
        raise ConfigError(f"seeds is {seeds!r}; expected a number of at least 1, or a list of seeds")
    if isinstance(seeds, int):
        return tuple(range(first, first + seeds))
    for seed in seeds:
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            raise ConfigError(f"seeds holds {seed!r}; expected whole numbers of at least 0")
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds is {list(seeds)}, with one twice; expected each once")
    return tuple(seeds)
