"""The transparency log in the third party's store: what it signs, in the transaction that keeps the signed thing.

`coterie.store.thirdparty.ThirdPartyStore` calls `append` on its connections; `LogReader` answers for the log.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import sqlalchemy as sa

from coterie.crypto.merkle import Tree
from coterie.crypto.transparency import entry_leaf, validate_kind
from coterie.store.thirdparty_keys import metadata
from coterie.wire.refusal import ErrorReason, Refusal

__all__ = ["Inclusion", "LogReader", "append", "append_all", "is_logged", "next_time", "page", "size_of"]

entries = sa.Table(
    "log_entries",
    metadata,
    sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("statement", sa.LargeBinary, nullable=False),
    sa.Column("leaf", sa.LargeBinary, nullable=False, index=True),
)

# One row: the time of the newest signed head, Unix milliseconds.
clock = sa.Table(
    "log_clock", metadata, sa.Column("time_ms", sa.BigInteger, primary_key=True, autoincrement=False)
)

_PER_PAGE = 1 << 20
_PER_STEP = 10_000
_PER_QUERY = 500


class Inclusion(NamedTuple):
    """The proof that an entry is in a tree."""

    position: int
    path: list[bytes]
    """Hashes from the leaf up, 32 bytes each."""


def append(connection: sa.Connection, kind: str, statement: bytes) -> None:
    """Add a statement that the third party signs to its log, within the transaction that keeps the signed thing.

    Parameters
    ----------
    connection : sqlalchemy.Connection
        Of the store's writer.
    kind : str
        1 to 32 of a-z and inner '-'.
    statement : bytes
        The signed bytes; a certificate in DER.
    """
    append_all(connection, [(kind, statement)])


def append_all(connection: sa.Connection, added: Sequence[tuple[str, bytes]]) -> None:
    """Add statements in their order, each with its kind; as `append`."""
    if not added:
        return
    first = size_of(connection)
    connection.execute(
        entries.insert(),
        [
            {
                "position": first + number,
                "kind": validate_kind(kind),
                "statement": statement,
                "leaf": entry_leaf(kind, statement),
            }
            for number, (kind, statement) in enumerate(added)
        ],
    )


def size_of(connection: sa.Connection) -> int:
    """Return the number of entries."""
    newest: int | None = connection.execute(sa.select(sa.func.max(entries.c.position))).scalar_one()
    return 0 if newest is None else newest + 1


def is_logged(connection: sa.Connection, kind: str, statement: bytes) -> bool:
    """Return whether the log has a statement."""
    query = sa.select(entries.c.position).where(entries.c.leaf == entry_leaf(kind, statement)).limit(1)
    return connection.execute(query).scalar_one_or_none() is not None


def next_time(connection: sa.Connection) -> int:
    """Return the time for the next head, Unix milliseconds, and keep it: later than that of every head before."""
    before: int = connection.execute(sa.select(clock.c.time_ms)).scalar_one()
    now = max(time.time_ns() // 1_000_000, before + 1)
    connection.execute(clock.update().values(time_ms=now))
    return now


class LogReader:
    """The log's tree in memory, which follows what is committed.  Safe to share between threads."""

    def __init__(self) -> None:
        self._tree = Tree()
        self._lock = threading.Lock()

    def head(self, connection: sa.Connection) -> tuple[int, bytes]:
        """Return size and root of the log."""
        with self._lock:
            self._follow(connection)
            return len(self._tree), self._tree.root()

    def inclusion(
        self, connection: sa.Connection, leaves: Sequence[bytes], size: int
    ) -> list[Inclusion | None]:
        """Return proofs that leaves are in the tree of the first ``size`` entries; None for a leaf that is not.

        Raises
        ------
        Refusal
            INVALID_FIELD when the log has fewer entries.
        """
        found = _positions(connection, leaves, size)
        with self._lock:
            self._follow(connection)
            self._check(size, "size")
            return [
                None
                if (index := found.get(leaf)) is None
                else Inclusion(index, self._tree.inclusion(index, size))
                for leaf in leaves
            ]

    def inclusions(
        self, connection: sa.Connection, leaves: Sequence[bytes], size: int
    ) -> tuple[list[int], list[bytes]]:
        """Return one proof for all of these leaves that are in the tree of the first ``size`` entries.

        Returns
        -------
        positions : list of int
            For each leaf its position plus 1; 0 for a leaf that is not in the tree.
        path : list of bytes
            Hashes, 32 bytes each; none where no leaf is in the tree.

        Raises
        ------
        Refusal
            INVALID_FIELD when the log has fewer entries.
        """
        found = _positions(connection, leaves, size)
        with self._lock:
            self._follow(connection)
            self._check(size, "size")
            path = self._tree.inclusions(sorted(found.values()), size) if found else []
        return [found.get(leaf, -1) + 1 for leaf in leaves], path

    def consistency(self, connection: sa.Connection, first: int, second: int) -> list[bytes]:
        """Return the proof that the tree of ``second`` entries begins with that of ``first``.

        Raises
        ------
        Refusal
            INVALID_FIELD when the log has fewer entries, or the sizes are in the wrong order.
        """
        with self._lock:
            self._follow(connection)
            self._check(second, "second")
            if first > second:
                raise Refusal(
                    ErrorReason.ERROR_REASON_INVALID_FIELD,
                    f"a tree of {first} entries before one of {second}",
                    field="first",
                    expected=f"0 to {second}",
                )
            return self._tree.consistency(first, second)

    def _follow(self, connection: sa.Connection) -> None:
        while True:
            query = sa.select(entries.c.position, entries.c.leaf).where(entries.c.position >= len(self._tree))
            rows = connection.execute(query.order_by(entries.c.position).limit(_PER_STEP)).all()
            for row in rows:
                if row.position != len(self._tree):
                    raise AssertionError(f"the log has no entry {len(self._tree)}")
                self._tree.append(row.leaf)
            if len(rows) < _PER_STEP:
                return

    def _check(self, size: int, field: str) -> None:
        if size > len(self._tree):
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                f"size {size} of a log of {len(self._tree)} entries",
                field=field,
                expected=f"at most {len(self._tree)}",
            )


def page(connection: sa.Connection, first: int, count: int) -> list[tuple[str, bytes]]:
    """Return entries from a position on, at most ``count`` and about 1 MiB: kinds and statements."""
    query = sa.select(entries.c.kind, entries.c.statement).where(
        (entries.c.position >= first) & (entries.c.position < first + count)
    )
    found, size = list[tuple[str, bytes]](), 0
    for row in connection.execute(query.order_by(entries.c.position)):
        size += len(row.statement)
        if found and size > _PER_PAGE:
            break
        found.append((row.kind, row.statement))
    return found


def _positions(connection: sa.Connection, leaves: Iterable[bytes], size: int) -> dict[bytes, int]:
    """Return the first position of each leaf among the first ``size`` entries; absent leaves are left out."""
    wanted, found = list(dict.fromkeys(leaves)), dict[bytes, int]()
    for start in range(0, len(wanted), _PER_QUERY):
        query = (
            sa.select(entries.c.leaf, sa.func.min(entries.c.position).label("position"))
            .where(entries.c.leaf.in_(wanted[start : start + _PER_QUERY]) & (entries.c.position < size))
            .group_by(entries.c.leaf)
        )
        found.update((row.leaf, row.position) for row in connection.execute(query))
    return found
