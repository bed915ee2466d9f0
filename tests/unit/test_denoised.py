"""The denoised sum: who denoises for whom, what denoisers refuse, and what is withdrawn when they fail."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from coterie.crypto.identity import Bundle, Identity, countersign
from coterie.crypto.sealed_noise import SEALING_BYTES, open_noise, seal_noise
from coterie.crypto.verification import Reason, VerificationError
from coterie.crypto.verified import Verified
from coterie.errors import ConfigError
from coterie.rounds.denoiser_round import DenoiserRound
from coterie.rounds.member_round import Journal, Keep, Send, SitOut
from coterie.secure_sum.contribution import Contribution, Layout, Segment
from coterie.secure_sum.denoised import (
    DenoisedMember,
    DenoisedServer,
    Denoiser,
    pack_noise,
    unpack_noise,
)
from coterie.secure_sum.denoisers import Denoisers
from coterie.secure_sum.plan import Member, SumPlan, layout_hash
from coterie.secure_sum.protocol import ClosedSteps, Declined, Step
from coterie.secure_sum.registry import Signer, member_half, server_half, taking_half
from coterie.studies.local_rounds import Members, Outcome, run_round
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import rounds_pb2 as wire

LAYOUT = Layout((Segment("rows", (12, 3), 1.0, 12), Segment.whole("count", (12,), 1)))
FLOOR = 3
NOW = int(time.time())
DIRECTORY = Ed25519PrivateKey.generate()


class People:
    """Members on some hosts, with keys, and a signal and noise for each."""

    def __init__(self, sizes: tuple[int, ...], floor: int = FLOOR, **fields: Any) -> None:
        self.devices = [f"client/host-{host}" for host, size in enumerate(sizes) for _ in range(size)]
        self.identities = [Identity.generate() for _ in self.devices]
        self.bundles = {
            one.participant_id: countersign(one.bundle(1, (NOW - 60, NOW + 3600)), DIRECTORY, device)
            for one, device in zip(self.identities, self.devices, strict=True)
        }
        self.plan = SumPlan(
            "run",
            fields.pop("round", 1),
            fields.pop("purpose", "train"),
            "denoised",
            bytes(32),
            layout_hash(LAYOUT),
            tuple(
                Member(one.participant_id, device)
                for one, device in zip(self.identities, self.devices, strict=True)
            ),
            min_sum=fields.pop("min_sum", 1),
            noise_floor=floor,
            **fields,
        )
        self.rng = np.random.default_rng(len(self.devices))
        self.signal: dict[int, NDArray[np.uint32]] = {}
        self.codes = {member: self.made(member) for member in range(len(self.devices))}

    def made(self, member: int) -> NDArray[np.uint32]:
        own, noise = np.array_split(self.rng.permutation(12)[:8], 2)
        both, alone = Contribution(LAYOUT), Contribution(LAYOUT)
        values = self.rng.uniform(-1, 1, (8, 3))
        for made in (both, alone):
            rng = np.random.default_rng(member)
            made.add("rows", values[:4], rng, rows=own)
            made.add("count", np.ones(4), rng, rows=own)
            if made is both:
                made.add("rows", values[4:], rng, rows=noise, noise=True)
                made.add("count", np.ones(4), rng, rows=noise, noise=True)
            made.count()
        self.signal[member] = alone.codes()
        return both.apart()

    def member(self, plan: SumPlan, index: int) -> DenoisedMember:
        return DenoisedMember(plan, index, self.identities[index], LAYOUT, self.bundles)

    def denoiser(self, device: str, plan: SumPlan | None = None) -> Denoiser:
        of = plan or self.plan
        place = of.denoisers.place_of(device)
        first = of.denoisers.ring[place] if place is not None else self.devices.index(device)
        return Denoiser(of, device, self.identities[first], LAYOUT, self.bundles)

    def hosts(self) -> dict[str, Members]:
        def make(device: str) -> Members:
            return Members(
                self.member,
                lambda plan, members: ((member, self.codes[member]) for member in members),
                denoiser=lambda plan: self.denoiser(device, plan),
            )

        return {device: make(device) for device in dict.fromkeys(self.devices)}

    def summed(self, hosts: Mapping[str, Any] | None = None) -> Outcome:
        return run_round(self.plan, LAYOUT, DenoisedServer(), hosts or self.hosts())

    def expected(self, members: Any) -> NDArray[np.uint32]:
        return np.sum([self.signal[member] for member in members], axis=0, dtype=np.uint32)

    def of_groups(self, *groups: int) -> list[int]:
        return [member for member, group in enumerate(self.plan.denoisers.groups) if group in groups]


class Changed:
    """A host that passes messages of some steps through a function; None drops them."""

    def __init__(self, host: Members, change: Callable[[Step, int, bytes], bytes | None]) -> None:
        self.host, self.change = host, change

    def answer(self, plan: SumPlan, step: Step, briefings: Mapping[int, bytes]) -> Any:
        for number, message in self.host.answer(plan, step, briefings):
            changed = self.change(step, number, message)
            if changed is not None:
                yield number, changed


def changed(people: People, place: int, change: Callable[[Step, int, bytes], bytes | None]) -> Outcome:
    """Sum, with the messages of one denoiser changed."""
    hosts: dict[str, Any] = dict(people.hosts())
    number = people.plan.denoiser(place)
    device = people.plan.device_of(number)
    hosts[device] = Changed(
        hosts[device],
        lambda step, one, message: change(step, one, message) if one == number else message,
    )
    return people.summed(hosts)


# --- who denoises for whom -------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 9), min_size=3, max_size=9), st.integers(1, 6), st.binary(min_size=1, max_size=8)
)
@settings(deadline=None, max_examples=150)
def test_each_member_has_two_denoisers_on_other_connections_and_each_denoiser_two_groups(
    sizes: list[int], floor: int, seed: bytes
) -> None:
    devices = [f"d{host}" for host, size in enumerate(sizes) for _ in range(size)]
    found = Denoisers(seed, devices, [n.to_bytes(32) for n in range(len(devices))], [1] * len(devices), floor)
    assert 3 <= len(found.ring) <= len(sizes)
    assert len({devices[member] for member in found.ring}) == len(found.ring)
    assert len(found.ring) == 3 or len(devices) >= 2 * floor * len(found.ring)
    for member, device in enumerate(devices):
        one, other = found.of_member(member)
        assert len({devices[one], devices[other], device}) == 3
        places = found.of_group(found.groups[member])
        assert (found.ring[places[0]], found.ring[places[1]]) == (one, other)
        assert all(found.groups[member] in found.served_by(place) for place in places)
    assert sum(map(found.users_in, range(len(found.ring)))) == len(devices)


def test_two_connections_are_too_few_and_so_are_small_groups() -> None:
    assert "2 connections; it takes 3" in People((4, 4)).plan.denoisers.shortfall
    assert People((4, 4)).plan.denoisers.ring == ()
    assert "a group of 2 users; the plan's floor is 3" in People((4, 4, 2)).plan.denoisers.shortfall
    assert People((4, 4, 3)).plan.denoisers.shortfall == ""


def test_a_plan_without_noise_hashes_as_before_and_one_with_it_comes_back_from_the_wire() -> None:
    plan = People((3, 3, 3)).plan
    without = dataclasses.replace(plan, noise_floor=0)
    assert plan.hash != without.hash
    assert SumPlan.from_wire(plan.to_wire()) == plan
    assert len(without.by_device) == 3
    assert max(plan.by_device.values())[-1] >= 9
    assert {number for own in plan.by_device.values() for number in own} == set(range(12))


# --- noise as it travels ---------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.integers(0, 5))
@settings(deadline=None, max_examples=60)
def test_noise_comes_back_and_its_length_tells_the_room_alone(seed: int, more: int) -> None:
    rng = np.random.default_rng(seed)
    noise = np.zeros(LAYOUT.size, np.int32)
    there = rng.permutation(36)[: rng.integers(0, 20)]
    noise[there] = rng.integers(-2047, 2047, len(there))
    packed = pack_noise(noise, 20 + more)
    assert len(packed) == len(pack_noise(np.zeros(LAYOUT.size, np.int32), 20 + more))
    steps = unpack_noise(packed, LAYOUT, 1)
    found = np.zeros(LAYOUT.size, np.int32)
    found[steps.positions] = steps.values
    assert np.array_equal(found, noise)


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\xff",
        pack_noise(np.zeros(LAYOUT.size, np.int32), 2) + b"\0",
        b"\xff" * 6 + bytes(8),
        bytes(6) + b"\1\0\0\0",
        pack_noise(np.array([5000] + [0] * (LAYOUT.size - 1), np.int32), 1),
        pack_noise(np.array([0] * (LAYOUT.size - 1) + [-2], np.int32), 1),
    ],
)
def test_what_is_no_noise_of_the_layout_is_refused(damaged: bytes) -> None:
    with pytest.raises(ValueError, match="noise"):
        unpack_noise(damaged, LAYOUT, 1)


def test_noise_has_no_more_places_than_its_contribution() -> None:
    with pytest.raises(ValueError, match="noise in 3 places of a contribution that has something in 2"):
        pack_noise(np.array([1, 1, 1] + [0] * 45, np.int32), 2)


def test_sealed_noise_opens_for_one_denoiser_of_one_member_under_one_plan() -> None:
    member, denoiser, other = (Identity.generate() for _ in range(3))
    keys: dict[Identity, Bundle] = {one: one.bundle(1, (NOW, NOW + 60)) for one in (member, denoiser, other)}
    plan = bytes(range(32))
    sealed = seal_noise(member, keys[denoiser], plan, b"noise")
    assert open_noise(denoiser, keys[member], plan, sealed) == b"noise"
    assert len(sealed) == len(b"noise") + SEALING_BYTES
    assert seal_noise(member, keys[denoiser], plan, b"noise") != sealed
    for opener, sender, about, content in (
        (other, member, plan, sealed),
        (denoiser, other, plan, sealed),
        (denoiser, member, bytes(32), sealed),
        (denoiser, member, plan, sealed[:-1] + bytes([sealed[-1] ^ 1])),
        (denoiser, member, plan, bytes([sealed[0] ^ 1]) + sealed[1:]),
        (denoiser, member, plan, sealed[:20]),
        (denoiser, member, plan, b""),
    ):
        with pytest.raises(VerificationError) as caught:
            open_noise(opener, keys[sender], about, content)
        assert caught.value.reason is Reason.NOT_AUTHENTIC


# --- the sum ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(3, 6), min_size=3, max_size=5), st.integers(0, 2**16))
@settings(deadline=None, max_examples=15)
def test_the_sum_is_that_of_the_signals_whoever_drops_out(sizes: list[int], seed: int) -> None:
    people = People(tuple(sizes), floor=2)
    rng = np.random.default_rng(seed)
    gone = {
        int(
            rng.choice(
                [member for member, device in enumerate(people.devices) if device == f"client/host-{host}"]
            )
        )
        for host in range(len(sizes))
    }
    hosts = people.hosts()
    for host in hosts.values():
        train = host.train
        host.train = lambda plan, members, train=train: train(
            plan, [one for one in members if one not in gone]
        )
    found = people.summed(hosts)
    kept = sorted(set(range(len(people.devices))) - gone - set(found.left_out))
    small = {
        group
        for group in range(len(people.plan.denoisers.ring))
        if len(set(people.of_groups(group)) - gone) < 2
    }
    assert set(found.left_out) == set(people.of_groups(*small)) - gone
    if len(kept) < 2:
        assert found.total is None
    else:
        assert np.array_equal(found.total, people.expected(kept))
        assert found.users == len(kept)


def test_a_sum_that_is_stored_and_restored_is_the_same() -> None:
    people, server = People((4, 4, 4)), DenoisedServer()
    running, notes = server.begin(people.plan, LAYOUT), {}
    for member, codes in people.codes.items():
        message = people.member(people.plan, member).answer(Step.SUBMIT, b"", codes)
        vector = server.vector(people.plan, {}, notes, member, message, LAYOUT)
        running, notes[member] = server.added(running, vector), vector.note
    closed = ClosedSteps({Step.SUBMIT: notes})
    for step in (Step.CONFIRM, Step.UNMASK):
        answers = {}
        for number in server.expected(people.plan, closed, step):
            half = people.denoiser(people.plan.device_of(number))
            half.confirm(server.pieces(people.plan, closed, Step.CONFIRM, number).whole)
            briefing = server.pieces(people.plan, closed, step, number).whole
            answers[number] = (
                half.confirm(briefing) if step is Step.CONFIRM else half.reveal(half.listed(briefing))
            )
            server.check(people.plan, closed, step, number, answers[number])
        closed = closed.with_step(step, answers)
    restored = server.from_bytes(people.plan, LAYOUT, server.to_bytes(running))
    again = ClosedSteps({step: dict(closed[step]) for step in closed})
    for found in (server.unmask(people.plan, closed, running), server.unmask(people.plan, again, restored)):
        assert np.array_equal(found.codes, people.expected(range(12)))
        assert (found.left_out, found.withdrawn) == ((), ())


@pytest.mark.parametrize("floor", [FLOOR, 0])
def test_a_sum_of_parts_that_others_took_is_the_same(floor: int) -> None:
    people, server = People((4, 4, 4), floor=floor), DenoisedServer()
    taken = []
    for member, codes in people.codes.items():
        made = codes if floor else codes[0]
        message = people.member(people.plan, member).answer(Step.SUBMIT, b"", made)
        taken.append(server.vector(people.plan, {}, {}, member, message, LAYOUT).addend)
    whole, joined = server.summed(people.plan, LAYOUT, taken), server.begin(people.plan, LAYOUT)
    for some in (taken[:5], taken[5:6], taken[6:]):
        other = taking_half("denoised", server.terms(people.plan))
        part = other.to_bytes(other.summed(people.plan, LAYOUT, some))
        joined = server.joined(joined, server.from_bytes(people.plan, LAYOUT, part))
    assert server.to_bytes(joined) == server.to_bytes(whole)


def test_without_noise_it_is_a_sum_in_clear() -> None:
    people = People((2, 2), floor=0, purpose="evaluate")
    people.codes = {member: codes[0] for member, codes in people.codes.items()}
    found = people.summed()
    assert np.array_equal(found.total, np.sum(list(people.codes.values()), axis=0, dtype=np.uint32))
    assert found.users == 4


# --- denoisers that fail ---------------------------------------------------------------------------------------------


def lying(step: Step, number: int, message: bytes) -> bytes:
    if step is not Step.UNMASK:
        return message
    sums = wire.NoiseSums.FromString(message)
    steps = np.frombuffer(sums.sums[0].steps, "<i4").copy()
    steps[0] += 1
    sums.sums[0].steps = steps.tobytes()
    return sums.SerializeToString()


def test_a_lying_denoiser_has_its_group_withdrawn_and_the_sum_of_the_others_is_right() -> None:
    people = People((4, 4, 4, 4))
    found = changed(people, 0, lying)
    group = people.plan.denoisers.served_by(0)[0]
    left_out = people.of_groups(group)
    assert found.left_out == tuple(left_out)
    kept = sorted(set(range(16)) - set(left_out))
    assert np.array_equal(found.total, people.expected(kept))
    assert found.users == len(kept)
    (reason,) = found.withdrawn
    names = {
        people.plan.device_of(people.plan.denoiser(place)) for place in people.plan.denoisers.of_group(group)
    }
    assert f"{len(left_out)} users: denoisers" in reason
    assert "gave different sums" in reason
    assert all(name in reason for name in names)


@pytest.mark.parametrize("step", [Step.CONFIRM, Step.UNMASK])
def test_a_silent_denoiser_has_both_its_groups_withdrawn(step: Step) -> None:
    people = People((4, 4, 4, 4))
    found = changed(people, 1, lambda at, number, message: None if at is step else message)
    left_out = people.of_groups(*people.plan.denoisers.served_by(1))
    assert found.left_out == tuple(left_out)
    assert np.array_equal(found.total, people.expected(sorted(set(range(16)) - set(left_out))))
    assert [reason.split(": ")[1] for reason in found.withdrawn] == [
        f"denoiser {people.plan.device_of(people.plan.denoiser(1))} said nothing"
    ] * 2


def test_a_denoiser_that_refuses_is_named_with_its_reason() -> None:
    people = People((4, 4, 4, 4))
    no = wire.OpenedNoise(refused="no time").SerializeToString()
    found = changed(people, 1, lambda at, number, message: no if at is Step.CONFIRM else message)
    assert found.left_out == tuple(people.of_groups(*people.plan.denoisers.served_by(1)))
    assert all(reason.endswith("refuses: no time") for reason in found.withdrawn)


def test_a_sum_of_another_length_is_no_sum() -> None:
    people = People((4, 4, 4, 4))

    def short(step: Step, number: int, message: bytes) -> bytes:
        if step is not Step.UNMASK:
            return message
        sums = wire.NoiseSums.FromString(message)
        sums.sums[1].steps = sums.sums[1].steps[:-4]
        return sums.SerializeToString()

    found = changed(people, 2, short)
    assert found.left_out == tuple(people.of_groups(people.plan.denoisers.served_by(2)[1]))
    assert "gave a sum of 188 bytes, expected 192" in found.withdrawn[0]


def test_with_three_hosts_a_dead_denoiser_leaves_nobody_and_the_sum_is_abandoned() -> None:
    people = People((4, 4, 4))
    number = people.plan.denoiser(0)
    hosts: dict[str, Any] = dict(people.hosts())
    del hosts[people.plan.device_of(number)]
    found = people.summed(hosts)
    assert found.total is None
    assert "0 users are left, the floor is 3" in found.reason
    assert "said nothing" in found.reason


def test_supports_are_not_formed_over_fewer_than_the_plans_floor() -> None:
    for purpose, formed in (("train", True), ("supports", False)):
        people = People((4, 4, 4, 4), purpose=purpose, min_sum=14)
        found = changed(people, 0, lying)
        assert (found.total is not None) is formed, purpose
        assert formed or "the floor is 14" in found.reason


def test_noise_that_does_not_open_has_its_member_withdrawn_alone() -> None:
    people = People((5, 5, 5))
    hosts: dict[str, Any] = dict(people.hosts())
    device = people.devices[2]

    def broken(step: Step, number: int, message: bytes) -> bytes:
        if step is Step.SUBMIT and number == 2:
            vector = wire.SummedVector.FromString(message)
            vector.noise[1] = bytes(len(vector.noise[1]))
            return vector.SerializeToString()
        return message

    hosts[device] = Changed(hosts[device], broken)
    found = people.summed(hosts)
    assert found.left_out == (2,)
    assert found.withdrawn == ("1 user: their sealed noise does not open",)
    assert np.array_equal(found.total, people.expected([member for member in range(15) if member != 2]))


def test_a_group_below_the_floor_is_withdrawn_without_being_asked_about() -> None:
    people = People((4, 3, 4))
    hosts = people.hosts()
    gone = people.devices.index("client/host-1")
    train = hosts["client/host-1"].train
    hosts["client/host-1"].train = lambda plan, members: train(plan, [one for one in members if one != gone])
    found = people.summed(hosts)
    group = people.plan.denoisers.groups[gone]
    assert found.left_out == tuple(one for one in people.of_groups(group) if one != gone)
    assert found.withdrawn == ("2 users: their group has 2 users, the floor is 3",)


def test_two_denoisers_who_agree_on_a_wrong_sum_are_not_found_out() -> None:
    # The limit of two copies, which the page names.
    people = People((4, 4, 4, 4))
    group = people.plan.denoisers.served_by(0)[0]
    hosts: dict[str, Any] = dict(people.hosts())

    def agreed(step: Step, number: int, message: bytes) -> bytes:
        if step is not Step.UNMASK:
            return message
        sums = wire.NoiseSums.FromString(message)
        for one in sums.sums:
            if one.group == group:
                one.steps = np.zeros(LAYOUT.size, "<i4").tobytes()
        return sums.SerializeToString()

    for place in people.plan.denoisers.of_group(group):
        device = people.plan.device_of(people.plan.denoiser(place))
        hosts[device] = Changed(hosts[device], agreed)
    found = people.summed(hosts)
    assert (found.left_out, found.withdrawn) == ((), ())
    assert not np.array_equal(found.total, people.expected(range(16)))


# --- what a denoiser refuses -----------------------------------------------------------------------------------------


class Asked:
    """One denoiser that was shown the noise of those whom it serves."""

    def __init__(self, people: People, place: int = 0, journal: Journal | None = None) -> None:
        self.people, self.place = people, place
        self.device = people.plan.device_of(people.plan.denoiser(place))
        self.served = people.of_groups(*people.plan.denoisers.served_by(place))
        self.machine = DenoiserRound(people.plan, journal or Journal(), lambda: people.denoiser(self.device))

    def inbox(self, members: list[int]) -> bytes:
        inbox = wire.NoiseInbox()
        for member in members:
            message = self.people.member(self.people.plan, member).answer(
                Step.SUBMIT, b"", self.people.codes[member]
            )
            copies = self.people.plan.denoisers.of_group(self.people.plan.denoisers.groups[member])
            sealed = wire.SummedVector.FromString(message).noise[
                copies.index(self.place) if self.place in copies else 0
            ]
            inbox.sealed.add(member=member, sealed=sealed)
        return inbox.SerializeToString()

    def confirm(self, members: list[int] | None = None, briefing: bytes | None = None) -> wire.OpenedNoise:
        asked = briefing if briefing is not None else self.inbox(self.served if members is None else members)
        return wire.OpenedNoise.FromString(self.said(Step.CONFIRM, asked))

    def unmask(self, members: list[int]) -> wire.NoiseSums:
        return wire.NoiseSums.FromString(
            self.said(Step.UNMASK, wire.NoiseTask(members=members).SerializeToString())
        )

    def said(self, step: Step, briefing: bytes) -> bytes:
        self.effects = self.machine.asked(step, briefing)
        (sent,) = [one for one in self.effects if isinstance(one, Send)]
        return sent.message


def test_the_list_is_on_disk_before_the_sum_leaves() -> None:
    asked = Asked(People((4, 4, 4)))
    assert not asked.confirm().refused
    found = asked.unmask(asked.served)
    assert not found.refused
    assert [type(one) for one in asked.effects] == [Keep, Send]
    again = asked.unmask(asked.served)
    assert again == found
    assert [type(one) for one in asked.effects] == [Send]


def test_a_denoiser_adds_up_no_fewer_users_than_the_floor() -> None:
    asked = Asked(People((4, 4, 4)))
    asked.confirm()
    few = asked.people.of_groups(asked.people.plan.denoisers.served_by(0)[0])[:2]
    found = asked.unmask(few)
    assert "the noise of 2 users" in found.refused
    assert "the floor is 3" in found.refused
    assert not found.sums
    assert any(isinstance(one, SitOut) for one in asked.effects)
    assert not any(isinstance(one, Keep) for one in asked.effects)
    # It serves nobody any more in this round.
    assert asked.unmask(asked.served).refused == found.refused


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda served, others: [*served, 99], "does not ascend within the cohort"),
        (lambda served, others: [served[0], *served], "does not ascend within the cohort"),
        (lambda served, others: served[::-1], "does not ascend within the cohort"),
        (lambda served, others: sorted([*served, others[0]]), "1 members that it does not serve"),
        (lambda served, others: [], "does not ascend"),
    ],
)
@pytest.mark.parametrize("step", [Step.CONFIRM, Step.UNMASK])
def test_unknown_doubled_and_unassigned_members_are_refused(
    step: Step, change: Callable[[list[int], list[int]], list[int]], words: str
) -> None:
    people = People((4, 4, 4, 4))
    asked = Asked(people)
    members = change(asked.served, sorted(set(range(16)) - set(asked.served)))
    if step is Step.UNMASK:
        assert not asked.confirm().refused
        assert words in asked.unmask(members).refused
        return
    inbox = wire.NoiseInbox()
    for member in members:
        inbox.sealed.add(member=member, sealed=b"sealed")
    assert words in asked.confirm(briefing=inbox.SerializeToString()).refused


def test_a_second_list_at_the_same_place_is_refused_in_this_round_and_in_any_later_one() -> None:
    people = People((5, 5, 5))
    asked = Asked(people)
    asked.confirm()
    found = asked.unmask(asked.served)
    assert "is asked for unmask again, about other members" in asked.unmask(asked.served[1:]).refused
    # The same place again under another round's number, as after an abandoned sum: the same list, or nothing.
    people.plan = dataclasses.replace(people.plan, round=2)
    journal = asked.machine.journal
    for members, refused in ((asked.served[1:], True), (asked.served, False)):
        later = Asked(people, journal=journal)
        assert not later.confirm().refused
        again = later.unmask(members)
        assert bool(again.refused) is refused
        assert refused is ("was revealed already, over other members" in again.refused)
    assert again.sums == found.sums
    # Passes never go back.
    people.plan = dataclasses.replace(people.plan, round=3, pass_number=1)
    later = Asked(people, journal=journal)
    later.confirm()
    assert not later.unmask(later.served).refused
    people.plan = dataclasses.replace(people.plan, round=4, pass_number=0)
    back = Asked(people, journal=later.machine.journal)
    back.confirm()
    assert "comes before" in back.unmask(back.served).refused


def test_noise_of_another_round_does_not_open() -> None:
    people = People((4, 4, 4))
    before = Asked(people)
    inbox = before.inbox(before.served)
    people.plan = dataclasses.replace(people.plan, round=2)
    found = Asked(people).confirm(briefing=inbox)
    assert list(found.failed) == before.served


def test_noise_of_somebody_who_is_revoked_or_of_another_connection_does_not_open() -> None:
    people = People((4, 4, 4))
    asked = Asked(people)
    inbox = asked.inbox(asked.served)
    gone, moved = asked.served[0], asked.served[1]
    del people.bundles[people.plan.members[gone].participant]
    participant = people.plan.members[moved].participant
    people.bundles[participant] = dataclasses.replace(people.bundles[participant], party="client/elsewhere")
    assert list(asked.confirm(briefing=inbox).failed) == [gone, moved]


def test_a_denoiser_that_restarted_between_the_steps_refuses() -> None:
    asked = Asked(People((4, 4, 4)))
    asked.confirm()
    restarted = Asked(asked.people, journal=asked.machine.journal)
    assert "restarted in this round" in restarted.unmask(asked.served).refused


def test_members_that_were_not_shown_are_not_added_up() -> None:
    people = People((5, 5, 5))
    asked = Asked(people)
    asked.confirm(asked.served[1:])
    assert "the noise of 1 members that it has not opened" in asked.unmask(asked.served).refused


@pytest.mark.parametrize("step", [Step.CONFIRM, Step.UNMASK])
def test_briefings_that_do_not_parse_are_refused(step: Step) -> None:
    asked = Asked(People((4, 4, 4)))
    asked.confirm()
    said = Asked(asked.people).said(step, b"\xff") if step is Step.CONFIRM else asked.said(step, b"\xff")
    kind = wire.OpenedNoise if step is Step.CONFIRM else wire.NoiseSums
    assert "was told what is no Noise" in kind.FromString(said).refused


def test_only_denoisers_of_the_plan_denoise_with_the_keys_that_noise_is_sealed_for() -> None:
    people = People((2,) * 9)
    ring = [
        people.plan.device_of(people.plan.denoiser(place)) for place in range(len(people.plan.denoisers.ring))
    ]
    other = next(device for device in people.devices if device not in ring)
    with pytest.raises(Declined, match="does not name this connection as a denoiser"):
        people.denoiser(other)
    with pytest.raises(Declined, match="sealed for another participant's keys"):
        Denoiser(people.plan, ring[0], Identity.generate(), LAYOUT, people.bundles)
    with pytest.raises(Declined, match="does not name"):
        people.denoiser(ring[0], dataclasses.replace(people.plan, noise_floor=0))


# --- what members and the server refuse ------------------------------------------------------------------------------


def test_a_member_sends_nothing_without_the_keys_of_its_denoisers() -> None:
    people = People((4, 4, 4))
    one, other = people.plan.denoisers.of_member(0)
    participant = people.plan.members[one].participant
    kept = people.bundles.pop(participant)
    with pytest.raises(Declined, match=f"keys of denoiser '{people.devices[one]}' are not in the directory"):
        people.member(people.plan, 0).answer(Step.SUBMIT, b"", people.codes[0])
    people.bundles[participant] = dataclasses.replace(kept, party=people.devices[other])
    with pytest.raises(Declined, match="expected 'client/host"):
        people.member(people.plan, 0).answer(Step.SUBMIT, b"", people.codes[0])


def test_a_member_refuses_other_steps_and_contributions_of_other_shapes() -> None:
    people = People((4, 4, 4))
    half = people.member(people.plan, 0)
    for step in (Step.CONFIRM, Step.UNMASK):
        with pytest.raises(Declined, match=f"has no step {step.value}"):
            half.answer(step, b"")
    with pytest.raises(Declined, match=r"shape \(48,\), expected \(2, 48\)"):
        half.answer(Step.SUBMIT, b"", people.codes[0][0])
    plan = dataclasses.replace(people.plan, noise_floor=0)
    with pytest.raises(Declined, match=r"shape \(2, 48\), expected \(48,\)"):
        people.member(plan, 0).answer(Step.SUBMIT, b"", people.codes[0])
    few = People((4, 4))
    with pytest.raises(Declined, match="2 connections"):
        few.member(few.plan, 0).answer(Step.SUBMIT, b"", few.codes[0])
    assert list(half.submitters) == []
    half.forget()


def test_the_server_refuses_noise_of_another_number_or_length_and_noise_where_there_is_none() -> None:
    people, server = People((4, 4, 4)), DenoisedServer()
    message = people.member(people.plan, 0).answer(Step.SUBMIT, b"", people.codes[0])
    for change in (
        lambda vector: vector.noise.pop(),
        lambda vector: vector.noise.append(vector.noise[0]),
        lambda vector: vector.noise.__setitem__(0, vector.noise[0] + b"\0\0\0\0"),
        lambda vector: vector.ClearField("noise"),
    ):
        vector = wire.SummedVector.FromString(message)
        change(vector)
        with pytest.raises(Refusal, match="sealed noise of"):
            server.vector(people.plan, {}, {}, 0, vector.SerializeToString(), LAYOUT)
    plan = dataclasses.replace(people.plan, noise_floor=0)
    with pytest.raises(Refusal, match="sealed noise in a sum without noise"):
        server.vector(plan, {}, {}, 0, message, LAYOUT)


def test_the_server_refuses_answers_about_members_that_it_did_not_show() -> None:
    people, server = People((4, 4, 4, 4)), DenoisedServer()
    notes = dict.fromkeys(range(16), b"")
    closed = ClosedSteps({Step.SUBMIT: notes})
    number = people.plan.denoiser(0)
    others = sorted(set(range(16)) - set(people.of_groups(*people.plan.denoisers.served_by(0))))
    for failed in ([others[0]], [99], people.of_groups(people.plan.denoisers.served_by(0)[0])[1::-1]):
        with pytest.raises(Refusal, match="members whose noise was not shown"):
            server.check(
                people.plan, closed, Step.CONFIRM, number, wire.OpenedNoise(failed=failed).SerializeToString()
            )
    nobody = wire.OpenedNoise().SerializeToString()
    closed = closed.with_step(Step.CONFIRM, {people.plan.denoiser(place): nobody for place in range(4)})
    for step, words in ((Step.CONFIRM, "no OpenedNoise"), (Step.UNMASK, "no NoiseSums")):
        with pytest.raises(Refusal, match=words):
            server.check(people.plan, closed, step, number, b"\xff")
    with pytest.raises(Refusal, match=r"sums of groups \[\]"):
        server.check(people.plan, closed, Step.UNMASK, number, wire.NoiseSums().SerializeToString())


def test_the_run_waits_until_enough_users_and_their_denoisers_are_present() -> None:
    people, server = People((4, 4, 4, 4), min_sum=4), DenoisedServer()
    everybody = range(20)
    assert server.lacking(people.plan, everybody) == ""
    assert "3 users are present, the plan's floor is 4" in server.lacking(people.plan, [0, 1, 2])
    without = [n for n in everybody if n not in (people.plan.denoiser(0), people.plan.denoiser(2))]
    assert "users are present whose denoisers are, too; the floor is 3" in server.lacking(
        people.plan, without
    )


def test_the_registry_makes_both_halves_and_a_member_needs_a_layout() -> None:
    people = People((4, 4, 4))
    assert isinstance(server_half("denoised"), DenoisedServer)
    one = people.identities[0]
    signer = Signer(
        one,
        people.bundles[one.participant_id],
        bytes(32),
        NOW,
        Verified(),
        layout=LAYOUT,
        bundles=people.bundles,
    )
    assert isinstance(member_half(people.plan, 0, signer), DenoisedMember)
    with pytest.raises(ConfigError, match="no layout"):
        member_half(people.plan, 0, dataclasses.replace(signer, layout=None))
