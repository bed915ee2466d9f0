"""A test of a volume's free space by allocating it, because free space as reported ignores quotas and reserves."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from coterie.store.engine import trouble_of

__all__ = ["MARGIN", "has_room"]

MARGIN = 256 << 10
"""Room that a store needs to be made or opened, and that a large file must leave to it, bytes."""

_NO_ALLOCATION = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


def has_room(folder: Path, size: int = MARGIN) -> bool:
    """Return whether a file of a size can be written to a folder now; the trial file is removed.

    Parameters
    ----------
    folder : Path
        It must exist.
    size : int
        Bytes, at least 1.

    Raises
    ------
    OSError
        When no file can be written there for another reason than that there is no room.
    """
    path = folder / ".room"
    try:
        with path.open("wb", buffering=0) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno not in _NO_ALLOCATION:
                    raise
                for first in range(0, size, MARGIN):
                    file.write(bytes(min(MARGIN, size - first)))
    except OSError as error:
        if trouble_of(error) != "full":
            raise
        return False
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return True
