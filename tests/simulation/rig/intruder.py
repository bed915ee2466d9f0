"""Forge messages that must be refused, and briefings of a cheating server."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.rounds.server_round import Arrived, RoundState, SumPhase
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.protocol import Step
from coterie.wire.v1 import rounds_pb2 as wire
from tests.simulation.rig.faults import Fault

__all__ = ["Submission", "false", "forged", "intrusion"]


_SIGNED = (Step.ADVERTISE, Step.SUBMIT, Step.CONFIRM)
"""Steps of a masked sum whose messages are signed over the plan, and so over the round's number."""

_NUMBER_BYTES = 128
"""Number of bytes of half a ciphertext under the schedules' key."""


@dataclass(frozen=True)
class Submission:
    """A member's message for a step of a round, on its way to the server."""

    round: int
    member: int
    step: Step
    message: bytes


def intrusion(
    fault: Fault, state: RoundState, last: Submission, old: Submission | None, layout: Layout, now: float
) -> Arrived | None:
    """Forge a message that must be refused from one that has just arrived; None where the fault does not apply."""
    is_open = state.phase is SumPhase.COLLECT
    held = state.arrived if is_open and state.step is last.step else state.closed.get(last.step, {})
    free = list(state.asked) if is_open else []
    arrived = Arrived(last.member, last.step, last.message, now)
    match fault.what:
        case "conflict" if last.round == state.plan.round and last.member in held:
            return replace(arrived, message=_other(last.step, last.message))
        case "garbage" if free:
            return replace(arrived, member=free[0], step=state.step, message=b"\xff\x07garbage")
        case "long" | "short" | "bound" if free and state.step is Step.SUBMIT:
            codes = np.zeros(layout.size, np.uint32)
            if fault.what == "bound":
                # A masked vector's bound cannot be checked; it is refused because it lacks a signature.
                codes += np.uint32(2**31)
            else:
                codes = np.resize(codes, layout.size + (1 if fault.what == "long" else -1))
            message = wire.SummedVector(codes=codes.astype("<u4").tobytes()).SerializeToString()
            return replace(arrived, member=free[0], step=Step.SUBMIT, message=message)
        case "wrong step" if is_open:
            steps = [
                one for one in Step if one is not state.step and last.member not in state.closed.get(one, {})
            ]
            return replace(arrived, step=steps[int(fault.amount * len(steps))]) if steps else None
        case "stranger" if is_open:
            everybody = len(state.plan.members) + len(state.plan.holders) ** 2
            return replace(arrived, step=state.step, member=everybody + int(fault.amount * 3))
        case "old round" if old is not None and old.round < state.plan.round and is_open:
            # A service refuses an old round by its number; in a masked sum the machine refuses signed messages, too.
            # Shares are not signed: their receiver, or the server that combines them, finds out.
            signed = state.half.name == "masked" and old.step in _SIGNED
            if not signed or old.member not in free or old.step is not state.step:
                return None
            return Arrived(old.member, old.step, old.message, now)
        case _:
            return None


def _other(step: Step, message: bytes) -> bytes:
    """Return a message of the same form with one changed byte."""
    if step is not Step.SUBMIT:
        return message[:-1] + bytes([message[-1] ^ 1])
    vector = wire.SummedVector.FromString(message)
    name = "codes" if vector.codes else "ciphertexts"
    content = bytearray(getattr(vector, name))
    content[-1] ^= 1
    setattr(vector, name, bytes(content))
    return vector.SerializeToString()


def false(message: bytes, who: int = 0) -> bytes:
    """Falsify a key holder's decryption: change its plaintexts, or its proof where it has none.

    For a model that the holder made, change the model, differently for each holder, as liars do not collude.
    """
    applied = wire.AppliedSum.FromString(message)
    if applied.agreement:
        applied.model = applied.model[:-1] + bytes([applied.model[-1] ^ 1])
        applied.agreement = hashlib.sha256(applied.agreement + who.to_bytes(4)).digest()
        return applied.SerializeToString()
    decryption = wire.Decryption.FromString(message)
    name = "plaintexts" if decryption.plaintexts else "proof"
    content = bytearray(getattr(decryption, name))
    content[-1] ^= 1
    setattr(decryption, name, bytes(content))
    return decryption.SerializeToString()


def forged(step: Step, briefing: bytes, fault: Fault, members: int) -> bytes:
    """Return a briefing as a cheating server might forge it."""
    kinds: Mapping[Step, tuple[Any, str]] = {
        Step.SHARE: (wire.Adverts, "adverts"),
        Step.SUBMIT: (wire.ShareInbox, "shares"),
        Step.CONFIRM: (wire.Submitters, "members"),
        Step.UNMASK: (wire.Confirmations, "confirmations"),
        Step.DECRYPT: (wire.DecryptionTask, "members"),
    }
    if step not in kinds:
        return briefing
    kind, name = kinds[step]
    if not briefing:
        return briefing
    message = kind.FromString(briefing)
    entries = list(getattr(message, name))
    at = int(fault.amount * len(entries)) if entries else 0
    match fault.what:
        case "drop one" if entries:
            del entries[at]
        case "add one" if step is Step.CONFIRM:
            entries = sorted({*entries, int(fault.amount * members)})
        case "swap" if len(entries) > 1 and step is Step.SHARE:
            # Swap the keys of two neighbours.
            entries[at].mask_public, entries[at - 1].mask_public = (
                entries[at - 1].mask_public,
                entries[at].mask_public,
            )
        case "swap" if len(entries) > 1 and step is Step.SUBMIT:
            entries[at].sealed, entries[at - 1].sealed = entries[at - 1].sealed, entries[at].sealed
        case "swap" if step is Step.DECRYPT and message.ciphertexts:
            # Put the last number of the ciphertexts in place of the first.
            numbers = message.ciphertexts
            message.ciphertexts = numbers[-_NUMBER_BYTES:] + numbers[_NUMBER_BYTES:]
        case "other round" if entries and step in (Step.SHARE, Step.UNMASK):
            entries[at].signature = bytes(64)
        case _:
            return briefing
    changed = kind()
    changed.CopyFrom(message)
    changed.ClearField(name)
    getattr(changed, name).extend(entries)
    forged: bytes = changed.SerializeToString()
    return forged
