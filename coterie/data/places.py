"""Places of data sets on this machine: a path, or a name below ``data`` or ``COTERIE_DATA``."""

from __future__ import annotations

import os
from pathlib import Path

from coterie.errors import DataError

__all__ = ["located", "missing"]

_SHOWN = 12
"""Most data sets that an error names."""


def located(data: Path) -> Path:
    """Return the path of a data set, or of the one with this name below ``data`` or COTERIE_DATA if there is one."""
    if data.exists() or data.is_absolute():
        return data
    return next((folder / data for folder in _folders() if (folder / data).exists()), data)


def missing(data: Path) -> DataError:
    """Return the error about a data set that is not there: where it was looked for, and which ones there are."""
    if data.is_absolute():
        return DataError(f"{data} does not exist; expected a data set", hint="see `coterie data fetch`")
    folders = _folders()
    looked = " and ".join(str(folder / data) for folder in folders)
    there = sorted({one.name for folder in folders for one in _listed(folder) if not _aside(one)})
    more = ", ..." if len(there) > _SHOWN else ""
    known = f"; there are {', '.join(there[:_SHOWN])}{more}" if there else ""
    return DataError(
        f"{data} does not exist; expected a data set, here or at {looked}{known}",
        hint="see `coterie data fetch`, which gets published ones",
    )


def _folders() -> list[Path]:
    """Return the folders below which a name is looked for."""
    return [Path("data"), *(Path(root) for root in (os.environ.get("COTERIE_DATA"),) if root)]


def _aside(path: Path) -> bool:
    """Whether a file or folder is surely no data set: hidden, or a page about the others."""
    return path.name.startswith(".") or path.suffix == ".md"


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
