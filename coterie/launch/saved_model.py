"""A model in a folder that others can load: its arrays, items, facts, a card to read, and the hash of each file."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from coterie.data.own_ratings import OwnRatings
from coterie.errors import DataError

__all__ = ["ModelFiles", "SavedModel", "read_files"]

_ARRAYS, _ITEMS, _ABOUT, _CARD, _SUMS = (
    "model.safetensors",
    "items.json",
    "model.json",
    "card.md",
    "SHA256SUMS",
)


class SavedModel(ABC):
    """A model that scores items for people who bring a history or a vector, and can be written into a folder.

    Attributes
    ----------
    system : str
        Name of the system or of the central model.
    version : int
        Number of the version.
    items : tuple of str
        Keys of the model's items, in order.
    arrays : mapping of str to ndarray of float
    about : mapping
        Facts for the card: data set, split and figures, and of a run its id, sum and privacy.
    """

    system: str
    version: int
    items: tuple[str, ...]
    arrays: Mapping[str, NDArray[Any]]
    about: Mapping[str, Any]

    # --- scores ------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def vector_length(self) -> int:
        """Number of values of a user's vector; 0 where users have none."""

    @property
    @abstractmethod
    def takes_histories(self) -> bool:
        """Whether people who were not in training are scored by a history."""

    @property
    @abstractmethod
    def rating_range(self) -> tuple[float, float] | None:
        """Lowest and highest rating of a history; None where the model learns from no ratings."""

    @abstractmethod
    def require_histories(self) -> None:
        """Check that the model takes histories.

        Raises
        ------
        ConfigError
            It takes none; the message says why.
        """

    @abstractmethod
    def scores_of_vectors(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the scores of all items for users by their vectors.

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
            Users have no vector.
        DataError
            Vectors of another length.
        """

    @abstractmethod
    def scores_of_histories(self, histories: Sequence[OwnRatings]) -> NDArray[np.float32]:
        """Return the scores of all items for people who were not in training, by what they have rated or taken up.

        Returns
        -------
        ndarray of float32, shape (B, I)

        Raises
        ------
        ConfigError
            The model takes no histories.
        DataError
            A rating out of range.
        """

    # --- as a folder -------------------------------------------------------------------------------------------

    @abstractmethod
    def content(self) -> dict[str, Any]:
        """Return what the folder says of the model beside arrays and items, ready for JSON."""

    @abstractmethod
    def card(self) -> str:
        """Return the model's card, Markdown: data, split, figures, and what the model can do."""

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
            _ABOUT: json.dumps(self.content(), indent=1).encode(),
            _CARD: self.card().encode(),
        }
        for name, content in files.items():
            (folder / name).write_bytes(content)
        sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in files.items())
        (folder / _SUMS).write_text(sums)
        return folder

    def _card(self, told: Sequence[str]) -> str:
        """Return a card of some lines about the model, with its licence and its figures."""
        facts = self.about
        licence = facts.get("licence", "none stated; the terms of the data hold for what was learned from it")
        lines = [
            f"# {facts['label']}",
            "",
            *told,
            f"- Licence: {licence}.",
            "",
            "| metric | value |",
            "| --- | --- |",
            *(f"| {name} | {value:.4f} |" for name, value in facts["metrics"].items() if value is not None),
            "",
        ]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class ModelFiles:
    """Content of a model's folder, each file checked by its hash.

    Attributes
    ----------
    folder : Path
    arrays : dict of str to ndarray
    items : tuple of str
    content : dict
        What `SavedModel.content` returned.
    """

    folder: Path
    arrays: dict[str, NDArray[Any]]
    items: tuple[str, ...]
    content: dict[str, Any]


def read_files(folder: Path) -> ModelFiles:
    """Read the files of a model.

    Raises
    ------
    DataError
        A file is missing, is not the one that was saved, or cannot be read.
    """
    content = _whole(folder)
    try:
        made = json.loads(content[_ABOUT])
        if not isinstance(made, dict):
            raise TypeError(f"{_ABOUT} is no object")
        return ModelFiles(folder, load(content[_ARRAYS]), tuple(json.loads(content[_ITEMS])), made)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} holds no model of this version of Coterie: {error}") from error


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
