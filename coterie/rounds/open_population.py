"""Rules of runs whose population is open: which plans may have one, for the file of a run, the server and hosts."""

from __future__ import annotations

from coterie.wire.v1.orchestrator_pb2 import CohortKind, RoundsPlan

__all__ = ["OPEN_SUMS", "objection_to_growth"]

OPEN_SUMS = ("clear", "masked")
"""Secure sums of runs that take in users who come later."""


def objection_to_growth(rounds: RoundsPlan, secure_sum: str) -> str:
    """Return why a run's plan cannot take in users who come after the run has begun; empty where it can.

    Parameters
    ----------
    rounds : RoundsPlan
        With ``most_users`` above 0.
    secure_sum : str
    """
    if secure_sum not in OPEN_SUMS:
        return f"under the sum {secure_sum!r} the population is fixed when a run begins; expected clear or masked"
    if rounds.HasField("privacy"):
        return (
            "with noise the population is fixed when a run begins: what a user's privacy costs depends on it"
        )
    if rounds.redraw:
        return f"groups are drawn anew after {rounds.redraw} passes, and users who come later form groups of their own"
    if rounds.experiment or rounds.beacon:
        return "the third party signs users who come later, and does not in an experiment"
    if rounds.cohorts not in (CohortKind.COHORT_KIND_GROUPS, CohortKind.COHORT_KIND_ALL):
        return "users who come later join whole groups; expected cohorts of groups, or all"
    return ""
