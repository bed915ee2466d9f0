"""What an intake needs of a sum that is open: slots and layout in words, and the checks of a contribution to it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from coterie.secure_sum.contribution import Layout, Segment
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import ClosedSteps, ServerHalf, Step
from coterie.store.contributions import Acknowledged, Opened
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import rounds_pb2
from coterie.wire.v1.common_pb2 import SlotRange
from coterie_cos.participants import ranges

__all__ = ["SENDERS_ONLY", "OpenedSum", "from_json", "spans", "to_json"]

SENDERS_ONLY = (Step.SHARE.value,)
"""Steps of which a check of a contribution needs to know who took part, and no message."""


def spans(slots: Iterable[int]) -> list[tuple[int, int]]:
    """Return the ranges of slots, ascending, each by its first slot and its length."""
    return [(one.first, one.count) for one in ranges(sorted(slots))]


def to_json(layout: Layout) -> str:
    """Return a layout as text, exactly."""
    return json.dumps([dataclasses.asdict(segment) for segment in layout.segments])


def from_json(text: str) -> Layout:
    """Return the layout that `to_json` wrote."""
    segments = [Segment(**{**one, "shape": tuple(one["shape"])}) for one in json.loads(text)]
    return Layout(tuple(segments))


class OpenedSum:
    """A sum whose contributions an intake takes.

    Parameters
    ----------
    opened : Opened
    half_of : callable
        Returns the server's half of a sum, given its name and its terms.
    """

    def __init__(self, opened: Opened, half_of: Callable[[str, bytes], ServerHalf]) -> None:
        self.plan = SumPlan.from_wire(rounds_pb2.SumPlan.FromString(opened.plan))
        self.half = half_of(self.plan.secure_sum, opened.terms)
        self.layout = from_json(opened.layout)
        self._slots = opened.slots
        self._closed = ClosedSteps({Step(step): messages for step, messages in opened.messages.items()})
        self._member_of = {own[0][0]: member for member, own in opened.slots.items()}
        self.read_at = time.monotonic()
        """When it was read, ``time.monotonic`` seconds."""

    def asks(self, party: str, slots: Sequence[SlotRange]) -> bool:
        """Return whether a member is asked that covers exactly these slots, and for which the party speaks."""
        return self._covers(party, slots) is not None

    def _covers(self, party: str, slots: Sequence[SlotRange]) -> int | None:
        named = sorted((one.first, one.count) for one in slots)
        member = self._member_of.get(named[0][0]) if named else None
        if member is None or self._slots[member] != _joined(named) or self.plan.device_of(member) != party:
            return None
        return member

    def member(self, party: str, slots: Sequence[SlotRange]) -> int:
        """Return the member that covers exactly these slots, for which the party must speak.

        Raises
        ------
        Refusal
            UNKNOWN_PARTICIPANT when there is none that is asked.
        """
        member = self._covers(party, slots)
        if member is None:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
                "these slots are not those of one member of the round that this party speaks for, and that is asked",
                field="slots",
                expected="all the slots that one member covers",
            )
        return member

    def excludes(self, member: int, revoked: Callable[[bytes], bool]) -> bool:
        """Return whether a member is out of the sum because it is revoked.

        Where steps came before this one, others count on it, and it stays.
        """
        return self.half.steps[0] is Step.SUBMIT and revoked(self.plan.members[member].participant)

    def checked(
        self, member: int, payload: bytes, sha256: bytes, notes: Mapping[int, bytes] | None = None
    ) -> Acknowledged:
        """Check a contribution, given the notes of others.

        Raises
        ------
        Refusal
            The contribution does not fit.
        """
        vector = self.half.vector(self.plan, self._closed, notes or {}, member, payload, self.layout, sha256)
        return Acknowledged(member, vector.note, vector.addend, len(payload))

    def summed(self, taken: Sequence[Acknowledged]) -> bytes:
        """Return the serialised sum of contributions."""
        addends = (one.addend for one in taken)
        return self.half.to_bytes(self.half.summed(self.plan, self.layout, addends))


def _joined(spans_: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ascending ranges with those joined that follow on each other."""
    found: list[tuple[int, int]] = []
    for first, count in spans_:
        if found and sum(found[-1]) == first:
            found[-1] = found[-1][0], found[-1][1] + count
        else:
            found.append((first, count))
    return found
