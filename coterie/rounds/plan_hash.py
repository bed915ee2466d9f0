"""The hash of a run's plan, which parties compute and compare with the one that the COS announces."""

from __future__ import annotations

import hashlib
import struct

from coterie.crypto.explicit import encode
from coterie.wire.v1.orchestrator_pb2 import RoundsPlan, RunPlan

__all__ = ["plan_hash"]


def plan_hash(plan: RunPlan) -> bytes:
    """Return the SHA-256 of a plan's explicit encoding: label ``plan``, then every field in the contract's order.

    The fields of ``rounds`` come last, one after the other.

    Numbers with a fraction are their IEEE 754 single precision bytes, big-endian; truth values are 0 or 1.
    """
    return hashlib.sha256(
        encode(
            "plan",
            plan.run_id,
            plan.system,
            plan.form,
            plan.secure_sum,
            plan.dim,
            struct.pack(">f", plan.rate),
            struct.pack(">f", plan.ridge),
            plan.theta,
            int(plan.item_bias),
            plan.seed,
            plan.max_staleness,
            plan.epochs,
            plan.min_users,
            plan.settings,
            *_rounds(plan.rounds),
        )
    ).digest()


def _rounds(rounds: RoundsPlan) -> tuple[bytes | str | int, ...]:
    return (
        rounds.cohorts,
        rounds.cohort,
        rounds.group,
        rounds.beacon,
        int(rounds.party_per_user),
        rounds.min_cohort,
        rounds.min_sum,
        int(rounds.experiment),
        rounds.passes,
        rounds.evaluate_every,
        rounds.patience,
        rounds.choose_by,
        rounds.step_timeout_ms,
        rounds.redraw,
        rounds.beacon_signature,
        int(rounds.sparse),
    )
