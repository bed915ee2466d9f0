"""Content of the stores of a federation after its run, and checks that must pass whatever happened."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file

from coterie.crypto.sealed import decode_records
from coterie.net.enrolment import saved_bundles
from coterie.systems.drift.blocks import Block, BlockBuilder, Stream
from coterie.systems.drift.mathematics import fetch, gradients, initial, owner_order, wanted
from coterie.systems.drift.settings import DriftSettings
from coterie.wire.v1.orchestrator_pb2 import Gradient

if TYPE_CHECKING:
    from .running import Running

# The log of updates is cut when a snapshot is taken.  This keeps a copy of every applied gradient with its owner's
# progress: both are written in one transaction, so the newest updates are those that the progress belongs to.
KEEP_UPDATES = (
    "CREATE TABLE kept (version INTEGER, slot INTEGER, sequence INTEGER, epoch INTEGER, blocks INTEGER, gradient BLOB)",
    *(
        f"""CREATE TRIGGER keep_{event} AFTER {event} ON progress BEGIN
        INSERT INTO kept SELECT version, NEW.slot, NEW.sequence, NEW.epoch, NEW.blocks, gradient FROM updates
        WHERE run_id = NEW.run_id AND version > (SELECT coalesce(max(version), 0) FROM kept); END"""
        for event in ("INSERT", "UPDATE")
    ),
)


def rows(path: Path, query: str, *values: object) -> list[tuple[Any, ...]]:
    """Return the rows of a query on a store; none while there is no store, or one that no migration has reached."""
    if not path.exists():
        return []
    with contextlib.closing(sqlite3.connect(path)) as connection:
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            return []
        return connection.execute(query, values).fetchall()


@dataclass(frozen=True)
class Kept:
    """An applied update as the COS logged it; the blocks of the epoch are counted with it and all of its exchange."""

    version: int
    slot: int
    sequence: int
    epoch: int
    blocks: int
    gradient: Gradient


class Stores:
    """The stores of all processes of a federation."""

    def __init__(self, running: Running) -> None:
        self._running = running

    def _of(self, party: str) -> Path:
        child = self._running.children[party]
        return child.state / f"{child.role.replace('-', '_')}.db"

    def _owners(self, query: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query on the stores of all data owners."""
        return [row for party in self._running.parties("data-owner") for row in rows(self._of(party), query)]

    def _cos(self, query: str) -> list[tuple[Any, ...]]:
        return rows(self._of("cos/cos"), query)

    # --- who is who --------------------------------------------------------------------------------------------

    def slots(self) -> dict[bytes, int]:
        """Return slots by participant."""
        return dict(self._cos("SELECT participant, slot FROM participants"))

    def item_keys(self) -> list[str]:
        """Return the catalogue's keys by index."""
        return [key for (key,) in self._cos("SELECT key FROM items ORDER BY item")]

    def participants(self, party: str) -> list[bytes]:
        """Return the participants for which a party speaks."""
        return [bundle.participant_id for bundle in saved_bundles(self._running.children[party].state)]

    def users(self) -> dict[bytes, tuple[str, int]]:
        """Return host and number there by participant."""
        return {
            participant: (party, number)
            for party in self._running.parties("client")
            if self._of(party).exists()
            for number, participant in enumerate(self.participants(party), start=1)
        }

    def user_names(self) -> dict[str, bytes]:
        """Return participants by the name that their host knows them by."""
        by_place = {place: participant for participant, place in self.users().items()}
        return {
            name: by_place[party, number]
            for party in self._running.parties("client")
            for number, name in rows(self._of(party), "SELECT user, name FROM users")
        }

    # --- interactions ------------------------------------------------------------------------------------------

    def sent(self) -> dict[tuple[bytes, bytes], list[tuple[str, bool]]]:
        """Return what hosts have in their outboxes, in order of sequence: item key and flag by (owner, user)."""
        found: dict[tuple[bytes, bytes], list[tuple[str, bool]]] = defaultdict(list)
        by_place = {place: participant for participant, place in self.users().items()}
        for party in {party for party, _ in by_place}:
            history = {
                row: (item, bool(flag))
                for row, item, flag in rows(self._of(party), "SELECT row, item, positive FROM history")
            }
            entries = rows(self._of(party), "SELECT user, owner, first, rows FROM outbox ORDER BY entry")
            for user, owner, first, packed in entries:
                outbox = found[owner, by_place[party, user]]
                assert first == len(outbox) + 1, "an outbox with a gap"
                outbox += [history[row] for row in np.frombuffer(packed, "<u4").tolist()]
        return found

    def acknowledged(self, owner_party: str) -> dict[tuple[bytes, bytes], int]:
        """Return by (owner, user) how many records the hosts hold for acknowledged by an owner's process."""
        (owner,) = self.participants(owner_party)
        query = "SELECT user, acknowledged FROM sent WHERE recipient = ? AND kind = 'interaction'"
        by_place = {place: participant for participant, place in self.users().items()}
        return {
            (owner, by_place[party, user]): count
            for party in self._running.parties("client")
            for user, count in rows(self._of(party), query, owner_party)
        }

    def stored(self) -> dict[tuple[bytes, bytes], list[tuple[str, bool]]]:
        """Return what owners have stored, in order of sequence: item key and flag by (owner, user)."""
        keys = self.item_keys()
        found: dict[tuple[bytes, bytes], list[tuple[str, bool]]] = defaultdict(list)
        query = 'SELECT owner, user, "first", length, records FROM batches ORDER BY number'
        for owner, user, first, length, records in self._owners(query):
            assert first == len(found[owner, user]) + 1, "a record that is counted twice, or never came"
            items, flags = decode_records(records, length)
            found[owner, user] += [(keys[i], bool(f)) for i, f in zip(items, flags, strict=True)]
        return found

    def streams(self) -> dict[int, Stream]:
        """Return by slot what an owner has received, in order of arrival."""
        slots = self.slots()
        found: dict[int, list[tuple[int, int, bool]]] = defaultdict(list)
        query = "SELECT owner, user, length, records FROM batches ORDER BY number"
        for owner, user, length, records in self._owners(query):
            items, flags = decode_records(records, length)
            found[slots[owner]] += [(slots[user], int(i), bool(f)) for i, f in zip(items, flags, strict=True)]
        return {
            slot: Stream(
                user=np.array([user for user, _, _ in records], np.int32),
                item=np.array([item for _, item, _ in records], np.int32),
                positive=np.array([flag for _, _, flag in records], np.bool_),
            )
            for slot, records in found.items()
        }

    def blocks(self) -> dict[int, list[Block]]:
        """Return by slot the blocks that a fresh builder makes of what an owner has stored."""
        slots = self.slots()
        flushes = sorted(self._owners("SELECT owner, after_batch FROM flushes"))
        builders: dict[bytes, BlockBuilder] = defaultdict(BlockBuilder)
        made: dict[bytes, list[Block]] = defaultdict(list)

        def flush(owner: bytes, until: float) -> None:
            while due := [one for one in flushes if one[0] == owner and one[1] < until]:
                flushes.remove(due[0])
                made[owner] += builders[owner].flush()

        query = "SELECT number, owner, user, length, records FROM batches ORDER BY number"
        for number, owner, user, length, records in self._owners(query):
            flush(owner, number)
            made[owner] += builders[owner].extend(slots[user], *decode_records(records, length))
        for owner in list(builders):
            flush(owner, float("inf"))
        return {slots[owner]: found for owner, found in made.items()}

    # --- the model ---------------------------------------------------------------------------------------------

    def passes(self) -> dict[tuple[int, int], int]:
        """Return how many blocks each later epoch of an owner passes over, by (slot, epoch)."""
        slots = self.slots()
        return {
            (slots[owner], epoch): blocks
            for owner, epoch, blocks in self._owners("SELECT owner, epoch, blocks FROM passes")
        }

    def applied(self) -> list[Kept]:
        """Return every update that the COS has applied, in order."""
        return [
            Kept(*values, Gradient.FromString(gradient))
            for *values, gradient in self._cos("SELECT * FROM kept ORDER BY version")
        ]

    def exchanges(self) -> list[list[Kept]]:
        """Return the updates of each exchange that the COS has applied, in order."""
        return [
            list(together)
            for _, together in groupby(self.applied(), key=lambda one: (one.slot, one.sequence))
        ]

    def evaluated(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Return user and item factors of every version that was evaluated."""
        folder = self._running.cos.state / "models" / "test"
        found = {}
        for path in folder.glob("evaluated-*.safetensors"):
            arrays = load_file(path)
            found[int(path.stem.rpartition("-")[2])] = arrays["users"], arrays["items"]
        return found

    def final(self) -> tuple[np.ndarray, np.ndarray]:
        """Return user and item factors of the last evaluated version."""
        return max(self.evaluated().items(), key=lambda entry: entry[0])[1]

    def learning(self) -> DriftSettings:
        """Return the learning settings of the run's plan."""
        return DriftSettings.from_plan(self._running.plan())

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
        most = self.learning().local_updates
        for exchange in self.exchanges():
            slot = exchange[0].slot
            sequences[slot] += 1
            assert exchange[0].sequence == sequences[slot]
            assert len(exchange) <= most
            for one in exchange:
                assert (one.gradient.epoch, one.gradient.first_block) == (one.epoch, covered[slot, one.epoch])
                covered[slot, one.epoch] += one.gradient.blocks
            assert one.blocks == covered[slot, one.epoch]
        passes = self.passes()
        built = {slot: len(blocks) for slot, blocks in self.blocks().items()}
        last = {slot: max(epoch for at, epoch in covered if at == slot) for slot, _ in covered}
        assert last.keys() == {slot for slot, count in built.items() if count}
        for (slot, epoch), count in covered.items():
            expected = passes.get((slot, epoch), built[slot])
            assert count <= expected <= built[slot]
            if not away and (slot, epoch) in passes:
                assert count == expected
            if not grows or epoch == last[slot]:
                assert count == built[slot]

    def _model_is_the_sum(self) -> None:
        """Every applied gradient is in the model once: the factors are the initial ones less all of them."""
        users, items = self.final()
        Upsilon, Psi = initial(len(users), len(items), self.learning(), self._running.plan().seed)
        for one in self.applied():
            self._subtract(one.gradient, Upsilon, Psi)
        np.testing.assert_array_equal(users, Upsilon)
        np.testing.assert_array_equal(items, Psi)

    def _subtract(self, gradient: Gradient, Upsilon: np.ndarray, Psi: np.ndarray) -> None:
        rate = np.float32(self._running.plan().rate)
        for factors, ids, values in (
            (Upsilon, gradient.users, gradient.user_gradient),
            (Psi, gradient.items, gradient.item_gradient),
        ):
            step = np.frombuffer(values.data, "<f4").reshape(-1, factors.shape[1])
            factors[np.frombuffer(ids.data, "<u4")] -= rate * step

    def gradients_differ_by(self) -> float:
        """Compute every applied gradient again, from stored interactions and the factors of its version.

        Returns
        -------
        float
            The largest difference of a number in any gradient from the one that the owner sent.
        """
        plan, learning = self._running.plan(), self.learning()
        passes, built = self.passes(), self.blocks()
        users, items = self.final()
        Upsilon, Psi = initial(len(users), len(items), learning, plan.seed)
        versions = [(Upsilon.copy(), Psi.copy())]
        worst, exchange, seen = 0.0, (-1, 0), (Upsilon, Psi)
        for one in self.applied():
            sent, blocks = one.gradient, built[one.slot]
            held = passes.get((one.slot, one.epoch))
            # In the epoch in which an owner joins, it takes blocks as they come.
            order = range(len(blocks)) if held is None else owner_order(plan.seed, one.slot, one.epoch, held)
            chunk = [blocks[at] for at in order[sent.first_block : sent.first_block + sent.blocks]]
            if (one.slot, one.sequence) != exchange:
                # Later updates of an exchange have its earlier ones in their rows.
                exchange = one.slot, one.sequence
                seen = tuple(factors.copy() for factors in versions[sent.rows_version])
            rows_then = fetch(*seen, *wanted(chunk))
            again = gradients(chunk, rows_then, learning.ridge, item_bias=learning.item_bias)
            for ids, values, expected_ids, expected in (
                (sent.users, sent.user_gradient, again.users, again.user_gradient),
                (sent.items, sent.item_gradient, again.items, again.item_gradient),
            ):
                np.testing.assert_array_equal(np.frombuffer(ids.data, "<u4"), expected_ids)
                received = np.frombuffer(values.data, "<f4").reshape(expected.shape)
                worst = max(worst, float(np.abs(received - expected).max()))
            self._subtract(sent, *seen)
            self._subtract(sent, Upsilon, Psi)
            versions.append((Upsilon.copy(), Psi.copy()))
        return worst
