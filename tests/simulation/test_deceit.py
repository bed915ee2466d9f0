"""A server that cheats under masks: it shows members different things, and learns nothing by it."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from coterie.rounds.ledger import Ledger
from coterie.rounds.member_round import Decline, Journal, Keep, MemberRound, Send, SitOut, Train
from coterie.secure_sum.plan import Member, SumPlan
from coterie.secure_sum.protocol import ClosedSteps, Step, Vector
from coterie.wire.v1 import rounds_pb2 as wire
from tests.simulation.rig.sums import LAYOUT, halves, identity

COUNT = 7


class Cohort:
    """Members with the messages that they sent, and a server's half to make honest briefings with."""

    def __init__(self, min_sum: int = 3, number: int = 1, journals=None) -> None:
        server, member_half = halves("masked")
        self.half = server()
        fields = self.half.plan_fields(COUNT, LAYOUT)
        self.plan = SumPlan(
            run_id="deceit",
            round=number,
            purpose="train",
            secure_sum="masked",
            model_sha256=hashlib.sha256(b"model").digest(),
            layout_sha256=hashlib.sha256(b"layout").digest(),
            members=tuple(Member(identity(n).participant_id, f"h{n}") for n in range(COUNT)),
            min_sum=min_sum,
            **fields._asdict(),
        )
        self.journals = journals or {n: Journal() for n in range(COUNT)}
        self.members = {
            n: MemberRound(self.plan, self.journals[n], lambda n=n: member_half(self.plan, n))
            for n in range(COUNT)
        }
        self.closed = ClosedSteps()
        self.vectors: list[Vector] = []
        self.rng = np.random.default_rng(0)

    def ask(self, member: int, step: Step, briefing: bytes | None = None) -> bytes | None:
        """Return what a member answers; nothing when it sits out."""
        if briefing is None:
            briefing = self.half.pieces(self.plan, self.closed, step, member).whole
        one = self.members[member]
        effects = one.asked(step, briefing)
        if effects and isinstance(effects[-1], Train):
            effects = [*effects, *one.trained(self.rng.integers(1, 2, LAYOUT.size).astype(np.uint32))]
        answer = None
        for effect in effects:
            match effect:
                case Keep(journal):
                    self.journals[member] = journal
                case Send(_, message):
                    answer = message
        return answer

    def close(self, step: Step, members=range(COUNT)) -> None:
        there = {}
        for member in members:
            message = self.ask(member, step)
            if message is None:
                continue
            if step is Step.SUBMIT:
                notes = dict(there.items())
                vector = self.half.vector(self.plan, self.closed, notes, member, message, LAYOUT)
                self.vectors.append(vector)
                message = vector.note
            else:
                self.half.check(self.plan, self.closed, step, member, message)
            there[member] = message
        self.closed = self.closed.with_step(step, there)

    def up_to(self, step: Step, submitters=range(COUNT)) -> "Cohort":
        for one in self.half.steps:
            if one is step:
                return self
            self.close(one, submitters if one is Step.SUBMIT else range(COUNT))
        return self


def submitters(*members: int) -> bytes:
    return wire.Submitters(members=members).SerializeToString()


def confirmations(cohort: Cohort, answers: dict[int, bytes], member: int) -> bytes:
    shown = [wire.Confirmation.FromString(answers[n]) for n in sorted(answers) if n != member]
    return wire.Confirmations(confirmations=shown).SerializeToString()


@pytest.mark.parametrize("size", [4, 5, 6])
def test_different_lists_of_submitters_never_get_both_secrets_of_anybody(size):
    cohort = Cohort().up_to(Step.CONFIRM)
    threshold = cohort.plan.threshold
    first = tuple(range(size))
    second = tuple(range(COUNT - size, COUNT))
    shown = {n: first if n < COUNT // 2 else second for n in range(COUNT)}
    answers = {n: cohort.ask(n, Step.CONFIRM, submitters(*shown[n])) for n in range(COUNT)}
    shares = {(peer, kind): set() for peer in range(COUNT) for kind in ("seed", "mask")}
    for member in range(COUNT):
        alike = {n: message for n, message in answers.items() if message and shown[n] == shown[member]}
        everything = {n: message for n, message in answers.items() if message}
        for offered in (alike, everything):
            message = cohort.ask(member, Step.UNMASK, confirmations(cohort, offered, member))
            for share in wire.Unmasking.FromString(message or b"").shares:
                shares[share.member, str(share.WhichOneof("share"))].add(member)
    for peer in range(COUNT):
        have = {kind for kind in ("seed", "mask") if len(shares[peer, kind]) >= threshold}
        assert len(have) < 2, f"both secrets of {peer}"
    # Neither list was confirmed by enough of anybody's neighbours.
    assert not any(shares.values())


def test_after_one_list_another_gets_nothing():
    cohort = Cohort().up_to(Step.UNMASK)
    honest = cohort.ask(0, Step.UNMASK)
    assert honest is not None
    others = {n: cohort.ask(n, Step.CONFIRM, submitters(*range(COUNT))) for n in range(1, COUNT)}
    assert all(others.values()), "the same list again: the same confirmation"
    # The answer to UNMASK is the same whatever is offered now; no second one is made.
    assert cohort.ask(0, Step.UNMASK, b"") == honest
    assert cohort.ask(0, Step.UNMASK, confirmations(cohort, dict(list(others.items())[:5]), 0)) == honest


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        ((1, 2, 3, 4, 5, 6), "does not have this member"),
        ((0, 1), "floor"),
        ((0, 2, 1, 3, 4), "does not ascend"),
        ((0, 1, 2, 3, 4, 5, 6, 7), "does not ascend within the cohort"),
        ((), ""),
    ],
)
def test_a_list_that_cannot_be_is_not_confirmed(shown, words):
    cohort = Cohort().up_to(Step.CONFIRM)
    effects = cohort.members[0].asked(Step.CONFIRM, submitters(*shown))
    assert effects[1:] == [Decline()]
    assert isinstance(effects[0], SitOut)
    assert words in effects[0].reason
    assert cohort.ask(0, Step.CONFIRM) is None, "and the right one comes too late"


def test_a_server_that_closes_below_the_floor_gets_nothing():
    cohort = Cohort(min_sum=6).up_to(Step.CONFIRM, submitters=range(5))
    assert [cohort.ask(n, Step.CONFIRM) for n in range(5)] == [None] * 5
    assert [cohort.ask(n, Step.UNMASK, b"") for n in range(5)] == [None] * 5


def swapped_keys(adverts):
    one, other = adverts.adverts[0], adverts.adverts[1]
    one.mask_public, other.mask_public = other.mask_public, one.mask_public


def swapped_names(adverts):
    adverts.adverts[0].member, adverts.adverts[1].member = (
        adverts.adverts[1].member,
        adverts.adverts[0].member,
    )


def swapped_whole(adverts):
    own = adverts.adverts[1].SerializeToString()
    position = adverts.adverts[0].member
    adverts.adverts[0].ParseFromString(own)
    adverts.adverts[0].member = position


def own_keys_of_the_server(adverts):
    one = adverts.adverts[0]
    one.mask_public = identity(99).agreement_public
    one.signature = identity(99).sign("advert", b"", one.channel_public, one.mask_public)


def twice(adverts):
    adverts.adverts.append(adverts.adverts[-1])


@pytest.mark.parametrize(
    "swap",
    [swapped_keys, swapped_names, swapped_whole, own_keys_of_the_server, twice],
    ids=lambda f: f.__name__,
)
def test_a_swapped_advertisement_is_refused_and_its_reader_leaves(swap):
    cohort = Cohort().up_to(Step.SHARE)
    adverts = wire.Adverts.FromString(cohort.half.pieces(cohort.plan, cohort.closed, Step.SHARE, 0).whole)
    swap(adverts)
    effect, last = cohort.members[0].asked(Step.SHARE, adverts.SerializeToString())
    assert isinstance(effect, SitOut)
    assert last == Decline()
    assert cohort.ask(0, Step.SHARE) is None


def test_advertisements_of_another_plan_are_refused():
    """The server shows one member another cohort, model or floor: nobody takes its keys, and it takes nobody's."""
    one = Cohort(min_sum=3).up_to(Step.SHARE)
    other = Cohort(min_sum=4).up_to(Step.SHARE)
    mixed = other.half.pieces(other.plan, other.closed, Step.SHARE, 0).whole
    effect, last = one.members[0].asked(Step.SHARE, mixed)
    assert isinstance(effect, SitOut)
    assert last == Decline()


@pytest.mark.parametrize("step", [Step.SHARE, Step.SUBMIT, Step.CONFIRM, Step.UNMASK])
def test_a_member_that_restarted_is_asked_again_for_nothing_but_its_contribution(step):
    cohort = Cohort().up_to(step)
    sent = cohort.journals[0].contribution[32:]
    cohort.members[0] = MemberRound(
        cohort.plan, cohort.journals[0], lambda: pytest.fail("new secrets for the same round")
    )
    for one in (Step.ADVERTISE, Step.SHARE):
        assert cohort.ask(0, one, b"") is None
    assert cohort.ask(0, Step.SUBMIT, b"") == (sent or None)
    for one in (Step.CONFIRM, Step.UNMASK):
        assert cohort.ask(0, one, b"") is None


def test_a_sum_that_was_revealed_is_repeated_over_the_same_members_only():
    journals = None
    answers = []
    for number, submitters in ((1, range(COUNT)), (2, range(COUNT)), (3, range(1, COUNT)), (4, range(COUNT))):
        cohort = Cohort(number=number, journals=journals).up_to(Step.CONFIRM, submitters)
        confirmed = [n for n in submitters if cohort.ask(n, Step.CONFIRM) is not None]
        answers.append(confirmed)
        if confirmed:
            cohort.close(Step.CONFIRM)
            cohort.close(Step.UNMASK)
        for member, one in cohort.members.items():
            for effect in one.close():
                cohort.journals[member] = effect.journal
        journals = cohort.journals
    everybody = list(range(COUNT))
    assert answers == [everybody, everybody, [], everybody]


def test_without_the_ledger_two_sums_over_lists_that_differ_by_one_member_show_what_it_contributed():
    journals = None
    sums = []
    for number, submitters in ((1, range(COUNT)), (2, range(1, COUNT))):
        cohort = Cohort(number=number, journals=journals)
        running = cohort.half.begin(cohort.plan, LAYOUT)
        for step in cohort.half.steps:
            cohort.close(step, range(COUNT) if step in (Step.ADVERTISE, Step.SHARE) else submitters)
        for vector in cohort.vectors:
            running = cohort.half.added(running, vector)
        sums.append(cohort.half.unmask(cohort.plan, cohort.closed, running).codes)
        journals = {n: replace(journal, ledger=Ledger()) for n, journal in cohort.journals.items()}
    # Everybody contributes ones here.
    assert np.array_equal(sums[0] - sums[1], np.ones(LAYOUT.size, np.uint32))


def test_a_round_number_that_was_joined_is_refused_for_ever():
    cohort = Cohort(number=5).up_to(Step.SHARE)
    for number in (5, 4, 1):
        again = Cohort(number=number, journals=dict(cohort.journals))
        assert again.ask(0, Step.ADVERTISE, b"") is None
        assert again.members[0].reason
