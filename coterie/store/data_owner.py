"""A data owner's store: sealed batches once opened, sequence numbers, where trailing blocks were closed.

Blocks are not stored: they are a function of the batches in the order in which they became durable, of the flushes
and of nothing else, so a restart builds exactly the blocks that were there before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import sqlalchemy as sa

__all__ = ["Batch", "metadata"]

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


class Batch(NamedTuple):
    """Records of one user that became durable together.

    ``records`` are packed little-endian (item uint32, positive uint8).
    """

    user: bytes
    first: int
    length: int
    records: bytes


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
    """Note that trailing blocks count as complete after the batches that are there now."""
    last = connection.execute(
        sa.select(sa.func.max(batches.c.number)).where(batches.c.owner == owner)
    ).scalar()
    row = {"owner": owner, "after_batch": last or 0}
    if not connection.execute(
        sa.select(flushes).where((flushes.c.owner == owner) & (flushes.c.after_batch == row["after_batch"]))
    ).first():
        connection.execute(flushes.insert(), row)


def load_flushes(connection: sa.Connection, owner: bytes) -> list[int]:
    """Return after which batches trailing blocks were closed."""
    rows = connection.execute(
        sa.select(flushes.c.after_batch).where(flushes.c.owner == owner).order_by(flushes.c.after_batch)
    )
    return [row.after_batch for row in rows]


def begin_pass(connection: sa.Connection, owner: bytes, run_id: str, epoch: int, blocks: int) -> int:
    """Fix how many blocks an epoch passes over; return the number fixed the first time."""
    key = (passes.c.owner == owner) & (passes.c.run_id == run_id) & (passes.c.epoch == epoch)
    held = connection.execute(sa.select(passes.c.blocks).where(key)).scalar()
    if held is not None:
        return int(held)
    connection.execute(passes.insert(), {"owner": owner, "run_id": run_id, "epoch": epoch, "blocks": blocks})
    return blocks
