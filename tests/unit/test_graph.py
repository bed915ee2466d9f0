"""The graph of the masked sum, its tails against exact arithmetic."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.secure_sum.graph import Assumptions, graph_fields, neighbourhoods, tolerance
from coterie.secure_sum.protocol import Failed


def exact_tail(population: int, marked: int, drawn: int, least: int) -> Fraction:
    """P[X >= least] for X hypergeometric, in whole numbers."""
    ways = sum(
        math.comb(marked, n) * math.comb(population - marked, drawn - n)
        for n in range(max(least, 0), drawn + 1)
    )
    return Fraction(ways, math.comb(population, drawn))


def holds(members: int, degree: int, threshold: int, corrupt: int, lost: int) -> tuple[bool, bool]:
    """Whether secrets stay hidden, and whether the sum survives."""
    hidden = members * exact_tail(members - 1, corrupt, degree, 2 * threshold - degree) <= Fraction(1, 2**40)
    formed = members * exact_tail(members - 1, lost, degree, degree - threshold + 1) <= Fraction(1, 2**30)
    return hidden, formed


@pytest.mark.parametrize(
    ("corrupt", "dropout", "expected"),
    [
        (0.1, 0.1, [(76, 52), (114, 78), (138, 94)]),
        (0.1, 0.2, [(130, 81), (226, 142), (318, 200)]),
        (0.33, 0.1, [(138, 108), (244, 189), (340, 262)]),
    ],
)
def test_degrees_and_thresholds_are_those_of_the_table(corrupt, dropout, expected):
    found = [graph_fields(members, Assumptions(corrupt, dropout)) for members in (300, 1000, 6040)]
    assert found == expected


@pytest.mark.parametrize(("members", "corrupt", "lost"), [(101, 10, 20), (300, 30, 60), (1000, 100, 200)])
def test_the_tails_hold_exactly_and_nothing_smaller_does(members, corrupt, lost):
    degree, threshold = graph_fields(members)
    assert holds(members, degree, threshold, corrupt, lost) == (True, True)
    assert holds(members, degree, threshold - 1, corrupt, lost)[0] is False
    # At the next smaller degree, the smallest threshold that hides is one at which the sum does not survive.
    fewest = next(t for t in range(threshold - 4, degree) if holds(members, degree - 2, t, corrupt, lost)[0])
    assert fewest > threshold - 4
    assert holds(members, degree - 2, fewest, corrupt, lost)[1] is False


def test_small_cohorts_are_complete():
    assert graph_fields(20) == (19, 14)
    assert graph_fields(100) == (99, 67)
    assert graph_fields(2) == (1, 1)
    assert graph_fields(3) == (2, 2)
    for members in range(2, 101):
        degree, threshold = graph_fields(members)
        assert degree == members - 1
        assert 2 * threshold > degree
        assert threshold <= degree


@pytest.mark.parametrize("members", [0, 1])
def test_a_sum_over_one_member_is_no_sum(members):
    with pytest.raises(Failed, match="at least 2"):
        graph_fields(members)


def test_assumptions_that_no_graph_withstands_are_said_to_be_such():
    with pytest.raises(Failed, match="withstands"):
        graph_fields(200, Assumptions(0.6, 0.4))


@pytest.mark.parametrize("fractions", [(-0.1, 0.1), (0.1, 1.0), (math.nan, 0.1)])
def test_fractions_out_of_range_are_refused(fractions):
    with pytest.raises(ValueError, match="fraction"):
        Assumptions(*fractions)


@given(st.binary(min_size=32, max_size=32), st.integers(6, 60), st.integers(1, 10))
@settings(deadline=None)
def test_neighbours_are_mutual_and_as_many_as_the_degree(plan_hash, members, half):
    degree = min(2 * half, (members - 2) // 2 * 2)
    near = neighbourhoods(plan_hash, members, degree)
    for member, around in enumerate(near):
        assert len(around) == len(set(around)) == degree
        assert member not in around
        assert list(around) == sorted(around)
        assert all(member in near[other] for other in around)


def test_the_ring_is_connected_and_its_order_comes_from_the_plan():
    one, other = (neighbourhoods(bytes([n]) * 32, 40, 4) for n in (1, 2))
    assert one != other
    reached, frontier = {0}, [0]
    while frontier:
        frontier = [each for member in frontier for each in one[member] if each not in reached]
        reached.update(frontier)
    assert len(reached) == 40


def test_in_a_complete_graph_everybody_else_is_a_neighbour():
    assert neighbourhoods(bytes(32), 4, 3) == ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2))


@pytest.mark.parametrize(("members", "degree"), [(10, 5), (10, 0), (10, 10), (10, 12), (1, 0)])
def test_a_degree_that_no_graph_has_is_refused(members, degree):
    with pytest.raises(ValueError, match="degree"):
        neighbourhoods(bytes(32), members, degree)


def test_two_devices_withstand_nothing():
    assert tolerance([10, 10], *graph_fields(20)) == (0, 0)
    assert tolerance([1, 1], *graph_fields(2)) == (0, 0)


@given(st.lists(st.integers(1, 12), min_size=2, max_size=12))
@settings(deadline=None)
def test_what_a_complete_graph_withstands_is_what_counting_says(devices):
    members = sum(devices)
    degree, threshold = graph_fields(members) if members <= 100 else (members - 1, 2 * members // 3 + 1)
    found = tolerance(devices, degree, threshold)
    largest = sorted(devices, reverse=True)
    curious = lost = 0
    while curious + 2 < len(devices) and 2 * threshold > degree + sum(largest[: curious + 1]):
        curious += 1
    while lost + 1 < len(devices) and degree - sum(largest[: lost + 1]) >= threshold:
        lost += 1
    assert found == (curious, lost)


def test_members_on_devices_of_their_own_withstand_what_was_assumed():
    found = tolerance([1] * 300, *graph_fields(300))
    assert found.curious >= 30
    assert found.lost >= 60


def test_larger_devices_withstand_fewer_failures():
    fields = graph_fields(300)
    assert tolerance([1] * 300, *fields) > tolerance([10] * 30, *fields) > tolerance([100] * 3, *fields)
