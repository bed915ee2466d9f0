"""Rounds in one process, without faults and without a network."""

import hashlib

import numpy as np
import pytest

from coterie.secure_sum.clear import ClearMember, ClearServer
from coterie.secure_sum.contribution import Contribution, Layout, Segment
from coterie.secure_sum.plan import Member, SumPlan
from coterie.secure_sum.protocol import Step
from coterie.studies.local_rounds import Members, run_round
from tests.simulation.rig.sums import halves, identity

LAYOUT = Layout((Segment("values", (5,), 1.0, 16), Segment.whole("n", (), 3)))
COUNT = 6


def plan_of(secure_sum: str, number: int = 1, min_sum: int = 3, model: bytes = b"model") -> SumPlan:
    server, _ = halves(secure_sum)
    fields = server().plan_fields(COUNT, LAYOUT)
    return SumPlan(
        run_id="in-process",
        round=number,
        pass_number=number,
        purpose="train",
        secure_sum=secure_sum,
        model_sha256=hashlib.sha256(model).digest(),
        layout_sha256=bytes(32),
        members=tuple(Member(identity(n).participant_id, f"h{n % 2}") for n in range(COUNT)),
        min_sum=min_sum,
        **fields._asdict(),
    )


def contribution(member: int, number: int) -> np.ndarray:
    made = Contribution(LAYOUT)
    rng = np.random.default_rng([member, number])
    made.add("values", rng.uniform(-1, 1, 5), rng)
    made.add("n", np.array(1.0), rng)
    made.count()
    return made.codes()


def hosts_of(secure_sum: str) -> dict[str, Members]:
    _, member = halves(secure_sum)
    return {
        name: Members(member, lambda plan, asked: ((n, contribution(n, plan.round)) for n in asked))
        for name in ("h0", "h1")
    }


@pytest.mark.parametrize("secure_sum", ["clear", "masked"])
def test_round_after_round_gives_the_sum_over_everybody(secure_sum):
    server, hosts = halves(secure_sum)[0](), hosts_of(secure_sum)
    for number in (1, 2, 3):
        plan = plan_of(secure_sum, number, model=b"model %d" % number)
        outcome = run_round(plan, LAYOUT, server, hosts)
        assert (outcome.submitters, outcome.users, outcome.reason) == (tuple(range(COUNT)), COUNT, "")
        expected = sum(contribution(n, number) for n in range(COUNT)).astype(np.uint32)
        assert np.array_equal(outcome.total, expected)
        assert LAYOUT.decode(outcome.total, outcome.users)["n"] == COUNT
        assert not hosts["h0"].sat_out


@pytest.mark.parametrize("secure_sum", ["clear", "masked"])
def test_a_host_that_is_missing_has_dropped_out(secure_sum):
    server, hosts = halves(secure_sum)[0](), hosts_of(secure_sum)
    del hosts["h1"]
    outcome = run_round(plan_of(secure_sum), LAYOUT, server, hosts)
    if secure_sum == "clear":
        assert outcome.submitters == (0, 2, 4)
        assert np.array_equal(outcome.total, sum(contribution(n, 1) for n in (0, 2, 4)).astype(np.uint32))
    else:
        assert outcome.total is None, "three of six have two neighbours each, and it takes three"
        assert outcome.reason.startswith("advertise")


def test_a_member_that_does_not_train_has_dropped_out():
    hosts = hosts_of("clear")
    hosts["h1"].train = lambda plan, asked: ((n, contribution(n, plan.round)) for n in asked if n != 3)
    outcome = run_round(plan_of("clear"), LAYOUT, ClearServer(), hosts)
    assert outcome.submitters == (0, 1, 2, 4, 5)


def test_what_is_refused_is_named_and_leaves_the_others_alone():
    hosts = hosts_of("clear")
    hosts["h1"].train = lambda plan, asked: (
        (n, contribution(n, plan.round) * np.uint32(1 if n != 3 else 2**20)) for n in asked
    )
    outcome = run_round(plan_of("clear"), LAYOUT, ClearServer(), hosts)
    assert outcome.submitters == (0, 1, 2, 4, 5)
    assert [(member, refusal.name) for member, refusal in outcome.refused] == [(3, "INVALID_FIELD")]


def test_below_the_floor_a_round_is_abandoned():
    hosts = hosts_of("clear")
    del hosts["h0"]
    outcome = run_round(plan_of("clear", min_sum=4), LAYOUT, ClearServer(), hosts)
    assert outcome.total is None
    assert outcome.reason.startswith("submit: 3 users submitted, the plan's floor is 4")


def test_the_model_is_changed_by_the_sum_once():
    applied = []

    def apply(total, users):
        applied.append((total.copy(), users))
        return ""

    outcome = run_round(plan_of("clear"), LAYOUT, ClearServer(), hosts_of("clear"), apply)
    ((total, users),) = applied
    assert users == COUNT
    assert np.array_equal(total, outcome.total)


def test_an_impossible_sum_abandons_the_round():
    outcome = run_round(
        plan_of("clear"), LAYOUT, ClearServer(), hosts_of("clear"), lambda total, users: "beyond its bounds"
    )
    assert (outcome.total, outcome.reason) == (None, "beyond its bounds")


def test_a_sum_that_cannot_be_unmasked_abandons_the_round_and_names_who_was_wrong():
    class Wrong:
        """A host of members that reveal other shares than they hold, with the right form."""

        def __init__(self, inner: Members, members) -> None:
            self._inner, self._wrong = inner, members

        def answer(self, plan, step, briefings):
            from coterie.wire.v1 import rounds_pb2 as wire

            for member, message in self._inner.answer(plan, step, briefings):
                if step is not Step.UNMASK or member not in self._wrong:
                    yield member, message
                    continue
                unmasking = wire.Unmasking.FromString(message)
                for share in unmasking.shares:
                    share.seed = bytes(32) + b"\x01"
                yield member, unmasking.SerializeToString()

    server, hosts = halves("masked")[0](), hosts_of("masked")
    plan = plan_of("masked")
    one = run_round(plan, LAYOUT, server, {**hosts, "h1": Wrong(hosts["h1"], {3})})
    assert one.wrong == (3,)
    assert np.array_equal(one.total, sum(contribution(n, 1) for n in range(COUNT)).astype(np.uint32))
    hosts = hosts_of("masked")
    plan = plan_of("masked", 2)
    all_wrong = run_round(
        plan, LAYOUT, server, {name: Wrong(host, range(COUNT)) for name, host in hosts.items()}
    )
    assert all_wrong.total is None
    assert "shares" in all_wrong.reason


def test_a_member_that_sits_out_says_why():
    hosts = hosts_of("clear")
    run_round(plan_of("clear", 5), LAYOUT, ClearServer(), hosts)
    outcome = run_round(plan_of("clear", 4, min_sum=1), LAYOUT, ClearServer(), hosts)
    assert outcome.total is None, "round numbers are never used again"
    assert hosts["h0"].journals[identity(0).participant_id].joined == 5


def test_a_host_is_anything_that_answers():
    class Plain:
        def answer(self, plan, step, briefings):
            half = ClearMember()
            for member in briefings:
                yield member, half.answer(step, b"", contribution(member, 1))

    outcome = run_round(plan_of("clear"), LAYOUT, ClearServer(), {"h0": Plain(), "h1": Plain()})
    assert outcome.users == COUNT
