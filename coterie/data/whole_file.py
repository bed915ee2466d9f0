"""Files that are written as a whole: a process that is killed meanwhile leaves the old content."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["whole_file"]


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a file beside ``path`` to write to, which takes its place at the end; after an error it is gone.

    The content need not be on the disk: a machine that loses power may lose it.

    Parameters
    ----------
    path : Path
        In a folder that exists.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
