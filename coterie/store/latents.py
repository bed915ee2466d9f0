"""The store of meta-latents at the third party: encrypted vectors of key users until they are combined, combinations.

It shares file, database and writer with graph expansion (`coterie.store.expansion`).  It holds upload ids and
ciphertexts under a key whose secret it does not have; no user and no party.  Which key users a combination has is never
stored, and vectors are deleted in the transaction that keeps the combinations.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

import sqlalchemy as sa

from coterie.store.expansion import ExpansionStore
from coterie.store.latent_tables import combinations, sets, uploads
from coterie.wire.refusal import ErrorReason, Refusal

__all__ = ["KeptSet", "LatentStore", "SetState"]


class SetState(enum.IntEnum):
    """States of a set; a set goes from the first to the last, and may leave out READY."""

    OPEN = 1
    CLOSED = 2
    READY = 3
    VOID = 4


class KeptSet(NamedTuple):
    """A set of meta-latents as the third party keeps it."""

    number: int
    """Number of the set in the store."""
    run_id: str
    epoch: int
    closes: int
    """Unix seconds."""
    expiry: int
    """Unix seconds."""
    record: bytes
    """``LatentRecord``, serialised."""
    state: SetState
    key_users: int
    """Vectors that it has, or from which its combinations were made."""


class LatentStore:
    """The store of one third party's sets of meta-latents.

    Parameters
    ----------
    expansion : ExpansionStore
        Its file or database, and its writer.
    """

    def __init__(self, expansion: ExpansionStore) -> None:
        self._expansion = expansion

    async def open_set(self, run_id: str, epoch: int, closes: int, expiry: int, record: bytes) -> bool:
        """Open the set of a run's newest epoch; delete all older sets of the run but the one before it.

        The new set knows how many key users were forgotten in the sets before, and does not wait for them.

        Returns
        -------
        bool
            Whether it is new; otherwise the same record was there.

        Raises
        ------
        Refusal
            CONFLICT when the epoch has another set, or a later one has a set.
        """

        def write(connection: sa.Connection) -> bool:
            newest = _newest(connection, run_id)
            held = 0 if newest is None else newest.epoch
            if epoch <= held:
                same = _at(connection, run_id, epoch)
                if same is not None and same.record == record:
                    return False
                raise Refusal(
                    ErrorReason.ERROR_REASON_CONFLICT,
                    f"epoch {epoch}, or a later one, has another set of meta-latents",
                    field="record.epoch",
                    expected=f"above {held}",
                )
            row = {
                "run_id": run_id,
                "epoch": epoch,
                "closes": closes,
                "expiry": expiry,
                "record": record,
                "state": SetState.OPEN,
                "key_users": 0,
            }
            connection.execute(sets.insert(), row)
            if newest is not None:
                _carry_forgotten(connection, newest.number, _at(connection, run_id, epoch))
            old = connection.execute(
                sa.select(sets.c.number).where(sets.c.run_id == run_id, sets.c.epoch < held)
            )
            _delete(connection, old.scalars().all())
            return True

        return await self._expansion.write(write)

    async def newest(self, run_id: str) -> KeptSet | None:
        """Return the newest set of a run; None when there is none."""
        return await self._expansion.read(lambda connection: _newest(connection, run_id))

    async def at(self, run_id: str, epoch: int) -> KeptSet:
        """Return the set of an epoch.

        Raises
        ------
        Refusal
            UNKNOWN_ROUND when there is none, or none any more.
        """

        def read(connection: sa.Connection) -> KeptSet:
            found = _at(connection, run_id, epoch)
            if found is None:
                raise Refusal(
                    ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
                    f"the run has no set of meta-latents of epoch {epoch}",
                    field="epoch",
                    expected="that of an open set",
                )
            return found

        return await self._expansion.read(read)

    async def publish(self, kept: KeptSet, upload_id: bytes, vector: bytes, most: int, now: int) -> bool:
        """Keep a key user's encrypted vector; close the set with the last of so many, forgotten ones included.

        Returns
        -------
        bool
            Whether it is new; otherwise the same was there.

        Raises
        ------
        Refusal
            CONFLICT when the upload has other bytes or was forgotten, STALE when the set is closed.
        """
        digest = hashlib.sha256(vector).digest()

        def write(connection: sa.Connection) -> bool:
            row = connection.execute(
                sa.select(uploads).where(uploads.c.number == kept.number, uploads.c.upload_id == upload_id)
            ).one_or_none()
            if row is not None:
                if row.digest == digest and not row.forgotten:
                    return False
                raise Refusal(
                    ErrorReason.ERROR_REASON_CONFLICT,
                    "this upload was forgotten" if row.forgotten else "this upload has another vector",
                    field="upload_id",
                    expected="a new upload id" if row.forgotten else "the same bytes",
                )
            current = _numbered(connection, kept.number)
            if current is None or current.state != SetState.OPEN or now >= current.closes:
                raise Refusal(
                    ErrorReason.ERROR_REASON_STALE,
                    f"the set of meta-latents of epoch {kept.epoch} is closed",
                    field="epoch",
                    expected="the set of the next epoch of the Paillier key",
                )
            connection.execute(
                uploads.insert(),
                {
                    "number": kept.number,
                    "upload_id": upload_id,
                    "digest": digest,
                    "vector": vector,
                    "forgotten": False,
                },
            )
            users = current.key_users + 1
            last = users + _forgotten(connection, kept.number) >= most
            _change(connection, kept.number, SetState.CLOSED if last else SetState.OPEN, users)
            return True

        return await self._expansion.write(write)

    async def forget(self, kept: KeptSet, upload_id: bytes) -> SetState:
        """Delete a key user's vector, and all combinations where some were drawn; return the set's state.

        An open set keeps the id of an upload that it does not have, so that one that is on its way does not come in.

        Raises
        ------
        Refusal
            UNKNOWN_PARTICIPANT when there is no such upload in a set that takes none any more.
        """

        def write(connection: sa.Connection) -> SetState:
            row = connection.execute(
                sa.select(uploads).where(uploads.c.number == kept.number, uploads.c.upload_id == upload_id)
            ).one_or_none()
            current = _numbered(connection, kept.number)
            if row is None and current is not None and current.state == SetState.OPEN:
                # It may be on its way: a mark keeps it out when it arrives.
                connection.execute(
                    uploads.insert(),
                    {
                        "number": kept.number,
                        "upload_id": upload_id,
                        "digest": b"",
                        "vector": b"",
                        "forgotten": True,
                    },
                )
                return SetState.OPEN
            if row is None or current is None:
                raise Refusal(
                    ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
                    "there is no such upload in this epoch",
                    field="upload_id",
                    expected="an upload that was published",
                )
            if row.forgotten:
                return current.state
            connection.execute(
                uploads.update()
                .where(uploads.c.number == kept.number, uploads.c.upload_id == upload_id)
                .values(vector=b"", digest=b"", forgotten=True)
            )
            if current.state == SetState.OPEN:
                _change(connection, kept.number, SetState.OPEN, current.key_users - 1)
                return SetState.OPEN
            _void(connection, kept.number, max(current.key_users - 1, 0))
            return SetState.VOID

        return await self._expansion.write(write)

    async def due(self, now: int) -> list[KeptSet]:
        """Close sets whose time has come (Unix seconds); return all closed sets without combinations."""

        def write(connection: sa.Connection) -> list[KeptSet]:
            connection.execute(
                sets.update()
                .where(sets.c.state == SetState.OPEN, sets.c.closes <= now)
                .values(state=SetState.CLOSED)
            )
            rows = connection.execute(sa.select(sets).where(sets.c.state == SetState.CLOSED))
            return [_kept(row) for row in rows]

        def any_due(connection: sa.Connection) -> bool:
            over = (sets.c.state == SetState.OPEN) & (sets.c.closes <= now)
            which = over | (sets.c.state == SetState.CLOSED)
            return connection.execute(sa.select(sets.c.number).where(which).limit(1)).first() is not None

        if not await self._expansion.read(any_due):
            return []
        return await self._expansion.write(write)

    async def vectors(self, kept: KeptSet) -> list[bytes]:
        """Return the vectors of a set, in an order that says nothing about when they came."""

        def read(connection: sa.Connection) -> list[bytes]:
            rows = connection.execute(
                sa.select(uploads.c.vector)
                .where(uploads.c.number == kept.number, uploads.c.forgotten.is_(False))
                .order_by(uploads.c.upload_id)
            )
            return [bytes(one) for one in rows.scalars()]

        return await self._expansion.read(read)

    async def void(self, kept: KeptSet) -> None:
        """Mark a set as one without combinations, and delete its vectors."""
        await self._expansion.write(lambda connection: _void(connection, kept.number, kept.key_users))

    async def keep(self, kept: KeptSet, vectors: Sequence[bytes]) -> bool:
        """Keep the combinations of a closed set, and delete the vectors that they were made from.

        Returns
        -------
        bool
            False when the set is not closed any more, as where a key user was forgotten meanwhile, or has combinations.
        """

        def write(connection: sa.Connection) -> bool:
            current = _numbered(connection, kept.number)
            if current is None or current.state != SetState.CLOSED:
                return False
            connection.execute(
                combinations.insert(),
                [
                    {"number": kept.number, "position": at, "vector": vector}
                    for at, vector in enumerate(vectors)
                ],
            )
            connection.execute(uploads.update().where(uploads.c.number == kept.number).values(vector=b""))
            _change(connection, kept.number, SetState.READY, current.key_users)
            return True

        return await self._expansion.write(write)

    async def combinations(self, kept: KeptSet, first: int, most: int) -> list[bytes]:
        """Return at most so many combinations of a set, in order, from a position on."""

        def read(connection: sa.Connection) -> list[bytes]:
            rows = connection.execute(
                sa.select(combinations.c.vector)
                .where(combinations.c.number == kept.number, combinations.c.position >= first)
                .order_by(combinations.c.position)
                .limit(most)
            )
            return [bytes(one) for one in rows.scalars()]

        return await self._expansion.read(read)

    async def purge(self, now: int) -> int:
        """Delete sets that expired (Unix seconds); return how many."""

        def write(connection: sa.Connection) -> int:
            old = connection.execute(sa.select(sets.c.number).where(sets.c.expiry <= now)).scalars().all()
            _delete(connection, old)
            return len(old)

        return await self._expansion.write(write)


def _kept(row: sa.Row[tuple[object, ...]]) -> KeptSet:
    return KeptSet(
        row.number,
        row.run_id,
        row.epoch,
        row.closes,
        row.expiry,
        bytes(row.record),
        SetState(row.state),
        row.key_users,
    )


def _one(connection: sa.Connection, which: sa.ColumnElement[bool]) -> KeptSet | None:
    row = connection.execute(
        sa.select(sets).where(which).order_by(sets.c.epoch.desc()).limit(1)
    ).one_or_none()
    return None if row is None else _kept(row)


def _newest(connection: sa.Connection, run_id: str) -> KeptSet | None:
    return _one(connection, sets.c.run_id == run_id)


def _at(connection: sa.Connection, run_id: str, epoch: int) -> KeptSet | None:
    return _one(connection, (sets.c.run_id == run_id) & (sets.c.epoch == epoch))


def _numbered(connection: sa.Connection, number: int) -> KeptSet | None:
    return _one(connection, sets.c.number == number)


def _change(connection: sa.Connection, number: int, state: SetState, key_users: int) -> None:
    connection.execute(sets.update().where(sets.c.number == number).values(state=state, key_users=key_users))


def _forgotten(connection: sa.Connection, number: int) -> int:
    which = (uploads.c.number == number) & uploads.c.forgotten.is_(True)
    return int(connection.execute(sa.select(sa.func.count()).select_from(uploads).where(which)).scalar_one())


def _carry_forgotten(connection: sa.Connection, before: int, opened: KeptSet | None) -> None:
    """Copy the forgotten uploads of a set, of which only the ids are left, to the one that follows."""
    if opened is None:
        raise AssertionError("a set that was just opened is there")
    which = (uploads.c.number == before) & uploads.c.forgotten.is_(True)
    for upload_id in connection.execute(sa.select(uploads.c.upload_id).where(which)).scalars().all():
        row = {
            "number": opened.number,
            "upload_id": upload_id,
            "digest": b"",
            "vector": b"",
            "forgotten": True,
        }
        connection.execute(uploads.insert(), row)


def _void(connection: sa.Connection, number: int, key_users: int) -> None:
    connection.execute(uploads.update().where(uploads.c.number == number).values(vector=b""))
    connection.execute(sa.delete(combinations).where(combinations.c.number == number))
    _change(connection, number, SetState.VOID, key_users)


def _delete(connection: sa.Connection, old: Collection[int]) -> None:
    for table in (combinations, uploads, sets):
        for number in old:
            connection.execute(sa.delete(table).where(table.c.number == number))
