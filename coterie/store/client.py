"""The store of a client host: users, their private histories, an outbox for each (user, owner), journals of rounds.

The sequence number of a record is its position in its outbox, contiguous from 1; it is given once and never changes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

__all__ = [
    "Interaction",
    "JournalEntry",
    "KeptPopulation",
    "LastVisit",
    "OutboxEntry",
    "Refused",
    "Sent",
    "metadata",
]

metadata = sa.MetaData()

_ROWS = 10_000
"""Rows that are added in one statement."""

users = sa.Table(
    "users",
    metadata,
    sa.Column("user", sa.Integer, primary_key=True),
    sa.Column("name", sa.String, nullable=False, unique=True),
)

history = sa.Table(
    "history",
    metadata,
    sa.Column("row", sa.Integer, primary_key=True),
    sa.Column("user", sa.Integer, sa.ForeignKey("users.user"), nullable=False),
    sa.Column("item", sa.String, nullable=False),
    sa.Column("positive", sa.Boolean, nullable=False),
    sa.Column("time", sa.Integer, nullable=False),
    sa.Column("part", sa.Integer, nullable=False),
    sa.Column("rating", sa.Float, nullable=True),
)

outbox = sa.Table(
    "outbox",
    metadata,
    sa.Column("entry", sa.Integer, primary_key=True),
    sa.Column("user", sa.Integer, sa.ForeignKey("users.user"), nullable=False),
    sa.Column("owner", sa.LargeBinary, nullable=False),
    sa.Column("first", sa.Integer, nullable=False),
    sa.Column("length", sa.Integer, nullable=False),
    sa.Column("rows", sa.LargeBinary, nullable=False),
    sa.UniqueConstraint("user", "owner", "first"),
)

sent = sa.Table(
    "sent",
    metadata,
    sa.Column("user", sa.Integer, primary_key=True),
    sa.Column("recipient", sa.String, primary_key=True),
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("acknowledged", sa.Integer, nullable=False),
    sa.Column("bytes", sa.Integer, nullable=False),
    sa.Column("first_ms", sa.Integer, nullable=False),
    sa.Column("last_ms", sa.Integer, nullable=False),
)
"""Account of data sent, by user (0 for the host as a whole), recipient and kind."""


journal = sa.Table(
    "journal",
    metadata,
    sa.Column("run", sa.String, primary_key=True),
    sa.Column("participant", sa.LargeBinary, primary_key=True),
    sa.Column("joined", sa.Integer, nullable=False),
    sa.Column("ledger", sa.String, nullable=False),
    sa.Column("offset", sa.Integer, nullable=False),
    sa.Column("length", sa.Integer, nullable=False),
    sa.Column("private", sa.Integer, nullable=False),
    sa.Column("checksum", sa.Integer, nullable=False),
)
"""Journals of members of rounds; a contribution is a range of a file beside the store, of length 0 without one."""

populations = sa.Table(
    "populations",
    metadata,
    sa.Column("run", sa.String, primary_key=True),
    sa.Column("population", sa.LargeBinary, nullable=False),
    sa.Column("pass_number", sa.Integer, nullable=False, server_default="-1"),
)
"""The population of each run, with its beacons, as this host took it first: a serialised ``Population``; and the last
pass in whose population it took part, -1 before the first and where the population is closed."""

waves = sa.Table(
    "waves",
    metadata,
    sa.Column("run", sa.String, primary_key=True),
    sa.Column("after", sa.Integer, primary_key=True),
    sa.Column("waves", sa.LargeBinary, nullable=False),
)
"""Users by whom the population of a run was extended since, in the order in which this host took them: serialised
``Waves``, by the number of waves that the host had before."""

taken_part = sa.Table(
    "taken_part",
    metadata,
    sa.Column("user", sa.Integer, primary_key=True),
    sa.Column("day", sa.Integer, nullable=False),
    sa.Column("rounds", sa.Integer, nullable=False),
)
"""Number of rounds in which a user took part on its last day with a round; days since 1970, UTC."""

declined = sa.Table(
    "declined",
    metadata,
    sa.Column("user", sa.Integer, primary_key=True),
    sa.Column("recipient", sa.String, primary_key=True),
    sa.Column("reason", sa.String, primary_key=True),
    sa.Column("times", sa.Integer, nullable=False),
    sa.Column("first_ms", sa.Integer, nullable=False),
    sa.Column("last_ms", sa.Integer, nullable=False),
)
"""Requests refused, by user (0 for the host as a whole), recipient and reason."""


preferences = sa.Table(
    "preferences",
    metadata,
    sa.Column("user", sa.Integer, sa.ForeignKey("users.user"), primary_key=True),
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("value", sa.Float, nullable=False),
)
"""What users have set for themselves; no row where the run's plan decides."""

vectors = sa.Table(
    "vectors",
    metadata,
    sa.Column("user", sa.Integer, primary_key=True),
    sa.Column("row", sa.LargeBinary, nullable=False),
)
"""DRIFT's shielded form: each user's own row, float32 little-endian."""

visited = sa.Table(
    "visited",
    metadata,
    sa.Column("user", sa.Integer, primary_key=True),
    sa.Column("owner", sa.LargeBinary, primary_key=True),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("durable", sa.Integer, nullable=False),
    sa.Column("held", sa.Integer, nullable=False),
    sa.Column("ran", sa.Integer, nullable=False),
    sa.Column("loss", sa.Float, nullable=False),
)
"""DRIFT's shielded form: the last visit of each user to each owner."""


class LastVisit(NamedTuple):
    """The last visit of a user to an owner.

    ``number`` and ``epoch`` are the visit's; ``durable`` counts the user's records at the owner, ``held`` its blocks
    there; ``ran`` and ``loss`` are totals over the visits of the epoch.
    """

    user: int
    owner: bytes
    number: int = 0
    epoch: int = 0
    durable: int = 0
    held: int = 0
    ran: int = 0
    loss: float = 0.0


class Interaction(NamedTuple):
    """One interaction of a user's history; ``part`` is 0 for training, 1 validation, 2 test; ``rating`` may be None."""

    user: int
    item: str
    positive: bool
    time: int
    part: int
    rating: float | None = None


class OutboxEntry(NamedTuple):
    """Consecutive records of one outbox; ``rows`` are their row numbers in the history, uint32 little-endian."""

    user: int
    owner: bytes
    first: int
    length: int
    rows: bytes


class JournalEntry(NamedTuple):
    """One member's journal of rounds; its contribution is ``length`` bytes at ``offset`` of a file.

    The contribution is followed by ``private`` bytes: the private state of the member's users after it.  The CRC-32
    is over both.
    """

    participant: bytes
    joined: int
    ledger: str
    offset: int
    length: int
    private: int
    checksum: int


class Refused(NamedTuple):
    """One refused request, for the account of refusals."""

    user: int
    recipient: str
    reason: str
    time_ms: int


class Sent(NamedTuple):
    """One sending of data to a recipient, for the account of data sent."""

    user: int
    recipient: str
    kind: str
    acknowledged: int
    bytes: int
    time_ms: int


def add_users(connection: sa.Connection, names: Sequence[str]) -> None:
    """Append users; numbers count from 1."""
    first = int(connection.execute(sa.select(sa.func.count()).select_from(users)).scalar() or 0) + 1
    if names:
        connection.execute(
            users.insert(), [{"user": first + n, "name": name} for n, name in enumerate(names)]
        )


def load_users(connection: sa.Connection) -> list[str]:
    """Return the names of all users; user ``n`` is at position ``n - 1``."""
    return [row.name for row in connection.execute(sa.select(users.c.name).order_by(users.c.user))]


def number_of(connection: sa.Connection, name: str) -> int | None:
    """Return the number of the user with a name; None where no user has it."""
    found: int | None = connection.execute(sa.select(users.c.user).where(users.c.name == name)).scalar()
    return found


def add_history(connection: sa.Connection, interactions: Iterable[Interaction]) -> None:
    """Append interactions."""
    # In parts: a host may have millions.
    rest = iter(interactions)
    while part := list(itertools.islice(rest, _ROWS)):
        connection.execute(history.insert(), [interaction._asdict() for interaction in part])


def load_history(connection: sa.Connection) -> Iterator[tuple[int, Interaction]]:
    """Yield all interactions with their row numbers, ascending."""
    for row in connection.execute(sa.select(history).order_by(history.c.row)):
        yield (
            row.row,
            Interaction(row.user, sys.intern(row.item), row.positive, row.time, row.part, row.rating),
        )


def add_entries(connection: sa.Connection, entries: Sequence[OutboxEntry]) -> None:
    """Append outbox entries."""
    if entries:
        connection.execute(outbox.insert(), [entry._asdict() for entry in entries])


def load_entries(connection: sa.Connection) -> Iterator[OutboxEntry]:
    """Yield all outbox entries in the order in which they were made."""
    for row in connection.execute(sa.select(outbox).order_by(outbox.c.entry)):
        yield OutboxEntry(row.user, row.owner, row.first, row.length, row.rows)


def add_sent(connection: sa.Connection, things: Sequence[Sent]) -> None:
    """Add to the account of data sent; ``acknowledged`` is a change, below 0 where an owner has lost records."""
    if not things:
        return
    statement = sa.text(
        "INSERT INTO sent (user, recipient, kind, acknowledged, bytes, first_ms, last_ms) "
        "VALUES (:user, :recipient, :kind, :acknowledged, :bytes, :time_ms, :time_ms) "
        "ON CONFLICT (user, recipient, kind) DO UPDATE SET "
        "acknowledged = sent.acknowledged + excluded.acknowledged, "
        "bytes = sent.bytes + excluded.bytes, last_ms = excluded.last_ms"
    )
    connection.execute(statement, [thing._asdict() for thing in things])


def load_sent(connection: sa.Connection) -> list[sa.Row[Any]]:
    """Return the account of data sent."""
    return list(
        connection.execute(
            sa.select(
                sent.c.user,
                sent.c.recipient,
                sent.c.kind,
                sent.c.acknowledged,
                sent.c.bytes,
                sent.c.first_ms,
                sent.c.last_ms,
            ).order_by(sent.c.user, sent.c.recipient, sent.c.kind)
        )
    )


def save_journals(connection: sa.Connection, run: str, entries: Sequence[JournalEntry]) -> None:
    """Write members' journals in place of their earlier ones."""
    if entries:
        statement = sa.text(
            "INSERT OR REPLACE INTO journal "
            "(run, participant, joined, ledger, offset, length, private, checksum) "
            "VALUES (:run, :participant, :joined, :ledger, :offset, :length, :private, "
            ":checksum)"
        )
        connection.execute(statement, [{"run": run, **entry._asdict()} for entry in entries])


def last_joined(connection: sa.Connection, run: str) -> int:
    """Return the newest round of a run that a member of this host joined; 0 before the first."""
    newest = sa.select(sa.func.max(journal.c.joined)).where(journal.c.run == run)
    return connection.execute(newest).scalar() or 0


def load_journals(connection: sa.Connection, run: str) -> list[JournalEntry]:
    """Return the members' journals of a run."""
    rows = connection.execute(sa.select(journal).where(journal.c.run == run))
    return [
        JournalEntry(
            row.participant,
            row.joined,
            row.ledger,
            row.offset,
            row.length,
            row.private,
            row.checksum,
        )
        for row in rows
    ]


class KeptPopulation(NamedTuple):
    """The population of a run as a host has kept it."""

    payload: bytes
    """A serialised ``Population``."""
    waves: tuple[bytes, ...]
    """Serialised ``Waves`` that follow it, in order."""
    pass_number: int
    """Last pass in whose population the host took part; -1 before the first, and in a closed population."""


def load_population(connection: sa.Connection, run: str) -> KeptPopulation | None:
    """Return the population of a run as this host took it; None before it has."""
    row = connection.execute(sa.select(populations).where(populations.c.run == run)).one_or_none()
    if row is None:
        return None
    later = connection.execute(sa.select(waves.c.waves).where(waves.c.run == run).order_by(waves.c.after))
    return KeptPopulation(row.population, tuple(later.scalars()), row.pass_number)


def save_population(connection: sa.Connection, run: str, population: bytes) -> None:
    """Keep the population of a run that has none."""
    connection.execute(populations.insert(), {"run": run, "population": population})


def extend_population(connection: sa.Connection, run: str, after: int, later: bytes) -> None:
    """Keep waves that extend the population of a run, by the number of waves that it had."""
    connection.execute(waves.insert(), {"run": run, "after": after, "waves": later})


def save_population_pass(connection: sa.Connection, run: str, pass_number: int) -> None:
    """Note that this host takes part in the population of a pass."""
    connection.execute(populations.update().where(populations.c.run == run).values(pass_number=pass_number))


def add_taken_part(connection: sa.Connection, users: Sequence[int], day: int) -> None:
    """Count one more round for some users on a day."""
    if users:
        statement = sa.text(
            "INSERT INTO taken_part (user, day, rounds) VALUES (:user, :day, 1) "
            "ON CONFLICT (user) DO UPDATE SET "
            "rounds = CASE WHEN taken_part.day = excluded.day THEN taken_part.rounds + 1 ELSE 1 END, "
            "day = excluded.day"
        )
        connection.execute(statement, [{"user": user, "day": day} for user in users])


def load_taken_part(connection: sa.Connection, day: int) -> dict[int, int]:
    """Return the number of rounds of a day by user; users without any are absent."""
    rows = connection.execute(sa.select(taken_part).where(taken_part.c.day == day))
    return {row.user: row.rounds for row in rows}


def add_declined(connection: sa.Connection, things: Sequence[Refused]) -> None:
    """Add to the account of refusals."""
    if things:
        statement = sa.text(
            "INSERT INTO declined (user, recipient, reason, times, first_ms, last_ms) "
            "VALUES (:user, :recipient, :reason, 1, :time_ms, :time_ms) "
            "ON CONFLICT (user, recipient, reason) DO UPDATE SET "
            "times = declined.times + 1, last_ms = excluded.last_ms"
        )
        connection.execute(statement, [thing._asdict() for thing in things])


def load_declined(connection: sa.Connection) -> list[sa.Row[Any]]:
    """Return the account of refusals."""
    return list(
        connection.execute(
            sa.select(declined).order_by(declined.c.user, declined.c.recipient, declined.c.reason)
        )
    )


def set_preferences(connection: sa.Connection, user: int, changes: Mapping[str, float | None]) -> None:
    """Write a user's preferences; one of None is taken out."""
    own = preferences.c.user == user
    for name, value in changes.items():
        connection.execute(preferences.delete().where(own, preferences.c.name == name))
        if value is not None:
            connection.execute(preferences.insert(), {"user": user, "name": name, "value": value})


def load_preferences(connection: sa.Connection) -> dict[int, dict[str, float]]:
    """Return what users have set for themselves, by user and name."""
    found: dict[int, dict[str, float]] = {}
    for row in connection.execute(sa.select(preferences).order_by(preferences.c.user, preferences.c.name)):
        found.setdefault(row.user, {})[row.name] = row.value
    return found


def save_visits(connection: sa.Connection, rows: Mapping[int, bytes], made: Sequence[LastVisit]) -> None:
    """Write users' own rows and the visits that changed them."""
    if rows:
        statement = sa.text('INSERT OR REPLACE INTO vectors ("user", "row") VALUES (:user, :row)')
        connection.execute(statement, [{"user": user, "row": row} for user, row in rows.items()])
    if made:
        statement = sa.text(
            'INSERT OR REPLACE INTO visited ("user", owner, number, epoch, durable, held, ran, loss) '
            "VALUES (:user, :owner, :number, :epoch, :durable, :held, :ran, :loss)"
        )
        connection.execute(statement, [one._asdict() for one in made])


def load_vectors(connection: sa.Connection) -> dict[int, bytes]:
    """Return the users' own rows by user."""
    return {row.user: row.row for row in connection.execute(sa.select(vectors))}


def load_visited(connection: sa.Connection) -> list[LastVisit]:
    """Return the last visits of all users."""
    return [LastVisit(*row) for row in connection.execute(sa.select(visited))]
