"""Byte layouts of a user's visit to a data owner and of the owner's reply (DRIFT, shielded form).

A visit follows the records of a sealed batch, little-endian: number of the visit (8 bytes), epoch (4), 1 where the
user has nothing more to send now, so that its trailing block counts as complete (1), the user's row (d float32).
A reply: number of the visit (8), blocks that it ran (4), blocks that the owner has of the user (4), sum of their losses
(float64), the step of the user's row (d float32).  Visits of one user to one owner are numbered from 1.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.wire.refusal import ErrorReason, Refusal

__all__ = ["Reply", "Visit"]

_VISIT = struct.Struct("<QIB")
_REPLY = struct.Struct("<QIId")


@dataclass(frozen=True, eq=False)
class Visit:
    """A user's message to a data owner, sent with its records.

    Parameters
    ----------
    number, epoch : int
        From 1.
    complete : bool
        Whether the trailing block counts as complete.
    row : ndarray of float32, shape (d,)
    """

    number: int
    epoch: int
    complete: bool
    row: NDArray[np.float32]

    def to_bytes(self) -> bytes:
        """Return the visit as bytes."""
        head = _VISIT.pack(self.number, self.epoch, self.complete)
        return head + self.row.astype("<f4", copy=False).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, dim: int) -> Visit:
        """Parse a visit.

        Raises
        ------
        Refusal
            WRONG_SHAPE, INVALID_FIELD or NOT_FINITE.
        """
        row = _row(data, _VISIT.size, dim, field="visit.row")
        number, epoch, complete = _VISIT.unpack_from(data)
        if not (number >= 1 and epoch >= 1 and complete <= 1):
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "the number, the epoch or the flag of a visit is out of its range",
                field="visit",
                expected="number and epoch from 1, a flag of 0 or 1",
            )
        return cls(number, epoch, bool(complete), row)


@dataclass(frozen=True, eq=False)
class Reply:
    """A data owner's answer to a visit: what it ran and how the user's row moved.

    Parameters
    ----------
    number : int
        Number of the visit.
    blocks, held : int
        Blocks that it ran; blocks that the owner has of the user.
    loss : float
        Sum over the blocks that it ran.
    step : ndarray of float32, shape (d,)
        To be added to the user's row.
    """

    number: int
    blocks: int
    held: int
    loss: float
    step: NDArray[np.float32]

    def to_bytes(self) -> bytes:
        """Return the reply as bytes."""
        head = _REPLY.pack(self.number, self.blocks, self.held, self.loss)
        return head + self.step.astype("<f4", copy=False).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, dim: int) -> Reply:
        """Parse a reply.

        Raises
        ------
        Refusal
            WRONG_SHAPE or NOT_FINITE.
        """
        step = _row(data, _REPLY.size, dim, field="reply.step")
        number, blocks, held, loss = _REPLY.unpack_from(data)
        if not np.isfinite(loss):
            raise _not_finite("reply.loss")
        return cls(number, blocks, held, loss, step)


def _row(data: bytes, head: int, dim: int, *, field: str) -> NDArray[np.float32]:
    if len(data) != head + 4 * dim:
        raise Refusal(
            ErrorReason.ERROR_REASON_WRONG_SHAPE,
            f"{len(data)} bytes",
            field=field,
            expected=f"{head + 4 * dim} bytes: {dim} values behind a head of {head}",
        )
    row = np.frombuffer(data, "<f4", offset=head).astype(np.float32)
    if not np.isfinite(row).all():
        raise _not_finite(field)
    return row


def _not_finite(field: str) -> Refusal:
    return Refusal(
        ErrorReason.ERROR_REASON_NOT_FINITE,
        "a value is NaN or infinite",
        field=field,
        expected="finite values",
    )
