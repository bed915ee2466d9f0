"""The log in the third party's store: written with the thing itself, once, in order, in SQLite and in PostgreSQL."""

import asyncio
import sqlite3
import time
from contextlib import closing

import pytest
import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto.beacon import draw_beacon
from coterie.crypto.identity import Identity, countersign
from coterie.crypto.merkle import Tree, check_consistency, check_inclusion
from coterie.crypto.transparency import BEACON, BUNDLE, CERTIFICATE, REVOCATION, bundle_statement, entry_leaf
from coterie.secure_sum.bundles import bundle_from_wire, bundle_to_wire
from coterie.store import thirdparty_log as log
from coterie.store.engine import migrate, open_sqlite
from coterie.store.postgres import DatabaseAddress
from coterie.store.thirdparty import Published, Redemption, ThirdPartyStore
from coterie.wire.refusal import Refusal
from coterie.wire.v1.common_pb2 import KeyBundle

from .. import postgres

DIRECTORY = Ed25519PrivateKey.generate()
CHAIN = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


def published(count=1):
    found = []
    for _ in range(count):
        now = int(time.time())
        bundle = countersign(Identity.generate().bundle(1, (now, now + 10)), DIRECTORY, "client/host-0")
        message = bundle_to_wire(bundle).SerializeToString()
        found.append(Published(bundle.participant_id, 1, message, bundle_statement(bundle)))
    return found


def draw(population_sha256):
    return draw_beacon("a-run", population_sha256, DIRECTORY)


def redemption(name="anna", participants=10):
    key = name.encode().ljust(32, b".")
    return Redemption(key, f"client/{name}", participants, key, key, CHAIN, 1)


@pytest.fixture
def store(tmp_path):
    opened = ThirdPartyStore(tmp_path / "directory.db")
    yield opened
    opened.close()


async def kinds(store):
    return [kind for kind, _ in await store.log_entries(0, 1000)]


async def test_a_bundle_of_an_earlier_release_is_countersigned_again_with_its_party(store):
    (new,) = published()
    message = KeyBundle.FromString(new.message)
    message.party = ""
    bundle = bundle_from_wire(message)
    message.countersignature = DIRECTORY.sign(bundle_statement(bundle))
    old = new._replace(message=message.SerializeToString(), statement=bundle_statement(bundle))
    await store.enrol(redemption(), [old])
    await store.enrol(redemption(), [new])
    assert (await store.lookup([new.participant])).messages == {new.participant: new.message}
    # Nothing takes the place of the new one, which names the party; the log has both.
    with pytest.raises(Refusal, match="the directory holds 1"):
        await store.enrol(redemption(), [old])
    assert await kinds(store) == [CERTIFICATE, BUNDLE, BUNDLE]


async def test_what_is_refused_is_not_logged(store):
    await store.enrol(redemption(), published(2))
    assert await kinds(store) == [CERTIFICATE, BUNDLE, BUNDLE]
    before = await store.log_head()
    with pytest.raises(Refusal):
        await store.enrol(redemption("berta", participants=1), published(2))
    await store.enrol(redemption(), [])
    assert await store.log_head() == before


async def test_revocations_and_beacons_are_logged_once(store):
    for _ in range(2):
        await store.commit_population("a-run", [], [], draw)
        await store.revoke([bytes(32)], [bytes(31) + b"1"])
    assert await kinds(store) == [BEACON, REVOCATION, REVOCATION]
    await store.log_certificate(CHAIN)
    await store.log_certificate(CHAIN)
    assert await kinds(store) == [BEACON, REVOCATION, REVOCATION, CERTIFICATE]


async def test_concurrent_appends_make_one_log_without_gaps(store):
    async def grow(number):
        await store.enrol(redemption(f"party-{number}"), published(3))
        return await store.log_head()

    heads = sorted(await asyncio.gather(*map(grow, range(20))))
    entries = await store.log_entries(0, 1000)
    assert len(entries) == 80
    tree = Tree()
    for entry in entries:
        tree.append(entry_leaf(*entry))
    for size, root, _ in heads:
        assert tree.root(size) == root
    # A head with more entries is a later one.
    assert [time_ms for *_, time_ms in heads] == sorted(time_ms for *_, time_ms in heads)
    for size, root, _ in heads:
        path = await store.log_consistency(size, 80)
        check_consistency(size, root, 80, tree.root(), path)
    leaf = entry_leaf(*entries[41])
    missing, found = await store.log_inclusion([bytes(32), leaf], 80)
    assert missing is None
    check_inclusion(leaf, found.position, 80, found.path, tree.root())
    assert await store.log_inclusion([leaf], 41) == [None]


async def test_times_of_heads_grow_also_when_the_clock_goes_back(tmp_path):
    store = ThirdPartyStore(tmp_path / "directory.db")
    await store.enrol(redemption(), [])
    _, _, before = await store.log_head()
    store.close()
    ahead = before + 3_600_000
    with closing(sqlite3.connect(tmp_path / "directory.db")) as connection:
        connection.execute("UPDATE log_clock SET time_ms = ?", (ahead,))
        connection.commit()
    store = ThirdPartyStore(tmp_path / "directory.db")
    _, _, first = await store.log_head()
    await store.enrol(redemption("berta"), [])
    _, _, second = await store.log_head()
    assert ahead < first < second
    store.close()


async def test_what_was_signed_before_there_was_a_log_is_logged_at_the_next_start(tmp_path):
    path = tmp_path / "directory.db"
    store = ThirdPartyStore(path)
    await store.enrol(redemption(), published(2))
    await store.commit_population("a-run", [], [], draw)
    await store.revoke([bytes(32)], [])
    # Beacons that were drawn before there were populations are of no use, and dropped.
    expected = [entry for entry in await store.log_entries(0, 1000) if entry[0] != BEACON]
    store.close()
    with closing(sqlite3.connect(path)) as connection:
        for statement in (
            "DROP TABLE log_entries",
            "DROP TABLE log_clock",
            "DROP TABLE waves",
            "DROP TABLE members",
            "UPDATE alembic_version SET version_num = 'thirdparty_0004'",
        ):
            connection.execute(statement)
        connection.commit()
    for _ in range(2):
        store = ThirdPartyStore(path)
        assert sorted(await store.log_entries(0, 1000)) == sorted(expected)
        store.close()


async def test_a_page_of_entries_ends_before_it_is_too_long(store):
    def write(connection):
        log.append_all(connection, [("test", bytes(300_000)) for _ in range(10)])

    await store._write(write)
    assert len(await store.log_entries(0, 1000)) == 3
    assert len(await store.log_entries(8, 1000)) == 2
    assert len(await store.log_entries(0, 2)) == 2
    assert await store.log_entries(10, 1000) == []


@pytest.fixture(params=["sqlite", "postgres"])
def engine(request, tmp_path):
    if request.param == "sqlite":
        opened = open_sqlite(tmp_path / "store.db", "thirdparty")
        yield opened
        opened.dispose()
        return
    with postgres.running() as server:
        opened = DatabaseAddress(**server.keys(server.database())).engine()
        migrate(opened, "thirdparty")
        yield opened
        opened.dispose()


def test_every_database_keeps_the_log_in_order_and_gives_the_same_proofs(engine):
    reader, tree = log.LogReader(), Tree()
    for number in range(20):
        statement = f"statement {number}".encode()
        with engine.begin() as connection:
            log.append(connection, "population", statement)
        tree.append(entry_leaf("population", statement))
        with engine.connect() as connection:
            assert reader.head(connection) == (number + 1, tree.root())

    def broken_off():
        with engine.begin() as connection:
            log.append(connection, "population", b"lost")
            row = {"position": 0, "kind": "x", "statement": b"", "leaf": b""}
            connection.execute(log.entries.insert(), row)

    with pytest.raises(sa.exc.IntegrityError):
        broken_off()
    with engine.begin() as connection:
        times = [log.next_time(connection) for _ in range(5)]
        assert times == sorted(set(times))
    with engine.connect() as connection:
        assert log.size_of(connection) == 20
        assert log.is_logged(connection, "population", b"statement 7")
        assert not log.is_logged(connection, "population", b"lost")
        assert log.page(connection, 18, 5) == [
            ("population", b"statement 18"),
            ("population", b"statement 19"),
        ]
        # Another process, which reads all of it at once.
        again = log.LogReader()
        leaf = entry_leaf("population", b"statement 7")
        (proof,) = again.inclusion(connection, [leaf], 13)
        check_inclusion(leaf, proof.position, 13, proof.path, tree.root(13))
        assert again.consistency(connection, 5, 20) == tree.consistency(5, 20)
