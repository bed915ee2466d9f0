"""Lies of a server about users who come later: each works on a host without a check, and is refused by name with it.

The third party's own refusals are in ``tests/integration/test_populations.py``.
"""

from __future__ import annotations

import dataclasses

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto.beacon import SignedPart, draw_beacon
from coterie.rounds.conductor import Conductor, new_training
from coterie.rounds.membership import Membership
from coterie.rounds.policy import population_pass
from coterie.rounds.population import Outline, Population, Wave
from coterie.rounds.training import Purpose
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Declined
from coterie.secure_sum.registry import server_half
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.systems.server_step import planned_server_side
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import common_pb2 as wire
from coterie.wire.v1.orchestrator_pb2 import CohortKind, RoundsPlan, RunPlan

THIRD_PARTY, SERVER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
PUBLIC = THIRD_PARTY.public_key().public_bytes_raw()
PLAN = RunPlan(
    run_id="run",
    system="fedncf",
    secure_sum="masked",
    settings=FedNcfSettings(model="gmf", dim=3).to_json(),
    rounds=RoundsPlan(
        cohorts=CohortKind.COHORT_KIND_GROUPS,
        cohort=3,
        group=3,
        min_cohort=3,
        min_sum=2,
        passes=9,
        most_users=20,
    ),
)
FIRST, LATE, OTHERS = ([bytes([n]) * 32 for n in numbers] for numbers in ((1, 4, 7), (2, 5, 8), (3, 6, 9)))
VICTIM = LATE[1]


def device(participant: bytes) -> str:
    return f"client/{participant[0]}"


def drawn(population: Population, key: Ed25519PrivateKey) -> tuple[bytes, bytes]:
    return draw_beacon("run", population.hash("run"), key)


def beginning(users: list[bytes]) -> Population:
    found = Population(users, [device(one) for one in users])
    return dataclasses.replace(
        found, **dict(zip(("beacon", "signature"), drawn(found, THIRD_PARTY), strict=True))
    )


def extended(
    population: Population, users: list[bytes], from_pass: int, key: Ed25519PrivateKey = THIRD_PARTY
) -> Population:
    first, before = len(population), population.waves
    found = dataclasses.replace(
        population,
        participants=[*population.participants, *users],
        devices=[*population.devices, *(device(one) for one in users)],
        waves=(*before, Wave(first, from_pass)),
    )
    return dataclasses.replace(found, waves=(*before, Wave(first, from_pass, *drawn(found, key))))


def host(population: Population, participant: bytes) -> Membership:
    return Membership(PLAN, device(participant), population, [participant], PUBLIC)


def opened(
    population: Population, purpose: Purpose, pass_number: int, part: int, run: RunPlan = PLAN
) -> SumPlan:
    """Return the plan of a sum, as a server makes it for a population."""
    side, half = planned_server_side(run, 5, 1), server_half("masked", PUBLIC)
    conductor = Conductor(run, population, side, half)
    started = conductor.started(range(len(population)))
    state = dataclasses.replace(
        new_training(run, side),
        round=1,
        purpose=purpose,
        pass_number=pass_number,
        part=part,
        groups=started.groups,
        parts=started.parts,
        evaluation_parts=started.evaluation_parts,
    )
    return conductor.open(state, bytes(32), 1.0).plan


def members(plan: SumPlan) -> set[bytes]:
    return {one.participant for one in plan.members}


def test_the_plans_of_an_honest_server_are_accepted_before_and_after_users_came() -> None:
    base = beginning(FIRST)
    population = extended(base, LATE, 2)
    one, late = host(population, FIRST[0]), host(population, VICTIM)
    before = opened(base, Purpose.TRAIN, 1, 0)
    assert one.covered(before)
    assert late.covered(before) == {}
    asked = opened(population, Purpose.SUPPORTS, 2, 1)
    assert members(asked) == set(LATE)
    assert late.covered(asked)
    assert one.covered(asked) == {}
    # The evaluation before the pass is over those who have trained.
    assert len(opened(base, Purpose.EVALUATE, 2, 0).members) == 3
    assert one.covered(opened(base, Purpose.EVALUATE, 2, 0))
    assert late.covered(opened(population, Purpose.EVALUATE, 3, 0))
    with pytest.raises(Declined, match="another population"):
        one.covered(opened(population, Purpose.EVALUATE, 2, 0))


def test_a_group_of_the_beginning_is_not_asked_for_its_items_again_when_users_come() -> None:
    population = extended(beginning(FIRST), LATE, 2)
    with pytest.raises(Declined, match="no part 0 of pass 2"):
        host(population, FIRST[0]).covered(opened(population, Purpose.SUPPORTS, 2, 0))
    for pass_number in (3, 4):
        with pytest.raises(Declined, match=f"no part 1 of pass {pass_number}"):
            host(population, VICTIM).covered(opened(population, Purpose.SUPPORTS, pass_number, 1))


def test_a_server_that_adds_users_whom_the_third_party_does_not_know_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    invented = extended(beginning(FIRST), sorted([VICTIM, b"\x20" * 32, b"\x21" * 32]), 2, SERVER)
    asked = opened(invented, Purpose.SUPPORTS, 2, 1)
    with pytest.raises(Declined, match="the third party did not sign the population"):
        host(invented, VICTIM)
    monkeypatch.setattr(Population, "check", lambda *_: None)
    # The others are the server's: the sum is the victim's items.
    assert host(invented, VICTIM).covered(asked)
    assert members(asked) - {b"\x20" * 32, b"\x21" * 32} == {VICTIM}


def test_a_server_that_puts_one_user_into_a_wave_of_its_own_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = extended(beginning(FIRST), [VICTIM], 2)
    with pytest.raises(Declined, match="1 users on 1 devices; at least 3 on 3 may come together"):
        host(alone, VICTIM)
    before, after = alone.first_waves(0), alone
    monkeypatch.setattr(Population, "check_waves", lambda *_: None)
    # Two evaluations differ by the victim.
    first, second = (opened(one, Purpose.EVALUATE, number, 0) for one, number in ((before, 2), (after, 3)))
    assert host(after, FIRST[0]).covered(first)
    assert host(after, FIRST[0]).covered(second)
    assert members(second) - members(first) == {VICTIM}


def test_a_server_that_removes_users_is_refused_even_with_a_third_party_that_signs_it() -> None:
    known = host(extended(beginning(FIRST), LATE, 2), FIRST[0])
    fewer = extended(beginning(FIRST), [*LATE[:1], *LATE[2:], OTHERS[2]], 2)
    changed = host(fewer, FIRST[0])
    # By itself nothing is wrong with it: a host that keeps no population takes part in both sums.
    first, second = (
        opened(one, Purpose.EVALUATE, number, 0) for one, number in ((known.population, 3), (fewer, 4))
    )
    assert known.covered(first)
    assert changed.covered(second)
    assert VICTIM in members(first) - members(second)
    with pytest.raises(Declined, match="over another population"):
        known.covered(second)
    # Nothing follows the waves that it has: none, and one that was signed over others.
    assert known.extended(fewer.later_waves(1), 2) is known
    with pytest.raises(Declined, match="the third party did not sign the population"):
        known.extended(extended(fewer, LATE[1:2] + OTHERS[:2], 5).later_waves(1), 2)


def test_halves_that_are_shown_two_extensions_form_no_sum_together() -> None:
    base = beginning(FIRST)
    one, other = (extended(base, users, 2) for users in (LATE, OTHERS))
    left, right = host(one, FIRST[0]), host(other, FIRST[1])
    for shown in (left, right):
        before = host(base, shown.participants[0])
        again = before.extended(shown.population.later_waves(0), 1)
        assert again.population == shown.population
    asked = opened(one, Purpose.TRAIN, 2, 0), opened(other, Purpose.TRAIN, 2, 0)
    for here, there, plan in ((left, right, asked[0]), (right, left, asked[1])):
        assert here.knows(plan.population_sha256)
        assert not there.knows(plan.population_sha256)
        with pytest.raises(Declined, match="over another population"):
            there.covered(plan)
    # Each is told the other extension then, and keeps to its own.
    for told, words in (
        (other.later_waves(0), "wave 2 of the population begins with pass 2"),
        (extended(other, LATE, 5).later_waves(1), "the third party did not sign the population"),
    ):
        with pytest.raises(Declined, match=words):
            left.extended(told, 2)


def test_a_server_that_leaves_a_wave_out_for_a_while_is_refused() -> None:
    base = beginning(FIRST)
    extension = extended(base, LATE, 2)
    known, later = host(base, FIRST[0]), extension.later_waves(0)
    assert known.covered(opened(base, Purpose.TRAIN, 2, 0))
    assert known.extended(later, 1).population == extension
    with pytest.raises(Declined, match="from pass 2 on; this host took part in pass 2 without them"):
        known.extended(later, 2)


def test_a_host_that_was_told_waves_one_by_one_accepts_what_one_does_that_sees_them_all_at_once() -> None:
    base = beginning(FIRST)
    once = extended(base, LATE, 2)
    twice = extended(once, OTHERS, 4)
    for user in (FIRST[0], VICTIM, OTHERS[2]):
        known = host(base, user).extended(once.later_waves(0), 1).extended(twice.later_waves(1), 3)
        whole = host(twice, user)
        at_once = host(base, user).extended(twice.later_waves(0), 1)
        for population, purpose, pass_number, part in (
            (base, Purpose.TRAIN, 1, 0),
            (base, Purpose.EVALUATE, 2, 0),
            (once, Purpose.SUPPORTS, 2, 1),
            (once, Purpose.TRAIN, 3, 1),
            (once, Purpose.EVALUATE, 4, 0),
            (twice, Purpose.SUPPORTS, 4, 2),
            (twice, Purpose.TRAIN, 5, 1),
            (twice, Purpose.EVALUATE, 6, 0),
        ):
            plan = opened(population, purpose, pass_number, part)
            assert known.covered(plan) == whole.covered(plan) == at_once.covered(plan)


@pytest.mark.parametrize("known", [VICTIM, FIRST[0]])
def test_a_wave_that_names_a_users_host_wrongly_is_refused_by_a_host_that_knows_all_before_it(
    known: bytes,
) -> None:
    base = beginning(FIRST)
    wrong = dataclasses.replace(extended(base, LATE, 2), devices=[*base.devices, *[device(FIRST[0])] * 3])
    wrong = dataclasses.replace(wrong, waves=(Wave(3, 2),))
    wrong = dataclasses.replace(wrong, waves=(Wave(3, 2, *drawn(wrong, THIRD_PARTY)),))
    plan = RunPlan()
    plan.CopyFrom(PLAN)
    plan.rounds.min_cohort = 1
    member = Membership(plan, device(known), base, [known], PUBLIC)
    words = (
        "another connection for a user" if known == VICTIM else "somebody as a user of this host who is none"
    )
    with pytest.raises(Declined, match=words):
        member.extended(wrong.later_waves(0), 1)


# --- hosts that came later, with an outline --------------------------------------------------------------------------


def outlined(population: Population) -> Population:
    """Return what a host that comes later is told of a population."""
    told = population.outlined("run").to_wire().SerializeToString()
    return Population.from_wire(wire.Population.FromString(told))


def users_of(population: Population, member: Membership, plan: SumPlan) -> wire.CohortUsers:
    """Return what a server says about the users of a plan's cohort."""
    at = population_pass(Purpose(plan.purpose), plan.pass_number)
    cohort = member.in_pass(at).cohort(Purpose(plan.purpose), plan.pass_number, plan.part)
    return population.shown(cohort.tolist())


def with_user(message: wire.CohortUsers, at: int, participant: bytes) -> wire.CohortUsers:
    """Return users of a cohort with another one in the place of one of them."""
    found = wire.CohortUsers()
    found.CopyFrom(message)
    ids = [message.participants[n : n + 32] for n in range(0, len(message.participants), 32)]
    ids[at], found.devices[message.device[at]] = participant, device(participant)
    found.participants = b"".join(ids)
    return found


@pytest.mark.parametrize("alone", [False, True])
def test_a_host_with_an_outline_accepts_what_a_host_with_all_users_does_and_is_shown_a_cohort_once(
    alone: bool,
) -> None:
    run = RunPlan()
    run.CopyFrom(PLAN)
    run.rounds.party_per_user = alone
    once = extended(beginning(FIRST), LATE, 2)
    twice = extended(once, OTHERS, 4)
    whole, known, grown = (
        Membership(run, device(VICTIM), one, [VICTIM], PUBLIC)
        for one in (twice, outlined(twice), outlined(once))
    )
    assert (len(known.population), known.sha256, known.population.to_wire().participants) == (
        9,
        whole.sha256,
        b"",
    )
    later = twice.outlined("run").later_waves(1)
    assert (later.participants, len(later.parts)) == (b"", 1)
    grown = grown.extended(wire.Waves.FromString(later.SerializeToString()), 3)
    assert grown.population == known.population
    for population, purpose, pass_number, part in (
        (once, Purpose.SUPPORTS, 2, 1),
        (once, Purpose.TRAIN, 3, 0),
        (once, Purpose.TRAIN, 3, 1),
        (twice, Purpose.TRAIN, 5, 1),
        (twice, Purpose.TRAIN, 6, 2),
        (twice, Purpose.EVALUATE, 6, 0),
    ):
        plan = opened(population, purpose, pass_number, part, run)
        for one in (known, grown):
            if one.lacks(plan):
                one.show(plan, users_of(twice, whole, plan))
            assert not one.lacks(plan)
            assert one.covered(plan) == whole.covered(plan)
    assert not whole.lacks(plan)


def asked_of_victim() -> tuple[Population, Membership, SumPlan, wire.CohortUsers]:
    """Return a population, a host that came later to it, the plan of its first sum, and the users of its cohort."""
    population = extended(beginning(FIRST), LATE, 2)
    plan = opened(population, Purpose.SUPPORTS, 2, 1)
    member = host(outlined(population), VICTIM)
    return population, member, plan, users_of(population, member, plan)


def test_a_server_that_puts_somebody_made_up_into_a_cohort_is_refused_by_a_host_with_an_outline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, member, plan, honest = asked_of_victim()
    made_up = b"\x09" * 32
    forged = with_user(honest, 2, made_up)
    told = dataclasses.replace(
        plan,
        members=(
            *plan.members[:2],
            dataclasses.replace(plan.members[2], participant=made_up, device="client/9"),
        ),
    )
    with pytest.raises(
        Declined, match="does not show who is in the cohort: the proof does not show entries 3"
    ):
        member.show(told, forged)
    # Its plan alone does not do it either.
    member.show(plan, honest)
    assert member.covered(plan)
    with pytest.raises(
        Declined, match="member 2 of the sum is not the one whom the run's population has there"
    ):
        member.covered(told)
    monkeypatch.setattr("coterie.rounds.population.check_inclusions", lambda *_: None)
    member.show(told, forged)
    assert member.covered(told)
    assert made_up in members(told)


@pytest.mark.parametrize("change", ["one less", "one twice", "another order", "no proof", "a short proof"])
def test_a_server_that_leaves_somebody_out_of_a_cohort_is_refused_by_a_host_with_an_outline(
    change: str,
) -> None:
    population, member, plan, honest = asked_of_victim()
    changed = wire.CohortUsers()
    changed.CopyFrom(honest)
    ids = [honest.participants[n : n + 32] for n in range(0, 96, 32)]
    if change == "one less":
        changed = population.shown([3, 4])
    elif change == "one twice":
        changed = with_user(honest, 2, ids[1])
    elif change == "another order":
        changed = with_user(with_user(honest, 2, ids[1]), 1, ids[2])
    elif change == "no proof":
        del changed.proofs[:]
    else:
        changed.proofs[0] = bytes(31)
    with pytest.raises(Declined, match="the server does not show who is in the cohort"):
        member.show(plan, changed)
    assert member.lacks(plan)


def test_hosts_that_came_later_and_are_shown_two_populations_form_no_sum_together() -> None:
    base = beginning(FIRST)
    one, other = extended(base, LATE, 2), extended(base, sorted([VICTIM, *OTHERS[:2]]), 2)
    left, right = host(outlined(one), VICTIM), host(outlined(other), VICTIM)
    asked = opened(one, Purpose.TRAIN, 2, 0), opened(other, Purpose.TRAIN, 2, 0)
    for here, there, plan in ((left, right, asked[0]), (right, left, asked[1])):
        assert here.knows(plan.population_sha256)
        with pytest.raises(Declined, match="over another population"):
            there.lacks(plan)
    plan = opened(one, Purpose.SUPPORTS, 2, 1)
    with pytest.raises(Declined, match="does not show who is in the cohort"):
        left.show(plan, users_of(other, left, plan))
    # Nor does a wave follow that was signed over the other.
    with pytest.raises(Declined, match="the third party did not sign the population"):
        left.extended(
            extended(other, LATE[:1] + OTHERS[2:] + [b"\x0a" * 32], 5).outlined("run").later_waves(1), 2
        )


def test_a_server_that_leaves_a_wave_out_of_an_outline_for_a_while_is_refused() -> None:
    once = extended(beginning(FIRST), LATE, 2)
    twice = extended(once, OTHERS, 4)
    member, later = host(outlined(once), VICTIM), twice.outlined("run").later_waves(1)
    assert len(member.extended(later, 3).population) == 9
    with pytest.raises(Declined, match="from pass 4 on; this host took part in pass 4 without them"):
        member.extended(later, 4)


def test_an_outline_that_the_third_party_did_not_sign_is_refused() -> None:
    population = extended(beginning(FIRST), LATE, 2)
    told = population.outlined("run")
    assert told.outline is not None
    first, wave = told.outline.parts
    for outline in (
        Outline(bytes(32), (first, wave)),
        Outline(told.outline.sha256, (first._replace(root=bytes(32)), wave)),
        Outline(told.outline.sha256, (first._replace(devices=9), wave)),
        Outline(told.outline.sha256, (first, SignedPart.of(OTHERS, list(map(device, OTHERS))))),
    ):
        with pytest.raises(Declined, match="the third party did not sign the population"):
            host(dataclasses.replace(told, outline=outline), VICTIM)
    with pytest.raises(Declined, match="the third party did not sign the population"):
        host(outlined(extended(beginning(FIRST), LATE, 2, SERVER)), VICTIM)


def test_an_outline_does_not_travel_before_a_signature_covers_its_parts_or_in_parts_that_do_not_fit() -> None:
    population = extended(beginning(FIRST), LATE, 2)
    # Nothing that is signed says whose tree it is.
    forged = population.outlined("run").first_waves(0).to_wire()
    forged.parts[0].root = SignedPart.of(OTHERS, list(map(device, OTHERS))).root
    with pytest.raises(Refusal, match="a bad waves"):
        Population.from_wire(forged)
    honest = population.outlined("run").to_wire()
    for field, change in (
        ("parts", lambda one: one.parts[0].ClearField("users")),
        ("parts", lambda one: one.parts[0].MergeFrom(wire.PopulationPart(users=4))),
        ("parts", lambda one: one.parts[1].MergeFrom(wire.PopulationPart(root=b"short"))),
        ("parts", lambda one: one.ClearField("beginning_sha256")),
        ("parts", lambda one: one.parts.add(users=1, root=bytes(32))),
        ("participants", lambda one: one.MergeFrom(wire.Population(participants=bytes(32)))),
    ):
        message = wire.Population()
        message.CopyFrom(honest)
        change(message)
        with pytest.raises(Refusal, match=f"a bad {field}"):
            Population.from_wire(message)
    # Nor do users whom nobody asked for.
    with pytest.raises(Declined, match="a bad participants"):
        host(outlined(population), VICTIM).extended(extended(population, OTHERS, 4).later_waves(1), 2)


@pytest.mark.parametrize("known", [VICTIM, LATE[0]])
def test_a_cohort_that_names_a_users_host_wrongly_is_refused_though_the_third_party_signed_it(
    known: bytes,
) -> None:
    base = beginning(FIRST)
    devices = [device(LATE[0]), device(LATE[0]), device(LATE[2])]
    wrong = dataclasses.replace(extended(base, LATE, 2), devices=[*base.devices, *devices])
    wrong = dataclasses.replace(wrong, waves=(Wave(3, 2),))
    wrong = dataclasses.replace(wrong, waves=(Wave(3, 2, *drawn(wrong, THIRD_PARTY)),))
    run = RunPlan()
    run.CopyFrom(PLAN)
    run.rounds.min_cohort = 1
    member = Membership(run, device(known), outlined(wrong), [known], PUBLIC)
    plan = opened(wrong, Purpose.SUPPORTS, 2, 1, run)
    words = (
        "another connection for a user" if known == VICTIM else "somebody as a user of this host who is none"
    )
    with pytest.raises(Declined, match=words):
        member.show(plan, users_of(wrong, member, plan))


def test_a_host_takes_the_users_of_its_outline_and_those_of_no_other_population() -> None:
    base = beginning(FIRST)
    once = extended(base, LATE, 2)
    twice = extended(once, OTHERS, 4)
    member = host(outlined(once), VICTIM)
    for honest in (once, twice):
        found = member.completed(honest.to_wire())
        assert (found.population, found.sha256) == (once, member.sha256)
        plan = opened(once, Purpose.TRAIN, 3, 1)
        assert not found.lacks(plan)
        assert found.covered(plan) == host(once, VICTIM).covered(plan)
    other = extended(base, sorted([VICTIM, *OTHERS[:2]]), 2)
    for lie in (base, outlined(once), other, outlined(twice)):
        with pytest.raises(Declined, match="not the one of which this host has an outline"):
            member.completed(lie.to_wire())
    # The beacons are those that it knows, and the users others.
    swapped = dataclasses.replace(once, participants=[*FIRST, *LATE[:2], OTHERS[2]])
    with pytest.raises(Declined, match="the third party did not sign the population"):
        member.completed(swapped.to_wire())
    with pytest.raises(Declined, match="a bad device"):
        member.completed(wire.Population(participants=bytes(32)))
