"""Replace files atomically and durably, for private state that must never be half written."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from numpy.lib import format as npy
from numpy.typing import NDArray

from coterie.crypto.keyfile import private_file_in_place_of

__all__ = ["replace_array", "replace_bytes"]


def replace_array(path: Path, array: NDArray[Any]) -> None:
    """Replace a file by an array in NPY format, atomically and durably, mode 0600."""
    buffer = io.BytesIO()
    npy.write_array(buffer, array, allow_pickle=False)
    replace_bytes(path, buffer.getvalue())


def replace_bytes(path: Path, content: bytes) -> None:
    """Replace a file's content atomically and durably, mode 0600."""
    with private_file_in_place_of(path) as file:
        file.write(content)
