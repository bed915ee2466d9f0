"""What the C library does with memory that is free again."""

from __future__ import annotations

import ctypes

__all__ = ["return_freed_memory"]

# Of <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_SETTINGS = (
    # A message is received by one thread, taken apart by a second and written by a third.  Each would have a heap of
    # its own that keeps room for what passed through once.
    (_M_ARENA_MAX, 2),
    # Otherwise both limits rise with the largest block that was ever free, up to 64 and 32 MiB.
    (_M_TRIM_THRESHOLD, 128 << 10),
    (_M_MMAP_THRESHOLD, 1 << 20),
)


def return_freed_memory() -> bool:
    """Have the C library return most of what is freed to the system: there are few heaps, and they shrink again.

    Large cohorts come as bursts of messages of some ten kilobytes; by its usual settings, glibc keeps several times as
    much as there ever is at once.

    Returns
    -------
    bool
        Whether it has these settings: glibc does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(name, value) for name, value in _SETTINGS)
