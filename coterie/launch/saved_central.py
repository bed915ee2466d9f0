"""A central model that is kept in a folder: what it learned of items, and nothing of a user of its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.own_ratings import OwnRatings
from coterie.errors import ConfigError, DataError, nearest
from coterie.evaluation.central import PREDICTORS, RANKERS, Central, Interactions
from coterie.launch.saved_model import ModelFiles, SavedModel

__all__ = ["CENTRAL_FORMAT", "SavedCentral", "central_of", "central_of_files"]

CENTRAL_FORMAT = 2
"""Form of the folder; the form of systems' models is 1, so that earlier versions of Coterie refuse this one."""

_KIND = "central"


@dataclass(frozen=True, eq=False)
class SavedCentral(SavedModel):
    """A central model, as far as it scores people who were not in its training.

    Attributes
    ----------
    system : str
        Name of the model, as `Central.name`.
    hyperparameters : mapping of str to int or float
    seed : int
    version : int
        Always 1.
    items, arrays, about
        As `SavedModel` has them.
    ratings : tuple of float, optional
        Lowest and highest rating of the training, for models that predict ratings.
    """

    system: str
    hyperparameters: Mapping[str, Any]
    seed: int
    version: int
    items: tuple[str, ...]
    arrays: Mapping[str, NDArray[Any]]
    about: Mapping[str, Any]
    ratings: tuple[float, float] | None = None

    @cached_property
    def model(self) -> Central:
        """The model, which scores people by their interactions, or their vectors.

        Raises
        ------
        ConfigError
            There is no such model, or a hyper-parameter is not its own.
        DataError
            The arrays are not the model's.
        """
        known = {one.name: one for one in (*RANKERS, *PREDICTORS)}
        if self.system not in known:
            guess = nearest(self.system, known)
            raise ConfigError(
                f"there is no central model {self.system!r}; expected one of {', '.join(known)}",
                hint=f"did you mean {guess!r}?" if guess else None,
            )
        return known[self.system].of(self.hyperparameters, self.seed).with_arrays(self.arrays)

    @property
    def vector_length(self) -> int:
        """Number of factors of a user; 0 for models without users' factors."""
        return self.model.vector_length

    @property
    def takes_histories(self) -> bool:
        """Whether people who were not in training are scored by a history."""
        return self.model.folds_in

    @property
    def rating_range(self) -> tuple[float, float] | None:
        """Lowest and highest rating of the training; None for models that rank."""
        return self.ratings

    def require_histories(self) -> None:
        """Check that the model takes histories; `SavedModel.require_histories` has the errors."""
        if not self.model.folds_in:
            # Raises, with the model's own reason.
            self.model.score_people(self._interactions([]))

    def scores_of_vectors(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the scores of all items for users' factors; `SavedModel.scores_of_vectors` has shapes and errors."""
        expected = self.vector_length
        if expected and vectors.shape[1:] != (expected,):
            raise DataError(f"a vector of {vectors.shape[1]} values; expected {expected}")
        return self.model.score_vectors(vectors)

    def scores_of_histories(self, histories: Sequence[OwnRatings]) -> NDArray[np.float32]:
        """Return the scores of all items by what people have rated or taken up, with the errors of `SavedModel`."""
        if not histories:
            return np.zeros((0, len(self.items)), np.float32)
        return self.model.score_people(self._interactions(histories))

    def _interactions(self, histories: Sequence[OwnRatings]) -> Interactions:
        """Return histories as interactions of as many people; for models of ratings those with a rating."""
        none: list[NDArray[Any]] = [np.zeros(0, np.int64)]
        item = np.concatenate([*none, *(one.item for one in histories)])
        person = np.repeat(np.arange(len(histories)), [len(one.item) for one in histories])
        people = max(len(histories), 1)
        if self.ratings is None:
            return Interactions(people, len(self.items), person, item)
        rating = np.concatenate([np.zeros(0), *(one.rating for one in histories)])
        known = np.isfinite(rating)
        return Interactions(people, len(self.items), person[known], item[known], rating[known])

    def content(self) -> dict[str, Any]:
        """Return name, hyper-parameters, seed, range of ratings, and facts."""
        return {
            "format": CENTRAL_FORMAT,
            "kind": _KIND,
            "model": self.system,
            "hyperparameters": dict(self.hyperparameters),
            "seed": self.seed,
            "ratings": None if self.ratings is None else list(self.ratings),
            "about": dict(self.about),
        }

    def card(self) -> str:
        """Return the model's card, Markdown: data, split, hyper-parameters, figures, and what the model can do."""
        facts = self.about
        given = ", ".join(f"{name} {value:g}" for name, value in self.hyperparameters.items())
        served = [
            *(["their own items"] if self.takes_histories else []),
            *([f"a vector of {self.vector_length} values"] if self.vector_length else []),
        ]
        return self._card(
            [
                f"A central model ({self.system}), which learned with all data in one place.",
                "",
                f"- Data: {facts['dataset']}, {facts['users']} users, {len(self.items)} items in the model.",
                f"- Split: {facts['split']}, seed {self.seed}, SHA-256 {facts['split_sha256']}.",
                f"- Hyper-parameters: {given or 'none'}.",
                "- Differential privacy: none.",
                f"- People who were not in training: recommended to from {', or '.join(served)}.",
            ]
        )

    def __repr__(self) -> str:
        return f"{self.about['label']} of {self.about['dataset']}, {len(self.items)} items"


def central_of(
    model: Central,
    items: Sequence[str],
    about: Mapping[str, Any],
    ratings: tuple[float, float] | None,
) -> SavedCentral:
    """Return a fitted central model as one that a folder can keep.

    Parameters
    ----------
    model : Central
    items : sequence of str
        Keys of its items, in order.
    about : mapping
        Facts for the card.
    ratings : tuple of float, optional
        Lowest and highest rating of the training, for models that predict ratings.

    Raises
    ------
    ConfigError
        The model scores by what it holds of the users of its training.
    """
    given = {name: getattr(model, name) for name in model.defaults()}
    return SavedCentral(model.name, given, model.seed, 1, tuple(items), model.arrays(), about, ratings)


def central_of_files(files: ModelFiles) -> SavedCentral:
    """Return the central model of a folder's files.

    Raises
    ------
    ConfigError
        There is no such model, or a hyper-parameter is not its own.
    DataError
        The files are of another kind of model, or the arrays are not those of the model.
    """
    made = files.content
    try:
        if made["kind"] != _KIND:
            raise DataError(f"{files.folder} holds a model of the kind {made['kind']!r}; expected {_KIND!r}")
        ratings = None if made["ratings"] is None else (float(made["ratings"][0]), float(made["ratings"][1]))
        found = SavedCentral(
            made["model"],
            made["hyperparameters"],
            made["seed"],
            1,
            files.items,
            files.arrays,
            made["about"],
            ratings,
        )
        _try(found)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{files.folder} holds no model of this version of Coterie: {error}") from error
    return found


def _try(model: SavedCentral) -> None:
    """Score once, so that arrays of other shapes are found before a request comes."""
    if model.takes_histories:
        first = OwnRatings(np.zeros(1, np.int64), np.array([(model.ratings or (0.0,))[0]]), (), 0)
        shape = model.scores_of_histories([first]).shape
    else:
        shape = model.scores_of_vectors(np.zeros((1, model.vector_length), np.float32)).shape
    if shape != (1, len(model.items)):
        raise DataError(f"{model.about['label']}: scores of {shape[1]} items; expected {len(model.items)}")
