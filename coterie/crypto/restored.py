"""The mark of a party restored from a backup: what it forgot, and the runs in which it stays out of protected sums.

A backup lacks the rounds that the party answered after it was made.  The party's counts (which rounds it joined, how
often it helped to reveal a sum over one model) protect it and others against a server that asks twice; without them it
takes no further part in protected sums of that run.  In sums without protection it goes on, and says what it lacks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

from coterie.crypto.keyfile import write_private_file
from coterie.errors import StoreError

__all__ = ["MARK", "lost", "mark_restored", "objections", "sits_out"]

MARK = "restored.json"
"""File of a state folder that names the runs, and when the backup was made."""


def mark_restored(state: Path, runs: Iterable[str], made: int = 0) -> None:
    """Record that a party takes no part in protected sums of these runs any more.

    Parameters
    ----------
    state : Path
    runs : iterable of str
    made : int, optional
        When the backup was made, seconds since 1970; 0 where that is not known.
    """
    found = _runs(state)
    # A state may be restored several times: it lacks what came after the earliest of the backups.
    for run in runs:
        known = [one for one in (found.get(run, 0), made) if one]
        found[run] = min(known, default=0)
    # An earlier release reads the runs alone.
    content = {"runs": sorted(found), "made": found}
    write_private_file(state / MARK, json.dumps(content, sort_keys=True).encode())


def sits_out(state: Path, run: str) -> bool:
    """Return whether a party's state was restored while a run was going on.

    Raises
    ------
    StoreError
        When the file is damaged.
    """
    return run in _runs(state)


def lost(state: Path, run: str, joined: int | None = None) -> str:
    """Return what a restored party lacks of a run, in words; empty where its state was not restored.

    Parameters
    ----------
    state : Path
    run : str
    joined : int, optional
        The last round that the state knows of; 0 when it knows of none, None where the party keeps no such number.

    Raises
    ------
    StoreError
        When the file is damaged.
    """
    made = _runs(state).get(run)
    if made is None:
        return ""
    when = time.strftime(" made at %Y-%m-%d %H:%M:%S UTC", time.gmtime(made)) if made else ""
    after = "" if joined is None else f": what it did after round {joined} is lost" if joined else ""
    if joined == 0:
        after = ": all that it did in the run is lost"
    return f"the state was restored from a backup{when}{after}"


def objections(state: Path, run: str, secure_sum: str, joined: int | None = None) -> list[str]:
    """Return the reasons for which a restored party stays out of a run; empty where it may take part.

    Parameters
    ----------
    state : Path
    run : str
    secure_sum : str
    joined : int, optional
        As for `lost`.
    """
    if secure_sum == "clear" or not sits_out(state, run):
        return []
    return [
        f"{lost(state, run, joined)}; without it this party takes no part in protected sums of the run, because a "
        "server could ask it twice (`coterie restore --nothing-since` where it did not run since the backup)"
    ]


def _runs(state: Path) -> dict[str, int]:
    """Return when the backup was made by which a run's state was restored, by run; 0 where that is not known."""
    path = state / MARK
    try:
        content = json.loads(path.read_bytes())
        made = dict(content.get("made", {}))
        return {str(run): int(made.get(run, 0)) for run in content["runs"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{path} cannot be read", hint="restore the backup again into an empty folder"
        ) from error
