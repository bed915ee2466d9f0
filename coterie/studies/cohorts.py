"""The rounds of a run as its plan carries them, whether its users can fill them, and what its sums protect."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any

from coterie.config.fedncf import RoundsSettings
from coterie.config.run import RunSettings
from coterie.crypto.explicit import encode
from coterie.errors import ConfigError
from coterie.rounds import policy
from coterie.rounds.conductor import cohort_rule
from coterie.secure_sum.graph import graph_fields, tolerance
from coterie.secure_sum.protocol import Failed
from coterie.systems.registry import KEYED, fewest_users
from coterie.wire.v1.orchestrator_pb2 import CohortKind, RoundsPlan

__all__ = ["fragile", "protection", "require_cohorts", "rounds_plan"]

_FEWEST_HOLDERS = 3
_FEWEST_BEHIND = 3
"""Users behind a row from which on none of them knows the others' part."""

_KINDS = {
    "groups": CohortKind.COHORT_KIND_GROUPS,
    "random": CohortKind.COHORT_KIND_RANDOM,
    "all": CohortKind.COHORT_KIND_ALL,
    "independent": CohortKind.COHORT_KIND_INDEPENDENT,
}


def rounds_plan(settings: RoundsSettings, seed: int, *, sparse: bool = False) -> RoundsPlan:
    """Return the rounds of a run's plan.

    In an experiment the beacon is SHA-256 of a label and the seed, so that a run can be repeated: whoever starts it
    could try seeds until the groups please.  Otherwise it is left to the third party, which draws and signs one.
    """
    seeded = hashlib.sha256(encode("experiment-beacon", seed)).digest()
    return RoundsPlan(
        cohorts=_KINDS[settings.cohorts],
        cohort=settings.cohort,
        group=settings.group,
        beacon=seeded if settings.experiment else b"",
        redraw=settings.redraw,
        party_per_user=settings.party_per_user,
        min_cohort=settings.min_cohort,
        min_sum=settings.min_sum,
        experiment=settings.experiment,
        passes=settings.passes,
        evaluate_every=settings.evaluate_every,
        patience=settings.patience,
        choose_by=settings.choose_by,
        step_timeout_ms=round(settings.step_timeout_s * 1000),
        sparse=sparse,
    )


def require_cohorts(settings: RunSettings, users: int) -> None:
    """Check that so many users can fill the rounds of a run, and that their sums have room.

    Raises
    ------
    ConfigError
        Every round, or every evaluation, would be abandoned.
    """
    rounds = settings.rounds
    floor = max(rounds.min_cohort, rounds.min_sum)
    cohorts = policy.cohorts(cohort_rule(rounds_plan(rounds, 0)), users, 0)
    largest = max(len(cohort) for cohort in cohorts)
    if largest < floor:
        raise ConfigError(
            f"a cohort has {largest} of {users} users, and min_cohort {rounds.min_cohort}, min_sum {rounds.min_sum} "
            "would abandon it",
            hint="lower floors, or more users",
        )
    least, fewest = _least(settings, users), fewest_users(settings.system, settings.plan_settings())
    if settings.secure_sum in KEYED and least < fewest:
        raise ConfigError(
            f"sums over {least} users of {settings.system} have fewer than two unknowns for each value, and those who "
            f"hold the key decrypt none over fewer than {fewest}",
            hint=f"rounds.min_sum {fewest}, or fewer factors",
        )
    if largest > settings.room:
        wide = {"fedncf": "fewer fedncf.bits, a lower fedncf.n_cap", "fedmvmf": "fewer mvmf.bits"}.get(
            settings.system, f"fewer {settings.system}.bits"
        )
        raise ConfigError(
            f"a sum over a cohort of {largest} users would overflow: there is room for {settings.room}",
            hint=f"{wide}, or smaller cohorts",
        )


def protection(settings: RunSettings, devices: Sequence[int]) -> dict[str, Any]:
    """Return what the sums of a run protect, and what its cohorts give away, in words.

    Parameters
    ----------
    settings : RunSettings
    devices : sequence of int
        Users on each client host.

    Returns
    -------
    dict
        ``sum``, ``parties`` (``hosts`` or ``users``), ``says``: what the server sees of a contribution, ``warnings``;
        of a masked sum ``devices``: how many there are in a cohort, how many of them may be ``curious`` and how many
        ``lost``.
    """
    if settings.system == "drift":
        return _of_windows(settings, len([users for users in devices if users]))
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
    least, fewest = _least(settings, sum(devices)), fewest_users(settings.system, settings.plan_settings())
    if least < fewest:
        found["warnings"].append(
            f"Sums over {least} users, and fewer than {fewest} have fewer than two unknowns for each value: "
            "they may be solved for what is behind them."
        )
    return found


def fragile(settings: RunSettings, devices: Sequence[int]) -> list[str]:
    """Return warnings of masked sums over so few members that not one of them may be lost.

    Parameters
    ----------
    settings : RunSettings
    devices : sequence of int
        Users on each client host.
    """
    if settings.secure_sum != "masked":
        return []
    hosts = len([users for users in devices if users])
    if settings.system == "drift":
        # Without a number there is an owner for each genre of the data.
        sums = [(hosts, "client hosts", "its users are measured with the next one")]
        if settings.federation.owners:
            sums.append((settings.federation.owners, "data owners", "the next one has its rows"))
    else:
        members = sum(_members(settings, devices))
        sums = [
            (
                members,
                "users" if settings.rounds.party_per_user else "client hosts",
                "the model stays as it is",
            )
        ]
    return [
        f"A masked sum over {members} {what} bears no dropout: one of them lost, and it is abandoned ({then}). "
        f"From {_bearing()} members on a sum bears one."
        for members, what, then in sums
        if 2 <= members < _bearing()
    ]


@cache
def _bearing() -> int:
    """Return from how many members on a masked sum can be formed without one of them."""
    fields = ((members, graph_fields(members)) for members in count(2))
    return next(members for members, (degree, threshold) in fields if degree > threshold)


def _of_windows(settings: RunSettings, hosts: int) -> dict[str, Any]:
    """Return what the windows of DRIFT's shielded form protect."""
    drift, masked = settings.drift, settings.secure_sum == "masked"
    found: dict[str, Any] = {"sum": settings.secure_sum, "parties": "data owners", "warnings": []}
    rows = f"rows with at least {drift.k_min} users behind them"
    if masked:
        found["says"] = (
            f"The server sees, for each window, the sum over all owners that joined, of {rows}, and no vector of a "
            "single owner."
        )
        found["warnings"] += fragile(settings, [1] * hosts)
    else:
        found["says"] = f"The server sees, for each window, one vector of each owner, of {rows}."
    if drift.k_min < _FEWEST_BEHIND:
        found["warnings"].append(
            f"drift.k_min {drift.k_min}: rows of so few users leave their owner; of two users each would know the "
            "other's part."
        )
    if hosts and settings.rounds.experiment:
        found["warnings"].append(
            "An experiment: a host of this machine stands for many people's devices, and keeps all their rows."
        )
    return found


def _warnings(settings: RunSettings) -> list[str]:
    rounds = settings.rounds
    found = []
    if rounds.cohorts in ("random", "independent"):
        found.append(
            "Random cohorts: every round sums over other users, and who sees many such sums can solve for single "
            "users. Fixed groups do not have this."
        )
    of_system = {"fedncf": _of_fedncf, "fedmvmf": _of_fedmvmf, "fedmf": _of_fedmf, "fcf": _of_fcf}
    found += of_system[settings.system](settings)
    if settings.secure_sum != "clear" and rounds.experiment:
        found.append(
            "An experiment: floors count users, and a host of this machine stands for many people's devices."
        )
    return found


def _of_encryption(settings: RunSettings) -> list[str]:
    found, encryption = [], settings.encryption
    if encryption.comparison:
        found.append(
            f"A key of {encryption.bits} bits for a comparison with a paper: fewer than 2048 bits protect nobody."
        )
    shared = settings.secure_sum == "shared-key"
    # Who holds the key draws obfuscators by it, whatever is set for others.
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
            f"{holders} {who}: where one is lost, nothing is decrypted. Of {_FEWEST_HOLDERS} one may be."
        )
    return found


def _of_fedncf(settings: RunSettings) -> list[str]:
    rounds, fedncf = settings.rounds, settings.fedncf
    counted = fedncf.aggregation == "mf-fedavg"
    random = rounds.cohorts in ("random", "independent")
    found = []
    if counted and fedncf.touch == "exact":
        found.append(
            "Exact counts: each round tells the server how many of the cohort have, or drew, each item"
            + ("; with random cohorts many rounds give every user's items away." if random else ".")
        )
    if counted and fedncf.touch == "once" and random:
        found.append(
            "touch = once asks groups for their items, but cohorts are no groups: an item that enough users of a group "
            "have may have a single one in a cohort, whose row the sum then shows."
        )
    if not counted:
        found.append(
            f"{fedncf.aggregation}: no item is closed to a cohort in which a single user has it; its row is that "
            "user's."
        )
    return found


_NO_GROUPS = (
    "Groups are asked for the items that they have rated, but cohorts are no groups: an item that enough users of a "
    "group have rated may have a single one in a cohort, whose row the sum then shows."
)


def _few_behind(table: str, min_touch: int) -> list[str]:
    if min_touch >= _FEWEST_BEHIND:
        return []
    return [
        f"{table}.min_touch {min_touch}: rows of items that so few users have rated are trained; of two users each "
        "would know the other's part."
    ]


def _of_fedmf(settings: RunSettings) -> list[str]:
    found = [_NO_GROUPS] if settings.rounds.cohorts in ("random", "independent") else []
    found += _few_behind("fedmf", settings.fedmf.min_touch)
    if settings.secure_sum == "clear":
        found.append(
            "In a user's contribution the rows of items that it has not rated are zero: in clear it shows which it has "
            "rated, and the others are multiples of the user's own factor, or nearly so."
        )
    return found


def _of_fcf(settings: RunSettings) -> list[str]:
    return _few_behind("fcf", settings.fcf.min_touch)


def _of_fedmvmf(settings: RunSettings) -> list[str]:
    mvmf, found = settings.mvmf, []
    if settings.rounds.cohorts in ("random", "independent") and mvmf.weights != "incl-unc":
        found.append(_NO_GROUPS)
    found += _few_behind("mvmf", mvmf.min_touch)
    if mvmf.weights == "sampled" and mvmf.resample:
        found.append(
            "resample: unrated items are drawn anew in each round; who sees contributions of one user in two rounds "
            "knows what it has rated."
        )
    if mvmf.weights == "obs-only":
        found.append("obs-only: a contribution has rows of rated items only, and so shows which they are.")
    return found


def _least(settings: RunSettings, users: int) -> int:
    """Return the fewest users over which a sum of so many is formed."""
    rounds = settings.rounds
    if not users:
        return rounds.min_sum
    sizes = (len(one) for one in policy.cohorts(cohort_rule(rounds_plan(rounds, 0)), users, 0))
    # Shorter ones are abandoned.
    formed = [size for size in sizes if size >= max(rounds.min_cohort, rounds.min_sum)]
    return policy.min_sum(min(formed, default=0), rounds.min_sum)


def _short_cohorts(settings: RunSettings, users: int) -> str:
    rounds = settings.rounds
    if not users:
        return ""
    sizes = [len(one) for one in policy.cohorts(cohort_rule(rounds_plan(rounds, 0)), users, 0)]
    short = sum(max(rounds.min_cohort, rounds.min_sum) > size for size in sizes)
    return (
        f"{short} of the {len(sizes)} cohorts of a pass are below the floors and abandoned." if short else ""
    )


def _devices(settings: RunSettings, devices: Sequence[int]) -> dict[str, int]:
    """Say how many devices of a usual cohort may be curious and how many may be lost."""
    members = _members(settings, devices)
    try:
        degree, threshold = graph_fields(sum(members))
    except Failed:
        return {"count": len(members), "curious": 0, "lost": 0}
    withstood = tolerance(members, degree, threshold)
    return {"count": len(members), "curious": withstood.curious, "lost": withstood.lost}


def _members(settings: RunSettings, devices: Sequence[int]) -> list[int]:
    """Return how many members of a usual cohort each device speaks for."""
    sizes = [users for users in devices if users]
    if not settings.rounds.party_per_user:
        return [1] * len(sizes)
    # Users are spread at random: each device has its share of a cohort.
    cohort = policy.cohorts(cohort_rule(rounds_plan(settings.rounds, 0)), sum(sizes), 0)[0]
    place = [device for device, users in enumerate(sizes) for _ in range(users)]
    return list(Counter(place[position] for position in cohort.tolist()).values())
