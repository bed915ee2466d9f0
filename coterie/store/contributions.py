"""Contributions that intakes took for a sum: who sent one, and sums over some of them, in the coordinator's database.

An intake adds the contributions that arrive together, and writes their senders and their sum in one transaction.  A
sender has one row for a round, so a contribution counts once however its sender moves between intakes; and it is
acknowledged when the transaction is durable.  No single contribution is stored where the sum needs none.

The coordinator opens a sum to intakes by a row, which every such transaction keeps locked, and closes it before it uses
the sum: what was acknowledged before is in it, and nothing is acknowledged after.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from coterie.secure_sum.repeats import MARK_BYTES

__all__ = [
    "CHANNEL",
    "Acknowledged",
    "AnotherSentError",
    "Opened",
    "PartialSum",
    "close_all",
    "close_sum",
    "forget",
    "make_tables",
    "open_sum",
    "read_open",
    "read_parts",
    "read_runs",
    "take",
]

CHANNEL = "coterie_contributions"
"""Channel of the database on which intakes tell the coordinator, by the run's id, that there is another part."""

_TABLES = (
    "CREATE TABLE IF NOT EXISTS intake_sums (run_id text, round bigint, open int NOT NULL, layout text NOT NULL, "
    "slots text NOT NULL, terms bytea NOT NULL DEFAULT '', plan_hash bytea NOT NULL DEFAULT '', "
    "PRIMARY KEY (run_id, round))",
    "CREATE TABLE IF NOT EXISTS intake_senders (run_id text, round bigint, member bigint, part text NOT NULL, "
    "note bytea NOT NULL, PRIMARY KEY (run_id, round, member))",
    "CREATE TABLE IF NOT EXISTS intake_parts (run_id text, round bigint, part text, size bigint NOT NULL, "
    "running bytea NOT NULL, PRIMARY KEY (run_id, round, part))",
)
_NAMES = ("intake_sums", "intake_senders", "intake_parts")

_OPEN = 2
"""How a row says that its sum is open.  Intakes that write a SHA-256 in place of a mark look for 1: they take nothing
to such a sum, and the coordinator refuses what they hand on, by their version."""


class PartialSum(NamedTuple):
    """The sum of some contributions that were acknowledged together.

    Parameters
    ----------
    name : str
    notes : mapping of int to bytes
        Note of each sender, by member.
    running : bytes
        The sum, as the server's half serialises it.
    size : int
        Bytes of the contributions.
    """

    name: str
    notes: Mapping[int, bytes]
    running: bytes
    size: int


class Acknowledged(NamedTuple):
    """A checked contribution that an intake is about to write."""

    member: int
    note: bytes
    addend: Any
    size: int


def make_tables(connection: sa.Connection) -> None:
    """Make the tables, which only a coordinator and its intakes have."""
    for table in _TABLES:
        connection.exec_driver_sql(table)
    there = set(
        connection.exec_driver_sql(
            "SELECT attname FROM pg_attribute WHERE attrelid = 'intake_sums'::regclass"
        ).scalars()
    )
    for column in ("terms", "plan_hash"):
        # Not without need: a change of the table waits for the intakes that read it.
        if column not in there:
            connection.exec_driver_sql(
                f"ALTER TABLE intake_sums ADD COLUMN {column} bytea NOT NULL DEFAULT ''"
            )


def open_sum(
    connection: sa.Connection,
    run_id: str,
    round_: int,
    layout: str,
    slots: Mapping[int, Sequence[tuple[int, int]]],
    terms: bytes = b"",
    plan_hash: bytes = b"",
) -> None:
    """Let intakes take contributions to a sum, and forget those to earlier ones of the run.

    Parameters
    ----------
    layout : str
        Layout of a contribution, in words that intakes know.
    slots : mapping
        First slot and number of each range of slots, by member that is asked.
    terms : bytes
        What the server's half of an intake needs besides: the key of a sum under a key.
    plan_hash : bytes
        Hash of the plan, which an intake's contributions must be to.
    """
    for table in _NAMES:
        connection.exec_driver_sql(
            f"DELETE FROM {table} WHERE run_id = %s AND round <> %s",  # noqa: S608 - names of our own
            (run_id, round_),
        )
    connection.exec_driver_sql(
        "INSERT INTO intake_sums (run_id, round, open, layout, slots, terms, plan_hash) "
        "VALUES (%s, %s, %s, %s, %s, %s, %s) "
        "ON CONFLICT (run_id, round) DO UPDATE SET open = EXCLUDED.open, layout = EXCLUDED.layout, "
        "slots = EXCLUDED.slots, terms = EXCLUDED.terms, plan_hash = EXCLUDED.plan_hash",
        (
            run_id,
            round_,
            _OPEN,
            layout,
            json.dumps({str(member): list(own) for member, own in slots.items()}),
            terms,
            plan_hash,
        ),
    )


def close_sum(connection: sa.Connection, run_id: str, round_: int) -> None:
    """Let intakes take no more contributions to a sum; returns once those under way are written or refused."""
    connection.exec_driver_sql(
        "UPDATE intake_sums SET open = 0 WHERE run_id = %s AND round = %s", (run_id, round_)
    )


def close_all(connection: sa.Connection, run_id: str) -> None:
    """Let intakes take no more contributions to any sum of a run; what they acknowledged stays."""
    connection.exec_driver_sql("UPDATE intake_sums SET open = 0 WHERE run_id = %s", (run_id,))


def forget(connection: sa.Connection, run_id: str) -> None:
    """Delete everything of a run's sums."""
    for table in _NAMES:
        connection.exec_driver_sql(f"DELETE FROM {table} WHERE run_id = %s", (run_id,))  # noqa: S608 - as above


def read_parts(
    connection: sa.Connection, run_id: str, round_: int, known: Collection[str]
) -> list[PartialSum]:
    """Return the parts of a sum whose names are not known yet."""
    place = run_id, round_
    names = connection.exec_driver_sql(
        "SELECT part FROM intake_parts WHERE run_id = %s AND round = %s", place
    ).scalars()
    new = [name for name in names if name not in known]
    if not new:
        return []
    notes: dict[str, dict[int, bytes]] = {name: {} for name in new}
    for row in connection.exec_driver_sql(
        "SELECT part, member, note FROM intake_senders WHERE run_id = %s AND round = %s AND part = ANY(%s)",
        (*place, new),
    ):
        notes[row.part][row.member] = bytes(row.note)
    rows = connection.exec_driver_sql(
        "SELECT part, size, running FROM intake_parts WHERE run_id = %s AND round = %s AND part = ANY(%s)",
        (*place, new),
    )
    return [PartialSum(row.part, notes[row.part], bytes(row.running), row.size) for row in rows]


class Opened(NamedTuple):
    """A sum as an intake reads it.

    Parameters
    ----------
    plan : bytes
        The serialised plan.
    layout : str
    slots, terms
        As for `open_sum`.
    messages : mapping
        Messages of closed steps by step and member; those of ``only_senders`` are empty.
    """

    plan: bytes
    layout: str
    slots: Mapping[int, list[tuple[int, int]]]
    messages: Mapping[str, Mapping[int, bytes]]
    terms: bytes = b""


def read_open(
    connection: sa.Connection, run_id: str, round_: int, only_senders: Collection[str]
) -> Opened | None:
    """Return a sum that is open to intakes; None when it is not.

    Parameters
    ----------
    only_senders : collection of str
        Steps of which an intake needs to know who sent a message, and not the messages.
    """
    place = run_id, round_
    row = connection.exec_driver_sql(
        "SELECT s.plan, i.layout, i.slots, i.terms FROM intake_sums i "
        "JOIN sums s ON s.run_id = i.run_id AND s.round = i.round "
        "WHERE i.run_id = %s AND i.round = %s AND i.open = %s",
        (*place, _OPEN),
    ).first()
    if row is None:
        return None
    messages: dict[str, dict[int, bytes]] = {}
    for one in connection.exec_driver_sql(
        "SELECT step, member, CASE WHEN step = ANY(%s) THEN ''::bytea ELSE message END AS message FROM sum_messages "
        "WHERE run_id = %s AND round = %s ORDER BY member",
        (list(only_senders), *place),
    ):
        messages.setdefault(one.step, {})[one.member] = bytes(one.message)
    slots = {
        int(member): [(first, count) for first, count in own] for member, own in json.loads(row.slots).items()
    }
    return Opened(bytes(row.plan), row.layout, slots, messages, bytes(row.terms))


def read_runs(connection: sa.Connection) -> frozenset[str]:
    """Return the ids of all runs, so that an intake looks up no sum of a run that nobody started."""
    return frozenset(connection.exec_driver_sql("SELECT run_id FROM runs").scalars())


def take(
    connection: sa.Connection,
    run_id: str,
    round_: int,
    taken: Iterable[Acknowledged],
    agreed: Callable[[Acknowledged, Mapping[int, bytes]], Exception | None] | None,
    summed: Callable[[Sequence[Acknowledged]], bytes],
    repeats: Callable[[Acknowledged, bytes], bool],
    plan_hash: bytes = b"",
) -> dict[int, Exception | None] | None:
    """Write contributions in a transaction that the caller commits; return by member why one is refused, or None.

    Parameters
    ----------
    taken : iterable of Acknowledged
        One for each member.
    agreed : callable
        Given a contribution and the notes of others by member, returns why it does not fit to them, if so.  Asked only
        where a note says more than which contribution it is of.  None where contributions cannot contradict each other.
    summed : callable
        Returns the serialised sum of contributions.
    repeats : callable
        Given a contribution and the beginning of the note that is there, returns whether it is of the same bytes.
    plan_hash : bytes
        Hash of the plan by which the contributions were checked.

    Returns
    -------
    dict or None
        None when the sum is not open, or has another plan, as one of a database that was restored: nothing was
        written.  A member whose contribution is there already is acknowledged when the bytes are the same.
    """
    place = run_id, round_
    ordered = sorted(taken, key=lambda one: one.member)
    wordy = agreed is not None and any(len(one.note) > MARK_BYTES for one in ordered)
    # Two contributions that may contradict each other are not written at the same time.
    lock = "FOR UPDATE" if wordy else "FOR SHARE"
    row = connection.exec_driver_sql(
        f"SELECT open, plan_hash FROM intake_sums WHERE run_id = %s AND round = %s {lock}",  # noqa: S608 - as above
        place,
    ).first()
    if row is None or row.open != _OPEN or bytes(row.plan_hash) != plan_hash:
        return None
    found: dict[int, Exception | None] = {}
    held = _held(connection, place, [one.member for one in ordered])
    notes: dict[int, bytes] = {}
    if agreed is not None:
        least = 0 if wordy else MARK_BYTES + 1
        notes = {
            one.member: bytes(one.note)
            for one in connection.exec_driver_sql(
                "SELECT member, note FROM intake_senders WHERE run_id = %s AND round = %s AND length(note) >= %s",
                (*place, least),
            )
        }
    fresh: list[Acknowledged] = []
    for one in ordered:
        if one.member in held:
            continue
        problem = agreed(one, notes) if agreed is not None and (notes or wordy) else None
        if problem is None:
            fresh.append(one)
            notes |= {one.member: one.note} if wordy else {}
        else:
            found[one.member] = problem
    if fresh:
        name = secrets.token_hex(16)
        inserted = set(
            connection.exec_driver_sql(
                "INSERT INTO intake_senders (run_id, round, part, member, note) "
                "SELECT %s, %s, %s, * FROM unnest(%s::bigint[], %s::bytea[]) ON CONFLICT DO NOTHING RETURNING member",
                (*place, name, [one.member for one in fresh], [one.note for one in fresh]),
            ).scalars()
        )
        added = [one for one in fresh if one.member in inserted]
        if added:
            connection.exec_driver_sql(
                "INSERT INTO intake_parts (run_id, round, part, size, running) VALUES (%s, %s, %s, %s, %s)",
                (*place, name, sum(one.size for one in added), summed(added)),
            )
            connection.exec_driver_sql("SELECT pg_notify(%s, %s)", (CHANNEL, run_id))
        found |= dict.fromkeys(inserted, None)
        # Another intake wrote these a moment ago.
        held |= _held(connection, place, [one.member for one in fresh if one.member not in inserted])
    for one in ordered:
        if one.member not in found:
            found[one.member] = None if repeats(one, held[one.member]) else AnotherSentError()
    return found


class AnotherSentError(Exception):
    """A member sent other bytes before."""


def _held(connection: sa.Connection, place: tuple[str, int], members: list[int]) -> dict[int, bytes]:
    if not members:
        return {}
    rows = connection.exec_driver_sql(
        "SELECT member, substr(note, 1, %s) AS mark FROM intake_senders "
        "WHERE run_id = %s AND round = %s AND member = ANY(%s)",
        (MARK_BYTES, *place, members),
    )
    return {row.member: bytes(row.mark) for row in rows}
