"""A whole federation as real processes, for tests that disturb it: followed by its events, and audited afterwards."""

import asyncio
import contextlib
import os
import signal
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from coterie.config.run import RunSettings
from coterie.crypto.sealed import decode_records
from coterie.launch.children import Child, free_port
from coterie.launch.federation import Federation
from coterie.launch.feed import Feed, load, make_feed
from coterie.launch.parties import Laid
from coterie.learning.blocks import BlockBuilder
from coterie.learning.drift import DriftSettings, initial
from coterie.net.enrolment import saved_bundles
from coterie.store.engine import open_sqlite
from coterie.wire.v1 import operator_pb2 as wire
from coterie.wire.v1.orchestrator_pb2 import Gradient

WAIT_S = 60.0
"""How long a test waits for anything; a machine under load needs some of it."""

# The log of updates is cut when a snapshot is taken.  This keeps a copy of every applied gradient with its owner's
# progress: both are written in one transaction, so the newest update is the one that the progress belongs to.
_KEEP = (
    "CREATE TABLE kept (version INTEGER, slot INTEGER, sequence INTEGER, epoch INTEGER, blocks INTEGER, gradient BLOB)",
    *(
        f"""CREATE TRIGGER keep_{event} AFTER {event} ON progress BEGIN
        INSERT INTO kept SELECT version, NEW.slot, NEW.sequence, NEW.epoch, NEW.blocks, gradient FROM updates
        WHERE run_id = NEW.run_id ORDER BY version DESC LIMIT 1; END"""
        for event in ("INSERT", "UPDATE")
    ),
)


def rows(path: Path, query: str, *values: object) -> list[tuple[Any, ...]]:
    """Return the rows of a query on a store."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(query, values).fetchall()


@dataclass(frozen=True)
class Kept:
    """An applied update as the COS logged it."""

    version: int
    slot: int
    sequence: int
    epoch: int
    blocks: int
    gradient: Gradient


class Running(Federation):
    """A federation whose processes a test may stop, kill and start again."""

    def __init__(
        self,
        settings: RunSettings,
        feed: Feed,
        folder: Path,
        *,
        hold: Iterable[str] = (),
        keys: Mapping[str, Mapping[str, object]] | None = None,
        expect_users: int | None = None,
    ) -> None:
        super().__init__(settings, feed, folder, run_id="test", seed=0)
        self.settings, self.feed, self.folder = settings, feed, folder
        self.events: list[wire.WatchRunResponse] = []
        self.metrics: dict[str, str] = {}
        self._hold = tuple(hold)
        self._keys = keys or {}
        self._expect_users = expect_users
        self._news = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    # --- before ------------------------------------------------------------------------------------------------

    def _configure(self) -> Laid:
        laid = super()._configure()
        for party, child in self.children.items():
            self.metrics[party] = f"127.0.0.1:{free_port()}"
            keys = {
                "metrics": self.metrics[party],
                **self._keys.get(child.role, {}),
                **self._keys.get(party, {}),
            }
            config = child.folder / "config.toml"
            config.write_text(
                "".join(f"{key} = {value!r}\n" for key, value in keys.items()) + config.read_text()
            )
        self.cos.state.mkdir(mode=0o700)
        open_sqlite(self.cos.state / "cos.db", "cos").dispose()
        with contextlib.closing(sqlite3.connect(self.cos.state / "cos.db")) as connection:
            for statement in _KEEP:
                connection.execute(statement)
            connection.commit()
        self._late += [self.children[party] for party in self._hold]
        if self._expect_users is not None:
            return Laid(laid.parties, self._expect_users)
        return laid

    async def start(self) -> None:
        """Start everybody who is not held back, and follow the run."""
        await super().start()
        self.watched = False
        self._following = asyncio.create_task(self._follow())

    def release(self, party: str) -> None:
        """Start a process that was held back."""
        self._late.remove(self.children[party])
        self.children[party].start()

    async def _follow(self) -> None:
        async for event in self.watch():
            self.events.append(event)
            self._news.set()

    # --- while it runs -----------------------------------------------------------------------------------------

    async def until(self, wanted: Callable[[wire.WatchRunResponse], object], wait_s: float = WAIT_S) -> None:
        """Wait for an event, or take it as come when it has."""
        looked_at = 0
        async with asyncio.timeout(wait_s):
            while True:
                self._news.clear()
                while looked_at < len(self.events):
                    looked_at += 1
                    if wanted(self.events[looked_at - 1]):
                        return
                if self._following is not None and self._following.done():
                    self._following.result()
                    pytest.fail(f"the run ended before its time: {self.events[-1]}")
                await self._news.wait()

    async def phase(self, phase: str, epoch: int = 0) -> None:
        """Wait until the run has come to a phase, and at least to an epoch."""
        number = wire.RunPhase.Value(f"RUN_PHASE_{phase.upper()}")
        await self.until(
            lambda event: (
                event.HasField("phase") and event.phase.phase == number and event.phase.epoch >= epoch
            )
        )

    async def change(self, party: str, change: str, wait_s: float = WAIT_S) -> None:
        """Wait until a party has joined, left, was lost or has returned."""
        await self.until(lambda event: (event.party.party, event.party.change) == (party, change), wait_s)

    async def updates(self, more: int) -> None:
        """Wait until so many more updates are applied."""
        async with asyncio.timeout(WAIT_S):
            first = (await self.run_state()).version
            while (await self.run_state()).version < first + more:
                await asyncio.sleep(0.01)

    def signal(self, party: str, number: signal.Signals) -> None:
        """Send a signal to one of the processes."""
        process = self.children[party].process
        assert process is not None
        os.kill(process.pid, number)

    def kill_and_restart(self, party: str) -> None:
        """End a process as a crash would, and start it again at once with the same configuration."""
        self.children[party].kill()
        self.children[party].start()

    async def finish(self, wait_s: float = WAIT_S) -> dict[str, Any]:
        """Wait for the end of the run, stop every process and return what the COS knew."""
        assert self._following is not None
        async with asyncio.timeout(wait_s):
            await self._following
        report = await self.report()
        await self.stop()
        return report

    async def stop(self) -> None:
        """Stop every process, one that is stopped by a signal included."""
        if self._following is not None:
            self._following.cancel()
        for child in self.children.values():
            if child.alive:
                self.signal(child.party, signal.SIGCONT)
        await super().stop()

    def ended_well(self) -> bool:
        """Whether every process that was started ended with status 0."""
        ends = {party: child.process.returncode for party, child in self.children.items() if child.process}
        assert not any(ends.values()), ends
        return True

    def parties(self, role: str) -> list[str]:
        """Return the parties of a role."""
        return [party for party, child in self.children.items() if child.role == role]

    # --- what the stores hold ----------------------------------------------------------------------------------

    def _cos(self, query: str) -> list[tuple[Any, ...]]:
        return rows(self.cos.state / "cos.db", query)

    def slots(self) -> dict[bytes, int]:
        """Return slots by participant."""
        return dict(self._cos("SELECT participant, slot FROM participants"))

    def item_keys(self) -> list[str]:
        """Return the catalogue's keys by index."""
        return [key for (key,) in self._cos("SELECT key FROM items ORDER BY item")]

    def users(self) -> dict[bytes, tuple[str, int]]:
        """Return host and number there by participant."""
        return {
            bundle.participant_id: (party, number)
            for party in self.parties("client")
            if (self.children[party].state / "client.db").exists()
            for number, bundle in enumerate(saved_bundles(self.children[party].state), start=1)
        }

    def sent(self) -> dict[tuple[bytes, bytes], list[tuple[str, bool]]]:
        """Return what hosts have in their outboxes, in order of sequence: item key and flag by (owner, user)."""
        found: dict[tuple[bytes, bytes], list[tuple[str, bool]]] = defaultdict(list)
        ids = {place: participant for participant, place in self.users().items()}
        for party in {party for party, _ in ids}:
            store = self.children[party].state / "client.db"
            history = {
                row: (item, bool(flag))
                for row, item, flag in rows(store, "SELECT row, item, positive FROM history")
            }
            for user, owner, first, packed in rows(
                store, "SELECT user, owner, first, rows FROM outbox ORDER BY entry"
            ):
                outbox = found[owner, ids[party, user]]
                assert first == len(outbox) + 1, "an outbox with a gap"
                outbox += [history[row] for row in np.frombuffer(packed, "<u4").tolist()]
        return found

    def stored(self) -> dict[tuple[bytes, bytes], list[tuple[str, bool]]]:
        """Return what owners have stored, in order of sequence: item key and flag by (owner, user)."""
        keys = self.item_keys()
        found: dict[tuple[bytes, bytes], list[tuple[str, bool]]] = defaultdict(list)
        for party in self.parties("data-owner"):
            store = self.children[party].state / "data_owner.db"
            if not store.exists():
                continue
            for owner, user, first, length, records in rows(
                store, 'SELECT owner, user, "first", length, records FROM batches ORDER BY number'
            ):
                assert first == len(found[owner, user]) + 1, "a record that is counted twice, or never came"
                items, flags = decode_records(records, length)
                found[owner, user] += [(keys[i], bool(f)) for i, f in zip(items, flags, strict=True)]
        return found

    def blocks(self) -> dict[int, int]:
        """Return by slot how many blocks a fresh builder makes of what an owner has stored."""
        return {slot: len(made) for slot, made in self._built().items()}

    def _built(self) -> dict[int, list[Any]]:
        slots = self.slots()
        built: dict[int, list[Any]] = {}
        for party in self.parties("data-owner"):
            store = self.children[party].state / "data_owner.db"
            if not store.exists():
                continue
            flushes = rows(store, "SELECT owner, after_batch FROM flushes ORDER BY after_batch")
            builders: dict[bytes, BlockBuilder] = defaultdict(BlockBuilder)
            made: dict[bytes, list[Any]] = defaultdict(list)
            for number, owner, user, length, records in rows(
                store, "SELECT number, owner, user, length, records FROM batches ORDER BY number"
            ):
                while flushes and flushes[0][1] < number:
                    flushed = flushes.pop(0)[0]
                    made[flushed] += builders[flushed].flush()
                made[owner] += builders[owner].extend(slots[user], *decode_records(records, length))
            for owner, _ in flushes:
                made[owner] += builders[owner].flush()
            built.update((slots[owner], found) for owner, found in made.items())
        return built

    def streams(self) -> dict[int, list[tuple[int, int, bool]]]:
        """Return by slot what an owner has received, in order: slot of the user, index of the item, flag."""
        slots = self.slots()
        found: dict[int, list[tuple[int, int, bool]]] = defaultdict(list)
        for party in self.parties("data-owner"):
            for owner, user, length, records in rows(
                self.children[party].state / "data_owner.db",
                "SELECT owner, user, length, records FROM batches ORDER BY number",
            ):
                items, flags = decode_records(records, length)
                found[slots[owner]] += [
                    (slots[user], int(i), bool(f)) for i, f in zip(items, flags, strict=True)
                ]
        return found

    def passes(self) -> dict[tuple[int, int], int]:
        """Return how many blocks each later epoch of an owner passes over, by (slot, epoch)."""
        slots = self.slots()
        return {
            (slots[owner], epoch): blocks
            for party in self.parties("data-owner")
            if (self.children[party].state / "data_owner.db").exists()
            for owner, epoch, blocks in rows(
                self.children[party].state / "data_owner.db", "SELECT owner, epoch, blocks FROM passes"
            )
        }

    def applied(self) -> list[Kept]:
        """Return every update that the COS has applied, in order."""
        return [
            Kept(*values, Gradient.FromString(gradient))
            for *values, gradient in self._cos("SELECT * FROM kept ORDER BY version")
        ]

    def final(self) -> tuple[np.ndarray, np.ndarray]:
        """Return user and item factors of the last evaluated version."""
        folder = self.cos.state / "models" / "test"
        paths = folder.glob("evaluated-*.safetensors")
        arrays = load_file(max(paths, key=lambda path: int(path.stem.rpartition("-")[2])))
        return arrays["users"], arrays["items"]

    # --- what must hold whatever happened ----------------------------------------------------------------------

    def counted_once(self, *, grows: bool = False, away: bool = False) -> bool:
        """Check that every interaction counts exactly once: sent, stored, in blocks, in the model.

        Every owner must have gone over all its blocks in every epoch since it joined; with ``grows`` only over those
        that it had at the beginning of the epoch, and with ``away`` an epoch may be cut short, but not the last one.
        """
        assert self.stored() == {key: outbox for key, outbox in self.sent().items() if outbox}
        self._blocks_counted_once(grows=grows or away, away=away)
        self._model_is_the_sum()
        return True

    def _blocks_counted_once(self, *, grows: bool, away: bool) -> None:
        applied = self.applied()
        assert [one.version for one in applied] == list(range(1, len(applied) + 1))
        covered: dict[tuple[int, int], int] = defaultdict(int)
        sequences: dict[int, int] = defaultdict(int)
        for one in applied:
            sequences[one.slot] += 1
            assert one.sequence == sequences[one.slot]
            assert (one.gradient.epoch, one.gradient.first_block) == (one.epoch, covered[one.slot, one.epoch])
            covered[one.slot, one.epoch] += one.gradient.blocks
            assert one.blocks == covered[one.slot, one.epoch]
        passes, built = self.passes(), self.blocks()
        last = {slot: max(epoch for at, epoch in covered if at == slot) for slot, _ in covered}
        for (slot, epoch), count in covered.items():
            expected = passes.get((slot, epoch), built[slot])
            assert count <= expected <= built[slot]
            if not away and (slot, epoch) in passes:
                assert count == expected
            if not grows or epoch == last[slot]:
                assert count == built[slot]

    def _model_is_the_sum(self) -> None:
        """Every applied gradient is in the model once: the factors are the initial ones less all of them."""
        plan = self.plan()
        learning = DriftSettings(dim=plan.dim, theta=plan.theta, item_bias=plan.item_bias)
        users, items = self.final()
        Upsilon, Psi = initial(len(users), len(items), learning, plan.seed)
        rate = np.float32(plan.rate)
        for one in self.applied():
            message = one.gradient
            for factors, ids, values in (
                (Upsilon, message.users, message.user_gradient),
                (Psi, message.items, message.item_gradient),
            ):
                factors[np.frombuffer(ids.data, "<u4")] -= rate * np.frombuffer(values.data, "<f4").reshape(
                    -1, plan.dim
                )
        np.testing.assert_array_equal(users, Upsilon)
        np.testing.assert_array_equal(items, Psi)


SMALL: dict[str, Any] = {
    "reference": False,
    "data": {"synthetic": {"users": 60, "items": 120, "interactions": 3000}},
    "drift": {"dim": 8, "theta": 4, "epochs": 4},
    "federation": {"owners": 2, "hosts": 2, "min_users": 20},
}
"""Small enough for a run of a few seconds."""


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _merged(base.get(key, {}), changes[key])
        if isinstance(changes.get(key), Mapping)
        else changes.get(key, base.get(key))
        for key in base.keys() | changes.keys()
    }


@pytest.fixture(scope="session")
def small() -> Callable[..., RunSettings]:
    """Return a function that makes settings of a small run, with changes."""

    def make(**changes: Any) -> RunSettings:
        return RunSettings.model_validate(_merged(SMALL, changes))

    return make


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Running]:
    """Return a function that makes a federation in a folder of its own; use it with ``async with``."""

    def make(settings: RunSettings, **options: Any) -> Running:
        feed = make_feed(settings, load(settings), 0)
        return Running(settings, feed, tmp_path_factory.mktemp("federation"), **options)

    return make


def descendants(pid: int) -> list[int]:
    """Return the children of a process and theirs."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [found for child in map(int, children) for found in (child, *descendants(child))]


def is_running(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: Iterable[int], within_s: float) -> bool:
    """Whether processes end within some time."""
    deadline = time.monotonic() + within_s
    left = list(pids)
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = [pid for pid in left if is_running(pid)]
    return not left


@pytest.fixture(scope="session")
def processes() -> Any:
    """Return functions on processes by their id: ``descendants``, ``is_running``, ``gone``."""
    return type(
        "Processes",
        (),
        {
            "descendants": staticmethod(descendants),
            "is_running": staticmethod(is_running),
            "gone": staticmethod(gone),
        },
    )


__all__ = ["Child", "Running"]
