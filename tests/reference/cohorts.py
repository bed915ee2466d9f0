"""Groups and cohorts (docs/spec/cohorts.md)."""

import hashlib

from .explicit import digest, encode
from .primitives import Refused, ed25519_check


def population_hash(run_id, participants, devices):
    """Return the hash of a population: ids and devices of its users, in order."""
    fields = [field for pair in zip(participants, devices, strict=True) for field in pair]
    return digest("population", run_id, len(participants), *fields)


def check_population(run_id, message, directory_public):
    """Check a ``Population``, a dict, and return its hash."""
    whole = message["participants"]
    participants = [whole[at : at + 32] for at in range(0, len(whole), 32)]
    found = population_hash(run_id, participants, [message["devices"][n] for n in message["device"]])
    signed = encode("beacon", run_id, found, message["beacon"])
    ed25519_check(directory_public, message["beacon_signature"], signed, "the beacon")
    if len(message["beacon"]) != 32 or participants != sorted(set(participants)):
        raise Refused("a population in another order, or with somebody twice")
    return found


def permutation(beacon, purpose, number, count):
    """Return the numbers below ``count`` in the order that a beacon gives."""
    stream = hashlib.shake_256(encode(purpose, beacon, number, count)).digest(8 * count)
    keys = [int.from_bytes(stream[8 * at : 8 * at + 8], "big") for at in range(count)]
    return sorted(range(count), key=lambda at: (keys[at], at))


def drawing(redraw, pass_number):
    """Return which drawing of the groups a pass has."""
    return pass_number // redraw if redraw else 0


def groups(beacon, least, users, drawn=0):
    """Return the groups of a drawing, each ascending."""
    count = max(users // max(least, 1), 1)
    order = permutation(beacon, "groups", drawn, users)
    small, larger = divmod(users, count)
    found, at = [], 0
    for number in range(count):
        size = small + (1 if number < larger else 0)
        found.append(sorted(order[at : at + size]))
        at += size
    return found


def cohorts(kind, beacon, size, least, users, pass_number, redraw=0):
    """Return the cohorts of one pass, each ascending."""
    if kind == "all" or users <= size:
        return [list(range(users))]
    if kind in ("random", "independent"):
        count, rest = divmod(users, size)
        if 2 * rest >= size:
            count += 1
        if kind == "independent":
            numbers = range(pass_number * count, pass_number * count + count)
            return [sorted(permutation(beacon, "independent-cohorts", n, users)[:size]) for n in numbers]
        order = permutation(beacon, "cohorts", pass_number, users)
        pieces = [order[at * size : (at + 1) * size] for at in range(count - 1)]
        return [sorted(piece) for piece in [*pieces, order[(count - 1) * size :]]]
    fixed = groups(beacon, least, users, drawing(redraw, pass_number))
    smallest = min(len(one) for one in fixed)
    per = min(max(-(-size // smallest), 1), len(fixed))
    order = permutation(beacon, "cohorts", pass_number, len(fixed))
    starts = list(range(0, len(fixed) - per + 1, per))
    ends = [*starts[1:], len(fixed)]
    return [
        sorted(user for number in order[start:end] for user in fixed[number])
        for start, end in zip(starts, ends, strict=True)
    ]


def min_sum(users, floor):
    """Return the fewest users over which a sum of a cohort is formed."""
    return max(floor, -(-2 * users // 3))
