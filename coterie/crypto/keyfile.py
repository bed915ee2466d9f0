"""Files that hold secrets: mode 0600, replaced as a whole, refused when others can read them."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from coterie.errors import CertificateError

__all__ = [
    "MarkedContent",
    "destroy_private_file",
    "opened_private",
    "private_file_in_place_of",
    "read_marked_file",
    "read_private_file",
    "write_marked_file",
    "write_private_file",
]

_OTHERS = 0o077
_SUM = "sha256"
_CHECKSUM = 32
_AT_ONCE = 1 << 20
"""Bytes that are hashed at once."""


def write_private_file(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write ``content``, or its parts, so that only the process's owner can read it, durably and all or nothing.

    The file is made with mode 0600 from its first byte, flushed to the disk, and takes the place of an older
    one by renaming.

    Raises
    ------
    CertificateError
        The file cannot be written.
    """
    try:
        with private_file_in_place_of(path) as file:
            for part in [content] if isinstance(content, bytes) else content:
                file.write(part)
    except OSError as error:
        raise CertificateError(f"cannot write the key file {path}: {error.strerror}") from error


@contextmanager
def private_file_in_place_of(path: Path) -> Iterator[BinaryIO]:
    """Give a file of mode 0600 to write to, which takes the place of ``path`` at the end, durably.

    After an error it is gone, and ``path`` is as it was.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        # On a full disk, a partial file would take the space that is left.
        Path(temporary).unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def read_private_file(path: Path) -> bytes:
    """Return the content of a secret file.

    Raises
    ------
    CertificateError
        The file cannot be read, or its mode lets others use it.
    """
    with opened_private(path) as file:
        try:
            return file.read()
        except OSError as error:
            raise CertificateError(f"cannot read the key file {path}: {error.strerror}") from error


def opened_private(path: Path) -> BinaryIO:
    """Return a secret file, open for reading.

    Raises
    ------
    CertificateError
        The file cannot be read, or its mode lets others use it.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise CertificateError(f"cannot read the key file {path}: {error.strerror}") from error
    mode = os.fstat(file.fileno()).st_mode & 0o777
    if mode & _OTHERS:
        file.close()
        raise CertificateError(
            f"the key file {path} has mode {mode:04o}, expected 0600: others could have read it",
            hint="make a new key, or `chmod 600` if nobody else uses this machine",
        )
    return file


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


class MarkedContent:
    """Content of a file that ``write_marked_file`` wrote, of which parts are read when they are asked for.

    The file is read once to verify it, and kept open: one that takes its place is another file.

    Parameters
    ----------
    path : Path
    mark : bytes
    what : str
        What the file holds, for the error.

    Raises
    ------
    CertificateError
        As for `read_marked_file`.
    """

    __slots__ = ("__weakref__", "_file", "_path", "_size", "_start")

    def __init__(self, path: Path, mark: bytes, what: str) -> None:
        self._path, self._start = path, len(mark)
        with opened_private(path) as file:
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        whole = os.fstat(self._file).st_size - _CHECKSUM
        self._size = max(0, whole - len(mark))
        found = hashlib.sha256()
        for first in range(0, max(whole, 0), _AT_ONCE):
            found.update(self._read(first, min(_AT_ONCE, whole - first)))
        if self._read(0, len(mark)) != mark:
            raise CertificateError(f"{path} does not hold {what}")
        if whole < len(mark) or found.digest() != self._read(whole, _CHECKSUM):
            raise CertificateError(
                f"{path} is damaged: its checksum does not match", hint="restore it from a backup"
            )

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, at: slice) -> bytes:
        within = range(self._size)[at]
        found = self._read(self._start + within.start, len(within))
        if len(found) != len(within):
            raise CertificateError(f"{self._path} is damaged: it was cut", hint="restore it from a backup")
        return found

    def __repr__(self) -> str:
        return f"<content of {self._path.name}, {self._size} bytes>"

    def _read(self, offset: int, size: int) -> bytes:
        try:
            return os.pread(self._file, size, offset)
        except OSError as error:
            raise CertificateError(f"cannot read the key file {self._path}: {error.strerror}") from error


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
