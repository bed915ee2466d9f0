"""Results of `fit`: one interface for central models and federated systems."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.api.data import DataSplit
from coterie.api.frames import frame_of, records_frame
from coterie.errors import ConfigError, DataError, nearest
from coterie.evaluation.central import PREDICTORS, Central, Interactions
from coterie.evaluation.unseen import best_unseen
from coterie.launch.saved_central import central_of
from coterie.studies.run_data import Feed

if TYPE_CHECKING:
    import polars as pl

__all__ = ["FittedCentral", "FittedModel", "places", "recommendations"]

_COLUMNS = ("user", "rank", "item", "title", "score")


class FittedModel(ABC):
    """A model that has learned from a split's training part.

    Attributes
    ----------
    split : DataSplit
        The split that it learned from.
    """

    split: DataSplit

    @property
    @abstractmethod
    def metrics(self) -> pl.DataFrame:
        """Figures on the split: a row for the model and for each baseline beside it, a column for each metric."""

    @abstractmethod
    def score(self, users: Sequence[str], items: Sequence[str] | None = None) -> NDArray[np.float32]:
        """Return scores of items for users.

        Parameters
        ----------
        users : sequence of str
            Users of the data set.
        items : sequence of str, optional
            Items of the data set; all, in the data set's order, if left out.

        Returns
        -------
        ndarray of float32, shape (users, items)
        """

    @abstractmethod
    def recommend(self, users: str | Sequence[str], k: int = 10) -> pl.DataFrame:
        """Recommend items that users have not had in training.

        Parameters
        ----------
        users : str or sequence of str
        k : int
            Most items for each user.

        Returns
        -------
        polars.DataFrame
            Columns user, rank, item, title (null where the data set has none) and score.
        """


class FittedCentral(FittedModel):
    """A central model, which has learned with all data in one place.

    Attributes
    ----------
    model : Central
    """

    def __init__(self, model: Central, split: DataSplit, feed: Feed, metrics: Mapping[str, float]) -> None:
        self.model = model
        self.split = split
        self._feed = feed
        self._metrics = dict(metrics)

    @property
    def metrics(self) -> pl.DataFrame:
        """Figures of the model on the split, one row."""
        return frame_of(
            {"row": [self.model.label], **{name: [value] for name, value in self._metrics.items()}}
        )

    def score(self, users: Sequence[str], items: Sequence[str] | None = None) -> NDArray[np.float32]:
        """Return scores of items for users; `FittedModel.score` has the shapes."""
        of_users, chosen = places(self.split, users, items)
        # Scored in the order of the feed, which may number items in another way than the data set.
        place = {key: at for at, key in enumerate(self._feed.dataset.items)}
        columns = np.array([place[self.split.data.dataset.items[one]] for one in chosen.tolist()], np.intp)
        return self.model.score(of_users)[:, columns]

    def recommend(self, users: str | Sequence[str], k: int = 10) -> pl.DataFrame:
        """Recommend items that users have not had in training; `FittedModel.recommend` has the columns."""
        names = [users] if isinstance(users, str) else list(users)
        return recommendations(self._feed, names, self.model.score(places(self.split, names)[0]), k)

    def vectors(self, users: Sequence[str]) -> NDArray[np.floating]:
        """Return users' factors, by which a saved model scores them; shape (users, factors).

        Raises
        ------
        ConfigError
            Users of the model have no factors.
        DataError
            There is no such user.
        """
        of_users, _ = places(self.split, users)
        return self.model.user_vectors(of_users)

    def save(self, folder: str | Path) -> Path:
        """Write what the model learned of items into a folder, which `coterie.load_model` reads, and return the folder.

        The folder holds no user, no history and no user's factors.

        Raises
        ------
        ConfigError
            The model scores by what it holds of the users of its training.
        DataError
            The folder holds other files.
        """
        dataset = self.split.data.dataset
        about = {
            "label": self.model.label,
            "dataset": dataset.name,
            "users": len(dataset.users),
            "split": self.split.settings.kind,
            "split_sha256": self.split.sha256,
            "metrics": self._metrics,
        }
        limits = None
        if isinstance(self.model, PREDICTORS):
            ratings = self._feed.training(ratings=True).rated()
            limits = float(ratings.min()), float(ratings.max())
        return central_of(self.model, self._feed.dataset.items, about, limits).save(folder)

    def __repr__(self) -> str:
        return f"{self.model.label} on {self.split!r}"


def places(
    split: DataSplit, users: Sequence[str], items: Sequence[str] | None = None
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the positions of users and of items in a data set.

    Raises
    ------
    DataError
        There is no such user or item; names the nearest.
    """
    dataset = split.data.dataset
    of_items = (
        np.arange(len(dataset.items)) if items is None else _found(items, dataset.items, "item", dataset.name)
    )
    return _found(users, dataset.users, "user", dataset.name), of_items


def _found(asked: Sequence[str], keys: Sequence[str], what: str, name: str) -> NDArray[np.intp]:
    if isinstance(asked, str):
        raise DataError(f"{what}s are {asked!r}; expected a list of {what}s")
    place = {key: at for at, key in enumerate(keys)}
    for one in asked:
        if one not in place:
            near = nearest(str(one), keys)
            raise DataError(
                f"{name} has no {what} {one!r}; it has {len(keys)}",
                hint=f"did you mean {near!r}?" if near else f"such as {', '.join(map(repr, keys[:3]))}",
            )
    return np.array([place[one] for one in asked], np.intp)


def recommendations(feed: Feed, users: Sequence[str], scores: NDArray[np.floating], k: int) -> pl.DataFrame:
    """Return the best items that users have not had in training.

    Parameters
    ----------
    feed : Feed
        The data, divided.
    users : sequence of str
    scores : ndarray of float, shape (users, items)
        Scores of the feed's items.
    k : int

    Raises
    ------
    ConfigError
        ``k`` is below 1.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ConfigError(f"k is {k!r}; expected a whole number of at least 1")
    dataset = feed.dataset
    titles = dataset.item_titles
    title_of = {} if titles is None else dict(zip(dataset.items, titles, strict=True))
    place = {key: at for at, key in enumerate(dataset.users)}
    train = feed.split.train
    seen = Interactions(
        len(dataset.users), len(dataset.items), dataset.user[train], dataset.item[train]
    ).items_of
    rows: list[dict[str, Any]] = []
    for user, own in zip(users, scores, strict=True):
        items, values = best_unseen(dataset.items, own, set(seen[place[user]].tolist()), k)
        rows += [
            {"user": user, "rank": rank, "item": item, "title": title_of.get(item), "score": value}
            for rank, (item, value) in enumerate(zip(items, values, strict=True), start=1)
        ]
    return records_frame(rows, _COLUMNS)
