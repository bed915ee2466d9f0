"""Files of tables that are written as a whole, so that a killed evaluation leaves none that cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, text: str) -> None:
    """Write a text file; a process that is killed meanwhile leaves the old content.

    Parameters
    ----------
    path : Path
        Its folder is made where there is none.
    text : str
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
