"""What a process can be asked for at any time: numbers that are read when somebody looks, not kept up to date."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Measure", "memory_limit", "of_the_disk", "of_the_memory", "resident_bytes"]

_UNLIMITED = 1 << 60
"""What a control group without a limit says is larger."""


@dataclass(frozen=True)
class Measure:
    """A number, or one for each of a few labels, as Prometheus takes it.

    Parameters
    ----------
    name : str
        Beginning with ``coterie_`` and ending in its unit; ``_total`` is added to counters.
    help : str
        One sentence.
    read : callable
        Called from another thread whenever somebody asks.  None: there is nothing to say now.  With labels, numbers by
        the labels' values, which are never of a participant, a user or an item.
    labels : tuple of str
        Their names.
    counter : bool
        Whether it only grows.
    """

    name: str
    help: str
    read: Callable[[], float | Mapping[tuple[str, ...], float] | None]
    labels: tuple[str, ...] = ()
    counter: bool = False


def of_the_disk(folder: Path) -> list[Measure]:
    """Return what is left, and what there is, on the volume of a folder, bytes."""

    def size(blocks: str) -> float | None:
        try:
            found = os.statvfs(folder)
        except OSError:
            return None
        return float(getattr(found, blocks) * found.f_frsize)

    return [
        Measure(
            "coterie_disk_free_bytes", "Space left on the volume of the state.", lambda: size("f_bavail")
        ),
        Measure("coterie_disk_size_bytes", "Size of the volume of the state.", lambda: size("f_blocks")),
    ]


def of_the_memory() -> list[Measure]:
    """Return what the process takes, and the most that it and its container may, bytes."""
    return [
        Measure("coterie_resident_memory_bytes", "Memory of the process.", resident_bytes),
        Measure("coterie_memory_limit_bytes", "The most that its container may take.", memory_limit),
    ]


def resident_bytes(status: Path = Path("/proc/self/statm")) -> float | None:
    """Return the resident set of this process; None where the system does not say."""
    try:
        pages = int(status.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def memory_limit(groups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the limit of the control group, as a container sees its own; None where there is none."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = int((groups / name).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return float(limit) if limit < _UNLIMITED else None
    return None
