"""Places of data sets on this machine: a path, or a name below ``data`` or ``COTERIE_DATA``."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["located"]


def located(data: Path) -> Path:
    """Return the path of a data set, or of the one with this name below ``data`` or COTERIE_DATA if there is one."""
    if data.exists() or data.is_absolute():
        return data
    folders = [Path("data"), *(Path(root) for root in (os.environ.get("COTERIE_DATA"),) if root)]
    return next((folder / data for folder in folders if (folder / data).exists()), data)
