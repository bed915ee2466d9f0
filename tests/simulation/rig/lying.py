"""Schedules in which the server lies: it chooses, by a seed, among all that it may say, and adds up what it learns.

Members and key holders run the state machines of ``coterie.rounds`` with their journals; the server is the adversary.
In each round it chooses number, purpose, pass, part and model; whom it shows which of two plans; who restarts; whose
vector it claims not to have; which list of submitters it shows to whom, and again another one; and whom it asks for
shares or decryptions.  Some members are its accomplices: they confirm and reveal whatever it wants.

What the machines of a secure sum exchange is symbolic here, because 100,000 schedules with real keys take hours: a
half checks what the real one checks of lists, floors and thresholds, and signatures are values that only the harness
makes.  ``tests/simulation/test_deceit.py`` has the same lies with real keys.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.holder_round import HolderRound
from coterie.rounds.member_round import Effect, Journal, Keep, MemberRound, Send, Train
from coterie.secure_sum.plan import Member, SumPlan
from coterie.secure_sum.protocol import Confirmed, Declined, MemberHalf, Step

__all__ = ["Learnt", "Liar", "Tally", "lie", "solved"]

HOLDERS = 3
"""Number of key holders of an encrypted sum; a majority of them confirms a list."""

CODES = np.ones(1, np.uint32)

Values = tuple[str, int, int, bytes]
"""What is summed, by purpose, pass, part and model: two sums of the same values can be subtracted."""


def _signed(plan: SumPlan, submitters: Iterable[int]) -> str:
    """Return what stands for a signature under a list of submitters for a plan."""
    return hashlib.sha256(plan.hash + bytes(sorted(submitters))).hexdigest()


@dataclass
class _Masked:
    """A member's half of a masked sum over a complete graph, without its cryptography."""

    plan: SumPlan
    index: int
    _held: frozenset[int] = frozenset()
    submitters: Collection[int] = ()

    def answer(self, step: Step, briefing: bytes, codes: NDArray[np.uint32] | None = None) -> bytes:
        told = json.loads(briefing or b"[]")
        match step:
            case Step.SHARE | Step.SUBMIT:
                self._held = self._enough(frozenset(told) - {self.index})
            case Step.CONFIRM:
                listed = frozenset(told)
                users = sum(self.plan.members[member].users for member in listed)
                if self.index not in listed or users < self.plan.min_sum:
                    raise Declined("the list of submitters is too short, or does not have this member")
                self._enough(listed & self._held)
                self.submitters = listed
            case Step.UNMASK:
                wanted = _signed(self.plan, self.submitters)
                right = {member for member, signature in told if signature == wanted}
                self._enough(right & self._held & frozenset(self.submitters))
        return json.dumps(sorted(self.submitters)).encode()

    def _enough(self, members: frozenset[int]) -> frozenset[int]:
        if len(members) < self.plan.threshold:
            raise Declined(f"{len(members)} neighbours, and it takes {self.plan.threshold}")
        return members

    def forget(self) -> None:
        pass


@dataclass
class _Holder:
    """A key holder's half of an encrypted sum, without its cryptography."""

    plan: SumPlan

    def confirm(self, briefing: bytes) -> Confirmed:
        listed = tuple(json.loads(briefing))
        if sum(self.plan.members[member].users for member in listed) < self.plan.min_sum:
            raise Declined("the list of submitters is too short")
        signature = _signed(self.plan, listed)
        return Confirmed(signature.encode(), bytes.fromhex(signature), listed)

    def decrypt(self, briefing: bytes, agreed: bytes) -> bytes:
        listed, signatures = json.loads(briefing)
        wanted = _signed(self.plan, listed)
        if bytes.fromhex(wanted) != agreed:
            raise Declined("is asked to decrypt a sum over others than it confirmed")
        if 2 * sum(one == wanted for one in signatures) <= HOLDERS:
            raise Declined("no majority confirmed the list")
        return json.dumps(sorted(listed)).encode()


@dataclass
class Learnt:
    """What the server has learnt from all sums that were revealed.

    Parameters
    ----------
    accomplices : frozenset of int
        Members whose contributions the server knows anyway.
    """

    accomplices: frozenset[int]
    sums: dict[Values, set[frozenset[int]]] = field(default_factory=lambda: defaultdict(set))
    """Honest submitters of each revealed sum, by what is summed."""

    def take(self, plan: SumPlan, submitters: Iterable[int]) -> None:
        """Note a revealed sum."""
        values = plan.purpose, plan.pass_number, plan.part, plan.model_sha256
        if plan.purpose == "supports":
            # Which items somebody has does not depend on the model.
            values = *values[:3], b""
        self.sums[values].add(frozenset(submitters) - self.accomplices)

    @property
    def fewest(self) -> int | None:
        """Smallest number of honest members behind a revealed sum; None without any."""
        return min((len(one) for sets in self.sums.values() for one in sets), default=None)

    @property
    def fewest_apart(self) -> int | None:
        """Smallest number of honest members in which two revealed sums of the same values differ; None without any."""
        apart = [len(a ^ b) for sets in self.sums.values() for a, b in combinations(sets, 2)]
        return min(apart, default=None)

    @property
    def solved(self) -> frozenset[int]:
        """Honest members whose values follow from the revealed sums by linear algebra."""
        return frozenset(member for sets in self.sums.values() for member in solved(sets))


def solved(sets: Collection[frozenset[int]]) -> frozenset[int]:
    """Return the members whose values follow from sums over some sets: their unit vectors are in the span.

    By Gauss-Jordan elimination over rational numbers: a unit vector is in the span exactly if it is a row of the
    reduced form.
    """
    members = sorted(frozenset().union(*sets))
    rows = [[Fraction(member in one) for member in members] for one in sets]
    done = 0
    for column in range(len(members)):
        pivot = next((n for n in range(done, len(rows)) if rows[n][column]), None)
        if pivot is None:
            continue
        rows[done], rows[pivot] = rows[pivot], rows[done]
        rows[done] = [value / rows[done][column] for value in rows[done]]
        for n, row in enumerate(rows):
            if n != done and row[column]:
                rows[n] = [a - row[column] * b for a, b in zip(row, rows[done], strict=True)]
        done += 1
    return frozenset(members[row.index(1)] for row in rows if sum(value != 0 for value in row) == 1)


@dataclass
class Tally:
    """Counts over many schedules.

    Parameters
    ----------
    schedules, sums : int
        Schedules, and sums that were revealed in them.
    fewest, fewest_apart : int or None
        Over all schedules; as of `Learnt`.
    solved : tuple of int
        Seeds of schedules in which a member's values follow from revealed sums.
    """

    schedules: int = 0
    sums: int = 0
    fewest: int | None = None
    fewest_apart: int | None = None
    solved: tuple[int, ...] = ()

    def __add__(self, other: Tally) -> Tally:
        """Return the counts over the schedules of both."""
        return Tally(
            self.schedules + other.schedules,
            self.sums + other.sums,
            _least(self.fewest, other.fewest),
            _least(self.fewest_apart, other.fewest_apart),
            self.solved + other.solved,
        )

    def __str__(self) -> str:
        """Return the counts in words."""
        apart = (
            "no two over other members"
            if self.fewest_apart is None
            else f"differ by {self.fewest_apart} members"
        )
        return (
            f"{self.schedules:,} schedules, {self.sums:,} sums revealed, fewest honest members behind one "
            f"{self.fewest}; of the same values {apart}; schedules that give somebody away: {len(self.solved)}"
        )


def _least(one: int | None, other: int | None) -> int | None:
    return min((value for value in (one, other) if value is not None), default=None)


def lie(seeds: Iterable[int], secure_sum: str, **machines: Any) -> Tally:
    """Run the schedules of some seeds and return their counts; ``machines`` are as for `Liar`."""
    total = Tally()
    for seed in seeds:
        learnt = Liar(seed, secure_sum, **machines).run()
        sums = sum(len(sets) for sets in learnt.sums.values())
        total += Tally(1, sums, learnt.fewest, learnt.fewest_apart, (seed,) if learnt.solved else ())
    return total


MakeMember = Callable[[SumPlan, Journal, Callable[[], MemberHalf]], MemberRound]
MakeHolder = Callable[[SumPlan, Journal, Callable[[], _Holder]], HolderRound]


class Liar:
    """A server that lies by a seed, to members and key holders with real state machines.

    Parameters
    ----------
    seed : int
    secure_sum : str
        ``masked`` or ``encrypted``.
    member, holder : callable
        Make the state machines; tests put faulty ones here to see that they are found.
    """

    def __init__(
        self,
        seed: int,
        secure_sum: str,
        member: MakeMember = MemberRound,
        holder: MakeHolder = HolderRound,
    ) -> None:
        self._rng = rng = random.Random(f"lies {seed} {secure_sum}")
        self._sum = secure_sum
        self._new_member, self._new_holder = member, holder
        self.count = rng.choice((4, 5, 6, 7))
        self.floor = rng.randint(2, self.count - 1)
        accomplices = rng.choice((0, 0, 1)) if self.floor > 2 else 0
        self.learnt = Learnt(frozenset(rng.sample(range(self.count), accomplices)))
        # Two lists can both have enough answers only with more double answers than there are accomplices.
        self.threshold = min((self.count - 1 + accomplices) // 2 + 1, self.count - 1)
        self._journals: dict[str, Journal] = {}
        self.rounds = rng.choice((2, 3, 4, 5))
        self._number = 0

    def run(self) -> Learnt:
        """Run the schedule; return what the server has learnt."""
        for _ in range(self.rounds):
            self._round()
        return self.learnt

    # --- what the server says --------------------------------------------------------------------------------------

    def _round(self) -> None:
        rng = self._rng
        # Sometimes a number that was used before, as after a backup.
        self._number = max(1, self._number + rng.choice((1, 1, 1, 1, 2, 0, -1)))
        first = self._plan()
        plans = [first, self._plan() if rng.random() < 0.2 else first]
        shown = [plans[rng.random() < 0.4] for _ in range(self.count)]
        for plan in {plan.hash: plan for plan in plans}.values():
            told = frozenset(n for n in range(self.count) if shown[n] is plan)
            if self._sum == "masked":
                self._masked(plan, told | self.learnt.accomplices)
            else:
                self._encrypted(plan, told | self.learnt.accomplices)

    def _plan(self) -> SumPlan:
        """Return a plan that members accept by the rule of cohorts: it fixes members and floor, and passes of items."""
        rng = self._rng
        purpose = rng.choice(("supports", "supports", "train"))
        # Few places, so that the same one comes again.
        pass_number, part = (
            (0, 0) if purpose == "supports" else (rng.choice((0, 0, 1, 2)), rng.choice((0, 0, 1)))
        )
        masked = self._sum == "masked"
        return SumPlan(
            run_id="lies",
            round=self._number,
            purpose=purpose,
            secure_sum=self._sum,
            model_sha256=rng.choice((b"m", b"n")) * 32,
            layout_sha256=bytes(32),
            members=tuple(Member(bytes([n]) * 32, f"h{n}") for n in range(self.count)),
            min_sum=self.floor,
            pass_number=pass_number,
            part=part,
            degree=self.count - 1 if masked else 0,
            threshold=self.threshold if masked else 0,
            key_id=b"" if masked else b"k" * 32,
            code_bits=0 if masked else 12,
            holders=() if masked else tuple(Member(bytes([200 + n]) * 32, f"k{n}") for n in range(HOLDERS)),
        )

    def _some(self, members: Collection[int], most: float = 0.4) -> frozenset[int]:
        """Return members without a few."""
        rate = self._rng.random() * most if self._rng.random() < 0.7 else 0.0
        return frozenset(one for one in sorted(members) if self._rng.random() >= rate)

    def _lists(self, submitters: frozenset[int]) -> list[list[int]]:
        """Return two lists of submitters that the server shows, often the same."""
        first = sorted(self._some(submitters))
        return [first, sorted(self._some(submitters)) if self._rng.random() < 0.5 else first]

    # --- masked ----------------------------------------------------------------------------------------------------

    def _masked(self, plan: SumPlan, told: frozenset[int]) -> None:
        rng, false = self._rng, self.learnt.accomplices
        members = {n: self._member(plan, n) for n in sorted(told - false)}

        def ask(step: Step, whom: Iterable[int], briefing: Callable[[int], object]) -> dict[int, bytes]:
            found = {}
            for n in sorted(set(whom) & members.keys()):
                if rng.random() < 0.03:
                    # The host restarts.
                    members[n] = self._member(plan, n)
                message = self._said(
                    f"member {n}", members[n].asked(step, json.dumps(briefing(n)).encode()), members[n]
                )
                if message is not None:
                    found[n] = message
            return found

        adverts = frozenset(ask(Step.ADVERTISE, told, lambda n: [])) | (false & told)
        met = sorted(self._some(adverts, 0.2))
        shared = frozenset(ask(Step.SHARE, met, lambda n: met)) | (false & frozenset(met))
        held = sorted(self._some(shared, 0.2))
        submitted = frozenset(ask(Step.SUBMIT, held, lambda n: held)) | (false & frozenset(held))
        lists = self._lists(submitted)
        revealed: dict[tuple[int, ...], set[int]] = defaultdict(set)
        view = {n: lists[rng.random() < 0.5] for n in members}
        signatures: dict[int, str] = {}
        for n in ask(Step.CONFIRM, submitted, lambda n: view[n]):
            signatures[n] = _signed(plan, view[n])
        if rng.random() < 0.3:
            # Ask again, with the other list.
            ask(Step.CONFIRM, submitted, lambda n: lists[view[n] is lists[0]])
        for listed in lists:
            wanted = _signed(plan, listed)
            told_signatures = [(n, signatures[n]) for n in sorted(signatures)] + [
                (n, wanted) for n in sorted(false)
            ]
            for n, message in ask(
                Step.UNMASK, self._some(submitted), lambda n, all_=told_signatures: all_
            ).items():
                revealed[tuple(json.loads(message))].add(n)
        for listed, by in revealed.items():
            by |= false & frozenset(held)
            if set(listed) <= submitted and all(len(by - {n}) >= plan.threshold for n in listed):
                self.learnt.take(plan, listed)
        self._close({f"member {n}": one for n, one in members.items()})

    def _member(self, plan: SumPlan, n: int) -> MemberRound:
        return self._new_member(plan, self._journals.get(f"member {n}", Journal()), lambda: _Masked(plan, n))

    # --- encrypted -------------------------------------------------------------------------------------------------

    def _encrypted(self, plan: SumPlan, submitted: frozenset[int]) -> None:
        rng = self._rng
        holders = {
            n: self._new_holder(plan, self._journals.get(f"holder {n}", Journal()), lambda: _Holder(plan))
            for n in range(HOLDERS)
        }
        lists = self._lists(submitted)
        signatures: dict[int, list[str]] = defaultdict(list)
        for attempt in range(2):
            for n, one in holders.items():
                if rng.random() < (0.2 if attempt == 0 else 0.7):
                    continue
                listed = lists[rng.random() < 0.4]
                if not listed:
                    continue
                message = self._said(f"holder {n}", one.asked(Step.CONFIRM, json.dumps(listed).encode()), one)
                if message is not None:
                    signatures[n].append(message.decode())
        everything = [one for found in signatures.values() for one in dict.fromkeys(found)]
        for listed in {tuple(one): one for one in lists if one}.values():
            briefing = json.dumps([listed, everything]).encode()
            for n, one in holders.items():
                if self._said(f"holder {n}", one.asked(Step.DECRYPT, briefing), one) is not None:
                    self.learnt.take(plan, listed)
        self._close({f"holder {n}": one for n, one in holders.items()})

    # --- journals --------------------------------------------------------------------------------------------------

    def _said(self, name: str, effects: Sequence[Effect], one: MemberRound | HolderRound) -> bytes | None:
        """Carry out effects; return the message that leaves, if one does."""
        message = None
        for effect in effects:
            match effect:
                case Keep(journal):
                    self._journals[name] = journal
                case Send(_, sent):
                    message = sent
                case Train():
                    message = self._said(name, one.trained(CODES), one)
        return message

    def _close(self, machines: Mapping[str, MemberRound | HolderRound]) -> None:
        for name, one in machines.items():
            self._said(name, one.close(), one)
