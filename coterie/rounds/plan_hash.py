"""The hash of a run's plan, which the operator signs, and hashes of lists of items."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from coterie.crypto.explicit import encode
from coterie.rounds.plan_versions import later_fields
from coterie.wire.v1.orchestrator_pb2 import Holding, RoundsPlan, RunPlan

__all__ = ["holding_of", "keys_hash", "plan_hash"]


def plan_hash(plan: RunPlan) -> bytes:
    """Return the SHA-256 of a plan's explicit encoding: label ``plan``, then every field in the contract's order.

    The fields of ``rounds`` come one after the other, then the number of holdings and the fields of each.  Where there
    is an optimiser, the word ``server_optimiser`` and its fields follow, and where contributions are not simply added
    the word ``aggregation`` and its fields; where they get noise the word ``privacy`` and its fields.  These are the
    fields of version 1 of the protocol.  Of each later field that does not have its default, its path and its value
    follow, so that a plan which uses none has the hash that parties of version 1 compute.

    Numbers with a fraction are their IEEE 754 bytes, big-endian: of single precision, but for those of the optimiser,
    of privacy and of later fields, which are of double precision.  Truth values are 0 or 1.
    """
    return hashlib.sha256(
        encode(
            "plan",
            plan.run_id,
            plan.system,
            plan.form,
            plan.secure_sum,
            plan.dim,
            struct.pack(">f", plan.rate),
            struct.pack(">f", plan.ridge),
            plan.theta,
            int(plan.item_bias),
            plan.seed,
            plan.max_staleness,
            plan.epochs,
            plan.min_users,
            plan.settings,
            *_rounds(plan.rounds),
            len(plan.holdings),
            *_holdings(plan.holdings),
            *_optimiser(plan.rounds),
            *_aggregation(plan.rounds),
            *_privacy(plan.rounds),
            *_later(plan),
        )
    ).digest()


def keys_hash(keys: Iterable[str]) -> bytes:
    """Return the SHA-256 of items' external keys in the order given, 32 bytes.

    Explicit encoding: label ``items``, then one field: the SHA-256 of the hashes of all keys, one after the other.
    The hash of a key is the SHA-256 of its UTF-8 bytes.
    """
    content = hashlib.sha256()
    for key in keys:
        content.update(hashlib.sha256(key.encode()).digest())
    return hashlib.sha256(encode("items", content.digest())).digest()


def holding_of(owner: str, keys: Iterable[str], party: str) -> Holding:
    """Return the statement that an owner of a data-owner process holds these items, in whatever order they come."""
    ordered = sorted(set(keys))
    return Holding(owner=owner, items=len(ordered), items_sha256=keys_hash(ordered), party=party)


def _rounds(rounds: RoundsPlan) -> tuple[bytes | str | int, ...]:
    return (
        rounds.cohorts,
        rounds.cohort,
        rounds.group,
        rounds.beacon,
        int(rounds.party_per_user),
        rounds.min_cohort,
        rounds.min_sum,
        int(rounds.experiment),
        rounds.passes,
        rounds.evaluate_every,
        rounds.patience,
        rounds.choose_by,
        rounds.step_timeout_ms,
        rounds.redraw,
        rounds.beacon_signature,
        int(rounds.sparse),
    )


def _holdings(holdings: Iterable[Holding]) -> Iterable[bytes | str | int]:
    for one in holdings:
        yield from (one.owner, one.items, one.items_sha256, one.party)


def _optimiser(rounds: RoundsPlan) -> tuple[bytes | str | int, ...]:
    if not rounds.HasField("server_optimiser"):
        return ()
    one = rounds.server_optimiser
    numbers = (one.rate, one.beta1, one.beta2, one.tau)
    return "server_optimiser", one.name, *(struct.pack(">d", number) for number in numbers)


def _aggregation(rounds: RoundsPlan) -> tuple[bytes | str, ...]:
    # Left out where it is absent: the hash of such a plan is that of releases that did not have it.
    if not rounds.HasField("aggregation"):
        return ()
    one = rounds.aggregation
    return "aggregation", one.rule, struct.pack(">f", one.byzantine), struct.pack(">f", one.norm_bound)


def _privacy(rounds: RoundsPlan) -> tuple[bytes | str | int, ...]:
    if not rounds.HasField("privacy"):
        return ()
    one = rounds.privacy
    return (
        "privacy",
        one.place,
        one.mechanism,
        struct.pack(">d", one.noise),
        struct.pack(">d", one.clip),
        one.most_items,
        struct.pack(">d", one.most_metrics),
        struct.pack(">d", one.delta),
        one.colluders,
        int(one.per_value),
        struct.pack(">d", one.epsilon),
    )


def _later(plan: RunPlan) -> Iterable[bytes | str | int]:
    for _, path, value in later_fields(plan):
        yield path
        yield _encoded(value)


def _encoded(value: object) -> bytes | str | int:
    match value:
        case bool():
            return int(value)
        case int() | str() | bytes():
            return value
        case float():
            return struct.pack(">d", value)
        case _:
            raise AssertionError(f"a later field of a plan is no {type(value).__name__}")
