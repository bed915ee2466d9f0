"""A sequence whose elements are made or read when they are asked for, where all of them would take much memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeVar, overload

__all__ = ["MadeWhenAsked"]

T = TypeVar("T")

_TOGETHER = 1024
"""Most elements that are made together."""


class MadeWhenAsked(Sequence[T]):
    """Sequence that makes its elements when they are asked for; a subclass has a length, and makes some of them.

    It is equal to every sequence of the same elements.
    """

    __slots__ = ()

    @abstractmethod
    def _make(self, first: int, last: int) -> Iterator[T]:
        """Yield the elements from a position on, up to another, which is not included: at least one."""

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> list[T]: ...
    def __getitem__(self, at: int | slice) -> T | list[T]:
        if isinstance(at, slice):
            return [self[position] for position in range(*at.indices(len(self)))]
        position = range(len(self))[at]
        return next(self._make(position, position + 1))

    def __iter__(self) -> Iterator[T]:
        for first in range(0, len(self), _TOGETHER):
            yield from self._make(first, min(first + _TOGETHER, len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]
