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
    participants, devices, ends = _people(message)
    found = population_hash(run_id, participants[: ends[0]], devices[: ends[0]])
    _check_part(run_id, message, found, participants[: ends[0]], directory_public)
    return check_waves(run_id, message, found, 1, directory_public)


def check_waves(run_id, message, before, first, directory_public):
    """Check the waves of a ``Population`` from a number on, by the hash before them; return the hash of the last."""
    participants, devices, ends = _people(message)
    waves, found = message.get("waves") or [], before
    last = waves[first - 2]["from_pass"] if first > 1 else 0
    for number in range(first, len(waves) + 1):
        users, wave = slice(ends[number - 1], ends[number]), waves[number - 1]
        if wave["from_pass"] <= last:
            raise Refused("a wave that does not come after the one before")
        last = wave["from_pass"]
        found = wave_hash(run_id, number, last, found, participants[users], devices[users])
        _check_part(run_id, wave, found, participants[users], directory_public)
    if len(set(participants)) != len(participants):
        raise Refused("a population with somebody twice")
    return found


def _people(message):
    """Return participants and devices of a population, and where its beginning and each of its waves end."""
    whole = message["participants"]
    participants = [whole[at : at + 32] for at in range(0, len(whole), 32)]
    ends = [*(wave["first"] for wave in message.get("waves") or []), len(participants)]
    return participants, [message["devices"][n] for n in message["device"]], ends


def _check_part(run_id, drawn, found, participants, directory_public):
    signed = encode("beacon", run_id, found, drawn["beacon"])
    ed25519_check(directory_public, drawn["beacon_signature"], signed, "the beacon")
    if len(drawn["beacon"]) != 32 or participants != sorted(set(participants)):
        raise Refused("a population in another order, or with somebody twice")


def with_waves(run_id, population, waves, directory_public):
    """Return a checked ``Population`` with ``Waves`` that follow it, both dicts; only the waves are checked."""
    known, users = population.get("waves") or [], len(population["device"])
    whole = population["participants"] + waves["participants"]
    names, device = list(population["devices"]), list(population["device"])
    for number in waves["device"]:
        name = waves["devices"][number]
        if name not in names:
            names.append(name)
        device.append(names.index(name))
    moved = [{**one, "first": users + one["first"]} for one in waves["waves"]]
    if moved[0]["first"] != users:
        raise Refused("users of no wave")
    found = {
        **population,
        "participants": whole,
        "devices": names,
        "device": device,
        "waves": [*known, *moved],
    }
    check_waves(run_id, found, population_hash_of(run_id, population), len(known) + 1, directory_public)
    return found


def population_hash_of(run_id, message):
    """Return the hash of a ``Population``, a dict, up to and with its last wave, without checks."""
    participants, devices, ends = _people(message)
    found = population_hash(run_id, participants[: ends[0]], devices[: ends[0]])
    for number, wave in enumerate(message.get("waves") or [], start=1):
        users = slice(ends[number - 1], ends[number])
        found = wave_hash(run_id, number, wave["from_pass"], found, participants[users], devices[users])
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
