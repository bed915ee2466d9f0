"""Hosts' sides of a run over services after its end, made again from the files in its folder.

Whoever trained on this machine holds the model and what every host keeps of its users: scores are computed as the hosts
compute them.  Nothing is started, asked or written here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from coterie.config.load import load_service
from coterie.config.services import ClientSettings
from coterie.data.attributes import in_order, read_attributes
from coterie.errors import CertificateError, RunError
from coterie.evaluation.holdout import TRAIN
from coterie.launch.local_run import LocalRun
from coterie.launch.released_model import FinalModel
from coterie.parties.kept_latents import KeptLatents
from coterie.parties.stored_host import RANDOMNESS, history_arrays, preference_table, user_keys
from coterie.rounds.plan_hash import plan_hash
from coterie.rounds.sides import Arrays, HostSide, combining, scorer_of
from coterie.store import client as store
from coterie.store.packed_history import PackedHistory
from coterie.store.private_rows import read_rows
from coterie.store.reading import read_store
from coterie.studies.run_data import Feed
from coterie.systems.private_sides import planned_host_side
from coterie.systems.shared.host_data import HostData
from coterie.wire.v1.orchestrator_pb2 import RunPlan

__all__ = ["HostScores", "KeptHost", "kept_hosts"]


@dataclass(frozen=True, eq=False)
class KeptHost:
    """A client host of a finished run, as its folder keeps it.

    Parameters
    ----------
    name : str
        Name of its folder, as ``host-0``.
    data : HostData
        Its users and their interactions, in the order of its store.
    side : HostSide
        The system's side, with private state of the chosen version.
    """

    name: str
    data: HostData
    side: HostSide

    @cached_property
    def seen(self) -> Sequence[NDArray[np.integer]]:
        """Items of each user's training history, by place in the catalogue."""
        own = self.data.part == TRAIN
        user, item = self.data.user[own], self.data.item[own]
        order = np.argsort(user, kind="stable")
        return np.split(item[order], np.cumsum(np.bincount(user, minlength=len(self.data.users)))[:-1])


@dataclass(frozen=True, eq=False)
class HostScores:
    """Scores by hosts' sides and a model; it can be handed to other processes.

    Parameters
    ----------
    sides : sequence of HostSide
        Of the hosts that have users.
    hosted : sequence of ndarray of int
        Users of each of these hosts, by position in the data, in the order of its side.
    model : mapping of str to ndarray of float32
    columns : ndarray of int, shape (I,)
        Positions of the data's items in the model.
    """

    sides: Sequence[HostSide]
    hosted: Sequence[NDArray[np.integer]]
    model: Mapping[str, NDArray[np.float32]]
    columns: NDArray[np.integer]

    @classmethod
    def in_process(
        cls,
        feed: Feed,
        hosts: int,
        sides: Sequence[HostSide],
        model: Mapping[str, NDArray[np.float32]],
        items: Sequence[str],
    ) -> HostScores:
        """Return the scores after a training in one process, whose sides are built from the data itself.

        Parameters
        ----------
        feed : Feed
        hosts : int
            Hosts over which its users are spread.
        sides, model
            As for the class.
        items : sequence of str
            Keys of the model's items.
        """
        user = feed.dataset.user
        hosted = [np.unique(user[feed.host[user] == number]) for number in range(hosts)]
        return cls(sides, [own for own in hosted if len(own)], model, _columns(feed, items))

    @classmethod
    def over_services(cls, feed: Feed, hosts: Sequence[KeptHost], final: FinalModel) -> HostScores:
        """Return the scores after a run over services.

        Raises
        ------
        RunError
            Users or items of the run are not those of the data.
        """
        place = {name: at for at, name in enumerate(feed.dataset.users)}
        if set(final.items) != set(feed.dataset.items) or any(
            name not in place for host in hosts for name in host.data.users
        ):
            raise RunError(f"users and items of run {final.plan.run_id} are not those of the data")
        hosted = [np.array([place[name] for name in host.data.users], np.intp) for host in hosts]
        return cls([host.side for host in hosts], hosted, final.model, _columns(feed, final.items))

    def of(self, users: NDArray[np.integer]) -> NDArray[np.float32]:
        """Return the scores of the data's items for users, (users, I); 0 for users who belong to no host."""
        table = np.zeros((len(users), len(self.columns)), np.float32)
        for side, own in zip(self.sides, self.hosted, strict=True):
            place = {user: at for at, user in enumerate(own.tolist())}
            score = scorer_of(side, self.model, len(users))
            for row, user in enumerate(users.tolist()):
                if (at := place.get(user)) is not None:
                    table[row] = score(at)[self.columns]
        return table


def _columns(feed: Feed, items: Sequence[str]) -> NDArray[np.intp]:
    place = {key: at for at, key in enumerate(items)}
    return np.array([place[key] for key in feed.dataset.items], np.intp)


def kept_hosts(run: LocalRun, final: FinalModel) -> list[KeptHost]:
    """Return the client hosts of a finished run, by name, with private state of the chosen version.

    Parameters
    ----------
    run : LocalRun
    final : FinalModel
        Its model; scores are in the order of its items.

    Raises
    ------
    RunError
        A host's store, files or private state cannot be read.
    ConfigError, DataError
        A host's configuration or its file of attributes cannot be used.
    """
    index = {key: at for at, key in enumerate(final.items)}
    found = []
    for config in sorted(run.folder.glob("host-*/config.toml"), key=lambda path: (len(path.parts[-2]), path)):
        # The folder may have been moved, and settings of this process are not those of the host.
        loaded = load_service("client", config, environ={}, sets=[f"state={config.parent / 'state'}"])
        if isinstance(loaded.settings, ClientSettings):
            found.append(_kept_host(config.parent.name, loaded.settings, final, index))
    return found


def _kept_host(name: str, settings: ClientSettings, final: FinalModel, index: Mapping[str, int]) -> KeptHost:
    """Return a host with the rows that it stored."""
    plan = final.plan
    data = read_store(settings.state / "client.db", partial(_host_data, settings, plan, index))
    randomness = settings.state / RANDOMNESS
    if settings.seed is None and not randomness.is_file():
        raise RunError(f"{randomness} is not there", hint="the folder of the run is not whole")

    def keep(initial: Arrays) -> Arrays:
        return read_rows(settings.state / "private", plan_hash(plan), final.version, initial)

    side = planned_host_side(plan, data, user_keys(settings.state, data.users, settings.seed), keep)
    combines = combining(side)
    if combines is not None:
        try:
            latents = KeptLatents(settings.state, plan.run_id).load()
        except CertificateError as error:
            raise RunError(error.message, hint=error.hint) from error
        if latents is not None:
            combines.take_latents(latents.latents)
    return KeptHost(name, data, side)


def _host_data(
    settings: ClientSettings, plan: RunPlan, index: Mapping[str, int], connection: sa.Connection
) -> HostData:
    names = store.load_users(connection)
    held = PackedHistory(one for _, one in store.load_history(connection))
    told = None if settings.attributes is None else read_attributes(settings.attributes, "user")
    return HostData(
        names,
        tuple(index),
        *history_arrays(held.columns(lambda key: index.get(key, -1))),
        None if told is None else in_order(names, *told),
        preference_table(plan.system, len(names), store.load_preferences(connection)),
    )
