"""Arrays on the wire: little-endian raw bytes with a declared shape and element type, checked on arrival."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1.common_pb2 import DType, Tensor

__all__ = ["from_wire", "increasing_ids", "to_wire"]

_DTYPES: dict[DType.ValueType, np.dtype[Any]] = {
    DType.DTYPE_FLOAT32: np.dtype("<f4"),
    DType.DTYPE_FLOAT64: np.dtype("<f8"),
    DType.DTYPE_UINT32: np.dtype("<u4"),
    DType.DTYPE_UINT8: np.dtype("u1"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
# By the type as callers name it: making one takes longer than the checks of a small array.
_LITTLE: dict[Any, np.dtype[Any]] = {dtype.type: dtype for dtype in _CODES}


def to_wire(array: npt.NDArray[Any]) -> Tensor:
    """Encode an array.

    Parameters
    ----------
    array : ndarray
        float32, float64, uint32 or uint8, any shape.

    Raises
    ------
    TypeError
        If the element type has no wire form: a programming error, never a matter of input.
    """
    code = _CODES.get(array.dtype)
    if code is None:
        little = array.dtype.newbyteorder("<")
        if little not in _CODES:
            raise TypeError(f"no wire form for {array.dtype}; convert to one of {[str(d) for d in _CODES]}")
        code, array = _CODES[little], array.astype(little)
    # In C order, whatever the order of the array.
    return Tensor(dtype=code, shape=array.shape, data=array.tobytes())


def from_wire(
    tensor: Tensor, dtype: npt.DTypeLike, shape: tuple[int | None, ...], *, field: str
) -> npt.NDArray[Any]:
    """Decode and check an array.

    Parameters
    ----------
    tensor : Tensor
        As received.
    dtype : dtype
        Element type that the field must have.
    shape : tuple of (int or None)
        Length that each axis must have; None takes any length.
    field : str
        Name of the field, for the refusal.

    Returns
    -------
    ndarray
        Read-only view of the message's bytes.

    Raises
    ------
    Refusal
        WRONG_SHAPE for another type, rank, length or number of bytes; NOT_FINITE for NaN or infinite values.
    """
    wanted = _LITTLE.get(dtype) or np.dtype(dtype).newbyteorder("<")
    held = _DTYPES.get(tensor.dtype)
    lengths = tuple(tensor.shape)
    data = tensor.data
    fits = (
        held == wanted
        and len(lengths) == len(shape)
        and min(lengths, default=0) >= 0
        and (lengths == shape or all(want in (None, n) for n, want in zip(lengths, shape, strict=True)))
        and len(data) == wanted.itemsize * math.prod(lengths)
    )
    if not fits:
        name = held.name if held is not None else "no type"
        raise Refusal(
            ErrorReason.ERROR_REASON_WRONG_SHAPE,
            f"{field} is {name} {lengths} in {len(data)} bytes",
            field=field,
            expected=f"{wanted.name} {tuple('any' if n is None else n for n in shape)}",
        )
    array = np.frombuffer(data, dtype=wanted).reshape(lengths)
    # For the few values of a row, `count_nonzero` takes half the time of `all` and of `any`.
    if wanted.kind == "f" and np.count_nonzero(np.isfinite(array)) < array.size:
        raise Refusal(
            ErrorReason.ERROR_REASON_NOT_FINITE,
            f"{field} holds NaN or infinite values",
            field=field,
            expected="finite numbers",
        )
    return array


def increasing_ids(
    tensor: Tensor,
    limit: int,
    *,
    field: str,
    unknown: ErrorReason.ValueType = ErrorReason.ERROR_REASON_INVALID_FIELD,
) -> npt.NDArray[np.uint32]:
    """Decode ids that must be strictly increasing and below a limit.

    Parameters
    ----------
    tensor : Tensor
        As received.
    limit : int
        One above the largest id there is.
    field : str
        Name of the field, for the refusal.
    unknown : ErrorReason
        Reason for an id that reaches ``limit``.

    Returns
    -------
    ndarray of uint32, shape (n,)

    Raises
    ------
    Refusal
        WRONG_SHAPE; INVALID_FIELD when ids repeat or fall; ``unknown`` when one reaches ``limit``.
    """
    ids = from_wire(tensor, np.uint32, (None,), field=field)
    if not ids.size:
        return ids
    if np.count_nonzero(ids[1:] <= ids[:-1]):
        raise Refusal(
            ErrorReason.ERROR_REASON_INVALID_FIELD,
            f"{field} is not strictly increasing",
            field=field,
            expected=f"strictly increasing ids below {limit}",
        )
    if int(ids[-1]) >= limit:
        raise Refusal(
            unknown, f"{field} names an id that does not exist", field=field, expected=f"ids below {limit}"
        )
    return ids
