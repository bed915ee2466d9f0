"""Ledger of the sums that a member or key holder helped to reveal, by which it refuses a second sum over other members.

Two sums of the same values over two sets of members differ by what the others contributed: a server that has one sum
with a member and one without it knows this member's values.  So each sum has a *place*, its purpose, pass and part, and
whoever helps to reveal it

* helps at no place before the last one of this purpose: passes never go back;
* helps at the same place again only with the same sum: the same submitters, model and inputs.

The ledger is part of the journal (``coterie.rounds.member_round``), durable before the answer that reveals leaves.  It
holds one entry for each purpose, since all earlier places are refused.  ``docs/spec/rounds.md`` says what follows for a
server that has to repeat a sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

from coterie.crypto.explicit import encode
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Declined

__all__ = ["Entry", "Ledger", "revealed_hash"]

_USERS_BYTES = 4

_SENT = "sent-"
"""Begins the purpose of a contribution in the text of a ledger."""


def revealed_hash(plan: SumPlan, submitters: Collection[int], places: bytes = b"") -> bytes:
    """Return the hash of what a sum reveals, which is the same for a sum that repeats it under another round number.

    Parameters
    ----------
    plan : SumPlan
    submitters : collection of int
        Positions in the plan of the members whose contributions the sum has.
    places : bytes
        In a sparse sum, who sent which ciphertexts, as the submitters' list has it.

    Returns
    -------
    bytes
        SHA-256, 32 bytes.
    """
    inputs = [field for one in plan.inputs for field in one]
    members = sorted((plan.members[position] for position in submitters), key=lambda one: one.participant)
    # One field, because every member of a sum computes this hash.
    packed = b"".join(one.participant + one.users.to_bytes(_USERS_BYTES) for one in members)
    return hashlib.sha256(
        encode(
            "revealed",
            plan.run_id,
            plan.purpose,
            plan.pass_number,
            plan.part,
            plan.model_version,
            plan.model_sha256,
            plan.layout_sha256,
            len(plan.inputs),
            *inputs,
            packed,
            places,
        )
    ).digest()


@dataclass(frozen=True)
class Entry:
    """The last sum of a purpose that was revealed.

    Parameters
    ----------
    purpose : str
    pass_number, part : int
    sha256 : bytes
        `revealed_hash` of the sum, 32 bytes.
    """

    purpose: str
    pass_number: int
    part: int
    sha256: bytes

    @property
    def place(self) -> tuple[int, int]:
        """Pass and part; places of one purpose are compared as they stand in a run."""
        return self.pass_number, self.part

    def told(self) -> dict[str, object]:
        """Return the entry for the audit log; ``list`` names the sum by the beginning of its hash."""
        return {
            "purpose": self.purpose,
            "pass_number": self.pass_number,
            "part": self.part,
            "list": self.sha256[:8].hex(),
        }


@dataclass(frozen=True)
class Ledger:
    """The last sum of each purpose that a member or key holder helped to reveal in a run.

    Parameters
    ----------
    entries : tuple of Entry
        By ascending purpose, one for each.
    sent : tuple of (str, int, int)
        Purpose, pass and part of the last contribution of each purpose, where each costs privacy; by ascending purpose.
    """

    entries: tuple[Entry, ...] = ()
    sent: tuple[tuple[str, int, int], ...] = ()

    def last(self, purpose: str) -> Entry | None:
        """Return the last sum of a purpose; None before the first."""
        return next((one for one in self.entries if one.purpose == purpose), None)

    def objection(self, plan: SumPlan) -> str:
        """Return why a plan's place is refused whoever submits; empty where it is not."""
        last = self.last(plan.purpose)
        if last is None or (plan.pass_number, plan.part) >= last.place:
            return ""
        return (
            f"part {plan.part} of pass {plan.pass_number} ({plan.purpose}) comes before part {last.part} of pass "
            f"{last.pass_number}, which was revealed already"
        )

    def check(self, plan: SumPlan, sha256: bytes) -> None:
        """Check that a sum may be revealed, given its `revealed_hash`.

        Raises
        ------
        Declined
            When its place comes before the last one, or is the last one and another sum was revealed there.
        """
        reason, last = self.objection(plan), self.last(plan.purpose)
        if reason:
            raise Declined(reason)
        if last is not None and last.place == (plan.pass_number, plan.part) and last.sha256 != sha256:
            raise Declined(
                f"part {plan.part} of pass {plan.pass_number} ({plan.purpose}) was revealed already, over other "
                "members or of another model"
            )

    def with_revealed(self, plan: SumPlan, sha256: bytes) -> Ledger:
        """Return the ledger after a sum, which takes the place of the last one of its purpose.

        Raises
        ------
        Declined
            As `check`.
        """
        self.check(plan, sha256)
        new = Entry(plan.purpose, plan.pass_number, plan.part, sha256)
        others = [one for one in self.entries if one.purpose != plan.purpose]
        return Ledger(tuple(sorted([*others, new], key=lambda one: one.purpose)), self.sent)

    def sent_already(self, plan: SumPlan) -> str:
        """Return why a member contributes no more at a plan's place, or an earlier one; empty where it does.

        A second contribution with noise of its own would be a second sum that costs the member's users privacy.
        """
        for purpose, *place in self.sent:
            if purpose == plan.purpose and [plan.pass_number, plan.part] <= place:
                return (
                    f"a contribution for part {place[1]} of pass {place[0]} ({purpose}) was made already, and each "
                    f"costs "
                    "privacy"
                )
        return ""

    def with_sent(self, plan: SumPlan) -> Ledger:
        """Return the ledger after a contribution, which takes the place of the last one of its purpose."""
        others = [one for one in self.sent if one[0] != plan.purpose]
        return Ledger(self.entries, tuple(sorted([*others, (plan.purpose, plan.pass_number, plan.part)])))

    def to_text(self) -> str:
        """Return the ledger for the store."""
        revealed = [f"{one.purpose}:{one.pass_number}:{one.part}:{one.sha256.hex()}" for one in self.entries]
        return ",".join(
            [*revealed, *(f"{_SENT}{purpose}:{number}:{part}:" for purpose, number, part in self.sent)]
        )

    @classmethod
    def from_text(cls, text: str) -> Ledger:
        """Return the ledger that `to_text` wrote.

        Raises
        ------
        ValueError
            When the text is no ledger.
        """
        found, sent = [], []
        for entry in text.split(",") if text else []:
            purpose, pass_number, part, sha256 = entry.split(":")
            if purpose.startswith(_SENT):
                sent.append((purpose.removeprefix(_SENT), int(pass_number), int(part)))
            else:
                found.append(Entry(purpose, int(pass_number), int(part), bytes.fromhex(sha256)))
        return cls(tuple(found), tuple(sent))
