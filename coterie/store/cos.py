"""The store of the orchestration server: runs, registry, catalogue, log of updates, evaluations, events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import sqlalchemy as sa

from coterie.crypto.beacon import Beacon
from coterie.rounds.server_round import KeepMessages, in_memory

__all__ = [
    "LoggedUpdate",
    "OwnerUpdate",
    "Progress",
    "Relayed",
    "SavedSum",
    "holds_versions",
    "metadata",
    "shared",
]

metadata = sa.MetaData()

# In SQLite every integer has 64 bits.
_INTEGER = sa.Integer().with_variant(sa.BigInteger(), "postgresql")

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("request", sa.LargeBinary, nullable=False),
    sa.Column("plan_hash", sa.LargeBinary, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("snapshot", _INTEGER, nullable=False, server_default="0"),
)

participants = sa.Table(
    "participants",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("slot", _INTEGER, primary_key=True),
    sa.Column("participant", sa.LargeBinary, nullable=False),
    sa.Column("party", sa.String, nullable=False),
    sa.Column("message", sa.LargeBinary, nullable=False),
    sa.UniqueConstraint("run_id", "participant"),
)

items = sa.Table(
    "items",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("item", _INTEGER, primary_key=True),
    sa.Column("key", sa.String, nullable=False),
)

holdings = sa.Table(
    "holdings",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("slot", _INTEGER, primary_key=True),
    sa.Column("items", sa.LargeBinary, nullable=False),
)

updates = sa.Table(
    "updates",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("version", _INTEGER, primary_key=True),
    sa.Column("gradient", sa.LargeBinary, nullable=False),
)

progress = sa.Table(
    "progress",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("slot", _INTEGER, primary_key=True),
    sa.Column("sequence", _INTEGER, nullable=False),
    sa.Column("epoch", _INTEGER, nullable=False),
    sa.Column("blocks", _INTEGER, nullable=False),
    sa.Column("digest", sa.LargeBinary, nullable=False),
)

submissions = sa.Table(
    "submissions",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("party", sa.String, primary_key=True),
    sa.Column("kind", _INTEGER, primary_key=True),
    sa.Column("place", sa.String, primary_key=True),
    sa.Column("sha256", sa.LargeBinary, nullable=False),
    sa.Column("payload", sa.LargeBinary, nullable=False),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("number", _INTEGER, primary_key=True),
    sa.Column("message", sa.LargeBinary, nullable=False),
)


party_changes = sa.Table(
    "party_changes",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("change", sa.String, primary_key=True),
    sa.Column("count", _INTEGER, nullable=False),
    sa.Column("until", _INTEGER, nullable=False),
)
"""Events of parties that came or went which ``events`` has no more: how many, and the number of the last, by change."""

populations = sa.Table(
    "populations",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("slots", sa.LargeBinary, nullable=False),
    sa.Column("beacon", sa.LargeBinary, nullable=False),
    sa.Column("signature", sa.LargeBinary, nullable=False),
)
"""Populations for which the third party is asked, and the beacons that it drew; empty before."""

waves = sa.Table(
    "waves",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("number", _INTEGER, primary_key=True),
    sa.Column("from_pass", _INTEGER, nullable=False),
    sa.Column("slots", sa.LargeBinary, nullable=False),
    sa.Column("beacon", sa.LargeBinary, nullable=False),
    sa.Column("signature", sa.LargeBinary, nullable=False),
)
"""Waves of users who came after a run had begun, numbered from 1; slots and beacons as in ``populations``."""

sums = sa.Table(
    "sums",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("round", _INTEGER, primary_key=True),
    sa.Column("plan", sa.LargeBinary, nullable=False),
    sa.Column("step", sa.String, nullable=False),
    sa.Column("phase", sa.String, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("running", sa.LargeBinary),
)

sum_messages = sa.Table(
    "sum_messages",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("round", _INTEGER, primary_key=True),
    sa.Column("step", sa.String, primary_key=True),
    sa.Column("member", _INTEGER, primary_key=True),
    sa.Column("message", sa.LargeBinary, nullable=False),
)


def _upload_table(name: str) -> sa.Table:
    return sa.Table(
        name,
        metadata,
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("slot", _INTEGER, primary_key=True),
        sa.Column("epoch", _INTEGER, primary_key=True),
        sa.Column("upload_id", sa.LargeBinary, nullable=False),
    )


expansion_uploads = _upload_table("expansion_uploads")
"""Uploads of users to graph expansion at the third party, of the two newest epochs of each."""
latent_uploads = _upload_table("latent_uploads")
"""Uploads of users' encrypted latent vectors, in the same way."""

relayed = sa.Table(
    "relayed",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("service", sa.String, primary_key=True),
    sa.Column("party", sa.String, primary_key=True),
    sa.Column("request", sa.String, primary_key=True),
    sa.Column("refused", sa.String, primary_key=True),
    sa.Column("count", _INTEGER, nullable=False),
)
"""Numbers of users' requests to services of the third party, by client host; ``refused`` is empty or a reason."""

shared = sa.MetaData()
"""The tables that only a COS with a standby has; it makes them itself, so that a store without them stays as it was."""

model_versions = sa.Table(
    "model_versions",
    shared,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("round", _INTEGER, primary_key=True),
    sa.Column("part", _INTEGER, primary_key=True),
    sa.Column("version", _INTEGER, nullable=False),
    sa.Column("content", sa.LargeBinary, nullable=False),
)
"""Versions of models that a standby must find, each by the round that made it, cut into parts."""

model_objects = sa.Table(
    "model_objects",
    shared,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("round", _INTEGER, primary_key=True),
    sa.Column("version", _INTEGER, nullable=False),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("size", _INTEGER, nullable=False),
    sa.Column("sha256", sa.LargeBinary, nullable=False),
)
"""Versions of models that are in a store of objects, each by the round that made it, with the object's name."""

object_folder = sa.Table(
    "object_folder",
    shared,
    sa.Column("one", sa.Integer, primary_key=True),
    sa.Column("name", sa.String, nullable=False),
)
"""One row: the folder of this database in a store of objects, which no other database has."""


_ROWS = 32
"""Messages per write statement; messages of a masked sum have some ten kilobytes each."""


class Relayed(NamedTuple):
    """A kind of users' requests to the third party whose number is kept for the report."""

    service: str
    """The service, ``"expansion"`` or ``"latents"``."""
    party: str
    """The client host, which is named; users are not."""
    request: str
    refused: str
    """Short name of the reason for which they were refused; empty for those that were answered."""


class SavedSum(NamedTuple):
    """The durable state of the sum in progress."""

    round: int
    plan: bytes
    step: str
    phase: str
    reason: str
    running: bytes | None


class Progress(NamedTuple):
    """The applied part of an owner's work, from which owner and server resume after a restart of either."""

    sequence: int = 0
    epoch: int = 0
    blocks: int = 0
    digest: bytes = b""


class LoggedUpdate(NamedTuple):
    """An applied gradient as received."""

    version: int
    gradient: bytes


class OwnerUpdate(NamedTuple):
    """An update of a data owner, and its progress with it."""

    slot: int
    update: LoggedUpdate
    progress: Progress


# The hot path of a run: some of these statements per update, or per step of a round.  As plain text for the driver
# they cost a third of a compiled statement.  SQLite and PostgreSQL both know this form of "insert or update".
_SET_PARTICIPANT = (
    "INSERT INTO participants (run_id, slot, participant, party, message) VALUES (?, ?, ?, ?, ?) "
    "ON CONFLICT (run_id, slot) DO UPDATE SET participant = excluded.participant, party = excluded.party, "
    "message = excluded.message"
)
_SET_STATE = "UPDATE runs SET state = ? WHERE run_id = ?"
_SET_SNAPSHOT = "UPDATE runs SET snapshot = ? WHERE run_id = ?"
_SET_SUM = "UPDATE sums SET plan = ?, step = ?, phase = ?, reason = ? WHERE run_id = ? AND round = ?"
_SET_RUNNING = "UPDATE sums SET running = ? WHERE run_id = ? AND round = ?"
_ADD_SUM = "INSERT INTO sums (run_id, round, plan, step, phase, reason, running) VALUES (?, ?, ?, ?, ?, ?, ?)"
_ADD_SUM_MESSAGE = "INSERT INTO sum_messages (run_id, round, step, member, message) VALUES (?, ?, ?, ?, ?)"
_FORGET_SUMS = "DELETE FROM sums WHERE run_id = ?"
_FORGET_SUM_MESSAGES = "DELETE FROM sum_messages WHERE run_id = ?"
_ADD_EVENT = "INSERT INTO events (run_id, number, message) VALUES (?, ?, ?)"
_LAST_EVENT = "SELECT max(number) FROM events WHERE run_id = ?"
_READ_EVENTS = "SELECT message FROM events WHERE run_id = ? AND number >= ? ORDER BY number LIMIT ?"
_DROP_EVENT = "DELETE FROM events WHERE run_id = ? AND number = ?"
_COUNT_CHANGES = (
    "INSERT INTO party_changes (run_id, change, count, until) VALUES (?, ?, ?, ?) "
    "ON CONFLICT (run_id, change) DO UPDATE SET count = party_changes.count + excluded.count, until = excluded.until"
)
_ADD_UPDATE = "INSERT INTO updates (run_id, version, gradient) VALUES (?, ?, ?)"
_SET_PROGRESS = (
    "INSERT INTO progress (run_id, slot, sequence, epoch, blocks, digest) VALUES (?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (run_id, slot) DO UPDATE SET sequence = excluded.sequence, epoch = excluded.epoch, "
    "blocks = excluded.blocks, digest = excluded.digest"
)
_SET_RELAYED = (
    "INSERT INTO relayed (run_id, service, party, request, refused, count) VALUES (?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (run_id, service, party, request, refused) DO UPDATE SET count = excluded.count"
)


def _write(connection: sa.Connection, statement: str, values: Any) -> sa.CursorResult[Any]:
    """Run a statement of the hot path, with the placeholders of the driver."""
    if connection.dialect.paramstyle != "qmark":
        statement = statement.replace("?", "%s")
    return connection.exec_driver_sql(statement, values)


def log_updates(connection: sa.Connection, run_id: str, made: Sequence[OwnerUpdate]) -> None:
    """Write applied updates and their owners' progress in one transaction, so that they always agree."""
    if made:
        _write(connection, _ADD_UPDATE, [(run_id, *one.update) for one in made])
        # An owner's last progress: one message may have several of its updates.
        last = {one.slot: one.progress for one in made}
        _write(connection, _SET_PROGRESS, [(run_id, slot, *at) for slot, at in last.items()])


def load_progress(connection: sa.Connection, run_id: str) -> dict[int, Progress]:
    """Return every owner's progress by slot."""
    rows = connection.execute(
        sa.select(
            progress.c.slot, progress.c.sequence, progress.c.epoch, progress.c.blocks, progress.c.digest
        ).where(progress.c.run_id == run_id)
    )
    return {row.slot: Progress(row.sequence, row.epoch, row.blocks, row.digest) for row in rows}


def load_updates(connection: sa.Connection, run_id: str, after: int) -> Sequence[LoggedUpdate]:
    """Return the updates after a version, in order."""
    rows = connection.execute(
        sa.select(updates.c.version, updates.c.gradient)
        .where((updates.c.run_id == run_id) & (updates.c.version > after))
        .order_by(updates.c.version)
    )
    return [LoggedUpdate(row.version, row.gradient) for row in rows]


def snapshot_taken(connection: sa.Connection, run_id: str, version: int) -> None:
    """Record a durable snapshot and delete the updates that it contains."""
    connection.execute(runs.update().where(runs.c.run_id == run_id), {"snapshot": version})
    connection.execute(updates.delete().where((updates.c.run_id == run_id) & (updates.c.version <= version)))


def save_relayed(connection: sa.Connection, run_id: str, counts: Mapping[Relayed, int]) -> None:
    """Write numbers of requests in place of earlier ones of the same kinds."""
    rows = [(run_id, *kind, count) for kind, count in counts.items()]
    if rows:
        _write(connection, _SET_RELAYED, rows)


def load_relayed(connection: sa.Connection, run_id: str) -> dict[Relayed, int]:
    """Return the numbers of users' requests to services of the third party."""
    rows = connection.execute(sa.select(relayed).where(relayed.c.run_id == run_id))
    return {Relayed(*(row[name] for name in Relayed._fields)): row["count"] for row in rows.mappings()}


def save_population(connection: sa.Connection, run_id: str, slots: bytes, beacon: Beacon) -> None:
    """Write a run's population in place of an earlier one.

    Parameters
    ----------
    slots : bytes
        The users' slots in order, uint32 little-endian.
    beacon : Beacon
        Empty before it is drawn.
    """
    connection.execute(populations.delete().where(populations.c.run_id == run_id))
    row = {"run_id": run_id, "slots": slots, "beacon": beacon.value, "signature": beacon.signature}
    connection.execute(populations.insert(), row)


def save_wave(
    connection: sa.Connection, run_id: str, number: int, from_pass: int, slots: bytes, beacon: Beacon
) -> None:
    """Write a wave of a run's population in place of one with the same number; slots and beacon as of a population."""
    delete_wave(connection, run_id, number)
    drawn = {"beacon": beacon.value, "signature": beacon.signature}
    row = {"run_id": run_id, "number": number, "from_pass": from_pass, "slots": slots, **drawn}
    connection.execute(waves.insert(), row)


def delete_wave(connection: sa.Connection, run_id: str, number: int) -> None:
    """Delete a wave that the third party has not taken."""
    connection.execute(waves.delete().where(waves.c.run_id == run_id, waves.c.number == number))


def save_state(connection: sa.Connection, run_id: str, state: str) -> None:
    """Write the state of a run."""
    _write(connection, _SET_STATE, (state, run_id))


def save_participants(
    connection: sa.Connection, run_id: str, rows: Iterable[tuple[int, bytes, str, bytes]]
) -> None:
    """Write new or changed participants as rows of slot, id, party and registration message."""
    written = [(run_id, *row) for row in rows]
    if written:
        _write(connection, _SET_PARTICIPANT, written)


def save_items(connection: sa.Connection, run_id: str, keys: Sequence[str], first: int) -> None:
    """Write new items; the first gets index ``first``."""
    if keys:
        connection.execute(
            items.insert(),
            [{"run_id": run_id, "item": first + n, "key": key} for n, key in enumerate(keys)],
        )


def renumber_items(
    connection: sa.Connection, run_id: str, keys: Sequence[str], held: Mapping[int, bytes]
) -> None:
    """Write all items anew in another order, and by slot the item indices of each owner, as uint32 bytes."""
    connection.execute(items.delete().where(items.c.run_id == run_id))
    save_items(connection, run_id, keys, 0)
    for slot, indices in held.items():
        save_holding(connection, run_id, slot, indices)


def save_holding(connection: sa.Connection, run_id: str, slot: int, held: bytes) -> None:
    """Write the item indices that an owner holds, as uint32 bytes."""
    key = (holdings.c.run_id == run_id) & (holdings.c.slot == slot)
    if not connection.execute(holdings.update().where(key), {"items": held}).rowcount:
        connection.execute(holdings.insert(), {"run_id": run_id, "slot": slot, "items": held})


def save_submission(
    connection: sa.Connection,
    run_id: str,
    party: str,
    kind: int,
    place: str,
    sha256: bytes,
    payload: bytes,
    *,
    only_if_filed: bool = False,
) -> bytes | None:
    """File a submission unless one is on file already, or its place is closed (``only_if_filed``).

    Returns
    -------
    bytes or None
        Digest of the submission on file now; None when there is none.
    """
    key = (
        (submissions.c.run_id == run_id)
        & (submissions.c.party == party)
        & (submissions.c.kind == kind)
        & (submissions.c.place == place)
    )
    held = connection.execute(sa.select(submissions.c.sha256).where(key)).scalar()
    if held is not None or only_if_filed:
        return held
    row = {"run_id": run_id, "party": party, "kind": kind, "place": place}
    connection.execute(submissions.insert(), {**row, "sha256": sha256, "payload": payload})
    return sha256


def load_submissions(connection: sa.Connection, run_id: str, kind: int, place: str) -> dict[str, bytes]:
    """Return the submitted payloads of one kind and place, by party."""
    rows = connection.execute(
        sa.select(submissions.c.party, submissions.c.payload).where(
            (submissions.c.run_id == run_id) & (submissions.c.kind == kind) & (submissions.c.place == place)
        )
    )
    return {row.party: row.payload for row in rows}


def last_event(connection: sa.Connection, run_id: str) -> int:
    """Return the number of the last event, 0 before the first."""
    return int(_write(connection, _LAST_EVENT, (run_id,)).scalar() or 0)


def save_event(connection: sa.Connection, run_id: str, number: int, message: bytes) -> None:
    """Append an event."""
    _write(connection, _ADD_EVENT, (run_id, number, message))


def drop_changes(connection: sa.Connection, run_id: str, dropped: Sequence[tuple[int, str]]) -> None:
    """Replace events of parties that came or went by their counts; each is given by its number and its change."""
    if dropped:
        _write(connection, _DROP_EVENT, [(run_id, number) for number, _ in dropped])
        # The last number of each change, as numbers ascend.
        until = {change: number for number, change in dropped}
        counts = Counter(change for _, change in dropped)
        _write(
            connection,
            _COUNT_CHANGES,
            [(run_id, change, count, until[change]) for change, count in counts.items()],
        )


def load_dropped(connection: sa.Connection, run_id: str) -> tuple[dict[str, int], int]:
    """Return how many events of parties were dropped, by change, and the number of the last one; 0 for none."""
    rows = (
        connection.execute(sa.select(party_changes).where(party_changes.c.run_id == run_id)).mappings().all()
    )
    return {row["change"]: row["count"] for row in rows}, max((row["until"] for row in rows), default=0)


def read_events(connection: sa.Connection, run_id: str, first: int, most: int) -> list[bytes]:
    """Return the events from number ``first`` on, in their order, ``most`` at most."""
    return [row[0] for row in _write(connection, _READ_EVENTS, (run_id, first, most))]


def save_sum(
    connection: sa.Connection, run_id: str, saved: SavedSum, messages: Mapping[str, Mapping[int, bytes]]
) -> None:
    """Write the sum in progress and the messages of closed steps, and delete earlier rounds.

    ``running`` is written once, with the step that closes it; None leaves it as it is.  Messages may be in a file: they
    are read a few at a time.
    """
    place = run_id, saved.round
    values = saved.plan, saved.step, saved.phase, saved.reason
    if not _write(connection, _SET_SUM, (*values, *place)).rowcount:
        forget_sums(connection, run_id)
        _write(connection, _ADD_SUM, (*place, *values, saved.running))
    elif saved.running is not None:
        _write(connection, _SET_RUNNING, (saved.running, *place))
    for step, by_member in messages.items():
        members = iter(by_member)
        while some := list(islice(members, _ROWS)):
            rows = [(*place, step, member, by_member[member]) for member in some]
            _write(connection, _ADD_SUM_MESSAGE, rows)


def forget_sums(connection: sa.Connection, run_id: str) -> None:
    """Delete every sum of a run, once its last sum is over."""
    _write(connection, _FORGET_SUMS, (run_id,))
    _write(connection, _FORGET_SUM_MESSAGES, (run_id,))


def load_sum(
    connection: sa.Connection, run_id: str, keep: KeepMessages = in_memory
) -> tuple[SavedSum, dict[str, Mapping[int, bytes]]] | None:
    """Return the sum in progress and its closed steps' messages, collected by ``keep``; None between rounds."""
    row = connection.execute(sa.select(sums).where(sums.c.run_id == run_id)).first()
    if row is None:
        return None
    closed: dict[str, Mapping[int, bytes]] = {}
    found = connection.execute(
        sa.select(sum_messages)
        .where((sum_messages.c.run_id == run_id) & (sum_messages.c.round == row.round))
        .order_by(sum_messages.c.member)
    )
    for one in found:
        closed[one.step] = keep(closed.get(one.step, {}), one.member, one.message)
    return SavedSum(row.round, row.plan, row.step, row.phase, row.reason, row.running), closed


def set_snapshot(connection: sa.Connection, run_id: str, number: int) -> None:
    """Record the number of a run's current snapshot."""
    _write(connection, _SET_SNAPSHOT, (number, run_id))


def uploads_of(connection: sa.Connection, table: sa.Table, run_id: str, slot: int) -> dict[int, bytes]:
    """Return the ids of a user's uploads of a kind by epoch."""
    rows = connection.execute(
        sa.select(table.c.epoch, table.c.upload_id).where(table.c.run_id == run_id, table.c.slot == slot)
    )
    return {row.epoch: bytes(row.upload_id) for row in rows}


def claim_upload(
    connection: sa.Connection, table: sa.Table, run_id: str, slot: int, epoch: int, upload_id: bytes
) -> None:
    """Note a user's upload of an epoch, and forget those of epochs before the one before it."""
    mine = (table.c.run_id == run_id) & (table.c.slot == slot)
    connection.execute(sa.delete(table).where(mine, table.c.epoch < epoch - 1))
    row = {"run_id": run_id, "slot": slot, "epoch": epoch, "upload_id": upload_id}
    connection.execute(table.insert(), row)


def release_upload(connection: sa.Connection, table: sa.Table, run_id: str, slot: int, epoch: int) -> None:
    """Remove the note of a user's upload of an epoch, which was forgotten."""
    connection.execute(
        sa.delete(table).where(table.c.run_id == run_id, table.c.slot == slot, table.c.epoch == epoch)
    )


def holds_versions(connection: sa.Connection) -> bool:
    """Return whether rows have or name versions of models, as of a COS that has or had a standby."""
    known = sa.inspect(connection)
    return any(
        connection.execute(sa.select(table.c.run_id).limit(1)).first() is not None
        for table in (model_versions, model_objects)
        if known.has_table(table.name)
    )
