"""The mark by which a party restored from a backup stays out of protected sums of runs that were going on then.

A backup lacks the rounds that the party answered after it was made.  The party's counts (which rounds it joined, how
often it helped to reveal a sum over one model) protect it and others against a server that asks twice; without them it
takes no further part in protected sums of that run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from coterie.crypto.keyfile import write_private_file
from coterie.errors import StoreError

__all__ = ["MARK", "mark_restored", "objections", "sits_out"]

MARK = "restored.json"
"""File of a state folder that names the runs."""


def mark_restored(state: Path, runs: Iterable[str]) -> None:
    """Record that a party takes no part in protected sums of these runs any more."""
    content = {"runs": sorted({*_runs(state), *runs})}
    write_private_file(state / MARK, json.dumps(content).encode())


def sits_out(state: Path, run: str) -> bool:
    """Return whether a party's state was restored while a run was going on.

    Raises
    ------
    StoreError
        When the file is damaged.
    """
    return run in _runs(state)


def objections(state: Path, run: str, secure_sum: str) -> list[str]:
    """Return the reasons for which a restored party stays out of a run; empty where it may take part."""
    if secure_sum == "clear" or not sits_out(state, run):
        return []
    return ["the state was restored from a backup, which does not know what was answered in this run later"]


def _runs(state: Path) -> list[str]:
    path = state / MARK
    try:
        found = json.loads(path.read_bytes())["runs"]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} cannot be read", hint="restore the backup again into an empty folder"
        ) from error
    return [str(run) for run in found]
