"""Errors of a database are plain, and never have secrets."""

import asyncio
import threading

import pytest
import sqlalchemy as sa

from coterie.errors import ConfigError, StoreError
from coterie.launch.children import free_port
from coterie.store import postgres as module
from coterie.store.engine import Term, Writer, failure, trouble_of
from coterie.store.postgres import DatabaseAddress, bounded, open_postgres, read_revision

from .. import postgres

SECRET = "hunter2"  # pragma: allowlist secret


@pytest.fixture(scope="module")
def server():
    with postgres.running() as one:
        yield one


@pytest.fixture
def place(server):
    return lambda **changes: DatabaseAddress(
        **server.keys(changes.pop("database", None) or server.database(), **changes)
    )


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (f"postgresql+psycopg://user:{SECRET}@host/db", "database.url holds a password"),
        (f"postgresql+psycopg://user@host/db?password={SECRET}", "database.url holds a password"),
        (f"mysql://user:{SECRET}@host/db", "database.url is one of 'mysql'"),
        (f"{SECRET}", "database.url is no URL"),
        ("postgresql+psycopg://host/db", "names no user or no database"),
        ("postgresql+psycopg://user@host", "names no user or no database"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_and_not_repeated(url, said):
    with pytest.raises(ConfigError, match=said) as refused:
        DatabaseAddress(url).engine()
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "said"), [(None, "cannot read the password in .*: No such"), ("", "is empty")]
)
def test_a_password_file_that_says_nothing_is_named(tmp_path, content, said):
    path = tmp_path / "password"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        DatabaseAddress("postgresql+psycopg://user@host/db", password_file=path).engine()


def test_what_the_server_objects_to_comes_with_what_to_do(place, server, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text(SECRET)
    other = place(tls="require")
    nowhere = DatabaseAddress(f"postgresql+psycopg://coterie@127.0.0.1:1/{server.database()}", tls="disable")
    for at, said, hint in [
        (place(password_file=wrong), "password authentication failed", "database.password_file"),
        (place(password_file=None), "no password supplied", "database.password_file"),
        (place(database="absent"), 'database "absent" does not exist', "createdb"),
        (other, "server does not support SSL", "database.tls"),
        (nowhere, "[Cc]onnection refused", "does the server run"),
    ]:
        for opened in (open_postgres, read_revision):
            arguments = (at, "cos") if opened is open_postgres else (at,)
            with pytest.raises(StoreError, match=f"cannot open database .* at 127.0.0.1: .*{said}") as failed:
                opened(*arguments)
            assert hint in (failed.value.hint or "")
            assert SECRET not in str(failed.value)
            assert postgres.PASSWORD not in str(failed.value)


@pytest.fixture(scope="module")
def secured():
    with postgres.running(tls=True) as one:
        yield one


def test_a_server_with_the_right_certificate_is_reached_by_tls(secured):
    at = DatabaseAddress(**secured.keys(secured.database()))
    assert at.tls == "verify-full"
    reading, writing = open_postgres(at, "cos")
    with reading.connect() as connection:
        (used,) = connection.exec_driver_sql("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").one()
    assert used is True
    for engine in (reading, writing):
        engine.dispose()


def test_a_server_that_does_not_prove_who_it_is_is_refused_with_the_reason(secured, server, tmp_path):
    name = secured.database()
    other, _ = postgres.authority(tmp_path, "another")
    nothing = tmp_path / "nothing.pem"
    elsewhere = secured.url("elsewhere.test", name)
    plain = server.keys(server.database(), tls="verify-full", ca_file=secured.ca_file)
    for keys, said, hint in [
        (secured.keys(name, ca_file=other), "certificate verify failed", "database.ca_file"),
        (secured.keys(name, ca_file=None), "certificate verify failed", "database.ca_file"),
        (
            secured.keys(name, url=elsewhere),
            'certificate for "db.coterie.test" .*does not match host name "elsewhere.test"',
            "a name that is in the server's certificate",
        ),
        (secured.keys(name, ca_file=nothing), "nothing.pem", "database.ca_file"),
        (plain, "server does not support SSL", "database.tls"),
        (secured.keys(name, tls="disable"), "no encryption|SSL off", "pg_hba.conf"),
    ]:
        with pytest.raises(StoreError, match=f"cannot open database .*{said}") as failed:
            open_postgres(DatabaseAddress(**keys), "cos")
        assert hint in (failed.value.hint or "")
        assert postgres.PASSWORD not in str(failed.value)
    # Less can be asked for: the authority but not the name, or TLS alone.
    for keys in (
        secured.keys(name, url=elsewhere, tls="verify-ca"),
        secured.keys(name, tls="require", ca_file=None),
    ):
        for engine in open_postgres(DatabaseAddress(**keys), "cos"):
            engine.dispose()


def test_a_database_that_cannot_hold_the_store_is_refused(place, server, monkeypatch):
    with pytest.raises(StoreError, match="encoded in LATIN1"):
        open_postgres(place(database=server.database("LATIN1")), "cos")
    taken = server.database()
    server.sql("CREATE TABLE runs (of text)", taken)
    with pytest.raises(StoreError, match='relation "runs" already exists'):
        open_postgres(place(database=taken), "cos")
    monkeypatch.setattr(module, "LEAST_VERSION", 999)
    with pytest.raises(StoreError, match=r"is of PostgreSQL .*version 999 or later is expected"):
        open_postgres(place(), "cos")


def test_a_unix_socket_is_reached_without_tls(server):
    name = server.database()
    url = f"postgresql+psycopg://{postgres.USER}@/{name}?host={server.folder}&port={server.port}"
    at = DatabaseAddress(url, password_file=server.password_file)
    for engine in open_postgres(at, "cos"):
        engine.dispose()
    assert read_revision(at) is not None
    assert at.name == f"database '{name}' at {server.folder}"


def test_a_url_of_several_servers_reaches_the_one_that_takes_writes_and_names_all(server):
    name, nobody = server.database(), free_port()
    hosts = f"host=127.0.0.1:{nobody}&host=127.0.0.1:{server.port}"
    url = f"postgresql+psycopg://{postgres.USER}@/{name}?{hosts}&target_session_attrs=read-write"
    at = DatabaseAddress(url, password_file=server.password_file, tls="disable")
    for engine in open_postgres(at, "cos"):
        engine.dispose()
    assert at.name == f"database '{name}' at 127.0.0.1:{nobody} or 127.0.0.1:{server.port}"


def test_nothing_is_made_by_looking(place, server):
    name = server.database()
    assert read_revision(place(database=name)) is None
    assert server.sql("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'", name) == "0\n"


async def test_one_service_writes_and_a_second_one_is_kept_out(place):
    at = place()
    reading, writing = open_postgres(at, "cos")
    writer = Writer(writing)
    with pytest.raises(StoreError, match="another service uses database"):
        open_postgres(at, "cos")
    writer.close()
    for engine in (reading, writing, *open_postgres(at, "cos")):
        engine.dispose()


def test_a_service_waits_for_a_session_that_the_server_has_yet_to_end(place):
    at = place()
    reading, writing = open_postgres(at, "cos")
    held, watching = writing.connect(), reading.connect()
    waits = sa.text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
    ended = threading.Event()

    def let_go():
        # Not before the other one waits for it.
        while not watching.execute(waits).scalar() and not ended.is_set():
            watching.rollback()
        held.invalidate()

    other = threading.Thread(target=let_go)
    other.start()
    try:
        engines = open_postgres(at, "cos")
    finally:
        ended.set()
        other.join()
    watching.close()
    for engine in (reading, writing, *engines):
        engine.dispose()


async def test_a_lost_connection_and_a_hung_server_end_a_term_and_pass(place, server):
    at = place(timeout_s=1.0)
    reading, writing = open_postgres(at, "cos")
    writer = Writer(writing)
    term = Term(writer, 5.0)

    def lost(connection):
        (pid,) = connection.exec_driver_sql("SELECT pg_backend_pid()").one()
        server.sql(f"SELECT pg_terminate_backend({pid})")
        connection.exec_driver_sql("SELECT 1")

    with pytest.raises(StoreError) as failed:
        await term.run(lost)
    assert (failed.value.trouble, term.lost is None) == ("away", False)
    async with asyncio.timeout(20):
        await writer.probe()
    assert not writer.failed
    # The new connection holds the lock, too.
    with pytest.raises(StoreError, match="another service uses"):
        open_postgres(at, "cos")

    term = Term(writer, 5.0)
    with pytest.raises(StoreError) as failed:
        await term.run(lambda connection: connection.exec_driver_sql("SELECT pg_sleep(10)"))
    assert failed.value.trouble == "away"
    term = Term(writer, 1.0)
    with server.hung(), pytest.raises(StoreError, match="the store does not answer"):
        await term.run(lambda connection: connection.exec_driver_sql("SELECT 1"))
    async with asyncio.timeout(20):
        await writer.probe()
    assert not writer.failed
    writer.close()
    for engine in (reading, writing):
        engine.dispose()


@pytest.mark.parametrize("tls", [False, True])
def test_a_server_that_hangs_while_it_is_read_is_cut_off(server, secured, tls):
    asked = secured if tls else server
    engine = DatabaseAddress(**asked.keys(asked.database())).engine()
    with engine.connect() as connection:
        with bounded(connection, 30.0):
            assert connection.exec_driver_sql("SELECT 1").scalar() == 1
        with (
            asked.hung(),
            pytest.raises(sa.exc.OperationalError) as failed,
            bounded(connection, 0.2),
        ):
            connection.exec_driver_sql("SELECT 1")
    assert failure(failed.value).trouble == "away"
    engine.dispose()


def test_what_the_server_says_is_told_apart_by_its_codes(place):
    engine, _ = open_postgres(place(), "cos")
    with engine.connect() as connection:
        for statement, trouble in [
            ("SELECT 1 FROM nowhere", ""),
            ("SET transaction_read_only = on; UPDATE alembic_version SET version_num = ''", "away"),
        ]:
            with pytest.raises(sa.exc.DBAPIError) as failed:
                connection.exec_driver_sql(statement)
            assert trouble_of(failed.value) == trouble
            connection.rollback()
    for code, trouble in [
        ("53100", "full"),
        ("53200", "away"),
        ("57P01", "away"),
        ("23505", ""),
        (None, "away"),
    ]:
        cause = type("Error", (Exception,), {"sqlstate": code})()
        assert trouble_of(sa.exc.OperationalError("", None, cause)) == trouble
    engine.dispose()
