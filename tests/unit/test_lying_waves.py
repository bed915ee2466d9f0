"""Lies of a server about users who come later: each works on a host without a check, and is refused by name with it.

The third party's own refusals are in ``tests/integration/test_populations.py``.
"""

from __future__ import annotations

import dataclasses

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto.beacon import draw_beacon
from coterie.rounds.conductor import Conductor, new_training
from coterie.rounds.membership import Membership
from coterie.rounds.population import Population, Wave
from coterie.rounds.training import Purpose
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Declined
from coterie.secure_sum.registry import server_half
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.systems.server_step import planned_server_side
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


def opened(population: Population, purpose: Purpose, pass_number: int, part: int) -> SumPlan:
    """Return the plan of a sum, as a server makes it for a population."""
    side, half = planned_server_side(PLAN, 5, 1), server_half("masked", PUBLIC)
    conductor = Conductor(PLAN, population, side, half)
    started = conductor.started(range(len(population)))
    state = dataclasses.replace(
        new_training(PLAN, side),
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
