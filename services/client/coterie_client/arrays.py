"""Arrays as files that are there as a whole or not at all."""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path
from typing import Any

from numpy.lib import format as npy
from numpy.typing import NDArray

__all__ = ["replace_array", "replace_bytes"]


def replace_array(path: Path, array: NDArray[Any]) -> None:
    """Write an array as a whole, mode 0600, durably."""
    buffer = io.BytesIO()
    npy.write_array(buffer, array, allow_pickle=False)
    replace_bytes(path, buffer.getvalue())


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a file as a whole, mode 0600, durably."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        # Where there is no room, a part of the content takes what is left.
        Path(temporary).unlink(missing_ok=True)
        raise
