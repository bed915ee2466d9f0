"""The third party's store of graphs: the same tests on a file and on a real PostgreSQL."""

import asyncio
import time

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from coterie.store import expansion
from coterie.store.expansion import MOST_QUESTIONS, ExpansionStore
from coterie.store.postgres import DatabaseAddress
from coterie.wire.refusal import Refusal

from .. import postgres
from ..graphs import publication, tag

SOON = int(time.time()) + 1000


@pytest.fixture(scope="module")
def server():
    with postgres.running() as one:
        yield one


class InAFile:
    @pytest.fixture
    def place(self, tmp_path):
        return tmp_path, None


class InPostgres:
    @pytest.fixture
    def place(self, server, tmp_path):
        return tmp_path, DatabaseAddress(**server.keys(server.database()))


async def name_of(call):
    with pytest.raises(Refusal) as refused:
        await call
    return refused.value.name


class StoreTests:
    @pytest.fixture
    def store(self, place):
        opened = ExpansionStore(*place)
        yield opened
        opened.close()

    @pytest.fixture
    async def kept(self, store):
        return await self.graph(store)

    async def graph(self, store, run="run", epoch=1, record=b"record"):
        await store.publish_graph(run, epoch, b"g" * 32, SOON, record, {b"h" * 32: b"sealed"})
        return await store.graph(run, epoch)

    async def fill(self, store, kept, count, *names, prefix="user"):
        for number in range(count):
            await store.publish(kept, publication(f"{prefix}-{number}", *names), 8)

    async def found(self, store, kept, name, *names, most=16):
        asked = [tag(one) for one in names]
        answer = await store.neighbours(kept, publication(name).upload_id, asked, most)
        return {one.embedding: one.tags for one in answer}

    # --- keys ------------------------------------------------------------------------------------------------------

    async def test_the_migrations_make_the_declared_tables(self, store):
        with store._engine.connect() as connection:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            assert compare_metadata(context, expansion.metadata) == []

    async def test_an_order_to_replace_a_key_stays_until_its_run_is_gone(self, store, kept):
        assert await store.least_epoch("run") == 0
        assert await name_of(store.replace_key("another")) == "UNKNOWN_ROUND"
        assert [await store.replace_key("run") for _ in range(2)] == [2, 2]
        assert (await store.least_epoch("run"), await store.least_epoch("another")) == (2, 0)
        await self.graph(store, epoch=2, record=b"second")
        assert await store.least_epoch("run") == 2
        assert await store.replace_key("run") == 3
        await store.purge(SOON - 1)
        assert await store.least_epoch("run") == 3
        await store.purge(SOON)
        assert await store.least_epoch("run") == 0

    async def test_the_first_key_of_an_epoch_stands(self, store, kept):
        assert not await store.publish_graph("run", 1, b"g" * 32, SOON, b"record", {})
        assert await name_of(store.publish_graph("run", 1, b"x" * 32, SOON, b"other", {})) == "CONFLICT"
        assert await store.envelope(kept.graph, b"h" * 32) == b"sealed"
        assert await store.envelope(kept.graph, b"g" * 32) == b""
        assert await store.newest("run") == kept
        assert await store.newest("other") is None

    async def test_a_rotation_deletes_all_epochs_but_the_one_before(self, store, kept):
        await self.fill(store, kept, 5, "a")
        await self.graph(store, epoch=2)
        assert len(await self.found(store, kept, "user-0", "a")) == 4
        assert await name_of(store.publish(kept, publication("late", "a"), 8)) == "STALE"
        await self.graph(store, epoch=3)
        assert await name_of(store.graph("run", 1)) == "UNKNOWN_ROUND"
        with store._engine.connect() as connection:
            for table in (expansion.uploads, expansion.tags):
                assert connection.execute(sa.select(sa.func.count()).select_from(table)).scalar() == 0
            assert connection.execute(sa.select(expansion.envelopes)).all() != []

    async def test_holders_go_on_with_their_epochs_when_the_store_was_lost(self, store):
        kept = await self.graph(store, epoch=7)
        assert kept.epoch == 7
        await self.graph(store, epoch=9)
        assert (await store.graph("run", 7)) == kept
        assert await name_of(store.publish_graph("run", 8, b"g" * 32, SOON, b"x", {})) == "CONFLICT"

    async def test_graphs_are_deleted_when_they_expire(self, store, kept):
        await self.fill(store, kept, 2, "a")
        assert await store.purge(SOON - 1) == 0
        assert await store.purge(SOON) == 1
        assert await store.newest("run") is None

    # --- uploads ---------------------------------------------------------------------------------------------------

    async def test_an_upload_id_is_used_twice_for_the_same_bytes_only(self, store, kept):
        assert await store.publish(kept, publication("u", "a", "b"), 8)
        assert not await store.publish(kept, publication("u", "a", "b"), 8)
        assert await name_of(store.publish(kept, publication("u", "a", "c"), 8)) == "CONFLICT"
        other = publication("u", "a", "b", embedding=b"other")
        assert await name_of(store.publish(kept, other, 8)) == "CONFLICT"
        assert (await store.counts("run")).tags == 2

    async def test_more_tags_come_with_the_next_number_and_in_order(self, store, kept):
        await self.fill(store, kept, 5, "b", prefix="other")
        await store.publish(kept, publication("u", "a"), 8)
        third = publication("u", "b", sequence=3)
        assert await name_of(store.publish(kept, third, 8)) == "SEQUENCE_MISMATCH"
        assert await store.publish(kept, publication("u", "b", sequence=2), 8)
        assert not await store.publish(kept, publication("u", "b", sequence=2), 8)
        assert await name_of(store.publish(kept, publication("u", "a"), 8)) == "SEQUENCE_MISMATCH"
        assert len(await self.found(store, kept, "u", "a", "b")) == 5
        # Others see the newest embedding.
        seen = await self.found(store, kept, "other-0", "b")
        assert publication("u", sequence=2).embedding in seen
        assert publication("u", sequence=1).embedding not in seen

    async def test_the_cap_of_tags_counts_all_publications(self, store, kept):
        await store.publish(kept, publication("u", "a", "b"), 3)
        assert await name_of(store.publish(kept, publication("u", "c", "d", sequence=2), 3)) == "TOO_LARGE"
        assert await store.publish(kept, publication("u", "a", "c", sequence=2), 3)
        assert (await store.counts("run")).tags == 3

    # --- neighbours ------------------------------------------------------------------------------------------------

    async def test_a_tag_is_served_from_five_uploads_on(self, store, kept):
        await self.fill(store, kept, 4, "a", "b")
        assert await self.found(store, kept, "user-0", "a", "b") == {}
        await store.publish(kept, publication("fifth", "a"), 8)
        found = await self.found(store, kept, "user-0", "a", "b")
        assert len(found) == 4
        assert set(found.values()) == {frozenset({tag("a")})}

    async def test_a_tag_of_one_upload_is_never_served(self, store, kept):
        await self.fill(store, kept, 6, "a")
        await store.publish(kept, publication("alone", "only"), 8)
        assert await self.found(store, kept, "alone", "only") == {}

    async def test_an_upload_asks_about_its_own_tags_only(self, store, kept):
        await self.fill(store, kept, 6, "a")
        await store.publish(kept, publication("u", "b"), 8)
        assert await name_of(self.found(store, kept, "u", "a")) == "UNKNOWN_ITEM"
        assert await name_of(self.found(store, kept, "nobody", "a")) == "UNKNOWN_PARTICIPANT"

    async def test_no_more_than_the_cap_is_shown_however_the_tags_are_asked_about(self, store, kept):
        names = ["a", "b", "c", "d"]
        for one in names:
            await self.fill(store, kept, 10, one, prefix=f"with-{one}")
        await store.publish(kept, publication("u", *names), 8)
        together = await self.found(store, kept, "u", *names, most=6)
        assert len(together) == 6
        apart = [await self.found(store, kept, "u", one, most=6) for one in names]
        assert {embedding for found in apart for embedding in found} == set(together)
        assert await self.found(store, kept, "u", *names, most=6) == together

    async def test_questions_of_an_upload_are_limited_and_counted(self, store, kept):
        await self.fill(store, kept, 5, "a")
        for _ in range(MOST_QUESTIONS):
            await self.found(store, kept, "user-0", "a")
        assert await name_of(self.found(store, kept, "user-0", "a")) == "TOO_LARGE"
        await store.refused("run", 1, "TOO_LARGE")
        await store.refused("run", 1, "TOO_LARGE")
        await store.refused("run", 7, "TOO_LARGE")
        counts = await store.counts("run")
        assert (counts.uploads, counts.tags, counts.served_tags) == (5, 1, 1)
        assert (counts.questions, counts.neighbours) == (MOST_QUESTIONS, 4 * MOST_QUESTIONS)
        assert counts.refused == {"TOO_LARGE": 2}

    async def test_graphs_of_other_runs_are_apart(self, store, kept):
        other = await self.graph(store, run="other")
        await self.fill(store, kept, 4, "a")
        await self.fill(store, other, 4, "a")
        assert await self.found(store, kept, "user-0", "a") == {}
        assert (await store.counts("other")).uploads == 4

    # --- forgetting ------------------------------------------------------------------------------------------------

    async def test_what_is_forgotten_is_gone_and_does_not_come_back(self, store, kept):
        await self.fill(store, kept, 6, "a", "b")
        gone = publication("user-0")
        assert await store.forget(kept, gone.upload_id)
        assert not await store.forget(kept, gone.upload_id)
        assert gone.embedding not in await self.found(store, kept, "user-1", "a", "b")
        assert await name_of(self.found(store, kept, "user-0", "a")) == "UNKNOWN_PARTICIPANT"
        # A request of before, that somebody kept, changes nothing.
        assert await name_of(store.publish(kept, publication("user-0", "a", "b"), 8)) == "CONFLICT"
        with store._engine.connect() as connection:
            held = connection.execute(sa.select(expansion.uploads).where(expansion.uploads.c.forgotten)).one()
        assert (held.tags, held.embedding, held.digest) == (b"", b"", b"")
        # Five are left; after one more is forgotten the tags are served no more.
        await store.forget(kept, publication("user-1").upload_id)
        assert await self.found(store, kept, "user-2", "a") == {}

    async def test_an_upload_that_arrives_after_it_was_forgotten_does_not_come_in(self, store, kept):
        late = publication("late", "a", "b")
        assert not await store.forget(kept, late.upload_id)
        assert await name_of(store.publish(kept, late, 8)) == "CONFLICT"
        with store._engine.connect() as connection:
            assert connection.execute(sa.select(sa.func.count()).select_from(expansion.tags)).scalar() == 0

    # --- restarts --------------------------------------------------------------------------------------------------

    async def test_a_restart_loses_nothing(self, store, kept, place):
        await self.fill(store, kept, 6, "a")
        before = await self.found(store, kept, "user-0", "a")
        store.close()
        again = ExpansionStore(*place)
        try:
            assert await again.graph("run", 1) == kept
            assert await self.found(again, kept, "user-0", "a") == before
            assert not await again.publish(kept, publication("user-0", "a"), 8)
        finally:
            again.close()

    async def test_many_at_once_are_all_kept(self, store, kept):
        await asyncio.gather(
            *(store.publish(kept, publication(f"user-{n}", "a", f"own-{n}"), 8) for n in range(40))
        )
        counts = await store.counts("run")
        assert (counts.uploads, counts.tags, counts.served_tags) == (40, 41, 1)


class TestInAFile(StoreTests, InAFile):
    pass


class TestInPostgres(StoreTests, InPostgres):
    pass
