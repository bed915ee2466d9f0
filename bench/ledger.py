"""Measure what guards a run against a server that lies: its population, the third party's log, the ledger of sums."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from bench import masked
from bench.rows import Ask, Row, in_turn, lower
from coterie.crypto.beacon import Beacon, draw_beacon
from coterie.crypto.merkle import Tree, check_inclusion
from coterie.crypto.transparency import LogKey, entry_leaf
from coterie.rounds import policy
from coterie.rounds.ledger import Ledger, revealed_hash
from coterie.rounds.membership import Membership
from coterie.rounds.plan_hash import plan_hash
from coterie.rounds.population import Population, check_canonical
from coterie.rounds.training import Purpose
from coterie.secure_sum.plan import Member, SumPlan
from coterie.wire.v1.common_pb2 import Population as PopulationMessage
from coterie.wire.v1.orchestrator_pb2 import CohortKind, RoundsPlan, RunPlan

_DIRECTORY = Ed25519PrivateKey.generate()
_DIRECTORY_KEY = _DIRECTORY.public_key().public_bytes_raw()
_RUN = "bench"


def rows(ask: Ask) -> Iterator[Row]:
    """Measure populations, the log and the ledger."""
    for users in ask.size((100, 100_000), (100,)):
        yield from _population_rows(ask, users)
    for users, cohort in ask.size(((100_000, 1000), (100_000, 10_000)), ((100, 30),)):
        yield _cohort_row(ask, users, cohort)
    yield from _log_rows(ask, ask.size(100_000, 100))
    yield from _ledger_rows(ask, ask.size(100, 8))


def _population(users: int) -> Population:
    """Return a population whose users have a device each."""
    return Population(sorted(os.urandom(32) for _ in range(users)), [f"client/{n}" for n in range(users)])


def _population_rows(ask: Ask, users: int) -> Iterator[Row]:
    again = ask.size(3, 1)
    population = _population(users)
    payload = population.to_wire().SerializeToString()
    where = f"{users} users, a device each; the message has {len(payload)} bytes"

    def commit() -> Beacon:
        read = Population.from_wire(PopulationMessage.FromString(payload))
        check_canonical(read.participants)
        return draw_beacon(_RUN, read.hash(_RUN), _DIRECTORY)

    def bare() -> None:
        _DIRECTORY.sign(hashlib.sha256(payload).digest())

    ours, theirs = in_turn(commit, bare, again)
    yield lower(
        f"population.commit.{users}",
        ours * 1e3,
        theirs * 1e3,
        "CPU ms",
        f"third party, without its store, against SHA-256 of the message and a signature; {where}",
    )
    beacon = commit()
    signed = Population(population.participants, population.devices, beacon.value, beacon.signature)
    message = signed.to_wire().SerializeToString()
    plan = _run_plan(users, experiment=False)

    def accept() -> None:
        read = Population.from_wire(PopulationMessage.FromString(message))
        Membership(plan, "client/0", read, population.participants[:1], _DIRECTORY_KEY)

    ours, theirs = in_turn(accept, bare, again)
    yield lower(
        f"population.accept.{users}",
        ours * 1e3,
        theirs * 1e3,
        "CPU ms",
        f"a host, once for each run, against the same; {where}",
    )


def _run_plan(cohort: int, *, experiment: bool) -> RunPlan:
    rounds = RoundsPlan(
        cohorts=CohortKind.COHORT_KIND_RANDOM,
        cohort=cohort,
        group=cohort,
        party_per_user=True,
        min_cohort=2,
        min_sum=2,
        passes=3,
        experiment=experiment,
        beacon=bytes(32) if experiment else b"",
    )
    return RunPlan(run_id=_RUN, system="fedncf", secure_sum="masked", rounds=rounds)


def _cohort_row(ask: Ask, users: int, cohort: int) -> Row:
    """Compare a host's check of a plan with one that makes each expected member and compares it."""
    population, plan = _population(users), _run_plan(cohort, experiment=True)
    host = Membership(plan, "client/0", population, population.participants[:1])
    drawn = host.cohort(Purpose.TRAIN, 0, 0)
    members = _members(population, drawn)
    asked = SumPlan(
        _RUN,
        1,
        "train",
        "masked",
        bytes(32),
        bytes(32),
        # As read from a message, no object is the population's own.
        tuple(Member(bytes(bytearray(one.participant)), f"{one.device}", one.users) for one in members),
        min_sum=policy.min_sum(cohort, 2),
        run_plan_sha256=plan_hash(plan),
        population_sha256=host.sha256,
        beacon=bytes(32),
    )

    def check() -> None:
        host.covered(asked)

    def one_by_one() -> None:
        for told, expected in zip(asked.members, _members(population, drawn), strict=True):
            if told != expected:
                raise AssertionError("the plan is another one")

    ours, theirs = in_turn(check, one_by_one, ask.size(7, 1))
    return lower(
        f"population.cohort.{cohort}",
        ours * 1e3,
        theirs * 1e3,
        "CPU ms",
        f"a host's check of a plan of {cohort} members, for each sum, against one by one; {users} users",
    )


def _members(population: Population, cohort: NDArray[np.int64]) -> list[Member]:
    made = population.members(cohort.tolist(), party_per_user=True)
    return [population.member(positions) for positions in made.values()]


def _log_rows(ask: Ask, entries: int) -> Iterator[Row]:
    again, count = ask.size(5, 1), ask.size(1000, 10)
    statements = [os.urandom(300) for _ in range(count)]
    tree = Tree()
    for number in range(entries):
        tree.append(hashlib.sha256(number.to_bytes(8, "big")).digest())
    where = f"in a log of {entries} entries"

    def append() -> None:
        for statement in statements:
            tree.append(entry_leaf("bundle", statement))

    def hashed() -> None:
        for statement in statements:
            hashlib.sha256(statement).digest()

    yield _each(
        "log.append",
        append,
        hashed,
        count,
        again,
        f"{where}, without its store, against SHA-256 of the entry",
    )
    size = len(tree)
    root = tree.root(size)
    places = np.random.default_rng(0).integers(0, entries, count).tolist()
    proofs = [tree.inclusion(place, size) for place in places]
    leaves = [hashlib.sha256(place.to_bytes(8, "big")).digest() for place in places]

    def prove() -> None:
        for place in places:
            tree.inclusion(place, size)

    def check() -> None:
        for leaf, place, proof in zip(leaves, places, proofs, strict=True):
            check_inclusion(leaf, place, size, proof, root)

    longest = max(32 * len(proof) for proof in proofs)
    note = f"{where}, proof against check; a proof has up to {longest} bytes"
    yield _each("log.inclusion", prove, check, count, again, note)
    key = LogKey(Ed25519PrivateKey.generate(), _DIRECTORY)
    head = key.sign(size, root, 0)
    sent = 16 + sum(len(part) for part in (root, head.log_key, head.certification, head.signature))

    def sign() -> None:
        for moment in range(count):
            key.sign(size, root, moment)

    def verify() -> None:
        for _ in range(count):
            head.verify(_DIRECTORY_KEY)

    yield _each(
        "log.head", sign, verify, count, again, f"signature against its check; a head has {sent} bytes"
    )


def _each(
    name: str, ours: Callable[[], None], theirs: Callable[[], None], count: int, again: int, note: str
) -> Row:
    mine, other = in_turn(ours, theirs, again)
    return lower(name, mine / count * 1e6, other / count * 1e6, "CPU us", note)


def _ledger_rows(ask: Ask, members: int) -> Iterator[Row]:
    """Measure a member's entry in its ledger, beside all that it does in a masked round."""
    population = _population(members)
    plans = [
        SumPlan(
            _RUN,
            number,
            purpose.value,
            "masked",
            bytes(32),
            bytes(32),
            tuple(_members(population, np.arange(members))),
            pass_number=99,
            part=9,
        )
        for number, purpose in enumerate(Purpose, start=1)
    ]
    held = Ledger()
    for plan in plans:
        held = held.with_revealed(plan, revealed_hash(plan, range(members)))
    hashes, again = ask.size(20, 1), ask.size(5, 1)
    everybody = range(members)

    def hashed() -> None:
        for _ in range(hashes):
            held.with_revealed(plans[0], revealed_hash(plans[0], everybody)).to_text()

    ours = in_turn(hashed, hashed, again)[0] / hashes
    values = ask.size(65_536, 256)
    member = masked.member_seconds(members, values)
    yield lower(
        f"ledger.entry.{members}",
        ours * 1e3,
        member * 1e3,
        "CPU ms",
        f"hash and entry, {ours / member:.2%} of a member's round; masked, {members} members, {values} values",
    )
    yield Row(
        "ledger.bytes",
        float(len(held.to_text())),
        None,
        "bytes",
        None,
        f"for each member or key holder, whatever the length of the run: an entry for each of {len(plans)} purposes",
    )
