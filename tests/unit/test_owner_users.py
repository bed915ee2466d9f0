import asyncio
from dataclasses import replace

import numpy as np
import pytest
from coterie_data_owner.drift.users import Users
from structlog.testing import capture_logs

from coterie.crypto.identity import Identity
from coterie.store.engine import Writer, open_sqlite
from coterie.wire.tensor import to_wire

EMPTY = bytes(32)
ANNE, BEN, CLEO = (bytes([number]) * 32 for number in (1, 2, 3))


class Server:
    """A COS of which only the roster is asked."""

    def __init__(self, *roster):
        self.roster = roster

    async def fetch(self, kind):
        rows = np.frombuffer(b"".join(self.roster), np.uint8).reshape(-1, 32)
        return 0, to_wire(rows).SerializeToString()


class KeyDirectory:
    """A directory in which a client host enrolled Anne, and a data owner Ben."""

    async def bundles(self, participants):
        parties = {ANNE: "client/host-0", BEN: "data-owner/comedy"}
        bundle = Identity.generate().bundle(1, (0, 2**40))
        return {one: replace(bundle, party=parties[one]) for one in participants}


@pytest.fixture
def restarted(tmp_path):
    """Return a function that gives an owner's users as after a start, from one store."""
    engine = open_sqlite(tmp_path / "data_owner.db", "data_owner")
    writer = Writer(engine)

    def start(server, directory=None, run="spring"):
        return Users(server, directory, lambda user: False, engine, writer, run)

    yield start
    writer.close()
    engine.dispose()


async def test_only_participants_of_client_hosts_are_users(restarted):
    users = restarted(Server(EMPTY, ANNE, BEN), KeyDirectory())
    assert list(await users.bundles([ANNE, BEN])) == [ANNE]


async def test_slots_of_new_users_are_added(restarted):
    server = Server(EMPTY, ANNE)
    users = restarted(server)
    await users.refresh()
    server.roster = (EMPTY, ANNE, BEN)
    await users.refresh()
    assert users.slots == {ANNE: 1, BEN: 2}


async def test_a_user_that_a_roster_moves_or_names_twice_keeps_its_first_slot(restarted):
    server = Server(EMPTY, ANNE, BEN)
    users = restarted(server)
    with capture_logs() as logs:
        await users.refresh()
        assert logs == []
        # Anne would count as two users, and so would whoever has a slot that was another's.
        server.roster = (EMPTY, CLEO, BEN, ANNE, BEN)
        await users.refresh()
        await users.refresh()
    assert users.slots == {ANNE: 1, BEN: 2}
    (line,) = logs
    assert line["entries"] == 3
    server.roster = (EMPTY, ANNE, BEN, CLEO)
    await users.refresh()
    assert users.slots == {ANNE: 1, BEN: 2, CLEO: 3}


async def test_a_restarted_owner_keeps_to_the_slots_that_users_had_first(restarted):
    server = Server(EMPTY, ANNE, BEN)
    await restarted(server).begin()
    # Without the store, Anne would come back as the third user, and Cleo in her place.
    server.roster = (EMPTY, CLEO, BEN, ANNE)
    users = restarted(server)
    with capture_logs() as logs:
        await users.begin()
    assert users.slots == {ANNE: 1, BEN: 2}
    (line,) = logs
    assert line["entries"] == 2
    # Another run has slots of its own.
    other = restarted(server, run="autumn")
    await other.begin()
    assert other.slots == {CLEO: 1, BEN: 2, ANNE: 3}


async def test_users_that_arrive_in_several_calls_at_once_are_stored_once(restarted):
    users = restarted(Server(EMPTY, ANNE, BEN), KeyDirectory())
    found = await asyncio.gather(*(users.bundles([ANNE]) for _ in range(5)))
    assert [list(one) for one in found] == [[ANNE]] * 5
    assert users.slots == {ANNE: 1, BEN: 2}
