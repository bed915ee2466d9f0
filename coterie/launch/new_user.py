"""Recommendations to a person who never took part in a run: computed here, from a finished model and the person's file.

The person's ratings are in the memory of this process and nowhere else: no service is started or asked, and no file,
store or log is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.data.keyed_order import key_hash
from coterie.data.own_ratings import SHOWN, OwnRatings, read_own_ratings
from coterie.evaluation.holdout import TRAIN
from coterie.evaluation.unseen import best_unseen
from coterie.launch.local_run import LocalRun, Suggestion
from coterie.launch.released_model import finished_plan, released
from coterie.systems.registry import check_folds_in, folded_in, ratings_of, system_named
from coterie.systems.shared.host_data import HostData

__all__ = ["NewRecommendation", "recommend_to_new", "scores_of_new"]

_NAME = "new user"
"""Name from which the person's draws are derived: the same file gives the same recommendations."""


@dataclass(frozen=True)
class NewRecommendation:
    """Suggestions to a person who never took part, best first, and what was read of the person's file.

    Attributes
    ----------
    run, system : str
    version : int
        Version of the model.
    known, rated : int
        Items of the file that the run knows, and those of them whose ratings count; 0 of the latter where the system
        counts items, whatever their rating.
    repeated : int
        Rows that a later row of the same item took the place of.
    unknown : int
        Items of the file that the run does not know.
    unknown_items : tuple of str
        The first of these.
    suggestions : tuple of Suggestion
        Empty where the run learned nothing of the known items.
    """

    run: str
    system: str
    version: int
    known: int
    rated: int
    repeated: int
    unknown: int
    unknown_items: tuple[str, ...]
    suggestions: tuple[Suggestion, ...]


def recommend_to_new(run: LocalRun, file: Path, k: int) -> NewRecommendation:
    """Return the ``k`` best items that are not in a person's file, by the model of a finished run.

    Parameters
    ----------
    run : LocalRun
    file : Path
        As `read_own_ratings` takes it.
    k : int

    Raises
    ------
    ConfigError
        The run's system has nothing for new users.
    DataError
        The file cannot be used.
    RunError
        The run has no final model, or one that is sealed.
    """
    plan = finished_plan(run)
    check_folds_in(plan.system)
    final = released(run)
    limits = ratings_of(plan.system, plan.settings)
    own = read_own_ratings(file, final.items, rating_range=limits)
    found = scores_of_new(plan.system, plan.settings, plan.seed, final.items, final.model, own)
    items, scores = best_unseen(final.items, found, set(own.item.tolist()), k)
    titles = run.titles()
    return NewRecommendation(
        run.run_id,
        system_named(plan.system).title,
        final.version,
        len(own.item),
        0 if limits is None else int(np.isfinite(own.rating).sum()),
        own.repeated,
        len(own.unknown),
        own.unknown[:SHOWN],
        tuple(
            Suggestion(rank, item, titles.get(item), score)
            for rank, (item, score) in enumerate(zip(items, scores, strict=True), start=1)
        ),
    )


def scores_of_new(
    system: str,
    settings: str,
    seed: int,
    items: tuple[str, ...],
    model: Mapping[str, NDArray[np.float32]],
    own: OwnRatings,
) -> NDArray[np.float32]:
    """Return the scores of all items for a person who never took part, float32 (I,).

    Parameters
    ----------
    system, settings, seed
        As in the plan of the run.
    items : tuple of str
        Keys of the model's items.
    model : mapping
        As participants fetched it.
    own : OwnRatings

    Raises
    ------
    ConfigError, DataError
        As `folded_in`.
    """
    side = folded_in(system, settings, _data(own, items), key_hash([_NAME], seed), seed, model)
    return side.recommend(model, 0)


def _data(own: OwnRatings, items: tuple[str, ...]) -> HostData:
    """Return the person's items as the training part of the only user of a host."""
    nobody = np.zeros(len(own.item), np.int64)
    return HostData([_NAME], items, nobody, own.item, np.full(len(own.item), TRAIN, np.int64), own.rating)
