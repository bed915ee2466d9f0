"""The third party's store of meta-latents: the same tests on a file and on a real PostgreSQL."""

import time

import pytest
import sqlalchemy as sa

from coterie.store import latent_tables
from coterie.store.expansion import ExpansionStore
from coterie.store.latents import LatentStore, SetState
from coterie.store.postgres import DatabaseAddress

from .. import postgres
from ..latents import upload_id
from .test_expansion_store import name_of

NOW = int(time.time())
CLOSES, EXPIRY = NOW + 1000, NOW + 2000
MOST = 4


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


class StoreTests:
    @pytest.fixture
    def expansion(self, place):
        opened = ExpansionStore(*place)
        yield opened
        opened.close()

    @pytest.fixture
    def store(self, expansion):
        return LatentStore(expansion)

    async def opened(self, store, epoch=1, run="run", record=b"record", closes=CLOSES):
        assert await store.open_set(run, epoch, closes, EXPIRY, record)
        return await store.at(run, epoch)

    async def publish(self, store, kept, name, vector=None, now=NOW):
        vector = f"vector of {name}".encode() if vector is None else vector
        return await store.publish(kept, upload_id(name), vector, MOST, now)

    async def closed(self, store, **how):
        kept = await self.opened(store, **how)
        for number in range(MOST):
            await self.publish(store, kept, f"user-{number}")
        return await store.at(kept.run_id, kept.epoch)

    async def test_a_set_takes_vectors_until_it_has_enough(self, store):
        kept = await self.opened(store)
        assert (kept.state, kept.key_users) == (SetState.OPEN, 0)
        assert await self.publish(store, kept, "first")
        assert not await self.publish(store, kept, "first")
        assert (await store.at("run", 1)).key_users == 1
        kept = await self.closed(store, epoch=2)
        assert (kept.state, kept.key_users) == (SetState.CLOSED, MOST)
        assert await name_of(self.publish(store, kept, "late")) == "STALE"
        # What was taken before is acknowledged still.
        assert not await self.publish(store, kept, "user-0")

    async def test_after_its_time_a_set_takes_nothing_and_is_due(self, store):
        kept = await self.opened(store)
        await self.publish(store, kept, "first")
        assert await store.due(CLOSES - 1) == []
        assert await name_of(self.publish(store, kept, "late", now=CLOSES)) == "STALE"
        (due,) = await store.due(CLOSES)
        assert (due.number, due.state, due.key_users) == (kept.number, SetState.CLOSED, 1)
        assert await store.due(CLOSES) == [due]

    async def test_an_upload_has_one_vector(self, store):
        kept = await self.opened(store)
        await self.publish(store, kept, "first")
        assert await name_of(self.publish(store, kept, "first", b"other")) == "CONFLICT"
        assert await store.vectors(kept) == [b"vector of first"]

    async def test_an_epoch_has_one_set_and_older_ones_go(self, store):
        first = await self.opened(store, record=b"one")
        assert not await store.open_set("run", 1, CLOSES, EXPIRY, b"one")
        assert await name_of(store.open_set("run", 1, CLOSES, EXPIRY, b"two")) == "CONFLICT"
        await self.publish(store, first, "user")
        await self.opened(store, epoch=2)
        assert await name_of(store.open_set("run", 1, CLOSES, EXPIRY, b"two")) == "CONFLICT"
        assert (await store.at("run", 1)).epoch == 1
        await self.opened(store, epoch=5)
        assert await name_of(store.at("run", 1)) == "UNKNOWN_ROUND"
        assert (await store.newest("run")).epoch == 5
        assert await store.vectors(first) == []
        assert await store.newest("another") is None

    async def test_combinations_take_the_place_of_the_vectors(self, store):
        kept = await self.closed(store)
        assert sorted(await store.vectors(kept)) == [f"vector of user-{n}".encode() for n in range(MOST)]
        assert await store.keep(kept, [b"first", b"second", b"third"])
        assert not await store.keep(kept, [b"others"])
        kept = await store.at("run", 1)
        assert (kept.state, kept.key_users) == (SetState.READY, MOST)
        assert set(await store.vectors(kept)) == {b""}
        assert await store.combinations(kept, 0, 2) == [b"first", b"second"]
        assert await store.combinations(kept, 2, 2) == [b"third"]
        assert await store.due(EXPIRY) == []

    async def test_a_vector_can_be_forgotten_while_the_set_is_open(self, store):
        kept = await self.opened(store)
        await self.publish(store, kept, "first")
        await self.publish(store, kept, "second")
        assert await store.forget(kept, upload_id("first")) is SetState.OPEN
        assert await store.forget(kept, upload_id("first")) is SetState.OPEN
        assert (await store.at("run", 1)).key_users == 1
        assert await store.vectors(kept) == [b"vector of second"]
        assert await name_of(self.publish(store, kept, "first")) == "CONFLICT"

    async def test_a_vector_that_arrives_after_it_was_forgotten_does_not_come_in(self, store):
        kept = await self.opened(store)
        assert await store.forget(kept, upload_id("late")) is SetState.OPEN
        assert await name_of(self.publish(store, kept, "late")) == "CONFLICT"
        assert (await store.at("run", 1)).key_users == 0
        closed = await self.closed(store, run="other")
        assert await name_of(store.forget(closed, upload_id("nobody"))) == "UNKNOWN_PARTICIPANT"

    async def test_a_set_waits_for_nobody_who_was_forgotten_in_it_or_in_those_before(self, store):
        kept = await self.opened(store)
        await self.publish(store, kept, "first")
        await store.forget(kept, upload_id("first"))
        for number in range(MOST - 1):
            assert (await store.at("run", 1)).state is SetState.OPEN
            await self.publish(store, kept, f"user-{number}")
        assert (await store.at("run", 1)).state is SetState.CLOSED
        await store.forget(kept, upload_id("user-0"))
        for epoch in (2, 3):
            later = await self.opened(store, epoch=epoch)
            for number in range(MOST - 2):
                assert (await store.at("run", epoch)).state is SetState.OPEN
                await self.publish(store, later, f"user-{number} of {epoch}")
            found = await store.at("run", epoch)
            assert (found.state, found.key_users) == (SetState.CLOSED, MOST - 2)
            assert len(await store.vectors(later)) == MOST - 2
        # Another run knows nothing of it.
        other = await self.closed(store, run="other")
        assert other.key_users == MOST

    async def test_forgetting_a_vector_of_a_closed_set_deletes_everything_made_of_it(self, store):
        for number, combined in enumerate((False, True)):
            run = f"run-{number}"
            kept = await self.closed(store, run=run)
            if combined:
                await store.keep(kept, [b"made"])
            assert await store.forget(kept, upload_id("user-1")) is SetState.VOID
            assert (await store.at(run, 1)).state is SetState.VOID
            assert await store.combinations(kept, 0, 9) == []
            assert set(await store.vectors(kept)) <= {b""}
            # Formed meanwhile, they are not kept.
            assert not await store.keep(kept, [b"made"])

    async def test_a_set_without_enough_key_users_is_void(self, store):
        kept = await self.opened(store)
        await self.publish(store, kept, "first")
        await store.void(kept)
        assert (await store.at("run", 1)).state is SetState.VOID
        assert set(await store.vectors(kept)) == {b""}
        assert await store.due(EXPIRY) == []

    async def test_expired_sets_go(self, store):
        kept = await self.closed(store)
        await self.opened(store, run="other")
        assert await store.purge(EXPIRY - 1) == 0
        assert await store.purge(EXPIRY) == 2
        assert await store.newest("run") is None
        assert await store.vectors(kept) == []

    async def test_reopened_it_has_what_it_had(self, place):
        first = ExpansionStore(*place)
        kept = await self.closed(LatentStore(first))
        first.close()
        second = ExpansionStore(*place)
        store = LatentStore(second)
        assert await store.due(NOW) == [kept]
        assert len(await store.vectors(kept)) == MOST
        second.close()

    async def test_no_column_names_a_user_or_a_party_or_who_is_in_a_combination(self, expansion):
        def columns(connection):
            inspector = sa.inspect(connection)
            return {
                name: [one["name"] for one in inspector.get_columns(name)]
                for name in inspector.get_table_names()
                if name.startswith("latent_")
            }

        found = await expansion.read(columns)
        assert set(found) == {"latent_sets", "latent_uploads", "latent_combinations"}
        assert found["latent_combinations"] == ["number", "position", "vector"]
        assert found["latent_uploads"] == ["number", "upload_id", "digest", "vector", "forgotten"]
        assert {one.name for one in (latent_tables.sets, latent_tables.uploads)} < set(found)


class TestInAFile(InAFile, StoreTests):
    pass


class TestInPostgres(InPostgres, StoreTests):
    pass
