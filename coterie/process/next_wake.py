"""The time of a device's next wake, kept in its state folder, between two processes of the device."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from coterie.data.whole_file import whole_file
from coterie.errors import StoreError

__all__ = ["NEXT_WAKE", "NextWake", "content_hash", "read_next_wake", "write_next_wake"]

NEXT_WAKE = "wake.json"
"""Name of the file, in the state folder of the client service."""


@dataclass(frozen=True)
class NextWake:
    """When a device wakes next.

    Attributes
    ----------
    run : str
        The run that it takes part in.
    at : float
        Unix seconds.
    written : float
        When this was decided, Unix seconds.
    over : str
        Why the device need not wake any more for this run; empty while the run goes on.
    seen : str
        `content_hash` of each file that the person changes, as it was when the wake that decided this began.
    """

    run: str
    at: float
    written: float
    over: str = ""
    seen: str = ""

    def waits(self, run: str, now: float | None = None) -> bool:
        """Return whether a device of a run need not wake yet.

        A clock that was set back to before the decision says nothing: the device wakes.
        """
        now = time.time() if now is None else now
        return self.run == run and now >= self.written and (bool(self.over) or now < self.at)


def content_hash(path: Path) -> str:
    """Return the hash of a file's content; that of an empty one where it cannot be read."""
    try:
        content = path.read_bytes()
    except OSError:
        content = b""
    return hashlib.sha256(content).hexdigest()


def read_next_wake(state: Path) -> NextWake | None:
    """Return when a device wakes next, from the state folder of its client service; None where nothing is known."""
    try:
        found = NextWake(**json.loads((state / NEXT_WAKE).read_bytes()))
        float(found.at), float(found.written)
    except (OSError, ValueError, TypeError):
        # Damaged or absent: a wake too many costs little.
        return None
    return found


def write_next_wake(state: Path, wake: NextWake) -> None:
    """Keep when a device wakes next; it is on the disk then.

    Raises
    ------
    StoreError
        The file cannot be written.
    """
    try:
        with whole_file(state / NEXT_WAKE) as beside, beside.open("w") as file:
            beside.chmod(0o600)
            file.write(json.dumps(dataclasses.asdict(wake)))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(f"cannot write {state / NEXT_WAKE}: {error.strerror}") from error
