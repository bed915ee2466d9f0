"""Replace files atomically and durably, for private state that must never be half written."""

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
    """Replace a file by an array in NPY format, atomically and durably, mode 0600."""
    buffer = io.BytesIO()
    npy.write_array(buffer, array, allow_pickle=False)
    replace_bytes(path, buffer.getvalue())


def replace_bytes(path: Path, content: bytes) -> None:
    """Replace a file's content atomically and durably, mode 0600."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        # On a full disk, a partial file would take the space that is left.
        Path(temporary).unlink(missing_ok=True)
        raise
