"""Keep copies of users' private arrays for evaluated versions, to serve the chosen version after the run.

Private arrays change with every round, and the version that is chosen is rarely the last one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import structlog

from coterie.rounds.sides import Arrays
from coterie.store.private_rows import evaluated_path, sum_of_copy, whole_path
from coterie_client.arrays import replace_array

__all__ = ["Evaluated"]

_log = structlog.get_logger("coterie.private")

_NAME = re.compile(r"evaluated-(\d{10})-(\w+)\.npy")


class Evaluated:
    """Copies of private arrays in a folder, one set for each version that is kept.

    Parameters
    ----------
    folder : Path
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, version: int, arrays: Arrays, among: Iterable[int]) -> None:
        """Write the arrays of a version, unless they are kept; drop all versions but this and those ``among``."""
        if not whole_path(self._folder, version).exists():
            for name, array in arrays.items():
                replace_array(self._path(version, name), array)
            # Written last: it marks the version's files as complete.
            replace_array(whole_path(self._folder, version), np.array([sum_of_copy(arrays)], np.uint32))
        kept = {version, *among}
        for path in self._folder.glob("evaluated-*.npy"):
            found = _NAME.fullmatch(path.name)
            if found and int(found[1]) not in kept:
                path.unlink(missing_ok=True)

    def adopt(self, version: int, arrays: Arrays) -> bool:
        """Copy a version's values into the arrays, in memory; return whether the version is kept."""
        if not whole_path(self._folder, version).exists():
            _log.warning("the private state of the chosen version is not kept", version=version)
            return False
        try:
            found = {name: np.load(self._path(version, name), allow_pickle=False) for name in arrays}
            told = np.load(whole_path(self._folder, version), allow_pickle=False)
        except (OSError, ValueError, EOFError):
            found, told = {}, np.zeros(1, np.uint32)
        fits = found and all(
            found[name].shape == array.shape and found[name].dtype == array.dtype
            for name, array in arrays.items()
        )
        # Earlier releases wrote a mark of one byte and no checksum.
        if not fits or (told.dtype == np.uint32 and told.tolist() != [sum_of_copy(found)]):
            _log.error(
                "the private state of the chosen version is damaged",
                version=version,
                folder=str(self._folder),
            )
            return False
        for name, array in arrays.items():
            array[...] = found[name]
        return True

    def _path(self, version: int, name: str) -> Path:
        return evaluated_path(self._folder, version, name)
