"""Files that a killed process leaves readable: written as a whole, or line by line and cut at the last whole line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["cut_to_whole_lines", "whole_file", "whole_lines"]


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


def whole_lines(path: Path) -> str:
    """Return the whole lines of a text file, UTF-8; what a killed writer left after the last newline is dropped."""
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1].decode("utf-8")


def cut_to_whole_lines(path: Path) -> None:
    """Cut a text file behind its last newline, so that what is appended begins a line; a missing file stays missing."""
    try:
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
    except FileNotFoundError:
        return
