"""Small runs for the audit by multiplicity: users whose items the audit draws, on hosts that differ in nothing else.

Two hosts have one user each, with 12 and with 60 items; so what leaves a host can be compared between them.  These
users' items, and those of a few others, are drawn uniformly from a catalogue of 240 items, as `HistorySearch` assumes.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from coterie.config.run import RunSettings
from coterie.privacy.canaries import CanaryKit
from coterie.privacy.declarations import AccessRows
from coterie.privacy.transcript import TranscriptEntry, read_transcript
from coterie.privacy.visibility import HistorySearch
from coterie.studies.run_data import Feed, load, make_feed
from coterie.systems.visibility import rows_of

from .planted import ask, names_at, with_canaries
from .running import Running

ITEMS = 240
FEW, MANY = "client/host-1", "client/host-2"
"""Hosts of one user each, of whom one has five times as many items."""
HISTORIES = (12, 60)
USERS_AT = (20, 1, 1)
DRAWN = (0, 1, 20, 21)
"""Users whose items are drawn and searched for; the last two are alone at their hosts."""

ROUNDS = {
    "split": {"kind": "random"},
    "data": {"synthetic": {"users": sum(USERS_AT), "items": ITEMS, "interactions": 30 * sum(USERS_AT)}},
    "rounds": {"cohort": sum(USERS_AT), "group": sum(USERS_AT), "passes": 2, "evaluate_every": 1},
    "federation": {"hosts": len(USERS_AT), "transcripts": True},
    "encryption": {"bits": 1024, "comparison": True},
}
DRIFT = {
    "data": {"synthetic": {"users": sum(USERS_AT), "items": ITEMS, "interactions": 30 * sum(USERS_AT)}},
    "federation": {"owners": 3, "hosts": len(USERS_AT), "transcripts": True, "min_users": 1},
}
SETTINGS: dict[tuple[str, str, str], dict[str, Any]] = {
    ("drift", "published", "clear"): {**DRIFT, "drift": {"epochs": 2}},
    ("drift", "shielded", "masked"): {**DRIFT, "drift": {"form": "shielded", "epochs": 2, "k_min": 2}},
    ("fedncf", "hosts", "masked"): {**ROUNDS, "split": {"kind": "leave-last-out"}},
    ("fedmf", "hosts", "clear"): {**ROUNDS, "fedmf": {"factors": 4, "min_touch": 2}},
    ("fcf", "hosts", "shared-key"): {**ROUNDS, "fcf": {"factors": 4, "min_touch": 2}},
    ("ease", "hosts", "masked"): {
        **ROUNDS,
        "split": {"kind": "leave-last-out"},
        "rounds": {"cohorts": "all", "passes": 1, "evaluate_every": 1},
        "ease": {"min_touch": 3},
    },
    ("ials", "hosts", "masked"): {
        **ROUNDS,
        "split": {"kind": "leave-last-out"},
        "rounds": {"cohorts": "all", "passes": 2, "evaluate_every": 1},
        "ials": {"factors": 4, "min_touch": 2, "products": "item", "min_products": 6},
    },
    ("fpl", "hosts", "masked"): {**ROUNDS, "fpl": {"factors": 4, "min_touch": 2}},
    ("fedmvmf", "hosts", "encrypted"): {**ROUNDS, "mvmf": {"factors": 4, "min_touch": 2}},
}
"""Settings by system, form and sum: every system, and every sum."""


@dataclasses.dataclass
class Watched:
    """A finished run, and what the audit searches for in it."""

    running: Running
    kit: CanaryKit
    histories: HistorySearch
    rows: AccessRows
    numbers: dict[str, list[int]]
    """Numbers of the items of each host's first drawn user, ascending."""
    keys: dict[str, list[str]]
    report: dict[str, Any]
    pages: dict[str, dict[str, bytes]]
    """Metrics and health pages by party and path."""

    recorded: dict[str, list[TranscriptEntry]] = dataclasses.field(default_factory=dict)
    """Transcripts that were read once."""

    def entries(self, party: str) -> list[TranscriptEntry]:
        """Return the transcript of a party."""
        if party not in self.recorded:
            self.recorded[party] = list(read_transcript(self.transcripts[party]))
        return self.recorded[party]

    @property
    def transcripts(self) -> dict[str, Path]:
        """Transcripts by party."""
        return {party: child.state / "transcript.bin" for party, child in self.running.children.items()}


def unstarted(
    combination: tuple[str, str, str],
    small: Callable[..., RunSettings],
    federation: Callable[..., Running],
) -> tuple[Running, CanaryKit, AccessRows]:
    """Return a federation that has not started, the canaries among its names, and who may see what in it.

    Parameters
    ----------
    combination : tuple of str
        System, form and sum: a key of `SETTINGS`.
    small, federation : callable
        The fixtures.
    """
    system, _, secure_sum = combination
    settings = small(system=system, secure_sum=secure_sum, **SETTINGS[combination])
    kit = CanaryKit(11)
    feed = with_canaries(_drawn(make_feed(settings, load(settings), 0)), kit)
    roles = ("client", "cos", "data-owner", "thirdparty", "decrypting-client")
    keys = {role: {"log_level": "debug"} for role in roles}
    return federation(settings, feed=feed, keys=keys), kit, rows_of(*combination)


def watch(
    combination: tuple[str, str, str],
    small: Callable[..., RunSettings],
    federation: Callable[..., Running],
) -> Watched:
    """Train a run and return it; the parameters are those of `unstarted`."""
    running, kit, rows = unstarted(combination, small, federation)

    async def to_the_end() -> tuple[dict[str, Any], dict[str, dict[str, bytes]]]:
        async with running:
            await running.start()
            await running.ended()
            for host in running.parties("client"):
                await ask(running, host, names_at(running.feed, host)[0])
            pages = {
                party: {path: running.page(party, path).encode() for path in ("/metrics", "/healthz")}
                for party in running.children
            }
            return await running.finish(), pages

    report, pages = asyncio.run(to_the_end())
    assert running.ended_well()
    assert report["phase"] == "done", report["reason"]
    return _watched(rows, running, kit, report, pages)


def _drawn(feed: Feed) -> Feed:
    """Return the feed with drawn items for the users of `DRAWN`; the other users keep 12 items or fewer of theirs."""
    data = feed.dataset
    rng = np.random.default_rng(5)
    user, item = [], []
    for number in range(len(data.users)):
        own = data.item[data.user == number]
        if number in DRAWN:
            count = HISTORIES[DRAWN.index(number) % 2] if number >= USERS_AT[0] else HISTORIES[0]
            own = rng.choice(len(data.items), count, replace=False)
        user.append(np.full(len(own), number))
        item.append(own)
    users, items = np.concatenate(user).astype(np.int32), np.concatenate(item).astype(np.int32)
    ratings = rng.integers(1, 6, len(users)).astype(np.float32)
    dataset = dataclasses.replace(
        data, user=users, item=items, rating=ratings, time=np.arange(len(users), dtype=np.int64)
    )
    # Of each user the last two interactions are held out.
    part = np.zeros(len(users), feed.split.part.dtype)
    last = np.searchsorted(users, np.arange(len(data.users)), side="right") - 1
    part[last], part[last - 1] = 2, 1
    split = dataclasses.replace(feed.split, part=part)
    return dataclasses.replace(
        feed,
        dataset=dataset,
        positive=np.ones(len(users), np.bool_),
        split=split,
        host=np.repeat(np.arange(len(USERS_AT)), USERS_AT),
    )


def _watched(
    rows: AccessRows,
    running: Running,
    kit: CanaryKit,
    report: dict[str, Any],
    pages: dict[str, dict[str, bytes]],
) -> Watched:
    feed = running.feed
    catalogue = running.stores.item_keys()
    index = {key: number for number, key in enumerate(catalogue)}
    owners = [
        path.read_text().split()[1:]
        for party in running.parties("data-owner")
        for path in running.children[party].folder.glob("*items*.csv")
    ]
    histories = HistorySearch(catalogue, owners)
    numbers: dict[str, list[int]] = {}
    for user in DRAWN:
        host = f"client/host-{feed.host[user]}"
        own = [index[feed.dataset.items[item]] for item in feed.dataset.item[feed.dataset.user == user]]
        histories.plant(own, {host})
        if host not in numbers and len(own) == HISTORIES[0]:
            kit.item_lists(own, {host}, n_items=ITEMS)
        numbers.setdefault(host, sorted(own))
    keys = {host: [catalogue[number] for number in own] for host, own in numbers.items()}
    return Watched(running, kit, histories, rows, numbers, keys, report, pages)
