"""Metrics of single users of a run that is trained in one process, for the paired comparison of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.rounds.sides import HostSide
from coterie.rounds.training import Training
from coterie.studies.in_process import InProcess, OnEvaluation, train_in_process
from coterie.studies.run_data import Feed

__all__ = ["trained_with_values", "values_of_users"]

_Values = dict[str, NDArray[np.float64]]


def trained_with_values(
    settings: RunSettings, feed: Feed, seed: int, on_best: OnEvaluation = lambda *_: None
) -> tuple[InProcess, _Values]:
    """Train a run in this process and return it with each user's metrics at the version that counts.

    Parameters
    ----------
    settings : RunSettings
        Settings of a run of a system in rounds.
    feed : Feed
    seed : int
    on_best : callable
        Receives the state of training, the hosts and the version measured, whenever a version is the best so far.

    Returns
    -------
    made : InProcess
    values : dict of str to ndarray of float64, shape (U,)
        As `values_of_users`.

    Raises
    ------
    RunError
        When the run fails; the message says why.
    """
    kept: _Values = {}

    def keep(state: Training, hosts: Sequence[HostSide], model: Mapping[str, NDArray[np.float32]]) -> None:
        if state.chosen is not None and state.best == len(state.evaluations) - 1:
            kept.clear()
            kept.update(values_of_users(feed, settings.federation.hosts, hosts))
            on_best(state, hosts, model)

    made = train_in_process(settings, feed, run_id="table", seed=seed, see=lambda _: None, on_evaluation=keep)
    return made, kept


def values_of_users(feed: Feed, hosts: int, sides: Sequence[HostSide]) -> _Values:
    """Return each user's metrics as hosts last measured them, in the data set's order; NaN where there is none.

    Parameters
    ----------
    feed : Feed
    hosts : int
        Number of hosts of the run.
    sides : sequence of HostSide
        Sides of the hosts that have users.
    """
    data = feed.dataset
    found: _Values = {}
    remaining = iter(sides)
    for number in range(hosts):
        users = np.unique(data.user[feed.host[data.user] == number])
        if len(users):
            for name, values in next(remaining).measured.items():
                found.setdefault(name, np.full(len(data.users), np.nan))[users] = values
    return found
