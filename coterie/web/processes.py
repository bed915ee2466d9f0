"""CPU and memory of processes on this machine, read from ``/proc``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["ProcessFigures"]


class ProcessFigures:
    """CPU share and memory of a launcher's processes; CPU is that since the last reading.

    Parameters
    ----------
    proc : Path
        The process file system; where a system has none, no process has figures.
    clock : callable
        Returns seconds that never run backwards.
    """

    def __init__(self, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> None:
        self._proc, self._clock = proc, clock
        self._before: dict[int, tuple[float, float]] = {}

    def read(self, processes: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
        """Return a row for each party: CPU share (1 is one core), memory in bytes, and whether its process runs."""
        rows, now, kept = [], self._clock(), {}
        for party, pid in processes:
            found = self._of(pid)
            if found is None:
                rows.append({"party": party, "alive": False, "cpu": None, "memory": None})
                continue
            seconds, memory = found
            at, before = self._before.get(pid, (now, seconds))
            share = max(0.0, seconds - before) / (now - at) if now > at else None
            kept[pid] = (now, seconds)
            rows.append(
                {
                    "party": party,
                    "alive": True,
                    "cpu": None if share is None else round(share, 3),
                    "memory": memory,
                }
            )
        self._before = kept
        return rows

    def _of(self, pid: int) -> tuple[float, int] | None:
        """Return CPU seconds and resident bytes of a process; None when it has ended or the system states neither."""
        try:
            # Behind the command's name, which is in brackets and may hold anything.
            fields = (self._proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
            if fields[0] in "ZX":
                return None
            ticks = int(fields[11]) + int(fields[12])
            return ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            return None
