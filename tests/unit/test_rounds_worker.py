"""A client host in rounds, with a party in memory: what is durable before what is sent, and what is not sent at all."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from coterie_client.history import Histories
from coterie_client.host import Host
from coterie_client.preferences import Preferences
from coterie_client.rounds import Rounds

from coterie.config.services import ClientSettings
from coterie.crypto.identity import Identity
from coterie.errors import PeerError
from coterie.parties.party import Item
from coterie.rounds.conductor import Conductor, model_to_bytes
from coterie.rounds.inputs import CATALOGUE, OPEN_ITEMS
from coterie.rounds.plan_hash import keys_hash
from coterie.rounds.population import Population
from coterie.rounds.stance import STANCE, changed_stance
from coterie.rounds.training import Purpose, Training
from coterie.secure_sum.clear import ClearServer
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.steps import STEP_IN_TASK
from coterie.store import client as store
from coterie.store.engine import Writer, open_sqlite
from coterie.systems.fedncf.mathematics import initial
from coterie.systems.fedncf.server import FedNcfServer
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.telemetry.accounting import Accounting
from coterie.wire.tensor import to_wire
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import RoundRef, SlotRange
from tests.operators import KEYS

ITEMS = [f"item-{n}" for n in range(10)]
NAMES = [f"user-{n}" for n in range(4)]
SETTINGS = FedNcfSettings(model="gmf", dim=3, min_touch=1)
SUBMIT = wire.RoundStep.ROUND_STEP_SUBMIT
DEVICE = "client/here"
DECLINED = wire.SubmitKind.SUBMIT_KIND_DECLINED
SLOTS = [5, 3, 8, 4]
"""In the order of the users, as a registration may give them."""


class World:
    """A stand-in for the orchestration server: its answers, and everything that was sent to it."""

    def __init__(self, folder: Path, *, users_as_members: bool = True, **consent: Any) -> None:
        self.folder = folder
        self.identities = [Identity.generate() for _ in NAMES]
        participants = [one.participant_id for one in self.identities]
        rounds = wire.RoundsPlan(
            cohorts=wire.CohortKind.COHORT_KIND_ALL,
            cohort=1,
            group=100,
            beacon=bytes(32),
            party_per_user=users_as_members,
            min_cohort=1,
            min_sum=1,
            experiment=True,
            passes=9,
        )
        self.plan = wire.RunPlan(
            run_id="run",
            system="fedncf",
            secure_sum="clear",
            seed=3,
            settings=SETTINGS.to_json(),
            rounds=rounds,
        )
        self.slots = SLOTS
        self.asked_at = 0.0
        # The canonical order is that of the slots.
        self.order = np.argsort(SLOTS)
        population = Population([participants[n] for n in self.order], [DEVICE] * len(NAMES))
        self.conductor = Conductor(
            self.plan, population, FedNcfServer(SETTINGS, len(ITEMS), 3, 1), ClearServer()
        )
        self.model = model_to_bytes(initial(SETTINGS, len(ITEMS), 3))
        self.opened = np.ones((1, len(ITEMS)), bool)
        self.sums: dict[int, SumPlan] = {}
        self.fetched: list[str] = []
        self.sent: list[tuple[int, list[Item]]] = []
        self.declined: list[tuple[int, list[int]]] = []
        """Rounds and the slots of the host that take no part."""
        self.on_submit: list[Any] = []
        self.refuse: list[wire.RefusedItem] = []
        self.settings = ClientSettings.model_validate(
            {
                "name": "here",
                "state": folder,
                "listen": "127.0.0.1:1",
                "cos": {"address": "127.0.0.1:1", "name": "cos"},
                "thirdparty": {"address": "127.0.0.1:1", "name": "directory"},
                "operator_keys": KEYS,
                "seed": 1,
                "consent": {"min_cohort": 1, "min_sum": 1, **consent},
            }
        )

    def open(self, number: int, purpose: Purpose = Purpose.TRAIN, **changes: Any) -> wire.Task:
        """Open a round and return its task."""
        state = Training(
            9,
            1,
            0,
            "",
            True,
            round=number,
            version=7,
            purpose=purpose,
            groups=1,
            parts=1,
            evaluation_parts=1,
        )
        told = {CATALOGUE: keys_hash(ITEMS), OPEN_ITEMS: hashlib.sha256(self._open_items()).digest()}
        plan = self.conductor.open(state, hashlib.sha256(self.model).digest(), 1.0, told=told).plan
        self.sums = {number: dataclasses.replace(plan, **changes)}
        return wire.Task(
            kind=wire.TaskKind.TASK_KIND_ROUND,
            round=RoundRef(run_id="run", round=number),
            step=SUBMIT,
            version=7,
            slots=[SlotRange(first=3, count=6)],
        )

    def _open_items(self) -> bytes:
        packed = np.packbits(self.opened, axis=1, bitorder="little")
        return to_wire(packed).SerializeToString() if self.opened.size else b""

    # --- the party -------------------------------------------------------------------------------------------------

    async def fetch(self, kind: int, *, version: int = 0, held_sha256: bytes = b"", step: int = 0) -> Any:
        self.fetched.append(wire.FetchKind.Name(kind))
        match kind:
            case wire.FetchKind.FETCH_KIND_SUM_PLAN:
                payload = self.sums[version].to_wire().SerializeToString()
            case wire.FetchKind.FETCH_KIND_MODEL:
                version, payload = 7, self.model
            case wire.FetchKind.FETCH_KIND_POPULATION:
                payload = self.conductor.population.to_wire().SerializeToString()
            case wire.FetchKind.FETCH_KIND_OPEN_ITEMS:
                payload = self._open_items()
            case wire.FetchKind.FETCH_KIND_CATALOGUE:
                payload = wire.Catalogue(
                    version=1, items=ITEMS, owner_counts=[0] * len(ITEMS)
                ).SerializeToString()
            case _:
                raise AssertionError(kind)
        return version, None if hashlib.sha256(payload).digest() == held_sha256 else payload

    def idle(self) -> None:
        """There is no poll that could be made at once."""

    async def submit_many(
        self, round_: RoundRef, items: Sequence[Item], *, last: bool = False
    ) -> list[wire.RefusedItem]:
        for look in self.on_submit:
            look(round_.round, items)
        self.declined += [(round_.round, list(item.slots)) for item in items if item.kind == DECLINED]
        items = [item for item in items if item.kind != DECLINED]
        if not items:
            return self.refuse
        # The local step makes contributions in an order of its own.
        self.sent.append((round_.round, sorted(items, key=lambda item: item.slots[0])))
        return self.refuse


class Stand:
    """A host in that world; leave it and take it up again as a restart does."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.engine = open_sqlite(world.folder / "client.db", "client")
        self.writer = Writer(self.engine)
        self.histories = Histories(self.engine, self.writer)

    async def begin(self) -> Stand:
        if not self.histories.names:
            rows = [
                store.Interaction(user + 1, ITEMS[(3 * user + n) % 10], True, n, [0, 0, 0, 1, 2][n])
                for user in range(len(NAMES))
                for n in range(5)
            ]
            await self.histories.take(NAMES, rows)

        async def nothing() -> None:
            """Wait for no bundle: there is no log to watch."""

        runtime = SimpleNamespace(accounting=Accounting(), party=DEVICE, note=lambda _: None, settled=nothing)
        bundles = [one.bundle(1, (0, 1 << 40)) for one in self.world.identities]
        host = Host(
            self.world.settings,
            runtime,  # type: ignore[arg-type]
            self.world,  # type: ignore[arg-type]
            self.world.identities,
            bundles,
            self.histories,
            Preferences(self.engine, self.writer),
            self.engine,
            self.writer,
            bytes(32),
        )
        self.rounds = Rounds(host)
        return self

    async def asked(self, task: wire.Task) -> None:
        """Let the host answer a task that the server gave just now."""
        await self.rounds._driver._asked(task, STEP_IN_TASK[task.step], time.monotonic())

    def receipts(self) -> tuple[dict[tuple[int, str], int], list[str]]:
        with self.engine.connect() as connection:
            sent = {(row.user, row.kind): row.acknowledged for row in store.load_sent(connection)}
            return sent, [row.reason for row in store.load_declined(connection)]

    def journal(self) -> dict[bytes, store.JournalEntry]:
        with self.engine.connect() as connection:
            return {entry.participant: entry for entry in store.load_journals(connection, "run")}

    def close(self) -> None:
        self.writer.close()
        self.rounds.close()
        self.engine.dispose()


@contextlib.asynccontextmanager
async def host_in(world: World) -> AsyncIterator[Stand]:
    stand = await Stand(world).begin()
    try:
        yield stand
    finally:
        stand.close()


def payloads(world: World) -> list[bytes]:
    return [item.payload for _, items in world.sent for item in items]


@pytest.mark.parametrize("purpose", Purpose)
async def test_every_contribution_is_durable_before_any_of_them_is_sent(
    tmp_path: Path, purpose: Purpose
) -> None:
    world = World(tmp_path)
    async with host_in(world) as stand:

        def look(number: int, items: Sequence[Item]) -> None:
            plan = world.sums[number]
            journal, file = stand.journal(), (tmp_path / "contributions.bin").read_bytes()
            for item in items:
                user = SLOTS.index(item.slots[0])
                entry = journal[world.identities[user].participant_id]
                kept = file[entry.offset : entry.offset + entry.length]
                assert (entry.joined, kept) == (number, plan.hash + item.payload)
            sent, _ = stand.receipts()
            assert len(sent) == len(items)

        world.on_submit.append(look)
        await stand.asked(world.open(4, purpose))
    assert len(payloads(world)) == len(NAMES)
    assert sorted(item.slots for _, items in world.sent for item in items) == [[3], [4], [5], [8]]


async def test_a_host_that_is_one_member_covers_the_slots_of_all_its_users(tmp_path: Path) -> None:
    world = World(tmp_path, users_as_members=False)
    async with host_in(world) as stand:
        await stand.asked(world.open(1))
        assert stand.receipts()[0] == {(0, "model update (clear)"): 1}
    ((_, (item,)),) = world.sent
    assert sorted(item.slots) == [3, 4, 5, 8]


async def test_a_task_older_than_the_answer_is_not_answered_again_and_a_newer_one_is_with_the_same_bytes(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    async with host_in(world) as stand:
        task, before = world.open(1), time.monotonic()
        await stand.asked(task)
        await stand.rounds._driver._asked(task, STEP_IN_TASK[task.step], before)
        assert len(world.sent) == 1
        await stand.asked(task)
        assert len(world.sent) == 2
        assert stand.receipts()[0] == {(user, "model update (clear)"): 1 for user in (1, 2, 3, 4)}
    assert world.sent[0] == world.sent[1]


async def test_only_members_that_are_still_asked_answer(tmp_path: Path) -> None:
    world = World(tmp_path)
    task = world.open(1)
    del task.slots[:]
    task.slots.append(SlotRange(first=4, count=2))
    async with host_in(world) as stand:
        await stand.asked(task)
    assert [item.slots for _, items in world.sent for item in items] == [[4], [5]]


async def test_after_a_restart_the_same_bytes_are_sent_and_nobody_trains_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    task = world.open(1)
    async with host_in(world) as stand:
        await stand.asked(task)
        side = await stand.rounds._learner.side()
        private = side.private.embedding.copy()  # type: ignore[attr-defined]
    async with host_in(world) as stand:
        await stand.asked(task)
        side = await stand.rounds._learner.side()
        assert np.array_equal(side.private.embedding, private)  # type: ignore[attr-defined]
        assert stand.receipts()[0] == {(user, "model update (clear)"): 1 for user in (1, 2, 3, 4)}
    assert world.sent[0] == world.sent[1]


async def test_private_state_that_did_not_come_to_its_files_comes_back_with_the_contribution(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    async with host_in(world) as stand:
        stand.rounds._learner.save = lambda users: None  # type: ignore[method-assign]
        await stand.asked(world.open(1))
        private = (await stand.rounds._learner.side()).private.embedding.copy()  # type: ignore[attr-defined]
    async with host_in(world) as stand:
        again = (await stand.rounds._learner.side()).private.embedding  # type: ignore[attr-defined]
        assert np.array_equal(again, private)


async def test_a_step_is_over_only_when_private_state_is_in_its_files_also_when_sending_fails(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    async with host_in(world) as stand:
        saved: list[int] = []

        def save(users: Sequence[int]) -> None:
            time.sleep(0.1)
            saved.extend(users)

        stand.rounds._learner.save = save  # type: ignore[method-assign]

        def fail(number: int, items: Sequence[Item]) -> None:
            raise PeerError("gone")

        world.on_submit.append(fail)
        with pytest.raises(PeerError):
            await stand.asked(world.open(1))
        assert sorted(saved) == [0, 1, 2, 3]
        # It is asked again, and has kept what it did not get through.
        world.on_submit.clear()
        await stand.asked(world.open(1))
        assert len(payloads(world)) == len(NAMES)
        assert len(saved) == len(NAMES)


async def test_private_state_without_its_contribution_in_the_journal_is_as_before(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with host_in(world) as stand:
        before = (await stand.rounds._learner.side()).private.embedding.copy()  # type: ignore[attr-defined]

        async def fail(*_: Any) -> None:
            raise asyncio.CancelledError

        stand.rounds._journals.keep = fail  # type: ignore[method-assign]
        with pytest.raises(asyncio.CancelledError):
            await stand.asked(world.open(1))
        assert world.sent == []
    async with host_in(world) as stand:
        again = (await stand.rounds._learner.side()).private.embedding  # type: ignore[attr-defined]
        assert np.array_equal(again, before)


async def test_a_higher_round_closes_the_one_before_and_its_contributions_go(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with host_in(world) as stand:
        await stand.asked(world.open(1))
        await stand.asked(world.open(2))
        assert {entry.joined for entry in stand.journal().values()} == {2}
        await stand.rounds.finished()
        await stand.rounds.run()
        assert {entry.length for entry in stand.journal().values()} == {0}
        # A number that is not above the last one is refused, also when a server says so.
        await stand.asked(world.open(2))
    assert [number for number, _ in world.sent] == [1, 2]
    assert world.declined == [(2, [3, 4, 5, 8])]


async def test_model_population_and_catalogue_are_fetched_once_for_all_members_and_rounds(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    async with host_in(world) as stand:
        for number in (1, 2, 3):
            await stand.asked(world.open(number))
    counts = {
        kind: world.fetched.count(f"FETCH_KIND_{kind}") for kind in ("MODEL", "POPULATION", "CATALOGUE")
    }
    assert counts == {"MODEL": 1, "POPULATION": 1, "CATALOGUE": 1}
    assert world.fetched.count("FETCH_KIND_SUM_PLAN") == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_sha256": b"m" * 32}, "the model that the server sent is not the one"),
        ({"layout_sha256": b"l" * 32}, "layout"),
        ({"secure_sum": "masked"}, "a sum 'masked' of run 'run'"),
        ({"min_sum": 1}, "floor of 1 users"),
    ],
)
async def test_a_round_that_is_not_as_agreed_gets_nothing_and_the_receipt_says_why(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    world = World(tmp_path)
    async with host_in(world) as stand:
        await stand.asked(world.open(1, **changes))
        sent, declined = stand.receipts()
        assert sent == {}
        assert len(declined) == 1
        assert words in declined[0]
        assert stand.journal() == {}
    assert world.sent == []
    # Nobody waits for them, and nobody but this host knows why.
    assert world.declined == [(1, [3, 4, 5, 8])]


async def test_without_a_list_of_open_items_nobody_trains(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.opened = np.zeros((0, 0), bool)
    async with host_in(world) as stand:
        await stand.asked(world.open(1))
        assert "no list of items" in stand.receipts()[1][0]
    assert world.sent == []


async def test_a_member_whose_local_step_fails_sits_out_and_the_others_are_sent(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with host_in(world) as stand:
        side = await stand.rounds._learner.side()
        contributions = side.contributions

        def broken(*given: Any) -> Any:
            made = contributions(*given)
            yield next(made)
            raise FloatingPointError("a private value: 4.2")

        side.contributions = broken  # type: ignore[method-assign]
        await stand.asked(world.open(1))
        sent, declined = stand.receipts()
        assert len(sent) == 1
        assert set(declined) == {"the local step failed: FloatingPointError"}
    assert len(payloads(world)) == 1
    ((_, left),) = world.declined
    assert sorted(left + world.sent[0][1][0].slots) == [3, 4, 5, 8]


async def test_a_user_that_was_in_enough_rounds_today_sits_out_and_a_restart_does_not_forget(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, rounds_per_day=2)
    async with host_in(world) as stand:
        await stand.asked(world.open(1))
        await stand.asked(world.open(2))
    async with host_in(world) as stand:
        # The round in progress goes on; the next one is too many.
        await stand.asked(world.open(2))
        await stand.asked(world.open(3))
        _, declined = stand.receipts()
        assert set(declined) == {"a user has been in 2 rounds today; accepted are 2"}
    assert [number for number, _ in world.sent] == [1, 2, 2]
    assert world.declined == [(3, [3, 4, 5, 8])]


async def test_a_person_pauses_limits_its_rounds_goes_on_and_leaves_from_the_next_round_on(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    everybody = [3, 4, 5, 8]
    async with host_in(world) as stand:
        await stand.asked(world.open(1))
        changed_stance(tmp_path, paused=True)
        await stand.asked(world.open(2))
        assert world.declined == [(2, everybody)]
        changed_stance(tmp_path, paused=False, rounds_per_day=1)
        await stand.asked(world.open(3))
        await stand.asked(world.open(4))
        assert world.declined == [(2, everybody), (4, everybody)]
    # After a restart the limit and its count hold; without the limit rounds go on, and end with leaving.
    async with host_in(world) as stand:
        await stand.asked(world.open(5))
        changed_stance(tmp_path, rounds_per_day=0)
        await stand.asked(world.open(6))
        changed_stance(tmp_path, left=True, forget=True)
        await stand.asked(world.open(7))
        (tmp_path / STANCE).write_text("{")
        await stand.asked(world.open(8))
        _, declined = stand.receipts()
    assert [number for number, _ in world.sent] == [1, 3, 6]
    assert [number for number, _ in world.declined] == [2, 4, 5, 7, 8]
    assert "the user has paused" in declined
    assert "a user has been in 1 rounds today; the user's own limit is 1" in declined
    assert "the user has left the run" in declined
    assert any("stance.json is damaged" in one for one in declined)


async def test_a_host_says_once_that_it_declines_and_again_when_it_is_asked_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with host_in(world) as stand:
        task, before = world.open(1, secure_sum="masked"), time.monotonic()
        await stand.asked(task)
        await stand.rounds._driver._asked(task, STEP_IN_TASK[task.step], before)
        assert world.declined == [(1, [3, 4, 5, 8])]
        # A server that was restarted has forgotten it.
        await stand.asked(task)
    assert world.declined == [(1, [3, 4, 5, 8])] * 2


async def test_items_that_the_server_refuses_do_not_stop_the_host(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.refuse = [wire.RefusedItem(index=0, reason=1, message="too late")]
    async with host_in(world) as stand:
        await stand.asked(world.open(1))
        await stand.asked(world.open(2))
    assert [number for number, _ in world.sent] == [1, 2]


async def test_recommendations_are_scored_here_without_what_was_seen(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with host_in(world) as stand:
        items, scores, version = await stand.rounds.recommend(1, 4)
        assert version == 7
        assert scores == sorted(scores, reverse=True)
        assert set(items).isdisjoint(ITEMS[:3])
        assert len(items) == 4
        assert len((await stand.rounds.recommend(1, 100))[0]) == len(ITEMS) - 3
        # What is recorded now is not recommended any more.
        await stand.histories.take([], [store.Interaction(1, items[0], True, 99, 0)])
        assert items[0] not in (await stand.rounds.recommend(1, 100))[0]
    assert world.sent == []


async def test_what_is_recorded_is_trained_on_from_the_next_round_on(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with host_in(world) as stand:
        await stand.asked(world.open(1, Purpose.SUPPORTS))
        await stand.histories.take([], [store.Interaction(1, ITEMS[9], True, 99, 0)])
        await stand.asked(world.open(2, Purpose.SUPPORTS))
    first, second = world.sent[0][1], world.sent[1][1]
    changed = [one.slots for one, two in zip(first, second, strict=True) if one.payload != two.payload]
    assert changed == [[SLOTS[0]]]
