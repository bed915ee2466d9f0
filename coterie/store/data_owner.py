"""The store of a data owner: opened batches, sequence numbers, positions where trailing blocks were closed.

Blocks are not stored: they are a function of the batches in the order in which they became durable, of the flushes
and of nothing else, so a restart builds exactly the blocks that were there before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

__all__ = ["Batch", "Taken", "WindowRow", "metadata"]

metadata = sa.MetaData()

batches = sa.Table(
    "batches",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("owner", sa.LargeBinary, nullable=False),
    sa.Column("user", sa.LargeBinary, nullable=False),
    sa.Column("first", sa.Integer, nullable=False),
    sa.Column("length", sa.Integer, nullable=False),
    sa.Column("records", sa.LargeBinary, nullable=False),
    sa.UniqueConstraint("owner", "user", "first"),
)

flushes = sa.Table(
    "flushes",
    metadata,
    sa.Column("owner", sa.LargeBinary, primary_key=True),
    sa.Column("after_batch", sa.Integer, primary_key=True),
)

passes = sa.Table(
    "passes",
    metadata,
    sa.Column("owner", sa.LargeBinary, primary_key=True),
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("epoch", sa.Integer, primary_key=True),
    sa.Column("blocks", sa.Integer, nullable=False),
)


visits = sa.Table(
    "visits",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("owner", sa.LargeBinary, nullable=False),
    sa.Column("user", sa.LargeBinary, nullable=False),
    sa.Column("visit", sa.Integer, nullable=False),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("complete", sa.Boolean, nullable=False),
    sa.Column("length", sa.Integer, nullable=False),
    sa.Column("records", sa.LargeBinary, nullable=False),
    sa.Column("reply", sa.LargeBinary, nullable=False),
    sa.UniqueConstraint("owner", "user", "visit"),
)
"""DRIFT's shielded form: every visit, with its records and the owner's reply."""

gradients = sa.Table(
    "gradients",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("owner", sa.LargeBinary, nullable=False),
    sa.Column("slot", sa.Integer, nullable=False),
    sa.Column("items", sa.LargeBinary, nullable=False),
    sa.Column("gradient", sa.LargeBinary, nullable=False),
)
"""Gradients that visits added to the held-back rows since ``held`` was last written."""

held = sa.Table(
    "held",
    metadata,
    sa.Column("owner", sa.LargeBinary, primary_key=True),
    sa.Column("rows", sa.LargeBinary, nullable=False),
)

windows = sa.Table(
    "windows",
    metadata,
    sa.Column("owner", sa.LargeBinary, primary_key=True),
    sa.Column("joined", sa.Integer, nullable=False),
    sa.Column("contribution", sa.LargeBinary, nullable=False),
    sa.Column("ledger", sa.String, nullable=False),
    sa.Column("offered", sa.Integer, nullable=False),
    sa.Column("rows", sa.LargeBinary, nullable=False),
)
"""An owner's journal of sums, and the rows of the window ``offered`` until that window's outcome is known."""


slots = sa.Table(
    "slots",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("user", sa.LargeBinary, primary_key=True),
    sa.Column("slot", sa.Integer, nullable=False),
    sa.UniqueConstraint("run_id", "slot"),
)
"""The slot that each user had first in a run, which the user keeps."""


class Taken(NamedTuple):
    """A visit with the gradients that it added to the held-back rows; arrays are little-endian int32 and float32."""

    user: bytes
    slot: int
    visit: int
    epoch: int
    complete: bool
    length: int
    records: bytes
    reply: bytes
    items: bytes
    gradient: bytes


class WindowRow(NamedTuple):
    """An owner's journal of sums; ``offered`` is 0 while no window is offered."""

    joined: int = 0
    contribution: bytes = b""
    ledger: str = ""
    offered: int = 0
    rows: bytes = b""


class Batch(NamedTuple):
    """Records of one user that became durable together.

    ``records`` are packed little-endian (item uint32, positive uint8).
    """

    user: bytes
    first: int
    length: int
    records: bytes


def add_slots(connection: sa.Connection, run_id: str, fresh: Mapping[bytes, int]) -> None:
    """Append users with their slots in a run."""
    rows = [{"run_id": run_id, "user": user, "slot": slot} for user, slot in fresh.items()]
    connection.execute(slots.insert(), rows)


def load_slots(connection: sa.Connection, run_id: str) -> dict[bytes, int]:
    """Return the slots of a run's users, by participant id."""
    found = connection.execute(sa.select(slots.c.user, slots.c.slot).where(slots.c.run_id == run_id))
    return {row.user: row.slot for row in found}


def add_batches(connection: sa.Connection, owner: bytes, accepted: Sequence[Batch]) -> None:
    """Append batches in order."""
    connection.execute(batches.insert(), [{"owner": owner, **batch._asdict()} for batch in accepted])


def load_batches(connection: sa.Connection, owner: bytes) -> Iterator[tuple[int, Batch]]:
    """Yield an owner's batches with their numbers, in the order in which they became durable."""
    rows = connection.execute(
        sa.select(batches.c.number, batches.c.user, batches.c.first, batches.c.length, batches.c.records)
        .where(batches.c.owner == owner)
        .order_by(batches.c.number)
    )
    for row in rows:
        yield row.number, Batch(row.user, row.first, row.length, row.records)


def add_flush(connection: sa.Connection, owner: bytes) -> None:
    """Record that trailing blocks count as complete after the batches stored so far."""
    last = connection.execute(
        sa.select(sa.func.max(batches.c.number)).where(batches.c.owner == owner)
    ).scalar()
    row = {"owner": owner, "after_batch": last or 0}
    if not connection.execute(
        sa.select(flushes).where((flushes.c.owner == owner) & (flushes.c.after_batch == row["after_batch"]))
    ).first():
        connection.execute(flushes.insert(), row)


def load_flushes(connection: sa.Connection, owner: bytes) -> list[int]:
    """Return the numbers of the batches after which trailing blocks were closed, ascending."""
    rows = connection.execute(
        sa.select(flushes.c.after_batch).where(flushes.c.owner == owner).order_by(flushes.c.after_batch)
    )
    return [row.after_batch for row in rows]


def begin_pass(connection: sa.Connection, owner: bytes, run_id: str, epoch: int, blocks: int) -> int:
    """Fix the number of blocks of an epoch's pass; return the number that was fixed first."""
    key = (passes.c.owner == owner) & (passes.c.run_id == run_id) & (passes.c.epoch == epoch)
    held = connection.execute(sa.select(passes.c.blocks).where(key)).scalar()
    if held is not None:
        return int(held)
    connection.execute(passes.insert(), {"owner": owner, "run_id": run_id, "epoch": epoch, "blocks": blocks})
    return blocks


def add_visits(connection: sa.Connection, owner: bytes, taken: Sequence[Taken]) -> None:
    """Append visits in order."""
    connection.execute(
        visits.insert(),
        [
            {
                "owner": owner,
                "user": one.user,
                "visit": one.visit,
                "epoch": one.epoch,
                "complete": one.complete,
                "length": one.length,
                "records": one.records,
                "reply": one.reply,
            }
            for one in taken
        ],
    )
    rows = [
        {"owner": owner, "slot": one.slot, "items": one.items, "gradient": one.gradient}
        for one in taken
        if one.items
    ]
    if rows:
        connection.execute(gradients.insert(), rows)


def load_visits(connection: sa.Connection, owner: bytes) -> Iterator[sa.Row[Any]]:
    """Yield an owner's visits in the order in which they became durable."""
    yield from connection.execute(sa.select(visits).where(visits.c.owner == owner).order_by(visits.c.number))


def load_gradients(connection: sa.Connection, owner: bytes) -> Iterator[sa.Row[Any]]:
    """Yield the gradients that visits added since ``held`` was last written, in order."""
    yield from connection.execute(
        sa.select(gradients).where(gradients.c.owner == owner).order_by(gradients.c.number)
    )


def load_held(connection: sa.Connection, owner: bytes) -> bytes | None:
    """Return the held-back rows as last written as a whole; None before the first time."""
    rows: bytes | None = connection.execute(sa.select(held.c.rows).where(held.c.owner == owner)).scalar()
    return rows


def save_held(connection: sa.Connection, owner: bytes, rows: bytes) -> None:
    """Write the held-back rows as a whole, and delete the visits' gradients, which they contain."""
    connection.execute(gradients.delete().where(gradients.c.owner == owner))
    if not connection.execute(held.update().where(held.c.owner == owner), {"rows": rows}).rowcount:
        connection.execute(held.insert(), {"owner": owner, "rows": rows})


def load_window(connection: sa.Connection, owner: bytes) -> WindowRow:
    """Return an owner's journal of sums."""
    row = connection.execute(sa.select(windows).where(windows.c.owner == owner)).first()
    return WindowRow() if row is None else WindowRow(*row[1:])


def save_window(connection: sa.Connection, owner: bytes, window: WindowRow) -> None:
    """Write an owner's journal of sums."""
    values = window._asdict()
    if not connection.execute(windows.update().where(windows.c.owner == owner), values).rowcount:
        connection.execute(windows.insert(), {"owner": owner, **values})
