"""How a person stands to a run by own choice: pausing, fewer rounds a day, leaving; kept on the person's device.

Beside the consent, which stands in the configuration and holds from the start of the service on, this changes while it
runs: from the next sum on.  It can only ask for less than the consent does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.data.whole_file import whole_file
from coterie.errors import ConfigError, DataError

__all__ = ["STANCE", "Stance", "changed_stance", "read_stance"]

STANCE = "stance.json"
"""Name of the file, in the state folder of the client service."""

_MOST_ROUNDS = 100_000


@dataclass(frozen=True)
class Stance:
    """What a person has chosen.

    Attributes
    ----------
    paused : bool
        The device takes part in no sum until the person goes on.
    left : bool
        The person has left: the device takes part in no sum of this run any more.
    rounds_per_day : int
        Sums in a day (UTC) at most; 0 for no limit beside the consent's.
    forget : bool
        What the device has published at the third party is to be deleted there; only after leaving.
    """

    paused: bool = False
    left: bool = False
    rounds_per_day: int = 0
    forget: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises
        ------
        ConfigError
        """
        for name in ("paused", "left", "forget"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} {getattr(self, name)!r}; expected true or false")
        whole = isinstance(self.rounds_per_day, int) and not isinstance(self.rounds_per_day, bool)
        if not whole or not 0 <= self.rounds_per_day <= _MOST_ROUNDS:
            raise ConfigError(
                f"rounds a day {self.rounds_per_day!r}; expected a whole number, 1 to {_MOST_ROUNDS}, or 0 for no limit"
            )
        if self.forget and not self.left:
            raise ConfigError(
                "what was published would be published again",
                hint="leave the run first, or with the same order",
            )

    def objections(self, most_today: int) -> list[str]:
        """Return why the device takes no part in a sum, each with its reason; empty where it may.

        Parameters
        ----------
        most_today : int
            Sums that its user has been in today.
        """
        if self.left:
            return ["the user has left the run"]
        if self.paused:
            return ["the user has paused"]
        if self.rounds_per_day and most_today >= self.rounds_per_day:
            return [
                f"a user has been in {most_today} rounds today; the user's own limit is {self.rounds_per_day}"
            ]
        return []


def read_stance(state: Path) -> Stance:
    """Return what the person has chosen, from the state folder of the client service.

    Raises
    ------
    DataError
        The file cannot be read or is damaged: nobody knows what the person wants.
    """
    path = state / STANCE
    try:
        content = json.loads(path.read_bytes())
        return Stance(**content)
    except FileNotFoundError:
        return Stance()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, ConfigError) as error:
        raise DataError(
            f"{path} is damaged: {error}", hint="without this file the device takes part as the consent says"
        ) from error


def changed_stance(state: Path, **changes: Any) -> Stance:
    """Change what the person has chosen, and return it; it is on the disk then, and no change of another is lost.

    Parameters
    ----------
    state : Path
    **changes
        Attributes of `Stance`.

    Raises
    ------
    ConfigError
        A value that is none, or a person who has left and wants to go on.
    DataError
        The file cannot be read or written.
    """
    try:
        # The page and the command are two processes.
        with _alone(state):
            before = read_stance(state)
            if before.left and changes.get("left") is False:
                raise ConfigError(
                    "this device has left the run, for good",
                    hint="a person who joins again does so in another run",
                )
            after = dataclasses.replace(before, **changes)
            with whole_file(state / STANCE) as beside, beside.open("w") as file:
                beside.chmod(0o600)
                file.write(json.dumps(dataclasses.asdict(after)))
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise DataError(f"cannot write {state / STANCE}: {error.strerror}") from error
    return after


@contextlib.contextmanager
def _alone(state: Path) -> Iterator[None]:
    """Keep other processes from changing the choice; afterwards have the folder's entries on the disk."""
    folder = os.open(state, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
        os.fsync(folder)
    finally:
        os.close(folder)
