"""Measure what users who come later cost: a host, for the check of their wave, the COS and the third party.

A host's check of a wave is compared with that of the whole population.  At the COS and the third party a wave is to
cost the same in every population.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa
from coterie_cos.rounds_run import RoundsRun
from coterie_cos.summing import Surroundings
from coterie_thirdparty.directory import parsed_wave
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.rows import Ask, Row, in_turn, lower
from coterie.crypto.beacon import Beacon, draw_beacon
from coterie.rounds.membership import Membership
from coterie.rounds.population import Ids, Population, Wave
from coterie.rounds.training import Purpose
from coterie.store import cos as cos_store
from coterie.store import thirdparty as thirdparty_store
from coterie.store.engine import Term, Writer, open_sqlite
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.telemetry.accounting import Accounting
from coterie.wire.v1 import common_pb2 as wire
from coterie.wire.v1.operator_pb2 import StartRunRequest
from coterie.wire.v1.orchestrator_pb2 import CohortKind, Participant, RoundsPlan, RunPlan

_RUN = "bench"
_WAVE = 200
_PER_DEVICE = 100
_WAVES = 5


def rows(ask: Ask) -> Iterator[Row]:
    """Measure one wave at two sizes of the population before it: its CPU time everywhere, and what is sent for it."""
    for size in ask.size((20_000, 200_000), (400,)):
        yield from _rows(size)
    small, large = ask.size((20_000, 200_000), (400, 800))
    found = {size: asyncio.run(_Servers(size).measured()) for size in (small, large)}
    for name, unit, what in (
        ("cos", "CPU ms", f"COS: a wave of {_WAVE} users, looked for, signed and taken in"),
        ("thirdparty", "CPU ms", f"third party: a wave of {_WAVE} users, checked, signed and kept"),
        ("state", "bytes", "COS: the state of a run, written twice in each round"),
    ):
        yield lower(
            f"waves.{name}",
            found[large][name],
            found[small][name],
            unit,
            f"{what}; {large} users against {small}",
        )


class _Servers:
    """A run at the COS and a third party, each with its store, in this process and without sockets.

    Parameters
    ----------
    size : int
        Users of the beginning.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._key = Ed25519PrivateKey.generate()
        self._thirdparty_s = 0.0

    async def measured(self) -> dict[str, float]:
        with tempfile.TemporaryDirectory(prefix="coterie-bench-") as folder:
            engine = open_sqlite(Path(folder) / "cos.db", "cos")
            writer = Writer(engine)
            self._directory = thirdparty_store.ThirdPartyStore(Path(folder) / "directory.db")
            run = self._run(Path(folder), writer)
            with engine.begin() as connection:
                row = {"run_id": _RUN, "request": b"", "plan_hash": b"", "state": run.state_json()}
                connection.execute(cos_store.runs.insert(), row)
            try:
                return await self._timed(run)
            finally:
                await run.drop()
                writer.close()
                self._directory.close()

    async def _timed(self, run: RoundsRun) -> dict[str, float]:
        run.registry.add("data-owner/zoo", [bytes(32)], {0: Participant(name="zoo")})
        await run.joined("data-owner/zoo", catalogue=False, more=True)
        await self._come(run, "user", self._size)
        await run._gathered()
        await _asked(run)
        if not run._sums.busy:
            raise AssertionError("the run has not begun")
        cos, third = [], []
        # With the first wave the third party learns who the users are.
        for number in range(_WAVES + 1):
            await self._come(run, f"late-{number}", _WAVE)
            self._thirdparty_s, before = 0.0, time.process_time()
            run._invite()
            await _asked(run)
            wave = run._census.after(len(run.state.users))
            if wave is None or not wave.drawn:
                raise AssertionError("the third party signed no wave")
            was = run.state
            run.state = replace(was, purpose=Purpose.TRAIN, part=0, pass_number=wave.from_pass)
            run._grow(wave.slots)
            await run._save(was)
            cos.append(time.process_time() - before - self._thirdparty_s)
            third.append(self._thirdparty_s)
        return {
            "cos": statistics.median(cos[1:]) * 1e3,
            "thirdparty": statistics.median(third[1:]) * 1e3,
            "state": float(len(run.state_json())),
        }

    async def _come(self, run: RoundsRun, label: str, count: int) -> None:
        """Enrol and register devices, with the users that each has."""
        ids = _ids(label, count)
        for first in range(0, count, _PER_DEVICE):
            party, own = f"client/{label}-{first}", ids[first : first + _PER_DEVICE]
            run.registry.add(party, own, {})
            await self._directory._write(functools.partial(_enrol, participants=own, party=party))
            await run.joined(party, catalogue=False, more=True)

    async def _commit(self, run_id: str, population: Population) -> Beacon:
        """Do what COS and third party do for a population: the whole one at first, then the last wave alone."""

        def draw(sha256: bytes) -> Beacon:
            return draw_beacon(run_id, sha256, self._key)

        number = len(population.waves)
        hashes = population.hashes(run_id)
        payload = population.later_waves(number - 1).SerializeToString() if number > 1 else b""
        before = time.process_time()
        store = self._directory
        if number > 1:
            found = await store.extend_population(run_id, number, hashes[-2], parsed_wave(payload), draw)
        elif number:
            found = await store.commit_wave(run_id, population, draw)
        else:
            found = await store.commit_population(run_id, population.participants, population.devices, draw)
        self._thirdparty_s += time.process_time() - before
        return found

    def _run(self, folder: Path, writer: Writer) -> RoundsRun:
        request = StartRunRequest(
            plan=_plan(self._size, passes=100_000, secure_sum="clear", party_per_user=True),
            expect_owners=1,
            expect_users=self._size,
            phase_timeout_ms=3_600_000,
            party_timeout_ms=3_600_000,
        )
        around = Surroundings(
            folder, Term(writer), lambda: (0, 0), Accounting(), bytes(32), lambda _: False, self._commit
        )
        return RoundsRun(request, around)


async def _asked(run: RoundsRun) -> None:
    """Wait until the third party has answered."""
    if run._census._asking is None:
        raise AssertionError("the third party was not asked")
    await run._census._asking


def _enrol(connection: sa.Connection, participants: Sequence[bytes], party: str) -> None:
    """Keep bundles of users, of which only the party is looked at."""
    row = {"party": party, "token_hash": b"", "version": 1, "message": b""}
    connection.execute(
        thirdparty_store.bundles.insert(), [{**row, "participant": one} for one in participants]
    )


def _plan(size: int, *, passes: int, secure_sum: str, party_per_user: bool = False) -> RunPlan:
    return RunPlan(
        run_id=_RUN,
        system="fedncf",
        secure_sum=secure_sum,
        settings=FedNcfSettings(model="gmf", dim=3, min_touch=1).to_json(),
        rounds=RoundsPlan(
            cohorts=CohortKind.COHORT_KIND_GROUPS,
            cohort=1000,
            group=100,
            min_cohort=2,
            min_sum=20,
            passes=passes,
            evaluate_every=passes,
            most_users=2 * size + (_WAVES + 1) * _WAVE,
            step_timeout_ms=3_600_000,
            party_per_user=party_per_user,
        ),
    )


def _rows(size: int) -> Iterator[Row]:
    key = Ed25519PrivateKey.generate()
    plan = _plan(size, passes=100, secure_sum="masked")
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
