"""The rows beside a run: same data, same split, same metrics."""

from __future__ import annotations

from importlib import util

import numpy as np
from numpy.typing import NDArray

from coterie.config.fedncf import FedNcfOptions
from coterie.config.run import RunSettings
from coterie.evaluation.baselines import als, from_factors, from_table, popularity, random_scores
from coterie.evaluation.leave_one_out import CHOOSE_BY, ScoreAll, ScoreCandidates
from coterie.evaluation.selection import Selection
from coterie.launch.feed import Feed
from coterie.launch.reference import Reference, references
from coterie.learning import ncf_central
from coterie.learning.ncf import scores
from coterie.learning.ncf_central import CentralModel, CentralSettings

__all__ = ["ncf_references", "reference_rows"]


def reference_rows(settings: RunSettings, feed: Feed, seed: int) -> dict[str, Reference]:
    """Train and measure the rows that stand beside a run, whatever its system."""
    if settings.system == "drift":
        return references(feed, settings.drift, seed)
    return ncf_references(feed, settings.fedncf, settings.rounds.passes, seed)


def ncf_references(feed: Feed, options: FedNcfOptions, epochs: int, seed: int) -> dict[str, Reference]:
    """Train and score what stands beside FedNCF.

    Parameters
    ----------
    feed : Feed
    options : FedNcfOptions
        The federation's; its model is trained with all data in one place, with a central trainer's own step size and
        batches.
    epochs : int
        Most passes over all data.
    seed : int

    Returns
    -------
    dict
        ``ncf``, ``popularity`` and ``random``; ``als`` where the package ``implicit`` is installed.
    """
    data, train = feed.dataset, feed.split.train
    users, items = len(data.users), len(data.items)
    known = popularity(data.item[train], feed.positive[train], items)
    rows = {
        "ncf": _central(feed, options, epochs, seed),
        "popularity": _once(feed, *from_table(np.broadcast_to(known, (users, items)))),
        "random": _once(feed, *from_table(random_scores(users, items, seed))),
    }
    if util.find_spec("implicit") is not None:
        factors = als(data.user[train], data.item[train], users, items, seed=seed)
        rows["als"] = _once(feed, *from_factors(*factors))
    return rows


def _central(feed: Feed, options: FedNcfOptions, epochs: int, seed: int) -> Reference:
    learning = options.plan().learning
    architecture, holdout = learning.architecture, feed.leave_one_out()
    selection = Selection(holdout)

    def evaluate(epoch: int, model: CentralModel, loss: float) -> float:
        def candidates(users: NDArray[np.intp], wanted: NDArray[np.int32]) -> NDArray[np.floating]:
            return scores(architecture, model.items, model.network, model.users[users], wanted)

        def everything(users: NDArray[np.intp]) -> NDArray[np.floating]:
            return scores(architecture, model.items, model.network, model.users[users])

        return selection.see(epoch, candidates, everything, train_loss=loss)[CHOOSE_BY]

    settings = CentralSettings(architecture, negatives=learning.negatives)
    ncf_central.train(
        holdout.training(), holdout.n_items, settings, epochs=epochs, seed=seed, on_epoch=evaluate
    )
    trained = selection.trained()
    history = [
        {"epoch": one["step"], "train_loss": one["train_loss"], "metrics": dict(one["metrics"])}
        for one in trained.history
    ]
    return Reference(dict(trained.metrics), history)


def _once(feed: Feed, score_candidates: ScoreCandidates, score_all: ScoreAll) -> Reference:
    """Measure what has one version only."""
    selection = Selection(feed.leave_one_out())
    selection.see(0, score_candidates, score_all)
    return Reference(dict(selection.trained().metrics), [])
