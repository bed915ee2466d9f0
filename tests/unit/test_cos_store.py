"""The store of the COS: the same tests on a file and on a real PostgreSQL."""

import time

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from coterie.errors import StoreError
from coterie.store import cos as store
from coterie.store.cos import LoggedUpdate, OwnerUpdate, Progress, Relayed, SavedSum
from coterie.store.engine import Term, Writer, open_sqlite
from coterie.store.postgres import DatabaseAddress, open_postgres

from .. import postgres

RUN = "run"
LARGE = 2**40


@pytest.fixture(scope="module")
def server():
    with postgres.running() as one:
        yield one


class InAFile:
    @pytest.fixture
    def engines(self, tmp_path):
        engine = open_sqlite(tmp_path / "cos.db", "cos")
        yield engine, engine
        engine.dispose()


class InPostgres:
    @pytest.fixture
    def engines(self, server):
        engines = open_postgres(DatabaseAddress(**server.keys(server.database())), "cos")
        yield engines
        for engine in engines:
            engine.dispose()


class StoreTests:
    @pytest.fixture
    def writer(self, engines):
        made = Writer(engines[1])
        yield made
        made.close()

    @pytest.fixture
    async def run(self, writer):
        row = {"run_id": RUN, "request": b"\x00request", "plan_hash": b"hash", "state": "{}"}
        await writer.run(lambda connection: connection.execute(store.runs.insert(), row))

    def read(self, engines, what):
        with engines[0].connect() as connection:
            return what(connection)

    def test_its_tables_are_those_that_the_migrations_make(self, engines):
        with engines[0].connect() as connection:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            assert compare_metadata(context, store.metadata) == []

    async def test_an_update_and_its_owners_progress_come_back_as_they_were(self, engines, writer, run):
        def made(n):
            update = LoggedUpdate(LARGE + n, bytes([n, 0, 255]))
            return OwnerUpdate(5, update, Progress(LARGE + n, 1, n, b"\xff\x00"))

        for together in ([made(1)], [made(2), made(3)], []):
            await writer.run(lambda c, together=together: store.log_updates(c, RUN, together))
        assert self.read(engines, lambda c: store.load_progress(c, RUN)) == {
            5: Progress(LARGE + 3, 1, 3, b"\xff\x00")
        }
        assert self.read(engines, lambda c: store.load_updates(c, RUN, LARGE + 1)) == [
            LoggedUpdate(LARGE + n, bytes([n, 0, 255])) for n in (2, 3)
        ]
        await writer.run(lambda c: store.snapshot_taken(c, RUN, LARGE + 2))
        assert [one.version for one in self.read(engines, lambda c: store.load_updates(c, RUN, 0))] == [
            LARGE + 3
        ]
        assert self.read(engines, lambda c: c.execute(sa.select(store.runs.c.snapshot)).scalar()) == LARGE + 2

    async def test_who_registers_again_keeps_its_row_with_what_is_new(self, engines, writer, run):
        await writer.run(
            lambda c: store.save_participants(c, RUN, [(n, bytes([n]), "a", b"old") for n in range(3)])
        )
        await writer.run(lambda c: store.save_participants(c, RUN, [(1, b"\x01", "a", b"new")]))
        await writer.run(lambda c: store.save_items(c, RUN, ["größer", "'; DROP TABLE runs; --", "%s ?"], 0))
        for held in (b"\x01\x00\x00\x00", b""):
            await writer.run(lambda c, held=held: store.save_holding(c, RUN, 2, held))
        rows = self.read(engines, lambda c: c.execute(sa.select(store.participants).order_by("slot")).all())
        assert [(row.slot, bytes(row.participant), row.message) for row in rows] == [
            (0, b"\x00", b"old"),
            (1, b"\x01", b"new"),
            (2, b"\x02", b"old"),
        ]
        keys = self.read(
            engines, lambda c: c.execute(sa.select(store.items.c.key).order_by("item")).scalars().all()
        )
        assert keys == ["größer", "'; DROP TABLE runs; --", "%s ?"]
        assert self.read(
            engines, lambda c: c.execute(sa.select(store.holdings.c["items"])).scalars().all()
        ) == [b""]

    async def test_the_first_submission_stands(self, engines, writer, run):
        def file(sha256, **how):
            return lambda c: store.save_submission(
                c, RUN, "party", 3, "point/1", sha256, b"of " + sha256, **how
            )

        assert await writer.run(file(b"early", only_if_filed=True)) is None
        assert await writer.run(file(b"first")) == b"first"
        assert await writer.run(file(b"second")) == b"first"
        found = self.read(engines, lambda c: store.load_submissions(c, RUN, 3, "point/1"))
        assert found == {"party": b"of first"}

    async def test_events_are_numbered_one_after_the_other(self, engines, writer, run):
        for n in range(1, 4):
            assert await writer.run(lambda c: store.last_event(c, RUN)) == n - 1
            await writer.run(lambda c, n=n: store.save_event(c, RUN, n, b"event %d" % n))
        with pytest.raises(StoreError, match="the store failed: "):
            await writer.run(lambda c: store.save_event(c, RUN, 2, b"again"))
        assert self.read(engines, lambda c: store.last_event(c, RUN)) == 3
        assert self.read(engines, lambda c: store.read_events(c, RUN, 2, 9)) == [b"event 2", b"event 3"]
        assert self.read(engines, lambda c: store.read_events(c, RUN, 1, 1)) == [b"event 1"]
        assert self.read(engines, lambda c: store.read_events(c, "another", 1, 9)) == []

    async def test_changes_of_parties_are_replaced_by_their_counts(self, writer, engines):
        for run in (RUN, "another"):
            for n in range(1, 6):
                await writer.run(lambda c, run=run, n=n: store.save_event(c, run, n, b"event %d" % n))
        for dropped in ([(1, "joined"), (2, "lost")], [(4, "joined")], []):
            await writer.run(lambda c, dropped=dropped: store.drop_changes(c, RUN, dropped))
        assert self.read(engines, lambda c: store.read_events(c, RUN, 1, 9)) == [b"event 3", b"event 5"]
        assert self.read(engines, lambda c: store.load_dropped(c, RUN)) == ({"joined": 2, "lost": 1}, 4)
        assert len(self.read(engines, lambda c: store.read_events(c, "another", 1, 9))) == 5
        assert self.read(engines, lambda c: store.load_dropped(c, "another")) == ({}, 0)

    async def test_numbers_of_relayed_requests_replace_earlier_ones(self, engines, writer, run):
        asked = Relayed("expansion", "client/host-0", "ask", "")
        refused = asked._replace(refused="TOO_LARGE")
        await writer.run(lambda c: store.save_relayed(c, RUN, {asked: 64, refused: 1}))
        await writer.run(lambda c: store.save_relayed(c, RUN, {refused: LARGE}))
        await writer.run(lambda c: store.save_relayed(c, RUN, {}))
        assert self.read(engines, lambda c: store.load_relayed(c, RUN)) == {asked: 64, refused: LARGE}
        assert self.read(engines, lambda c: store.load_relayed(c, "another")) == {}

    async def test_the_sum_in_progress_is_kept_until_the_next_one(self, engines, writer, run):
        for round_, messages in ((LARGE, {n: bytes([n]) for n in range(70)}), (LARGE + 1, {4: b"four"})):
            saved = SavedSum(round_, b"plan", "submit", "collect", "", b"running")
            await writer.run(lambda c, s=saved, m=messages: store.save_sum(c, RUN, s, {"advertise": m}))
            later = saved._replace(step="unmask", running=None)
            await writer.run(lambda c, s=later: store.save_sum(c, RUN, s, {}))
            found, closed = self.read(engines, lambda c: store.load_sum(c, RUN))
            assert found == later._replace(running=b"running")
            assert {step: dict(held) for step, held in closed.items()} == {"advertise": messages}
        await writer.run(lambda c: store.forget_sums(c, RUN))
        assert self.read(engines, lambda c: store.load_sum(c, RUN)) is None

    async def test_what_fails_is_not_kept_in_part_and_ends_its_term(self, engines, writer, run):
        term = Term(writer, 30.0)

        def half(connection):
            store.save_state(connection, RUN, "not kept")
            store.save_event(connection, RUN, 1, b"event")
            store.save_event(connection, RUN, 1, b"the same number")

        with pytest.raises(StoreError, match="the store failed: "):
            await term.run(half)
        assert self.read(engines, lambda c: c.execute(sa.select(store.runs.c.state)).scalar()) == "{}"
        with pytest.raises(StoreError):
            await term.run(lambda c: store.save_state(c, RUN, "not kept either"))
        await writer.probe()
        assert not writer.failed
        await Term(writer, 30.0).run(lambda c: store.save_state(c, RUN, "kept"))
        assert self.read(engines, lambda c: c.execute(sa.select(store.runs.c.state)).scalar()) == "kept"

    async def test_opening_it_again_changes_nothing(self, engines, writer, run):
        from coterie.store.engine import migrate

        writer.close()
        migrate(engines[1], "cos")
        assert self.read(engines, lambda c: c.execute(sa.select(store.runs.c.run_id)).scalars().all()) == [
            RUN
        ]

    async def test_tables_of_a_later_version_are_refused(self, engines, writer):
        from coterie.store.engine import migrate

        await writer.run(lambda c: c.exec_driver_sql("UPDATE alembic_version SET version_num = 'cos_9999'"))
        writer.close()

        def refused() -> str:
            with pytest.raises(StoreError) as raised:
                migrate(engines[1], "cos")
            return raised.value.message

        # A server needs a while to notice that the writer is gone.
        deadline = time.monotonic() + 30
        while "another service" in (message := refused()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "of a revision that this version does not know" in message


class TestInAFile(InAFile, StoreTests):
    pass


class TestInPostgres(InPostgres, StoreTests):
    pass
