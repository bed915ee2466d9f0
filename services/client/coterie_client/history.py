"""Keep the histories of a host's users, and an outbox for each user and data owner (DRIFT)."""

from __future__ import annotations

import asyncio
import csv
import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from coterie.errors import DataError
from coterie.evaluation.holdout import TEST, TRAIN, VALIDATION, Holdout
from coterie.evaluation.leave_one_out import RANKED
from coterie.net.uncancelled import completed
from coterie.parties.stored_host import HistoryArrays, history_arrays
from coterie.store import client as store
from coterie.store.engine import Writer
from coterie.store.packed_history import HistoryColumns, PackedHistory

__all__ = [
    "IN_MEMORY",
    "USERS_AT_ONCE",
    "Catalogued",
    "Histories",
    "Outbox",
    "StoredBlocks",
    "StoredNames",
    "read_histories",
]

USERS_AT_ONCE = 4096
"""Most users whose names or interactions are read from the store together."""
IN_MEMORY = USERS_AT_ONCE
"""Most users of a host that keeps what it has of each in memory."""

_COLUMNS = ("user", "item", "positive", "time", "part")
_PARTS = (TRAIN, VALIDATION, TEST, RANKED)


def read_histories(path: Path) -> tuple[list[str], PackedHistory]:
    """Read histories from CSV with columns ``user,item,positive,time,part`` and optionally ``rating``.

    A row of part ``RANKED`` is no interaction: it names an item among which the user's held-out items are ranked.

    Returns
    -------
    names : list of str
        Users in order of first appearance.
    interactions : PackedHistory
        Interactions, with users counted from 1.

    Raises
    ------
    DataError
        When the file cannot be read, lacks a column, or a value is out of range; names the line.
    """
    names: dict[str, int] = {}
    interactions = PackedHistory()
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise DataError(f"{path}: no column {', '.join(missing)}; found {reader.fieldnames}")
            for line, row in enumerate(reader, start=2):
                user = names.setdefault(row["user"], len(names) + 1)
                _append(interactions, path, line, user, row)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if not names:
        raise DataError(f"{path}: no interactions")
    return list(names), interactions


def _append(held: PackedHistory, path: Path, line: int, user: int, row: dict[str, str]) -> None:
    try:
        positive, part = int(row["positive"]), int(row["part"])
        rating = float(row["rating"]) if row.get("rating") else None
        if (
            positive in (0, 1)
            and part in _PARTS
            and row["item"]
            and (rating is None or math.isfinite(rating))
        ):
            held.append(store.Interaction(user, row["item"], bool(positive), int(row["time"]), part, rating))
            return
    except (TypeError, ValueError, OverflowError):
        pass
    raise DataError(
        f"{path}, line {line}: expected item, positive 0 or 1, time in seconds, part 0, 1, 2 or 3, and as rating a "
        "number or nothing"
    )


@dataclass(frozen=True)
class Catalogued:
    """The catalogue as a host uses it: indices of item keys, and a table of which owners hold which item."""

    version: int
    index: dict[str, int]
    owners: tuple[bytes, ...]
    member: npt.NDArray[np.bool_]


class Outbox:
    """An outbox: the records that a user sends to an owner, in sequence order; position ``n - 1`` has number ``n``.

    ``doubtful`` says that the owner may have been restored from a backup since it acknowledged.  The last acknowledged
    record is then sent once more, and the answer shows whether the owner still has it.
    """

    __slots__ = ("acknowledged", "doubtful", "rows")

    def __init__(self) -> None:
        self.rows: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)
        self.acknowledged = 0
        self.doubtful = False

    @property
    def waits(self) -> bool:
        """Whether a record is not acknowledged, or its acknowledgement is in doubt."""
        return self.acknowledged < len(self.rows) or (self.doubtful and self.acknowledged > 0)

    @property
    def first(self) -> int:
        """Number of the first record to send: the next one, or the last one again where only that is in doubt."""
        return min(self.acknowledged + 1, len(self.rows))


class StoredNames(Sequence[str]):
    """Names of a host's users, read from its store some at a time.

    Parameters
    ----------
    engine : sqlalchemy.Engine
        The store.
    count : int
        How many of its users there are, the first ones.
    """

    def __init__(self, engine: sa.Engine, count: int) -> None:
        self._engine, self._count = engine, count
        self._read: tuple[int, list[str]] = 0, []

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        if isinstance(at, slice):
            chosen = range(self._count)[at]
            if chosen.step == 1:
                return self._load(chosen.start, chosen.stop)
            return [self[position] for position in chosen]
        position = range(self._count)[at]
        first, names = self._read
        if not first <= position < first + len(names):
            first = position - position % USERS_AT_ONCE
            names = self._load(first, min(first + USERS_AT_ONCE, self._count))
            self._read = first, names
        return names[position - first]

    def _load(self, first: int, last: int) -> list[str]:
        with self._engine.connect() as connection:
            return store.load_names(connection, first + 1, last)

    def __iter__(self) -> Iterator[str]:
        for first in range(0, self._count, USERS_AT_ONCE):
            yield from self._load(first, min(first + USERS_AT_ONCE, self._count))


class StoredBlocks:
    """Interactions of a host's users, read from its store some users after others.

    Parameters
    ----------
    histories : Histories
    engine : sqlalchemy.Engine
        The store.
    catalogue : Catalogued
    """

    def __init__(self, histories: Histories, engine: sa.Engine, catalogue: Catalogued) -> None:
        self._histories, self._engine, self._catalogue = histories, engine, catalogue

    def whole(self) -> HistoryArrays:
        """Return the interactions of all users, as `history_arrays` has them."""
        return self._histories.interactions(self._catalogue)

    def ranked(self) -> bool:
        """Return whether there are items of the catalogue among which held-out ones are ranked."""
        with self._engine.connect() as connection:
            if not store.has_part(connection, RANKED):
                return False
        return any((block.part == RANKED).any() for _, block in self)

    def __iter__(self) -> Iterator[tuple[range, HistoryArrays]]:
        """Yield positions of users, and their interactions; users are counted from the first of them."""
        count = len(self._histories.names)
        for first in range(0, count, USERS_AT_ONCE):
            users = range(first, min(first + USERS_AT_ONCE, count))
            held = _stored(self._engine, (users.start + 1, users.stop))
            rows = history_arrays(_placed(held, self._catalogue))
            yield users, rows._replace(user=rows.user - np.int32(first))


def _stored(engine: sa.Engine, users: tuple[int, int] | None = None) -> PackedHistory:
    """Read the interactions of all users, or of those from one number to another."""
    with engine.connect() as connection:
        return PackedHistory(one for _, one in store.load_history(connection, users))


def _placed(held: PackedHistory, catalogue: Catalogued) -> HistoryColumns:
    return held.columns(lambda key: catalogue.index.get(key, -1))


class Histories:
    """Histories and outboxes of a host, in memory and in its store.

    Parameters
    ----------
    engine : sqlalchemy.Engine
        The store.
    writer : Writer
        Its writer.
    """

    def __init__(self, engine: sa.Engine, writer: Writer) -> None:
        self._writer = writer
        self._engine = engine
        self.outboxes: dict[bytes, dict[int, Outbox]] = defaultdict(lambda: defaultdict(Outbox))
        self._columns: tuple[Catalogued, HistoryColumns] | None = None
        # All interactions, where this host has few users or something needed them together.
        self._held: PackedHistory | None = None
        self._loading = threading.Lock()
        self._count = 0
        self.names: Sequence[str] = ()
        with engine.connect() as connection:
            self._name(connection)
            self._number(connection)
            for entry in store.load_entries(connection):
                self._extend(entry)
            self._acknowledged = {
                (row.user, row.recipient): (row.acknowledged, row.last_ms)
                for row in store.load_sent(connection)
                if row.kind == "interaction"
            }
        # A change that is cut short would leave memory behind the store.
        self._changing = asyncio.Lock()

        if len(self.names) <= IN_MEMORY:
            self._whole()

    def _name(self, connection: sa.Connection) -> None:
        count = store.count_users(connection)
        self.names = store.load_users(connection) if count <= IN_MEMORY else StoredNames(self._engine, count)

    def _number(self, connection: sa.Connection) -> None:
        self._count, highest = store.count_history(connection)
        if highest != self._count:
            raise DataError(
                f"the history has {self._count} rows, and the last is row {highest}",
                hint="restore the store from a backup",
            )

    def __len__(self) -> int:
        """Return the number of interactions."""
        return self._count

    @property
    def in_blocks(self) -> bool:
        """Whether the users are so many that what is large for each is read from files, some users after others."""
        return len(self.names) > IN_MEMORY

    def _whole(self) -> PackedHistory:
        """Return all interactions, and keep them in memory from now on."""
        with self._loading:
            if self._held is None:
                self._held = _stored(self._engine)
            return self._held

    def _extend(self, entry: store.OutboxEntry) -> None:
        outbox = self.outboxes[entry.owner][entry.user]
        outbox.rows = np.concatenate([outbox.rows, np.frombuffer(entry.rows, "<u4")])

    async def take(
        self,
        names: Sequence[str],
        interactions: Iterable[store.Interaction],
        preferred: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        """Add users, interactions and what users prefer, by user and name, to the store, all or nothing.

        A cancelled caller does not stop the write.
        """
        taken = interactions if isinstance(interactions, PackedHistory) else PackedHistory(interactions)
        await completed(self._take(names, taken, preferred or {}))

    async def _take(
        self,
        names: Sequence[str],
        taken: PackedHistory,
        preferred: Mapping[int, Mapping[str, float]],
    ) -> None:
        async with self._changing:
            await self._take_alone(names, taken, preferred)

    async def _take_alone(
        self,
        names: Sequence[str],
        taken: PackedHistory,
        preferred: Mapping[int, Mapping[str, float]],
    ) -> None:

        def write(connection: sa.Connection) -> None:
            store.add_users(connection, names)
            store.add_history(connection, taken)
            for user, own in preferred.items():
                store.set_preferences(connection, user, own)

        await self._writer.run(write)
        await asyncio.to_thread(self._taken, taken, named=bool(names))

    def _taken(self, taken: PackedHistory, *, named: bool) -> None:
        """Take note of interactions that are in the store now, and with ``named`` of users."""
        if named:
            with self._engine.connect() as connection:
                self._name(connection)
        before, self._count = self._count, self._count + len(taken)
        with self._loading:
            if not before:
                self._held = None if self.in_blocks else taken
            elif self._held is not None:
                # Who read them from the store meanwhile may have these already.
                missing = self._count - len(self._held)
                self._held.extend(taken[len(taken) - missing :])

    def number(self, name: str) -> int:
        """Return a user's number, from 1.

        Raises
        ------
        DataError
            When no user of this host has the name.
        """
        with self._engine.connect() as connection:
            number = store.number_of(connection, name)
        if number is None:
            raise DataError("no such user on this host")
        return number

    def keys(self, user: int) -> set[str]:
        """Return the keys of all items in a user's history, held-out ones included."""
        return {one.item for one in self._of(user) if one.part != RANKED}

    def seen(self, user: int, catalogue: Catalogued) -> set[int]:
        """Return the indices of the items in a user's training history."""
        keys = (one.item for one in self._of(user) if one.part == TRAIN)
        return {catalogue.index[key] for key in keys if key in catalogue.index}

    def _of(self, user: int) -> Iterator[store.Interaction]:
        held = _stored(self._engine, (user, user)) if self._held is None else self._held
        return (held[int(row)] for row in held.rows_of(user))

    def acknowledged_before(self, owner: bytes, recipient: str) -> Outbox | None:
        """Restore, after a restart, an owner's acknowledgements; return the outbox with the latest one."""
        latest, latest_ms = None, -1
        for user, outbox in self.outboxes[owner].items():
            held, last_ms = self._acknowledged.get((user, recipient), (0, -1))
            outbox.acknowledged = max(outbox.acknowledged, min(held, len(outbox.rows)))
            if outbox.acknowledged and last_ms > latest_ms:
                latest, latest_ms = outbox, last_ms
        return latest

    async def queue(self, catalogue: Catalogued) -> None:
        """Put interactions that are not queued yet into the outboxes of the owners that hold their items, durably."""
        await completed(self._queue(catalogue))

    async def _queue(self, catalogue: Catalogued) -> None:
        async with self._changing:
            await self._queue_alone(catalogue)

    async def _queue_alone(self, catalogue: Catalogued) -> None:
        columns = self._by_row(catalogue)
        trained = np.flatnonzero((columns.part == TRAIN) & (columns.item >= 0))
        trained = trained[np.argsort(columns.user[trained], kind="stable")]
        users, starts = np.unique(columns.user[trained], return_index=True)
        entries = []
        for user, own in zip(users.tolist(), np.split(trained, starts[1:]), strict=False):
            rows, items = (own + 1).astype(np.uint32), columns.item[own]
            held = catalogue.member[items]
            for position, owner in enumerate(catalogue.owners):
                fresh = rows[held[:, position]]
                queued = self.outboxes[owner][user].rows
                if len(queued):
                    fresh = fresh[~np.isin(fresh, queued)]
                if len(fresh):
                    packed = fresh.astype("<u4").tobytes()
                    entries.append(store.OutboxEntry(user, owner, len(queued) + 1, len(fresh), packed))
        await self._writer.run(lambda connection: store.add_entries(connection, entries))
        for entry in entries:
            self._extend(entry)

    def records(
        self, rows: npt.NDArray[np.uint32], catalogue: Catalogued
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
        """Return item indices and flags of history rows."""
        columns = self._by_row(catalogue)
        return columns.item[rows - 1].astype(np.uint32), columns.positive[rows - 1]

    def _by_row(self, catalogue: Catalogued) -> HistoryColumns:
        """Return all rows, kept until there are others; items have the catalogue's indices, -1 outside it."""
        held = self._columns
        whole = self._whole()
        if held is None or held[0] is not catalogue or len(held[1].user) != len(whole):
            held = self._columns = catalogue, _placed(whole, catalogue)
        return held[1]

    def holdout(self, catalogue: Catalogued, *, at_most: int) -> Holdout:
        """Return the hold-out of this host's users on the first ``at_most`` items of the catalogue."""
        columns = self._by_row(catalogue)
        n_items = min(len(catalogue.index), at_most)
        known = (columns.item >= 0) & (columns.item < n_items) & (columns.part != RANKED)
        return Holdout(
            n_users=len(self.names),
            n_items=n_items,
            user=columns.user[known].astype(np.int64) - 1,
            item=columns.item[known].astype(np.int64),
            positive=columns.positive[known],
            part=columns.part[known].astype(np.int64),
        )

    def interactions(self, catalogue: Catalogued) -> HistoryArrays:
        """Return the rows with the catalogue's items, as `history_arrays` has them."""
        # Of very many users they are not kept.
        held = _stored(self._engine) if self._held is None else self._held
        return history_arrays(_placed(held, catalogue))

    def blocks(self, catalogue: Catalogued) -> StoredBlocks:
        """Return the rows with the catalogue's items, some users after others."""
        return StoredBlocks(self, self._engine, catalogue)

    def waiting(self, owner: bytes) -> list[tuple[int, Outbox]]:
        """Return the users that have something to send to an owner, in a fixed order."""
        return sorted(
            ((user, outbox) for user, outbox in self.outboxes[owner].items() if outbox.waits),
            key=lambda pair: pair[0],
        )
