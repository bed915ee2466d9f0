"""Chunking of payloads longer than a message: cut into chunks of 1 MiB, reassembled, checked by their SHA-256."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1.common_pb2 import Chunk

__all__ = ["CHUNK_BYTES", "Assembler", "fill", "offsets", "split"]

CHUNK_BYTES = 1 << 20
"""Length of all chunks but the last, in bytes; well below gRPC's message limit of 4 MiB, which stays as it is."""


def offsets(payload: bytes) -> range:
    """Return where the chunks of a payload begin; an empty payload is one empty chunk."""
    return range(0, max(len(payload), 1), CHUNK_BYTES)


def fill(chunk: Chunk, payload: bytes, offset: int) -> None:
    """Set an empty chunk to the one that begins at an offset; in place, because to copy a message copies its bytes."""
    end = offset + CHUNK_BYTES
    chunk.offset, chunk.data, chunk.last = offset, payload[offset:end], end >= len(payload)


def split(payload: bytes) -> Iterator[Chunk]:
    """Cut a payload into chunks."""
    for offset in offsets(payload):
        chunk = Chunk()
        fill(chunk, payload, offset)
        yield chunk


class Assembler:
    """Collects the chunks of one payload.

    Parameters
    ----------
    limit : int
        Largest payload accepted, bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pieces: list[bytes] = []
        self._length = 0
        self.complete = False

    def add(self, chunk: Chunk) -> None:
        """Add the next chunk.

        Raises
        ------
        Refusal
            TRUNCATED for a chunk out of order or after the last; TOO_LARGE beyond the limit.
        """
        if self.complete or chunk.offset != self._length:
            raise Refusal(
                ErrorReason.ERROR_REASON_TRUNCATED,
                f"a chunk at offset {chunk.offset} does not continue the payload",
                field="chunk.offset",
                expected="no further chunk" if self.complete else str(self._length),
            )
        data = chunk.data
        if self._length + len(data) > self._limit:
            raise Refusal(
                ErrorReason.ERROR_REASON_TOO_LARGE,
                "the payload is longer than this service takes",
                field="chunk.data",
                expected=f"at most {self._limit} bytes",
            )
        self._pieces.append(data)
        self._length += len(data)
        self.complete = chunk.last

    def payload(self, sha256: bytes, *, optional: bool = False) -> bytes:
        """Return the whole payload.

        Parameters
        ----------
        sha256 : bytes
            Digest that it must have.
        optional : bool
            Whether the digest of a payload of one chunk may be empty: a message arrives whole or not at all.

        Raises
        ------
        Refusal
            TRUNCATED when the last chunk is missing; HASH_MISMATCH for other bytes than declared.
        """
        if not self.complete:
            raise Refusal(
                ErrorReason.ERROR_REASON_TRUNCATED,
                "the stream ended before the last chunk",
                field="chunk.last",
                expected="a chunk marked as the last",
            )
        # Joining a single piece does not copy it.
        data = b"".join(self._pieces)
        if optional and not sha256 and len(self._pieces) == 1:
            return data
        if hashlib.sha256(data).digest() != sha256:
            raise Refusal(
                ErrorReason.ERROR_REASON_HASH_MISMATCH,
                "the payload does not have the declared SHA-256",
                field="sha256",
                expected="the digest of the payload",
            )
        return data
