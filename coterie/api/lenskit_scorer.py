"""Scorer for pipelines of LensKit: any federated system or central model as one of LensKit's components.

LensKit comes with the extra ``lenskit``; nothing else of Coterie imports this module.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import BaseModel, Field, model_validator

from coterie.api.data import Data, load
from coterie.api.federated_run import FederatedRun
from coterie.api.recommenders import CentralRecommender, FederatedRecommender, Recommender, models
from coterie.errors import ConfigError, DataError, PreflightError, nearest
from coterie.evaluation.central import PREDICTORS, Central, Interactions

try:
    from lenskit.data import Dataset, ItemList, QueryInput, RecQuery
    from lenskit.pipeline import Component
    from lenskit.training import Trainable, TrainingOptions
except ImportError as error:
    raise PreflightError(
        f"the scorer for LensKit needs {error.name}", hint="pip install 'coterie[lenskit]'"
    ) from error

__all__ = ["CoterieScorer", "CoterieScorerConfig"]

_KINDS = ("leave-random-out", "random")


class CoterieScorerConfig(BaseModel, extra="forbid"):
    """Settings of `CoterieScorer`.

    Attributes
    ----------
    recommender : str
        Name of a class of ``coterie.models()``, such as ``FedNCF`` or ``EASE``.
    keys : dict
        Keywords of that class.
    seed : int
        Seed of the split and of what is trained.
    split : str, optional
        What a federated system holds out of LensKit's training data to choose its version by, as ``split.kind``: unless
        given, random items, two of each user where the system is measured by one.  Central models learn from all.
    in_process : bool
        Whether a federated system trains in this process; otherwise over services on this machine.
    hosts : int, optional
        Number of client hosts of a federated system.
    output : str
        Folder in which runs of federated systems get folders of their own.
    """

    recommender: str
    keys: dict[str, Any] = Field(default_factory=dict)
    seed: int = Field(default=0, ge=0)
    split: str | None = None
    in_process: bool = True
    hosts: int | None = Field(default=None, ge=1)
    output: str = "runs"

    @model_validator(mode="after")
    def _makes_one(self) -> CoterieScorerConfig:
        self.make()
        return self

    def make(self) -> Recommender:
        """Return the recommender.

        Raises
        ------
        ConfigError
            There is none of that name, it has no scores, or a keyword is wrong.
        """
        found = models().get(self.recommender)
        if found is None:
            guess = nearest(self.recommender, models())
            raise ConfigError(
                f"there is no recommender {self.recommender!r}; `coterie.models()` lists them",
                hint=f"did you mean {guess!r}?" if guess else None,
            )
        made = found(**self.keys)
        if isinstance(made, FederatedRecommender) and not made.system.in_rounds:
            raise ConfigError(f"{made!r} is not trained in rounds and gives no scores of all items")
        return made


class _Fitted(Protocol):
    """What has learned: scores for users of the training, and for others where it has any."""

    items: tuple[str, ...]
    users: frozenset[str]

    def of_user(self, user: str) -> NDArray[np.float32]:
        """Return scores of all items for a user of the training, (I,)."""
        ...

    def of_history(self, rated: dict[str, float | None]) -> NDArray[np.float32] | None:
        """Return scores of all items for somebody else with a history, ratings by item; None where there are none."""
        ...


class CoterieScorer(Component[ItemList], Trainable):
    """LensKit component that scores items by a federated system or a central model of Coterie.

    It trains with its pipeline.  A user of the training data is scored by what was learned of the user, somebody else
    by the history of the query where the recommender has scores for people who were not in training.  Everything else
    is NaN, as LensKit expects it: unknown items, and people without a history that is known.

    Parameters
    ----------
    config : CoterieScorerConfig
        Or its fields as keywords.

    Attributes
    ----------
    fitted_
        What has learned; absent before training.

    Raises
    ------
    ConfigError
        There is no such recommender, or its keywords are wrong.
    """

    config: CoterieScorerConfig

    def train(self, data: Dataset, options: TrainingOptions | None = None) -> None:
        """Learn from a data set of LensKit; identifiers of users and items are compared as text.

        Raises
        ------
        ConfigError, DataError
            The recommender does not suit the data.
        RunError
            The run of a federated system ended without a result.
        """
        if hasattr(self, "fitted_") and options is not None and not options.retrain:
            return
        table = _table(data)
        recommender = self.config.make()
        if isinstance(recommender, CentralRecommender):
            self.fitted_: _Fitted = _Central(recommender, self.config.seed, table)
        elif isinstance(recommender, FederatedRecommender):
            self.fitted_ = _Federated(_run(recommender, self.config, table))
        place = {key: at for at, key in enumerate(self.fitted_.items)}
        self.items_ = data.items
        # Items that nobody has are in no model.
        self._columns = np.array([place.get(str(one), -1) for one in data.items.ids()], np.intp)

    def __call__(self, query: QueryInput, items: ItemList) -> ItemList:
        """Return the items with scores."""
        asked = RecQuery.create(query)
        found = np.full(len(items), np.nan, np.float32)
        scores = self._scores(asked)
        if scores is not None:
            numbers = np.asarray(items.numbers(vocabulary=self.items_, missing="negative"))
            columns = np.where(numbers >= 0, self._columns[numbers], -1)
            known = columns >= 0
            found[known] = scores[columns[known]]
        return ItemList(items, scores=found)

    def _scores(self, query: RecQuery) -> NDArray[np.float32] | None:
        if query.user_id is not None and str(query.user_id) in self.fitted_.users:
            return self.fitted_.of_user(str(query.user_id))
        history = query.query_items
        if history is None:
            return None
        ratings = history.field("rating")
        values = [None] * len(history) if ratings is None else [float(one) for one in ratings]
        known = set(self.fitted_.items)
        rated = {
            str(item): value for item, value in zip(history.ids(), values, strict=True) if str(item) in known
        }
        return self.fitted_.of_history(rated) if rated else None


class _Central:
    """A central model that has learned from all of a table."""

    def __init__(self, recommender: CentralRecommender, seed: int, table: pl.DataFrame) -> None:
        self.items = tuple(table["item"].unique(maintain_order=True).to_list())
        names = table["user"].unique(maintain_order=True).to_list()
        self._number = {name: at for at, name in enumerate(names)}
        self.users = frozenset(names)
        self._place = {key: at for at, key in enumerate(self.items)}
        self._predicts = recommender.model in PREDICTORS
        if self._predicts and "rating" not in table.columns:
            raise DataError(f"{recommender!r} predicts ratings, and LensKit's training data has none")
        self._model: Central = recommender.model.of(recommender.hyperparameters, seed).fit(
            Interactions(
                len(names),
                len(self.items),
                np.array([self._number[one] for one in table["user"]], np.int64),
                np.array([self._place[one] for one in table["item"]], np.int64),
                table["rating"].to_numpy() if self._predicts else None,
            )
        )

    def of_user(self, user: str) -> NDArray[np.float32]:
        """Return scores of all items for a user of the training, (I,)."""
        return self._model.score(np.array([self._number[user]]))[0]

    def of_history(self, rated: dict[str, float | None]) -> NDArray[np.float32] | None:
        """Return scores of all items for somebody else with a history; None where the model has none."""
        own = {item: value for item, value in rated.items() if not self._predicts or value is not None}
        if not own or not self._model.folds_in:
            return None
        item = np.array([self._place[one] for one in own], np.int64)
        values = np.array(list(own.values()), np.float64) if self._predicts else None
        person = Interactions(1, len(self.items), np.zeros(len(item), np.int64), item, values)
        return self._model.score_people(person)[0]


class _Federated:
    """What scores are computed from after a run of a federated system; workers of LensKit are sent it."""

    def __init__(self, run: FederatedRun) -> None:
        dataset = run.split.data.dataset
        self.items = tuple(dataset.items)
        self._number = {name: at for at, name in enumerate(dataset.users)}
        self.users = frozenset(dataset.users)
        self.folder = run.folder
        self._scores = run.host_scores
        self._model = run.model

    def of_user(self, user: str) -> NDArray[np.float32]:
        """Return scores of all items for a user of the training, (I,)."""
        return self._scores.of(np.array([self._number[user]]))[0]

    def of_history(self, rated: dict[str, float | None]) -> NDArray[np.float32] | None:
        """Return scores of all items for somebody else with a history; None where the system has none."""
        if not self._model.takes_histories:
            return None
        own = {item: value for item, value in rated.items() if value is not None}
        if self._model.rating_range is None:
            return self._model.score(list(rated), self.items)
        return self._model.score(own, self.items) if own else None


def _run(recommender: FederatedRecommender, config: CoterieScorerConfig, table: pl.DataFrame) -> FederatedRun:
    data = load(table, name="lenskit")
    split = data.split(config.split or _usual(recommender, data), seed=config.seed)
    return recommender.fit(split, hosts=config.hosts, in_process=config.in_process, output=config.output)


def _usual(recommender: FederatedRecommender, data: Data) -> str:
    """Return one held-out item of each user where the system is measured by that, else random ones."""
    try:
        recommender.settings(data.split(_KINDS[0]))
    except ConfigError:
        return _KINDS[1]
    return _KINDS[0]


def _table(data: Dataset) -> pl.DataFrame:
    """Return the interactions of a data set, each pair once, with texts as identifiers."""
    given = data.interaction_matrix(format="pandas", original_ids=True)
    table = {name: [str(one) for one in given[f"{name}_id"]] for name in ("user", "item")}
    columns: dict[str, Any] = dict(table)
    if "rating" in given.columns:
        columns["rating"] = given["rating"].to_numpy(np.float64)
    if "timestamp" in given.columns:
        columns["time"] = _seconds(given["timestamp"].to_numpy())
    return pl.DataFrame(columns)


def _seconds(times: NDArray[Any]) -> NDArray[np.int64]:
    """Return times in seconds since 1970, from times or from numbers of seconds."""
    if np.issubdtype(times.dtype, np.datetime64):
        times = times.astype("datetime64[s]")
    return times.astype(np.int64)
