"""State machine of a key holder in one round: it signs one list of submitters and decrypts only the sum over it.

The signed list is on disk before the signature leaves.  The machine has the interface of a member's
(``coterie.rounds.member_round``) and, like it, may be asked the same step again and again.  A holder has no secret of
its own in a round, so it goes on after a restart: it signs and decrypts for the list on disk, and for no other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.ledger import revealed_hash
from coterie.rounds.member_round import Decline, Effect, Journal, Keep, Send, SitOut
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Confirmed, Declined, Step

__all__ = ["Half", "HolderRound"]

_HASH_BYTES = 32


class Half(Protocol):
    """A key holder's half of the sum, which checks and decrypts: ``coterie.secure_sum.key_holder``."""

    def confirm(self, briefing: bytes) -> Confirmed:
        """Return a signed confirmation of a list of submitters; or raise Declined."""
        ...

    def decrypt(self, briefing: bytes, agreed: bytes) -> bytes:
        """Return a decrypted part of the sum over the list with this hash; or raise Declined."""
        ...


@dataclass
class HolderRound:
    """State machine of a key holder in one round; the holder's service carries out its effects.

    Parameters
    ----------
    plan : SumPlan
        As this holder was shown it.
    journal : Journal
        As it stands on disk.  ``joined`` is the last round that the holder confirmed, ``contribution`` the hash of
        that round's plan followed by the hash of the list, 32 bytes each.
    half : callable
        Makes the holder's half of the encrypted sum; called at most once.
    """

    plan: SumPlan
    journal: Journal
    half: Callable[[], Half]
    reason: str = ""
    """Why the holder sits out; empty while it takes part."""
    ahead: bool = field(default=False, init=False)
    """Whether it sits out because its journal is further than the server."""
    _half: Half | None = None
    _answers: dict[tuple[Step, bytes], bytes] = field(default_factory=dict)
    _closed: bool = False

    def __post_init__(self) -> None:
        joined, held = self.journal.joined, self.journal.contribution
        if joined > self.plan.round:
            self.reason = f"round {self.plan.round} is not above {joined}, the last one confirmed"
        elif joined == self.plan.round and held[:_HASH_BYTES] != self.plan.hash:
            self.reason = f"round {self.plan.round} was confirmed under another plan"
        self.reason = self.reason or self.journal.ledger.objection(self.plan)
        self.ahead = bool(self.reason)

    @property
    def _agreed(self) -> bytes:
        """Hash of the list that this holder signed in this round; empty before."""
        return self.journal.contribution[_HASH_BYTES:] if self.journal.joined == self.plan.round else b""

    def asked(self, step: Step, briefing: bytes) -> list[Effect]:
        """Return the effects that answer a step that the server asks for."""
        if self._closed:
            return []
        if self.reason:
            return [Decline()]
        held = self._answers.get((step, briefing))
        if held is not None:
            return [Send(step, held)]
        try:
            if self._half is None:
                self._half = self.half()
            if step is Step.CONFIRM:
                return self._confirm(self._half, briefing)
            if step is not Step.DECRYPT:
                raise Declined(f"a key holder has nothing to say to step {step.value}")
            if not self._agreed:
                raise Declined("is asked to decrypt before it confirmed who submitted")
            message = self._half.decrypt(briefing, self._agreed)
        except Declined as declined:
            return self._sit_out(str(declined))
        self._answers[step, briefing] = message
        return [Send(step, message)]

    def trained(self, codes: NDArray[np.uint32]) -> list[Effect]:
        """Return nothing: a holder contributes nothing."""
        return []

    def failed(self, reason: str) -> list[Effect]:
        """Return nothing: there is no local step."""
        return []

    def close(self) -> list[Effect]:
        """Forget the round: a later one has begun, or the run is over."""
        self._closed = True
        self._half = None
        self._answers.clear()
        return []

    def _confirm(self, half: Half, briefing: bytes) -> list[Effect]:
        confirmed = half.confirm(briefing)
        agreed, message = confirmed.agreed, confirmed.message
        effects: list[Effect] = []
        if self._agreed:
            if agreed != self._agreed:
                raise Declined("is asked to confirm another list of submitters than before")
        else:
            # A majority of holders decrypts whatever it confirmed, so the confirmation is what counts.
            revealed = revealed_hash(self.plan, confirmed.submitters, confirmed.places)
            self.journal = replace(
                self.journal,
                ledger=self.journal.ledger.with_revealed(self.plan, revealed),
                joined=self.plan.round,
                contribution=self.plan.hash + agreed,
            )
            effects.append(Keep(self.journal))
        self._answers[Step.CONFIRM, briefing] = message
        return [*effects, Send(Step.CONFIRM, message)]

    def _sit_out(self, reason: str) -> list[Effect]:
        self.reason = reason
        self._half = None
        return [SitOut(reason), Decline()]
