"""Rows of tables for central models, which learn with all data in one place."""

from __future__ import annotations

from coterie.config.run import RunSettings
from coterie.evaluation.central import Central, CentralModel
from coterie.evaluation.selection import SelectedModel
from coterie.studies.run_data import Feed
from coterie.studies.tables.row import Options, Row
from coterie.studies.tables.tasks import ComparedTask

__all__ = ["central_row"]


def central_row(model: type[Central], task: ComparedTask) -> Row:
    """Return the row of a central model, whose options are the model's hyper-parameters."""

    def engine(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
        fitted: CentralModel = model.of(options, seed).fit(feed.training(ratings=task.ratings))
        return task.measured(feed, fitted.score)

    return Row(
        model.name, model.label, engine, options=model.defaults(), space=model.space(), note=model.note
    )
