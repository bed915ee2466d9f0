"""Keep the histories of a host's users, and an outbox for each user and data owner (DRIFT)."""

from __future__ import annotations

import asyncio
import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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

__all__ = ["Catalogued", "Histories", "Outbox", "read_histories"]

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
        self.names: list[str] = []
        self._engine = engine
        self._held = PackedHistory()
        self.outboxes: dict[bytes, dict[int, Outbox]] = defaultdict(lambda: defaultdict(Outbox))
        self._columns: tuple[Catalogued, HistoryColumns] | None = None
        with engine.connect() as connection:
            self.names += store.load_users(connection)
            for row, interaction in store.load_history(connection):
                self._append(row, interaction)
            for entry in store.load_entries(connection):
                self._extend(entry)
            self._acknowledged = {
                (row.user, row.recipient): (row.acknowledged, row.last_ms)
                for row in store.load_sent(connection)
                if row.kind == "interaction"
            }
        # A change that is cut short would leave memory behind the store.
        self._changing = asyncio.Lock()

    def __len__(self) -> int:
        """Return the number of interactions."""
        return len(self._held)

    def _append(self, row: int, interaction: store.Interaction) -> None:
        self._held.append(interaction)
        if row != len(self._held):
            raise DataError(f"the history has a gap before row {row}", hint="restore the store from a backup")

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
        self.names += names
        if self._held:
            self._held.extend(taken)
        else:
            self._held = taken

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
        held = self._held
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
        if held is None or held[0] is not catalogue or len(held[1].user) != len(self._held):
            held = self._columns = catalogue, self._placed(catalogue)
        return held[1]

    def _placed(self, catalogue: Catalogued) -> HistoryColumns:
        return self._held.columns(lambda key: catalogue.index.get(key, -1))

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
        return history_arrays(self._placed(catalogue))

    def waiting(self, owner: bytes) -> list[tuple[int, Outbox]]:
        """Return the users that have something to send to an owner, in a fixed order."""
        return sorted(
            ((user, outbox) for user, outbox in self.outboxes[owner].items() if outbox.waits),
            key=lambda pair: pair[0],
        )
