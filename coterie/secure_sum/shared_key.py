"""The encrypted sum whose key the participants share: the server sees neither contributions nor the model.

Contributions are as in ``coterie.secure_sum.encrypted``.  A sum that only *measures* is decrypted for the server, each
holder a part, as there.  A sum that *changes* the model is not shown to the server: two holders, independently, decrypt
all of it, apply it to the model that the plan names, seal the next version for all holders, and send an HMAC of their
result under a key that only holders have.  The server takes the version on which two holders agree; if they do not, it
asks another holder, and names the one that stands alone.

The holders that are asked change from round to round.  The learning system determines how a sum changes the model; the
holder is given that as a function (`ApplyAtHolder`).  One curious holder together with the server can read everything,
as in the paper's form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
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

__all__ = ["AGREEING", "MEASURING", "ApplyAtHolder", "SharedKeyHolder", "SharedKeyServer"]

AGREEING = 2
"""Number of holders that must come to the same model."""

MEASURING = "evaluate"
"""The one purpose whose sums the server sees in the open."""


ApplyAtHolder = Callable[[SumPlan, wire.ApplyTask, NDArray[np.uint32], int], wire.AppliedSum]
"""Applies a sum of codes, uint32 (layout size,), over a number of users to a task's model; may raise `Declined`."""


class SharedKeyServer(EncryptedServer):
    """The orchestration server's half of the shared-key sum.

    Parameters
    ----------
    keys : Keyring, optional
        Public keys of the run; the service updates them as keys change.
    """

    name = "shared-key"

    # --- whom a step asks ------------------------------------------------------------------------------------------

    def expected(self, plan: SumPlan, closed: Closed, step: Step) -> tuple[int, ...]:
        """Return the members and holders that a step asks: two confirmed holders apply a sum that changes the model."""
        if step is not Step.DECRYPT or _measures(plan):
            return super().expected(plan, closed, step)
        return tuple(sorted(self._own(plan, holder) for holder in self._order(plan, closed)[:AGREEING]))

    def _order(self, plan: SumPlan, closed: Closed) -> list[int]:
        """Return the holders that confirmed, in an order that begins with a different holder in each round."""
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
        """Return the next holders to ask when one is gone, or when the holders that answered do not agree."""
        if step is not Step.DECRYPT or _measures(plan):
            return super().stand_ins(plan, closed, step, arrived, asked, gone)
        waiting = set(asked).difference(arrived, gone)
        # If two or more answers are there, no two of them agree: stand-ins would not be asked for otherwise.
        wanted = max(AGREEING - len(arrived), 1) - len(waiting)
        left = [
            number
            for holder in self._order(plan, closed)
            if (number := self._own(plan, holder)) not in asked and number not in gone
        ]
        return tuple(left[: max(wanted, 0)])

    def enough(self, plan: SumPlan, closed: Closed, step: Step, arrived: Collection[int]) -> bool:
        """Return whether every part of a measuring sum is decrypted; False for a sum that changes the model."""
        return _measures(plan) and super().enough(plan, closed, step, arrived)

    def answers_as(self, plan: SumPlan, member: int, step: Step, message: bytes) -> int:
        """Return the number under which a holder answers: its own, or in a measuring sum that of its part."""
        return super().answers_as(plan, member, step, message) if _measures(plan) else member

    def shortfall(self, plan: SumPlan, closed: Closed, step: Step, arrived: Mapping[int, bytes]) -> str:
        """Return a reason when too few users submitted, or too few holders confirmed or applied; else empty."""
        if step is not Step.DECRYPT or _measures(plan):
            return super().shortfall(plan, closed, step, arrived)
        if len(arrived) >= AGREEING:
            return ""
        return f"{len(arrived)} key holders applied the sum; {AGREEING} have to come to the same model"

    # --- messages --------------------------------------------------------------------------------------------------

    def _told(self, plan: SumPlan) -> bool:
        return _measures(plan)

    def pieces(
        self,
        plan: SumPlan,
        closed: Closed,
        step: Step,
        member: int,
        running: RunningSum | None = None,
        subject: Subject | None = None,
    ) -> Pieces:
        """Return a holder's briefing: for a sum that changes the model, the whole sum and the model, shared by all."""
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
        """Check the form of a holder's message; `unmask` finds which model is right."""
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
        """Return the codes of a measuring sum, or else the model on which two holders agree.

        Raises
        ------
        Failed
            As for an encrypted sum, or when no two holders agree.
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
            # A further holder's answer will show which one is wrong.
            raise Failed(f"{len(answers)} key holders came to as many models")
        first = next(answer for answer in answers.values() if answer.agreement == agreed)
        wrong = tuple(number for number, answer in answers.items() if answer.agreement != agreed)
        measured = {one.name: (one.total, one.count) for one in first.measured}
        dropped = len(self._listed(plan, closed).dropped)
        return Total(np.empty(0, np.uint32), wrong, Applied(first.model, measured), dropped)


class SharedKeyHolder(KeyHolder):
    """A key holder's half of one shared-key sum: decrypts a part of it, or applies it to the model.

    Parameters
    ----------
    plan, holder, identity, held, holders, bundles, known
        As for `KeyHolder`.
    apply : callable
        Applies a sum to the model of a task.

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
        holders: Sequence[bytes],
        bundles: Mapping[bytes, Bundle],
        known: dict[bytes, bytes] | None = None,
        *,
        apply: ApplyAtHolder,
    ) -> None:
        super().__init__(plan, holder, identity, held, holders, bundles, known)
        self._apply = apply

    def decrypt(self, briefing: bytes, agreed: bytes) -> bytes:
        """Return a decrypted part of a measuring sum, or else the sealed next model and this one's metrics.

        Raises
        ------
        Declined
            As `KeyHolder.decrypt`; or when the model does not open or is not the plan's, or the sum is impossible.
        """
        if _measures(self._plan):
            return super().decrypt(briefing, agreed)
        task = read_briefing(wire.ApplyTask, briefing)
        plan = self._plan
        values = self._decrypted(task, agreed, 0).values
        packing = packing_of(plan, self._held.secret.public)
        users = sum(plan.members[member].users for member in task.members)
        try:
            # Unpack all slots: only the layout says how many hold values, and the rest are zero.
            codes = packing.unpack(values, packing.slots * len(values), users)
        except VerificationError as error:
            raise Declined(error.message) from None
        return self._apply(plan, task, codes.astype(np.uint32), users).SerializeToString()


def _measures(plan: SumPlan) -> bool:
    return plan.purpose == MEASURING
