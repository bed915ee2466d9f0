"""Define the rows that benchmarks report, and helpers that time two implementations against each other."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bench.targets import processor_class
from coterie import kernels

T = TypeVar("T")


@dataclass(frozen=True)
class Ask:
    """The options of a suite.

    Parameters
    ----------
    data : Path, optional
        The data set to measure on; synthetic data when absent.
    smallest : bool
        Whether each case is measured once, at its smallest size: the figures then mean nothing.
    """

    data: Path | None = None
    smallest: bool = False

    def size(self, usual: T, smallest: T) -> T:
        """Return the usual or the smallest size, as asked."""
        return smallest if self.smallest else usual


@dataclass(frozen=True)
class Row:
    """One measured quantity, ours against theirs; a ratio above 1 means that ours is better."""

    name: str
    ours: float
    theirs: float | None
    unit: str
    ratio: float | None
    note: str = ""


def higher(name: str, ours: float, theirs: float | None, unit: str, note: str = "") -> Row:
    """Return a row for a quantity of which more is better."""
    return Row(name, ours, theirs, unit, ours / theirs if theirs else None, note)


def lower(name: str, ours: float, theirs: float | None, unit: str, note: str = "") -> Row:
    """Return a row for a quantity of which less is better."""
    return Row(name, ours, theirs, unit, theirs / ours if theirs and ours else None, note)


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of one call."""
    before = time.process_time()
    work()
    return time.process_time() - before


def in_turn(ours: Callable[[], object], theirs: Callable[[], object], rounds: int = 5) -> tuple[float, float]:
    """Return the median CPU seconds of two calls, measured alternately."""
    ours(), theirs()
    pairs = [(cpu_seconds(ours), cpu_seconds(theirs)) for _ in range(rounds)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def machine() -> dict[str, object]:
    """Describe the machine, without its name."""
    model, flags = platform.processor() or platform.machine(), frozenset[str]()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = (line.partition(":") for line in info.read_text().splitlines())
        told = {name.strip(): value.strip() for name, _, value in lines}
        model = told.get("model name", model)
        flags = frozenset((told.get("flags") or told.get("Features") or "").split())
    return {
        "processor": model,
        "class": processor_class(flags, platform.machine()),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "kernels": kernels.state(),
    }
