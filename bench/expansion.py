"""Measure graph expansion: publish and ask for all users of MovieLens 1M, over real services, and how its cost grows.

Third party and COS are processes of their own; this process is the client host of all users.  Sizes are subsets of the
users in the data set's order, or as many synthetic users.  The suite runs only on request: it takes minutes.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.rounds import cpu_of
from bench.rows import Ask, Row, lower
from bench.submit import Site
from coterie.config.run import RunSettings
from coterie.crypto.authority import logical_name
from coterie.crypto.graph_key import GRAPH, GraphTerms
from coterie.crypto.graph_tags import choose_items
from coterie.crypto.roster import Roster, save_roster_key
from coterie.launch.parties import DIRECTORY
from coterie.net.channel import connect
from coterie.net.directory import Directory
from coterie.net.meter import Meter
from coterie.parties.expansion import Expansion, UserUpload
from coterie.parties.graph_keys import GraphHolding, GraphKeys, GraphTrust
from coterie.studies.run_data import load

__all__ = ["rows"]

_RUN = "bench"
_TERMS = GraphTerms(dimension=256)
_AT_ONCE = 16
_TARGET = 1.1


@dataclass(frozen=True)
class Expanded:
    """The cost of one size.

    Parameters
    ----------
    users : int
    publish_s, ask_s : float
        Seconds until all users had published, and had their neighbours.
    cpu : float
        CPU seconds of third party and COS for both.
    sent, received : int
        Bytes between client host and COS.
    peak : float
        Most bytes resident at the third party.
    stored : int
        Bytes of its store.
    neighbours : float
        Mean number of neighbours.
    """

    users: int
    publish_s: float
    ask_s: float
    cpu: float
    sent: int
    received: int
    peak: float
    stored: int
    neighbours: float


def rows(ask: Ask) -> Iterator[Row]:
    """Measure each size, and the exponent with which the services' CPU time grows."""
    histories = _histories(ask)
    sizes = ask.size((1510, 3020, 6040), (20, 40))
    found = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            found.append(asyncio.run(_expanded(Path(folder), histories[:size])))
        one = found[-1]
        yield lower(
            f"expansion.{size}",
            one.publish_s + one.ask_s,
            None,
            "s",
            f"{size} users publish in {one.publish_s:.1f} s and ask in {one.ask_s:.1f} s, {one.neighbours:.1f} "
            f"neighbours each; {one.sent / 2**20:.1f} MiB to the COS, {one.received / 2**20:.1f} MiB back; third "
            f"party at most {one.peak / 2**20:.0f} MiB resident, {one.stored / 2**20:.1f} MiB stored; "
            f"{one.cpu:.1f} s CPU of third party and COS",
        )
    exponent = float(np.polyfit(np.log(sizes), np.log([max(one.cpu, 0.01) for one in found]), 1)[0])
    yield lower(
        "expansion.growth",
        exponent,
        _TARGET,
        "exponent",
        "CPU of third party and COS by users; target 1.1",
    )


def _histories(ask: Ask) -> list[list[str]]:
    """Return the items of each user: of the given data set, of MovieLens 1M, or synthetic ones."""
    root = os.environ.get("COTERIE_DATA")
    path = ask.data
    if path is None and root and (Path(root) / "ml-1m").is_dir():
        path = Path(root) / "ml-1m"
    data = (
        {
            "synthetic": ask.size(
                {"users": 6040, "items": 3000, "interactions": 300_000},
                {"users": 40, "items": 60, "interactions": 900},
            )
        }
        if path is None
        else {"path": path}
    )
    dataset = load(RunSettings.model_validate({"system": "fedmf", "data": data}))
    order = np.argsort(dataset.user, kind="stable")
    counts = np.bincount(dataset.user, minlength=len(dataset.users))
    return [[str(item) for item in items] for items in np.split(dataset.item[order], np.cumsum(counts)[:-1])]


async def _expanded(folder: Path, histories: Sequence[Sequence[str]]) -> Expanded:
    users = len(histories)
    async with Site(folder, _RUN) as site:
        roster_key = Ed25519PrivateKey.generate()
        public = roster_key.public_key().public_bytes_raw()
        save_roster_key(site.authority / "roster.pub", public)
        settings = RunSettings.model_validate({"system": "fedmf", "data": {"synthetic": {"users": 20}}})
        await site.begin(settings, users=users + 1)
        party, members, tls = await site.party("client", "host", users)
        await party.register(members)
        meter = Meter()

        third = connect(
            site.thirdparty_address,
            tls.channel_credentials(),
            tls_name=logical_name("thirdparty", DIRECTORY),
            peer=f"thirdparty/{DIRECTORY}",
            meter=Meter(),
        )
        cos = connect(
            site.address,
            tls.channel_credentials(),
            tls_name=logical_name("cos", "cos"),
            peer="cos/cos",
            meter=meter,
        )
        try:
            directory_key = (folder / "host" / "directory.key").read_bytes()
            identity, now = members[0].identity, int(time.time())
            listed = Roster.sign(roster_key, [identity.participant_id], now - 60, now + 36_000, purpose=GRAPH)
            keys = GraphKeys(
                third,
                identity,
                GraphTrust(_RUN, listed, public),
                folder / "keys",
                Directory(third, directory_key).bundles,
                _TERMS,
            )
            holding = await keys.ensure()
            calls = Expansion(cos, third, directory_key)
            return await _measured(site, calls, holding, folder, party.slots, histories, meter)
        finally:
            await cos.close()
            await third.close()


async def _measured(
    site: Site,
    calls: Expansion,
    holding: GraphHolding,
    folder: Path,
    slots: Sequence[int],
    histories: Sequence[Sequence[str]],
    meter: Meter,
) -> Expanded:
    uploads = [UserUpload(folder / f"user-{slot}", slot) for slot in slots]
    published: dict[str, int] = {}
    for upload, items in zip(uploads, histories, strict=True):
        for item in choose_items(upload.user_secret, _RUN, items, _TERMS.most_tags):
            published[item] = published.get(item, 0) + 1
    embedding = np.linspace(-1, 1, _TERMS.dimension, dtype=np.float32)
    found: list[int] = []

    async def publish(at: int) -> None:
        await calls.publish(uploads[at], holding, histories[at], published, embedding)

    async def ask(at: int) -> None:
        found.append(len(await calls.neighbours(uploads[at], holding)))

    pids = [child.process.pid for child in (site.cos, site.thirdparty) if child.process is not None]
    sent, received = meter.bytes_out, meter.bytes_in
    cpu = sum(map(cpu_of, pids))
    began = time.perf_counter()
    await _all(publish, len(uploads))
    between = time.perf_counter()
    await _all(ask, len(uploads))
    ended = time.perf_counter()
    store = site.authority / "expansion.db"
    return Expanded(
        len(uploads),
        between - began,
        ended - between,
        sum(map(cpu_of, pids)) - cpu,
        meter.bytes_out - sent,
        meter.bytes_in - received,
        _peak(pids[1]),
        sum(path.stat().st_size for path in store.parent.glob("expansion.db*")),
        float(np.mean(found)),
    )


async def _all(work: Callable[[int], Awaitable[None]], count: int) -> None:
    """Do a piece of work for every number, some at once."""
    waiting = iter(range(count))

    async def worker() -> None:
        for at in waiting:
            await work(at)

    await asyncio.gather(*(worker() for _ in range(_AT_ONCE)))


def _peak(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return 1024.0 * int(value.split()[0])
    raise RuntimeError("the system says nothing of VmHWM")
