"""The audit log of a service: JSON lines in its state folder, each bound to the line before by a hash.

Each line names the SHA-256 of the line before (``prev``), and its own number (``n``).  A line that is changed, taken
out or put in breaks the chain (`verify`); lines cut off at the end show against a head that somebody noted elsewhere.
Records come from log messages that `AUDITED` lists, with the fields that it lists, and from calls of `record`.  No
private value is in either.  ``docs/audit-log.md`` describes every kind.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from coterie.errors import StoreError

__all__ = [
    "AUDITED",
    "FOLDER",
    "KINDS",
    "AuditLog",
    "CheckedLog",
    "audited",
    "record",
    "start",
    "stop",
    "verify",
]

FOLDER = "audit"
"""Folder of the audit log in a service's state folder."""
_CURRENT = "current.jsonl"
_SEGMENTS = 4
"""Files that share the size of the log; the oldest is removed when there would be more."""
_FIRST = "0" * 64
_MOST_NUMBER = 10**12
"""Numbers of records are below it: names of files have so many digits."""
_NO_RECORD = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""Errors by which a line shows that it is no record: it was changed by hand."""
_MOST_TEXT = 500
"""Longest text of a field."""
_MOST_REFUSALS = 60
_WINDOW_S = 60.0
"""Refusals recorded in so many seconds; further ones are counted, so that nobody can push other records out."""

AUDITED: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "listening": ("start", ()),
        "stopped": ("stop", ()),
        "cannot go on": ("give-up", ("error", "message")),
        "run ended": ("run-ended", ("run", "phase", "reason")),
        "the run waits": ("run-waits", ("run", "reason")),
        "run resumed": ("run-resumed", ("run", "after_round")),
        "round abandoned": ("round-abandoned", ("run", "round", "reason")),
        "sum abandoned": ("round-abandoned", ("run", "round", "reason")),
        "enrolled": ("enrolment", ("party", "participants")),
        "renewed a certificate": ("certificate", ("party",)),
        "renewed the certificate": ("certificate", ()),
        "renewed the certificate of this process": ("certificate", ()),
        "took up another certificate": ("certificate", ()),
        "made an authority": ("authority", ()),
        "a party registers": ("registration", ("run", "party", "protocol", "release")),
        "a party cannot join": ("refusal", ("run", "party", "error")),
        "refused": ("refusal", ("rpc", "reason", "field", "peer")),
        "refused in part": ("refusal", ("rpc", "reason", "parts", "peer")),
        "cut off": ("refusal", ("limit", "peer")),
        "joined": ("consent", ("run", "system", "owner")),
        "outside this host's consent": ("no-consent", ("reasons",)),
        "outside this holder's consent": ("no-consent", ("reasons",)),
        "outside these owners' consent": ("no-consent", ("reasons",)),
        "sits out": ("sits-out", ("round", "purpose", "reason")),
        "party lost": ("party-lost", ("party",)),
        "population fixed": ("population", ("run", "users", "groups")),
        "fixed a population": ("population", ("run", "users")),
        "paillier key": ("key", ("run", "epoch", "key", "by", "holders")),
        "paillier key made": ("key", ("run", "epoch", "key")),
        "paillier key received": ("key", ("run", "epoch", "key")),
        "paillier key taken": ("key", ("run", "epoch", "key")),
        "paillier key destroyed": ("key-destroyed", ("run", "epoch")),
        "another key": ("key", ("epoch",)),
        "an old key is destroyed": ("key-destroyed", ("epoch",)),
        "graph key": ("key", ("run", "epoch", "by")),
        "graph key published": ("key", ("run", "epoch")),
        "graph key received": ("key", ("run", "epoch")),
        "revoked": ("revocation", ("by", "participants", "certificates")),
        "what was published is deleted": ("deletion", ("uploads",)),
        "meta-latents deleted": ("deletion", ("run", "epoch")),
        "the third party is caught": ("third-party-caught", ("thirdparty", "finding", "sizes")),
        "goes on with a restored state": ("restored", ("run", "lost")),
        "restored from a backup: no part in windows of this run": ("restored", ("run", "reasons")),
        "this server is behind its parties, as after a restore: it goes on where they are": (
            "restored",
            ("run", "round", "goes_on_after_round", "passes_lost", "versions_lost_after"),
        ),
        "the COS has forgotten this party, as after a restore from a backup: it registers again": (
            "cos-restored",
            ("run",),
        ),
        "the COS does not know the run any more, in which this party takes part": ("cos-restored", ("run",)),
        "the store is migrated, and an earlier release cannot use it any more": (
            "migration",
            ("before", "after"),
        ),
    }
)
"""Log messages that are records, too: by message, the record's kind and the fields that it takes over."""

KINDS = frozenset(
    {kind for kind, _ in AUDITED.values()}
    | {"round", "sum", "reveal", "operator", "choice", "restore"}
    | {"torn-line", "records-lost", "refusals-omitted", "segment-removed"}
)
"""Kinds of records."""


class AuditLog:
    """The audit log of one process, which appends to it and renames full files.

    Parameters
    ----------
    state : Path
        State folder of the service, which is locked.
    service : str
        Role and name.
    most_bytes : int
        Size of all files together; the oldest are removed beyond it, which is a record of its own.
    """

    def __init__(self, state: Path, service: str, most_bytes: int) -> None:
        self._folder = state / FOLDER
        self._path = self._folder / _CURRENT
        self._service = service
        self._most = most_bytes // _SEGMENTS
        self._lock = threading.Lock()
        self._number, self._head, self._first, self._size = 0, _FIRST, 1, 0
        self._lost, self._file = 0, -1
        self._open = False
        self._since, self._refusals = -_WINDOW_S, 0

    def record(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Append a record.  Where that fails it counts as lost, and the next one that succeeds says so."""
        with self._lock:
            try:
                if not self._open:
                    self._take_up()
                if self._lost:
                    self._append("records-lost", {"records": self._lost})
                    self._lost = 0
                if kind != "refusal" or self._counts_refusal():
                    self._append(kind, fields)
                if self._size >= self._most:
                    self._rotate()
            except Exception:
                # Neither a full volume nor a file that was changed by hand may stop the service.
                self._lost += 1

    def _counts_refusal(self) -> bool:
        """Return whether a refusal is recorded, and not only counted."""
        now = time.monotonic()
        if now - self._since >= _WINDOW_S:
            if (omitted := self._refusals - _MOST_REFUSALS) > 0:
                self._append("refusals-omitted", {"refusals": omitted})
            self._since, self._refusals = now, 0
        self._refusals += 1
        return self._refusals <= _MOST_REFUSALS

    def close(self) -> None:
        """Make what was written durable, and close the file."""
        with self._lock:
            if self._file >= 0:
                with contextlib.suppress(OSError):
                    if (omitted := self._refusals - _MOST_REFUSALS) > 0:
                        self._append("refusals-omitted", {"refusals": omitted})
                    os.fsync(self._file)
                os.close(self._file)
            self._file, self._open = -1, False

    def _take_up(self) -> None:
        """Go on after the last whole line; a line that a crash cut short is cut off, and its length recorded."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._go_on()
        except Exception:
            # The next record opens the file again.
            os.close(self._file)
            self._file, self._open = -1, False
            raise

    def _go_on(self) -> None:
        content = self._path.read_bytes()
        whole = content.rfind(b"\n") + 1
        last, before = _last_line(content[:whole]), self._segments()
        if last is None and before:
            last = _last_line(before[-1].read_bytes())
        if last is not None:
            self._number, self._head = _number(last), _hash(last)
        self._first, self._size, self._open = self._number + 1, whole, True
        if lines := content[:whole].splitlines(keepends=True):
            self._first = _number(lines[0])
        if whole < len(content):
            os.ftruncate(self._file, whole)
            self._append("torn-line", {"bytes": len(content) - whole})

    def _append(self, kind: str, fields: Mapping[str, Any]) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        content = {"n": self._number + 1, "time": now, "service": self._service, "kind": kind}
        content |= {key: _printable(value) for key, value in fields.items() if value is not None}
        line = (json.dumps({**content, "prev": self._head}) + "\n").encode()
        written = 0
        try:
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError:
            # Without its end the line would break the chain.
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)
        self._number, self._head = self._number + 1, _hash(line)

    def _rotate(self) -> None:
        os.fsync(self._file)
        os.close(self._file)
        self._file, self._open = -1, False
        self._path.rename(self._folder / f"{self._first:012}.jsonl")
        self._take_up()
        for oldest in self._segments()[: -(_SEGMENTS - 1)]:
            last = _last_line(oldest.read_bytes())
            self._append("segment-removed", {"up_to": 0 if last is None else _number(last)})
            oldest.unlink()

    def _segments(self) -> list[Path]:
        return sorted(self._folder.glob("[0-9]*.jsonl"))


@dataclass
class CheckedLog:
    """What `verify` found in an audit log.

    Parameters
    ----------
    first, last : int
        Numbers of the first and the last record; 0 where there is none.
    head : str
        SHA-256 of the last line.
    problems : list of str
        Where the chain does not hold.
    kinds : dict of str to int
        Records by kind.
    """

    first: int = 0
    last: int = 0
    head: str = _FIRST
    problems: list[str] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)
    hashes: dict[int, str] = field(default_factory=dict, repr=False)


def verify(state: Path) -> CheckedLog:
    """Check the chain of an audit log.

    Raises
    ------
    StoreError
        There is none, or it cannot be read.
    """
    folder, found = state / FOLDER, CheckedLog()
    removed = 0
    for path, line in _lines(folder):
        at = f"{path.name}, after record {found.last}"
        if not line.endswith(b"\n"):
            found.problems.append(f"{at}: the last line is cut short, as by a crash or by hand")
            break
        try:
            content = json.loads(line)
            number, prev, kind = int(content["n"]), str(content["prev"]), str(content["kind"])
            up_to = int(content["up_to"]) if kind == "segment-removed" else 0
        except _NO_RECORD:
            found.problems.append(f"{at}: a line is no record")
            found.head = _hash(line)
            continue
        if not found.first:
            found.first = number
            if number == 1 and prev != _FIRST:
                found.problems.append(f"{path.name}: record 1 follows another one")
        elif prev != found.head:
            what = (
                "records are missing"
                if number > found.last + 1
                else "a record was changed, put in or taken out"
            )
            found.problems.append(f"{at}: {what} before record {number}")
        if kind == "segment-removed":
            removed = max(removed, up_to)
        found.kinds[kind] = found.kinds.get(kind, 0) + 1
        found.last, found.head = number, _hash(line)
        found.hashes[number] = found.head
    if found.first > 1 and removed != found.first - 1:
        found.problems.append(
            f"records 1 to {found.first - 1} are missing, and no record says that they were removed"
        )
    return found


def _lines(folder: Path) -> Iterator[tuple[Path, bytes]]:
    paths = [*sorted(folder.glob("[0-9]*.jsonl")), *folder.glob(_CURRENT)]
    if not paths:
        raise StoreError(f"there is no audit log in {folder}", hint="name the state folder of a service")
    for path in paths:
        try:
            with path.open("rb") as lines:
                for line in lines:
                    yield path, line
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error


def _last_line(content: bytes) -> bytes | None:
    lines = content.splitlines(keepends=True)
    return lines[-1] if lines else None


def _number(line: bytes) -> int:
    try:
        number = int(json.loads(line)["n"])
    except _NO_RECORD:
        number = 0
    # Changed by hand where it is out of range: the chain shows it, and the log goes on.
    return number if 0 <= number < _MOST_NUMBER else 0


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _printable(value: Any) -> Any:
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_printable(one) for one in value][:20]
    return str(value)[:_MOST_TEXT]


# --- of this process -------------------------------------------------------------------------------------------------

_current: AuditLog | None = None


def start(state: Path, service: str, most_bytes: int) -> None:
    """Keep an audit log in this process from now on; of size 0 for none."""
    global _current
    stop()
    _current = AuditLog(state, service, most_bytes) if most_bytes else None


def stop() -> None:
    """Close the audit log of this process."""
    global _current
    if _current is not None:
        _current.close()
    _current = None


def record(kind: str, **fields: Any) -> None:
    """Append a record to the audit log of this process, if it keeps one."""
    if _current is not None:
        _current.record(kind, fields)


def audited(event: Mapping[str, Any]) -> None:
    """Append the record of a log message, if `AUDITED` lists it."""
    known = AUDITED.get(str(event.get("event")))
    if known is not None and _current is not None:
        kind, names = known
        _current.record(kind, {name: event[name] for name in names if name in event})
