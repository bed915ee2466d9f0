"""The file of enrolment tokens that the operator appends to and the third party reads: JSON lines, hashes only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import structlog

from coterie.crypto.authority import TokenRecord
from coterie.errors import CertificateError

__all__ = ["TokenFile", "append_token"]

_log = structlog.get_logger("coterie.tokens")


def append_token(path: Path, record: TokenRecord) -> None:
    """Append a token's record durably; make the file with mode 0600 when absent.

    Raises
    ------
    CertificateError
        The file cannot be written.
    """
    line = json.dumps(
        {
            "token_sha256": record.token_hash.hex(),
            "role": record.role,
            "name": record.name,
            "expiry": record.expiry,
            "max_participants": record.max_participants,
        }
    )
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, f"{line}\n".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CertificateError(f"cannot add a token to {path}: {error.strerror}") from error


class TokenFile:
    """The records of a token file, read again whenever the file has changed.

    A token whose line is removed is no longer valid.  A missing file counts as empty.

    Parameters
    ----------
    path : Path
        The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_as: tuple[int, int, int] | None = None
        self._records: dict[bytes, TokenRecord] = {}

    def find(self, token_hash: bytes) -> TokenRecord | None:
        """Return the record of a token; None when there is none.

        Raises
        ------
        CertificateError
            The file cannot be read.
        """
        try:
            state = self._path.stat()
            version = (state.st_ino, state.st_size, state.st_mtime_ns)
            if version != self._read_as:
                self._records = _parse(self._path.read_text())
                self._read_as = version
        except FileNotFoundError:
            self._records, self._read_as = {}, None
        except (OSError, UnicodeDecodeError) as error:
            raise CertificateError(f"cannot read the tokens in {self._path}: {error}") from error
        return self._records.get(token_hash)


def _parse(text: str) -> dict[bytes, TokenRecord]:
    records = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = _record(json.loads(line))
        except (ValueError, KeyError, TypeError):
            # A bad line, perhaps still being written, leaves the other tokens valid.
            _log.error("not a token record", line=number)
            continue
        records[record.token_hash] = record
    return records


def _record(fields: dict[str, Any]) -> TokenRecord:
    return TokenRecord(
        token_hash=bytes.fromhex(fields["token_sha256"]),
        role=str(fields["role"]),
        name=str(fields["name"]),
        expiry=int(fields["expiry"]),
        max_participants=int(fields["max_participants"]),
    )
