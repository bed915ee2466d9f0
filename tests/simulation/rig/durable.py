"""Model the disks of simulated processes, whose content is all that a restarted process gets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from coterie.rounds.ledger import Ledger
from coterie.rounds.member_round import Journal
from coterie.rounds.server_round import RoundState, SumPhase
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import ServerHalf, Step
from coterie.wire.v1 import rounds_pb2 as wire
from tests.simulation.rig.sums import SUBJECT

__all__ = ["HostDisk", "ServerDisk"]


@dataclass
class ServerDisk:
    """The orchestration server's store, with the model's version and the round in progress.

    Attributes
    ----------
    version : int
        Version of the model.
    round : int
        Number of the last round that was begun.
    place : int
        Pass of the sum in progress or of the last one.
    head : bytes
        Plan, step, phase and reason of that round.
    closed : dict
        Messages of closed steps, by step.
    running : bytes
        Sum of the submitters' contributions; empty until SUBMIT is closed.
    abandoned : bool
        Whether the last round that ended was abandoned.
    bound : frozenset of int
        Members to whom somebody may be bound since then.
    """

    version: int = 0
    round: int = 0
    place: int = 0
    head: bytes = b""
    closed: dict[Step, Mapping[int, bytes]] = field(default_factory=dict)
    running: bytes = b""
    abandoned: bool = False
    bound: frozenset[int] = frozenset()

    def save(self, state: RoundState, closed: Step | None) -> None:
        """Store a round's state and a closed step, as one transaction (effect ``Save``)."""
        if state.plan.round != self.round:
            self.closed, self.running, self.round = {}, b"", state.plan.round
        self._write_head(state, state.phase)
        if state.phase is SumPhase.ABANDONED:
            self.running = b""
            self.abandoned, self.bound = True, frozenset(state.bound) or self.bound
        if closed is not None:
            self.closed[closed] = dict(state.closed[closed])
            if closed is Step.SUBMIT and state.running is not None:
                self.running = state.half.to_bytes(state.running)

    def apply(self, state: RoundState) -> None:
        """Raise the model's version and end the round, as one transaction."""
        self.version += 1
        self.abandoned, self.bound = False, frozenset()
        self._write_head(state, SumPhase.DONE)

    def load(self, layout: Layout, half: ServerHalf, patience_s: float) -> RoundState | None:
        """Return the stored round; None when there was none yet."""
        if not self.head:
            return None
        written, step, phase, reason = json.loads(self.head)
        plan = SumPlan.from_wire(wire.SumPlan.FromString(bytes.fromhex(written)))
        return RoundState(
            plan,
            layout,
            half,
            patience_s,
            Step(step),
            SumPhase(phase),
            closed={one: dict(messages) for one, messages in self.closed.items()},
            running=half.from_bytes(plan, layout, self.running) if self.running else None,
            reason=reason,
            subject=SUBJECT,
            only=self.bound,
        )

    def _write_head(self, state: RoundState, phase: SumPhase) -> None:
        plan = state.plan.to_wire().SerializeToString().hex()
        self.head = json.dumps([plan, state.step.value, phase.value, state.reason]).encode()


@dataclass
class HostDisk:
    """A host's store, with the journal of each of its members."""

    journals: dict[int, bytes] = field(default_factory=dict)

    def keep(self, member: int, journal: Journal) -> None:
        """Store a member's journal (effect ``Keep``)."""
        self.journals[member] = json.dumps(
            [journal.joined, journal.contribution.hex(), journal.ledger.to_text()]
        ).encode()

    def journal(self, member: int) -> Journal:
        """Return a member's stored journal; an empty one when there is none."""
        held = self.journals.get(member)
        if held is None:
            return Journal()
        joined, contribution, ledger = json.loads(held)
        return Journal(joined, bytes.fromhex(contribution), Ledger.from_text(ledger))
