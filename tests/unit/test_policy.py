"""Rules by which cohorts are drawn."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.rounds import policy
from coterie.rounds.policy import CohortRule, cohorts, everybody, group_of, groups, min_sum

BEACON = bytes(range(32))

rules = st.builds(
    CohortRule,
    kind=st.sampled_from(["groups", "random", "all"]),
    size=st.integers(1, 60),
    group=st.integers(1, 40),
    beacon=st.binary(min_size=32, max_size=32),
)


@given(rules, st.integers(1, 300), st.integers(0, 5))
def test_everybody_is_in_exactly_one_cohort_of_each_global_round(rule, users, global_round):
    found = cohorts(rule, users, global_round)
    assert np.array_equal(np.sort(np.concatenate(found)), np.arange(users))
    assert all(len(cohort) and np.all(np.diff(cohort) > 0) for cohort in found)


@given(st.integers(1, 60), st.integers(1, 300), st.integers(0, 5))
def test_independent_cohorts_are_as_many_as_cover_everybody_and_an_evaluation_does(size, users, global_round):
    independent, covering = (CohortRule(kind, size, 1, BEACON) for kind in ("independent", "random"))
    found = cohorts(independent, users, global_round)
    assert len(found) == len(cohorts(covering, users, global_round))
    assert all(len(cohort) == min(size, users) and np.all(np.diff(cohort) > 0) for cohort in found)
    assert all(
        np.array_equal(one, other)
        for one, other in zip(
            everybody(independent, users, global_round), cohorts(covering, users, global_round), strict=True
        )
    )


def test_of_independent_cohorts_none_depends_on_the_others():
    rule = CohortRule("independent", 20, 1, BEACON)
    drawn = [tuple(cohort) for number in range(50) for cohort in cohorts(rule, 100, number)]
    assert len(set(drawn)) == len(drawn) == 250
    times = np.bincount(np.concatenate(drawn), minlength=100)
    # Each user is in a fifth of them: 50, give or take a standard deviation of 6.3.
    assert times.min() > 25
    assert times.max() < 75
    assert len(np.unique(np.concatenate(drawn[:5]))) < 100


@given(rules, st.integers(1, 300), st.integers(0, 3))
def test_groups_partition_the_users_evenly_and_are_large_enough(rule, users, epoch):
    found = groups(rule, users, epoch)
    assert np.array_equal(np.sort(np.concatenate(found)), np.arange(users))
    sizes = [len(part) for part in found]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(rule.group, users)
    assert len(found) == max(users // rule.group, 1), "and no larger than they have to be"


@given(st.integers(1, 40), st.integers(1, 40), st.integers(41, 300), st.integers(0, 5), st.integers(0, 5))
def test_cohorts_of_groups_are_whole_groups_and_these_are_fixed(size, group, users, one_round, another):
    rule = CohortRule("groups", size, group, BEACON)
    whole = {tuple(part) for part in groups(rule, users)}
    for number in (one_round, another):
        for cohort in cohorts(rule, users, number):
            inside = {part for part in whole if part[0] in cohort}
            assert sorted(np.concatenate([np.array(part) for part in inside])) == list(cohort)


def test_a_cohort_of_groups_has_at_least_the_size_and_the_last_of_a_pass_takes_what_is_left():
    rule = CohortRule("groups", 25, 10, BEACON)
    assert [len(cohort) for cohort in cohorts(rule, 100, 3)] == [30, 30, 40]


@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 300), st.integers(0, 5))
def test_no_cohort_of_groups_is_smaller_than_asked_for_unless_everybody_is_in_it(size, group, users, number):
    found = cohorts(CohortRule("groups", size, group, BEACON), users, number)
    assert len(found) == 1 or min(len(cohort) for cohort in found) >= size


@pytest.mark.parametrize(("users", "count"), [(99, 1), (100, 1), (199, 1), (200, 2), (943, 9)])
def test_a_population_below_twice_the_least_group_is_one_group(users, count):
    assert len(groups(CohortRule("groups", 100, 100, BEACON), users)) == count


def test_random_cohorts_have_exactly_the_size_and_change_with_each_global_round():
    rule = CohortRule("random", 20, 100, BEACON)
    first, second = cohorts(rule, 90, 0), cohorts(rule, 90, 1)
    assert [len(cohort) for cohort in first] == [20, 20, 20, 20, 10]
    assert any(not np.array_equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", ["groups", "random", "all"])
def test_a_population_no_larger_than_a_cohort_is_one_cohort(kind):
    (cohort,) = cohorts(CohortRule(kind, 50, 10, BEACON), 50, 2)
    assert np.array_equal(cohort, np.arange(50))


def test_all_is_everybody_in_each_round():
    (cohort,) = cohorts(CohortRule("all", 5, 10, BEACON), 1000, 7)
    assert len(cohort) == 1000


@pytest.mark.parametrize("kind", ["groups", "random"])
def test_members_find_the_same_cohorts_from_the_same_beacon_and_others_from_another(kind):
    def drawn(beacon: bytes):
        policy._drawn.clear()  # as in another process
        cohorts.cache_clear()
        return cohorts(CohortRule(kind, 20, 10, beacon), 200, 1)

    assert all(np.array_equal(one, other) for one, other in zip(drawn(BEACON), drawn(BEACON), strict=True))
    assert any(
        not np.array_equal(one, other) for one, other in zip(drawn(BEACON), drawn(bytes(32)), strict=True)
    )


@given(rules, st.integers(1, 300), st.integers(0, 3))
def test_the_group_of_a_user_is_the_one_that_has_it(rule, users, drawing):
    found = group_of(rule, users, drawing)
    assert len(found) == users
    assert all(np.all(found[part] == number) for number, part in enumerate(groups(rule, users, drawing)))


@pytest.mark.parametrize("kind", ["groups", "random", "independent", "all"])
def test_what_all_members_of_a_process_read_nobody_can_write_into(kind):
    rule = CohortRule(kind, 20, 10, BEACON)
    for part in (*cohorts(rule, 200, 1), *groups(rule, 200), group_of(rule, 200)):
        with pytest.raises(ValueError, match="read-only"):
            part[0] = 7


def test_groups_are_drawn_anew_with_each_epoch():
    rule = CohortRule("groups", 20, 10, BEACON)
    assert any(
        not np.array_equal(one, other)
        for one, other in zip(groups(rule, 100, 0), groups(rule, 100, 1), strict=True)
    )


def test_cohorts_of_a_pass_are_groups_of_its_drawing():
    rule = CohortRule("groups", 20, 10, BEACON, redraw=3)
    assert [rule.drawing(number) for number in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [number for number in range(8) if rule.redrawn(number)] == [0, 3, 6]
    for number in (2, 3, 7):
        fixed = {tuple(part.tolist()) for part in groups(rule, 100, rule.drawing(number))}
        for cohort in cohorts(rule, 100, number):
            assert sum(set(part) <= set(cohort.tolist()) for part in fixed) == len(cohort) // 10


def test_groups_are_fixed_for_the_whole_run_when_nothing_else_is_said():
    rule = CohortRule("groups", 20, 10, BEACON)
    assert {rule.drawing(number) for number in (0, 1, 49, 50, 10_000)} == {0}
    assert [number for number in range(100) if rule.redrawn(number)] == [0]


def test_the_permutation_is_the_one_that_is_specified():
    """Members that are written in other languages compute it, too."""
    purpose, number, users = b"groups", 0, 12
    # docs/spec: explicit bytes, with lengths of 4 and integers of 8 bytes, big-endian.
    fields = [BEACON, number.to_bytes(8), users.to_bytes(8)]
    seed = b"coterie/v1/" + purpose + b"".join(len(field).to_bytes(4) + field for field in fields)
    stream = hashlib.shake_256(seed).digest(8 * users)
    keys = [stream[8 * n : 8 * n + 8] for n in range(users)]
    order = sorted(range(users), key=lambda n: keys[n])
    found = groups(CohortRule("groups", 4, 4, BEACON), users)
    assert [part.tolist() for part in found] == [sorted(order[first : first + 4]) for first in (0, 4, 8)]


@pytest.mark.parametrize(
    ("users", "floor", "expected"),
    [(20, 20, 20), (30, 20, 20), (31, 20, 21), (100, 20, 67), (3, 1, 2), (1, 1, 1)],
)
def test_a_sum_covers_two_thirds_of_the_cohort_and_the_floor(users, floor, expected):
    assert min_sum(users, floor) == expected
