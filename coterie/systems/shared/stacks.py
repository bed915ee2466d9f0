"""Batches of users for tensor programs: users whose items are padded to the same number.

How far a user is padded depends on the user alone, and every product is one of a user's own matrices, so a user's
numbers have the same bits on the same kind of machine whichever users share its batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["padded", "stacks"]

_VALUES = 1 << 17
"""Most float64 values that a stack of users holds: 1 MB, which stays in a core's cache."""


def padded(n: int) -> int:
    """Return ``n`` rounded up to four significant bits, at least 8: padding costs at most an eighth."""
    grain = max(8, 1 << max(n.bit_length() - 4, 0))
    return max(-(-n // grain), 1) * grain


def stacks(sizes: Sequence[int], each: int, beside: int = 0) -> Iterator[list[int]]:
    """Yield the positions of users that go through a batched program together.

    Parameters
    ----------
    sizes : sequence of int
        Items of each user.
    each : int
        Values that the program holds for an item of a user.
    beside : int
        Further values that the program holds for a user.

    Yields
    ------
    list of int
        Users that are padded to the same number; every user is in one list.
    """
    waiting: dict[int, list[int]] = {}
    for position, size in enumerate(sizes):
        width = padded(size)
        group = waiting.setdefault(width, [])
        group.append(position)
        if len(group) >= max(1, _VALUES // (width * each + beside)):
            yield waiting.pop(width)
    yield from (waiting[width] for width in sorted(waiting))
