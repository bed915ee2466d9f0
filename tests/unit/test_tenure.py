"""Only the service in office writes to a database that several use in turns, whatever the others believe."""

import asyncio
import threading
import time

import pytest
import sqlalchemy as sa

from coterie.errors import StoreError
from coterie.store.engine import Term, Writer
from coterie.store.postgres import DatabaseAddress, engines_of, open_postgres
from coterie.store.tenure import LEASE_S, SILENT_S, Succession, Tenure

from .. import postgres


@pytest.fixture(scope="module")
def server():
    with postgres.running() as one:
        yield one


class Service:
    """A service with the store of a database, in office or waiting."""

    def __init__(self, at, *, waits=False):
        self.tenure = Tenure()
        if waits:
            self.reading, self.writing = engines_of(at)
        else:
            self.reading, self.writing = open_postgres(at, "cos")
        self.writer = Writer(self.writing, tenure=self.tenure, waits=waits)
        self.now = 0.0
        self.succession = Succession(self.reading, self.tenure, lambda: self.now)

    def looks(self, after_s):
        self.now += after_s
        return self.succession.free()

    async def writes(self, value):
        await self.writer.run(
            lambda connection: connection.exec_driver_sql("INSERT INTO written VALUES (%s)", (value,))
        )

    def close(self):
        self.writer.close()
        self.tenure.close()
        self.reading.dispose()
        self.writing.dispose()


@pytest.fixture
def at(server):
    name = server.database()
    server.sql("CREATE TABLE written (value text)", name)
    place = DatabaseAddress(**server.keys(name, timeout_s=4.0))
    place_of[place.url] = (server, name)
    return place


place_of = {}


def written(at):
    server, name = place_of[at.url]
    return server.sql("SELECT value FROM written ORDER BY value", name).splitlines()


@pytest.fixture
def services(at):
    made = []

    def make(**how):
        made.append(Service(at, **how))
        return made[-1]

    yield make
    for one in made:
        one.close()


async def silence(standby):
    """Let a standby look as often as it takes to find the service in office silent; return its last finding."""
    found = standby.looks(1.0)
    for _ in range(int(SILENT_S)):
        assert not found
        found = standby.looks(1.0)
    # A busy server takes a while to end a session.  No time passes for the standby meanwhile.
    for _ in range(200):
        if found:
            break
        await asyncio.sleep(0.05)
        found = standby.looks(0.0)
    return found


async def test_a_standby_waits_while_the_service_in_office_lives_and_has_its_turn_when_that_one_is_gone(
    at, services
):
    first, second = services(), services(waits=True)
    for _ in range(3 * int(SILENT_S)):
        assert not second.looks(1.0)
        assert first.tenure.beat(first.reading)
    with pytest.raises(StoreError, match="another service uses"):
        await second.writer.take()
    await first.writes("one")
    first.close()
    # The database ends a session after its connection has closed.
    async with asyncio.timeout(60):
        while not second.looks(0.0):
            await asyncio.sleep(0.05)
    await second.writer.take()
    await second.writes("two")
    assert written(at) == ["one", "two"]


async def test_a_silent_service_loses_its_session_and_each_later_write_is_refused_by_the_database(
    at, services
):
    first, second = services(), services(waits=True)
    term = Term(first.writer)
    await first.writes("before")
    # The session ends a moment after it was told to.
    found = await silence(second)
    async with asyncio.timeout(10):
        while not found:
            found = second.looks(0.1)
    await second.writer.take()
    await second.writes("second")

    # The first one's connection is gone; of what it does next nothing is kept.
    for _ in range(2):
        with pytest.raises(StoreError) as refused:
            await term.run(lambda one: one.exec_driver_sql("INSERT INTO written VALUES ('late')"))
        assert refused.value.trouble == "away"
    assert not first.tenure.beat(first.reading)
    assert not first.looks(1.0)

    # Nor when the second one has come and gone meanwhile, so that the first one gets the lock again.
    second.close()
    with pytest.raises(StoreError, match="has taken this one's database over"):
        await first.writes("stale")
    assert written(at) == ["before", "second"]
    await first.writer.take()
    await first.writes("third")
    assert written(at) == ["before", "second", "third"]


async def test_a_service_that_awakes_in_mid_transaction_cannot_commit(at, services):
    first, second = services(), services(waits=True)
    term = Term(first.writer)
    inside, go_on = threading.Event(), threading.Event()

    def paused(connection):
        connection.exec_driver_sql("INSERT INTO written VALUES ('half')")
        inside.set()
        go_on.wait(60)
        connection.exec_driver_sql("INSERT INTO written VALUES ('other half')")

    work = asyncio.create_task(term.run(paused))
    await asyncio.to_thread(inside.wait, 30)
    found = await silence(second)
    async with asyncio.timeout(10):
        while not found:
            found = second.looks(0.1)
    await second.writer.take()
    await second.writes("second")
    go_on.set()
    with pytest.raises(StoreError):
        await work
    assert term.lost is not None
    assert written(at) == ["second"]


async def test_without_the_lock_the_name_of_the_tenure_alone_refuses_a_write(at, services):
    # As after a fail-over of the database: the other server knows no locks of the first one.
    first = services()
    server, name = place_of[at.url]
    server.sql("UPDATE coterie_tenure SET holder = 'another', number = number + 1", name)
    with pytest.raises(StoreError, match="has taken this one's database over") as refused:
        await first.writes("stale")
    assert refused.value.trouble == "away"
    assert written(at) == []


async def test_a_tenure_begins_only_after_a_write_under_way_has_ended(at, services):
    # Whoever gets round the lock waits for the transaction, which is checked at its beginning.
    first = services()
    inside, go_on = threading.Event(), threading.Event()

    def slow(connection):
        inside.set()
        go_on.wait(60)
        connection.exec_driver_sql("INSERT INTO written VALUES ('in office')")

    work = asyncio.create_task(first.writer.run(slow))
    await asyncio.to_thread(inside.wait, 30)
    other = Tenure()
    with first.reading.connect() as connection:
        connection.exec_driver_sql("SET LOCAL lock_timeout = 500")
        with pytest.raises(sa.exc.DBAPIError, match="lock timeout"):
            other.begin(connection)
        connection.rollback()
    go_on.set()
    await work
    assert written(at) == ["in office"]


async def test_a_database_that_hung_does_not_count_against_the_service_in_office(at, services):
    first, second = services(), services(waits=True)
    assert not second.looks(1.0)
    for _ in range(5):
        # Looks so far apart are two observations: nothing is known of the time between them.
        assert not second.looks(2 * SILENT_S)
    for _ in range(int(SILENT_S) - 1):
        assert not second.looks(1.0)
    await first.writes("one")
    assert written(at) == ["one"]


def sessions(at):
    """Return the process of each session that holds the lock."""
    server, name = place_of[at.url]
    held = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND database = "
    return server.sql(f"{held}(SELECT oid FROM pg_database WHERE datname = '{name}')", name).split()


async def test_sessions_of_connections_that_the_service_lost_itself_are_ended(at, services):
    first = services()
    (lost,) = sessions(at)
    assert first.looks(1.0)
    first.succession.end_own()
    async with asyncio.timeout(20):
        while lost in sessions(at):
            await asyncio.sleep(0.05)
        # The first attempt finds the connection lost, the next one makes another.
        await first.writer.probe()
        while first.writer.failed:
            await first.writer.probe()
    await first.writes("again")
    assert written(at) == ["again"]
    # The connection that was made within the tenure can be ended as the one before.
    (again,) = sessions(at)
    assert again != lost
    first.succession.end_own()
    async with asyncio.timeout(20):
        while sessions(at):
            await asyncio.sleep(0.05)


async def test_a_session_that_began_no_tenure_is_not_ended_for_the_silence_of_an_earlier_one(at, services):
    # A service that migrates the tables holds the lock before its tenure; one of an earlier release knows none.
    first, second = services(), services(waits=True)
    assert not second.looks(1.0)
    first.close()
    _, writing = engines_of(at)
    with writing.connect() as migrating:
        for _ in range(3 * int(SILENT_S)):
            assert not second.looks(1.0)
        # Nor for a service whose own name is still there.
        first.succession.end_own()
        assert migrating.exec_driver_sql("SELECT 1").scalar() == 1
        assert len(sessions(at)) == 1
    writing.dispose()
    async with asyncio.timeout(20):
        while not second.looks(1.0):
            await asyncio.sleep(0.05)


async def test_signs_of_life_need_no_free_event_loop_and_tell_when_they_arrived(at, services):
    first, second = services(), services(waits=True)
    server, name = place_of[at.url]
    first.tenure.keep_up(first.reading)
    # The loop does nothing else meanwhile.
    until = time.monotonic() + 20
    while int(server.sql("SELECT beat FROM coterie_beat", name)) < 3:
        assert time.monotonic() < until
    assert first.tenure.in_force
    assert not second.looks(1.0)
    # Another service begins a tenure: known from the next sign of life, without a write.
    server.sql(
        "UPDATE coterie_tenure SET holder = 'another'; UPDATE coterie_beat SET holder = 'another'", name
    )
    async with asyncio.timeout(20):
        while not first.tenure.over:
            await asyncio.sleep(0.05)
    assert not first.tenure.in_force


async def test_a_tenure_is_in_force_for_a_while_after_the_start_of_a_sign_of_life_that_arrived(at, services):
    first = services()
    now = 100.0
    tenure = first.tenure = first.writer._tenure = Tenure(lambda: now)
    assert not tenure.in_force
    await first.writer.take()
    now += LEASE_S - 0.1
    assert tenure.in_force
    assert tenure.beat(first.reading)
    now += LEASE_S - 0.1
    assert tenure.in_force
    now += 0.2
    assert not tenure.in_force
    # Signs of life of an earlier tenure confirm nothing.
    server, name = place_of[at.url]
    server.sql("UPDATE coterie_beat SET holder = 'another'", name)
    assert not tenure.beat(first.reading)
    assert tenure.over
    assert not tenure.in_force
    await first.writer.take()
    assert tenure.in_force


def test_a_tenure_also_ends_while_the_machine_is_suspended(monkeypatch):
    # The clock that counts while a machine is suspended; the monotonic one stands still.
    moments = {time.CLOCK_BOOTTIME: 1000.0}
    monkeypatch.setattr(time, "clock_gettime", moments.__getitem__)
    assert Tenure()._clock() == 1000.0


async def test_a_late_write_of_a_tenure_that_has_ended_does_not_keep_the_lock_from_those_who_wait(
    at, services
):
    first, second = services(), services(waits=True)
    assert await silence(second)
    await second.writer.take()
    with pytest.raises(StoreError):
        await first.writes("its session was ended")
    # The second one dies: the first one's next write connects anew, and gets the lock.
    second.close()
    await asyncio.to_thread(no_holder, at)
    with pytest.raises(StoreError, match="taken this one's database over"):
        await first.writes("late")

    third = services(waits=True)
    await asyncio.to_thread(no_holder, at)
    assert third.looks(1.0)
    await third.writer.take()
    await third.writes("three")
    assert written(at) == ["three"]


def no_holder(at):
    """Wait until no session has the lock."""
    server, name = place_of[at.url]
    deadline = time.monotonic() + 30
    while server.sql("SELECT 1 FROM pg_locks WHERE locktype = 'advisory'", name).strip():
        assert time.monotonic() < deadline, "a session keeps the lock"
        time.sleep(0.1)
