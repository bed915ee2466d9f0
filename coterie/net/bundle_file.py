"""Countersigned bundles of a process that speaks for very many participants, read from their file one by one."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from google.protobuf.message import DecodeError

from coterie.crypto.identity import Bundle
from coterie.crypto.made_when_asked import MadeWhenAsked
from coterie.errors import CertificateError, CryptoError
from coterie.secure_sum.bundles import bundle_from_wire
from coterie.wire.refusal import Refusal
from coterie.wire.v1.common_pb2 import KeyBundle

__all__ = ["BundleFile"]

_BUNDLES_TAG = 0x0A
"""Tag of the field ``bundles`` of ``PublishBundlesRequest``: number 1, of a length."""


class BundleFile(MadeWhenAsked[Bundle]):
    """Bundles in a file, a serialised ``PublishBundlesRequest``; 8 bytes of each in memory.

    The file is kept open: one that takes its place is another file.

    Parameters
    ----------
    path : Path

    Raises
    ------
    CertificateError
        The file cannot be read, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                self._first = np.fromiter(_ends(file), np.int64)
                self._file = os.dup(file.fileno())
        except OSError as error:
            raise CertificateError(
                f"cannot read the key bundles {path}: {error.strerror}", hint="enrol first"
            ) from error
        except ValueError as error:
            raise self._damaged() from error
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return len(self._first) - 1

    def _make(self, first: int, last: int) -> Iterator[Bundle]:
        begin, end = int(self._first[first]), int(self._first[last])
        try:
            content = os.pread(self._file, end - begin, begin)
        except OSError as error:
            raise CertificateError(f"cannot read the key bundles {self._path}: {error.strerror}") from error
        for one in range(first, last):
            own = content[int(self._first[one]) - begin : int(self._first[one + 1]) - begin]
            try:
                # Behind the tag and the length, of one byte or two.
                _, at = _varint(own, 1)
                yield bundle_from_wire(KeyBundle.FromString(own[at:]))
            except (DecodeError, Refusal, CryptoError, ValueError) as error:
                raise self._damaged() from error

    def _damaged(self) -> CertificateError:
        return CertificateError(
            f"the key bundles {self._path} are damaged", hint="restore them from a backup"
        )


def _ends(file: BinaryIO) -> Iterator[int]:
    """Yield where the first bundle begins, and where each ends; raises ValueError where the file is none of bundles."""
    size, at = os.fstat(file.fileno()).st_size, 0
    yield at
    while at < size:
        head = file.read(6)
        if head[:1] != bytes([_BUNDLES_TAG]):
            raise ValueError("a field that is no bundle")
        length, begin = _varint(head, 1)
        at += begin + length
        if at > size:
            raise ValueError("a bundle that is cut")
        file.seek(at)
        yield at


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Return the number that stands at a place of serialised protobuf, and the place behind it."""
    value, shift = 0, 0
    while at < len(content) and shift < 35:
        value |= (content[at] & 0x7F) << shift
        if content[at] < 0x80:
            return value, at + 1
        at, shift = at + 1, shift + 7
    raise ValueError("a number that is cut")
