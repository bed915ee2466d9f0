"""Models of finished runs: for people who never took part, and as a folder that others can load."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from coterie.api.frames import records_frame
from coterie.config.run import RunSettings
from coterie.data.own_ratings import own_ratings
from coterie.errors import ConfigError, DataError, RunError
from coterie.evaluation.unseen import best_unseen
from coterie.launch.local_run import LocalRun
from coterie.launch.new_user import scores_of_new
from coterie.launch.released_model import refuse_sealed, released
from coterie.studies.in_process import InProcess
from coterie.studies.services_run import FinishedRun
from coterie.systems.registry import check_folds_in, ratings_of, system_named
from coterie.telemetry.report import Report

if TYPE_CHECKING:
    import polars as pl

__all__ = ["FinishedModel", "load_model", "model_of"]

_ARRAYS, _ITEMS, _ABOUT, _CARD, _SUMS = (
    "model.safetensors",
    "items.json",
    "model.json",
    "card.md",
    "SHA256SUMS",
)
_FORMAT = 1


@dataclass(frozen=True, eq=False)
class FinishedModel:
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

    def score(
        self, own: Mapping[str, float] | Sequence[str], items: Sequence[str] | None = None
    ) -> NDArray[np.float32]:
        """Return scores of items for a person who never took part, from the person's own ratings or items.

        Nothing is sent or kept: the scores are computed here.

        Parameters
        ----------
        own : mapping of str to float, or sequence of str
            Ratings by item, or items.
        items : sequence of str, optional
            Items to score; all, in the model's order, if left out.

        Returns
        -------
        ndarray of float32, shape (items,)

        Raises
        ------
        ConfigError
            The system has nothing for people who never took part.
        DataError
            A rating out of range, or an item that is not known.
        """
        scores = self._scores(own)[0]
        if items is None:
            return scores
        place = {key: at for at, key in enumerate(self.items)}
        if unknown := [key for key in items if key not in place]:
            raise DataError(f"the model has no item {unknown[0]!r}; it has {len(place)}")
        return scores[[place[key] for key in items]]

    def recommend(self, own: Mapping[str, float] | Sequence[str], k: int = 10) -> pl.DataFrame:
        """Recommend items to a person who never took part; `score` has the parameters and errors.

        Returns
        -------
        polars.DataFrame
            Columns rank, item and score.
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ConfigError(f"k is {k!r}; expected a whole number of at least 1")
        scores, seen = self._scores(own)
        items, values = best_unseen(self.items, scores, seen, k)
        found = enumerate(zip(items, values, strict=True), start=1)
        rows = ({"rank": rank, "item": item, "score": value} for rank, (item, value) in found)
        return records_frame(rows, ("rank", "item", "score"))

    def _scores(self, own: Mapping[str, float] | Sequence[str]) -> tuple[NDArray[np.float32], set[int]]:
        check_folds_in(self.system)
        limits = ratings_of(self.system, self.settings)
        read = own_ratings(own, self.items, rating_range=limits)
        scores = scores_of_new(self.system, self.settings, self.seed, self.items, self.arrays, read)
        return scores, set(read.item.tolist())

    def save(self, folder: str | Path) -> Path:
        """Write the model into a folder: arrays, items, facts, a card to read, and the SHA-256 of each file.

        Raises
        ------
        DataError
            The folder holds other files.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
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
            "",
            "| metric | value |",
            "| --- | --- |",
            *(f"| {name} | {value:.4f} |" for name, value in facts["metrics"].items() if value is not None),
            "",
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"{self.about['label']} of run {self.about['run']}, version {self.version}, {len(self.items)} items"


def load_model(folder: str | Path) -> FinishedModel:
    """Load a model that `FinishedModel.save` wrote.

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
        found = FinishedModel(
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
            hint="`run.save(folder)` makes one",
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
    facts = _facts(settings, report)
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


def _of_first_seed(report: Report) -> dict[str, float | None]:
    """Return the figures of the seed whose model is kept: the first."""
    first = report.per_seed[0].chosen if report.per_seed else None
    if first is None:
        return {name: one.mean for name, one in report.metrics.items()}
    return {name: first.metrics[name] for name in report.metrics if name in first.metrics}


def _facts(settings: RunSettings, report: Report) -> dict[str, Any]:
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
