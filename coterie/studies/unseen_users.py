"""Users who never train: held out of a run whole, and served from its model by their own data afterwards.

The trained users of the same run are measured twice: by what their hosts keep of them, and as if they had never
trained.  The first difference is the cost of folding in, the second that of not having been in the sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.data import Split
from coterie.data.keyed_order import key_hash
from coterie.errors import RunError
from coterie.rounds.sides import HostSide
from coterie.rounds.training import Training
from coterie.studies.host_scores import host_scores
from coterie.studies.in_process import InProcess, train_in_process
from coterie.studies.run_data import Feed
from coterie.studies.run_plan import run_plan
from coterie.systems.registry import folded_in

__all__ = ["ServedUsers", "chosen_users", "of_users", "served", "with_few"]

_DRAWN, _FEW = 11, 12
"""First element of the key under which users, and items that they bring, are drawn."""


@dataclass(frozen=True, eq=False)
class ServedUsers:
    """Scores of all items for every user of a data set, after a run in which some users took no part.

    Attributes
    ----------
    kept : ndarray of float32, shape (U, I)
        By what the hosts of trained users keep; of users who never trained as in ``folded``.
    folded : ndarray of float32, shape (U, I)
        By each user's data and the model alone.
    few : mapping of int to ndarray of float32, shape (U, I)
        The same where users who never trained bring at most so many of their training items; 0 for trained users.
    made : InProcess
        The run.
    """

    kept: NDArray[np.float32]
    folded: NDArray[np.float32]
    few: Mapping[int, NDArray[np.float32]]
    made: InProcess


def chosen_users(feed: Feed, share: float) -> NDArray[np.bool_]:
    """Draw users who never train with the seed of a feed, bool (U,): a share of those with interactions."""
    users = np.unique(feed.dataset.user)
    rng = np.random.default_rng(np.random.SeedSequence(feed.seed, spawn_key=(_DRAWN,)))
    found = np.zeros(len(feed.dataset.users), np.bool_)
    found[rng.choice(users, round(share * len(users)), replace=False)] = True
    return found


def of_users(feed: Feed, chosen: NDArray[np.bool_]) -> Feed:
    """Return a feed with the interactions of some users only; users and items keep their numbers."""
    return _rows(feed, chosen[feed.dataset.user])


def _rows(feed: Feed, own: NDArray[np.bool_]) -> Feed:
    data = feed.dataset
    time = None if data.time is None else data.time[own]
    rows = dataclasses.replace(
        data, user=data.user[own], item=data.item[own], rating=data.rating[own], time=time
    )
    return dataclasses.replace(
        feed, dataset=rows, positive=feed.positive[own], split=Split(feed.split.part[own])
    )


def with_few(feed: Feed, most: int) -> Feed:
    """Return a feed in which users have at most so many training items, drawn with the seed of the feed."""
    rng = np.random.default_rng(np.random.SeedSequence(feed.seed, spawn_key=(_FEW, most)))
    order = rng.permutation(len(feed.dataset))
    order = order[np.argsort(feed.dataset.user[order], kind="stable")]
    order = order[feed.split.train[order]]
    user = feed.dataset.user[order]
    # Position of each row among those of its user.
    rank = np.arange(len(order)) - np.searchsorted(user, user)
    kept = ~feed.split.train
    kept[order[rank < most]] = True
    return _rows(feed, kept)


def served(
    run: RunSettings, feed: Feed, seed: int, unseen: NDArray[np.bool_], few: Sequence[int] = ()
) -> ServedUsers:
    """Train a run without some users, and return every user's scores by the version that the run chooses.

    Parameters
    ----------
    run : RunSettings
        Of a system that serves users who never took part (`System.folds_in`).
    feed : Feed
        Data of all users.
    seed : int
    unseen : ndarray of bool, shape (U,)
        Users who never train.
    few : sequence of int
        Numbers of items that users who never train are let bring at most, for `ServedUsers.few`.

    Raises
    ------
    RunError
        The run fails.
    """
    trained = of_users(feed, ~unseen)
    found: list[tuple[NDArray[np.float32], Mapping[str, NDArray[np.float32]]]] = []

    def keep(state: Training, hosts: Sequence[HostSide], model: Mapping[str, NDArray[np.float32]]) -> None:
        if state.best == len(state.evaluations) - 1:
            copied = {name: array.copy() for name, array in model.items()}
            found[:] = [(host_scores(trained, run.federation.hosts, hosts, model), copied)]

    made = train_in_process(
        run, trained, run_id="unseen-users", seed=seed, see=lambda _: None, on_evaluation=keep
    )
    if not found:
        raise RunError("the run ended before its first evaluation")
    kept, model = found[0]
    folded = _folded(run, feed, seed, model)
    kept[unseen] = folded[unseen]
    outside = of_users(feed, unseen)
    by_few = {most: _folded(run, with_few(outside, most), seed, model) for most in few}
    return ServedUsers(kept, folded, by_few, made)


def _folded(
    run: RunSettings, feed: Feed, seed: int, model: Mapping[str, NDArray[np.float32]]
) -> NDArray[np.float32]:
    """Return the scores of all users as if none had trained, float32 (U, I)."""
    together = dataclasses.replace(feed, host=np.zeros_like(feed.host))
    data = together.hosted(0)
    plan = run_plan(run, run_id="unseen-users", seed=seed, attributes=feed.attribute_names)
    side = folded_in(plan.system, plan.settings, data, key_hash(data.users, plan.seed), plan.seed, model)
    return host_scores(together, 1, [side], model)
