"""The encrypted sum when its participants share the key: the server sees neither a contribution nor the model.

Contributions are as in ``coterie.secure_sum.encrypted``.  Of a sum that only *measures* the holders tell the server
what is in it, each a part, as there.  A sum that *changes* the model they do not: two of them, independently, decrypt
all of it, change the model that the plan names by it, seal the next version for all holders and say what they came to
by an HMAC under a key of theirs.  The server takes the version on which two agree; where they do not, it asks another
holder, and names who stands alone.

Which holders are asked goes round with the rounds.  What a holder makes of a sum is the learning system's affair, and
given to it (`Apply`).  One curious holder together with the server reads everything, as in the paper's form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coterie.crypto.paillier import RunningSum
from coterie.crypto.sealed_model import AGREEMENT_BYTES
from coterie.crypto.verification import VerificationError
from coterie.secure_sum.encrypted import (
    EncryptedServer,
    ciphertexts_at,
    confirmations_in,
    packing_of,
    read_message,
)
from coterie.secure_sum.key_holder import KeyHolder, read_briefing
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import (
    Applied,
    Closed,
    Declined,
    Failed,
    Pieces,
    Step,
    Subject,
    Total,
    bad_message,
    once,
)
from coterie.wire.v1 import rounds_pb2 as wire

if TYPE_CHECKING:
    from coterie.crypto.identity import Bundle, Identity
    from coterie.secure_sum.key_holder import HeldSecrets

__all__ = ["AGREEING", "MEASURING", "Apply", "SharedKeyHolder", "SharedKeyServer"]

AGREEING = 2
"""Holders that must come to the same model."""

MEASURING = "evaluate"
"""The purpose whose sums are told to the server; no other one's are."""


Apply = Callable[[SumPlan, wire.ApplyTask, NDArray[np.uint32], int], wire.AppliedSum]
"""Changes the model of a task by the sum of codes, uint32 (layout size,), over so many users; may raise `Declined`."""


class SharedKeyServer(EncryptedServer):
    """The server's half.

    Parameters
    ----------
    keys : Keyring, optional
        Filled by the service, as keys come and go.
    """

    name = "shared-key"

    # --- whom a step asks ------------------------------------------------------------------------------------------

    def expected(self, plan: SumPlan, closed: Closed, step: Step) -> tuple[int, ...]:
        """Return all members, then all holders; of these who confirmed two apply a sum that changes the model."""
        if step is not Step.DECRYPT or _measures(plan):
            return super().expected(plan, closed, step)
        return tuple(sorted(self._own(plan, holder) for holder in self._order(plan, closed)[:AGREEING]))

    def _order(self, plan: SumPlan, closed: Closed) -> list[int]:
        """Return the holders that confirmed, beginning with another one in each round."""
        count = len(plan.holders)
        return sorted(self._confirmed(plan, closed), key=lambda holder: (holder - plan.round) % count)

    @staticmethod
    def _own(plan: SumPlan, holder: int) -> int:
        return plan.respondent(holder, holder)

    def stand_ins(
        self,
        plan: SumPlan,
        closed: Closed,
        step: Step,
        arrived: Collection[int],
        asked: Collection[int],
        gone: Collection[int],
    ) -> tuple[int, ...]:
        """Return the next holder in the place of one that is gone, or when those that answered do not agree."""
        if step is not Step.DECRYPT or _measures(plan):
            return super().stand_ins(plan, closed, step, arrived, asked, gone)
        waiting = set(asked).difference(arrived, gone)
        # Of two or more answers that are there, no two agree: otherwise nobody would be asked for.
        wanted = max(AGREEING - len(arrived), 1) - len(waiting)
        left = [
            number
            for holder in self._order(plan, closed)
            if (number := self._own(plan, holder)) not in asked and number not in gone
        ]
        return tuple(left[: max(wanted, 0)])

    def enough(self, plan: SumPlan, closed: Closed, step: Step, arrived: Collection[int]) -> bool:
        """Whether every part is decrypted, of a sum that measures."""
        return _measures(plan) and super().enough(plan, closed, step, arrived)

    def answers_as(self, plan: SumPlan, member: int, step: Step, message: bytes) -> int:
        """Return as whom a holder answers."""
        return super().answers_as(plan, member, step, message) if _measures(plan) else member

    def shortfall(self, plan: SumPlan, closed: Closed, step: Step, arrived: Mapping[int, bytes]) -> str:
        """Say when too few users submitted, no majority of holders confirmed, or too few applied the sum."""
        if step is not Step.DECRYPT or _measures(plan):
            return super().shortfall(plan, closed, step, arrived)
        if len(arrived) >= AGREEING:
            return ""
        return f"{len(arrived)} key holders applied the sum; {AGREEING} have to come to the same model"

    # --- messages --------------------------------------------------------------------------------------------------

    def pieces(
        self,
        plan: SumPlan,
        closed: Closed,
        step: Step,
        member: int,
        running: RunningSum | None = None,
        subject: Subject | None = None,
    ) -> Pieces:
        """Return what is needed for a step: of a sum that changes the model all of it, for each who applies it."""
        if step is not Step.DECRYPT or _measures(plan):
            return super().pieces(plan, closed, step, member, running, subject)
        if running is None or subject is None:
            raise AssertionError("a sum is applied without a running sum, or to nothing")
        return Pieces([once(closed, "task", lambda: self._task_of(plan, closed, running, subject))])

    def _task_of(self, plan: SumPlan, closed: Closed, running: RunningSum, subject: Subject) -> bytes:
        total, listed = self._total(plan, closed, running), self._listed(plan, closed)
        return wire.ApplyTask(
            members=listed.members,
            places=listed.places,
            confirmations=confirmations_in(closed),
            mode=total.mode,
            ciphertexts=ciphertexts_at(total, range(len(total.units))),
            model=subject.model,
            items=subject.items,
            shares=subject.shares,
            population=subject.population,
        ).SerializeToString()

    def check(self, plan: SumPlan, closed: Closed, step: Step, member: int, message: bytes) -> None:
        """Check a holder's message; which model is right, `unmask` finds by who agrees."""
        if step is not Step.DECRYPT or _measures(plan):
            super().check(plan, closed, step, member, message)
            return
        applied = read_message(wire.AppliedSum, step, message)
        model = read_message(wire.SealedModel, step, applied.model)
        if (model.key_id, model.round) != (plan.key_id, plan.round):
            raise bad_message(
                step, "a model of another key or round", f"key and round of the plan, {plan.round}"
            )
        if len(applied.agreement) != AGREEMENT_BYTES:
            raise bad_message(
                step, f"an agreement of {len(applied.agreement)} bytes", f"{AGREEMENT_BYTES} bytes"
            )
        if not all(np.isfinite((one.total, one.count)).all() for one in applied.measured):
            raise bad_message(step, "a metric that is no finite number", "sums over a cohort")

    # --- the end ---------------------------------------------------------------------------------------------------

    def unmask(self, plan: SumPlan, closed: Closed, running: RunningSum) -> Total:
        """Return the sum, of a purpose that measures; else the model on which two holders agree.

        Raises
        ------
        Failed
            As for an encrypted sum; or when no two agree.
        """
        if _measures(plan):
            return super().unmask(plan, closed, running)
        answers = {
            number: wire.AppliedSum.FromString(message)
            for number, message in sorted(closed[Step.DECRYPT].items())
        }
        counts = Counter(answer.agreement for answer in answers.values())
        agreed, behind = counts.most_common(1)[0]
        if behind < AGREEING:
            # Who is wrong shows when another one is asked.
            raise Failed(f"{len(answers)} key holders came to as many models")
        first = next(answer for answer in answers.values() if answer.agreement == agreed)
        wrong = tuple(number for number, answer in answers.items() if answer.agreement != agreed)
        measured = {one.name: (one.total, one.count) for one in first.measured}
        dropped = len(self._listed(plan, closed).dropped)
        return Total(np.empty(0, np.uint32), wrong, Applied(first.model, measured), dropped)


class SharedKeyHolder(KeyHolder):
    """One holder's half of one sum.

    Parameters
    ----------
    plan, holder, identity, held, bundles, known
        As for `KeyHolder`.
    apply : callable
        Changes a model by a sum.

    Raises
    ------
    Declined
        As `KeyHolder`.
    """

    def __init__(
        self,
        plan: SumPlan,
        holder: int,
        identity: Identity,
        held: HeldSecrets,
        bundles: Mapping[bytes, Bundle],
        known: dict[bytes, bytes] | None = None,
        *,
        apply: Apply,
    ) -> None:
        super().__init__(plan, holder, identity, held, bundles, known)
        self._apply = apply

    def decrypt(self, briefing: bytes, agreed: bytes) -> bytes:
        """Return a part of a sum that measures; else the next model, sealed, and what the sum tells of this one.

        Raises
        ------
        Declined
            As `KeyHolder.decrypt`; or when the model does not open, or is not the plan's, or the sum is impossible.
        """
        if _measures(self._plan):
            return super().decrypt(briefing, agreed)
        task = read_briefing(wire.ApplyTask, briefing)
        plan = self._plan
        _, _, plaintexts = self._decrypted(task, agreed, 0)
        packing = packing_of(plan, self._held.secret.public)
        users = sum(plan.members[member].users for member in task.members)
        try:
            # How many values there are, the layout says: what is beyond them is zero.
            codes = packing.unpack(plaintexts, packing.slots * len(plaintexts), users).codes
        except VerificationError as error:
            raise Declined(error.message) from None
        return self._apply(plan, task, codes.astype(np.uint32), users).SerializeToString()


def _measures(plan: SumPlan) -> bool:
    return plan.purpose == MEASURING
