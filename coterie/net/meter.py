"""What each RPC cost: calls, bytes, total time, the server's own time, and so the network's share."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np

__all__ = ["Meter", "RpcTotals", "Traffic", "merge"]

_KEPT_TIMES = 4096
"""Times kept per RPC for the percentiles: the most recent ones."""


class Traffic(TypedDict):
    """One RPC in a report; times in milliseconds, None where nothing was measured."""

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
    """Running totals of one RPC."""

    calls: int = 0
    errors: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    total_ms: list[float] = field(default_factory=list)
    server_ms: list[float] = field(default_factory=list)
    network_ms: float = 0.0
    """Time of all calls that came to their end, without what the server spent on them."""

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
    """Return the traffic of several processes together, by RPC.

    Parameters
    ----------
    accounts : iterable of dict
        As `Meter.account` returned them, in each process for itself.
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
    # A stub asks for the totals of every RPC that it could call.
    return {name: totals.summary() for name, totals in sorted(merged.items()) if totals.calls}


class Meter:
    """Totals by RPC, one side (client or server) of one process."""

    def __init__(self) -> None:
        self._by_rpc: dict[str, RpcTotals] = defaultdict(RpcTotals)

    def __getitem__(self, method: str) -> RpcTotals:
        """Totals of a full method name such as ``/coterie.v1.Orchestrator/Poll``."""
        return self._by_rpc[method.rsplit("/", 1)[-1]]

    def summary(self) -> dict[str, Traffic]:
        """Return all RPCs by short name."""
        return {name: totals.summary() for name, totals in sorted(self._by_rpc.items())}

    def account(self) -> dict[str, dict[str, Any]]:
        """Return all RPCs with their kept times, so that accounts of several processes can be merged."""
        return {name: dataclasses.asdict(totals) for name, totals in sorted(self._by_rpc.items())}

    @property
    def bytes_in(self) -> int:
        """Bytes received over all RPCs."""
        return sum(totals.bytes_in for totals in self._by_rpc.values())

    @property
    def bytes_out(self) -> int:
        """Bytes sent over all RPCs."""
        return sum(totals.bytes_out for totals in self._by_rpc.values())
