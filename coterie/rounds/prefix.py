"""A sequence that grows at its end, and shares what it has with what it was before."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

__all__ = ["Prefix"]

T = TypeVar("T")


class Prefix(Sequence[T]):
    """The first items of a list or an array that may be appended to: what it holds never changes.

    A longer one is made at the cost of what is added, while the shorter one stays as it is.

    Parameters
    ----------
    kept : list or array
        Its items, which belong to this instance and those made from it.
    length : int, optional
        How many of the items there are.  Default: all.
    """

    __slots__ = ("_kept", "_length")

    def __init__(self, kept: list[T] | array[Any], length: int | None = None) -> None:
        self._kept = kept
        self._length = len(kept) if length is None else length

    def extended(self, more: Iterable[T]) -> Prefix[T]:
        """Return a sequence with more items at its end; those before are copied only if another was made from here."""
        kept = self._kept if len(self._kept) == self._length else self._kept[: self._length]
        kept.extend(more)
        return Prefix(kept)

    def first(self, count: int) -> Prefix[T]:
        """Return the sequence of the first items, without a copy."""
        return Prefix(self._kept, min(count, self._length))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> list[T]: ...
    def __getitem__(self, at: int | slice) -> T | list[T]:
        if isinstance(at, slice):
            first, last, every = at.indices(self._length)
            return (
                list(self._kept[first:last:every])
                if every > 0
                else [self[n] for n in range(first, last, every)]
            )
        if 0 <= at < self._length:
            found: T = self._kept[at]
            return found
        return self[range(self._length)[at]]

    def __iter__(self) -> Iterator[T]:
        return islice(self._kept, self._length)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self._kept[: self._length], dtype)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        if isinstance(other, Prefix) and other._kept is self._kept:
            return other._length == self._length
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Prefix({self[:]!r})"
