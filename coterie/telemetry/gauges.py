"""Measures of a process that are read when metrics are requested: disk, memory and a service's own numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PrometheusMetric", "memory_limit", "of_the_disk", "of_the_memory", "resident_bytes"]

_UNLIMITED = 1 << 60
"""Bound on real memory limits, bytes: an unlimited control group (version 1) states a larger number."""


@dataclass(frozen=True)
class PrometheusMetric:
    """A Prometheus metric: one number, or one for each combination of a few labels' values.

    Parameters
    ----------
    name : str
        Name of the metric, with the prefix ``coterie_`` and its unit at the end; ``_total`` is added to counters.
    help : str
        Description in one sentence.
    read : callable
        Returns the number, or with labels the numbers by the labels' values, which never name a participant, a user
        or an item; None when there is nothing to report now.  Called from another thread at each request.
    labels : tuple of str
        Names of the labels.
    counter : bool
        Whether the number only grows.
    """

    name: str
    help: str
    read: Callable[[], float | Mapping[tuple[str, ...], float] | None]
    labels: tuple[str, ...] = ()
    counter: bool = False


def of_the_disk(folder: Path) -> list[PrometheusMetric]:
    """Return measures of free space and size of a folder's volume, bytes."""

    def size(blocks: str) -> float | None:
        try:
            found = os.statvfs(folder)
        except OSError:
            return None
        return float(getattr(found, blocks) * found.f_frsize)

    return [
        PrometheusMetric(
            "coterie_disk_free_bytes", "Space left on the volume of the state.", lambda: size("f_bavail")
        ),
        PrometheusMetric(
            "coterie_disk_size_bytes", "Size of the volume of the state.", lambda: size("f_blocks")
        ),
    ]


def of_the_memory() -> list[PrometheusMetric]:
    """Return measures of the process's memory and of its container's limit, bytes."""
    return [
        PrometheusMetric("coterie_resident_memory_bytes", "Memory of the process.", resident_bytes),
        PrometheusMetric("coterie_memory_limit_bytes", "The most that its container may take.", memory_limit),
    ]


def resident_bytes(status: Path = Path("/proc/self/statm")) -> float | None:
    """Return the resident set of this process, bytes; None where the system does not state it."""
    try:
        pages = int(status.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def memory_limit(groups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the memory limit of the container's control group, bytes; None without a limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = int((groups / name).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return float(limit) if limit < _UNLIMITED else None
    return None
