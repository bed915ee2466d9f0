"""The versions of a run's plan: which fields each has, and which version a party must speak to follow a plan.

The hash of a plan covers the fields that version 1 of the contract had, and of later fields those that differ from
their default (`coterie.rounds.plan_hash`).  So a plan that uses no later field has the hash that older parties
compute, and a later field that is used needs parties of the version that has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from coterie.wire.v1.orchestrator_pb2 import RunPlan
from coterie.wire.versions import NEWEST, OLDEST, UnsupportedVersionError

__all__ = ["LATER", "SUMS", "check_whole", "field_version", "later_fields", "plan_version", "unknown_fields"]

LATER: tuple[tuple[int, str], ...] = (
    (2, "oldest_protocol"),
    (2, "rounds.most_users"),
    (2, "rounds.channel_rounds"),
)
"""Fields of plans that came after version 1: the version, and the field's path from ``RunPlan``.

A new field of a plan is added here, at the end, with the version of the protocol that brings it.  Its default must mean
what parties did before there was the field.
"""


SUMS: tuple[tuple[int, str], ...] = ((2, "encrypted"), (2, "shared-key"))
"""Secure sums whose protocol changed after version 1: the version of the last change, and the sum's name.

Version 2 has pads in the place of tags in ciphertexts."""


def later_fields(plan: RunPlan) -> Iterator[tuple[int, str, object]]:
    """Yield the fields after version 1 that a plan uses, in the order of `LATER`: version, path and value."""
    for version, path in LATER:
        *outer, name = path.split(".")
        message: Message = plan
        for part in outer:
            message = getattr(message, part)
        value = getattr(message, name)
        if value != message.DESCRIPTOR.fields_by_name[name].default_value:
            yield version, path, value


def field_version(path: str) -> int:
    """Return the version of the protocol that brought a field of plans, one of `LATER`."""
    return next(version for version, name in LATER if name == path)


def plan_version(plan: RunPlan) -> int:
    """Return the lowest version of the protocol that a party must speak to follow a plan."""
    of_sum = [version for version, name in SUMS if name == plan.secure_sum]
    return max([OLDEST, plan.oldest_protocol, *of_sum, *(version for version, _, _ in later_fields(plan))])


def unknown_fields(message: Message, path: str = "plan") -> list[str]:
    """Return where a message has fields that this release does not know, such as ``"plan.rounds: field 20"``."""
    # The type stubs lack iteration.
    unknown: Iterable[Any] = cast("Iterable[Any]", UnknownFieldSet(message))
    found = [f"{path}: field {one.field_number}" for one in unknown]
    for field, value in message.ListFields():
        if field.message_type is not None:
            for one in [value] if isinstance(value, Message) else value:
                found += unknown_fields(one, f"{path}.{field.name}")
    return found


def check_whole(plan: RunPlan, sender: str, receiver: str) -> None:
    """Check that this release can follow a plan: it knows every field, and speaks the version that the plan asks for.

    Parameters
    ----------
    plan : RunPlan
    sender, receiver : str
        Who sent it, and who this is, for the message.

    Raises
    ------
    UnsupportedVersionError
        It cannot.
    """
    found = unknown_fields(plan)
    if found:
        raise UnsupportedVersionError(
            f"{sender} sent a plan with what this release does not know ({found[0]})",
            field="plan",
            expected=f"an upgrade of {receiver}, to the release of {sender}",
        )
    if plan_version(plan) > NEWEST:
        raise UnsupportedVersionError(
            f"the plan asks for version {plan_version(plan)} of the protocol, and {receiver} speaks version {NEWEST}",
            field="plan.oldest_protocol",
            expected=f"an upgrade of {receiver}",
        )
