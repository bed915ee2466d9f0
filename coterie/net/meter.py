"""Counters of each RPC of a process: calls, bytes, total time, and how much of it the server and the network took."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np

__all__ = ["Meter", "RpcTotals", "Traffic", "merge"]

_KEPT_TIMES = 4096
"""Most recent call times that are kept per RPC, for the percentiles."""


class Traffic(TypedDict):
    """The traffic of one RPC as reports show it; times in milliseconds, None where nothing was measured."""

    calls: int
    errors: int
    bytes_out: int
    bytes_in: int
    p50_ms: float | None
    p99_ms: float | None
    server_p50_ms: float | None
    network_p50_ms: float | None
    network_s: float


@dataclass
class RpcTotals:
    """Running totals of one RPC, on one side of one process."""

    calls: int = 0
    errors: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    total_ms: list[float] = field(default_factory=list)
    server_ms: list[float] = field(default_factory=list)
    network_ms: float = 0.0
    """Total time of all calls that succeeded, less the server's own time, milliseconds."""

    def finished(self, *, total_ms: float, server_ms: float | None, failed: bool) -> None:
        """Count one finished call."""
        position = self.calls % _KEPT_TIMES
        self.calls += 1
        self.errors += failed
        if server_ms is not None and not failed:
            self.network_ms += max(0.0, total_ms - server_ms)
        times = (total_ms, float("nan") if server_ms is None else server_ms)
        for series, value in zip((self.total_ms, self.server_ms), times, strict=True):
            if len(series) <= position:
                series.append(value)
            else:
                series[position] = value

    def summary(self) -> Traffic:
        """Return the totals with percentiles of the kept times."""
        total = np.asarray(self.total_ms)
        server = np.asarray(self.server_ms)
        known = ~np.isnan(server)
        return Traffic(
            calls=self.calls,
            errors=self.errors,
            bytes_out=self.bytes_out,
            bytes_in=self.bytes_in,
            p50_ms=_percentile(total, 50),
            p99_ms=_percentile(total, 99),
            server_p50_ms=_percentile(server[known], 50),
            network_p50_ms=_percentile((total - server)[known], 50),
            network_s=round(self.network_ms / 1e3, 3),
        )


def _percentile(times: np.ndarray, q: float) -> float | None:
    return round(float(np.percentile(times, q)), 3) if times.size else None


def merge(accounts: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, Traffic]:
    """Return the traffic of several processes added up, by RPC.

    Parameters
    ----------
    accounts : iterable of dict
        One for each process, as `Meter.account` returns it.
    """
    merged: dict[str, RpcTotals] = defaultdict(RpcTotals)
    for account in accounts:
        for name, entry in account.items():
            totals = merged[name]
            totals.calls += entry["calls"]
            totals.errors += entry["errors"]
            totals.bytes_out += entry["bytes_out"]
            totals.bytes_in += entry["bytes_in"]
            totals.network_ms += entry["network_ms"]
            totals.total_ms += entry["total_ms"]
            totals.server_ms += entry["server_ms"]
    # A stub makes an entry for every RPC that it could call, also for those without a call.
    return {name: totals.summary() for name, totals in sorted(merged.items()) if totals.calls}


class Meter:
    """Totals of every RPC on one side (client or server) of one process."""

    def __init__(self) -> None:
        self._by_rpc: dict[str, RpcTotals] = defaultdict(RpcTotals)

    def __getitem__(self, method: str) -> RpcTotals:
        """Return the totals of a full method name such as ``/coterie.v1.Orchestrator/Poll``."""
        return self._by_rpc[method.rsplit("/", 1)[-1]]

    def summary(self) -> dict[str, Traffic]:
        """Return the traffic of all RPCs by short name."""
        return {name: totals.summary() for name, totals in sorted(self._by_rpc.items())}

    def account(self) -> dict[str, dict[str, Any]]:
        """Return the totals of all RPCs with their kept times, from which `merge` adds up several processes."""
        return {name: dataclasses.asdict(totals) for name, totals in sorted(self._by_rpc.items())}

    @property
    def bytes_in(self) -> int:
        """Bytes received over all RPCs."""
        return sum(totals.bytes_in for totals in self._by_rpc.values())

    @property
    def bytes_out(self) -> int:
        """Bytes sent over all RPCs."""
        return sum(totals.bytes_out for totals in self._by_rpc.values())
