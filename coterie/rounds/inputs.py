"""Inputs of a sum: what the server tells members beside the plan and the model, and contributions depend on.

The plan of a sum names each input with its hash.  A member computes the hashes from what it uses, and takes no part
under others.  A server that tells one member another catalogue than the rest has to show it another plan, too; members
under different plans have no masks and no tags in common, so no sum is formed over them.

A system's sides name the inputs of each purpose (`HostSide.inputs`, `ServerSide.inputs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coterie.rounds.plan_hash import plan_hash
from coterie.rounds.training import Purpose
from coterie.secure_sum.plan import SumInput, SumPlan
from coterie.secure_sum.protocol import Declined
from coterie.wire.v1.orchestrator_pb2 import RunPlan

__all__ = ["CATALOGUE", "OPEN_ITEMS", "check_inputs", "check_run", "inputs_of", "named_inputs"]

CATALOGUE = "catalogue"
"""Items in the order of the model: hash of their external keys (`coterie.rounds.plan_hash.keys_hash`)."""

OPEN_ITEMS = "open-items"
"""Items that each group may train: SHA-256 of the payload of ``Fetch(OPEN_ITEMS)``."""


def inputs_of(purpose: Purpose, *, opens: bool) -> tuple[str, ...]:
    """Return the inputs of a system whose contributions depend on the order of items.

    Parameters
    ----------
    purpose : Purpose
    opens : bool
        Whether the system trains only items that are open to a user's group.
    """
    return (CATALOGUE, OPEN_ITEMS) if opens and purpose is Purpose.TRAIN else (CATALOGUE,)


def named_inputs(names: Sequence[str], hashes: Mapping[str, bytes]) -> tuple[SumInput, ...]:
    """Return the inputs of a plan, by ascending name.

    Parameters
    ----------
    names : sequence of str
        Inputs of the sum's purpose, as the system's side names them.
    hashes : mapping of str to bytes
        SHA-256 of the present inputs; names that are not here are no input of this run, because the model holds them.
    """
    return tuple(SumInput(name, hashes[name]) for name in sorted(names) if name in hashes)


def check_inputs(plan: SumPlan, names: Sequence[str], hashes: Mapping[str, bytes]) -> None:
    """Check that a plan names exactly the inputs that a member uses, with the hashes that it computed.

    Raises
    ------
    Declined
        When an input is missing, is another one, or is not used by this member.
    """
    own, told = dict(named_inputs(names, hashes)), dict(plan.inputs)
    for name in sorted(own.keys() | told.keys()):
        if name not in told:
            raise Declined(f"the plan of the sum does not name its input {name!r}")
        if name not in own:
            raise Declined(
                f"the plan of the sum names an input {name!r}, on which nothing of this member depends"
            )
        if own[name] != told[name]:
            raise Declined(f"the input {name!r} that the server sent is not the one of the sum's plan")


def check_run(plan: SumPlan, run: RunPlan, run_sha256: bytes = b"") -> None:
    """Check that a sum is of a run, by the hash of the run's plan.

    Parameters
    ----------
    plan : SumPlan
    run : RunPlan
    run_sha256 : bytes, optional
        Its hash, where it is known.

    Raises
    ------
    Declined
        When the plan names another run or secure sum, or a run with another plan.
    """
    if (plan.run_id, plan.secure_sum) != (run.run_id, run.secure_sum):
        raise Declined(
            f"a sum {plan.secure_sum!r} of run {plan.run_id!r}; accepted was {run.secure_sum!r} of {run.run_id!r}"
        )
    if plan.run_plan_sha256 != (run_sha256 or plan_hash(run)):
        raise Declined("the sum is of a run with another plan than the one that was accepted")
