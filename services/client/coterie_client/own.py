"""Give a person's own page what it shows and changes at a host of one user."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coterie.errors import ConfigError, DataError
from coterie.evaluation.holdout import TRAIN
from coterie.rounds.consent import Consent
from coterie.rounds.sides import Likeness
from coterie.rounds.stance import Stance, changed_stance, read_stance
from coterie.store import client as store
from coterie.wire.v1.orchestrator_pb2 import RunPlan
from coterie_client.agent import Agent
from coterie_client.host import Host, TakingPart

__all__ = ["OwnDevice", "require_one"]


def require_one(names: Sequence[str], source: str) -> None:
    """Require that a host has one user.

    Parameters
    ----------
    names : sequence of str
        The users that are known.
    source : str
        Where they stand, for the message.

    Raises
    ------
    ConfigError
        There is none, or several.
    """
    if len(names) == 1:
        return
    found = f"{len(names)} users" if names else "no user"
    raise ConfigError(
        f"{source}: {found}; expected one, the person whose device this is",
        hint="`coterie serve client` serves several users"
        if names
        else "`histories` names a file with the person's own history",
    )


class OwnDevice:
    """A host as the device of its only user.

    Parameters
    ----------
    host : Host
    agent : Agent
        Answers the user's calls.
    way : callable
        Returns the host's part in the run; None before it has joined.
    standing : callable
        Returns in words how the host stands to the run.
    known : callable
        As `way`, also where the host stays out of the run: what was published before can still be deleted.
    """

    def __init__(
        self,
        host: Host,
        agent: Agent,
        way: Callable[[], TakingPart | None],
        standing: Callable[[], str],
        known: Callable[[], TakingPart | None],
    ) -> None:
        self._known = known
        self.agent = agent
        self._host = host
        self._way = way
        self._standing = standing

    @property
    def names(self) -> Sequence[str]:
        """The users of the host: empty until the first start has taken in the histories."""
        return list(self._host.histories.names)

    @property
    def run(self) -> str:
        """Id of the run."""
        return self._host.settings.run

    @property
    def plan(self) -> RunPlan | None:
        """The run's plan; None before the server has told it."""
        plan = self._host.party.plan
        return plan if plan.system else None

    @property
    def consent(self) -> Consent:
        """The conditions under which the user takes part."""
        return self._host.consent

    @property
    def metrics(self) -> Sequence[str] | None:
        """Names of metrics that leave the host inside sums; None before it has joined."""
        way = self._way()
        return None if way is None else way.metrics

    @property
    def conditions(self) -> Mapping[str, bool]:
        """What must hold for the host to be healthy, each with whether it holds."""
        return self._host.runtime.conditions()

    @property
    def standing(self) -> str:
        """How the host stands to the run: ``waiting``, ``takes part``, ``stays out`` or ``ended``."""
        return self._standing()

    @property
    def stance(self) -> Stance:
        """What the person has chosen while the service runs; raises as `read_stance`."""
        return read_stance(self._host.settings.state)

    @property
    def state(self) -> str:
        """The folder with everything that this device keeps."""
        return str(self._host.settings.state)

    def choose(self, **changes: Any) -> Stance:
        """Change what the person has chosen; it holds from the next sum on.  Raises as `changed_stance`."""
        return changed_stance(self._host.settings.state, **changes)

    async def forget_published(self) -> int:
        """Have what was published beside sums deleted at the third party; return how many uploads there were.

        Raises
        ------
        DataError
            The host does not know the run yet.
        Refusal, PeerError
            The COS or the third party refuse, or cannot be reached.
        """
        way = self._known()
        if way is None:
            raise DataError("the run's server has not answered this device since its start")
        return await way.forget_published()

    def require_one(self) -> None:
        """Require that the store has one user, or none yet; raises as `require_one`."""
        if self.names:
            require_one(self.names, str(self._host.settings.state))

    def own_items(self) -> set[str]:
        """Return the keys of all items in the user's history."""
        return self._host.histories.keys(1)

    async def items(self) -> Sequence[str]:
        """Return the keys of the run's items.

        Raises
        ------
        DataError
            The host has not joined the run.
        """
        if self._way() is None:
            raise DataError("this device takes no part in the run yet, and does not know its items")
        return list((await self._host.fetch_catalogue()).items)

    async def because(self, items: Sequence[str]) -> Likeness | None:
        """Return the user's own item that is most like each of some items in the model; None where models have none."""
        way = self._way()
        return None if way is None else await way.because(1, items)

    async def keep(self, items: Sequence[str], ratings: Sequence[float | None]) -> int:
        """Add items to the user's history, all or nothing, except for those that are in it; return how many were added.

        A system whose owners get records sends them later, as it does every interaction.
        """
        held, now = self.own_items(), int(time.time())
        fresh = [
            store.Interaction(1, item, True, now, TRAIN, rating)
            for item, rating in zip(items, ratings, strict=True)
            if item not in held
        ]
        await self._host.histories.take([], fresh)
        way = self._way()
        if way is not None:
            for one in fresh:
                way.recorded(one.item)
        return len(fresh)
