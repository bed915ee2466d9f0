"""Files that hold secrets: mode 0600, replaced as a whole, refused when others can read them."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.errors import CertificateError

__all__ = [
    "destroy_private_file",
    "read_marked_file",
    "read_private_file",
    "write_marked_file",
    "write_private_file",
]

_OTHERS = 0o077
_SUM = "sha256"
_CHECKSUM = 32


def write_private_file(path: Path, content: bytes) -> None:
    """Write ``content`` so that only the owner of the process can read it, durably and all or nothing.

    The file is made with mode 0600 from its first byte, flushed to the disk, and takes the place of an older
    one by renaming.

    Raises
    ------
    CertificateError
        The file cannot be written.
    """
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        _flush_folder(path.parent)
    except OSError as error:
        raise CertificateError(f"cannot write the key file {path}: {error.strerror}") from error


def read_private_file(path: Path) -> bytes:
    """Return the content of a secret file.

    Raises
    ------
    CertificateError
        The file cannot be read, or its mode lets others use it.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if mode & _OTHERS:
                raise CertificateError(
                    f"the key file {path} has mode {mode:04o}, expected 0600: others could have read it",
                    hint="make a new key, or `chmod 600` if nobody else uses this machine",
                )
            return file.read()
    except OSError as error:
        raise CertificateError(f"cannot read the key file {path}: {error.strerror}") from error


def write_marked_file(path: Path, mark: bytes, content: bytes) -> None:
    """Write a secret file that says what it is: a mark, the content, the SHA-256 of both.

    Raises
    ------
    CertificateError
        The file cannot be written.
    """
    body = mark + content
    write_private_file(path, body + hashlib.sha256(body).digest())


def read_marked_file(path: Path, mark: bytes, what: str) -> bytes:
    """Return the content of a file that ``write_marked_file`` wrote with this mark.

    Raises
    ------
    CertificateError
        The file cannot be read, its mode lets others use it, it holds something else, or it is damaged.
    """
    content = read_private_file(path)
    if not content.startswith(mark):
        raise CertificateError(f"{path} does not hold {what}")
    body, checksum = content[:-_CHECKSUM], content[-_CHECKSUM:]
    if len(body) < len(mark) or hashlib.sha256(body).digest() != checksum:
        raise CertificateError(
            f"{path} is damaged: its checksum does not match", hint="restore it from a backup"
        )
    return body[len(mark) :]


def write_checked_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a private file of JSON with a checksum of its other fields.

    Raises
    ------
    CertificateError
        The file cannot be written.
    """
    write_private_file(path, json.dumps({**content, _SUM: _sum_of(content)}).encode())


def read_checked_json(path: Path, what: str) -> dict[str, Any]:
    """Return the fields of a file that `write_checked_json` wrote; files of earlier releases have no checksum.

    Parameters
    ----------
    path : Path
    what : str
        What the file says, for the error.

    Raises
    ------
    CertificateError
        The file cannot be read, its mode lets others use it, or it is damaged.
    """
    try:
        content = json.loads(read_private_file(path))
        told = content.pop(_SUM, None)
    except (ValueError, AttributeError, TypeError):
        content, told = {}, ""
    if not isinstance(content, dict) or told not in (None, _sum_of(content)):
        raise CertificateError(
            f"{path} is damaged: it does not say {what}",
            hint="restore the state folder from a backup (`coterie restore`)",
        )
    return content


def _sum_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def destroy_private_file(path: Path) -> None:
    """Remove a secret file, durably; a file that is already gone is no error.

    Removing a name does not erase the blocks below it.  To withstand the theft of the *disk*, keep these
    files on an encrypted or memory-backed volume.

    Raises
    ------
    CertificateError
        The file cannot be removed.
    """
    try:
        path.unlink(missing_ok=True)
        _flush_folder(path.parent)
    except OSError as error:
        raise CertificateError(f"cannot remove the key file {path}: {error.strerror}") from error


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
