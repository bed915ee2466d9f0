"""A series of points whose number stays bounded however long it grows."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Thinned"]


class Thinned:
    """Points over time, of which every second one is dropped whenever there are too many; the last one always stays.

    Points in between are dropped by position: the whole time stays covered, at a spacing that doubles.

    >>> series = Thinned(4)
    >>> for value in range(9):
    ...     series.add([value])
    >>> series.points
    [[0], [4], [8]]

    Parameters
    ----------
    most : int
        Most points that are kept, at least 2.
    """

    def __init__(self, most: int) -> None:
        self._most = max(2, most)
        self._kept: list[Sequence[float]] = []
        self._every, self._seen = 1, 0
        self._last: Sequence[float] | None = None

    def add(self, point: Sequence[float]) -> None:
        """Add a point."""
        self._last = point
        if self._seen % self._every == 0:
            self._kept.append(point)
            self._last = None
            if len(self._kept) >= self._most:
                self._kept = self._kept[::2]
                self._every *= 2
                if self._seen % self._every:
                    self._last = point
        self._seen += 1

    @property
    def points(self) -> list[Sequence[float]]:
        """The points that are kept, then the last one."""
        return [*self._kept, *([] if self._last is None else [self._last])]
