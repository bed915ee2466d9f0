"""A host's own check of who is in a cohort: the plans that the rule makes pass, every other one is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.crypto.beacon import draw_beacon
from coterie.rounds.conductor import Conductor
from coterie.rounds.membership import Membership
from coterie.rounds.plan_hash import plan_hash
from coterie.rounds.population import Population
from coterie.rounds.training import Purpose, Training
from coterie.secure_sum.clear import ClearServer
from coterie.secure_sum.contribution import Layout, Segment
from coterie.secure_sum.plan import Member, SumPlan
from coterie.secure_sum.protocol import Declined, Failed
from coterie.wire.v1.orchestrator_pb2 import CohortKind, RoundsPlan, RunPlan
from tests.simulation.rig.sums import LAYOUT, halves

DIRECTORY = Ed25519PrivateKey.generate()
DIRECTORY_KEY = DIRECTORY.public_key().public_bytes_raw()


class Side:
    """As much of a server's side as a conductor needs to open a round."""

    asks_supports = True
    needs_every_sum = False
    metrics = ()

    def layout(self, purpose: Purpose) -> Layout:
        return Layout((Segment.whole("ones", (2,), 1),))


def run_plan(
    *, users_as_members: bool = False, kind: int = CohortKind.COHORT_KIND_RANDOM, **changes: Any
) -> RunPlan:
    rounds = {
        "cohorts": kind,
        "cohort": 6,
        "group": 5,
        "beacon": b"b" * 32,
        "party_per_user": users_as_members,
        "min_cohort": 2,
        "min_sum": 2,
        "experiment": True,
        "passes": 3,
    }
    return RunPlan(
        run_id="run", system="fedncf", secure_sum="clear", rounds=RoundsPlan(**{**rounds, **changes})
    )


class World:
    """A population of three hosts, what the COS makes of it, and each host's own view."""

    def __init__(
        self, plan: RunPlan, sizes: tuple[int, ...] = (7, 4, 6), half: Any = None, side: Any = None
    ) -> None:
        self.plan = plan
        devices = [f"client/{n}" for n, size in enumerate(sizes) for _ in range(size)]
        participants = [bytes([n]) * 32 for n in range(len(devices))]
        self.conductor = Conductor(
            plan, Population(participants, devices), side or Side(), half or ClearServer()
        )  # type: ignore[arg-type]
        self.hosts = []
        first = 0
        for n, size in enumerate(sizes):
            # Users stand at the host in another order than in the population.
            own = participants[first : first + size][::-1]
            self.hosts.append(Membership(plan, f"client/{n}", self.conductor.population, own, DIRECTORY_KEY))
            first += size

    def position(self, participant: bytes) -> int:
        """Return the place of a user in the population."""
        return self.conductor.population.participants.index(participant)

    def open(self, purpose: Purpose, part: int = 0, pass_number: int = 0) -> SumPlan:
        started = self.conductor.started(range(len(self.conductor.population)))
        state = Training(
            passes=3,
            evaluate_every=1,
            patience=0,
            choose_by="",
            supports=True,
            round=9,
            purpose=purpose,
            part=part,
            pass_number=pass_number,
            groups=started.groups,
            parts=started.parts,
            evaluation_parts=started.evaluation_parts,
        )
        return self.conductor.open(state, bytes(32), 1.0).plan


@given(
    users_as_members=st.booleans(),
    kind=st.sampled_from([1, 2, 3]),
    purpose=st.sampled_from(Purpose),
    pass_number=st.integers(0, 2),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_the_plans_of_the_rule_are_accepted_and_every_user_of_the_cohort_is_covered_once(
    users_as_members: bool, kind: int, purpose: Purpose, pass_number: int, data: st.DataObject
) -> None:
    world = World(run_plan(users_as_members=users_as_members, kind=kind))
    started = world.conductor.started(range(17))
    if purpose is Purpose.SUPPORTS:
        parts, pass_number = started.groups, 0
    else:
        parts = started.evaluation_parts if purpose is Purpose.EVALUATE else started.parts
    plan = world.open(purpose, data.draw(st.integers(0, parts - 1)), pass_number)
    named = set()
    for host in world.hosts:
        for member, users in host.covered(plan).items():
            assert plan.members[member].device == host.device
            assert len(users) == plan.members[member].users
            assert host.participants[users[0].index] == plan.members[member].participant
            for user in users:
                named.add(host.participants[user.index])
                own = world.position(host.participants[user.index])
                assert user.group == world.conductor.group_of(pass_number)[own]
    cohort = world.hosts[0].cohort(purpose, plan.pass_number, plan.part)
    assert named == {world.conductor.population.participants[position] for position in cohort}


def with_member(plan: SumPlan, place: int, **changes: Any) -> SumPlan:
    members = list(plan.members)
    members[place] = dataclasses.replace(members[place], **changes)
    return dataclasses.replace(plan, members=tuple(members))


CHANGES: list[tuple[bool, Callable[[SumPlan, int], SumPlan], str]] = [
    (False, lambda plan, own: dataclasses.replace(plan, run_id="other"), "of run 'other'"),
    (False, lambda plan, own: dataclasses.replace(plan, secure_sum="masked"), "a sum 'masked'"),
    (False, lambda plan, own: dataclasses.replace(plan, purpose="spy"), "a sum for 'spy'"),
    (False, lambda plan, own: dataclasses.replace(plan, part=99), "no part 99"),
    (False, lambda plan, own: dataclasses.replace(plan, pass_number=3), "pass 3"),
    (False, lambda plan, own: dataclasses.replace(plan, min_sum=2), "floor of 2 users"),
    (
        False,
        lambda plan, own: dataclasses.replace(plan, sparse_floor=2),
        "2 users for each place of the sum; by",
    ),
    (
        False,
        lambda plan, own: dataclasses.replace(plan, members=plan.members[:-1]),
        "by the plan's rule it has",
    ),
    (False, lambda plan, own: dataclasses.replace(plan, population_sha256=b"z" * 32), "another population"),
    (False, lambda plan, own: dataclasses.replace(plan, beacon=b"z" * 32), "another population"),
    (
        False,
        lambda plan, own: dataclasses.replace(
            plan,
            members=(
                *plan.members[:-1],
                dataclasses.replace(plan.members[-1], users=plan.members[-1].users - 1),
                Member(b"q" * 32, "client/q"),
            ),
        ),
        "by the plan's rule it has",
    ),
]


def changed_member(change: dict[str, Any], after: int) -> Callable[[SumPlan, int], SumPlan]:
    """Return a change of the host's own member, or of one that comes some places after it."""
    return lambda plan, own: with_member(plan, (own + after) % len(plan.members), **change)


CHANGES += [
    (per_user, changed_member(change, after), "is not the one whom the run's population has there")
    for per_user in (False, True)
    for change in ({"participant": b"z" * 32}, {"device": "client/x"})
    for after in (0, 1)
]


@pytest.mark.parametrize(("users_as_members", "change", "words"), CHANGES)
def test_a_plan_that_the_rule_does_not_make_is_refused(
    users_as_members: bool, change: Callable[[SumPlan, int], SumPlan], words: str
) -> None:
    world = World(run_plan(users_as_members=users_as_members))
    plan = world.open(Purpose.TRAIN)
    host = world.hosts[0]
    own = next(iter(host.covered(plan)))
    with pytest.raises(Declined, match=words):
        host.covered(change(plan, own))


def test_two_members_at_each_others_place_are_refused_also_where_neither_is_this_hosts() -> None:
    world = World(run_plan(users_as_members=True))
    plan = world.open(Purpose.EVALUATE)
    host = world.hosts[0]
    one, other, *_ = (n for n, member in enumerate(plan.members) if member.device != host.device)
    members = list(plan.members)
    members[one], members[other] = members[other], members[one]
    with pytest.raises(Declined, match=f"member {one} of the sum is not the one"):
        host.covered(dataclasses.replace(plan, members=tuple(members)))


def test_only_sums_of_training_are_sparse_where_the_plan_says_so_and_have_its_floor() -> None:
    world = World(run_plan(sparse=True), half=halves("encrypted")[0]())
    floors = {purpose: world.open(purpose).sparse_floor for purpose in (Purpose.TRAIN, Purpose.EVALUATE)}
    assert floors == {Purpose.TRAIN: 2, Purpose.EVALUATE: 0}
    plan = world.open(Purpose.TRAIN)
    assert world.hosts[0].covered(plan)
    for other in (0, 1, 3):
        with pytest.raises(Declined, match=f"a floor of {other} users for each place"):
            world.hosts[0].covered(dataclasses.replace(plan, sparse_floor=other))


def test_what_cannot_be_sparse_is_not_begun() -> None:
    with pytest.raises(Failed, match="only sums under a key"):
        World(run_plan(sparse=True)).open(Purpose.TRAIN)

    class Divided(Side):
        def layout(self, purpose: Purpose) -> Layout:
            return LAYOUT

    world = World(run_plan(sparse=True), half=halves("encrypted")[0](), side=Divided())
    with pytest.raises(Failed, match="that others of the same sum divide"):
        world.open(Purpose.TRAIN)


def test_a_cohort_of_another_part_is_refused() -> None:
    world = World(run_plan(users_as_members=True))
    plan = world.open(Purpose.TRAIN)
    for host in world.hosts:
        with pytest.raises(Declined):
            host.covered(dataclasses.replace(plan, part=plan.part + 1))


def test_a_cohort_below_the_plans_floor_is_refused_by_users_or_by_devices() -> None:
    run = run_plan(min_cohort=7, min_sum=2)
    plan = dataclasses.replace(World(run_plan()).open(Purpose.TRAIN), run_plan_sha256=plan_hash(run))
    with pytest.raises(Declined, match=r"a cohort of 6 users; the plan's floor is 7"):
        World(run).hosts[0].covered(plan)
    low, high = (drawn(min_cohort=floor, kind=CohortKind.COHORT_KIND_ALL) for floor in (1, 4))
    population = signed(low, PEOPLE, DEVICES)
    plan = opened(low, population)
    host = Membership(low, DEVICES[0], population, PEOPLE[:1], DIRECTORY_KEY)
    assert host.covered(plan)
    with pytest.raises(Declined, match=r"a cohort of 3 devices; the plan's floor is 4"):
        dataclasses.replace(host, plan=high).covered(
            dataclasses.replace(plan, run_plan_sha256=plan_hash(high))
        )


# --- the population, and who draws the groups ------------------------------------------------------------------------

PEOPLE = [bytes([n]) * 32 for n in range(4)]
DEVICES = ["client/0", "client/1", "client/1", "client/2"]


def drawn(**changes: Any) -> RunPlan:
    """Return a plan for which the directory draws the beacon."""
    rounds = {"beacon": b"", "experiment": False, "min_cohort": 1}
    return run_plan(**{"kind": CohortKind.COHORT_KIND_GROUPS, **rounds, **changes})


def signed(
    plan: RunPlan,
    participants: list[bytes],
    devices: list[str],
    key: Ed25519PrivateKey = DIRECTORY,
) -> Population:
    """Return a population for which the directory drew a beacon."""
    found = Population(participants, devices)
    beacon = draw_beacon(plan.run_id, found.hash(plan.run_id), key)
    return dataclasses.replace(found, beacon=beacon.value, signature=beacon.signature)


def opened(plan: RunPlan, population: Population) -> SumPlan:
    """Return the plan of a sum over everybody."""
    conductor = Conductor(plan, population, Side(), ClearServer())  # type: ignore[arg-type]
    state = Training(3, 1, 0, "", True, round=9, purpose=Purpose.TRAIN, groups=1, parts=1)
    return conductor.open(state, bytes(32), 1.0).plan


def joined(plan: RunPlan, population: Population, own: list[bytes] | None = None) -> Membership:
    return Membership(plan, "client/1", population, PEOPLE[1:3] if own is None else own, DIRECTORY_KEY)


@pytest.mark.parametrize("experiment", [False, True])
def test_a_population_that_the_third_party_signed_is_accepted(experiment: bool) -> None:
    plan = drawn(experiment=experiment)
    host = joined(plan, signed(plan, PEOPLE, DEVICES))
    assert (host.users, host.sha256) == (4, host.population.hash("run"))


UNSIGNED: dict[str, dict[str, Any]] = {
    "no signature": {"signature": b""},
    "a made-up signature": {"signature": bytes(64)},
    "another beacon": {"beacon": b"c" * 32},
    "no beacon": {"beacon": b""},
    "another user": {"participants": [*PEOPLE[:3], b"z" * 32]},
    "another device": {"devices": [*DEVICES[:3], "client/3"]},
    "one user less": {"participants": PEOPLE[:3], "devices": DEVICES[:3]},
    "another order": {"participants": PEOPLE[::-1], "devices": DEVICES[::-1]},
}


@pytest.mark.parametrize("changes", UNSIGNED.values(), ids=UNSIGNED)
@pytest.mark.parametrize("experiment", [False, True])
def test_a_population_that_changes_after_the_beacon_was_drawn_is_refused(
    changes: dict[str, Any], experiment: bool
) -> None:
    plan = drawn(experiment=experiment)
    population = dataclasses.replace(signed(plan, PEOPLE, DEVICES), **changes)
    with pytest.raises(Declined, match="the third party did not sign the population"):
        joined(plan, population)


def test_a_beacon_of_another_run_or_directory_is_refused() -> None:
    plan = drawn()
    for population in (
        signed(RunPlan(run_id="another"), PEOPLE, DEVICES),
        signed(plan, PEOPLE, DEVICES, Ed25519PrivateKey.generate()),
    ):
        with pytest.raises(Declined, match="the third party did not sign the population"):
            joined(plan, population)


def test_a_beacon_that_the_plan_names_counts_in_experiments_only() -> None:
    unsigned = Population(PEOPLE, DEVICES)
    joined(drawn(beacon=b"b" * 32, experiment=True), unsigned)
    with pytest.raises(Declined, match="the third party did not sign the population"):
        joined(drawn(beacon=b"b" * 32), unsigned)


@pytest.mark.parametrize(
    ("people", "words"),
    [
        ([PEOPLE[1], PEOPLE[0], *PEOPLE[2:]], "do not stand in the order of their ids"),
        ([PEOPLE[0], PEOPLE[0], *PEOPLE[2:]], "is in the population twice"),
    ],
    ids=["order", "twice"],
)
def test_users_in_another_order_or_twice_are_refused_even_where_the_third_party_signed(
    people: list[bytes], words: str
) -> None:
    plan = drawn()
    with pytest.raises(Declined, match=words):
        joined(plan, signed(plan, people, ["client/2"] * 4), [])


def test_a_user_who_comes_twice_is_refused_in_an_experiment_too() -> None:
    plan = drawn(beacon=b"b" * 32, experiment=True)
    with pytest.raises(Declined, match="is in the population twice"):
        joined(plan, Population([PEOPLE[0], PEOPLE[0]], ["client/2"] * 2), [])


@pytest.mark.parametrize("experiment", [False, True])
def test_a_user_of_another_host_in_this_hosts_name_and_an_own_one_in_anothers_are_refused(
    experiment: bool,
) -> None:
    plan = drawn(experiment=experiment, beacon=b"b" * 32 if experiment else b"")
    population = signed(plan, PEOPLE, DEVICES)
    with pytest.raises(Declined, match="as a user of this host who is none"):
        joined(plan, population, PEOPLE[1:2])
    with pytest.raises(Declined, match="another connection for a user of this host"):
        joined(plan, population, PEOPLE[1:])
    # Some users of a host may have come too late, or be revoked.
    late = b"l" * 32
    assert joined(plan, population, [*PEOPLE[1:3], late]).users == 4


def test_groups_that_are_drawn_anew_too_often_are_refused_outside_experiments() -> None:
    for redraw in (1, 49):
        plan = drawn(redraw=redraw)
        with pytest.raises(Declined, match=f"after {redraw} passes; accepted are 50"):
            joined(plan, signed(plan, PEOPLE, DEVICES))
        joined(drawn(redraw=redraw, experiment=True), signed(plan, PEOPLE, DEVICES))
    joined(drawn(redraw=50), signed(plan, PEOPLE, DEVICES))


def test_members_find_the_cohorts_of_each_drawing_and_refuse_those_of_another() -> None:
    kind = CohortKind.COHORT_KIND_GROUPS
    world = World(run_plan(users_as_members=True, kind=kind, cohort=5, redraw=2, passes=5))
    for pass_number in range(5):
        for part in range(world.conductor.started(range(17)).parts):
            plan = world.open(Purpose.TRAIN, part, pass_number)
            named = {n for host in world.hosts for n in host.covered(plan)}
            assert named == set(range(len(plan.members)))
            for host in world.hosts:
                for users in host.covered(plan).values():
                    for user in users:
                        own = world.position(host.participants[user.index])
                        assert user.group == world.conductor.group_of(pass_number)[own]
    first, other = (world.open(Purpose.TRAIN, 0, number) for number in (1, 2))
    swapped = dataclasses.replace(first, pass_number=2)
    assert first.members != other.members
    refused = 0
    for host in world.hosts:
        try:
            host.covered(swapped)
        except Declined:
            refused += 1
    assert refused


def test_groups_are_asked_for_their_items_once_in_each_drawing() -> None:
    host = World(run_plan(kind=CohortKind.COHORT_KIND_GROUPS, redraw=2, passes=5)).hosts[0]
    groups = [host.cohort(Purpose.SUPPORTS, number, 0).tolist() for number in (0, 2, 4)]
    assert len({tuple(group) for group in groups}) == 3
    for number in (1, 3):
        with pytest.raises(Declined, match="no part 0"):
            host.cohort(Purpose.SUPPORTS, number, 0)
    fixed = World(run_plan(kind=CohortKind.COHORT_KIND_GROUPS)).hosts[0]
    with pytest.raises(Declined, match="no part 0"):
        fixed.cohort(Purpose.SUPPORTS, 1, 0)
