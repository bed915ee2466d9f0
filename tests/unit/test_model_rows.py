"""The model of DRIFT's published form where a standby must find it: in rows of the database, or as objects."""

import asyncio

import numpy as np
import pytest
import sqlalchemy as sa
from coterie_cos.drift.model import PublishedModel, kept_files
from structlog.testing import capture_logs

from coterie.store import cos as store
from coterie.store.engine import Term, Writer, open_sqlite
from coterie.store.objects import ObjectAddress
from coterie.store.version_objects import VersionObjects, needed_objects, own_folder
from coterie.store.versions import VersionRows
from coterie.wire.refusal import Refusal

from .test_model import ITEMS, PLAN, USERS, Server, gradient, summed


class Shared(Server):
    """A model whose snapshots are rows or objects; `restart` is another process in another folder."""

    bucket = None
    number = 0

    def start(self):
        self.engine = sa.create_engine(f"sqlite:///{self.folder / 'cos.db'}", poolclass=sa.pool.NullPool)
        store.shared.create_all(self.engine)
        self.writer = Writer(self.engine)
        self.number += 1

    async def open(self):
        """Restore the model as a COS that takes office."""
        objects = None
        if self.bucket is not None:
            objects = VersionObjects(ObjectAddress(f"file://{self.bucket}", timeout_s=20.0).open())
            objects.folder = await self.writer.run(own_folder)

        def read(work):
            with self.engine.connect() as connection:
                return work(connection)

        rows = VersionRows("run", read, kept=True, objects=objects)
        folder = self.folder / str(self.number)
        self.model = PublishedModel(PLAN, folder, Term(self.writer), self.snapshot_every, rows)
        if objects is not None:
            await objects.fetch(read(needed_objects))
        with self.engine.connect() as connection:
            snapshot = connection.execute(sa.select(store.runs.c.snapshot)).scalar_one()
            self.model.restore(connection, snapshot, USERS, ITEMS)
        return self

    async def restart(self):
        await self.stop()
        self.start()
        await self.open()

    async def open_after(self, models):
        """Restore the model as a COS that had no standby before, with files in a folder."""
        rows = VersionRows("run", lambda _: None, kept=True)
        await self.writer.run(lambda connection: rows.take_files(connection, kept_files(models)))
        return await self.open()

    def held(self):
        """Return the numbers of the rows."""
        with self.engine.connect() as connection:
            return self.model._rows._held(connection)


@pytest.fixture(params=["rows", "objects"])
async def server(request, tmp_path):
    engine = open_sqlite(tmp_path / "cos.db", "cos")
    with engine.begin() as connection:
        row = {"run_id": "run", "request": b"", "plan_hash": b"", "state": "{}"}
        connection.execute(store.runs.insert(), row)
    engine.dispose()
    made = Shared(tmp_path, snapshot_every=1000)
    if request.param == "objects":
        made.bucket = tmp_path / "bucket"
        made.bucket.mkdir()
    await made.open()
    yield made
    await made.stop()


async def test_another_process_has_every_update_from_the_snapshot_and_the_log_after_it(server):
    sent = [gradient(n, rows_version=n, epoch=1, first_block=n) for n in range(5)]
    for number, one in enumerate(sent):
        await server.send(0, one)
        if number < 4:
            await server.model.snapshot()
    assert [made for _, made in server.held()] == [2, 3, 4]
    with server.engine.connect() as connection:
        assert [one.version for one in store.load_updates(connection, "run", 0)] == [5]
    await server.restart()
    users, items = summed(sent)
    assert server.model.version == 5
    np.testing.assert_array_equal(server.model.users, users)
    np.testing.assert_array_equal(server.model.items, items)
    # It goes on from there.
    more = gradient(9, rows_version=5, epoch=1, first_block=5)
    await server.send(0, more)
    np.testing.assert_array_equal(server.model.items, summed([*sent, more])[1])
    assert not list(server.folder.rglob("*.safetensors"))


async def test_a_version_is_kept_with_the_state_that_opens_its_evaluation_and_not_after_it(server):
    for number in range(3):
        await server.send(0, gradient(number, rows_version=number, epoch=1, first_block=number))
        server.model.freeze()
        frozen, evaluated = server.model.frozen_since(), {number + 1}
        await server.writer.run(
            lambda connection, frozen=frozen, evaluated=evaluated: server.model.keep_frozen(
                connection, frozen, evaluated
            )
        )
    assert server.model.frozen_since() == []
    expected = server.model.items.copy()
    await server.send(0, gradient(7, rows_version=3, epoch=1, first_block=3))
    await server.model.snapshot()
    await server.restart()
    assert [made for _, made in server.held()] == [-4, 4]
    with pytest.raises(Refusal):
        server.model.frozen(3)
    await server.model.read_frozen(3)
    np.testing.assert_array_equal(server.model.frozen(3).items, expected)
    await server.model.read_frozen(2)
    with pytest.raises(Refusal) as refused:
        server.model.frozen(2)
    assert refused.value.name == "UNKNOWN_ROUND"


async def test_a_snapshot_that_a_store_of_objects_does_not_take_loses_no_update(server, tmp_path):
    if server.bucket is None:
        pytest.skip("about objects")
    sent = [gradient(n, rows_version=n, epoch=1, first_block=n) for n in range(2)]
    for one in sent:
        await server.send(0, one)
    # Where the store has a folder, there is a file.
    server.bucket.rmdir()
    server.bucket.write_bytes(b"")
    with capture_logs() as said:
        await server.model.snapshot()
    (told,) = (one["error"] for one in said if one["event"] == "no snapshot")
    assert "the folder of objects.url is not there" in told
    assert server.held() == []
    server.bucket.unlink()
    server.bucket.mkdir()
    await server.restart()
    assert server.model.version == 2
    np.testing.assert_array_equal(server.model.items, summed(sent)[1])


async def test_files_of_a_cos_without_a_standby_are_taken_over(tmp_path):
    engine = open_sqlite(tmp_path / "cos.db", "cos")
    with engine.begin() as connection:
        row = {"run_id": "run", "request": b"", "plan_hash": b"", "state": "{}"}
        connection.execute(store.runs.insert(), row)
    engine.dispose()
    before = Server(tmp_path, snapshot_every=1000)
    sent = [gradient(n, rows_version=n, epoch=1, first_block=n) for n in range(3)]
    for one in sent:
        await before.send(0, one)
    before.model.freeze()
    await before.model.snapshot()
    await before.stop()
    server = await Shared(tmp_path, snapshot_every=1000).open_after(tmp_path / "models")
    assert [made for _, made in server.held()] == [-4, 3]
    assert server.model.version == 3
    np.testing.assert_array_equal(server.model.items, summed(sent)[1])
    await server.model.read_frozen(3)
    np.testing.assert_array_equal(server.model.frozen(3).users, summed(sent)[0])
    await server.stop()


async def test_a_snapshot_is_given_up_when_the_service_leaves_office(server, monkeypatch):
    rows = server.model._rows
    if rows.objects is None:
        pytest.skip("about objects")
    await server.send(0, gradient(0, rows_version=0, epoch=1, first_block=0))
    begun = asyncio.Event()

    async def hangs(*_):
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(rows.objects, "put", hangs)
    server.model._snapshotting = asyncio.create_task(server.model.snapshot())
    await begun.wait()
    async with asyncio.timeout(20):
        await server.model.drop()
    server.model._snapshotting = None
