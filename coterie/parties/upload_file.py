"""File in which a host keeps what one user has published to the third party, for its expansion services."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coterie.crypto.keyfile import read_private_file, write_private_file
from coterie.errors import CertificateError

__all__ = ["read_upload", "seeded_secret", "write_upload"]


def write_upload(path: Path, content: Mapping[str, Any]) -> None:
    """Write what a user has published, durably, mode 0600.

    Raises
    ------
    CertificateError
        When it cannot be written.
    """
    write_private_file(path, json.dumps(content).encode())


@contextmanager
def read_upload(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what a user has published; the fields are read inside, so that one that is damaged names the file.

    Raises
    ------
    CertificateError
        When the file is damaged, or readable by others.
    """
    try:
        yield json.loads(read_private_file(path))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CertificateError(
            f"{path} is damaged: it does not say what a user has published",
            hint="restore it from a backup; without it the user publishes anew in the next epoch",
        ) from None


def seeded_secret(seed: bytes, epoch: int) -> bytes:
    """Return the secret of an upload of meta-latents in an experiment, 32 bytes; whoever has the seed has it."""
    return hashlib.sha256(b"coterie latent upload" + seed + epoch.to_bytes(4, "little")).digest()
