"""A party's check that an operator whom it accepts has signed the plan of the run that it joined."""

from __future__ import annotations

from coterie.crypto.operator_key import OperatorKeys
from coterie.crypto.verification import VerificationError
from coterie.parties.party import Party
from coterie.rounds.plan_hash import plan_hash

__all__ = ["objections_to_signature"]


def objections_to_signature(party: Party, operators: OperatorKeys) -> list[str]:
    """Return a party's objections to the signature of its run's plan; empty when it is an accepted operator's."""
    plan = party.plan
    try:
        operators.verify(plan.run_id, plan_hash(plan), party.plan_signature)
    except VerificationError as error:
        return [error.message]
    return []
