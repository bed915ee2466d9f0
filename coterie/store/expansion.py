"""The store of graph expansion at the third party: graph keys sealed for their holders, uploads, tags.

It holds tags under a key that it does not have, embeddings sealed to clients, and upload ids; no item, no user, and no
party but the one that made a graph key.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import sqlalchemy as sa

from coterie.crypto.graph_tags import TAG_BYTES
from coterie.store.engine import Writer, failure, open_sqlite
from coterie.store.latent_tables import metadata
from coterie.store.postgres import DatabaseAddress, open_postgres
from coterie.wire.refusal import ErrorReason, Refusal

__all__ = [
    "LEAST_USERS",
    "MOST_QUESTIONS",
    "ExpansionStore",
    "FoundNeighbour",
    "GraphCounts",
    "KeptGraph",
    "TagPublication",
    "metadata",
]

T = TypeVar("T")

LEAST_USERS = 5
"""Fewest uploads with a tag for which it is served."""
MOST_QUESTIONS = 64
"""Most questions of an upload."""
_MOST_SEQUENCE = 4096
_PER_QUERY = 400
"""Values in one statement; SQLite allows 999 in old releases."""
_SCHEMA = "expansion"
_FILE = "expansion.db"

# In SQLite every integer has 64 bits.
_INTEGER = sa.Integer().with_variant(sa.BigInteger(), "postgresql")

graphs = sa.Table(
    "graphs",
    metadata,
    sa.Column("graph", sa.Integer, primary_key=True),
    sa.Column("run_id", sa.String, nullable=False),
    sa.Column("epoch", _INTEGER, nullable=False),
    sa.Column("generator", sa.LargeBinary, nullable=False),
    sa.Column("expiry", _INTEGER, nullable=False),
    sa.Column("record", sa.LargeBinary, nullable=False),
    sa.UniqueConstraint("run_id", "epoch"),
)

envelopes = sa.Table(
    "graph_envelopes",
    metadata,
    sa.Column("graph", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("holder", sa.LargeBinary, primary_key=True),
    sa.Column("sealed", sa.LargeBinary, nullable=False),
)

orders = sa.Table(
    "graph_orders",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("least_epoch", _INTEGER, nullable=False),
)
"""Runs whose graph key an operator had replaced, and the lowest epoch that will do since."""

uploads = sa.Table(
    "graph_uploads",
    metadata,
    sa.Column("upload", sa.Integer, primary_key=True),
    sa.Column("graph", sa.Integer, nullable=False),
    sa.Column("upload_id", sa.LargeBinary, nullable=False),
    sa.Column("sequence", _INTEGER, nullable=False),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    sa.Column("tags", sa.LargeBinary, nullable=False),
    sa.Column("embedding", sa.LargeBinary, nullable=False),
    sa.Column("questions", _INTEGER, nullable=False),
    sa.Column("given", _INTEGER, nullable=False),
    sa.Column("forgotten", sa.Boolean, nullable=False),
    sa.UniqueConstraint("graph", "upload_id"),
)
"""Uploads; a forgotten one keeps its id only, so that nobody brings it back by sending an old request again."""

tags = sa.Table(
    "graph_tags",
    metadata,
    sa.Column("graph", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("tag", sa.LargeBinary, primary_key=True),
    sa.Column("upload", sa.Integer, primary_key=True, autoincrement=False),
    sqlite_with_rowid=False,
)

refusals = sa.Table(
    "graph_refusals",
    metadata,
    sa.Column("graph", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("reason", sa.String, primary_key=True),
    sa.Column("count", _INTEGER, nullable=False),
)


class KeptGraph(NamedTuple):
    """A graph key as the third party keeps it."""

    graph: int
    """Number of the graph in the store."""
    run_id: str
    epoch: int
    generator: bytes
    """Id of the holder that made the key, 32 bytes."""
    expiry: int
    """When the graph is deleted, Unix seconds."""
    record: bytes
    """``GraphRecord``, serialised."""


class TagPublication(NamedTuple):
    """A publication of an upload, opened and checked."""

    upload_id: bytes
    """32 bytes."""
    sequence: int
    """From 1."""
    tags: bytes
    """Tags to add, 32 bytes each, ascending, each once."""
    embedding: bytes
    """The sealed embedding."""

    @property
    def digest(self) -> bytes:
        """SHA-256 of its content, 32 bytes."""
        return hashlib.sha256(self.tags + self.embedding).digest()


class FoundNeighbour(NamedTuple):
    """A neighbour of an upload."""

    embedding: bytes
    """The sealed embedding."""
    tags: frozenset[bytes]
    """Tags that both have, of those asked about."""


@dataclass(frozen=True)
class GraphCounts:
    """Counters of a graph over all its uploads."""

    epoch: int
    uploads: int
    tags: int
    served_tags: int
    questions: int
    neighbours: int
    refused: Mapping[str, int]


class ExpansionStore:
    """The store of one third party's graphs, in a file or in a PostgreSQL database.

    Parameters
    ----------
    folder : Path
        Folder of the SQLite file; made when absent.
    database : DatabaseAddress, optional
        A database in place of the file.

    Raises
    ------
    StoreError
        When the file or database cannot be opened.
    ConfigError
        When the address of the database cannot be used.
    """

    def __init__(self, folder: Path, database: DatabaseAddress | None = None) -> None:
        if database is None:
            self._engine = writing = open_sqlite(folder / _FILE, _SCHEMA)
        else:
            self._engine, writing = open_postgres(database, _SCHEMA)
        self._engines = {self._engine, writing}
        self._writer = Writer(writing)

    def close(self) -> None:
        """Finish pending writes and close the store."""
        self._writer.close()
        for engine in self._engines:
            engine.dispose()

    async def publish_graph(
        self,
        run_id: str,
        epoch: int,
        generator: bytes,
        expiry: int,
        record: bytes,
        sealed: Mapping[bytes, bytes],
    ) -> bool:
        """Keep the graph key of a run's newest epoch; delete all older graphs of the run but the one before it.

        An epoch may be left out: holders go on with theirs when this store was lost.

        Parameters
        ----------
        run_id : str
        epoch : int
        generator : bytes
            Id, 32 bytes.
        expiry : int
            Unix seconds.
        record : bytes
            ``GraphRecord``, serialised.
        sealed : mapping of bytes to bytes
            Envelope by holder.

        Returns
        -------
        bool
            Whether it is new; otherwise the same record was there.

        Raises
        ------
        Refusal
            CONFLICT when the epoch has another key, or a later one has a key.
        """

        def write(connection: sa.Connection) -> bool:
            newest = _newest(connection, run_id)
            held = 0 if newest is None else newest.epoch
            if epoch <= held:
                same = _graph(connection, run_id, epoch)
                if same is not None and same.record == record:
                    return False
                raise Refusal(
                    ErrorReason.ERROR_REASON_CONFLICT,
                    f"epoch {epoch} of the graph, or a later one, has another key",
                    field="record.epoch",
                    expected=f"above {held}",
                )
            row = {
                "run_id": run_id,
                "epoch": epoch,
                "generator": generator,
                "expiry": expiry,
                "record": record,
            }
            graph = connection.execute(graphs.insert().returning(graphs.c.graph), row).scalar_one()
            if sealed:
                connection.execute(
                    envelopes.insert(),
                    [{"graph": graph, "holder": one, "sealed": content} for one, content in sealed.items()],
                )
            old = connection.execute(
                sa.select(graphs.c.graph).where(graphs.c.run_id == run_id, graphs.c.epoch < held)
            )
            _delete(connection, old.scalars().all())
            return True

        return await self.write(write)

    async def newest(self, run_id: str) -> KeptGraph | None:
        """Return the newest graph of a run; None when there is none."""
        return await self.read(lambda connection: _newest(connection, run_id))

    async def replace_key(self, run_id: str) -> int:
        """Order that a run has a graph key above its newest; return the lowest epoch that will do.

        Raises
        ------
        Refusal
            UNKNOWN_ROUND when the run has no graph.
        """

        def write(connection: sa.Connection) -> int:
            newest = _newest(connection, run_id)
            if newest is None:
                raise Refusal(
                    ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
                    f"run {run_id} has no graph key",
                    field="run_id",
                    expected="a run with graph expansion, whose holders have published a key",
                )
            least = newest.epoch + 1
            connection.execute(sa.delete(orders).where(orders.c.run_id == run_id))
            connection.execute(orders.insert(), {"run_id": run_id, "least_epoch": least})
            return least

        return await self.write(write)

    async def least_epoch(self, run_id: str) -> int:
        """Return the lowest epoch of a run's graph key that will do; 0 where no operator had it replaced."""

        def read(connection: sa.Connection) -> int:
            query = sa.select(orders.c.least_epoch).where(orders.c.run_id == run_id)
            return connection.execute(query).scalar_one_or_none() or 0

        return await self.read(read)

    async def graph(self, run_id: str, epoch: int) -> KeptGraph:
        """Return the graph of an epoch.

        Raises
        ------
        Refusal
            UNKNOWN_ROUND when there is none, or none any more.
        """

        def read(connection: sa.Connection) -> KeptGraph:
            found = _graph(connection, run_id, epoch)
            if found is not None:
                return found
            newest = _newest(connection, run_id)
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
                f"the run has no graph of epoch {epoch}",
                field="epoch",
                expected="a published graph key first" if newest is None else f"{newest.epoch}",
            )

        return await self.read(read)

    async def envelope(self, graph: int, holder: bytes) -> bytes:
        """Return the secrets of a graph as sealed for a holder; empty when there is no envelope."""

        def read(connection: sa.Connection) -> bytes:
            found = connection.execute(
                sa.select(envelopes.c.sealed).where(envelopes.c.graph == graph, envelopes.c.holder == holder)
            ).scalar_one_or_none()
            return b"" if found is None else bytes(found)

        return await self.read(read)

    async def publish(self, kept: KeptGraph, publication: TagPublication, most_tags: int) -> bool:
        """Keep a publication of an upload: its first, or the one after the newest.

        Parameters
        ----------
        kept : KeptGraph
            Of the run's newest epoch.
        publication : TagPublication
        most_tags : int
            Most tags of the upload, with those published before.

        Returns
        -------
        bool
            Whether it is new; otherwise the same was there.

        Raises
        ------
        Refusal
            STALE when the run has a newer epoch; CONFLICT when this publication was made with other bytes, or the
            upload was forgotten; SEQUENCE_MISMATCH when another publication is due; TOO_LARGE.
        """

        def write(connection: sa.Connection) -> bool:
            newest = _newest(connection, kept.run_id)
            if newest is None or newest.graph != kept.graph:
                raise Refusal(
                    ErrorReason.ERROR_REASON_STALE,
                    f"the graph of epoch {kept.epoch} takes no uploads any more",
                    field="epoch",
                    expected="the newest epoch",
                )
            row = _upload(connection, kept.graph, publication.upload_id)
            if row is not None and row.sequence == publication.sequence and not row.forgotten:
                if row.digest == publication.digest:
                    return False
                raise _used(
                    "this publication was made with other bytes", "the same bytes, or the next number"
                )
            due = 1 if row is None else row.sequence + 1
            if row is not None and row.forgotten:
                raise _used("this upload was forgotten", "a new upload id")
            if publication.sequence != due or due > _MOST_SEQUENCE:
                raise Refusal(
                    ErrorReason.ERROR_REASON_SEQUENCE_MISMATCH,
                    f"publication {publication.sequence} of an upload",
                    field="sequence",
                    expected=f"{due}, at most {_MOST_SEQUENCE}",
                )
            held = b"" if row is None else bytes(row.tags)
            before = set(_split(held))
            fresh = [tag for tag in _split(publication.tags) if tag not in before]
            if len(before) + len(fresh) > most_tags:
                raise Refusal(
                    ErrorReason.ERROR_REASON_TOO_LARGE,
                    f"{len(before) + len(fresh)} tags of an upload",
                    field="tags",
                    expected=f"at most {most_tags}",
                )
            values = {
                "sequence": publication.sequence,
                "digest": publication.digest,
                "tags": held + b"".join(fresh),
                "embedding": publication.embedding,
            }
            if row is None:
                first = {
                    "graph": kept.graph,
                    "upload_id": publication.upload_id,
                    "questions": 0,
                    "given": 0,
                    "forgotten": False,
                }
                upload = connection.execute(
                    uploads.insert().returning(uploads.c.upload), values | first
                ).scalar_one()
            else:
                upload = row.upload
                connection.execute(uploads.update().where(uploads.c.upload == upload).values(values))
            if fresh:
                connection.execute(
                    tags.insert(), [{"graph": kept.graph, "tag": tag, "upload": upload} for tag in fresh]
                )
            return True

        return await self.write(write)

    async def neighbours(
        self, kept: KeptGraph, upload_id: bytes, asked: Collection[bytes], most: int
    ) -> list[FoundNeighbour]:
        """Return the neighbours of an upload that share one of the tags asked about.

        All neighbours over all tags of the upload are put into an order that is random, and the same at every question;
        only the first ``most`` are ever shown, whichever tags a question names.  A tag that fewer than `LEAST_USERS`
        uploads have shows nobody.

        Raises
        ------
        Refusal
            UNKNOWN_PARTICIPANT for an unknown or forgotten upload, UNKNOWN_ITEM for a tag that the upload has not
            published, TOO_LARGE after `MOST_QUESTIONS` questions.
        """

        def read(connection: sa.Connection) -> tuple[int, list[FoundNeighbour]]:
            row = _present(connection, kept.graph, upload_id)
            own = _split(bytes(row.tags))
            if not set(asked) <= set(own):
                raise Refusal(
                    ErrorReason.ERROR_REASON_UNKNOWN_ITEM,
                    "a question about a tag that this upload has not published",
                    field="tags",
                    expected="tags of the upload",
                )
            if row.questions >= MOST_QUESTIONS:
                raise Refusal(
                    ErrorReason.ERROR_REASON_TOO_LARGE,
                    f"{row.questions + 1} questions of an upload",
                    field="request",
                    expected=f"at most {MOST_QUESTIONS} in an epoch",
                )
            shared = _shared(connection, kept.graph, row.upload, own)
            ids = _upload_ids(connection, shared)
            chosen = sorted(shared, key=lambda other: _rank(upload_id, ids[other]))[:most]
            wanted = {other: found for other in chosen if (found := shared[other] & frozenset(asked))}
            sealed = _embeddings(connection, wanted)
            # Sorted by the sealed bytes, which are random: an order by rank would tell of tags not asked about.
            neighbours = [FoundNeighbour(sealed[other], found) for other, found in wanted.items()]
            return row.upload, sorted(neighbours, key=lambda one: one.embedding)

        upload, found = await self.read(read)

        def count(connection: sa.Connection) -> None:
            connection.execute(
                uploads.update()
                .where(uploads.c.upload == upload)
                .values(questions=uploads.c.questions + 1, given=uploads.c.given + len(found))
            )

        await self.write(count)
        return found

    async def forget(self, kept: KeptGraph, upload_id: bytes) -> bool:
        """Delete tags and embedding of an upload, and keep its id; return whether there was anything to delete.

        The id is kept also where there was nothing, so that an upload that is on its way does not come in.
        """

        def write(connection: sa.Connection) -> bool:
            row = _upload(connection, kept.graph, upload_id)
            if row is None:
                # It may be on its way: a mark keeps it out when it arrives.
                connection.execute(
                    uploads.insert(),
                    {
                        "graph": kept.graph,
                        "upload_id": upload_id,
                        "sequence": 0,
                        "digest": b"",
                        "tags": b"",
                        "embedding": b"",
                        "questions": 0,
                        "given": 0,
                        "forgotten": True,
                    },
                )
            if row is None or row.forgotten:
                return False
            mine = (tags.c.graph == kept.graph) & (tags.c.upload == row.upload)
            for part in _parts(_split(bytes(row.tags))):
                connection.execute(sa.delete(tags).where(mine, tags.c.tag.in_(part)))
            connection.execute(
                uploads.update()
                .where(uploads.c.upload == row.upload)
                .values(tags=b"", embedding=b"", digest=b"", forgotten=True)
            )
            return True

        return await self.write(write)

    async def refused(self, run_id: str, epoch: int, reason: str) -> None:
        """Count a refused request of a graph; one of an unknown graph is not counted."""

        def write(connection: sa.Connection) -> None:
            kept = _graph(connection, run_id, epoch)
            if kept is None:
                return
            which = (refusals.c.graph == kept.graph) & (refusals.c.reason == reason)
            done = connection.execute(refusals.update().where(which).values(count=refusals.c.count + 1))
            if not done.rowcount:
                connection.execute(refusals.insert(), {"graph": kept.graph, "reason": reason, "count": 1})

        await self.write(write)

    async def counts(self, run_id: str) -> GraphCounts | None:
        """Return the counters of a run's newest graph; None when it has none."""

        def read(connection: sa.Connection) -> GraphCounts | None:
            kept = _newest(connection, run_id)
            if kept is None:
                return None
            row = connection.execute(
                sa.select(
                    sa.func.count(), sa.func.sum(uploads.c.questions), sa.func.sum(uploads.c.given)
                ).where(uploads.c.graph == kept.graph, uploads.c.forgotten.is_(False))
            ).one()
            by_tag = (
                sa.select(sa.func.count().label("users"))
                .where(tags.c.graph == kept.graph)
                .group_by(tags.c.tag)
                .subquery()
            )
            several = sa.func.sum(sa.case((by_tag.c.users >= LEAST_USERS, 1), else_=0))
            different, served = connection.execute(
                sa.select(sa.func.count(), several).select_from(by_tag)
            ).one()
            refused = connection.execute(
                sa.select(refusals.c.reason, refusals.c.count).where(refusals.c.graph == kept.graph)
            )
            return GraphCounts(
                kept.epoch,
                row[0],
                different,
                int(served or 0),
                int(row[1] or 0),
                int(row[2] or 0),
                {one.reason: one[1] for one in refused},
            )

        return await self.read(read)

    async def purge(self, now: int) -> int:
        """Delete graphs that expired (Unix seconds); return how many."""

        def write(connection: sa.Connection) -> int:
            old = connection.execute(sa.select(graphs.c.graph).where(graphs.c.expiry <= now)).scalars().all()
            _delete(connection, old)
            left = sa.select(graphs.c.run_id)
            connection.execute(sa.delete(orders).where(orders.c.run_id.not_in(left)))
            return len(old)

        return await self.write(write)

    async def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Run work that writes, durably.

        Raises
        ------
        StoreError
            When the store does not take it.
        """
        try:
            return await self._writer.run(work)
        except sa.exc.SQLAlchemyError as error:
            raise failure(error) from error

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run work that reads.

        Raises
        ------
        StoreError
            When the store cannot be read.
        """

        def run() -> T:
            with self._engine.connect() as connection:
                return work(connection)

        try:
            return await asyncio.to_thread(run)
        except sa.exc.SQLAlchemyError as error:
            raise failure(error) from error


def _graph(connection: sa.Connection, run_id: str, epoch: int) -> KeptGraph | None:
    row = connection.execute(
        sa.select(graphs).where(graphs.c.run_id == run_id, graphs.c.epoch == epoch)
    ).one_or_none()
    return None if row is None else KeptGraph(*row)


def _newest(connection: sa.Connection, run_id: str) -> KeptGraph | None:
    row = connection.execute(
        sa.select(graphs).where(graphs.c.run_id == run_id).order_by(graphs.c.epoch.desc()).limit(1)
    ).one_or_none()
    return None if row is None else KeptGraph(*row)


def _upload(connection: sa.Connection, graph: int, upload_id: bytes) -> sa.Row[tuple[object, ...]] | None:
    return connection.execute(
        sa.select(uploads).where(uploads.c.graph == graph, uploads.c.upload_id == upload_id)
    ).one_or_none()


def _present(connection: sa.Connection, graph: int, upload_id: bytes) -> sa.Row[tuple[object, ...]]:
    row = _upload(connection, graph, upload_id)
    if row is None or row.forgotten:
        raise Refusal(
            ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
            "there is no such upload in this epoch",
            field="upload_id",
            expected="an upload that was published and not forgotten",
        )
    return row


def _shared(
    connection: sa.Connection, graph: int, own: int, held: Collection[bytes]
) -> dict[int, frozenset[bytes]]:
    """Return the tags that each other upload shares, where enough uploads have them."""
    found: dict[int, set[bytes]] = {}
    by_tag: dict[bytes, list[int]] = {}
    for part in _parts(list(held)):
        rows = connection.execute(
            sa.select(tags.c.tag, tags.c.upload).where(tags.c.graph == graph, tags.c.tag.in_(part))
        )
        for tag, upload in rows:
            by_tag.setdefault(bytes(tag), []).append(upload)
    for tag, several in by_tag.items():
        if len(several) >= LEAST_USERS:
            for upload in several:
                if upload != own:
                    found.setdefault(upload, set()).add(tag)
    return {upload: frozenset(some) for upload, some in found.items()}


def _rank(upload_id: bytes, other: bytes) -> bytes:
    """Return an upload's place among another one's neighbours: ids alone decide, not who came first."""
    return hashlib.sha256(upload_id + other).digest()


def _upload_ids(connection: sa.Connection, wanted: Collection[int]) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for part in _parts(list(wanted)):
        rows = connection.execute(
            sa.select(uploads.c.upload, uploads.c.upload_id).where(uploads.c.upload.in_(part))
        )
        found.update((row.upload, bytes(row.upload_id)) for row in rows)
    return found


def _embeddings(connection: sa.Connection, wanted: Collection[int]) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for part in _parts(list(wanted)):
        rows = connection.execute(
            sa.select(uploads.c.upload, uploads.c.embedding).where(uploads.c.upload.in_(part))
        )
        found.update((row.upload, bytes(row.embedding)) for row in rows)
    return found


def _delete(connection: sa.Connection, old: Collection[int]) -> None:
    for table in (tags, uploads, envelopes, refusals, graphs):
        for graph in old:
            connection.execute(sa.delete(table).where(table.c.graph == graph))


def _split(held: bytes) -> list[bytes]:
    return [held[first : first + TAG_BYTES] for first in range(0, len(held), TAG_BYTES)]


def _parts(values: list[T]) -> Iterator[list[T]]:
    for first in range(0, len(values), _PER_QUERY):
        yield values[first : first + _PER_QUERY]


def _used(message: str, expected: str) -> Refusal:
    return Refusal(ErrorReason.ERROR_REASON_CONFLICT, message, field="upload_id", expected=expected)
