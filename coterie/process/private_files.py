"""Check, before a service starts, that nobody else can read its private files."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from coterie.errors import PreflightError

__all__ = ["PRIVATE", "check_private", "open_to_others", "private_in"]

PRIVATE = (
    "*.db",
    "*.db-wal",
    "*.db-shm",
    "*.bin",
    "*.npy",
    "identities.key",
    "directory-signing.key",
    "keys/*.key",
    "*.prekey",
    "*.csv",
    "*.jsonl",
    "key.pem",
    "ca-key.pem",
    "journal.json",
)
"""Names of private files below a state folder: stores, journals of sums, transcripts, users' arrays, secrets."""

_OTHERS = 0o077


def private_in(state: Path) -> Iterator[Path]:
    """Yield the private files below a state folder, in order; links are not followed."""
    for folder, _, names in os.walk(state):
        for name in sorted(names):
            path = Path(folder, name)
            if any(path.match(pattern) for pattern in PRIVATE) and not path.is_symlink():
                yield path


def open_to_others(paths: Iterable[Path]) -> list[tuple[Path, int]]:
    """Return the files that the group or everybody may read, write or execute, with their modes.

    Files that do not exist are left out, and all files where the system has no such modes.
    """
    if os.name != "posix":
        return []
    found = []
    for path in paths:
        try:
            mode = path.stat().st_mode & 0o777
        except OSError:
            # Whoever opens the file says what is wrong with it.
            continue
        if mode & _OTHERS:
            found.append((path, mode))
    return found


def check_private(state: Path, inputs: Iterable[Path] = ()) -> None:
    """Check the private files of a service.

    Parameters
    ----------
    state : Path
        Its state folder.
    inputs : iterable of Path
        Private files that its configuration names: histories, attributes, features.

    Raises
    ------
    PreflightError
        Others can read one of them; names it, its mode and what to do.
    """
    found = open_to_others([*inputs, *private_in(state)])
    if not found:
        return
    (path, mode), more = found[0], len(found) - 1
    beside = f", and so can they {more} other files of this service" if more else ""
    shown = " ".join(shlex.quote(str(each)) for each, _ in found[:8])
    raise PreflightError(
        f"{path} has mode {mode:04o}, expected 0600: others on this machine can read it{beside}",
        hint=f"chmod 600 {shown}{' ...' if len(found) > 8 else ''}; it may have been read, if others use this machine",
    )
