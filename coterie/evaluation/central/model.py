"""The interface of central models, which learn with all data in one place, and their declared hyper-parameters."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, DataError, nearest
from coterie.evaluation.central.interactions import Interactions
from coterie.evaluation.search import Choices, LogUniform, Space
from coterie.evaluation.threads import one_thread

__all__ = ["Central", "CentralModel", "ScoreItems", "hyperparameter"]


class ScoreItems(Protocol):
    """Function that scores items for users, as `CentralModel.score` does; metrics take it for both their callbacks."""

    def __call__(
        self, users: NDArray[np.integer], items: NDArray[np.integer] | None = None
    ) -> NDArray[np.floating]:
        """Return scores of ``items`` (n, c), or of all items, for some users (n,)."""
        ...


class CentralModel(Protocol):
    """A model that learns with all data in one place, as a judge of federated ones."""

    def fit(self, data: Interactions) -> Self:
        """Learn from training interactions and return the model.

        Raises
        ------
        DataError
            The interactions lack what the model learns from.
        PreflightError
            The model needs more memory than it may use, or a package that is not installed.
        """
        ...

    def score(
        self, users: NDArray[np.integer], items: NDArray[np.integer] | None = None
    ) -> NDArray[np.float32]:
        """Return scores of items for some users; predicted ratings, where the model predicts ratings.

        Parameters
        ----------
        users : ndarray of int, shape (n,)
        items : ndarray of int, shape (n, c), optional
            Items of each user to score; all if left out.

        Returns
        -------
        ndarray of float32, shape (n, c) or (n, n_items)
        """
        ...

    def recommend(self, user: int, k: int) -> NDArray[np.intp]:
        """Return the ``k`` best items that the user has not been seen with, best first; fewer where there are fewer."""
        ...


def hyperparameter(
    default: Any,
    space: Choices | LogUniform | None = None,
    *,
    above: float | None = None,
    least: float | None = None,
) -> Any:
    """Declare a hyper-parameter of a model: a field of its dataclass.

    Parameters
    ----------
    default : int or float
        Its type is that of all values.
    space : Choices or LogUniform, optional
        Values to draw from in tuning; without it the hyper-parameter is not tuned.
    above, least : float, optional
        Limit that a value must exceed, or the smallest one.
    """
    return dataclasses.field(
        default=default, metadata={"space": space, "above": above, "least": least, "kind": type(default)}
    )


@dataclass
class Central(ABC):
    """Base of central models: checks hyper-parameters, scores and recommends.

    A subclass is a dataclass whose fields are its hyper-parameters (`hyperparameter`).

    Parameters
    ----------
    seed : int
        Seed of everything that the model draws; keyword only.

    Raises
    ------
    ConfigError
        A hyper-parameter of the wrong type or out of range.
    """

    name: ClassVar[str]
    """Key in files, lower case with hyphens."""
    label: ClassVar[str]
    """Name in tables."""
    title: ClassVar[str] = ""
    """Short name, where that is not the label up to a comma or bracket."""
    note: ClassVar[str] = ""
    """Remark for readers of a table: method and paper."""
    learned: ClassVar[tuple[str, ...]] = ()
    """Names of the learned arrays by which people who were not in training are scored; none is of a single user."""
    folds_in: ClassVar[bool] = True
    """Whether a person who was not in training is scored by its own interactions."""
    refusal: ClassVar[str] = ""
    """Why the model can score nobody but the users of its training; empty where it can."""

    seed: int = dataclasses.field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        for one in _declared(type(self)):
            value, kind = getattr(self, one.name), one.metadata["kind"]
            right = isinstance(value, kind) or (kind is float and isinstance(value, int))
            if not right or isinstance(value, bool) or not math.isfinite(value):
                what = "a whole number" if kind is int else "a finite number"
                raise ConfigError(f"{self.name}: {one.name} is {value!r}; expected {what}")
            above, least = one.metadata["above"], one.metadata["least"]
            if above is not None and not value > above:
                raise ConfigError(f"{self.name}: {one.name} is {value}; expected more than {above}")
            if least is not None and not value >= least:
                raise ConfigError(f"{self.name}: {one.name} is {value}; expected at least {least}")

    @classmethod
    def of(cls, options: Mapping[str, Any], seed: int) -> Self:
        """Return a model with some hyper-parameters; others have their defaults.

        Raises
        ------
        ConfigError
            There is no such hyper-parameter, or a value is out of range.
        """
        known = cls.defaults()
        for name in options:
            if name not in known:
                guess = nearest(name, known)
                raise ConfigError(
                    f"{cls.name} has no hyper-parameter {name!r}; it has {', '.join(known) or 'none'}",
                    hint=f"did you mean {guess!r}?" if guess else None,
                )
        return cls(**options, seed=seed)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the hyper-parameters' values before tuning, by name."""
        return {one.name: one.default for one in _declared(cls)}

    @classmethod
    def space(cls) -> Space:
        """Return the distributions from which tuning draws hyper-parameters, by name."""
        return {one.name: space for one in _declared(cls) if (space := one.metadata["space"]) is not None}

    @classmethod
    def objection(cls, n_items: int) -> str:
        """Return why the model, with its defaults, cannot learn a catalogue of this size here; empty where it can."""
        return ""

    def fit(self, data: Interactions) -> Self:
        """Learn from training interactions and return the model; `CentralModel.fit` has the errors."""
        self._data = data
        with one_thread():
            self._learn(data)
        return self

    @abstractmethod
    def _learn(self, data: Interactions) -> None:
        """Learn from training interactions."""

    @abstractmethod
    def _scores(self, users: NDArray[np.integer]) -> NDArray[np.floating]:
        """Return the scores of all items for some users, float (n, n_items)."""

    def score(
        self, users: NDArray[np.integer], items: NDArray[np.integer] | None = None
    ) -> NDArray[np.float32]:
        """Return scores of items for some users, float32; `CentralModel.score` has the shapes."""
        with one_thread():
            scores = self._scores(np.asarray(users)).astype(np.float32, copy=False)
        return scores if items is None else np.take_along_axis(scores, items.astype(np.intp), axis=1)

    # --- people who were not in training -----------------------------------------------------------------------

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the learned arrays by which people who were not in training are scored, by name.

        Raises
        ------
        ConfigError
            There are none: the model scores by what it holds of the users of its training.
        """
        if self.refusal:
            raise ConfigError(f"{self.label} serves nobody but the users of its training: {self.refusal}")
        return {name: np.asarray(getattr(self, name)) for name in self.learned}

    def with_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Take arrays that `arrays` returned, and return the model, which then scores people but no users.

        Raises
        ------
        DataError
            An array is missing, or one is not the model's.
        """
        if set(arrays) != set(self.learned):
            found, expected = ", ".join(sorted(arrays)) or "none", ", ".join(sorted(self.learned)) or "none"
            raise DataError(f"{self.label}: arrays {found}; expected {expected}")
        for name, array in arrays.items():
            setattr(self, name, array)
        return self

    @property
    def vector_length(self) -> int:
        """Number of values of a user's vector, by which alone it can be scored; 0 for models without such vectors."""
        return 0

    def user_vectors(self, users: NDArray[np.integer]) -> NDArray[np.floating]:
        """Return users' vectors, float (n, `vector_length`).

        Raises
        ------
        ConfigError
            The model has no such vectors.
        """
        raise ConfigError(f"users of {self.label} have no vector: their scores follow from their items")

    def score_vectors(self, vectors: NDArray[np.floating]) -> NDArray[np.float32]:
        """Return scores of all items for users' vectors (n, `vector_length`), float32 (n, n_items).

        Raises
        ------
        ConfigError
            The model has no such vectors.
        """
        raise ConfigError(f"users of {self.label} have no vector: their scores follow from their items")

    def score_people(self, people: Interactions) -> NDArray[np.float32]:
        """Return scores of all items for people who were not in training, by their own interactions.

        Parameters
        ----------
        people : Interactions
            Of models that predict ratings, with ratings.

        Returns
        -------
        ndarray of float32, shape (people, n_items)

        Raises
        ------
        ConfigError
            The model cannot score them.
        """
        if not self.folds_in:
            raise ConfigError(
                f"{self.label} has no recommendations for people who were not in training: a person's vector is "
                "learned in training",
                hint="send a vector" if self.vector_length else None,
            )
        with one_thread():
            return self._of_people(people).astype(np.float32, copy=False)

    def _of_people(self, people: Interactions) -> NDArray[np.floating]:
        """Return the scores of all items for people by their interactions, float (people, n_items)."""
        raise AssertionError(f"{self.name} has no scores for people who were not in training")

    def recommend(self, user: int, k: int) -> NDArray[np.intp]:
        """Return the ``k`` best items that the user has not been seen with, best first; fewer where there are fewer.

        Among equal scores the item with the lower number comes first.

        Raises
        ------
        ValueError
            ``k`` is below 1, or there is no such user.
        """
        if k < 1:
            raise ValueError(f"k is {k}; expected at least 1")
        if not 0 <= user < self._data.n_users:
            raise ValueError(f"user is {user}; expected 0 to {self._data.n_users - 1}")
        scores = self.score(np.array([user]))[0]
        order = np.argsort(-scores, kind="stable")
        seen = np.zeros(self._data.n_items, np.bool_)
        seen[self._data.items_of[user]] = True
        return order[~seen[order]][:k]

    def _ratings(self, data: Interactions) -> NDArray[np.float64]:
        """Return the training ratings, with the model's name in the error where there are none."""
        try:
            return data.rated()
        except DataError as error:
            raise DataError(f"{self.label}: {error.message}") from error


def _declared(model: type[Central]) -> list[dataclasses.Field[Any]]:
    return [one for one in dataclasses.fields(model) if "kind" in one.metadata]
