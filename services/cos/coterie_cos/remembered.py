"""Collect a run's evaluations and sums for its report."""

from __future__ import annotations

from coterie.wire.v1 import operator_pb2 as operator

__all__ = ["Remembered"]


class Remembered:
    """A run's evaluations and sums, as its report lists them (docs/report.md).

    Attributes
    ----------
    history, rounds : list of dict
        In the order of the events.
    """

    def __init__(self) -> None:
        self.history: list[dict[str, object]] = []
        self.rounds: list[dict[str, object]] = []

    def take(self, event: operator.WatchRunResponse) -> None:
        """Add an event, if it is an evaluation or a sum."""
        if event.HasField("metrics"):
            metrics = event.metrics
            self.history.append(
                {
                    "epoch": metrics.epoch,
                    "version": metrics.version,
                    "time_ms": event.time_ms,
                    "owners": metrics.owners,
                    "withheld": metrics.withheld,
                    "metrics": dict(zip(metrics.names, metrics.means, strict=True)),
                    "users": dict(zip(metrics.names, metrics.users, strict=True)),
                }
            )
        elif event.HasField("round"):
            one = event.round
            self.rounds.append(
                {
                    "round": one.round,
                    "time_ms": event.time_ms,
                    "purpose": one.purpose,
                    "pass": one.pass_number,
                    "users": one.users,
                    "members": one.members,
                    "summed": one.summed,
                    "dropped": one.dropped,
                    "refused": one.refused,
                    "liars": one.liars,
                    "reason": one.reason,
                    "seconds": dict(zip(one.phases, one.seconds, strict=True)),
                    "bytes_in": one.bytes_in,
                    "version": one.version,
                    "silent_owners": list(one.silent_owners),
                    "dropped_places": one.dropped_places,
                    "left_out": one.left_out,
                    "withdrawn": list(one.withdrawn),
                }
            )
