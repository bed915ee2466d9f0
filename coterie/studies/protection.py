"""Checks of a run's cohorts before its start, and the protection of its sums in words for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import count
from typing import Any

from coterie.config.run import RunSettings
from coterie.errors import ConfigError
from coterie.rounds import policy
from coterie.rounds.conductor import cohort_rule
from coterie.rounds.training import Purpose
from coterie.secure_sum.graph import graph_fields, tolerance
from coterie.secure_sum.protocol import Failed
from coterie.secure_sum.registry import KEYED
from coterie.studies.run_plan import rounds_plan, run_plan
from coterie.systems.registry import fewest_users
from coterie.systems.run_settings import RoundsSettings
from coterie.systems.server_step import planned_server_side
from coterie.systems.settings import MaskedSum

__all__ = ["fragile", "protection", "require_cohorts", "require_pads"]

_FEWEST_HOLDERS = 3
_OF_METRICS = 65_537
"""Users for whom every sum of metrics has room, whose values have 16 bits at most."""


def require_cohorts(settings: RunSettings, users: int) -> None:
    """Check that a number of users can fill the rounds of a run, and that their sums do not overflow.

    Raises
    ------
    ConfigError
        Every cohort is below the floors, sums are over too few users for the key holders, or a sum would overflow.
    """
    rounds = settings.rounds
    floor = max(rounds.min_cohort, rounds.min_sum)
    cohorts = policy.cohorts(_rule(rounds), users, 0)
    largest = max(len(cohort) for cohort in cohorts)
    if largest < floor:
        raise ConfigError(
            f"a cohort has {largest} of {users} users, and min_cohort {rounds.min_cohort}, min_sum {rounds.min_sum} "
            "would abandon it",
            hint="lower floors, or more users",
        )
    least, fewest = _least(settings, users), fewest_users(settings.system, settings.own.for_plan(settings))
    if settings.secure_sum in KEYED and least < fewest:
        raise ConfigError(
            f"sums over {least} users of {settings.system} have fewer than two unknowns for each value, and those who "
            f"hold the key decrypt none over fewer than {fewest}",
            hint=f"rounds.min_sum {fewest}, or fewer factors",
        )
    # Those who may come later, too, in whichever waves.
    later = policy.largest_cohort(_rule(rounds), rounds.most_users, users) if rounds.most_users else 0
    _require_capacity(settings, max(users, rounds.most_users), max(largest, later))
    if rounds.privacy.terms.on and (why := _without_room(settings, users, largest)):
        fits = next(
            (noise for noise in _near(rounds.privacy.noise) if _fits(settings, noise, users, largest)), None
        )
        raise ConfigError(
            why,
            hint="fewer bits, or fewer users in a cohort"
            if fits is None
            else f"rounds.privacy.noise {fits:g} is the nearest that fits",
        )


def _require_capacity(settings: RunSettings, users: int, largest: int) -> None:
    """Check that the codes of all users of a sum can be added; name the ways out where they cannot."""
    narrower = settings.own.narrower(settings)
    if largest > (room := settings.own.room):
        raise ConfigError(
            f"a sum over a cohort of {largest} users would overflow: there is room for {room}",
            hint=f"codes of {_widest(largest)} bits at most ({narrower}); cohorts of at most {room} users; or a "
            "data set of so few",
        )
    # Hosts as members measure a version over all users at once, whatever the cohorts of training.
    measured = largest if settings.rounds.party_per_user else users
    if measured <= _OF_METRICS or settings.rounds.privacy.terms.on:
        return
    side = planned_server_side(run_plan(settings, run_id="preflight", seed=0), 1, 1)
    for purpose, summed in ((Purpose.TRAIN, largest), (Purpose.EVALUATE, measured)):
        if summed > (room := side.layout(purpose).capacity):
            raise ConfigError(
                f"a sum of metrics over {summed} users would overflow: there is room for {room}",
                hint=f"codes of {_widest(summed)} bits at most ({narrower}); rounds.party_per_user, with which users "
                f"are measured in cohorts, of at most {room}; or a data set of so few",
            )


def require_pads(settings: RunSettings, users: int, items: int) -> None:
    """Check that key holders compute the pads of a run's sums: they decline sums of more ciphertexts than that.

    Parameters
    ----------
    settings : RunSettings
    users, items : int
        Number of users and items of the data set.

    Raises
    ------
    ConfigError
        A sum has too many ciphertexts; the hint names the ways out.
    """
    # Without the extra for Paillier there is no sum, which preflight says elsewhere.
    if settings.secure_sum != "encrypted" or find_spec("gmpy2") is None:
        return
    from coterie.crypto.paillier.packing import Packing
    from coterie.secure_sum.key_holder import MOST_CIPHERTEXTS

    largest = max(len(cohort) for cohort in policy.cohorts(_rule(settings.rounds), users, 0))
    side = planned_server_side(run_plan(settings, run_id="preflight", seed=0), items, 1)
    for purpose in Purpose:
        if purpose is Purpose.SUPPORTS and not side.asks_supports:
            continue
        alone = settings.rounds.party_per_user or purpose is not Purpose.EVALUATE
        layout, summed = side.layout(purpose), largest if alone else users
        code_bits = max(segment.bits for segment in layout.segments)

        def taken(
            bits: int, size: int = layout.size, code_bits: int = code_bits, addends: int = summed
        ) -> int:
            return Packing(bits, code_bits, addends).ciphertexts(size)

        bits = settings.encryption.bits
        if (ciphertexts := taken(bits)) <= MOST_CIPHERTEXTS:
            continue
        longer = next(
            (b for b in (2048, 3072, 4096, 8192) if b > bits and taken(b) <= MOST_CIPHERTEXTS), None
        )
        ways = [] if longer is None else [f"encryption.bits {longer}"]
        ways += [settings.own.narrower(settings), "fewer items or factors", "or secure_sum 'masked'"]
        raise ConfigError(
            f"a sum ({purpose.value}) has {layout.size:,} values, {ciphertexts:,} ciphertexts, and key holders "
            f"compute pads for {MOST_CIPHERTEXTS:,} at most: they would decline every round",
            hint=", ".join(ways),
        )


def _widest(users: int) -> int:
    """Return the most bits of codes of which so many can be added (`Layout.capacity`)."""
    return ((2**32 - 1) // users + 1).bit_length() - 1


def _without_room(settings: RunSettings, users: int, largest: int) -> str:
    """Return why codes with noise have no room in the sums of a run; empty where they do."""
    try:
        plan = run_plan(settings, run_id="preflight", seed=0)
        side = planned_server_side(plan, settings.rounds.privacy.most_items, 1)
    except ConfigError as error:
        return error.message
    for purpose in Purpose:
        if purpose is Purpose.SUPPORTS and not side.asks_supports:
            continue
        alone = settings.rounds.party_per_user or purpose is not Purpose.EVALUATE
        room, summed = side.layout(purpose).capacity, largest if alone else users
        if summed > room:
            return (
                f"rounds.privacy.noise {settings.rounds.privacy.noise:g}: a sum ({purpose.value}) over {summed} "
                f"users would "
                f"overflow: with noise there is room for {room}"
            )
    return ""


def _near(noise: float) -> Iterator[float]:
    """Yield multiples of noise by powers of two, the nearest first."""
    for power in range(1, 25):
        yield noise / 2**power
        yield noise * 2**power


def _fits(settings: RunSettings, noise: float, users: int, largest: int) -> bool:
    private = settings.rounds.privacy.model_copy(update={"noise": noise})
    rounds = settings.rounds.model_copy(update={"privacy": private})
    return not _without_room(settings.model_copy(update={"rounds": rounds}), users, largest)


def protection(settings: RunSettings, devices: Sequence[int]) -> dict[str, Any]:
    """Return what the sums of a run protect and what its cohorts reveal, in words for the report.

    Parameters
    ----------
    settings : RunSettings
    devices : sequence of int
        Users on each client host.

    Returns
    -------
    dict
        ``sum``, ``parties`` (``hosts`` or ``users``), ``says`` (the server's view of a contribution), ``warnings``;
        for a masked sum also ``devices``: their ``count`` in a cohort, and how many may be ``curious`` and how many
        ``lost``.  A system may return facts of its own in its place.
    """
    hosts = len([users for users in devices if users])
    of_its_own = settings.own.protection(settings, hosts)
    if of_its_own is not None:
        of_its_own["warnings"] = [*fragile(settings, devices), *of_its_own["warnings"]]
        return of_its_own
    rounds = settings.rounds
    each = "user" if rounds.party_per_user else "host"
    found: dict[str, Any] = {
        "sum": settings.secure_sum,
        "parties": settings.form,
        "warnings": _warnings(settings),
    }
    if settings.secure_sum == "clear":
        found["says"] = f"The server sees the contribution of each {each} in clear" + (
            "." if rounds.party_per_user else ", a sum over its users of the cohort."
        )
    elif settings.secure_sum == "denoised":
        found["says"] = (
            f"The server sees the contribution of each {each} in clear, with the noise that the {each} added, and sums "
            "of the noise of groups; denoisers on other hosts see the noise of those that they serve."
        )
    elif settings.secure_sum == "encrypted":
        found["says"] = (
            f"The server sees sums over whole cohorts, and no contribution of a single {each}, unless one of the "
            f"{settings.encryption.holders} decrypting clients helps it: then they see everything."
        )
        found["warnings"] += _of_encryption(settings)
    elif settings.secure_sum == "shared-key":
        found["says"] = (
            f"The server sees sums of metrics over whole cohorts, no contribution of a single {each} and no model, "
            "unless one of the hosts, which share the key, helps it: then they see everything."
        )
        found["warnings"] += _of_encryption(settings)
    else:
        found["says"] = f"The server sees sums over whole cohorts, and no contribution of a single {each}."
        found["devices"] = _devices(settings, devices)
        found["warnings"] += fragile(settings, devices)
    if cut := _short_cohorts(settings, sum(devices)):
        found["warnings"].append(cut)
    least, fewest = (
        _least(settings, sum(devices)),
        fewest_users(settings.system, settings.own.for_plan(settings)),
    )
    if least < fewest:
        found["warnings"].append(
            f"Sums over {least} users, and fewer than {fewest} have fewer than two unknowns for each value: "
            "they may be solved for what is behind them."
        )
    return found


def fragile(settings: RunSettings, devices: Sequence[int]) -> list[str]:
    """Return a warning for each masked sum over so few members that a single dropout aborts it.

    Parameters
    ----------
    settings : RunSettings
    devices : sequence of int
        Users on each client host.
    """
    if settings.secure_sum != "masked":
        return []
    hosts = len([users for users in devices if users])
    sums = settings.own.masked_sums(settings, hosts)
    if sums is None:
        who = "users" if settings.rounds.party_per_user else "client hosts"
        sums = [MaskedSum(sum(_members(settings, devices)), who, "the model stays as it is")]
    return [
        f"A masked sum over {one.members} {one.who} bears no dropout: one of them lost, and it is abandoned "
        f"({one.otherwise}). "
        f"From {_bearing()} members on a sum bears one."
        for one in sums
        if 2 <= one.members < _bearing()
    ]


@cache
def _bearing() -> int:
    """Return the smallest number of members with which a masked sum tolerates one dropout."""
    fields = ((members, graph_fields(members)) for members in count(2))
    return next(members for members, (degree, threshold) in fields if degree > threshold)


def _warnings(settings: RunSettings) -> list[str]:
    rounds = settings.rounds
    found = []
    if rounds.cohorts in ("random", "independent"):
        found.append(
            "Random cohorts: every round sums over other users, and who sees many such sums can solve for single "
            "users. Fixed groups do not have this."
        )
    terms = rounds.aggregation.terms
    if not terms.adds:
        found.append(
            f"The rule {terms.rule!r} needs single contributions: the server keeps each one until the round ends."
        )
    elif terms.norm_bound:
        found.append(
            "Hosts enforce rounds.aggregation.norm_bound: one that lies can ignore it, and only the range of codes "
            "bounds it."
        )
    if rounds.privacy.terms.on:
        found += _of_noise(settings)
    found += settings.own.warnings(settings)
    if settings.secure_sum != "clear" and rounds.experiment:
        found.append(
            "An experiment: floors count users, and a host of this machine stands for many people's devices."
        )
    return found


def _of_noise(settings: RunSettings) -> list[str]:
    """Return what noise protects, and what it takes for granted."""
    private = run_plan(settings, run_id="preflight", seed=0).rounds.privacy
    if private.per_value:
        return [
            "rounds.privacy.per_value: noise is in proportion to single values, as published; whole contributions "
            "are as "
            "many times less protected as they have values, and the report states their epsilon."
        ]
    found = [
        f"Each user's data as a whole has an epsilon of at most {private.epsilon:.4g} at delta {private.delta:g} in "
        f"this "
        "run, sums of items and metrics included."
    ]
    if private.place == "distributed":
        found.append(
            f"That holds while hosts of all but {private.colluders} users of a sum add their noise and keep it to "
            "themselves."
        )
    return found


def _of_encryption(settings: RunSettings) -> list[str]:
    found, encryption = [], settings.encryption
    if encryption.comparison:
        found.append(
            f"A key of {encryption.bits} bits for a comparison with a paper: fewer than 2048 bits protect nobody."
        )
    shared = settings.secure_sum == "shared-key"
    # A key holder draws obfuscators by the secret key, whatever the setting for other contributors.
    if encryption.obfuscators == "short" and not shared:
        found.append("An extra assumption: powers with exponents of 512 bits look like any others.")
    holders, who = (
        (settings.federation.hosts, "hosts that share the key")
        if shared
        else (encryption.holders, "decrypting clients")
    )
    if settings.sparse:
        each = "user" if settings.rounds.party_per_user else "host"
        found.append(
            f"Contributions are sparse: the server and {holders} {who} see near which items each {each} has something."
        )
    if holders < _FEWEST_HOLDERS:
        found.append(
            f"{holders} {who}: where one is lost, nothing is decrypted. {_FEWEST_HOLDERS} tolerate one loss."
        )
    return found


def _least(settings: RunSettings, users: int) -> int:
    """Return the smallest number of users over which a run with ``users`` users forms a sum."""
    rounds = settings.rounds
    if not users:
        return rounds.min_sum
    sizes = (len(one) for one in policy.cohorts(_rule(rounds), users, 0))
    # Cohorts below the floors are abandoned.
    formed = [size for size in sizes if size >= max(rounds.min_cohort, rounds.min_sum)]
    return policy.min_sum(min(formed, default=0), rounds.min_sum)


def _short_cohorts(settings: RunSettings, users: int) -> str:
    rounds = settings.rounds
    if not users:
        return ""
    sizes = [len(one) for one in policy.cohorts(_rule(rounds), users, 0)]
    short = sum(max(rounds.min_cohort, rounds.min_sum) > size for size in sizes)
    return (
        f"{short} of the {len(sizes)} cohorts of a pass are below the floors and abandoned." if short else ""
    )


def _devices(settings: RunSettings, devices: Sequence[int]) -> dict[str, int]:
    """Return the number of devices in the first cohort, and how many may be curious and how many lost."""
    members = _members(settings, devices)
    try:
        degree, threshold = graph_fields(sum(members))
    except Failed:
        return {"count": len(members), "curious": 0, "lost": 0}
    withstood = tolerance(members, degree, threshold)
    return {"count": len(members), "curious": withstood.curious, "lost": withstood.lost}


def _members(settings: RunSettings, devices: Sequence[int]) -> list[int]:
    """Return, for each device with any, how many members of the first cohort it speaks for."""
    sizes = [users for users in devices if users]
    if not settings.rounds.party_per_user:
        return [1] * len(sizes)
    # Users are spread over devices at random, so the first cohort stands for the others.
    cohort = policy.cohorts(_rule(settings.rounds), sum(sizes), 0)[0]
    place = [device for device, users in enumerate(sizes) for _ in range(users)]
    return list(Counter(place[position] for position in cohort.tolist()).values())


def _rule(rounds: RoundsSettings) -> policy.CohortRule:
    """Return the rule of a run's cohorts; their sizes, which are asked for here, do not depend on the beacon."""
    plan = rounds_plan(rounds, 0)
    return cohort_rule(plan, plan.beacon)
