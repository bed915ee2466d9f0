"""The features that a plan asks of its parties, and the check of a party that registers against its run's plan."""

from __future__ import annotations

from typing import Literal

from coterie.rounds.plan_versions import plan_version
from coterie.secure_sum.registry import SUMS
from coterie.wire.v1.common_pb2 import Protocol
from coterie.wire.v1.orchestrator_pb2 import RunPlan
from coterie.wire.versions import UnsupportedVersionError, agree

__all__ = ["FEATURES", "check_party", "needed_features"]

_PARTS: tuple[Literal["aggregation", "privacy", "server_optimiser"], ...] = (
    "aggregation",
    "privacy",
    "server_optimiser",
)
"""Messages of ``RunPlan.rounds`` that a plan may lack."""

FEATURES = frozenset({*(f"sum/{name}" for name in SUMS), *(f"plan/{name}" for name in _PARTS)})
"""What a party of this release can do of what a plan may ask for, by name."""

_OF_VERSION_1 = frozenset(
    {
        *(f"sum/{name}" for name in ("clear", "denoised", "encrypted", "masked", "shared-key")),
        *(f"plan/{name}" for name in ("aggregation", "privacy", "server_optimiser")),
    }
)
"""Features of a party that names none: what the last release without them has."""


def needed_features(plan: RunPlan) -> frozenset[str]:
    """Return the names of the features that a plan asks of its parties."""
    return frozenset(
        {f"sum/{plan.secure_sum}", *(f"plan/{name}" for name in _PARTS if plan.rounds.HasField(name))}
    )


def check_party(peer: str, said: Protocol, plan: RunPlan) -> int:
    """Return the version that a server and a party of a run speak with each other.

    Parameters
    ----------
    peer : str
        Role and name of the party.
    said : Protocol
        What the party said of itself; an empty message when it said nothing.
    plan : RunPlan

    Raises
    ------
    UnsupportedVersionError
        They have no version in common, or the party lacks what the plan asks for.
    """
    agreed = agree(peer, said, lowest=plan_version(plan))
    lacking = sorted(needed_features(plan) - (frozenset(said.features) if said.newest else _OF_VERSION_1))
    if lacking:
        raise UnsupportedVersionError(
            f"the plan of run {plan.run_id} asks for {', '.join(lacking)}, which {peer} does not have",
            field="protocol.features",
            expected=f"an upgrade of {peer}",
        )
    return agreed
