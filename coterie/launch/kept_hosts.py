"""Hosts' sides of a run over services after its end, made again from the files in its folder.

Whoever trained on this machine holds the data, the model and what every host keeps of its users: scores are computed as
the hosts compute them.  Nothing is started, asked or written here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.data.keyed_order import key_hash
from coterie.errors import CertificateError, RunError
from coterie.launch.released_model import FinalModel
from coterie.parties.kept_latents import KeptLatents
from coterie.rounds.plan_hash import plan_hash
from coterie.rounds.sides import Arrays, HostSide, combining
from coterie.store.client import load_users
from coterie.store.private_rows import read_rows
from coterie.store.reading import read_store
from coterie.studies.run_data import Feed
from coterie.systems.private_sides import planned_host_side
from coterie.systems.shared.host_data import HostData
from coterie.wire.v1.orchestrator_pb2 import RunPlan

__all__ = ["HostScores", "kept_sides"]


@dataclass(frozen=True, eq=False)
class HostScores:
    """Scores by hosts' sides and a model; it can be handed to other processes.

    Parameters
    ----------
    sides : sequence of HostSide
        Of the hosts that have users.
    hosted : sequence of ndarray of int
        Users of each of these hosts, ascending, by position in the data.
    model : mapping of str to ndarray of float32
    columns : ndarray of int, shape (I,)
        Positions of the data's items in the model.
    """

    sides: Sequence[HostSide]
    hosted: Sequence[NDArray[np.integer]]
    model: Mapping[str, NDArray[np.float32]]
    columns: NDArray[np.integer]

    @classmethod
    def of_feed(
        cls,
        feed: Feed,
        hosts: int,
        sides: Sequence[HostSide],
        model: Mapping[str, NDArray[np.float32]],
        items: Sequence[str],
    ) -> HostScores:
        """Return the scores of hosts that have users, by a model whose items are in some order."""
        user = feed.dataset.user
        hosted = [np.unique(user[feed.host[user] == number]) for number in range(hosts)]
        place = {key: at for at, key in enumerate(items)}
        columns = np.array([place[key] for key in feed.dataset.items], np.intp)
        return cls(sides, [own for own in hosted if len(own)], model, columns)

    def of(self, users: NDArray[np.integer]) -> NDArray[np.float32]:
        """Return the scores of the data's items for users, (users, I); 0 for users who belong to no host."""
        table = np.zeros((len(users), len(self.columns)), np.float32)
        for side, own in zip(self.sides, self.hosted, strict=True):
            at = np.minimum(np.searchsorted(own, users), len(own) - 1)
            for row in np.flatnonzero(own[at] == users).tolist():
                table[row] = side.recommend(self.model, int(at[row]))[self.columns]
        return table


def kept_sides(final: FinalModel, feed: Feed, states: Mapping[str, Path], hosts: int) -> list[HostSide]:
    """Return the sides of the hosts that have users, in their order, with private state of the chosen version.

    Parameters
    ----------
    final : FinalModel
        The run's model; scores are in the order of its items.
    feed : Feed
        The run's data.
    states : mapping of str to Path
        State folder of each process, by party.
    hosts : int
        Number of client hosts.

    Raises
    ------
    RunError
        A host's store or private state cannot be read, or the items are not those of the data.
    """
    place = {key: at for at, key in enumerate(final.items)}
    if place.keys() != set(feed.dataset.items):
        raise RunError(f"the items of run {final.plan.run_id} are not those of the data")
    position = np.array([place[key] for key in feed.dataset.items], np.int64)
    sides = []
    for number in range(hosts):
        data = feed.hosted(number)
        if data.users:
            own = replace(data, items=final.items, item=position[data.item])
            sides.append(_side(final.plan, final.version, own, states[f"client/host-{number}"]))
    return sides


def _side(plan: RunPlan, version: int, data: HostData, state: Path) -> HostSide:
    """Return a host's side with the rows that the host stored."""
    stored = read_store(state / "client.db", load_users)
    place = {name: at for at, name in enumerate(stored)}
    if missing := next((name for name in data.users if name not in place), None):
        raise RunError(
            f"the store of {state} has no user {missing!r}", hint="the folder of the run is not whole"
        )
    order = np.array([place[name] for name in data.users], np.intp)

    def keep(initial: Arrays) -> Arrays:
        # The files have their rows in the order of the store.
        before = {name: _in_order(array, order, len(stored)) for name, array in initial.items()}
        rows = read_rows(state / "private", plan_hash(plan), version, before)
        return {name: np.ascontiguousarray(array[order]) for name, array in rows.items()}

    side = planned_host_side(plan, data, key_hash(data.users, plan.seed), keep)
    combines = combining(side)
    if combines is not None:
        try:
            latents = KeptLatents(state, plan.run_id).load()
        except CertificateError as error:
            raise RunError(error.message, hint=error.hint) from error
        if latents is not None:
            combines.take_latents(latents.latents)
    return side


def _in_order(rows: NDArray[np.generic], order: NDArray[np.intp], count: int) -> NDArray[np.generic]:
    """Return rows at their users' positions in the store, zero elsewhere."""
    found = np.zeros((count, *rows.shape[1:]), rows.dtype)
    found[order] = rows
    return found
