"""Files of tables that are written as a whole, so that a killed evaluation leaves none that cannot be read."""

from __future__ import annotations

from pathlib import Path

from coterie.data.whole_file import whole_file

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
    with whole_file(path) as beside:
        beside.write_text(text, encoding="utf-8")
