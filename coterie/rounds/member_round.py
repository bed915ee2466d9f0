"""State machine of a member in one round: it decides what to send, what to write to disk first, and when to sit out.

The server may ask for the same step again and again, and gets the same bytes each time.  A member keeps on disk the
number of the last round that it joined and the contribution that it sent; its secrets are only in memory.  So after a
restart it sends the stored contribution again, but masks no second one and reveals nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.ledger import Ledger, revealed_hash
from coterie.rounds.training import Purpose
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Declined, MemberHalf, Step

__all__ = [
    "Decline",
    "Effect",
    "Journal",
    "Keep",
    "MemberRound",
    "Send",
    "SitOut",
    "Train",
]

_BEFORE_SUBMIT = (Step.ADVERTISE, Step.SHARE)

_HASH_BYTES = 32


@dataclass(frozen=True)
class Journal:
    """The state that a member keeps on disk.

    Parameters
    ----------
    joined : int
        Number of the last round that the member joined; it joins no round with this number or a lower one again.
    contribution : bytes
        Hash of that round's plan, 32 bytes, followed by the message submitted under this plan; empty before the
        submission and after the round's close.
    ledger : Ledger
        Sums that the member helped to reveal by its answer to UNMASK, or that a key holder confirmed.
    """

    joined: int = 0
    contribution: bytes = b""
    ledger: Ledger = field(default_factory=Ledger)


@dataclass(frozen=True)
class Keep:
    """Effect: write this journal to disk before the effects that follow."""

    journal: Journal


@dataclass(frozen=True)
class Train:
    """Effect: train on the plan's model and call ``trained`` with the codes."""


@dataclass(frozen=True)
class Send:
    """Effect: submit these bytes for a step."""

    step: Step
    message: bytes


@dataclass(frozen=True)
class SitOut:
    """Effect: note that the member takes no further part in this round; the reason goes on the disclosure receipt."""

    reason: str


@dataclass(frozen=True)
class Decline:
    """Effect: tell the server that this member sends nothing more in this round, so that nobody waits for it."""


Effect = Keep | Train | Send | SitOut | Decline


@dataclass
class MemberRound:
    """State machine of a member in one round; the member's host carries out its effects.

    Parameters
    ----------
    plan : SumPlan
        As this member was shown it; its consent accepts it.
    journal : Journal
        As it stands on disk.
    half : callable
        Makes the member's half of the secure sum, with fresh secrets; called at most once.
    once : bool
        Whether the member contributes only once to the sums of each place, because each contribution costs privacy.
        Sums of items are repeated, with the same noise.
    """

    plan: SumPlan
    journal: Journal
    half: Callable[[], MemberHalf]
    once: bool = False
    reason: str = ""
    """Why the member sits out; empty while it takes part."""
    ahead: bool = field(default=False, init=False)
    """Whether it sits out because its journal is further than the server."""
    _half: MemberHalf | None = None
    _answers: dict[Step, bytes] = field(default_factory=dict)
    _training: bool = False
    _briefing: bytes = b""
    _closed: bool = False

    def __post_init__(self) -> None:
        if self.journal.joined > self.plan.round:
            self.reason = f"round {self.plan.round} is not above {self.journal.joined}, the last one joined"
            self.ahead = True
        elif self.journal.joined == self.plan.round:
            # The host has restarted: this round's secrets are gone.
            plan_hash, message = (
                self.journal.contribution[:_HASH_BYTES],
                self.journal.contribution[_HASH_BYTES:],
            )
            if not message:
                self.reason = f"restarted in round {self.plan.round} before its contribution was safe"
            elif plan_hash != self.plan.hash:
                # A server restored from a backup uses round numbers again.
                self.reason = f"round {self.plan.round} was joined under another plan"
                self.ahead = True
            else:
                self._answers[Step.SUBMIT] = message
        if not self.reason and (behind := self.journal.ledger.objection(self.plan)):
            self.reason, self.ahead = behind, True
        if not self.reason and self._counts and Step.SUBMIT not in self._answers:
            self.reason = self.journal.ledger.sent_already(self.plan)

    @property
    def _counts(self) -> bool:
        return self.once and self.plan.purpose != Purpose.SUPPORTS.value

    def asked(self, step: Step, briefing: bytes) -> list[Effect]:
        """Return the effects that answer a step that the server asks for."""
        if self._closed:
            return []
        if self.reason:
            return [Decline()]
        held = self._answers.get(step)
        if held is not None:
            return [Send(step, held)]
        if Step.SUBMIT in self._answers and step in _BEFORE_SUBMIT:
            # A late request of an earlier step.  The contribution is made already, and no second one will be.
            return []
        if step is Step.SUBMIT:
            if self._training:
                return []
            # Journal the join before training, so that no restart leads to a second contribution for this round.
            self._training, self._briefing = True, briefing
            return [*self._join(), Train()]
        effects = self._join()
        if self._half is None:
            return self._sit_out(f"restarted in round {self.plan.round}: its secrets are gone")
        try:
            if step is Step.UNMASK:
                return [*effects, *self._reveal(self._half, briefing)]
            message = self._half.answer(step, briefing)
            if step is Step.CONFIRM:
                # The others need not wait for an answer to UNMASK that would never come.
                self.journal.ledger.check(self.plan, self._revealed(self._half))
        except Declined as declined:
            return [*effects, *self._sit_out(str(declined))]
        self._answers[step] = message
        return [*effects, Send(step, message)]

    def trained(self, codes: NDArray[np.uint32]) -> list[Effect]:
        """Return the effects that submit the contribution, given its codes."""
        if self.reason or self._half is None or not self._training or Step.SUBMIT in self._answers:
            # Sat out, or not asked, or submitted already: a second vector is never masked with the same keys.
            return []
        try:
            message = self._half.answer(Step.SUBMIT, self._briefing, codes)
        except Declined as declined:
            return self._sit_out(str(declined))
        self._answers[Step.SUBMIT] = message
        ledger = self.journal.ledger.with_sent(self.plan) if self._counts else self.journal.ledger
        self.journal = replace(self.journal, contribution=self.plan.hash + message, ledger=ledger)
        return [Keep(self.journal), Send(Step.SUBMIT, message)]

    def failed(self, reason: str) -> list[Effect]:
        """Sit out because the local step failed."""
        return [] if self.reason or Step.SUBMIT in self._answers else self._sit_out(reason)

    def close(self) -> list[Effect]:
        """Forget the round: a later one has begun, or the run is over."""
        self.reason = self.reason or f"round {self.plan.round} is over"
        self._closed = True
        self._drop()
        self._answers.clear()
        if not self.journal.contribution:
            return []
        self.journal = replace(self.journal, contribution=b"")
        return [Keep(self.journal)]

    def _join(self) -> list[Effect]:
        if self.journal.joined >= self.plan.round:
            return []
        self.journal = replace(self.journal, joined=self.plan.round, contribution=b"")
        self._half = self.half()
        return [Keep(self.journal)]

    def _reveal(self, half: MemberHalf, briefing: bytes) -> list[Effect]:
        ledger = self.journal.ledger.with_revealed(self.plan, self._revealed(half))
        message = half.answer(Step.UNMASK, briefing)
        self.journal = replace(self.journal, ledger=ledger)
        self._answers[Step.UNMASK] = message
        return [Keep(self.journal), Send(Step.UNMASK, message)]

    def _revealed(self, half: MemberHalf) -> bytes:
        return revealed_hash(self.plan, half.submitters)

    def _sit_out(self, reason: str) -> list[Effect]:
        self.reason = reason
        self._drop()
        return [SitOut(reason), Decline()]

    def _drop(self) -> None:
        if self._half is not None:
            self._half.forget()
            self._half = None
