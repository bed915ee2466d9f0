"""Whether a sum can be formed with those that are present, as each secure sum sees it before a round is opened."""

import dataclasses

import pytest

from coterie.secure_sum.clear import ClearServer
from coterie.secure_sum.masked import MaskedServer
from coterie.secure_sum.plan import Member, SumPlan
from coterie.secure_sum.steps import Step
from tests.simulation.rig.sums import HOLDERS, halves, identity, layout_of

USERS = (5, 1, 1, 1, 1, 1, 1)


def plan_of(secure_sum, half, min_sum):
    fields = half.plan_fields(len(USERS), layout_of(secure_sum))
    members = tuple(Member(identity(n).participant_id, f"h{n}", users) for n, users in enumerate(USERS))
    return SumPlan(
        "run", 1, "train", secure_sum, bytes(32), bytes(32), members, min_sum=min_sum, **fields._asdict()
    )


def test_a_sum_in_clear_lacks_users_below_its_floor():
    half = ClearServer()
    plan = plan_of("clear", half, 6)
    assert half.lacking(plan, {0, 3}) == ""
    assert half.lacking(plan, range(1, 6)) == "5 users are present, the plan's floor is 6"


def test_a_masked_sum_lacks_neighbours_before_it_lacks_users():
    half = MaskedServer(clock=lambda: 0.0, directory_key=bytes(32))
    plan = plan_of("masked", half, 6)
    everybody = set(range(len(USERS)))
    assert half.lacking(plan, everybody) == ""
    fewest = plan.threshold + 1
    assert half.lacking(plan, range(fewest)) == ""
    assert half.lacking(plan, range(plan.threshold)) == (
        f"0 users are present with {plan.threshold} neighbours of theirs, the plan's floor is 6; "
        f"{len(USERS) - plan.threshold} of {len(USERS)} members are missing, and masks bear the loss of "
        f"{plan.degree - plan.threshold} of a member's {plan.degree} neighbours"
    )
    high = dataclasses.replace(plan, min_sum=11)
    assert half.lacking(high, everybody) == ""
    assert "the plan's floor is 11" in half.lacking(high, everybody - {1})


def test_a_masked_sum_of_three_members_names_the_threshold_that_one_missing_member_breaks():
    half = MaskedServer(clock=lambda: 0.0, directory_key=bytes(32))
    plan = plan_of("masked", half, 6)
    three = dataclasses.replace(
        plan, members=plan.members[:3], **half.plan_fields(3, layout_of("masked"))._asdict()
    )
    words = "; 1 of 3 members is missing, and masks bear the loss of 0 of a member's 2 neighbours"
    assert half.lacking(three, {0, 1, 2}) == ""
    assert half.lacking(three, {0, 1}).endswith(words)
    # More users than the floor, and yet no sum.
    assert half.shortfall(three, {}, Step.ADVERTISE, {0: b"", 2: b""}) == (
        f"0 users have enough neighbours left, the plan's floor is 6{words}"
    )


@pytest.mark.parametrize("secure_sum", ["encrypted", "shared-key"])
def test_an_encrypted_sum_lacks_users_or_a_majority_of_key_holders(secure_sum):
    half = halves(secure_sum)[0]()
    plan = plan_of(secure_sum, half, 6)
    members, (first, second, third) = {0, 1}, (plan.numbers_of(plan.respondent(n, n)) for n in range(HOLDERS))
    assert half.lacking(plan, {*members, *first, *third}) == ""
    assert half.lacking(plan, {*members, *second}) == "1 of 3 key holders are present; it takes a majority"
    assert half.lacking(plan, {0, *first, *second, *third}) == "5 users are present, the plan's floor is 6"
