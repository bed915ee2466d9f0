"""File in which a host keeps the pseudo meta-latents that it has read, for its query users and for its next start."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.crypto.keyfile import read_private_file, write_private_file
from coterie.errors import CertificateError

__all__ = ["KeptLatents", "ReadLatents"]

_FOLDER = "latents"


class ReadLatents(NamedTuple):
    """Combinations as a holder of the key has read them."""

    epoch: int
    """Of their set."""
    latents: NDArray[np.float64]
    """Shape (count, d)."""


class KeptLatents:
    """Combinations of a run that a host has read, in a file.

    Parameters
    ----------
    state : Path
        State folder of the host.
    run : str
    """

    def __init__(self, state: Path, run: str) -> None:
        self._path = state / _FOLDER / f"{run}.combinations"

    def save(self, epoch: int, latents: NDArray[np.float64]) -> None:
        """Keep combinations in place of those of an earlier set, durably, mode 0600.

        Raises
        ------
        CertificateError
            When the file cannot be written.
        """
        content = io.BytesIO()
        # Never with pickled objects, neither here nor when it is read.
        np.savez(content, allow_pickle=False, epoch=np.int64(epoch), latents=np.asarray(latents, "<f8"))
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        write_private_file(self._path, content.getvalue())

    def load(self) -> ReadLatents | None:
        """Return what was kept last; None where nothing was.

        Raises
        ------
        CertificateError
            When the file is damaged, or readable by others.
        """
        if not self._path.exists():
            return None
        try:
            with np.load(io.BytesIO(read_private_file(self._path)), allow_pickle=False) as content:
                latents = content["latents"]
                if latents.ndim != 2 or not np.isfinite(latents).all():
                    raise ValueError("no matrix of numbers")
                return ReadLatents(int(content["epoch"]), latents.astype(np.float64))
        except (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile):
            raise CertificateError(
                f"{self._path} is damaged: it does not hold pseudo meta-latents",
                hint="remove it: the host reads them again before the next sum of its run",
            ) from None
