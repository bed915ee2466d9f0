"""Set the C library's allocator to return freed memory to the system."""

from __future__ import annotations

import ctypes

__all__ = ["return_freed_memory"]

# Constants of <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_SETTINGS = (
    # A message is received by one thread, parsed by a second and written by a third.  Each would have a heap of its own
    # that stays as large as it ever was.
    (_M_ARENA_MAX, 2),
    # Unless set, both thresholds rise with the largest block that was ever freed, up to 64 and 32 MiB.  What is kept at
    # the end of a heap is enough for one message of several contributions with all copies that are made of it: returned
    # after each message, its pages cost twenty times as much as writing it.
    (_M_TRIM_THRESHOLD, 4 << 20),
    (_M_MMAP_THRESHOLD, 1 << 20),
)


def return_freed_memory() -> bool:
    """Make the C library return most freed memory to the system: few heaps, which shrink again.

    Large cohorts send bursts of messages of some ten kilobytes; by default, glibc keeps several times the memory that
    is ever in use at once.

    Returns
    -------
    bool
        Whether the C library has these settings: glibc does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(name, value) for name, value in _SETTINGS)
