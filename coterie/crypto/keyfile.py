"""Files that hold secrets: mode 0600, replaced as a whole, refused when others can read them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from coterie.errors import CertificateError

__all__ = [
    "destroy_private_file",
    "read_marked_file",
    "read_private_file",
    "write_marked_file",
    "write_private_file",
]

_OTHERS = 0o077
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
