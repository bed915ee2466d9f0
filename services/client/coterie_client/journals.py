"""Store the journals of a host's members: a row for each in the store, contributions in a file beside it.

A contribution may be long, and it is needed only until its round is closed.  Contributions of one round are therefore
written one after the other to a file that the next round overwrites; a row names its range in the file and the checksum
of the content.  Both are durable before anything is sent.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import sqlalchemy as sa
import structlog

from coterie.errors import StoreError
from coterie.rounds.ledger import Ledger
from coterie.rounds.member_round import Journal
from coterie.store import client as store
from coterie.store.engine import Writer

__all__ = ["Journals"]

_NOTHING: Mapping[bytes, bytes] = MappingProxyType({})

_log = structlog.get_logger("coterie.journals")


class Journals:
    """Journals of a host's members in one run; used by `HostMembers` and DRIFT's evaluations.

    Parameters
    ----------
    engine, writer
        The store.
    path : Path
        The file of contributions.
    run : str
        Id of the run, within which round numbers are unique.

    Raises
    ------
    StoreError
        When the file cannot be opened.
    """

    def __init__(self, engine: sa.Engine, writer: Writer, path: Path, run: str) -> None:
        self._writer = writer
        self._run = run
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StoreError(f"cannot open {path}: {error.strerror}") from error
        self._entries: dict[bytes, store.JournalEntry] = {}
        self._contributions: dict[bytes, bytes] = {}
        self.private: list[bytes] = []
        """Packed private rows of the contributions found at the start, in the order in which they were made."""
        with engine.connect() as connection:
            for entry in store.load_journals(connection, run):
                self._entries[entry.participant] = entry
        for entry in sorted(self._entries.values(), key=lambda entry: (entry.joined, entry.offset)):
            if entry.length:
                self._take_up(entry)

    def _take_up(self, entry: store.JournalEntry) -> None:
        whole = entry.length + entry.private
        held = os.pread(self._file, whole, entry.offset)
        if len(held) == whole and zlib.crc32(held) == entry.checksum:
            self._contributions[entry.participant] = held[: entry.length]
            self.private.append(held[entry.length :])
        else:
            # The member sits out the rest of the round: its contribution is lost.
            _log.warning("a contribution is damaged", round=entry.joined)

    @property
    def joined(self) -> int:
        """Number of the newest round that any participant joined."""
        return max((entry.joined for entry in self._entries.values()), default=0)

    def of(self, participant: bytes) -> Journal:
        """Return a participant's journal."""
        entry = self._entries.get(participant)
        if entry is None:
            return Journal()
        contribution = self._contributions.get(participant, b"")
        return Journal(entry.joined, contribution, Ledger.from_text(entry.ledger))

    async def keep(
        self,
        journals: Mapping[bytes, Journal],
        private: Mapping[bytes, bytes] = _NOTHING,
        sent: Sequence[store.Sent] = (),
        refused: Sequence[store.Refused] = (),
        taking_part: Sequence[int] = (),
        day: int = 0,
    ) -> None:
        """Store journals and receipts in one transaction, and contributions with private rows in the file.

        Parameters
        ----------
        journals : mapping of bytes to Journal
            By participant.
        private : mapping of bytes to bytes
            Packed private rows of the users of members whose contribution is new, by participant.
        sent, refused : sequence
            Entries for the receipts: messages that leave once this is durable, and refusals.
        taking_part, day : sequence of int, int
            Users for whom one more round counts today, and the day's number.

        Raises
        ------
        StoreError
            When the store is full or broken; nothing was kept.
        """
        entries, new, end = [], [], self._end(journals)
        for participant, journal in journals.items():
            held = self._entries.get(participant)
            entry = store.JournalEntry(participant, journal.joined, journal.ledger.to_text(), 0, 0, 0, 0)
            if journal.contribution and held is not None and held.length and held.joined == journal.joined:
                # A member makes one contribution in a round: keep the one that is stored.
                entry = entry._replace(
                    offset=held.offset, length=held.length, private=held.private, checksum=held.checksum
                )
            elif journal.contribution:
                rows = private.get(participant, b"")
                checksum = zlib.crc32(rows, zlib.crc32(journal.contribution))
                length = len(journal.contribution)
                entry = entry._replace(offset=end, length=length, private=len(rows), checksum=checksum)
                new += [(end, journal.contribution), (end + length, rows)]
                end += length + len(rows)
            entries.append(entry)

        def write_file() -> None:
            for offset, contribution in new:
                _write(self._file, contribution, offset)
            os.fdatasync(self._file)

        def write(connection: sa.Connection) -> None:
            store.save_journals(connection, self._run, entries)
            store.add_sent(connection, sent)
            store.add_declined(connection, refused)
            store.add_taken_part(connection, taking_part, day)

        # Write both at once: after a crash, a row whose checksum does not fit its range marks a lost contribution.
        beside = [self._writer.files_when_possible("keep contributions", write_file)] if new else []
        await asyncio.gather(self._writer.run_when_possible(write), *beside)
        for entry in entries:
            self._entries[entry.participant] = entry
            if entry.length:
                self._contributions[entry.participant] = journals[entry.participant].contribution
            else:
                self._contributions.pop(entry.participant, None)

    def _end(self, journals: Mapping[bytes, Journal]) -> int:
        """Return the offset behind the contributions that are still kept."""
        return max(
            (
                entry.offset + entry.length + entry.private
                for participant, entry in self._entries.items()
                if entry.length and (participant not in journals or journals[participant].contribution)
            ),
            default=0,
        )

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _write(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
