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
import itertools
import json
import os
import threading
import time
from collections import Counter
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
_TAIL = 1 << 16
"""Bytes that are read at the end of a file for its last line, and twice as many where that is longer."""
_PAUSE_S = 60.0
"""Wait before a file that could not be renamed or removed is tried again."""
_TRIES = 3
_WAIT_S = 0.05
"""Checks of a log, and the wait between them, where a service wrote it meanwhile."""
_MOST_TEXT = 500
"""Longest text of a field."""
_LIMITED = frozenset({"refusal", "registration"})
"""Kinds of records that any party can cause as often as it likes."""
_WINDOW_S = 60.0
_MOST_EACH = 10
"""Records of a limited kind in so many seconds, for each reason and peer; further ones are counted, so that nobody can
push other records out."""
_MOST_REFUSALS = 300
"""Refusals recorded in so many seconds, of all reasons and peers."""
_MOST_COUNTED = 1 << 14
"""Pairs of a reason and a peer that are counted; further ones of a kind count as one."""
_ORDINARY = "STALE"
"""Reason of refusals that parties get in any run, when they are late; none is recorded."""

AUDITED: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "listening": ("start", ()),
        "stopped": ("stop", ()),
        # Its message may name a user, or quote a line of a history.
        "cannot go on": ("give-up", ("error",)),
        "run ended": ("run-ended", ("run", "phase", "reason")),
        "the run waits": ("run-waits", ("run", "reason")),
        "run resumed": ("run-resumed", ("run", "after_round")),
        "round abandoned": ("round-abandoned", ("run", "round", "reason")),
        "sum abandoned": ("round-abandoned", ("run", "round", "reason")),
        "enrolled": ("enrolment", ("party", "participants", "issuer", "subject_sha256")),
        "renewed a certificate": ("certificate", ("party",)),
        "renewed the certificate": ("certificate", ()),
        "renewed the certificate of this process": ("certificate", ()),
        "took up another certificate": ("certificate", ()),
        "made an authority": ("authority", ()),
        "took up other authorities": ("authority", ("authorities",)),
        "other authorities are not taken up": ("authority", ("error",)),
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
        "fixed a population": ("population", ("run", "users", "waves")),
        "population extended": ("population", ("run", "users", "from_pass")),
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
        # At the start, too: a crash may have left a file that was to be removed.
        self._tidy, self._tidy_from, self._removed = False, -_PAUSE_S, 0
        self._syncing: list[threading.Thread] = []
        self._since = -_WINDOW_S
        self._counted: Counter[tuple[str, str, str]] = Counter()
        self._refusals = 0
        self._omitted: Counter[str] = Counter()

    def record(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Append a record.  Where that fails it counts as lost, and the next one that succeeds says so."""
        with self._lock:
            try:
                if not self._open:
                    self._take_up()
                if self._lost:
                    self._append("records-lost", {"records": self._lost})
                    self._lost = 0
                if (now := time.monotonic()) - self._since >= _WINDOW_S:
                    self._append_omitted()
                    self._since, self._refusals = now, 0
                    self._counted.clear()
                if kind not in _LIMITED or self._is_recorded(kind, fields):
                    self._append(kind, fields)
            except Exception:
                # Neither a full volume nor a file that was changed by hand may stop the service.
                self._lost += 1
            else:
                self._tidy_up()

    def _is_recorded(self, kind: str, fields: Mapping[str, Any]) -> bool:
        """Return whether a record of a limited kind is written, and not only counted."""
        reason = str(fields.get("reason") or fields.get("limit") or "")
        if reason == _ORDINARY:
            return False
        pair = (kind, reason, str(fields.get("peer") or fields.get("party") or ""))
        if pair not in self._counted and len(self._counted) >= _MOST_COUNTED:
            pair = (kind, "", "")
        self._counted[pair] += 1
        if self._counted[pair] > _MOST_EACH or (kind == "refusal" and self._refusals >= _MOST_REFUSALS):
            self._omitted[kind] += 1
            return False
        self._refusals += kind == "refusal"
        return True

    def _append_omitted(self) -> None:
        if self._omitted:
            registrations = self._omitted["registration"] or None
            self._append(
                "refusals-omitted", {"refusals": self._omitted["refusal"], "registrations": registrations}
            )
            self._omitted.clear()

    def close(self) -> None:
        """Make what was written durable, and close the file."""
        with self._lock:
            with contextlib.suppress(Exception):
                if self._lost and not self._open:
                    self._take_up()
                if self._lost:
                    self._append("records-lost", {"records": self._lost})
                    self._lost = 0
            if self._file >= 0:
                with contextlib.suppress(Exception):
                    self._append_omitted()
            if self._file >= 0:
                _sync_and_close(self._file)
            self._file, self._open = -1, False
            for one in self._syncing:
                one.join()

    def _take_up(self) -> None:
        """Go on after the last whole line; a line that a crash cut short is cut off, and its length recorded."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._open_current()
        try:
            last, whole, size = _end(self._path)
            if last is None and (before := _segments(self._folder)):
                last = _end(before[-1])[0]
            if last is not None:
                self._number, self._head = _number(last), _hash(last)
            self._first, self._size, self._open = self._number + 1, whole, True
            if whole:
                with self._path.open("rb") as lines:
                    self._first = _number(lines.readline())
            if whole < size:
                os.ftruncate(self._file, whole)
                self._append("torn-line", {"bytes": size - whole})
        except Exception:
            # The next record opens the file again.
            if self._file >= 0:
                os.close(self._file)
            self._file, self._open = -1, False
            raise

    def _open_current(self) -> None:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)

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
            try:
                os.ftruncate(self._file, self._size)
            except OSError:
                # The next record opens the file again, and cuts the line off.
                os.close(self._file)
                self._file, self._open = -1, False
            raise
        self._size += len(line)
        self._number, self._head = self._number + 1, _hash(line)

    def _tidy_up(self) -> None:
        """Close a full file and remove the oldest; where that fails no record is lost, and a later one tries again."""
        now = time.monotonic()
        if now - self._tidy_from < _PAUSE_S:
            return
        try:
            if self._size >= self._most:
                self._rotate()
            if not self._tidy:
                self._remove_oldest()
        except Exception:
            self._tidy_from = now

    def _rotate(self) -> None:
        """Go on in a new file.  Nothing is read, and a thread makes the full one durable: this is in the event loop."""
        self._path.rename(self._folder / f"{self._first:012}.jsonl")
        full, self._file, self._open, self._tidy = self._file, -1, False, False
        self._syncing = [one for one in self._syncing if one.is_alive()]
        thread = threading.Thread(target=_sync_and_close, args=(full,), name="audit log", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            _sync_and_close(full)
        else:
            self._syncing.append(thread)
        self._open_current()
        self._first, self._size, self._open = self._number + 1, 0, True

    def _remove_oldest(self) -> None:
        segments = _segments(self._folder)
        for oldest, following in itertools.pairwise(segments[: 2 - _SEGMENTS]):
            # Each file is named by its first record.
            if (up_to := int(following.stem) - 1) > self._removed:
                self._append("segment-removed", {"up_to": up_to})
                self._removed = up_to
            oldest.unlink(missing_ok=True)
        self._tidy = True


def _sync_and_close(file: int) -> None:
    with contextlib.suppress(OSError):
        os.fsync(file)
    os.close(file)


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
    """Check the chain of an audit log, again where the service wrote it meanwhile.

    Raises
    ------
    StoreError
        There is none, or it cannot be read.
    """
    folder = state / FOLDER
    for left in reversed(range(_TRIES)):
        before = _files(folder)
        try:
            found, whole = _check(before)
        except OSError as error:
            # A running service may have removed or renamed the file since.
            if not left or not isinstance(error, FileNotFoundError):
                raise StoreError(f"cannot read {error.filename or folder}: {error.strerror}") from error
        else:
            if not left or (before and whole and before == _files(folder)):
                break
        time.sleep(_WAIT_S)
    if not before:
        raise StoreError(f"there is no audit log in {folder}", hint="name the state folder of a service")
    return found


def _check(paths: list[Path]) -> tuple[CheckedLog, bool]:
    """Check the chain over files, and return whether the last line of the current one is whole, too."""
    found, removed, whole = CheckedLog(), {0}, True
    for path, line in _lines(paths):
        at = f"{path.name}, after record {found.last}"
        if not line.endswith(b"\n"):
            found.problems.append(f"{at}: the last line is cut short, as by a crash or by hand")
            whole = path.name != _CURRENT
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
            removed.add(up_to)
        found.kinds[kind] = found.kinds.get(kind, 0) + 1
        found.last, found.head = number, _hash(line)
        found.hashes[number] = found.head
    # After a crash a file may still be there whose removal is the last that is recorded.
    if found.first > 1 and found.first - 1 not in removed:
        found.problems.append(
            f"records 1 to {found.first - 1} are missing, and no record says that they were removed"
        )
    return found, whole


def _segments(folder: Path) -> list[Path]:
    """Return the closed files in the order of their records."""
    return sorted(path for path in folder.glob("*.jsonl") if path.stem.isascii() and path.stem.isdecimal())


def _files(folder: Path) -> list[Path]:
    return [*_segments(folder), *folder.glob(_CURRENT)]


def _lines(paths: list[Path]) -> Iterator[tuple[Path, bytes]]:
    for path in paths:
        with path.open("rb") as lines:
            for line in lines:
                yield path, line


def _end(path: Path) -> tuple[bytes | None, int, int]:
    """Return the last whole line of a file, if any, the bytes up to its end, and those of the file."""
    length = _TAIL
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        while True:
            start = file.seek(max(0, size - length))
            content = file.read(size - start)
            end = content.rfind(b"\n") + 1
            begin = content.rfind(b"\n", 0, max(0, end - 1)) + 1
            if begin or not start:
                return content[begin:end] or None, start + end if end else 0, size
            length *= 2


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
