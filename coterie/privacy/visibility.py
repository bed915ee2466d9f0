"""The visibility matrix of a system, and its audit against the bytes that each party held.

``matrix`` lays out a system's declarations.  ``audit`` compares them with everything that a party received,
stored, logged or exposed, by searching for canaries, and for several items of one user together; ``observed`` reads
the kinds of datum from the messages of a transcript and needs no canaries.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from coterie.errors import ConfigError, StoreError
from coterie.privacy.canaries import CanaryKit
from coterie.privacy.declarations import KINDS, ROLES, Access, AccessRows
from coterie.privacy.history_search import History, HistorySearch
from coterie.privacy.notations import lists_in_text
from coterie.privacy.observation import observed_kinds
from coterie.privacy.together import Together
from coterie.privacy.transcript import decode, message_class, read_transcript, role_of, transcript_party

__all__ = [
    "KINDS",
    "READERS_OF_PAGES",
    "ROLES",
    "Access",
    "Audit",
    "AuditResult",
    "CanaryKit",
    "HistorySearch",
    "Violation",
    "audit",
    "matrix",
    "observed",
]


READERS_OF_PAGES = ("operator/operator",)
"""Parties that read the logs, metrics and health pages of all others."""


def matrix(rows: AccessRows) -> dict[str, dict[str, Access]]:
    """Return the access of every role to every kind of datum.

    Parameters
    ----------
    rows : mapping
        Rows that a system declares (``System.declared``).

    Returns
    -------
    dict of str to dict of str to Access
        Access by role and kind; every role of ``ROLES`` and every kind of ``KINDS`` is there.

    Raises
    ------
    ConfigError
        A kind is not declared.
    """
    if missing := [kind for kind in KINDS if kind not in rows]:
        raise ConfigError(f"no visibility is declared for {', '.join(missing)}")
    return {
        role: {kind: rows[kind][0].get(role, Access(False, rows[kind][1])) for kind in KINDS}
        for role in ROLES
    }


def observed(transcripts: Mapping[str, Iterable[Path | str]]) -> dict[str, dict[str, bool]]:
    """Return the kinds of datum that passed each party, from its messages alone.

    Parameters
    ----------
    transcripts : mapping of str to iterable of Path
        Transcript files by party, ``"cos/cos"``.

    Returns
    -------
    dict of str to dict of str to bool
        Seen or not, by party and kind: received, or sent and so held.  An owner sees the interactions in the
        sealed records that are sent to it.
    """
    return {
        party: {kind: kind in seen for kind in KINDS} for party, seen in observed_kinds(transcripts).items()
    }


@dataclass(frozen=True)
class Violation:
    """A canary that a party held and may not see.

    Attributes
    ----------
    party : str
        Party that held it.
    kind : str
        Kind of datum.
    source : str
        Place where it was found: the RPC and direction, or the file.
    why : str
        Reason why the party may not see it.
    """

    party: str
    kind: str
    source: str
    why: str


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit.

    Attributes
    ----------
    seen : dict of str to dict of str to str
        ``"seen"`` or ``"not seen"`` by party and kind, for the kinds that have canaries.
    violations : tuple of Violation
        Canaries that parties held and may not see, each place once.
    """

    seen: dict[str, dict[str, str]] = field(default_factory=dict)
    violations: tuple[Violation, ...] = ()


class Audit:
    """Searches bytes that parties held for canaries, and compares the findings with the matrix.

    Parameters
    ----------
    canaries : CanaryKit
        Canaries to search for.
    rows : mapping
        Rows that the system declares (``System.declared``).
    histories : HistorySearch, optional
        Users of whom several items together are searched for, in any order and notation.
    """

    def __init__(self, canaries: CanaryKit, rows: AccessRows, histories: HistorySearch | None = None) -> None:
        self._kit = canaries
        self._histories = histories
        self._matrix = matrix(rows)
        self._seen: dict[str, set[str]] = {}
        self._violations: dict[tuple[str, str, str], Violation] = {}

    def audit_bytes(self, party: str, source: str, data: bytes) -> set[str]:
        """Search bytes that a party held: a message, a log, a page of metrics.

        Parameters
        ----------
        party : str
            Role and name of the party.
        source : str
            Where the bytes are from, for the report.
        data : bytes
            Bytes to search.

        Returns
        -------
        set of str
            Kinds of the canaries found.

        Raises
        ------
        ConfigError
            When the party's role is none of ``ROLES``.
        """
        role = role_of(party)
        if role not in self._matrix:
            raise ConfigError(f"party {party} has no role of ours", hint=f"roles: {', '.join(ROLES)}")
        found = self._kit.found(data)
        self._seen.setdefault(party, set()).update(canary.kind for canary in found)
        for canary in found:
            self._note(party, canary.kind, source, canary.holders)
        return {canary.kind for canary in found}

    def audit_page(self, party: str, source: str, page: bytes) -> set[str]:
        """Search a page that an operator reads: a log, metrics, health, a report.

        Its readers are the party whose process writes it and the operator, who collects logs and metrics of all.

        Parameters
        ----------
        party : str
            Role and name of the party whose process writes the page.
        source : str
            Where the page is from.
        page : bytes
            All of it, so that items in several of its lines are found together.

        Returns
        -------
        set of str
            Kinds found.
        """
        found: set[str] = set()
        told = [] if self._histories is None else self._histories.by_page(page)
        for reader in dict.fromkeys((party, *READERS_OF_PAGES)):
            found |= self.audit_bytes(reader, source, page) | self._note_on_page(reader, source, told)
        return found

    def audit_tree(self, party: str, folder: Path | str) -> set[str]:
        """Search every file below a folder (stores, logs, transcripts); links are not followed.

        Returns
        -------
        set of str
            Kinds of the canaries found.
        """
        root = Path(folder)
        found: set[str] = self.audit_bytes(party, str(root), b"")
        for path in sorted(root.rglob("*")):
            if path.is_file() and not path.is_symlink():
                source = str(path.relative_to(root))
                for piece in _pieces(path, overlap=self._kit.longest - 1):
                    found |= self.audit_bytes(party, source, piece)
                # A file's name is stored too.
                found |= self.audit_bytes(party, f"name of {source}", source.encode())
                if self._histories is not None:
                    found |= self._note_on_page(party, source, _together_in(path, self._histories))
                    named = self._histories.by_page(source.encode())
                    found |= self._note_on_page(party, f"name of {source}", named)
        return found

    def audit_transcript(self, party: str, path: Path | str) -> set[str]:
        """Search every message of a transcript, received or sent.

        Returns
        -------
        set of str
            Kinds of the canaries found.
        """
        found: set[str] = self.audit_bytes(party, str(path), b"")
        batches: dict[str, bytearray] = {}
        together = None if self._histories is None else Together(self._histories)
        for entry in read_transcript(path):
            source = f"{entry.rpc} {entry.direction}"
            if together is not None and message_class(entry) is not None:
                # A message that was recorded before it was refused as malformed is searched for patterns only.
                with contextlib.suppress(StoreError):
                    for where, history in together.add(entry, decode(entry)):
                        found |= self._note_histories(party, where, [history])
            batch = batches.setdefault(source, bytearray())
            batch += entry.payload
            # Many messages are searched at once, kept apart so that no canary comes about between two.
            batch += _BETWEEN
            if len(batch) >= _PIECE_BYTES:
                found |= self.audit_bytes(party, source, bytes(batch))
                batch.clear()
        for source, batch in batches.items():
            found |= self.audit_bytes(party, source, bytes(batch))
        for where, history in together.rest() if together is not None else ():
            found |= self._note_histories(party, where, [history])
        return found

    def result(self) -> AuditResult:
        """Return the findings so far."""
        planted = dict.fromkeys(canary.kind for canary in self._kit.canaries)
        return AuditResult(
            seen={
                party: {kind: "seen" if kind in seen else "not seen" for kind in planted}
                for party, seen in self._seen.items()
            },
            violations=tuple(self._violations.values()),
        )

    def _note_on_page(self, party: str, source: str, histories: Iterable[History]) -> set[str]:
        """Note histories on a page or in a file.

        Users share items, so that the files of a host with all its users' items have several of other hosts' users,
        too: at a host only its own users' histories count here.
        """
        told = list(histories)
        if any(party in history.holders for history in told):
            told = [history for history in told if party in history.holders]
        return self._note_histories(party, source, told)

    def _note_histories(self, party: str, source: str, histories: Iterable[History]) -> set[str]:
        """Note that a party holds several items of users together; return the kind where there are any."""
        kinds = set()
        for history in histories:
            kinds.add(_HISTORY)
            self._note(party, _HISTORY, source, history.holders)
        self._seen.setdefault(party, set()).update(kinds)
        return kinds

    def _note(self, party: str, kind: str, source: str, holders: frozenset[str] | None) -> None:
        """Note a violation where a party may not see what it holds."""
        why = self._objection(party, self._matrix[role_of(party)][kind], holders)
        if why:
            self._violations.setdefault((party, kind, source), Violation(party, kind, source, why))

    @staticmethod
    def _objection(party: str, access: Access, holders: frozenset[str] | None) -> str:
        if not access.allowed:
            return access.why
        if access.own_only and holders is not None and party not in holders:
            return f"only its own, and this is that of {', '.join(sorted(holders))}; {access.why}"
        return ""


def audit(
    transcripts: Mapping[str, Iterable[Path | str]],
    canaries: CanaryKit,
    rows: AccessRows,
    *,
    folders: Mapping[str, Iterable[Path | str]] | None = None,
) -> AuditResult:
    """Search transcripts, and folders of stores and logs, for canaries.

    Parameters
    ----------
    transcripts : mapping of str to iterable of Path
        Transcript files by party.
    canaries : CanaryKit
        Canaries to search for.
    rows : mapping
        Rows that the system declares (``System.declared``).
    folders : mapping of str to iterable of Path, optional
        Further folders by party; every file in them is searched.

    Returns
    -------
    AuditResult
        Kinds seen by each party, and the violations among them.
    """
    search = Audit(canaries, rows)
    for party, paths in transcripts.items():
        for path in paths:
            search.audit_transcript(party, path)
    for party, roots in (folders or {}).items():
        for root in roots:
            search.audit_tree(party, root)
    return search.result()


_HISTORY = "history"
_PIECE_BYTES = 16 << 20
_BETWEEN = b"\xff" * 8


_STORE = b"SQLite format 3\0"


def _together_in(path: Path, search: HistorySearch) -> Iterator[History]:
    """Yield the users of whom a file has several items together: in one row of a store, or on a page of text."""
    with path.open("rb") as file:
        start = file.read(_PIECE_BYTES)
    if start.startswith(_STORE):
        for row in _rows(path):
            yield from search.by_keys(search.keys_in(b"\xff".join(row)))
            for cell in row:
                if cell.isascii():
                    for numbers in lists_in_text(cell):
                        yield from search.by_list(numbers)
    elif start.isascii():
        yield from search.by_page(start)
    elif transcript_party(path) is None:
        yield from search.by_keys(search.keys_in(start))


def _rows(path: Path) -> Iterator[list[bytes]]:
    """Yield the texts and bytes in each row of each table of a store."""
    with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
        connection.text_factory = bytes
        for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            name = table.decode().replace('"', '""')
            # The name is quoted, and comes from the store itself.
            for row in connection.execute(f'SELECT * FROM "{name}"'):  # noqa: S608
                yield [cell for cell in row if isinstance(cell, bytes) and cell]


def _pieces(path: Path, *, overlap: int) -> Iterator[bytes]:
    """Yield a file in pieces that overlap by ``overlap`` bytes, so that nothing is cut in two unseen."""
    with path.open("rb") as file:
        tail = b""
        while piece := file.read(_PIECE_BYTES):
            yield tail + piece
            tail = (tail + piece)[-overlap:] if overlap else b""
