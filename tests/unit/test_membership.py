"""A host's own check of who is in a cohort: the plans that the rule makes pass, every other one is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.crypto.beacon import draw_beacon
from coterie.rounds import policy
from coterie.rounds.conductor import Conductor, Population, cohort_rule
from coterie.rounds.membership import Membership
from coterie.rounds.plan_hash import plan_hash
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
            index = np.arange(size)[::-1]
            position = np.arange(first, first + size)
            own = [participants[first + size - 1 - at] for at in range(size)]
            group = self.conductor.group_of()[position]
            places = index, position, group
            self.hosts.append(Membership(plan, f"client/{n}", len(devices), *places, own, DIRECTORY_KEY))
            first += size

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
                own = host.position[np.flatnonzero(host.index == user.index)[0]]
                assert user.group == world.conductor.group_of(pass_number)[own]
    cohort = world.hosts[0].cohort(purpose, plan.pass_number, plan.part)
    assert named == {world.conductor.population.participants[position] for position in cohort}


def with_member(plan: SumPlan, place: int, **changes: Any) -> SumPlan:
    members = list(plan.members)
    members[place] = dataclasses.replace(members[place], **changes)
    return dataclasses.replace(plan, members=tuple(members))


def covered_by_rule(host: Membership, plan: SumPlan) -> int:
    """Return how many users of a host the rule puts into the cohort that a plan names."""
    cohort = host.cohort(Purpose(plan.purpose), plan.pass_number, plan.part)
    return int(np.isin(host.position, cohort).sum())


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
    (False, lambda plan, own: with_member(plan, own, participant=b"z" * 32), "does not stand for"),
    (False, lambda plan, own: with_member(plan, own, device="client/x"), "has 0 members"),
    (True, lambda plan, own: with_member(plan, own, participant=b"z" * 32), "should be a user of this host"),
    (True, lambda plan, own: with_member(plan, own, device="client/x"), "should be a user of this host"),
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


def test_a_cohort_of_another_part_is_refused_where_it_has_other_users() -> None:
    world = World(run_plan(users_as_members=True))
    plan = world.open(Purpose.TRAIN)
    other = dataclasses.replace(plan, part=plan.part + 1)
    # No host knows a whole cohort, but each knows which of its own users are in it.
    (host, *_) = [one for one in world.hosts if len(one.covered(plan)) != covered_by_rule(one, other)]
    with pytest.raises(Declined):
        host.covered(other)


def test_a_stranger_in_this_hosts_name_is_refused() -> None:
    world = World(run_plan(users_as_members=True))
    plan = world.open(Purpose.TRAIN)
    host = world.hosts[0]
    strange = next(n for n in range(len(plan.members)) if n not in host.covered(plan))
    with pytest.raises(Declined, match="is said to be this host's"):
        host.covered(with_member(plan, strange, device=host.device))


def test_a_second_member_of_one_host_is_refused() -> None:
    world = World(run_plan())
    plan = world.open(Purpose.EVALUATE)
    members = (*plan.members[:-1], Member(b"q" * 32, "client/0", plan.members[-1].users))
    with pytest.raises(Declined, match="has 2 members"):
        world.hosts[0].covered(dataclasses.replace(plan, members=members))


def test_a_cohort_below_the_plans_floor_is_refused_by_users_or_by_devices() -> None:
    run = run_plan(min_cohort=7, min_sum=2)
    plan = dataclasses.replace(World(run_plan()).open(Purpose.TRAIN), run_plan_sha256=plan_hash(run))
    with pytest.raises(Declined, match=r"a cohort of 6 users; the plan's floor is 7"):
        World(run).hosts[0].covered(plan)
    run = drawn(min_cohort=4, kind=CohortKind.COHORT_KIND_RANDOM)
    plan = dataclasses.replace(plan, run_plan_sha256=plan_hash(run))
    with pytest.raises(Declined, match=r"devices; the plan's floor is 4"):
        World(run).hosts[0].covered(plan)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group": np.zeros(7, np.int64)}, "groups"),
        ({"position": np.full(7, 1)}, "not distinct"),
        ({"position": np.arange(11, 18)}, "out of range"),
        ({"index": np.arange(1, 8)}, "out of range"),
        ({"index": np.arange(3)}, "no table"),
    ],
)
def test_places_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    host = World(run_plan(kind=CohortKind.COHORT_KIND_GROUPS)).hosts[0]
    with pytest.raises(Declined, match=words):
        dataclasses.replace(host, **changes)


# --- who draws the groups, and how often -----------------------------------------------------------------------------


def drawn(**changes: Any) -> RunPlan:
    """Return a plan whose beacon the directory drew."""
    beacon = draw_beacon(changes.pop("run_id", "run"), DIRECTORY)
    rounds = {
        "beacon": beacon.value,
        "beacon_signature": beacon.signature,
        "experiment": False,
        "min_cohort": 1,
    }
    return run_plan(**{"kind": CohortKind.COHORT_KIND_GROUPS, **rounds, **changes})


def joined(plan: RunPlan, key: bytes = DIRECTORY_KEY) -> Membership:
    group = policy.group_of(cohort_rule(plan.rounds), 3)
    places = np.arange(3)
    return Membership(plan, "client/0", 3, places, places, group, [bytes([n]) * 32 for n in range(3)], key)


def test_a_beacon_that_the_third_party_drew_for_this_run_is_accepted() -> None:
    joined(drawn())
    joined(drawn(experiment=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"beacon_signature": b""},
        {"beacon_signature": bytes(64)},
        {"beacon": b"c" * 32},
        {"beacon": b""},
        {"run_id": "another-run"},
        {"beacon": b"c" * 32, "experiment": True},
    ],
    ids=lambda changes: " ".join(f"{key}={value!r:.12}" for key, value in changes.items()),
)
def test_members_take_no_part_where_the_third_party_did_not_draw_the_groups(changes: dict[str, Any]) -> None:
    with pytest.raises(Declined, match="not drawn by the third party"):
        joined(drawn(**changes))


def test_a_beacon_that_another_directory_signed_is_refused() -> None:
    other = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    with pytest.raises(Declined, match="not drawn by the third party"):
        joined(drawn(), other)


def test_groups_that_are_drawn_anew_too_often_are_refused_outside_experiments() -> None:
    for redraw in (1, 49):
        with pytest.raises(Declined, match=f"after {redraw} passes; accepted are 50"):
            joined(drawn(redraw=redraw))
        joined(drawn(redraw=redraw, experiment=True))
    joined(drawn(redraw=50))


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
                        own = host.position[np.flatnonzero(host.index == user.index)[0]]
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
