"""DRIFT's forms and SAROS trained in one process on a divided data set, for tables that train many of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from coterie.errors import RunError
from coterie.evaluation.holdout import TRAIN, headline
from coterie.evaluation.selection import SelectedModel, better
from coterie.evaluation.threads import one_thread
from coterie.studies.run_data import Feed
from coterie.systems.drift import central
from coterie.systems.drift.blocks import Stream
from coterie.systems.drift.rankings import CHOOSE_UNSEEN_BY, Ranked, measure
from coterie.systems.drift.sequential import EpochDone, run_in_process
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.drift.shielded import run_shielded
from coterie.systems.drift.study.references import in_time_order, trivial_scores

__all__ = ["Trainer", "owner_streams", "rank_here", "train_here"]

Trainer = Literal["published", "shielded", "saros"]
"""What is trained: a form of DRIFT, or the centralised form."""


def owner_streams(feed: Feed) -> tuple[list[Stream], list[NDArray[np.intp]]]:
    """Return each owner's training interactions, user by user and each user's by time, and its items."""
    train = feed.split.part == TRAIN
    member = feed.partition.member
    streams = [in_time_order(feed, train & held[feed.dataset.item]) for held in member.T]
    return streams, [np.nonzero(held)[0] for held in member.T]


def train_here(what: Trainer, options: DriftSettings, feed: Feed, seed: int) -> SelectedModel:
    """Train, measure every epoch, and return the one with the best ``validation_ndcg@10``.

    SAROS has twice ``options.epochs``, because an item with two owners is trained on twice in an epoch of DRIFT.  No
    training ends early: with small steps the metric stands still for some epochs before it rises.

    Parameters
    ----------
    what : {"published", "shielded", "saros"}
    options : DriftSettings
    feed : Feed
    seed : int
        At least 0.

    Returns
    -------
    SelectedModel
        With the values of single users.  A model that diverges has no figures, and ``facts`` says why.
    """
    kept = _Kept(feed, options)
    with one_thread(), np.errstate(over="ignore", invalid="ignore"):
        try:
            _train(what, options, feed, seed, kept.see)
        except RunError as error:
            return SelectedModel([{"step": 0, "metrics": {}}], 0, {}, facts={"failed": str(error)})
    return kept.outcome()


def _train(what: Trainer, options: DriftSettings, feed: Feed, seed: int, see: EpochDone) -> None:
    shape, epochs = (len(feed.dataset.users), len(feed.dataset.items)), options.epochs
    if what == "saros":
        stream = in_time_order(feed, feed.split.part == TRAIN)
        central.train(stream, *shape, options, epochs=2 * epochs, seed=seed, on_epoch=see)
        return
    streams, holdings = owner_streams(feed)
    if what == "published":
        run_in_process(streams, *shape, options, epochs=epochs, seed=seed, holdings=holdings, on_epoch=see)
        return
    run_shielded(
        streams,
        *shape,
        options,
        epochs=epochs,
        seed=seed,
        k_min=options.k_min,
        window=options.window,
        holdings=holdings,
        on_epoch=see,
    )


def rank_here(name: str, feed: Feed, seed: int) -> SelectedModel:
    """Measure ``random``, ``popularity`` or ``positive_share``, with the values of single users."""
    measured = feed.holdout().measure(trivial_scores(name, feed, seed))
    # These scores order items; they are no logits, so the loss says nothing about them.
    per_user = {key: values for key, values in measured.items() if not key.endswith("_loss")}
    return _selected([{"step": 0, "metrics": headline(per_user)}], 0, per_user, {})


def _selected(
    history: Sequence[Mapping[str, Any]],
    best: int,
    per_user: Mapping[str, NDArray[np.float64]],
    facts: Mapping[str, Any],
) -> SelectedModel:
    users = {name: int(np.count_nonzero(~np.isnan(values))) for name, values in per_user.items()}
    return SelectedModel(history, best, headline(dict(per_user)), users, per_user, facts)


class _Kept:
    """Versions that were measured, and the best of them with the values of its users."""

    def __init__(self, feed: Feed, options: DriftSettings) -> None:
        self._holdout = feed.holdout()
        self._options = options
        self._history: list[dict[str, Any]] = []
        self._best = 0
        self._ranked = Ranked({})

    def see(self, epoch: int, Upsilon: NDArray[np.float32], Psi: NDArray[np.float32], loss: float) -> None:
        """Measure a version."""
        ranked = measure(self._holdout, Upsilon, Psi, self._options)
        metrics = headline(ranked.metrics)
        self._history.append(
            {
                "step": epoch,
                "train_loss": loss,
                "metrics": metrics,
                "bias_weights": [ranked.unseen, ranked.items],
            }
        )
        held = self._history[self._best]["metrics"]
        if len(self._history) == 1 or better(CHOOSE_UNSEEN_BY, *_values(metrics, held)):
            self._best, self._ranked = len(self._history) - 1, ranked

    def outcome(self) -> SelectedModel:
        """Return the best version."""
        facts: dict[str, Any] = {"engine": "in one process"}
        if self._options.ranks_by_odds:
            facts["bias_weights"] = {"unseen": self._ranked.unseen, "items": self._ranked.items}
        return _selected(self._history, self._best, self._ranked.metrics, facts)


def _values(metrics: Mapping[str, float], held: Mapping[str, float]) -> tuple[float, float]:
    """Return the metric that chooses, of a version and of the best one; without a validation part the last is best."""
    if CHOOSE_UNSEEN_BY not in metrics:
        return 1.0, 0.0
    return metrics[CHOOSE_UNSEEN_BY], held[CHOOSE_UNSEEN_BY]
