"""Model of a finished run as a folder that others can load: arrays, items, facts, a card, and the hash of each file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from coterie.config.run import RunSettings
from coterie.data.keyed_order import key_hash
from coterie.data.own_ratings import OwnRatings
from coterie.errors import ConfigError, DataError, RunError
from coterie.evaluation.holdout import TRAIN
from coterie.launch.kept_runs import KeptRun
from coterie.launch.local_run import LocalRun
from coterie.launch.released_model import released
from coterie.rounds.sides import Arrays, HostSide
from coterie.systems.registry import folded_in, host_side, system_named
from coterie.systems.shared.host_data import HostData
from coterie.telemetry.report import Report

__all__ = ["ExportedModel", "facts_of", "model_of_run", "read_model"]

_ARRAYS, _ITEMS, _ABOUT, _CARD, _SUMS = (
    "model.safetensors",
    "items.json",
    "model.json",
    "card.md",
    "SHA256SUMS",
)
_FORMAT = 1
_NEW = "new user"
"""Name of a person who never took part, from which its draws are derived."""


@dataclass(frozen=True, eq=False)
class ExportedModel:
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

    def save(self, folder: str | Path) -> Path:
        """Write the model into a folder: arrays, items, facts, a card to read, and the SHA-256 of each file.

        Raises
        ------
        DataError
            The folder holds other files.
        """
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"cannot use the folder {folder}: {error.strerror}") from error
        known = {_ARRAYS, _ITEMS, _ABOUT, _CARD, _SUMS}
        if strange := sorted(path.name for path in folder.iterdir() if path.name not in known):
            raise DataError(f"{folder} holds {strange[0]!r}; expected an empty folder, or one of a model")
        files = {
            _ARRAYS: save({name: np.ascontiguousarray(array) for name, array in self.arrays.items()}),
            _ITEMS: json.dumps(list(self.items), ensure_ascii=False).encode(),
            _ABOUT: json.dumps(
                {
                    "format": _FORMAT,
                    "system": self.system,
                    "settings": json.loads(self.settings),
                    "seed": self.seed,
                    "version": self.version,
                    "about": dict(self.about),
                },
                indent=1,
            ).encode(),
            _CARD: self.card().encode(),
        }
        for name, content in files.items():
            (folder / name).write_bytes(content)
        sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in files.items())
        (folder / _SUMS).write_text(sums)
        return folder

    def card(self) -> str:
        """Return the model's card, Markdown: data, split, sum, epsilon, figures, and what the model can do."""
        facts, title = self.about, system_named(self.system).title
        epsilon = facts.get("epsilon")
        lines = [
            f"# {facts['label']}",
            "",
            f"A model of {title}, from version {self.version} of run {facts['run']}.",
            "",
            f"- Data: {facts['dataset']}, {facts['users']} users, {len(self.items)} items in the model.",
            f"- Split: {facts['split']}, seed {self.seed}, SHA-256 {facts['split_sha256']}.",
            f"- Secure sum: {facts['secure_sum']}.",
            "- Differential privacy: "
            + ("none." if epsilon is None else f"epsilon {epsilon:.3g} at delta {facts['delta']:g}."),
            "- People who never took part: "
            + (
                "recommended to from their own items."
                if system_named(self.system).folds_in
                else "not served."
            ),
            "- Licence: "
            + facts.get("licence", "none stated; the terms of the data hold for what was learned from it")
            + ".",
            "",
            "| metric | value |",
            "| --- | --- |",
            *(f"| {name} | {value:.4f} |" for name, value in facts["metrics"].items() if value is not None),
            "",
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"{self.about['label']} of run {self.about['run']}, version {self.version}, {len(self.items)} items"


def read_model(folder: str | Path) -> ExportedModel:
    """Load a model that `ExportedModel.save` wrote.

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
    folder = Path(folder)
    content = _whole(folder)
    try:
        arrays = load(content[_ARRAYS])
        items = tuple(json.loads(content[_ITEMS]))
        made = json.loads(content[_ABOUT])
        if made["format"] != _FORMAT:
            raise DataError(f"{folder / _ABOUT} is of format {made['format']}; expected {_FORMAT}")
        settings = json.dumps(made["settings"], sort_keys=True, separators=(",", ":"))
        found = ExportedModel(
            made["system"], settings, made["seed"], made["version"], items, arrays, made["about"]
        )
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} holds no model of this version of Coterie: {error}") from error
    system_named(found.system).settings.from_json(found.settings)
    return found


def _whole(folder: Path) -> dict[str, bytes]:
    """Return the content of a model's files, each checked by its hash."""
    try:
        lines = (folder / _SUMS).read_bytes().decode("ascii", "replace").splitlines()
    except OSError as error:
        raise DataError(
            f"{folder} holds no model: cannot read {_SUMS}: {error.strerror}",
            hint="`coterie runs model RUN FOLDER` makes one, in Python `run.save(folder)`",
        ) from error
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    content = {}
    for name in (_ARRAYS, _ITEMS, _ABOUT, _CARD):
        try:
            content[name] = (folder / name).read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {folder / name}: {error.strerror}") from error
        digest = hashlib.sha256(content[name]).hexdigest()
        if sums.get(name) != digest:
            raise DataError(
                f"{folder / name} is not the file that was saved: SHA-256 {digest}; expected {sums.get(name, 'none')}",
                hint="the folder is damaged, or was changed: copy it again",
            )
    return content


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
