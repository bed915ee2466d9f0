"""Baselines for FedNCF: same data, same split, same metrics."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.evaluation.central import Als
from coterie.evaluation.leave_one_out import CHOOSE_BY
from coterie.evaluation.selection import SelectedModel, Selection
from coterie.studies.judges import one_held_out
from coterie.studies.reference import Reference
from coterie.studies.run_data import Feed
from coterie.systems.fedncf.central import CentralNcf, CentralSettings, train
from coterie.systems.fedncf.networks import scores
from coterie.systems.fedncf.settings import FedNcfSettings

__all__ = ["references", "train_central"]


def references(settings: RunSettings, feed: Feed, seed: int) -> dict[str, Reference]:
    """Train and measure the baselines of a run of FedNCF.

    Parameters
    ----------
    settings : RunSettings
        Settings of the run, whose model is also trained with all data in one place, for at most as many passes and with
        the step size and batches of `CentralSettings`.
    feed : Feed
    seed : int

    Returns
    -------
    dict
        ``ncf``; ``als`` where the package ``implicit`` is installed.
    """
    rows = {"ncf": _central(feed, settings.table(FedNcfSettings), settings.rounds.passes, seed)}
    if not Als.objection(len(feed.dataset.items)):
        measure = one_held_out(settings, feed)
        rows["als"] = Reference(dict(measure(Als(seed=seed).fit(feed.training()).score)), [])
    return rows


def _central(feed: Feed, settings: FedNcfSettings, epochs: int, seed: int) -> Reference:
    central = CentralSettings(settings.architecture, negatives=settings.negatives)
    trained = train_central(feed, central, epochs, seed)
    history = [
        {"epoch": one["step"], "train_loss": one["train_loss"], "metrics": dict(one["metrics"])}
        for one in trained.history
    ]
    return Reference(
        dict(trained.metrics), history, "NCF, centralised", "the same model with all data in one place"
    )


def train_central(feed: Feed, settings: CentralSettings, epochs: int, seed: int) -> SelectedModel:
    """Train a model of NCF with all data in one place, evaluating it after each epoch.

    Parameters
    ----------
    feed : Feed
    settings : CentralSettings
    epochs : int
        Largest number of epochs; training ends earlier where validation stops improving.
    seed : int
    """
    holdout = feed.leave_one_out()
    selection = Selection(holdout)

    def evaluate(epoch: int, model: CentralNcf, loss: float) -> float:
        def score(users: NDArray[np.intp], wanted: NDArray[np.int32] | None = None) -> NDArray[np.floating]:
            return scores(settings.architecture, model.items, model.network, model.users[users], wanted)

        return selection.see(epoch, score, score, train_loss=loss)[CHOOSE_BY]

    train(holdout.training(), holdout.n_items, settings, epochs=epochs, seed=seed, on_epoch=evaluate)
    return selection.trained()
