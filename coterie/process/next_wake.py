"""The time of a device's next wake, kept in its state folder, between two processes of the device."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from coterie.data.whole_file import whole_file
from coterie.errors import StoreError

__all__ = ["NEXT_WAKE", "NextWake", "read_next_wake", "write_next_wake"]

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
    """

    run: str
    at: float
    written: float
    over: str = ""

    def waits(self, run: str, now: float | None = None) -> bool:
        """Return whether a device of a run need not wake yet.

        A clock that was set back to before the decision says nothing: the device wakes.
        """
        now = time.time() if now is None else now
        return self.run == run and now >= self.written and (bool(self.over) or now < self.at)


def read_next_wake(state: Path, inputs: Iterable[Path] = ()) -> NextWake | None:
    """Return when a device wakes next; None where nothing is known, or the person has changed something since.

    Parameters
    ----------
    state : Path
        State folder of the client service.
    inputs : iterable of Path
        Files that the person changes, such as the configuration: one that is newer than the decision asks for a wake.
    """
    path = state / NEXT_WAKE
    try:
        content = path.read_bytes()
        decided = path.stat().st_mtime_ns
        found = NextWake(**json.loads(content))
        float(found.at), float(found.written)
    except (OSError, ValueError, TypeError):
        # Damaged or absent: a wake too many costs little.
        return None
    for one in inputs:
        try:
            if one.stat().st_mtime_ns > decided:
                return None
        except OSError:
            continue
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
