"""The model of a run at the orchestration server: every gradient counts once, whatever happens in between."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from coterie_cos.drift.model import Frozen, PublishedModel
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.store import cos as store
from coterie.store.engine import Term, Writer, open_sqlite
from coterie.systems.drift.mathematics import initial
from coterie.systems.drift.settings import DriftSettings
from coterie.wire.refusal import Refusal
from coterie.wire.tensor import to_wire
from coterie.wire.v1.orchestrator_pb2 import Gradient, RunPlan

USERS, ITEMS, DIM = 5, 7, 3
MAX_STALENESS = 2
LOCAL_UPDATES = 3
PLAN = RunPlan(
    run_id="run",
    form="published",
    dim=DIM,
    rate=0.25,
    ridge=0.0,
    theta=2,
    seed=3,
    max_staleness=MAX_STALENESS,
    epochs=3,
    settings=f'{{"local_updates":{LOCAL_UPDATES}}}',
)


def gradient(seed: int, *, rows_version: int, epoch: int, first_block: int, blocks: int = 1) -> Gradient:
    rng = np.random.default_rng(seed)
    users = np.sort(rng.choice(USERS, rng.integers(1, USERS + 1), replace=False)).astype(np.uint32)
    items = np.sort(rng.choice(ITEMS, rng.integers(1, ITEMS + 1), replace=False)).astype(np.uint32)
    return Gradient(
        rows_version=rows_version,
        epoch=epoch,
        first_block=first_block,
        blocks=blocks,
        loss=float(blocks) / 4,
        users=to_wire(users),
        items=to_wire(items),
        user_gradient=to_wire(rng.standard_normal((len(users), DIM), dtype=np.float32)),
        item_gradient=to_wire(rng.standard_normal((len(items), DIM), dtype=np.float32)),
    )


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated store with the run in it, to be copied."""
    path = tmp_path_factory.mktemp("store") / "cos.db"
    engine = open_sqlite(path, "cos")
    with engine.begin() as connection:
        connection.execute(
            store.runs.insert(), {"run_id": "run", "request": b"", "plan_hash": b"", "state": "{}"}
        )
    engine.dispose()
    return path


@dataclass
class Server:
    """A model with its store in a folder, which may be killed and started again."""

    folder: Path
    snapshot_every: int
    model: PublishedModel = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.engine = sa.create_engine(f"sqlite:///{self.folder / 'cos.db'}", poolclass=sa.pool.NullPool)
        self.writer = Writer(self.engine)
        self.model = PublishedModel(PLAN, self.folder / "models", Term(self.writer), self.snapshot_every)
        with self.engine.connect() as connection:
            snapshot = connection.execute(sa.select(store.runs.c.snapshot)).scalar_one()
            self.model.restore(connection, snapshot, USERS, ITEMS)

    async def stop(self) -> None:
        if self.model._snapshotting is not None:
            await self.model._snapshotting
        self.writer.close()
        self.engine.dispose()

    async def restart(self) -> None:
        await self.stop()
        self.start()

    async def send(self, owner: int, *messages: Gradient) -> str:
        """Apply the gradients of an exchange as it does; return the reason of a refusal."""
        try:
            decoded = self.model.check(owner, messages)
        except Refusal as refusal:
            return refusal.name
        packed = [message.SerializeToString(deterministic=True) for message in messages]
        at = self.model.progress.get(owner, store.Progress())
        following = store.Progress(
            at.sequence + 1,
            messages[-1].epoch,
            messages[-1].first_block + messages[-1].blocks,
            hashlib.sha256(b"".join(packed)).digest(),
        )
        await self.model.keep(self.model.apply(owner, messages, decoded, packed, following))
        return ""


@pytest.fixture
def server(empty_store: Path, tmp_path: Path) -> Iterator[Server]:
    shutil.copy(empty_store, tmp_path / "cos.db")
    made = Server(tmp_path, snapshot_every=1000)
    yield made
    made.writer.close()


def summed(applied: list[Gradient]) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors after gradients, one after the other, from their definition."""
    users, items = initial(USERS, ITEMS, DriftSettings.from_plan(PLAN), PLAN.seed)
    rate = np.float32(PLAN.rate)
    for message in applied:
        for factors, ids, values in (
            (users, message.users, message.user_gradient),
            (items, message.items, message.item_gradient),
        ):
            rows = np.frombuffer(values.data, "<f4").reshape(-1, DIM)
            for row, value in zip(np.frombuffer(ids.data, "<u4"), rows, strict=True):
                factors[row] -= rate * value
    return users, items


# Owner, how old the rows are, blocks, where the blocks begin relative to what is due, gradients of the exchange, and
# where the last one begins relative to the end of the one before.
SEND = st.tuples(
    st.just("send"),
    st.integers(0, 2),
    st.sampled_from([*range(MAX_STALENESS + 1), MAX_STALENESS + 1, -1]),
    st.sampled_from([1, 2, 1, 2, 0]),
    st.sampled_from([0, 0, 0, 0, 1, -1]),
    st.sampled_from([1, 1, 2, LOCAL_UPDATES, LOCAL_UPDATES + 1]),
    st.sampled_from([0, 0, 0, 0, 1, -1]),
)
STEPS = st.lists(
    st.one_of(
        *[SEND] * 6,
        st.tuples(st.just("next epoch"), st.integers(0, 2)),
        st.tuples(st.just("restart")),
        st.tuples(st.just("snapshot")),
        st.tuples(st.just("snapshot cut off")),
        st.tuples(st.just("freeze")),
    ),
    min_size=5,
    max_size=20,
)


@settings(max_examples=25)
@given(steps=STEPS, snapshot_every=st.integers(1, 5))
def test_every_gradient_counts_once_and_none_on_rows_that_are_too_old(
    empty_store: Path, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple], snapshot_every: int
) -> None:
    folder = tmp_path_factory.mktemp("model")
    shutil.copy(empty_store, folder / "cos.db")
    asyncio.run(go_through(Server(folder, snapshot_every), steps))
    shutil.rmtree(folder)


async def go_through(server: Server, steps: list[tuple]) -> None:
    applied: list[Gradient] = []
    ages: Counter[int] = Counter()
    frozen: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    epochs: Counter[int] = Counter()
    for n, step in enumerate(steps):
        match step:
            case ("send", owner, age, blocks, off, number, apart):
                at = server.model.progress.get(owner, store.Progress())
                epoch = 1 + epochs[owner]
                due = at.blocks if at.epoch == epoch else 0
                rows = max(0, len(applied) - age)
                real_age = len(applied) - rows
                begins = [max(0, due + off) + blocks * place for place in range(number)]
                if number > 1:
                    begins[-1] += apart
                messages = [
                    gradient(
                        100 * n + place, rows_version=rows, epoch=epoch, first_block=first, blocks=blocks
                    )
                    for place, first in enumerate(begins)
                ]
                outcome = await server.send(owner, *messages)
                if number > LOCAL_UPDATES:
                    assert outcome == "TOO_LARGE"
                elif begins != [due + blocks * place for place in range(number)] or not blocks:
                    assert outcome == "SEQUENCE_MISMATCH"
                elif not 0 <= real_age <= MAX_STALENESS:
                    assert outcome == "STALE"
                else:
                    assert outcome == ""
                    applied += messages
                    ages[real_age] += number
                # What was applied does not count again, also not as its owner's next.
                if applied and not outcome:
                    assert await server.send(owner, *messages) == "SEQUENCE_MISMATCH"
                    assert await server.send(owner, messages[-1]) == "SEQUENCE_MISMATCH"
            case ("next epoch", owner):
                # Never back: an owner that has begun an epoch has left the one before it.
                epochs[owner] += 1
            case ("restart",):
                await server.restart()
                ages.clear()
            case ("snapshot",):
                if server.model._snapshotting is None:
                    await server.model.snapshot()
            case ("snapshot cut off",):
                # The file was written, and the server killed before the store knew of it.
                if server.model._snapshotting is not None:
                    await server.model._snapshotting
                taken = Frozen(server.model.version, server.model.items.copy(), server.model.users.copy())
                server.model._save(taken, server.model._path(taken.version).name)
                await server.restart()
                ages.clear()
            case ("freeze",):
                kept = server.model.freeze()
                frozen[kept.version] = (kept.users.copy(), kept.items.copy())
        assert server.model.version == len(applied)
        assert server.model.staleness.applied == ages
    for version, (users, items) in frozen.items():
        held = server.model.frozen(version)
        np.testing.assert_array_equal(held.users, users)
        np.testing.assert_array_equal(held.items, items)
    await server.restart()
    users, items = summed(applied)
    np.testing.assert_array_equal(server.model.users, users)
    np.testing.assert_array_equal(server.model.items, items)
    for version, (users, items) in frozen.items():
        held = server.model.frozen(version)
        np.testing.assert_array_equal(held.users, users)
        np.testing.assert_array_equal(held.items, items)
    await server.stop()


async def test_progress_and_update_are_durable_together(server: Server) -> None:
    assert await server.send(4, gradient(0, rows_version=0, epoch=1, first_block=0, blocks=3)) == ""
    assert await server.send(4, gradient(1, rows_version=1, epoch=2, first_block=0, blocks=2)) == ""
    held = server.model.progress[4]
    await server.restart()
    assert server.model.progress == {4: held}
    assert (held.sequence, held.epoch, held.blocks) == (2, 2, 2)


async def test_a_refused_gradient_leaves_everything_as_it_was(server: Server) -> None:
    before = server.model.users.copy(), server.model.items.copy()
    bad = gradient(0, rows_version=0, epoch=1, first_block=0)
    bad.item_gradient.data = bad.item_gradient.data[:-4] + np.float32(np.nan).tobytes()
    assert await server.send(0, bad) == "NOT_FINITE"
    await server.restart()
    np.testing.assert_array_equal(server.model.users, before[0])
    np.testing.assert_array_equal(server.model.items, before[1])
    assert (server.model.version, server.model.progress) == (0, {})


async def test_gradients_of_an_exchange_are_applied_all_or_none(server: Server) -> None:
    def three(**last: int) -> list[Gradient]:
        usual = {"rows_version": 0, "epoch": 1}
        return [
            gradient(place, **{**usual, "first_block": place, **(last if place == 2 else {})})
            for place in range(3)
        ]

    bad = three()
    bad[2].user_gradient.data = bad[2].user_gradient.data[:-4] + np.float32(np.nan).tobytes()
    for messages, reason in (
        (bad, "NOT_FINITE"),
        (three(rows_version=1), "INVALID_FIELD"),
        (three(epoch=2), "INVALID_FIELD"),
        (three(first_block=3), "SEQUENCE_MISMATCH"),
        (three(blocks=0), "SEQUENCE_MISMATCH"),
        (three()[::-1], "SEQUENCE_MISMATCH"),
        ([*three(), gradient(3, rows_version=0, epoch=1, first_block=3)], "TOO_LARGE"),
    ):
        assert await server.send(0, *messages) == reason
        assert (server.model.version, server.model.progress) == (0, {})
    good = three()
    assert await server.send(0, *good) == ""
    await server.restart()
    assert server.model.version == 3
    assert (server.model.progress[0].sequence, server.model.progress[0].blocks) == (1, 3)
    np.testing.assert_array_equal(server.model.users, summed(good)[0])
    np.testing.assert_array_equal(server.model.items, summed(good)[1])


async def test_the_age_of_an_exchange_counts_the_updates_of_others_and_not_its_own(server: Server) -> None:
    def batch(owner: int, first: int, rows: int) -> list[Gradient]:
        return [gradient(9 * owner + n, rows_version=rows, epoch=1, first_block=first + n) for n in range(3)]

    assert await server.send(0, *batch(0, 0, 0)) == ""
    # Three updates of another owner are more than MAX_STALENESS.
    assert await server.send(1, *batch(1, 0, 0)) == "STALE"
    assert await server.send(1, *batch(1, 0, 1)) == ""
    assert server.model.staleness.applied == {0: 3, 2: 3}
    assert server.model.staleness.refused == 3


async def test_rows_that_grow_keep_their_values_and_new_ones_are_those_of_a_larger_start(
    server: Server,
) -> None:
    await server.send(0, gradient(0, rows_version=0, epoch=1, first_block=0))
    users, items = server.model.users.copy(), server.model.items.copy()
    server.model.grow(USERS + 3, ITEMS + 2)
    larger = initial(USERS + 3, ITEMS + 2, DriftSettings.from_plan(PLAN), PLAN.seed)
    np.testing.assert_array_equal(server.model.users[:USERS], users)
    np.testing.assert_array_equal(server.model.items[:ITEMS], items)
    np.testing.assert_array_equal(server.model.users[USERS:], larger[0][USERS:])
    np.testing.assert_array_equal(server.model.items[ITEMS:], larger[1][ITEMS:])
    server.model.grow(1, 1)  # never smaller
    assert (len(server.model.users), len(server.model.items)) == (USERS + 3, ITEMS + 2)


async def test_the_last_three_snapshots_are_kept_and_the_log_holds_only_what_came_after(
    server: Server,
) -> None:
    for n in range(6):
        await server.send(0, gradient(n, rows_version=n, epoch=1, first_block=n))
        await server.model.snapshot()
    await server.send(0, gradient(6, rows_version=6, epoch=1, first_block=6))
    kept = sorted(path.name for path in (server.folder / "models").glob("model-*"))
    assert kept == [f"model-{version:012d}.safetensors" for version in (4, 5, 6)]
    with server.engine.connect() as connection:
        assert [one.version for one in store.load_updates(connection, "run", 0)] == [7]
    assert not list((server.folder / "models").glob(".*"))


async def test_a_snapshot_is_of_one_version_although_updates_go_on_while_it_is_written(
    server: Server,
) -> None:
    first, second = (gradient(n, rows_version=n, epoch=1, first_block=n) for n in range(2))
    await server.send(0, first)
    save, proceed = server.model._save, threading.Event()

    def late(frozen: Frozen, name: str) -> None:
        assert proceed.wait(10)
        save(frozen, name)

    server.model._save = late  # type: ignore[method-assign]
    snapshot = asyncio.create_task(server.model.snapshot())
    await asyncio.sleep(0)
    await server.send(0, second)
    proceed.set()
    await snapshot
    await server.restart()
    assert server.model.version == 2
    np.testing.assert_array_equal(server.model.items, summed([first, second])[1])


async def test_the_mean_loss_is_over_the_blocks_since_it_was_last_taken(server: Server) -> None:
    assert np.isnan(server.model.take_loss())
    for n in range(2):
        message = gradient(n, rows_version=n, epoch=1, first_block=3 * n, blocks=3)
        message.loss = 1.5 + n
        await server.send(0, message)
    assert server.model.take_loss() == pytest.approx((1.5 + 2.5) / 6)
    assert np.isnan(server.model.take_loss())


async def test_a_version_that_was_not_kept_is_refused(server: Server) -> None:
    server.model.freeze()
    server.model.thaw(set())
    assert server.model.frozen(0).version == 0  # read again from its file
    with pytest.raises(Refusal) as refused:
        server.model.frozen(1)
    assert (refused.value.name, refused.value.field) == ("UNKNOWN_ROUND", "version")
