"""The sum in clear by a robust rule: what the server keeps, refuses and leaves out."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.secure_sum.aggregation import RULES, Aggregation, check_aggregation
from coterie.secure_sum.clear import ClearMember, ClearServer
from coterie.secure_sum.contribution import Contribution, Layout, Segment, UnboundedValueError
from coterie.secure_sum.plan import Member, SumPlan, layout_hash
from coterie.secure_sum.protocol import Step
from coterie.secure_sum.registry import SUMS, server_half, taking_half
from coterie.secure_sum.robust import RobustServer, kept_bytes
from coterie.studies.local_rounds import Members, run_round
from coterie.wire.refusal import Refusal

LAYOUT = Layout((Segment("rows", (3, 2), 1.0, 12), Segment.whole("count", (), 20)))
ROBUST = [rule for rule in RULES if rule != "sum"]


def half(rule, byzantine=0.2):
    return RobustServer(Aggregation(rule, byzantine, 1.0 if rule == "norm-bound" else 0.0))


def plan_of(*users, purpose="train", min_sum=1):
    members = tuple(Member(bytes([n]) * 32, f"device-{n}", each) for n, each in enumerate(users))
    return SumPlan("run", 1, purpose, "clear", bytes(32), layout_hash(LAYOUT), members, min_sum=min_sum)


def codes_of(rng, users):
    found = Contribution(LAYOUT)
    for _ in range(users):
        found.add("rows", rng.uniform(-1, 1, (2, 2)), rng, rows=rng.permutation(3)[:2])
        found.add("count", np.array(2.0), rng)
        found.count()
    return found.codes()


def message_of(codes):
    return ClearMember().answer(Step.SUBMIT, b"", codes)


def summed(server, plan, contributions, order):
    running = server.begin(plan, LAYOUT)
    for member in order:
        message = message_of(contributions[member])
        running = server.added(running, server.vector(plan, {}, {}, member, message, LAYOUT))
    stored = server.to_bytes(running)
    restored = server.from_bytes(plan, LAYOUT, stored)
    assert server.to_bytes(restored) == stored
    found, again = server.unmask(plan, {}, running), server.unmask(plan, {}, restored)
    assert np.array_equal(found.codes, again.codes)
    assert found.left_out == again.left_out
    return found, len(stored)


@pytest.mark.parametrize("purpose", ["train", "evaluate"])
def test_a_half_that_was_made_of_the_terms_takes_some_of_the_contributions(purpose):
    rng, server = np.random.default_rng(0), half("trimmed-mean")
    plan, made = plan_of(1, 2, 1, 3, 1, 1, purpose=purpose), []
    other = taking_half("clear", server.terms(plan))
    for member, one in enumerate(plan.members):
        message = message_of(codes_of(rng, one.users))
        made.append(other.vector(plan, {}, {}, member, message, LAYOUT).addend)
    parts = [
        server.from_bytes(plan, LAYOUT, other.to_bytes(other.summed(plan, LAYOUT, some)))
        for some in (made[4:], made[:1], made[1:4])
    ]
    joined = server.begin(plan, LAYOUT)
    for part in parts:
        joined = server.joined(joined, part)
    whole = server.summed(plan, LAYOUT, made)
    assert np.array_equal(server.unmask(plan, {}, joined).codes, server.unmask(plan, {}, whole).codes)


@given(st.integers(0, 2**32), st.sampled_from(ROBUST), st.randoms())
@settings(deadline=None, max_examples=60)
def test_the_sum_depends_neither_on_the_order_of_arrival_nor_on_a_restart(seed, rule, random):
    rng = np.random.default_rng(seed)
    users = rng.integers(1, 3, 8, endpoint=True).tolist()
    plan, made = plan_of(*users), [codes_of(rng, each) for each in users]
    server = half(rule)
    first, stored = summed(server, plan, made, range(8))
    other, _ = summed(server, plan, made, random.sample(range(8), 8))
    assert np.array_equal(first.codes, other.codes)
    assert first.left_out == other.left_out
    counted = sum(each for member, each in enumerate(users) if member not in first.left_out)
    assert LAYOUT.possible(first.codes, counted)
    assert stored <= 8 * (kept_bytes(LAYOUT) + 8)


@pytest.mark.parametrize("purpose", ["supports", "evaluate"])
def test_counts_and_metrics_are_added_as_they_are(purpose):
    rng = np.random.default_rng(0)
    plan, made = plan_of(1, 2, 1, purpose=purpose), [codes_of(rng, each) for each in (1, 2, 1)]
    found, _ = summed(half("krum", 1), plan, made, range(3))
    assert np.array_equal(found.codes, np.sum(made, axis=0, dtype=np.uint32))
    assert half("krum", 1).shortfall(plan, {}, Step.SUBMIT, dict.fromkeys(range(3), b"")) == ""


class Codes:
    """Members of one connection with given codes."""

    def __init__(self, made):
        self.members = Members(
            lambda plan, member: ClearMember(), lambda plan, members: [(m, made[m]) for m in members]
        )

    def answer(self, plan, step, briefings):
        return self.members.answer(plan, step, briefings)


def played(server, plan, made):
    hosts = {f"device-{n}": Codes({n: codes}) for n, codes in enumerate(made)}
    applied = []
    outcome = run_round(
        plan, LAYOUT, server, hosts, lambda codes, users: applied.append((codes, users)) or ""
    )
    return outcome, applied


@pytest.mark.parametrize("rule", ["krum", "distance", "spectral"])
def test_who_is_left_out_counts_as_if_it_had_not_submitted(rule):
    rng = np.random.default_rng(3)
    same = np.full((3, 2), 0.1)

    def honest(values):
        found = Contribution(LAYOUT)
        found.add("rows", values + rng.uniform(0, 0.01, (3, 2)), rng)
        found.add("count", np.array(1.0), rng)
        found.count()
        return found.codes()

    made = [honest(same) for _ in range(9)]
    made.insert(4, honest(-9 * same))
    outcome, [(codes, users)] = played(half(rule, 1), plan_of(*[1] * 10), made)
    assert (outcome.left_out, outcome.users, users) == ((4,), 9, 9)
    del made[4]
    plain, [(expected, _)] = played(ClearServer(), plan_of(*[1] * 9), made)
    assert np.array_equal(codes, expected)
    assert plain.left_out == ()


@pytest.mark.parametrize(
    ("rule", "byzantine", "members", "least"),
    [
        ("median", 0.2, 2, 3),
        ("trimmed-mean", 2, 4, 5),
        ("krum", 2, 6, 7),
        ("krum", 0.2, 4, 5),
        ("distance", 3, 6, 7),
        ("spectral", 1, 2, 3),
    ],
)
def test_too_few_members_abandon_the_round_and_the_reason_says_how_many_it_takes(
    rule, byzantine, members, least
):
    rng, server = np.random.default_rng(0), half(rule, byzantine)
    outcome, applied = played(server, plan_of(*[1] * members), [codes_of(rng, 1) for _ in range(members)])
    assert (outcome.total, applied) == (None, [])
    assert f"needs {least} members, and {members} submitted" in outcome.reason
    assert f"needs {least} members" in server.lacking(plan_of(*[1] * members), range(members))
    enough, applied = played(server, plan_of(*[1] * least), [codes_of(rng, 1) for _ in range(least)])
    assert enough.reason == ""
    assert len(applied) == 1


def test_the_floor_of_users_is_that_of_every_sum_in_clear():
    rng = np.random.default_rng(0)
    outcome, _ = played(half("median"), plan_of(1, 1, 1, min_sum=4), [codes_of(rng, 1)] * 3)
    assert "3 users submitted, the plan's floor is 4" in outcome.reason


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers_do_not_leave_the_client(rule, value):
    found = Contribution(LAYOUT, norm_bound=1.0)
    found.add("rows", np.full((3, 2), value), np.random.default_rng(0))
    with pytest.raises(UnboundedValueError, match="not a finite number"):
        found.count()


@pytest.mark.parametrize("rule", ROBUST)
def test_codes_beyond_the_bounds_are_refused_and_the_sum_goes_on_without_them(rule):
    rng = np.random.default_rng(1)
    made = [codes_of(rng, 1) for _ in range(8)]
    made[2] = np.full(LAYOUT.size, 2**32 - 1, np.uint32)
    outcome, [(_, users)] = played(half(rule), plan_of(*[1] * 8), made)
    assert [member for member, _ in outcome.refused] == [2]
    assert isinstance(outcome.refused[0][1], Refusal)
    assert users == 7 - len(outcome.left_out)


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("secure_sum", [name for name in SUMS if name != "clear"])
def test_sums_that_hide_contributions_refuse_a_rule_and_name_what_they_can_do(rule, secure_sum):
    words = r"sees no single contribution( without noise)?; .*norm_bound, which hosts enforce"
    with pytest.raises(ConfigError, match=words):
        server_half(secure_sum, aggregation=Aggregation(rule, 0.1, 1.0))
    assert isinstance(server_half("clear", aggregation=Aggregation(rule, 0.1, 1.0)), RobustServer)


def test_a_bound_of_norms_alone_goes_with_every_sum():
    for secure_sum in SUMS:
        check_aggregation(Aggregation(norm_bound=2.0), secure_sum)
    assert type(server_half("clear", aggregation=Aggregation(norm_bound=2.0))) is ClearServer


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        (Aggregation("mean"), "'mean': no such rule; expected one of sum, median"),
        (Aggregation("krum", 0.5), "expected a share above 0 and below 0.5, or a whole number from 1"),
        (Aggregation("krum", 1.5), "expected a share"),
        (Aggregation("krum", 0.0), "expected a share"),
        (Aggregation("krum", math.nan), "expected a share"),
        (Aggregation("krum", math.inf), "expected a share"),
        (Aggregation(norm_bound=-1.0), "expected a finite number, at least 0"),
        (Aggregation(norm_bound=math.nan), "expected a finite number"),
        (Aggregation("norm-bound"), "expected rounds.aggregation.norm_bound above 0"),
    ],
)
def test_terms_out_of_range_are_refused_and_the_error_says_what_is_expected(terms, said):
    with pytest.raises(ConfigError, match=said):
        check_aggregation(terms, "clear")


def test_a_share_of_liars_is_rounded_down_and_at_least_one_and_single_precision_changes_nothing():
    for share, members, liars in [
        (0.1, 100, 10),
        (0.35, 100, 35),
        (0.1, 19, 1),
        (0.1, 3, 1),
        (0.29, 100, 29),
    ]:
        for given_share in (share, float(np.float32(share))):
            assert Aggregation("krum", given_share).liars(members) == liars
    assert Aggregation("krum", 4.0).liars(100) == 4
