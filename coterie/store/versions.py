"""Store versions of a model on disk, for runs that form sums: all arrays of a version in one file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import structlog

from coterie.errors import StoreError
from coterie.rounds.sides import Arrays
from coterie.store.array_file import load_arrays, save_arrays

__all__ = ["Versions"]

_log = structlog.get_logger("coterie.store")

_NAME = re.compile(r"version-(\d{10})-(\d{10})\.safetensors")
_KEPT = 3
_MILESTONE = 50


class Versions:
    """The model versions of one run, each in a file named by its version and the round that made it.

    Parameters
    ----------
    folder : Path
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, arrays: Arrays, version: int, round_: int) -> None:
        """Write a version, durably."""
        # Write beside and rename, so that a reader finds the whole file or none.  Rename before the sync, which takes
        # one commit of the file system and not two: after a crash in between the file may be damaged, but then no
        # snapshot names it yet.
        path = self._path(version, round_)
        beside = path.with_name(f".{path.name}.part")
        try:
            save_arrays(arrays, beside)
            beside.replace(path)
        except BaseException:
            # On a full disk, a partial file would take the space that is left.
            beside.unlink(missing_ok=True)
            raise
        with path.open("rb") as written:
            os.fsync(written.fileno())
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def load(self, round_: int) -> Arrays:
        """Return the arrays that a round made.

        Raises
        ------
        FileNotFoundError
            When they are not kept.
        StoreError
            When the file is damaged.
        """
        for path, _, made in self._files():
            if made == round_:
                return load_arrays(path)[0]
        raise FileNotFoundError(f"what round {round_} made is not kept in {self._folder}")

    def load_version(self, version: int) -> Arrays | None:
        """Return a version as its last round left it; None when it is not kept, or damaged."""
        found = [path for path, held, _ in self._files() if held == version]
        try:
            return load_arrays(found[-1])[0] if found else None
        except (StoreError, OSError) as error:
            # A crash left a damaged file of a version that no snapshot names, or the file was damaged later.
            _log.warning("a version of a model is not served", version=version, because=str(error))
            return None

    def prune(self, present: int, keep: Iterable[int]) -> None:
        """Delete all versions but the last three, every fiftieth, those in ``keep``, and that of round ``present``."""
        kept = set(keep) | {version for _, version, _ in self._files()[-_KEPT:]}
        for path, version, made in self._files():
            if version not in kept and version % _MILESTONE and made != present:
                path.unlink(missing_ok=True)

    def _path(self, version: int, round_: int) -> Path:
        return self._folder / f"version-{version:010d}-{round_:010d}.safetensors"

    def _files(self) -> list[tuple[Path, int, int]]:
        found = []
        for path in sorted(self._folder.iterdir()):
            name = _NAME.fullmatch(path.name)
            if name:
                found.append((path, int(name[1]), int(name[2])))
        return found
