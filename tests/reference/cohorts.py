"""Groups and cohorts (docs/spec/cohorts.md)."""

import hashlib

from .explicit import digest, encode
from .primitives import Refused, ed25519_check


def population_hash(run_id, participants, devices):
    """Return the hash of a population: ids and devices of its users, in order."""
    fields = [field for pair in zip(participants, devices, strict=True) for field in pair]
    return digest("population", run_id, len(participants), *fields)


def wave_hash(run_id, number, from_pass, before, participants, devices):
    """Return the hash of a population up to and with a wave of users who came later."""
    fields = [field for pair in zip(participants, devices, strict=True) for field in pair]
    return digest("population-wave", run_id, number, from_pass, before, len(participants), *fields)


def check_population(run_id, message, directory_public):
    """Check a ``Population``, a dict, and return its hash, up to and with its last wave."""
    whole = message["participants"]
    participants = [whole[at : at + 32] for at in range(0, len(whole), 32)]
    devices = [message["devices"][n] for n in message["device"]]
    waves = message.get("waves") or []
    ends = [*(wave["first"] for wave in waves), len(participants)]
    found, last = population_hash(run_id, participants[: ends[0]], devices[: ends[0]]), 0
    for number, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
        drawn = waves[number - 1] if number else message
        if number:
            users = participants[first:end], devices[first:end]
            found = wave_hash(run_id, number, drawn["from_pass"], found, *users)
            if drawn["from_pass"] <= last:
                raise Refused("a wave that does not come after the one before")
            last = drawn["from_pass"]
        signed = encode("beacon", run_id, found, drawn["beacon"])
        ed25519_check(directory_public, drawn["beacon_signature"], signed, "the beacon")
        if len(drawn["beacon"]) != 32 or participants[first:end] != sorted(set(participants[first:end])):
            raise Refused("a population in another order, or with somebody twice")
    if len(set(participants)) != len(participants):
        raise Refused("a population with somebody twice")
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


def grown_groups(waves, least, users):
    """Return the groups of a population with waves, by first user and beacon of the beginning and of each wave."""
    ends = [*(first for first, _ in waves[1:]), users]
    return [
        [first + user for user in group]
        for (first, beacon), end in zip(waves, ends, strict=True)
        for group in groups(beacon, least, end - first)
    ]


def cohorts(kind, beacon, size, least, users, pass_number, redraw=0, waves=None):
    """Return the cohorts of one pass, each ascending; ``beacon`` is that of the last wave where there are any."""
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
    fixed = grown_groups(waves, least, users) if waves else None
    fixed = fixed or groups(beacon, least, users, drawing(redraw, pass_number))
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
