"""Model of a finished run, as one that a folder can keep."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.data.keyed_order import key_hash
from coterie.data.own_ratings import OwnRatings
from coterie.errors import ConfigError, DataError, RunError
from coterie.evaluation.holdout import TRAIN
from coterie.launch.kept_runs import KeptRun
from coterie.launch.local_run import LocalRun
from coterie.launch.released_model import released
from coterie.launch.saved_central import CENTRAL_FORMAT, SavedCentral, central_of_files
from coterie.launch.saved_model import SavedModel, read_files
from coterie.rounds.sides import Arrays, HostSide
from coterie.systems.registry import check_folds_in, folded_in, host_side, ratings_of, system_named
from coterie.systems.shared.host_data import HostData
from coterie.telemetry.report import Report

__all__ = ["ExportedModel", "facts_of", "model_of_run", "read_model"]

_FORMAT = 1
_NEW = "new user"
"""Name of a person who never took part, from which its draws are derived."""


@dataclass(frozen=True, eq=False)
class ExportedModel(SavedModel):
    """The chosen model of a finished run, as its participants fetch it.

    Attributes
    ----------
    system : str
        Name of the system.
    settings : str
        The system's settings, JSON, as in the run's plan.
    seed, version : int
        Seed of the run; number of the version.
    items : tuple of str
        Keys of the model's items, in order.
    arrays : mapping of str to ndarray of float32
    about : mapping
        Facts of the run for the card: run, data set, split, sum, privacy and figures.
    """

    system: str
    settings: str
    seed: int
    version: int
    items: tuple[str, ...]
    arrays: Mapping[str, NDArray[np.float32]]
    about: Mapping[str, Any]

    # --- scores ------------------------------------------------------------------------------------------------

    @property
    def vector_length(self) -> int:
        """Number of values that a user of the system keeps beside the model; 0 where users keep none."""
        _, private = self._side(["nobody"], np.zeros(1, np.uint64))
        kept = _vector(private)
        return 0 if kept is None else int(kept.shape[1])

    @property
    def takes_histories(self) -> bool:
        """Whether the system has recommendations for people who never took part."""
        return system_named(self.system).folds_in

    @property
    def rating_range(self) -> tuple[float, float] | None:
        """Lowest and highest rating that the system learns from; None where it learns from no ratings."""
        return ratings_of(self.system, self.settings)

    def require_histories(self) -> None:
        """Check that the system serves people who never took part; `SavedModel.require_histories` has the errors."""
        check_folds_in(self.system)

    def scores_of_vectors(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the scores of all items for users who kept their vector from training.

        Parameters
        ----------
        vectors : ndarray of float32, shape (B, n)
            A row for each user.

        Returns
        -------
        ndarray of float32, shape (B, I)

        Raises
        ------
        ConfigError
            Users of the system keep no vector.
        DataError
            Vectors of another length.
        """
        side, private = self._side(
            [str(number) for number in range(len(vectors))], np.arange(len(vectors), dtype=np.uint64)
        )
        kept = _vector(private)
        if kept is None:
            raise ConfigError(
                f"users of {system_named(self.system).title} keep no vector: their scores follow from their items",
                hint="send a history" if self.takes_histories else None,
            )
        if vectors.shape[1:] != kept.shape[1:]:
            raise DataError(f"a vector of {vectors.shape[1]} values; expected {kept.shape[1]}")
        kept[...] = vectors
        return self._scores_by(side, len(vectors))

    def scores_of_histories(self, histories: Sequence[OwnRatings]) -> NDArray[np.float32]:
        """Return the scores of all items for people who never took part, by what they have rated or taken up.

        Returns
        -------
        ndarray of float32, shape (B, I)

        Raises
        ------
        ConfigError
            The system has nothing for people who never took part.
        DataError
            A rating out of the system's range.
        """
        sizes = [len(one.item) for one in histories]
        user = np.repeat(np.arange(len(histories)), sizes)
        item = np.concatenate([one.item for one in histories]) if histories else np.zeros(0, np.int64)
        rating = np.concatenate([one.rating for one in histories]) if histories else np.zeros(0)
        names = [_NEW] * len(histories)
        data = HostData(names, self.items, user, item, np.full(len(item), TRAIN, np.int64), rating)
        # All draw alike, as a person does who asks alone: the same history gives the same scores.
        keys = np.repeat(key_hash([_NEW], self.seed), len(histories))
        side = folded_in(self.system, self.settings, data, keys, self.seed, self.arrays)
        return self._scores_by(side, len(histories))

    def _scores_by(self, side: HostSide, users: int) -> NDArray[np.float32]:
        made = [side.recommend(self.arrays, user) for user in range(users)]
        return np.stack(made) if made else np.zeros((0, len(self.items)), np.float32)

    def _side(self, users: Sequence[str], keys: NDArray[np.uint64]) -> tuple[HostSide, Arrays]:
        """Return a host's side of users without any item, and their private arrays, which scores depend on."""
        private: Arrays = {}

        def keep(initial: Arrays) -> Arrays:
            private.update(initial)
            return initial

        none = np.zeros(0, np.int64)
        data = HostData(users, self.items, none, none, none, np.zeros(0))
        return host_side(self.system, self.settings, data, keys, self.seed, keep), private

    # --- as a folder -------------------------------------------------------------------------------------------

    def content(self) -> dict[str, Any]:
        """Return system, settings, seed, version and facts."""
        return {
            "format": _FORMAT,
            "system": self.system,
            "settings": json.loads(self.settings),
            "seed": self.seed,
            "version": self.version,
            "about": dict(self.about),
        }

    def card(self) -> str:
        """Return the model's card, Markdown: data, split, sum, epsilon, figures, and what the model can do."""
        facts, title = self.about, system_named(self.system).title
        epsilon = facts.get("epsilon")
        return self._card(
            [
                f"A model of {title}, from version {self.version} of run {facts['run']}.",
                "",
                f"- Data: {facts['dataset']}, {facts['users']} users, {len(self.items)} items in the model.",
                f"- Split: {facts['split']}, seed {self.seed}, SHA-256 {facts['split_sha256']}.",
                f"- Secure sum: {facts['secure_sum']}.",
                "- Differential privacy: "
                + ("none." if epsilon is None else f"epsilon {epsilon:.3g} at delta {facts['delta']:g}."),
                "- People who never took part: "
                + ("recommended to from their own items." if self.takes_histories else "not served."),
            ]
        )

    def __repr__(self) -> str:
        return f"{self.about['label']} of run {self.about['run']}, version {self.version}, {len(self.items)} items"


def read_model(folder: str | Path) -> ExportedModel | SavedCentral:
    """Load a model that `SavedModel.save` wrote: that of a run, or a central one.

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
    files = read_files(Path(folder))
    made = files.content
    form = made.get("format")
    if form == CENTRAL_FORMAT:
        return central_of_files(files)
    if form != _FORMAT:
        raise DataError(
            f"{folder} holds a model of format {form!r}; expected {_FORMAT} or {CENTRAL_FORMAT}",
            hint="a later version of Coterie may have written it",
        )
    try:
        settings = json.dumps(made["settings"], sort_keys=True, separators=(",", ":"))
        found = ExportedModel(
            made["system"],
            settings,
            made["seed"],
            made["version"],
            files.items,
            files.arrays,
            made["about"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} holds no model of this version of Coterie: {error}") from error
    system_named(found.system).settings.from_json(found.settings)
    return found


def model_of_run(run: KeptRun, *, licence: str = "") -> ExportedModel:
    """Return the chosen model of a finished run in rounds, of its first seed.

    Parameters
    ----------
    run : KeptRun
    licence : str
        Licence of the model, for its card.

    Raises
    ------
    RunError
        The run has not finished, was trained in one process, which keeps no model, or its model is sealed or not one
        of rounds.
    """
    if run.status != "finished" or run.report is None:
        raise RunError(
            f"run {run.run_id} has no model to give: it is {run.status}",
            hint="`coterie runs list` shows others",
        )
    if run.report.in_process:
        raise RunError(
            f"run {run.run_id} was in one process, which keeps no model",
            hint="without --in-process the server's store has it; in Python `run.save` writes it from memory",
        )
    final = released(LocalRun.at(run.folder))
    facts = facts_of(run.run_settings(), run.report)
    if licence:
        facts["licence"] = licence
    plan = final.plan
    return ExportedModel(
        plan.system, plan.settings, plan.seed, final.version, final.items, dict(final.model), facts
    )


def _vector(private: Arrays) -> NDArray[np.float32] | None:
    """Return the array of the vectors that users keep, by which they are scored; None where they keep none."""
    for array in private.values():
        # The first one: what follows are moments of an optimiser and the like.
        if array.ndim == 2 and array.shape[1] and np.issubdtype(array.dtype, np.floating):
            return array
    return None


def _of_first_seed(report: Report) -> dict[str, float | None]:
    """Return the figures of the seed whose model is kept: the first."""
    first = report.per_seed[0].chosen if report.per_seed else None
    if first is None:
        return {name: one.mean for name, one in report.metrics.items()}
    return {name: first.metrics[name] for name in report.metrics if name in first.metrics}


def facts_of(settings: RunSettings, report: Report) -> dict[str, Any]:
    """Return the facts of a run that stand beside its model: data, split, sum, privacy and figures."""
    private = report.privacy
    found = {
        "label": report.label,
        "run": report.run_id,
        "dataset": report.dataset.name,
        "users": report.dataset.users,
        "split": settings.split.kind,
        "split_sha256": report.dataset.split_sha256,
        "secure_sum": report.secure_sum,
        "metrics": _of_first_seed(report),
    }
    return found if private.epsilon is None else {**found, "epsilon": private.epsilon, "delta": private.delta}
