"""State machine of a denoiser in one round: it reveals the sum of one list of members' noise, and no second one.

The list is in the ledger, on disk, before the sum leaves.  The opened noise is in memory only: a denoiser that restarts
between the two steps refuses, and those whom it served are withdrawn.  The server may ask the same again, and gets the
same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Protocol

from coterie.rounds.ledger import revealed_hash
from coterie.rounds.member_round import Effect, Journal, Keep, Send, SitOut
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Declined, Step
from coterie.wire.v1.rounds_pb2 import NoiseSums, OpenedNoise

__all__ = ["DenoiserRound", "NoiseHalf", "refusal"]


class NoiseHalf(Protocol):
    """A denoiser's half of the sum, which checks, opens and adds up: ``coterie.secure_sum.denoised``."""

    def confirm(self, briefing: bytes) -> bytes:
        """Return whose noise does not open; or raise Declined."""
        ...

    def listed(self, briefing: bytes) -> tuple[int, ...]:
        """Return the members whose noise is asked for; or raise Declined."""
        ...

    def reveal(self, members: Collection[int]) -> bytes:
        """Return the sums of the noise of these members."""
        ...


def refusal(step: Step, reason: str) -> bytes:
    """Return the message by which a denoiser refuses a step; the server then withdraws those whom it serves."""
    if step is Step.CONFIRM:
        return OpenedNoise(refused=reason).SerializeToString()
    return NoiseSums(refused=reason).SerializeToString()


@dataclass
class DenoiserRound:
    """State machine of a denoiser in one round; its service carries out its effects.

    Parameters
    ----------
    plan : SumPlan
        As this denoiser was shown it.
    journal : Journal
        As it stands on disk; only the ledger is used.
    half : callable
        Makes the denoiser's half of the sum, or raises Declined; called at most once.
    """

    plan: SumPlan
    journal: Journal
    half: Callable[[], NoiseHalf]
    reason: str = ""
    """Why the denoiser refuses; empty while it takes part."""
    _half: NoiseHalf | None = None
    _answers: dict[Step, tuple[bytes, bytes]] = field(default_factory=dict)

    def asked(self, step: Step, briefing: bytes) -> list[Effect]:
        """Return the effects that answer a step that the server asks for."""
        held = self._answers.get(step)
        if held is not None and held[0] == briefing:
            return [Send(step, held[1])]
        try:
            if self.reason:
                raise Declined(self.reason)
            if held is not None:
                raise Declined(f"is asked for {step.value} again, about other members")
            effects, message = self._answer(step, briefing)
        except Declined as declined:
            found: list[Effect] = [] if self.reason else [SitOut(str(declined))]
            self.reason = str(declined)
            return [*found, Send(step, refusal(step, self.reason))]
        self._answers[step] = briefing, message
        return [*effects, Send(step, message)]

    def _answer(self, step: Step, briefing: bytes) -> tuple[list[Effect], bytes]:
        if step is Step.CONFIRM:
            self._half = self._half or self.half()
            return [], self._half.confirm(briefing)
        if step is not Step.UNMASK:
            raise Declined(f"a denoiser has no step {step.value}")
        if self._half is None:
            raise Declined("restarted in this round: what it opened is gone")
        members = self._half.listed(briefing)
        ledger = self.journal.ledger.with_revealed(self.plan, revealed_hash(self.plan, members))
        message = self._half.reveal(members)
        self.journal = replace(self.journal, ledger=ledger)
        return [Keep(self.journal)], message
