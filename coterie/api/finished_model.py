"""Models for people who were not in training: of finished runs, and from folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coterie.api.frames import records_frame
from coterie.config.run import RunSettings
from coterie.data.own_ratings import own_ratings
from coterie.errors import ConfigError, DataError, RunError
from coterie.evaluation.unseen import best_unseen
from coterie.launch.local_run import LocalRun
from coterie.launch.model_folder import ExportedModel, facts_of, read_model
from coterie.launch.released_model import refuse_sealed, released
from coterie.launch.saved_central import SavedCentral
from coterie.launch.saved_model import SavedModel
from coterie.studies.in_process import InProcess
from coterie.studies.services_run import FinishedRun
from coterie.telemetry.report import Report

if TYPE_CHECKING:
    import polars as pl

__all__ = ["CentralModelOfFolder", "FinishedModel", "LoadedModel", "load_model", "model_of"]


class LoadedModel(SavedModel):
    """A model that serves people who bring their own items or vector; `SavedModel` has its attributes."""

    def score(
        self,
        own: Mapping[str, float] | Sequence[str] | NDArray[np.floating],
        items: Sequence[str] | None = None,
    ) -> NDArray[np.float32]:
        """Return scores of items for a person who was not in training, from the person's own ratings or items.

        Nothing is sent or kept: the scores are computed here.

        Parameters
        ----------
        own : mapping of str to float, sequence of str, or ndarray of float
            Ratings by item; or items; or the vector that a user has from training, shape (vector_length,).
        items : sequence of str, optional
            Items to score; all, in the model's order, if left out.

        Returns
        -------
        ndarray of float32, shape (items,)

        Raises
        ------
        ConfigError
            The model has nothing for people who were not in training, or users have no vector.
        DataError
            A rating out of range, an item that is not known, or a vector of another length.
        """
        scores = self._scores(own)[0]
        if items is None:
            return scores
        place = {key: at for at, key in enumerate(self.items)}
        if unknown := [key for key in items if key not in place]:
            raise DataError(f"the model has no item {unknown[0]!r}; it has {len(place)}")
        return scores[[place[key] for key in items]]

    def recommend(
        self, own: Mapping[str, float] | Sequence[str] | NDArray[np.floating], k: int = 10
    ) -> pl.DataFrame:
        """Recommend items to a person who was not in training; `score` has the parameters and errors.

        Returns
        -------
        polars.DataFrame
            Columns rank, item and score; without the person's own items, as far as they are known.
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ConfigError(f"k is {k!r}; expected a whole number of at least 1")
        scores, seen = self._scores(own)
        items, values = best_unseen(self.items, scores, seen, k)
        found = enumerate(zip(items, values, strict=True), start=1)
        rows = ({"rank": rank, "item": item, "score": value} for rank, (item, value) in found)
        return records_frame(rows, ("rank", "item", "score"))

    def _scores(
        self, own: Mapping[str, float] | Sequence[str] | NDArray[np.floating]
    ) -> tuple[NDArray[np.float32], set[int]]:
        if isinstance(own, np.ndarray):
            if own.ndim != 1 or not np.issubdtype(own.dtype, np.number) or not np.isfinite(own).all():
                raise DataError(
                    f"an array of shape {own.shape} and type {own.dtype}; expected a vector of finite numbers",
                    hint="items are given as a list",
                )
            return self.scores_of_vectors(own[None].astype(np.float32))[0], set()
        self.require_histories()
        read = own_ratings(own, self.items, rating_range=self.rating_range)
        return self.scores_of_histories([read])[0], set(read.item.tolist())


class FinishedModel(LoadedModel, ExportedModel):
    """The chosen model of a finished run, as its participants fetch it; `ExportedModel` has its attributes."""


class CentralModelOfFolder(LoadedModel, SavedCentral):
    """A central model from a folder; `SavedCentral` has its attributes."""


def load_model(folder: str | Path) -> LoadedModel:
    """Load a model that `save` of a run, of its model or of a fitted central model wrote.

    Parameters
    ----------
    folder : str or Path

    Raises
    ------
    DataError
        A file is missing or is not the one that was saved.
    ConfigError
        The system is not installed, or its settings are not its own.
    """
    found = read_model(folder)
    given = {one.name: getattr(found, one.name) for one in fields(found)}
    return FinishedModel(**given) if isinstance(found, ExportedModel) else CentralModelOfFolder(**given)


def model_of(
    settings: RunSettings, report: Report, made: FinishedRun | InProcess, folder: Path
) -> FinishedModel:
    """Return the chosen model of a finished run.

    Parameters
    ----------
    settings : RunSettings
    report : Report
    made : FinishedRun or InProcess
        The first seed's federation.
    folder : Path
        Folder of the run.

    Raises
    ------
    RunError
        The model is not one of rounds, or is sealed for the participants.
    """
    facts = facts_of(settings, report)
    if isinstance(made, InProcess):
        refuse_sealed(made.plan)
        chosen = made.trained.state.chosen
        version = made.trained.state.version if chosen is None else chosen.version
        plan, items, arrays = made.plan, made.items, made.model()
    else:
        if not settings.description.in_rounds:
            raise RunError(
                f"the model of run {report.run_id} is not one of rounds: {settings.system} has none"
            )
        final = released(LocalRun.at(folder))
        plan, items, version, arrays = final.plan, final.items, final.version, dict(final.model)
    return FinishedModel(plan.system, plan.settings, plan.seed, version, items, arrays, facts)
