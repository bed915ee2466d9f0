"""Measure what users who come later cost a host: the check of their wave, against that of the whole population."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.rows import Ask, Row, in_turn, lower
from coterie.crypto.beacon import draw_beacon
from coterie.rounds.membership import Membership
from coterie.rounds.population import Ids, Population, Wave
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.wire.v1 import common_pb2 as wire
from coterie.wire.v1.orchestrator_pb2 import CohortKind, RoundsPlan, RunPlan

_RUN = "bench"
_WAVE = 200
_PER_DEVICE = 100


def rows(ask: Ask) -> Iterator[Row]:
    """Measure the check of one wave at two sizes of the population before it: its CPU time, and what is sent for it."""
    for size in ask.size((20_000, 200_000), (400,)):
        yield from _rows(size)


def _rows(size: int) -> Iterator[Row]:
    key = Ed25519PrivateKey.generate()
    plan = RunPlan(
        run_id=_RUN,
        system="fedncf",
        secure_sum="masked",
        settings=FedNcfSettings(model="gmf", dim=3).to_json(),
        rounds=RoundsPlan(
            cohorts=CohortKind.COHORT_KIND_GROUPS,
            cohort=1000,
            group=100,
            min_cohort=2,
            min_sum=20,
            passes=100,
            most_users=2 * size,
        ),
    )
    base = Population(Ids.of(_ids("user", size)), [f"client/host-{n // _PER_DEVICE}" for n in range(size)])
    beacon, signature = draw_beacon(_RUN, base.hash(_RUN), key)
    base = replace(base, beacon=beacon, signature=signature)
    grown = replace(
        base,
        participants=Ids.of([*base.participants, *_ids("late", _WAVE)]),
        devices=[*base.devices, *(f"client/late-{n // _PER_DEVICE}" for n in range(_WAVE))],
        waves=(Wave(size, 3),),
    )
    grown = replace(grown, waves=(Wave(size, 3, *draw_beacon(_RUN, grown.hash(_RUN), key)),))
    whole, later = grown.to_wire().SerializeToString(), grown.later_waves(0).SerializeToString()
    own, public = base.participants[:_PER_DEVICE], key.public_key().public_bytes_raw()
    known = Membership(plan, "client/host-0", base, own, public)
    known.extended(wire.Waves.FromString(later), 2)

    def again() -> None:
        found = Population.from_wire(wire.Population.FromString(whole))
        Membership(plan, "client/host-0", found, own, public)

    ours, theirs = in_turn(lambda: known.extended(wire.Waves.FromString(later), 2), again)
    users = f"a wave of {_WAVE} users, who come to {size}"
    yield lower(
        f"waves.check.{size}", ours * 1e3, theirs * 1e3, "CPU ms", f"host, {users}; theirs: all of them"
    )
    yield lower(
        f"waves.bytes.{size}", float(len(later)), float(len(whole)), "bytes", f"sent to a host for {users}"
    )


def _ids(label: str, count: int) -> list[bytes]:
    return sorted(hashlib.sha256(f"{label} {n}".encode()).digest() for n in range(count))
