"""Finished runs that many tests read and none changes: each is trained once, by the first test that asks for it.

A run has recognisable names and values planted, transcripts of every party, the metrics pages of its end and
recommendations for a user of each host; all folders stay until the session ends.  Tests that read the runs of one
system belong to one group (`of_system`), and so to one worker: nobody trains a run a second time.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from coterie.config.run import RunSettings
from coterie.data.attributes import AttributeTable
from coterie.privacy.canaries import CanaryKit
from coterie.studies.in_process import InProcess, train_in_process
from coterie.studies.run_data import Feed, load, make_feed

from .planted import Held, ask, names_at, with_canaries
from .running import Running

FEDNCF_USERS_AT = (13, 10, 1)
"""Users of each host.  The sum of the last one is its only user's own contribution."""

USERS_AT = (12, 9, 9)
HOSTS = {"hosts": len(USERS_AT), "transcripts": True}
GROUPS_OF_20 = {"cohort": 20, "group": 20, "evaluate_every": 2}

SETTINGS: dict[str, dict[str, Any]] = {
    "drift": {
        "drift": {"theta": 2, "epochs": 3},
        "federation": {"owners": 3, "transcripts": True},
    },
    "fedncf": {
        "split": {"kind": "leave-last-out"},
        "data": {"synthetic": {"users": sum(FEDNCF_USERS_AT), "items": 60, "interactions": 500}},
        "rounds": {
            "cohort": sum(FEDNCF_USERS_AT),
            "group": sum(FEDNCF_USERS_AT),
            "passes": 4,
            "evaluate_every": 2,
        },
        "federation": HOSTS,
        "encryption": {"bits": 1024, "comparison": True},
    },
    "fedmf": {
        "split": {"kind": "random"},
        "data": {"synthetic": {"users": sum(USERS_AT), "items": 40, "interactions": 500}},
        "rounds": {**GROUPS_OF_20, "passes": 4},
        "federation": HOSTS,
        "fedmf": {"factors": 4, "min_touch": 2},
    },
    "fedgnn": {
        "split": {"kind": "random"},
        "data": {"synthetic": {"users": sum(USERS_AT), "items": 40, "interactions": 500}},
        "rounds": {**GROUPS_OF_20, "passes": 4},
        "federation": HOSTS,
        "fedgnn": {"factors": 4, "min_touch": 2, "neighbours": 6, "neighbours_after": 1, "tags": 10},
    },
    "fcf": {
        "split": {"kind": "random"},
        "data": {"synthetic": {"users": sum(USERS_AT), "items": 40, "interactions": 500}},
        "rounds": {**GROUPS_OF_20, "passes": 4},
        "federation": HOSTS,
        "fcf": {"factors": 4, "min_touch": 2},
    },
    "fedidcf": {
        "split": {"kind": "random"},
        "data": {"synthetic": {"users": sum(USERS_AT), "items": 40, "interactions": 500}},
        "rounds": {**GROUPS_OF_20, "cohorts": "all", "passes": 5},
        "federation": HOSTS,
        "fedidcf": {"factors": 4, "min_touch": 2, "factor_passes": 1, "query": 0.1},
        "encryption": {"bits": 1024, "comparison": True},
    },
    "fedmvmf": {
        "split": {"kind": "random"},
        "data": {"synthetic": {"users": sum(USERS_AT), "items": 40, "interactions": 500}},
        "mvmf": {"factors": 4, "min_touch": 2},
        "rounds": {**GROUPS_OF_20, "passes": 2},
        "federation": HOSTS,
        "encryption": {"bits": 1024, "comparison": True},
    },
}
"""Settings of the recorded runs, by system; secure sum and form (who is a member) are added."""


def of_system(system: str, *names: str) -> Any:
    """Return the group of the tests that read recorded runs of a system; with names, a parameter in that group."""
    group = pytest.mark.xdist_group(system)
    return pytest.param(*names, marks=group, id="-".join(names)) if names else group


class Recorded:
    """Trains runs when they are asked for, and keeps them.

    Parameters
    ----------
    small : callable
        Makes settings.
    federation : callable
        Makes a federation of real processes.
    """

    def __init__(self, small: Callable[..., RunSettings], federation: Callable[..., Running]) -> None:
        self._small, self._federation = small, federation
        self._held: dict[tuple[str, str, str], Held] = {}
        self._alone: dict[tuple[str, str, str], InProcess] = {}

    def settings(self, system: str, secure_sum: str = "clear", form: str = "hosts") -> RunSettings:
        """Return the settings of a run."""
        given = SETTINGS[system]
        if form == "users":
            given = {**given, "rounds": {**given["rounds"], "party_per_user": True}}
        return self._small(system=system, secure_sum=secure_sum, **given)

    def run(self, system: str, secure_sum: str = "clear", form: str = "hosts") -> Held:
        """Return a finished run.

        Parameters
        ----------
        system : str
        secure_sum : str
        form : str
            ``hosts`` or ``users``: who is a member of rounds.
        """
        key = system, secure_sum, form
        if key not in self._held:
            self._held[key] = self._train(self.settings(*key))
        return self._held[key]

    def alone(self, system: str, secure_sum: str = "clear", form: str = "hosts") -> InProcess:
        """Return what one process makes of the settings and data of a run."""
        key = system, secure_sum, form
        if key not in self._alone:
            feed = self._feed(self.settings(*key), CanaryKit(7))
            settings = self.settings(*key)
            self._alone[key] = train_in_process(settings, feed, run_id="test", seed=0, see=lambda event: None)
        return self._alone[key]

    def _feed(self, settings: RunSettings, kit: CanaryKit) -> Feed:
        feed = make_feed(settings, load(settings), 0)
        if settings.system != "drift":
            users_at = FEDNCF_USERS_AT if settings.system == "fedncf" else USERS_AT
            feed = dataclasses.replace(feed, host=np.repeat(np.arange(len(users_at)), users_at))
        feed = with_canaries(feed, kit)
        if settings.system == "fedmvmf":
            rng = np.random.default_rng(3)
            feed = dataclasses.replace(
                feed,
                attributes=_told(rng, len(feed.dataset.users), ("taste", "age", "place")),
                features=_told(rng, len(feed.dataset.items), ("length", "year", "price")),
            )
        return feed

    def _train(self, settings: RunSettings) -> Held:
        kit = CanaryKit(7)
        feed = self._feed(settings, kit)
        roles = ("client", "cos", "data-owner", "thirdparty", "decrypting-client")
        keys: dict[str, dict[str, object]] = {role: {"log_level": "debug"} for role in roles}
        if settings.system in ("drift", "fedncf"):
            keys["client"]["per_user_metrics"] = True

        async def to_the_end() -> Held:
            async with self._federation(settings, feed=feed, keys=keys) as running:
                await running.start()
                pages = []
                if settings.system == "drift":
                    await running.phase("epoch", 2)
                    pages += [(party, running.page(party)) for party in running.children]
                await running.ended()
                recommended = {
                    host: await ask(running, host, names_at(feed, host)[0])
                    for host in running.parties("client")
                }
                pages += [(party, running.page(party)) for party in running.children]
                return Held(running, kit, await running.finish(), pages, recommended)

        held = asyncio.run(to_the_end())
        assert held.running.ended_well()
        if settings.system != "drift":
            assert held.report["abandoned"] == 0
        return held


def _told(rng: np.random.Generator, count: int, names: tuple[str, ...]) -> AttributeTable:
    """Return attributes whose values are recognised: nobody else's are the same."""
    return AttributeTable(names, rng.normal(size=(count, len(names))).astype(np.float32))


class OneOwner:
    """A run of DRIFT with one owner and one host, which join in this order: what it learns has one order, too."""

    EPOCHS = 5
    HOST = "client/host-0"

    def __init__(self, small: Callable[..., RunSettings], federation: Callable[..., Running]) -> None:
        self._small, self._federation = small, federation
        self._made: dict[bool, tuple[Running, dict[str, Any]]] = {}

    def run(self, *, item_bias: bool = False) -> tuple[Running, dict[str, Any]]:
        """Return a finished run, whose parties all heard of its end, and its report."""
        if item_bias not in self._made:
            self._made[item_bias] = self._train(item_bias)
        return self._made[item_bias]

    def _train(self, item_bias: bool) -> tuple[Running, dict[str, Any]]:
        settings = self._small(
            drift={"theta": 3, "epochs": self.EPOCHS, "item_bias": item_bias},
            federation={"owners": 1, "hosts": 1},
        )

        async def to_the_end() -> tuple[Running, dict[str, Any]]:
            async with self._federation(settings, hold=[self.HOST]) as running:
                await running.start()
                (owner,) = running.parties("data-owner")
                await running.change(owner, "joined")
                running.release(self.HOST)
                await running.ended()
                for party in (owner, self.HOST):
                    log = running.children[party].log
                    await running.comes_true(
                        lambda log=log: "the run has ended" in log.read_text(),
                        f"{party} knows that the run has ended",
                    )
                return running, await running.finish()

        running, report = asyncio.run(to_the_end())
        assert running.ended_well()
        return running, report
