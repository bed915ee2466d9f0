"""Chains of keys of shares: what they save, what a stolen memory opens, and that both members always take one way."""

import copy
import gc
import pickle
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.config.run import RunSettings
from coterie.crypto import masking
from coterie.crypto.verification import VerificationError
from coterie.crypto.verified import Verified
from coterie.secure_sum.chains import Chain, Chains, chained_bits, chained_bytes, chains_for, is_chained
from coterie.secure_sum.masked import MaskedMember, MaskedServer
from coterie.secure_sum.protocol import ClosedSteps, Declined, Failed, Step
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load, make_feed
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import rounds_pb2 as wire

from .test_masked_sum import DIRECTORY_KEY, NOW, Cohort, person, small_circulant

SIGNATURES = set()


def on_a_host():
    """Return the cache of a host of its own; signatures that one host checked are not checked again, to save time."""
    cache = Verified()
    cache._known = SIGNATURES
    return cache


class Run:
    """Members that keep their chains over the sums of a run, each on a host of its own."""

    def __init__(self, members=6, sums=100, **cohort):
        self.members, self.given = members, cohort
        self.sums = sums
        self.chains = [Chains(sums) for _ in range(members)]
        self.round = 3
        self.played = []

    def restart(self, member):
        """Lose what a member holds in memory."""
        self.chains[member] = Chains(self.sums)

    def begin(self, chains=None):
        """Return the cohort of the next sum."""
        cohort = Cohort(self.members, **self.given)
        self.round += 1
        # One beacon for the run, so that everybody has the same neighbours in all sums.
        cohort.plan = replace(cohort.plan, round=self.round, beacon=bytes(32), population_sha256=bytes(32))
        held = self.chains if chains is None else chains
        cohort.members = [
            cohort.member(number, verified=on_a_host(), chains=held[number]) for number in range(self.members)
        ]
        self.played.append(cohort)
        return cohort

    def play(self, lost=None, damage=()):
        """Play a whole sum; ``lost``: who vanishes before which step; ``damage``: whose shares do not arrive whole."""
        cohort, gone = self.begin(), set()
        for step in MaskedServer.steps:
            gone |= (lost or {}).get(step, set())
            for member in cohort.server.expected(cohort.plan, cohort.closed, step):
                if member in gone:
                    continue
                briefing = cohort.briefing(step, member)
                if step is Step.SUBMIT:
                    briefing = damaged(briefing, damage, member)
                try:
                    message = cohort.ask(step, member, briefing)
                except Declined:
                    gone.add(member)
                else:
                    cohort.take(step, member, message)
            cohort.close(step)
        for member in cohort.members:
            member.forget()
        return cohort


def damaged(briefing, pairs, member):
    """Return an inbox in which the share from the first to the second member of each pair does not open."""
    inbox = wire.ShareInbox.FromString(briefing)
    for share in inbox.shares:
        if (share.member, member) in pairs:
            share.sealed = bytes(81)
    return inbox.SerializeToString()


def left_out(cohort):
    """Return who was left out by whom."""
    return {
        (member, other)
        for member, message in cohort.transcript[Step.SUBMIT].items()
        for other in wire.SummedVector.FromString(message).left_out
    }


@pytest.fixture
def agreements(monkeypatch):
    """The number of X25519 agreements so far, in a list of one."""
    count, agree = [0], masking.RoundKey.agree

    def counted(self, public):
        count[0] += 1
        return agree(self, public)

    monkeypatch.setattr(masking.RoundKey, "agree", counted)
    return count


@pytest.mark.parametrize("rule", [None, small_circulant])
def test_members_that_met_agree_on_mask_keys_only(agreements, rule):
    run = Run(9, **({} if rule is None else {"rule": rule}))
    cohort = run.play()
    pairs = 9 * cohort.plan.degree
    assert agreements[0] == 2 * pairs
    for _ in range(3):
        agreements[0] = 0
        cohort = run.play()
        assert agreements[0] == pairs
        assert np.array_equal(cohort.total().codes, cohort.clear)
        assert left_out(cohort) == set()


def test_members_agree_anew_after_as_many_sums_as_the_plan_says(agreements):
    run, found = Run(4, sums=3), []
    for _ in range(7):
        agreements[0] = 0
        run.play()
        found.append(agreements[0] // 12)
    assert found == [2, 1, 1, 2, 1, 1, 2]


def test_no_key_of_a_share_is_used_twice():
    run, used = Run(5), []
    seal = masking.seal_share
    with mock.patch.object(masking, "seal_share", lambda key, *dealt: used.append(key) or seal(key, *dealt)):
        for _ in range(4):
            run.play()
    assert len(used) == len(set(used)) == 4 * 5 * 4


@given(st.data())
@settings(deadline=None, max_examples=15)
def test_both_members_of_a_pair_always_take_one_way(data):
    """Members vanish in any step, shares are damaged, processes start again: nobody is left out by another for it."""
    run = Run(8, sums=data.draw(st.integers(1, 5), "sums"))
    few = st.sets(st.integers(0, 7), max_size=1)
    for _ in range(4):
        for member in data.draw(few, "restarted"):
            run.restart(member)
        lost = {step: data.draw(few, f"lost before {step.value}") for step in MaskedServer.steps}
        pair = data.draw(st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=1), "damaged")
        try:
            cohort = run.play(lost, pair)
        except (Failed, Refusal):
            # Too few were left, or the two of a damaged share do not agree on their mask.
            cohort = run.played[-1]
        for member in cohort.members:
            member.forget()
        assert left_out(cohort) <= {(to, sender) for sender, to in pair}


def test_a_member_that_started_again_is_in_the_sum_and_agrees_anew(agreements):
    run = Run(6)
    run.play()
    run.restart(2)
    agreements[0] = 0
    cohort = run.play()
    assert sorted(cohort.closed[Step.SUBMIT]) == list(range(6))
    assert left_out(cohort) == set()
    # Mask keys of all pairs, and share keys of member 2 with the five others, computed by both.
    assert agreements[0] == 30 + 2 * 5


def test_two_members_of_which_one_could_not_open_a_share_agree_anew(agreements):
    run = Run(9)
    run.play()
    cohort = run.play(damage={(0, 1), (1, 0)})
    assert left_out(cohort) == {(0, 1), (1, 0)}
    assert np.array_equal(cohort.total().codes, cohort.clear)
    agreements[0] = 0
    assert left_out(run.play()) == set()
    assert agreements[0] == 9 * 8 + 2
    agreements[0] = 0
    run.play()
    assert agreements[0] == 9 * 8


def test_a_run_with_chains_comes_to_the_same_numbers(agreements):
    """Members of one host as the plan asks for them, from the settings of the run on."""
    found = []
    for channel_rounds in (0, 100):
        settings = RunSettings.model_validate(
            {
                "system": "fedncf",
                "secure_sum": "masked",
                "data": {"synthetic": {"users": 24, "items": 30, "interactions": 300}},
                "fedncf": {"model": "gmf", "dim": 4},
                "rounds": {
                    "cohort": 24,
                    "group": 24,
                    "passes": 3,
                    "evaluate_every": 3,
                    "party_per_user": True,
                    "channel_rounds": channel_rounds,
                },
                "federation": {"hosts": 2},
            }
        )
        feed = make_feed(settings, load(settings), 0)
        agreements[0] = 0
        known = train_in_process(settings, feed, run_id="test", seed=0, see=lambda event: None).known
        sums = len(known["rounds"])
        found.append(([one["metrics"] for one in known["history"]], agreements[0]))
    (fresh, anew), (chained, once) = found
    assert chained == fresh
    # The two keys of each pair in each sum, which both of one host compute once; and one key but in the first sum.
    pairs = 24 * 23 // 2
    assert anew == 2 * pairs * sums
    assert once == pairs * (sums + 1)


def test_members_with_and_without_chains_are_in_one_sum():
    run = Run(6)
    for _ in range(3):
        cohort = run.begin([chains if number % 2 else None for number, chains in enumerate(run.chains)])
        for step in MaskedServer.steps:
            cohort.step(step)
        assert np.array_equal(cohort.total().codes, cohort.clear)
        assert left_out(cohort) == set()


# --- what a stolen memory opens ------------------------------------------------------------------------------------


def secrets_in(member):
    """Return the byte strings of 32 bytes that an object reaches, but for sets of digests: what a thief finds."""
    found, seen, left = set(), set(), [member]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, (type, set)) or callable(one):
            continue
        seen.add(id(one))
        if isinstance(one, (bytes, bytearray)):
            if len(one) == 32:
                found.add(bytes(one))
            continue
        if isinstance(one, masking.RoundKey):
            found.add(one.secret)
        left += [each for each in gc.get_referents(one) if not isinstance(each, (str, int, float))]
    return found


def opened(cohort, victim, stolen):
    """Return the neighbours of whose sealed shares to or from a member a thief opens one, from the server's records.

    The thief knows the protocol: it tries each stolen value as a secret channel key and as a chain's key, also of
    earlier places.
    """
    plan, own = cohort.plan, person(victim)[0].participant_id
    adverts = {
        member: wire.Advert.FromString(message)
        for member, message in cohort.transcript[Step.ADVERTISE].items()
    }
    sealed = {
        (member, share.member): share.sealed
        for member, message in cohort.transcript[Step.SHARE].items()
        for share in wire.Shares.FromString(message).shares
    }
    found = set()
    for other in adverts:
        if other == victim:
            continue
        peer = person(other)[0].participant_id
        candidates = list(stolen)
        for value in stolen:
            agreed = masking.RoundKey(value).agree(adverts[other].channel_public)
            candidates += masking.share_keys(agreed, plan.hash, own, peer)
            chain = value
            for _ in range(6):
                *keys, chain = masking.chained_keys(chain, plan.hash, own, peer)
                candidates += keys
            first = masking.chain_key(agreed, plan.hash, own, peer)
            candidates += masking.chained_keys(first, plan.hash, own, peer)[:2]
        for pair in ((victim, other), (other, victim)):
            for key in candidates:
                try:
                    masking.open_share(key, sealed[pair])
                except VerificationError:
                    continue
                found.add(other)
    return found


class OneKey(MaskedMember):
    """A member that keeps one channel key for the whole run, as a run without forward secrecy would."""

    kept = None

    def _advertise(self):
        message = super()._advertise()
        if OneKey.kept is None:
            OneKey.kept = self._channel.secret
        return message


def test_a_stolen_channel_key_of_the_run_opens_what_was_recorded_and_a_stolen_chain_does_not():
    run = Run(5)
    OneKey.kept = None
    for number in range(4):
        cohort = run.begin()
        identity, bundle = person(2)
        kept = {"verified": on_a_host(), "chains": run.chains[2]}
        kind = OneKey if number == 0 else MaskedMember
        cohort.members[2] = kind(cohort.plan, 2, identity, bundle, DIRECTORY_KEY, NOW, **kept)
        for step in MaskedServer.steps:
            cohort.step(step)
        for member in cohort.members:
            member.forget()
    everybody = {0, 1, 3, 4}
    # The plain form: the channel key from which all keys of this run follow, had it been kept.
    chain = {OneKey.kept}
    assert opened(run.played[0], 2, chain) == everybody
    walked = {
        masking.chain_key(
            masking.RoundKey(OneKey.kept).agree(
                wire.Advert.FromString(run.played[0].transcript[Step.ADVERTISE][other]).channel_public
            ),
            run.played[0].plan.hash,
            person(2)[0].participant_id,
            person(other)[0].participant_id,
        )
        for other in everybody
    }
    assert all(opened(cohort, 2, walked) == everybody for cohort in run.played[1:])
    # The ratchet: all that the member's host holds after the fourth sum.
    stolen = secrets_in(run.chains[2])
    assert len(stolen) >= 4
    assert all(opened(cohort, 2, stolen) == set() for cohort in run.played)
    # What it does not promise: a later sum, until both agree anew.
    assert opened(run.play(), 2, stolen) == everybody
    run.chains = [Chains(100) for _ in range(5)]
    assert opened(run.play(), 2, stolen) == set()


def test_a_share_that_was_withheld_is_not_opened_by_a_later_theft():
    run = Run(6)
    run.play()
    # The server lets all share, and never shows member 2 its inbox.
    withheld = run.begin()
    withheld.step(Step.ADVERTISE)
    withheld.step(Step.SHARE)
    thief = secrets_in(run.chains[2]) | secrets_in(withheld.members[2])
    assert opened(withheld, 2, thief) == {0, 1, 3, 4, 5}
    for member in withheld.members:
        member.forget()
    run.play()
    assert opened(withheld, 2, secrets_in(run.chains[2])) == set()


def test_a_share_is_not_opened_later_where_the_member_saw_no_advertisement_of_its_sender():
    run = Run(9)
    run.play()
    cohort = run.begin()
    cohort.step(Step.ADVERTISE)
    # Member 2 is not shown the advertisement of member 4; member 4 is shown that of member 2, and seals for it.
    shown = wire.Adverts.FromString(cohort.briefing(Step.SHARE, 2))
    del shown.adverts[[one.member for one in shown.adverts].index(4)]
    cohort.ask(Step.SHARE, 2, shown.SerializeToString())
    cohort.transcript[Step.SHARE][4] = cohort.ask(Step.SHARE, 4)
    cohort.transcript[Step.SHARE][2] = wire.Shares().SerializeToString()
    cohort.members[2].forget()
    sealed = next(
        share.sealed
        for share in wire.Shares.FromString(cohort.transcript[Step.SHARE][4]).shares
        if share.member == 2
    )
    own, peer = person(2)[0].participant_id, person(4)[0].participant_id
    for chain in secrets_in(run.chains[2]):
        for key in masking.chained_keys(chain, cohort.plan.hash, own, peer)[:2]:
            with pytest.raises(VerificationError):
                masking.open_share(key, sealed)


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chained", [bytes(1), b""], ids=["changed", "taken away"])
def test_bits_that_were_changed_on_their_way_are_refused(chained):
    run = Run(6)
    run.play()
    cohort = run.begin()
    cohort.step(Step.ADVERTISE)
    shown = wire.Adverts.FromString(cohort.briefing(Step.SHARE, 2))
    shown.adverts[0].chained = chained
    with pytest.raises(Declined, match="advertisement of member 0"):
        cohort.ask(Step.SHARE, 2, shown.SerializeToString())


@pytest.mark.parametrize("chained", [bytes(2), bytes(100)])
def test_bits_of_another_length_are_refused_by_the_server_and_by_members(chained):
    cohort = Run(6).begin()
    advert = wire.Advert.FromString(cohort.ask(Step.ADVERTISE, 0))
    advert.chained = chained
    keys = advert.channel_public, advert.mask_public
    advert.signature = person(0)[0].sign("advert", cohort.plan.hash, *keys, chained)
    with pytest.raises(Refusal, match="bytes of bits for neighbours"):
        cohort.server.check(cohort.plan, ClosedSteps(), Step.ADVERTISE, 0, advert.SerializeToString())
    others = [wire.Advert.FromString(cohort.ask(Step.ADVERTISE, number)) for number in range(1, 6)]
    shown = wire.Adverts(adverts=[advert, *others[1:]])
    with pytest.raises(Declined, match="chains of others than its neighbours"):
        cohort.ask(Step.SHARE, 1, shown.SerializeToString())


def test_bits_are_read_as_they_are_written():
    around = (0, 2, 3, 5, 8, 9, 11, 12, 20, 31)
    for chosen in [(), around, (0,), (31,), (8, 12, 20)]:
        bits = chained_bits(around, chosen)
        assert len(bits) == chained_bytes(len(around)) == 2
        assert tuple(one for at, one in enumerate(around) if is_chained(bits, at)) == chosen
    assert not is_chained(b"", 3)


def test_a_host_holds_no_more_chains_than_it_may():
    chains = Chains(9, most=3)
    for number in range(5):
        chains.give(b"own", {bytes([number]): Chain(bytes(32), 1)})
    assert len(chains) == 3
    assert set(chains.take(b"own", [bytes([number]) for number in range(5)])) == {b"\2", b"\3", b"\4"}
    assert len(chains) == 0


def test_a_chain_is_taken_out_once_and_ends_with_its_last_sum():
    chains = Chains(3)
    chains.give(b"own", {b"peer": Chain(bytes(32), 2), b"other": Chain(bytes(32), 3)})
    assert set(chains.take(b"own", [b"peer", b"other"])) == {b"peer"}
    assert chains.take(b"own", [b"peer", b"other"]) == {}


def test_chains_are_neither_pickled_nor_shown():
    chain = Chain(b"\7" * 32, 1)
    for secret in (chain, Chains(3)):
        with pytest.raises(TypeError, match="secret"):
            pickle.dumps(secret)
        with pytest.raises(TypeError, match="secret"):
            copy.copy(secret)
    assert "7" not in repr(chain)


def test_a_run_without_chains_has_none():
    assert chains_for(0) is None
    assert len(chains_for(5)) == 0


def test_keys_of_a_chain_differ_by_place_plan_and_direction():
    one, other, plan = bytes(32), bytes([1]) * 32, bytes([2]) * 32
    chain, found = masking.chain_key(b"\3" * 32, plan, one, other), []
    assert chain == masking.chain_key(b"\3" * 32, plan, other, one)
    for _ in range(3):
        *keys, following = masking.chained_keys(chain, plan, one, other)
        assert keys == list(masking.chained_keys(chain, plan, other, one)[1::-1])
        found += [*keys, *masking.chained_keys(chain, bytes(32), one, other)[:2]]
        assert following == masking.chained_keys(chain, bytes(32), one, other)[2]
        chain = following
    assert all(a != b for a, b in pairwise(sorted(found)))
