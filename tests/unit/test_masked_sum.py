"""The masked sum, both halves against each other by passing bytes: the honest, the lost, and the dishonest."""

import gc
import os
import pickle
import random
import weakref
from dataclasses import replace
from functools import cache
from unittest import mock

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.crypto import masking
from coterie.crypto import verified as verified_module
from coterie.crypto.identity import Bundle, Identity, countersign
from coterie.crypto.verified import Verified
from coterie.rounds.server_round import in_memory
from coterie.secure_sum.bundles import bundle_to_wire
from coterie.secure_sum.clear import ClearMember, ClearServer
from coterie.secure_sum.contribution import Layout, Segment
from coterie.secure_sum.graph import GraphFields, graph_fields
from coterie.secure_sum.masked import MaskedMember, MaskedServer
from coterie.secure_sum.plan import Member, SumPlan, layout_hash
from coterie.secure_sum.protocol import ClosedSteps, Declined, Failed, Step
from coterie.secure_sum.statements import list_hash
from coterie.store.spool import Spool
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import rounds_pb2 as wire

NOW = 1_000_000
LAYOUT = Layout((Segment("rows", (5, 3), 1.0, 16), Segment.whole("instances", (), 100)))
DIRECTORY = Ed25519PrivateKey.generate()
DIRECTORY_KEY = DIRECTORY.public_key().public_bytes_raw()
VERIFIED = Verified()


@cache
def person(number):
    """An enrolled participant: its keys and their bundle."""
    identity = Identity.generate()
    return identity, countersign(identity.bundle(1, (0, 2 * NOW)), DIRECTORY, f"client/host-{number}")


def small_circulant(members):
    """A rule for graphs that are not complete, small enough to test."""
    return GraphFields(6, 5) if members > 7 else graph_fields(members)


class Cohort:
    """A plan, the server's half and all members' halves, and what the server has heard."""

    def __init__(self, members=6, rule=graph_fields, min_sum=1, layout=LAYOUT, model=bytes(32), users=1):
        self.rule, self.layout = rule, layout
        self.server = MaskedServer(rule, DIRECTORY_KEY, lambda: NOW)
        self.plan = SumPlan(
            "run",
            3,
            "train",
            "masked",
            model,
            layout_hash(layout),
            tuple(Member(person(n)[0].participant_id, f"client/host-{n}", users) for n in range(members)),
            *self.server.plan_fields(members, layout)[:2],
            min_sum,
        )
        self.members = [self.member(n) for n in range(members)]
        rng = np.random.default_rng(members)
        self.codes = [rng.integers(0, 2**32, layout.size, dtype=np.uint32) for _ in range(members)]
        self.closed, self.arrived, self.keep = ClosedSteps(), {}, in_memory
        self.running = np.zeros(layout.size, np.uint32)
        self.transcript = {step: {} for step in MaskedServer.steps}

    def member(self, number, plan=None, **changed):
        identity, bundle = person(number)
        given = {"verified": VERIFIED, "rule": self.rule, **changed}
        return MaskedMember(plan or self.plan, number, identity, bundle, DIRECTORY_KEY, NOW, **given)

    def briefing(self, step, member):
        return self.server.pieces(self.plan, self.closed, step, member).whole

    def ask(self, step, member, briefing=None):
        """Return a member's answer to what the server says, or to something else."""
        if briefing is None:
            briefing = self.briefing(step, member)
        codes = self.codes[member] if step is Step.SUBMIT else None
        return self.members[member].answer(step, briefing, codes)

    def take(self, step, member, message):
        """Let the server check and keep a message."""
        if step is Step.SUBMIT:
            vector = self.server.vector(self.plan, self.closed, self.arrived, member, message, self.layout)
            self.running = self.running + vector.addend
            kept = vector.note
        else:
            self.server.check(self.plan, self.closed, step, member, message)
            kept = message
        self.arrived = self.keep(self.arrived, member, kept)
        self.transcript[step][member] = message

    def close(self, step):
        short = self.server.shortfall(self.plan, self.closed, step, self.arrived)
        if short:
            raise Failed(short)
        self.closed, self.arrived = self.closed.with_step(step, self.arrived), {}

    def step(self, step, lost=()):
        for member in self.server.expected(self.plan, self.closed, step):
            if member not in lost:
                self.take(step, member, self.ask(step, member))
        self.close(step)

    def until(self, last, lost=()):
        """Go through all steps before one; ``lost`` members vanish after having shared."""
        for step in MaskedServer.steps:
            if step is last:
                return self
            self.step(step, lost if step not in (Step.ADVERTISE, Step.SHARE) else ())
        return self

    def total(self):
        return self.server.unmask(self.plan, self.closed, self.running)

    @property
    def clear(self):
        return sum((self.codes[n] for n in self.closed[Step.SUBMIT]), np.zeros(self.layout.size, np.uint32))


# --- the sum is the clear sum --------------------------------------------------------------------------------------


@st.composite
def dropouts(draw, least=2, most=12):
    """A number of members, and who is lost before each step."""
    members = draw(st.integers(least, most))
    few = st.sets(st.integers(0, members - 1), max_size=max(1, members // 4))
    return members, {step: draw(few) for step in MaskedServer.steps}


def play(cohort, lost):
    """Go through a round; returns the total, or what was said when it failed."""
    gone = set()
    try:
        for step in MaskedServer.steps:
            gone |= lost[step]
            cohort.step(step, gone)
        return cohort.total(), ""
    except Failed as failed:
        return None, str(failed)


def revealed(cohort):
    """Revealed shares: by whom, about whom, which kind."""
    for holder, message in cohort.transcript[Step.UNMASK].items():
        for share in wire.Unmasking.FromString(message).shares:
            yield holder, share.member, share.WhichOneof("share")


def check_revealed(cohort):
    submitted = cohort.closed.get(Step.SUBMIT, {})
    by_member = {}
    for holder, member, which in revealed(cohort):
        assert which == ("seed" if member in submitted else "mask")
        by_member.setdefault((holder, member), []).append(which)
    assert all(len(found) == 1 for found in by_member.values())


@given(dropouts())
@settings(deadline=None, max_examples=60)
def test_the_sum_is_the_clear_sum_exactly_or_the_round_fails_below_a_threshold(drawn):
    members, lost = drawn
    cohort = Cohort(members)
    total, reason = play(cohort, lost)
    check_revealed(cohort)
    remaining, enough = set(range(members)), True
    for step in MaskedServer.steps:
        remaining -= lost[step]
        enough = enough and len(remaining) > cohort.plan.threshold
    # With a complete graph, whether it works is a matter of counting.
    assert (total is not None) == enough, reason
    if total is not None:
        assert np.array_equal(total.codes, cohort.clear)
        assert total.wrong == ()


@given(dropouts(least=8, most=16))
@settings(deadline=None, max_examples=40)
def test_on_a_circulant_the_sum_is_the_clear_sum_exactly_or_the_round_fails(drawn):
    members, lost = drawn
    cohort = Cohort(members, rule=small_circulant)
    total, reason = play(cohort, lost)
    check_revealed(cohort)
    if total is not None:
        assert np.array_equal(total.codes, cohort.clear)
    else:
        assert "neighbours" in reason or "users submitted" in reason
    assert total is not None or any(lost.values())


def test_above_a_hundred_members_the_sum_is_right_without_a_tenth_of_them():
    cohort = Cohort(110)
    cohort.until(None, lost=range(0, 110, 10))
    assert cohort.plan.degree < 109
    assert np.array_equal(cohort.total().codes, cohort.clear)


def test_the_floor_counts_users():
    cohort = Cohort(9, min_sum=40, users=5)
    cohort.until(Step.SUBMIT)
    with pytest.raises(Failed, match="35 users submitted, the plan's floor is 40"):
        cohort.step(Step.SUBMIT, lost=(0, 1))
    enough = Cohort(9, min_sum=40, users=5)
    enough.until(None, lost=(0,))
    assert np.array_equal(enough.total().codes, enough.clear)


@given(st.data())
@settings(deadline=None, max_examples=30)
def test_clear_and_masked_sums_of_the_same_contributions_are_the_same(data):
    members = data.draw(st.integers(2, 8))
    masked, clear = Cohort(members), ClearServer()
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    masked.codes = [
        np.concatenate([rng.integers(1, 2**16, 15), rng.integers(28, 229, 1)]).astype(np.uint32)
        for _ in range(members)
    ]
    masked.until(None)
    plan = replace(masked.plan, secure_sum="clear")
    running = np.zeros(LAYOUT.size, np.uint32)
    for member, codes in enumerate(masked.codes):
        message = ClearMember().answer(Step.SUBMIT, b"", codes)
        running = running + clear.vector(plan, {}, {}, member, message, LAYOUT).addend
    total = clear.unmask(plan, {}, running).codes
    assert np.array_equal(masked.total().codes, total)
    for ours, theirs in zip(
        LAYOUT.decode(masked.total().codes, members).values(),
        LAYOUT.decode(total, members).values(),
        strict=True,
    ):
        assert np.array_equal(ours, theirs)


def test_another_server_takes_up_a_round_from_its_closed_steps():
    cohort = Cohort(9)
    for step in MaskedServer.steps:
        cohort.server = MaskedServer(graph_fields)
        cohort.closed = ClosedSteps({done: dict(messages) for done, messages in cohort.closed.items()})
        cohort.step(step, lost=(2,) if step is Step.SUBMIT else ())
    cohort.server = MaskedServer(graph_fields)
    assert np.array_equal(cohort.total().codes, cohort.clear)
    assert np.array_equal(cohort.total().codes, cohort.clear)


@pytest.mark.parametrize(
    ("members", "rule", "gone", "liars"),
    [(12, graph_fields, (2,), (0,)), (9, small_circulant, (), (0,)), (9, small_circulant, (2,), ())],
    ids=["complete", "circulant", "circulant with one lost"],
)
def test_the_server_reads_messages_from_where_they_lie(tmp_path, members, rule, gone, liars):
    """Also where shares were wrong: those of others are then read, too."""
    there, here = Cohort(members, rule), Cohort(members, rule)
    there.keep = Spool(tmp_path, 0).keep
    for step in MaskedServer.steps:
        for member in there.server.expected(there.plan, there.closed, step):
            if step is Step.SUBMIT and member in gone:
                continue
            if step is Step.SUBMIT:
                # What was told is what another server reads out of messages in memory.
                here.closed = ClosedSteps({one: dict(messages) for one, messages in there.closed.items()})
                assert (
                    there.briefing(step, member)
                    == here.server.pieces(there.plan, here.closed, step, member).whole
                )
            message = there.ask(step, member)
            if step is Step.UNMASK and member in liars:
                message = lie(message)
            there.take(step, member, message)
        there.close(step)
    total = there.total()
    assert np.array_equal(total.codes, there.clear)
    assert total.wrong == liars


def delimited(number, payload):
    """A field of bytes as protobuf writes it."""
    length = len(payload)
    return bytes([number << 3 | 2, length & 0x7F | 0x80, length >> 7]) + payload


def test_shares_reach_their_receivers_however_their_message_was_written():
    cohort = Cohort(6)
    cohort.step(Step.ADVERTISE)
    plain = {member: cohort.ask(Step.SHARE, member) for member in range(6)}
    for member, message in plain.items():
        shares = wire.Shares.FromString(message)
        # Fields in another order, one twice (the last one counts), lengths longer than they need be, and one that
        # nobody knows.
        written = b"".join(
            delimited(
                1,
                delimited(2, shares.shares[0].sealed)
                + delimited(2, share.sealed)
                + delimited(9, share.sealed[:40])
                + bytes([8, share.member]),
            )
            for share in shares.shares
        )
        cohort.take(Step.SHARE, member, delimited(2, shares.seed_hash) + written)
    cohort.close(Step.SHARE)
    for receiver in range(6):
        inbox = wire.ShareInbox.FromString(cohort.briefing(Step.SUBMIT, receiver))
        sent = {
            sender: share.sealed
            for sender, message in plain.items()
            for share in wire.Shares.FromString(message).shares
            if share.member == receiver
        }
        assert {share.member: share.sealed for share in inbox.shares} == sent
    for step in (Step.SUBMIT, Step.CONFIRM, Step.UNMASK):
        cohort.step(step)
    assert np.array_equal(cohort.total().codes, cohort.clear)


@pytest.mark.parametrize("ends", [True, False], ids=["known", "broken off"])
def test_the_server_holds_no_messages_of_a_sum_that_is_over(tmp_path, ends):
    cohort = Cohort(5)
    spool = Spool(tmp_path, 0)
    cohort.keep, gone = spool.keep, weakref.ref(spool)
    for step in MaskedServer.steps:
        cohort.step(step)
    if ends:
        cohort.total()
    server, cohort, spool = cohort.server, None, None
    gc.collect()
    assert gone() is None
    assert server.steps


def test_one_server_can_serve_two_rounds_in_turn():
    one, two = Cohort(4), Cohort(5, model=b"\x01" * 32)
    two.server = one.server
    for step in MaskedServer.steps:
        one.step(step)
        two.step(step)
    assert np.array_equal(one.total().codes, one.clear)
    assert np.array_equal(two.total().codes, two.clear)


def test_the_running_sum_stays_as_it_was():
    cohort = Cohort(3).until(None)
    before = cohort.running.copy()
    cohort.total()
    assert np.array_equal(cohort.running, before)


def test_one_member_alone_is_refused():
    with pytest.raises(Failed):
        MaskedServer().plan_fields(1, LAYOUT)


# --- shares that do not open ---------------------------------------------------------------------------------------


def spoil(cohort, pairs):
    """Turn a bit of what each first of a pair sealed for the second, on the way."""
    for sender, receiver in pairs:
        shares = wire.Shares.FromString(cohort.closed[Step.SHARE][sender])
        for share in shares.shares:
            if share.member == receiver:
                share.sealed = bytes([share.sealed[0] ^ 1]) + share.sealed[1:]
        cohort.closed = cohort.closed.without(Step.SHARE).with_step(
            Step.SHARE, {**cohort.closed[Step.SHARE], sender: shares.SerializeToString()}
        )


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_members_whose_shares_do_not_open_are_left_out_and_the_sum_stays_exact(data):
    members = data.draw(st.integers(5, 12))
    cohort = Cohort(members, rule=data.draw(st.sampled_from([graph_fields, small_circulant])))
    cohort.until(Step.SUBMIT)
    numbers = st.integers(0, members - 1)
    pairs = data.draw(
        st.sets(st.tuples(numbers, numbers).filter(lambda pair: pair[0] != pair[1]), max_size=3)
    )
    spoil(cohort, pairs)
    refused, reasons = set(), set()
    for member in data.draw(st.permutations(range(members))):
        try:
            cohort.take(Step.SUBMIT, member, cohort.ask(Step.SUBMIT, member))
        except (Refusal, Declined) as refusal:
            reasons.add(getattr(refusal, "reason", None))
            refused.add(member)
    assert len(refused) <= len(pairs)
    assert reasons <= {None, ErrorReason.ERROR_REASON_CONFLICT}
    try:
        cohort.close(Step.SUBMIT)
        cohort.step(Step.CONFIRM)
        cohort.step(Step.UNMASK)
    except (Failed, Declined):
        assert refused
        return
    check_revealed(cohort)
    assert np.array_equal(cohort.total().codes, cohort.clear)


def test_whoever_submits_first_settles_whether_there_is_a_mask():
    cohort = Cohort(9)
    cohort.until(Step.SUBMIT)
    spoil(cohort, [(0, 1)])
    first = {}
    for order in ((0, 1), (1, 0)):
        cohort.arrived = {}
        for member in order:
            first.setdefault(member, cohort.ask(Step.SUBMIT, member))
        cohort.take(Step.SUBMIT, order[0], first[order[0]])
        with pytest.raises(Refusal, match="do not agree") as caught:
            cohort.take(Step.SUBMIT, order[1], first[order[1]])
        assert caught.value.reason == ErrorReason.ERROR_REASON_CONFLICT
        assert list(cohort.arrived) == [order[0]]


def test_two_members_that_leave_each_other_out_are_both_summed():
    cohort = Cohort(9)
    cohort.until(Step.SUBMIT)
    spoil(cohort, [(0, 1), (1, 0)])
    cohort.step(Step.SUBMIT)
    cohort.step(Step.CONFIRM)
    cohort.step(Step.UNMASK)
    assert (0, 1, "seed") not in set(revealed(cohort))
    assert np.array_equal(cohort.total().codes, cohort.clear)


def test_a_mask_that_a_neighbour_left_out_is_not_taken_off_when_its_owner_is_lost():
    cohort = Cohort(12).until(Step.SUBMIT)
    spoil(cohort, [(0, 1)])
    for step in (Step.SUBMIT, Step.CONFIRM, Step.UNMASK):
        cohort.step(step, lost=(0,))
    assert (2, 0, "mask") in set(revealed(cohort))
    assert np.array_equal(cohort.total().codes, cohort.clear)


# --- wrong answers -------------------------------------------------------------------------------------------------


def lie(message, about=None):
    """Return what a member reveals with other numbers for its shares."""
    unmasking = wire.Unmasking.FromString(message)
    for share in unmasking.shares:
        if about is None or share.member in about:
            which = share.WhichOneof("share")
            setattr(share, which, b"\x00" + os.urandom(32))
    return unmasking.SerializeToString()


@given(st.data())
@settings(deadline=None, max_examples=15)
def test_members_that_reveal_wrong_shares_are_named_and_the_sum_is_exact(data):
    cohort = Cohort(12)
    cohort.until(Step.UNMASK, lost=(11,))
    # Shares are asked for in order until there are enough, so that those of the first nine members are used.
    liars = data.draw(st.sets(st.integers(0, 8), min_size=1, max_size=2))
    for member in cohort.server.expected(cohort.plan, cohort.closed, Step.UNMASK):
        message = cohort.ask(Step.UNMASK, member)
        cohort.take(Step.UNMASK, member, lie(message) if member in liars else message)
    cohort.close(Step.UNMASK)
    # Of 10 or 11 shares 9 are right: with two liars, the secret of an honest member has 10 shares, 8 of them right.
    if len(liars) == 1:
        total = cohort.total()
        assert np.array_equal(total.codes, cohort.clear)
        assert total.wrong == tuple(liars)
    else:
        with pytest.raises(Failed, match="dealt wrong ones"):
            cohort.total()


def test_a_sum_that_cannot_be_formed_names_those_caught_before():
    cohort = Cohort(12)
    cohort.until(Step.UNMASK)
    for member in range(12):
        message = cohort.ask(Step.UNMASK, member)
        about = {0: None, 1: {5, 6, 7, 8, 9, 10, 11}, 2: {11}}.get(member, set())
        cohort.take(Step.UNMASK, member, lie(message, about))
    cohort.close(Step.UNMASK)
    with pytest.raises(Failed) as caught:
        cohort.total()
    assert caught.value.wrong == (0, 1)


def test_with_too_few_answers_the_round_fails():
    cohort = Cohort(6)
    cohort.until(Step.UNMASK)
    with pytest.raises(Failed, match="fewer than 5 neighbours"):
        cohort.step(Step.UNMASK, lost=(0,))


# --- what members refuse -------------------------------------------------------------------------------------------


def declines(cohort, step, member, briefing, words):
    with pytest.raises(Declined, match=words):
        cohort.ask(step, member, briefing)
    # It has left, and says no more to anything.
    for again in MaskedServer.steps:
        with pytest.raises(Declined, match="has left the round"):
            cohort.ask(again, member, b"")


def adverts_for(cohort, member):
    return wire.Adverts.FromString(cohort.briefing(Step.SHARE, member))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"secure_sum": "clear"}, "expected 'masked'"),
        ({"threshold": 4}, "expected 5 and at least 5"),
        ({"degree": 4, "threshold": 4}, "degree 4"),
        ({"min_sum": 0}, "floor of 0"),
        ({"min_sum": 7}, "floor of 7"),
        ({"members": ()}, "does not have this participant"),
    ],
)
def test_a_member_declines_a_plan_that_does_not_protect_it(changed, words):
    cohort = Cohort(6)
    member = cohort.member(2, replace(cohort.plan, **changed))
    with pytest.raises(Declined, match=words):
        member.answer(Step.ADVERTISE, b"")


def test_a_member_declines_a_cohort_without_itself_or_with_somebody_twice():
    cohort = Cohort(6)
    others = cohort.plan.members
    for members, words in (
        ((*others[:2], others[3], *others[3:]), "does not have"),
        ((*others[:5], others[0]), "twice"),
    ):
        with pytest.raises(Declined, match=words):
            cohort.member(2, replace(cohort.plan, members=members)).answer(Step.ADVERTISE, b"")


def test_a_member_declines_another_participants_bundle():
    cohort = Cohort(6)
    member = MaskedMember(cohort.plan, 2, person(2)[0], person(3)[1], DIRECTORY_KEY, NOW)
    with pytest.raises(Declined, match="another participant's"):
        member.answer(Step.ADVERTISE, b"")


def test_a_cohort_of_one_is_declined():
    cohort = Cohort(2)
    plan = replace(cohort.plan, members=cohort.plan.members[:1], degree=0, threshold=0)
    with pytest.raises(Declined, match="at least 2"):
        cohort.member(0, plan).answer(Step.ADVERTISE, b"")


def test_members_that_were_shown_different_plans_get_no_shares_from_each_other():
    cohort = Cohort(6).until(Step.SHARE)
    other = replace(cohort.plan, model_sha256=b"\x07" * 32)
    stranger = cohort.member(4, other)
    advert = stranger.answer(Step.ADVERTISE, b"")
    cohort.closed = cohort.closed.without(Step.ADVERTISE).with_step(
        Step.ADVERTISE, {**cohort.closed[Step.ADVERTISE], 4: advert}
    )
    for member in (0, 1, 2, 3, 5):
        declines(cohort, Step.SHARE, member, None, "advertisement of member 4 for this plan")
    with pytest.raises(Declined, match="for this plan"):
        stranger.answer(Step.SHARE, cohort.briefing(Step.SHARE, 4))


def swap_key(adverts):
    adverts.adverts[0].channel_public = masking.RoundKey().public


def swap_mask(adverts):
    adverts.adverts[0].mask_public = masking.RoundKey().public


def swap_identity(adverts):
    adverts.adverts[0].bundle.CopyFrom(bundle_to_wire(person(50)[1]))


def repeat_key(adverts):
    adverts.adverts[0].mask_public = adverts.adverts[1].mask_public


def repeat_advert(adverts):
    adverts.adverts[1].CopyFrom(adverts.adverts[0])


def unlisted(adverts):
    adverts.adverts[-1].member = 77


def too_few(adverts):
    del adverts.adverts[0]


def not_countersigned(adverts):
    adverts.adverts[0].bundle.countersignature = bytes(64)


def of_another_party(adverts):
    """The neighbour's keys, as a party enrolled them that the plan does not name."""
    _, bundle = person(adverts.adverts[0].member)
    adverts.adverts[0].bundle.CopyFrom(bundle_to_wire(countersign(bundle, DIRECTORY, "client/elsewhere")))


def as_earlier(adverts):
    """The neighbour's keys as earlier releases countersigned them, without their party."""
    adverts.adverts[0].bundle.ClearField("party")


def turned_round(adverts):
    last = wire.Advert()
    last.CopyFrom(adverts.adverts[-1])
    del adverts.adverts[-1]
    adverts.adverts.insert(0, last)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (swap_key, "advertisement of member 0"),
        (swap_mask, "advertisement of member 0"),
        (swap_identity, "another participant's keys"),
        (repeat_key, "twice"),
        (repeat_advert, "no ascending list"),
        (unlisted, "no ascending list of neighbours"),
        (too_few, "4 neighbours advertised, and it takes 5"),
        (not_countersigned, "directory"),
        (of_another_party, "is of 'client/elsewhere', expected 'client/host-0'"),
        (as_earlier, "does not name its party"),
        (turned_round, "no ascending list"),
    ],
)
def test_a_member_declines_advertisements_that_were_changed(change, words):
    cohort = Cohort(6).until(Step.SHARE)
    adverts = adverts_for(cohort, 5)
    change(adverts)
    declines(cohort, Step.SHARE, 5, adverts.SerializeToString(), words)


def test_members_of_a_sum_are_of_one_role():
    cohort = Cohort(6).until(Step.ADVERTISE)
    identity, bundle = person(5)
    members = (*cohort.plan.members[:5], replace(cohort.plan.members[5], device="data-owner/comedy"))
    plan = replace(cohort.plan, members=members)
    owner = countersign(bundle, DIRECTORY, "data-owner/comedy")
    sides = [MaskedMember(plan, n, *person(n), DIRECTORY_KEY, NOW) for n in range(5)]
    sides.append(MaskedMember(plan, 5, identity, owner, DIRECTORY_KEY, NOW))
    adverts = [wire.Advert.FromString(one.answer(Step.ADVERTISE, b"")) for one in sides]
    with pytest.raises(Declined, match="member 5 is enrolled as a data-owner, not as a client"):
        sides[0].answer(Step.SHARE, wire.Adverts(adverts=adverts[1:]).SerializeToString())


def test_a_member_takes_no_part_as_one_of_another_party():
    plan = Cohort(6).plan
    identity, bundle = person(2)
    elsewhere = countersign(bundle, DIRECTORY, "client/elsewhere")
    with pytest.raises(Declined, match="is of 'client/elsewhere', expected 'client/host-2'"):
        MaskedMember(plan, 2, identity, elsewhere, DIRECTORY_KEY, NOW).answer(Step.ADVERTISE, b"")


def test_a_member_declines_its_own_key_under_anothers_name():
    cohort = Cohort(6).until(Step.SHARE)
    adverts = adverts_for(cohort, 5)
    own = wire.Advert.FromString(cohort.closed[Step.ADVERTISE][5])
    adverts.adverts[0].channel_public = own.channel_public
    declines(cohort, Step.SHARE, 5, adverts.SerializeToString(), "twice")


def test_a_bundle_that_has_expired_is_declined_also_when_it_was_verified_before():
    cohort = Cohort(6).until(Step.SHARE)
    late = MaskedMember(cohort.plan, 5, *person(5), DIRECTORY_KEY, 3 * NOW, VERIFIED)
    late.answer(Step.ADVERTISE, b"")
    with pytest.raises(Declined, match="expired"):
        late.answer(Step.SHARE, cohort.briefing(Step.SHARE, 5))


def test_a_member_with_too_few_shares_leaves():
    cohort = Cohort(6).until(Step.SUBMIT)
    inbox = wire.ShareInbox.FromString(cohort.briefing(Step.SUBMIT, 0))
    del inbox.shares[2]
    declines(cohort, Step.SUBMIT, 0, inbox.SerializeToString(), "4 neighbours shared")
    spoil(cohort, [(3, 1)])
    declines(cohort, Step.SUBMIT, 1, None, "4 neighbours sent shares that open")


def test_a_share_under_another_senders_name_does_not_open():
    cohort = Cohort(12).until(Step.SUBMIT)
    inbox = wire.ShareInbox.FromString(cohort.briefing(Step.SUBMIT, 0))
    first, second = inbox.shares[0].sealed, inbox.shares[1].sealed
    inbox.shares[0].sealed, inbox.shares[1].sealed = second, first
    message = wire.SummedVector.FromString(cohort.ask(Step.SUBMIT, 0, inbox.SerializeToString()))
    assert list(message.left_out) == [1, 2]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], "does not have this member"),
        ([0, 1, 2, 3, 4, 5, 6], "6 neighbours submitted, and it takes 7"),
        ([0, 1, 2, 3], "4 users, the plan's floor is 7"),
        ([0, 2, 1, 3, 4, 5, 6, 7], "does not ascend"),
        ([0, 1, 1, 2, 3, 4, 5, 6, 7], "does not ascend"),
        ([0, 1, 2, 3, 4, 5, 6, 7, 9], "does not ascend within the cohort"),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8], "did not share"),
    ],
)
def test_a_member_declines_a_list_of_submitters_that_does_not_protect_it(members, words):
    cohort = Cohort(9, min_sum=7)
    cohort.step(Step.ADVERTISE)
    cohort.step(Step.SHARE, lost=(8,))
    cohort.step(Step.SUBMIT)
    briefing = wire.Submitters(members=members).SerializeToString()
    declines(cohort, Step.CONFIRM, 0, briefing, words)


def test_a_member_confirms_no_list_with_a_participant_that_was_revoked():
    cohort = Cohort(9, min_sum=7)
    revoked = cohort.plan.members[8].participant
    # A mark of its own: members of one host share what they know of a list.
    cohort.members[0] = cohort.member(0, revoked={revoked}, verified=Verified())
    cohort.step(Step.ADVERTISE)
    cohort.step(Step.SHARE)
    cohort.step(Step.SUBMIT)
    briefing = wire.Submitters(members=range(9)).SerializeToString()
    assert cohort.ask(Step.CONFIRM, 1, briefing)
    declines(cohort, Step.CONFIRM, 0, briefing, "the list of submitters has 1 members that are revoked")


def test_a_member_confirms_a_list_without_the_participant_that_was_revoked():
    cohort = Cohort(9, min_sum=7)
    cohort.members[0] = cohort.member(0, revoked={cohort.plan.members[8].participant}, verified=Verified())
    cohort.step(Step.ADVERTISE)
    cohort.step(Step.SHARE)
    cohort.step(Step.SUBMIT, lost=(8,))
    assert cohort.ask(Step.CONFIRM, 0)


def test_a_server_that_shows_different_lists_gets_nothing():
    cohort = Cohort(9).until(Step.CONFIRM)
    lists = [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 8]]
    confirmed = {}
    for member in range(9):
        shown = lists[member % 2] if member < 7 else lists[member - 7]
        confirmed[member] = cohort.ask(
            Step.CONFIRM, member, wire.Submitters(members=shown).SerializeToString()
        )
    for member in range(9):
        shown = lists[member % 2] if member < 7 else lists[member - 7]
        others = [wire.Confirmation.FromString(confirmed[n]) for n in shown if n != member]
        briefing = wire.Confirmations(confirmations=others).SerializeToString()
        declines(cohort, Step.UNMASK, member, briefing, "does not carry a signature|it takes")


def test_confirmations_of_the_same_list_only_are_too_few_when_lists_differ():
    cohort = Cohort(9).until(Step.CONFIRM)
    shown = [0, 1, 2, 3, 4, 5, 6, 7]
    briefing = wire.Submitters(members=shown).SerializeToString()
    confirmed = [wire.Confirmation.FromString(cohort.ask(Step.CONFIRM, n, briefing)) for n in range(6)]
    briefing = wire.Confirmations(confirmations=confirmed[1:]).SerializeToString()
    declines(cohort, Step.UNMASK, 0, briefing, "5 neighbours confirmed, and it takes 7")


def test_a_confirmation_that_is_counted_twice_or_is_its_own_is_declined():
    cohort = Cohort(6).until(Step.UNMASK)
    confirmations = wire.Confirmations.FromString(cohort.briefing(Step.UNMASK, 0))
    confirmations.confirmations[1].CopyFrom(confirmations.confirmations[0])
    declines(cohort, Step.UNMASK, 0, confirmations.SerializeToString(), "no ascending list")
    own = wire.Confirmations.FromString(cohort.briefing(Step.UNMASK, 1))
    own.confirmations[0].CopyFrom(wire.Confirmation.FromString(cohort.closed[Step.CONFIRM][1]))
    declines(cohort, Step.UNMASK, 1, own.SerializeToString(), "no ascending list")


def test_nobody_confirms_a_second_list():
    cohort = Cohort(9).until(Step.CONFIRM)
    first = cohort.ask(Step.CONFIRM, 0)
    assert cohort.ask(Step.CONFIRM, 0) == first
    fewer = wire.Submitters(members=range(8)).SerializeToString()
    declines(cohort, Step.CONFIRM, 0, fewer, "confirm again, with something else")


def test_nobody_answers_a_second_unmasking():
    cohort = Cohort(9).until(Step.UNMASK)
    first = cohort.ask(Step.UNMASK, 0)
    assert cohort.ask(Step.UNMASK, 0) == first
    fewer = wire.Confirmations.FromString(cohort.briefing(Step.UNMASK, 0))
    del fewer.confirmations[0]
    declines(cohort, Step.UNMASK, 0, fewer.SerializeToString(), "unmask again, with something else")


def test_every_step_is_answered_with_the_same_bytes_again():
    cohort = Cohort(6)
    for step in MaskedServer.steps:
        for member in range(6):
            message = cohort.ask(step, member)
            cohort.codes[member] = cohort.codes[member] + np.uint32(step is Step.SUBMIT)
            assert cohort.ask(step, member) == message
            cohort.codes[member] = cohort.codes[member] - np.uint32(step is Step.SUBMIT)
            cohort.take(step, member, message)
        cohort.close(step)
    assert np.array_equal(cohort.total().codes, cohort.clear)


@pytest.mark.parametrize("step", [step for step in MaskedServer.steps if step is not Step.ADVERTISE])
def test_a_step_out_of_order_is_declined(step):
    cohort = Cohort(6)
    declines(cohort, step, 0, b"", f"asked to {step.value} before advertise")


def test_a_step_cannot_be_skipped():
    cohort = Cohort(6).until(Step.SUBMIT)
    declines(cohort, Step.CONFIRM, 0, b"", "asked to confirm before submit")


def test_a_contribution_of_another_kind_stays_at_home():
    for codes in (None, np.zeros(16, np.int64), np.zeros((4, 4), np.uint32)):
        cohort = Cohort(6).until(Step.SUBMIT)
        cohort.codes[0] = codes
        declines(cohort, Step.SUBMIT, 0, None, "contribution")


def test_a_member_that_forgets_answers_nothing_and_holds_nothing():
    cohort = Cohort(6).until(Step.CONFIRM)
    member = cohort.members[0]
    member.forget()
    with pytest.raises(Declined, match="wiped"):
        member.answer(Step.CONFIRM, cohort.briefing(Step.CONFIRM, 0))
    assert not any(member._seed)
    assert not member._held
    assert not member._met


def test_a_members_half_is_neither_shown_nor_pickled():
    member = Cohort(3).until(Step.SUBMIT).members[0]
    assert member._mask.secret.hex()[:8] not in repr(member)
    with pytest.raises(TypeError):
        pickle.dumps(member)


def on_hosts(members, hosts, **given):
    """A cohort whose members are spread over hosts, and what each host remembers."""
    cohort, shared = Cohort(members, **given), [Verified() for _ in range(hosts)]
    cohort.members = [cohort.member(n, verified=shared[n % hosts]) for n in range(members)]
    return cohort, shared


@pytest.fixture
def counted(monkeypatch):
    """Computations that were really made: signatures checked, keys agreed."""
    made = {"signatures": 0, "bundles": 0, "agreements": 0}

    def counting(whole, what):
        def call(*given):
            made[what] += 1
            return whole(*given)

        return call

    # Statements alone, not the signatures of bundles.
    checks = counting(verified_module.check_signature, "signatures")
    monkeypatch.setattr(verified_module, "check_signature", checks)
    monkeypatch.setattr(Bundle, "verify", counting(Bundle.verify, "bundles"))
    monkeypatch.setattr(masking.RoundKey, "agree", counting(masking.RoundKey.agree, "agreements"))
    return made


def test_members_of_one_host_check_and_agree_everything_once(counted):
    cohort, _ = on_hosts(8, 2)
    # It has a memory of its own, and its checks are not counted here.
    cohort.server.check = lambda *given: None
    cohort.until(Step.SUBMIT)
    # Of four at home, whose own signatures need no check, and four elsewhere.
    assert counted["bundles"] == 2 * 8
    assert counted["signatures"] == 2 * 4
    # One channel agreement for each pair at home; two, one at either end, for each pair that is apart.
    assert counted["agreements"] == 2 * 6 + 2 * 16
    cohort.step(Step.SUBMIT)
    assert counted["agreements"] == 2 * (2 * 6 + 2 * 16)
    before = counted["signatures"]
    cohort.step(Step.CONFIRM)
    cohort.step(Step.UNMASK)
    assert counted["signatures"] - before == 2 * 4
    assert np.array_equal(cohort.total().codes, cohort.clear)


@given(dropouts(), st.integers(1, 3))
@settings(deadline=None, max_examples=30)
def test_the_sum_over_members_that_share_hosts_is_the_clear_sum_or_the_round_fails(drawn, hosts):
    members, lost = drawn
    cohort, _ = on_hosts(members, hosts)
    total, _ = play(cohort, lost)
    check_revealed(cohort)
    if total is not None:
        assert np.array_equal(total.codes, cohort.clear)


def forged_signature(advert):
    advert.signature = advert.signature[:-1] + bytes([advert.signature[-1] ^ 1])


def other_key(advert):
    advert.mask_public = masking.RoundKey().public


@pytest.mark.parametrize("change", [forged_signature, other_key])
def test_a_forged_advertisement_is_refused_by_a_host_that_knows_the_right_one(change):
    cohort, _ = on_hosts(8, 1)
    cohort.until(Step.SHARE)
    cohort.ask(Step.SHARE, 0)
    adverts = adverts_for(cohort, 5)
    change(adverts.adverts[1])
    declines(cohort, Step.SHARE, 5, adverts.SerializeToString(), "does not carry a signature")


def test_a_forged_confirmation_is_refused_by_a_host_that_knows_the_right_one():
    cohort, _ = on_hosts(8, 1)
    cohort.until(Step.UNMASK)
    cohort.ask(Step.UNMASK, 0)
    briefing = wire.Confirmations.FromString(cohort.briefing(Step.UNMASK, 5))
    forged_signature(briefing.confirmations[2])
    declines(cohort, Step.UNMASK, 5, briefing.SerializeToString(), "does not carry a signature")


def test_a_bundle_that_expired_is_refused_by_a_host_where_it_was_good_a_moment_ago():
    cohort, (shared,) = on_hosts(6, 1)
    cohort.members[5] = MaskedMember(cohort.plan, 5, *person(5), DIRECTORY_KEY, 3 * NOW, shared)
    cohort.until(Step.SHARE)
    cohort.ask(Step.SHARE, 0)
    declines(cohort, Step.SHARE, 5, None, "expired")


def test_what_a_host_knows_of_a_round_is_gone_with_its_last_member():
    cohort, (shared,) = on_hosts(6, 1)
    cohort.until(Step.CONFIRM)
    assert list(shared._rounds) == [cohort.plan.hash]
    for member in cohort.members[:-1]:
        member.forget()
    assert len(shared._rounds) == 1
    with pytest.raises(Declined):
        cohort.members[-1].answer(Step.UNMASK, b"")
    assert not shared._rounds


def test_a_host_keeps_no_secret_of_a_pair_that_both_have_taken():
    cohort, (shared,) = on_hosts(6, 1)
    cohort.until(Step.SHARE)
    host = shared.round(cohort.plan.hash)
    for member, left in enumerate((5, 8, 9, 8, 5, 0)):
        cohort.take(Step.SHARE, member, cohort.ask(Step.SHARE, member))
        assert len(host._secrets) == left
    cohort.close(Step.SHARE)
    cohort.step(Step.SUBMIT)
    assert not host._secrets


def contributions(hosts, damaged):
    """Messages of some hosts' members until SUBMIT, with the same randomness each time, and some shares damaged."""
    with mock.patch("os.urandom", random.Random(5).randbytes):
        cohort, _ = on_hosts(9, hosts)
        cohort.until(Step.SUBMIT)
        found = dict(cohort.closed)
        for member in (4, 0, 8, 1, 2, 7, 3, 6, 5):
            inbox = wire.ShareInbox.FromString(cohort.briefing(Step.SUBMIT, member))
            for share in inbox.shares:
                if (share.member, member) in damaged:
                    share.sealed = bytes(len(share.sealed))
            found[member] = cohort.ask(Step.SUBMIT, member, inbox.SerializeToString())
    return found


@pytest.mark.parametrize(
    "damaged",
    [set(), {(2, 6), (6, 2)}, {(4, 0), (2, 7)}, {(0, 4), (7, 2)}],
    ids=["none", "both ways", "of the first for the second", "of the second for the first"],
)
def test_members_send_the_same_bytes_whoever_shares_their_host(damaged):
    alone = contributions(9, damaged)
    for hosts in (1, 2, 3):
        assert contributions(hosts, damaged) == alone


def test_masks_that_wait_for_members_are_gone_when_these_have_them():
    cohort, (shared,) = on_hosts(6, 1)
    cohort.until(Step.SUBMIT)
    host = shared.round(cohort.plan.hash)
    waiting = []
    for member in range(6):
        cohort.ask(Step.SUBMIT, member)
        waiting.append(len(host._waiting))
    assert waiting == [5, 4, 3, 2, 1, 0]


# --- what the server refuses ---------------------------------------------------------------------------------------


def refused(cohort, step, member, message, words=None, reason=None):
    before = (dict(cohort.arrived), cohort.running.copy())
    with pytest.raises(Refusal, match=words) as caught:
        cohort.take(step, member, message)
    assert reason is None or caught.value.reason == reason
    assert dict(cohort.arrived) == before[0]
    assert np.array_equal(cohort.running, before[1])


def test_the_server_refuses_an_advertisement_of_somebody_else():
    cohort = Cohort(6)
    message = cohort.ask(Step.ADVERTISE, 1)
    refused(cohort, Step.ADVERTISE, 0, message, "another than member 0")
    advert = wire.Advert.FromString(message)
    advert.member = 0
    refused(cohort, Step.ADVERTISE, 0, advert.SerializeToString(), "another than member 0")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"signature": bytes(64)}, "signature"),
        ({"channel_public": bytes(32)}, "low order"),
        ({"mask_public": b"short"}, "32 bytes"),
        ({"signature": bytes(2000)}, "at most 1024 bytes"),
    ],
)
def test_the_server_refuses_an_advertisement_that_neighbours_would_not_take(changed, words):
    cohort = Cohort(6)
    advert = wire.Advert.FromString(cohort.ask(Step.ADVERTISE, 0))
    for name, value in changed.items():
        setattr(advert, name, value)
    refused(cohort, Step.ADVERTISE, 0, advert.SerializeToString(), words)


def test_the_server_refuses_one_key_for_two_purposes_and_a_bundle_without_the_directory():
    cohort = Cohort(6)
    advert = wire.Advert.FromString(cohort.ask(Step.ADVERTISE, 0))
    twice = wire.Advert.FromString(advert.SerializeToString())
    twice.mask_public = twice.channel_public
    refused(cohort, Step.ADVERTISE, 0, twice.SerializeToString(), "two purposes")
    advert.bundle.countersignature = bytes(64)
    refused(cohort, Step.ADVERTISE, 0, advert.SerializeToString(), "directory")


def test_the_server_refuses_shares_for_others_than_the_neighbours():
    cohort = Cohort(6).until(Step.SHARE)
    shares = wire.Shares.FromString(cohort.ask(Step.SHARE, 0))
    for change in ("fewer", "short", "hash"):
        wrong = wire.Shares.FromString(shares.SerializeToString())
        if change == "fewer":
            del wrong.shares[1]
        elif change == "short":
            wrong.shares[1].sealed = bytes(80)
        else:
            wrong.seed_hash = b""
        refused(cohort, Step.SHARE, 0, wrong.SerializeToString())


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"codes": bytes(4)}, ErrorReason.ERROR_REASON_WRONG_SHAPE),
        ({"codes": bytes(64)}, ErrorReason.ERROR_REASON_BAD_SIGNATURE),
        ({"signature": bytes(64)}, ErrorReason.ERROR_REASON_BAD_SIGNATURE),
        ({"left_out": [1, 2, 3]}, ErrorReason.ERROR_REASON_BELOW_FLOOR),
        ({"left_out": [2, 1]}, ErrorReason.ERROR_REASON_INVALID_FIELD),
        ({"left_out": [0]}, ErrorReason.ERROR_REASON_INVALID_FIELD),
        ({"left_out": [8]}, ErrorReason.ERROR_REASON_INVALID_FIELD),
        ({"left_out": [99]}, ErrorReason.ERROR_REASON_INVALID_FIELD),
    ],
)
def test_the_server_refuses_a_contribution_that_does_not_fit(changed, reason):
    cohort = Cohort(9)
    cohort.step(Step.ADVERTISE)
    cohort.step(Step.SHARE, lost=(8,))
    vector = wire.SummedVector.FromString(cohort.ask(Step.SUBMIT, 0))
    for name, value in changed.items():
        if name == "left_out":
            vector.left_out.extend(value)
        else:
            setattr(vector, name, value)
    refused(cohort, Step.SUBMIT, 0, vector.SerializeToString(), reason=reason)


def test_the_server_refuses_a_contribution_of_a_member_that_did_not_share():
    cohort = Cohort(9)
    cohort.step(Step.ADVERTISE)
    cohort.step(Step.SHARE, lost=(8,))
    refused(cohort, Step.SUBMIT, 8, cohort.ask(Step.SUBMIT, 0), "member 8 did not share")
    with pytest.raises(Refusal):
        cohort.server.check(cohort.plan, cohort.closed, Step.SUBMIT, 0, b"")


def test_the_server_refuses_a_confirmation_of_another_list_or_by_another():
    cohort = Cohort(9).until(Step.CONFIRM)
    shown = wire.Submitters(members=range(8)).SerializeToString()
    message = cohort.ask(Step.CONFIRM, 0, shown)
    refused(cohort, Step.CONFIRM, 0, message, reason=ErrorReason.ERROR_REASON_BAD_SIGNATURE)
    refused(cohort, Step.CONFIRM, 1, message, "another than member 1")


def test_the_server_refuses_shares_that_were_not_asked_for():
    cohort = Cohort(9).until(Step.UNMASK, lost=(8,))
    unmasking = wire.Unmasking.FromString(cohort.ask(Step.UNMASK, 0))
    for change in ("fewer", "both", "prime"):
        wrong = wire.Unmasking.FromString(unmasking.SerializeToString())
        if change == "fewer":
            del wrong.shares[1]
        elif change == "both":
            wrong.shares[0].mask = wrong.shares[0].seed
        else:
            wrong.shares[0].seed = b"\xff" * 33
        refused(cohort, Step.UNMASK, 0, wrong.SerializeToString())


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_damaged_messages_are_refused_or_declined_and_nothing_else_happens(data):
    cohort = Cohort(4)
    step = data.draw(st.sampled_from(list(MaskedServer.steps)))
    cohort.until(step)
    original = cohort.briefing(step, 0) if data.draw(st.booleans()) else None
    victim = original if original is not None else cohort.ask(step, 0)
    damaged = bytearray(victim or b"\x00")
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    try:
        if original is not None:
            cohort.ask(step, 0, damaged)
        else:
            cohort.take(step, 0, damaged)
    except (Refusal, Declined):
        pass


# --- what the server sees ------------------------------------------------------------------------------------------


WIDE = Layout((Segment("rows", (20_000,), 1.0, 16),))


def seen(transcript, member):
    """The codes of a member's contribution, as the server saw them."""
    return np.frombuffer(wire.SummedVector.FromString(transcript[Step.SUBMIT][member]).codes, "<u4")


@pytest.fixture(scope="module")
def recorded():
    cohort = Cohort(9, layout=WIDE)
    rng = np.random.default_rng(7)
    # What contributions look like: mostly zero (code 2^15), a few values.
    cohort.codes = [
        (2**15 + (rng.random(WIDE.size) < 0.05) * rng.integers(-9000, 9000, WIDE.size)).astype(np.uint32)
        for _ in range(9)
    ]
    cohort.until(None, lost=(8,))
    return cohort


def bytes_are_uniform(values):
    """Whether the counts of 256 byte values are within six standard deviations of chi-square with 255 degrees."""
    counts = np.bincount(np.frombuffer(values.astype("<u4").tobytes(), np.uint8), minlength=256)
    expected = counts.sum() / 256
    return abs(((counts - expected) ** 2 / expected).sum() - 255) < 6 * np.sqrt(2 * 255)


def correlated(one, other):
    """Whether two vectors are correlated beyond six standard deviations of independent ones."""
    return abs(np.corrcoef(one.astype(float), other.astype(float))[0, 1]) > 6 / np.sqrt(len(one))


def test_each_contribution_that_the_server_sees_looks_uniform_and_says_nothing_of_the_plain_one(recorded):
    for member in range(8):
        vector, plain = seen(recorded.transcript, member), recorded.codes[member]
        assert bytes_are_uniform(vector)
        assert not correlated(vector, plain)
        assert not correlated(vector & 0xFFFF, plain)
    assert not bytes_are_uniform(recorded.codes[0])
    assert correlated(recorded.codes[0], recorded.codes[0])


def test_sums_of_some_contributions_look_uniform_too(recorded):
    for some in ((0, 1), (0, 1, 2), (1, 3), tuple(range(8))):
        mixed = sum(seen(recorded.transcript, n) for n in some).astype(np.uint32)
        assert bytes_are_uniform(mixed)
        assert not correlated(mixed, sum(recorded.codes[n] for n in some))


def test_no_secret_of_a_member_is_in_what_the_server_sees():
    cohort = Cohort(5)
    secrets = []
    for step in MaskedServer.steps:
        cohort.step(step)
        if step is Step.SHARE:
            for member in cohort.members:
                secrets += [bytes(member._seed), member._mask.secret]
    everything = b"".join(
        message for step in MaskedServer.steps for message in cohort.transcript[step].values()
    )
    assert not any(secret in everything for secret in secrets)
    assert all(codes.astype("<u4").tobytes() not in everything for codes in cohort.codes)


def subtract(total, transcript, others):
    """The attack: from the sum, take away what the others sent."""
    return total - sum(seen(transcript, member) for member in others).astype(np.uint32)


def test_subtracting_the_others_gives_a_contribution_in_clear_and_nothing_when_masked(recorded):
    codes, others = recorded.codes[:8], range(1, 8)
    sent = {n: ClearMember().answer(Step.SUBMIT, b"", codes[n]) for n in range(8)}
    plan = replace(recorded.plan, secure_sum="clear")
    running = sum(ClearServer().vector(plan, {}, {}, n, sent[n], WIDE).addend for n in range(8))
    found = subtract(ClearServer().unmask(plan, {}, running).codes, {Step.SUBMIT: sent}, others)
    assert np.array_equal(found, codes[0])

    total = recorded.total().codes
    assert np.array_equal(total, sum(codes))
    masked = subtract(total, recorded.transcript, others)
    assert bytes_are_uniform(masked)
    assert not correlated(masked, codes[0])


def test_lists_of_submitters_have_different_hashes():
    assert len({list_hash(members) for members in ([], [0], [0, 1], [1], [1, 0], [256])}) == 6
