"""Neighbours in the masking graph, and their number (docs/spec/graph.md); probabilities are exact fractions."""

from fractions import Fraction
from math import comb

from .explicit import digest


def seed(plan, plan_hash):
    """Return the seed of the graph of a ``SumPlan``, a dict."""
    if not plan["beacon"]:
        return plan_hash
    names = "beacon", "run_id", "purpose", "pass_number", "part"
    return digest("graph-seed", *(plan[name] for name in names))


def neighbourhoods(seed, members, degree):
    """Return each member's neighbours, ascending."""
    if degree == members - 1:
        return [[each for each in range(members) if each != member] for member in range(members)]
    ring = sorted(range(members), key=lambda position: digest("graph", seed, position))
    found = [None] * members
    for place, member in enumerate(ring):
        steps = [*range(-(degree // 2), 0), *range(1, degree // 2 + 1)]
        found[member] = sorted(ring[(place + step) % members] for step in steps)
    return found


def rule(members, corrupt=Fraction(1, 10), dropout=Fraction(2, 10)):
    """Return degree and threshold for so many members."""
    if members <= 100:
        return members - 1, min(2 * members // 3 + 1, members - 1)
    bad, lost = int(members * corrupt), int(members * dropout)
    threshold = 1
    for degree in range(2, members - 1, 2):
        whole = comb(members - 1, degree)
        while members * _at_least(members - 1, bad, degree, 2 * threshold - degree) << 40 > whole:
            threshold += 1
        few = _at_least(members - 1, lost, degree, degree - threshold + 1)
        if threshold <= degree and members * few << 30 <= whole:
            return degree, threshold
    raise ValueError(f"no graph of {members} members")


def _at_least(population, marked, drawn, least):
    """Return in how many of the ways to draw there are at least so many marked ones."""
    least, most = max(least, drawn - (population - marked), 0), min(drawn, marked)
    if least > most:
        return 0
    term = comb(marked, least) * comb(population - marked, drawn - least)
    found = 0
    for count in range(least, most + 1):
        found += term
        if count < most:
            term = term * (marked - count) * (drawn - count)
            term //= (count + 1) * (population - marked - drawn + count + 1)
    return found
