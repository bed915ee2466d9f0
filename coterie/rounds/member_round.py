"""One member's half of a round, without I/O: what to send when asked, what to keep first, when to sit out.

A member is asked level-triggered: the same step may be asked again and again, and is answered with the same bytes.
On disk it keeps the number of the last round that it joined and the contribution that it sent; secrets only ever live
in memory.  So after a restart it sends a contribution again but masks no second one, and reveals nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

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
    "counted_reveal",
]

_BEFORE_SUBMIT = (Step.ADVERTISE, Step.SHARE)

_HASH_BYTES = 32

_MOST_REVEALS = 2
"""How often a sum of one purpose over one model version may be revealed: more could be subtracted from one another."""

_REMEMBERED = 64
"""Sums that are remembered for that: a server that takes turns with several versions finds all of them counted."""


@dataclass(frozen=True)
class Journal:
    """What a member keeps on disk.

    Parameters
    ----------
    joined : int
        Number of the last round that it joined; a number at or below it is refused.
    contribution : bytes
        Hash of that round's plan, 32 bytes, and behind it what it submitted under this plan, until the round is
        closed; empty when it has not.
    reveals : tuple of str
        Sums that it helped to reveal, by its answer to UNMASK or its encrypted contribution, the last ones last:
        purpose and hash of the model, one entry for each time.
    """

    joined: int = 0
    contribution: bytes = b""
    reveals: tuple[str, ...] = ()


@dataclass(frozen=True)
class Keep:
    """Make the journal durable before anything that follows."""

    journal: Journal


@dataclass(frozen=True)
class Train:
    """Train on the plan's model; answer with ``trained``."""


@dataclass(frozen=True)
class Send:
    """Submit these bytes for a step."""

    step: Step
    message: bytes


@dataclass(frozen=True)
class SitOut:
    """Take no further part in this round; the reason belongs on the disclosure receipt."""

    reason: str


@dataclass(frozen=True)
class Decline:
    """Tell the server that nothing more comes from this member in this round, so that nobody waits for it."""


Effect = Keep | Train | Send | SitOut | Decline


def counted_reveal(plan: SumPlan, journal: Journal) -> tuple[str, ...]:
    """Return a journal's reveals with that of a plan's sum.

    Raises
    ------
    Declined
        When sums of this purpose over this version of the model were revealed as often as they may be.
    """
    this = f"{plan.purpose}:{plan.model_sha256.hex()}"
    reveals = (*journal.reveals, this)[-_REMEMBERED:]
    if reveals.count(this) > _MOST_REVEALS:
        raise Declined(f"sums over this model version were revealed {_MOST_REVEALS} times")
    return reveals


@dataclass
class MemberRound:
    """A member in one round.

    Parameters
    ----------
    plan : SumPlan
        As this member was shown it, accepted by its consent.
    journal : Journal
        As it stands on disk.
    half : callable
        Makes the secure sum's half, with fresh secrets; called at most once.
    """

    plan: SumPlan
    journal: Journal
    half: Callable[[], MemberHalf]
    reason: str = ""
    """Why the member sits out; empty while it takes part."""
    _half: MemberHalf | None = None
    _answers: dict[Step, bytes] = field(default_factory=dict)
    _training: bool = False
    _briefing: bytes = b""
    _closed: bool = False

    def __post_init__(self) -> None:
        if self.journal.joined > self.plan.round:
            self.reason = f"round {self.plan.round} is not above {self.journal.joined}, the last one joined"
        elif self.journal.joined == self.plan.round:
            # A restart: the secrets of this round are gone.
            plan_hash, message = (
                self.journal.contribution[:_HASH_BYTES],
                self.journal.contribution[_HASH_BYTES:],
            )
            if not message:
                self.reason = f"restarted in round {self.plan.round} before its contribution was safe"
            elif plan_hash != self.plan.hash:
                # A server that was restored from a backup uses the number again.
                self.reason = f"round {self.plan.round} was joined under another plan"
            else:
                self._answers[Step.SUBMIT] = message

    def asked(self, step: Step, briefing: bytes) -> list[Effect]:
        """Answer a step that the server asks for."""
        if self._closed:
            return []
        if self.reason:
            return [Decline()]
        held = self._answers.get(step)
        if held is not None:
            return [Send(step, held)]
        if Step.SUBMIT in self._answers and step in _BEFORE_SUBMIT:
            # An old question that was late; a contribution is never made anew, so there is nothing to say to it.
            return []
        if step is Step.SUBMIT:
            if self._training:
                return []
            # Joined before it trains: nobody makes a second contribution for one round.
            self._training, self._briefing = True, briefing
            return [*self._join(), Train()]
        effects = self._join()
        if self._half is None:
            return self._sit_out(f"restarted in round {self.plan.round}: its secrets are gone")
        try:
            if step is Step.UNMASK:
                return [*effects, *self._reveal(self._half, briefing)]
            message = self._half.answer(step, briefing)
        except Declined as declined:
            return [*effects, *self._sit_out(str(declined))]
        self._answers[step] = message
        return [*effects, Send(step, message)]

    def trained(self, codes: NDArray[np.uint32]) -> list[Effect]:
        """Submit the contribution that was asked for."""
        if self.reason or self._half is None or not self._training or Step.SUBMIT in self._answers:
            # Over, or asked for nothing, or there already: a second vector is never masked with the same keys.
            return []
        reveals = self.journal.reveals
        try:
            # Nothing more is asked of a member whose contribution others decrypt.
            if self.plan.holders:
                reveals = counted_reveal(self.plan, self.journal)
            message = self._half.answer(Step.SUBMIT, self._briefing, codes)
        except Declined as declined:
            return self._sit_out(str(declined))
        self._answers[Step.SUBMIT] = message
        self.journal = replace(self.journal, contribution=self.plan.hash + message, reveals=reveals)
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
        reveals = counted_reveal(self.plan, self.journal)
        message = half.answer(Step.UNMASK, briefing)
        self.journal = replace(self.journal, reveals=reveals)
        self._answers[Step.UNMASK] = message
        return [Keep(self.journal), Send(Step.UNMASK, message)]

    def _sit_out(self, reason: str) -> list[Effect]:
        self.reason = reason
        self._drop()
        return [SitOut(reason), Decline()]

    def _drop(self) -> None:
        if self._half is not None:
            self._half.forget()
            self._half = None
