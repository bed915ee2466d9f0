"""The migrations of every role make exactly the tables that its module declares, from each revision, after a backup."""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

import coterie.store
from coterie.config.services import ClientSettings, CosSettings
from coterie.crypto import restored
from coterie.errors import StoreError
from coterie.launch.backup import restore_service
from coterie.process.migration import backed_up
from coterie.store import backup, cos, newest
from coterie.store.backup import back_up
from coterie.store.engine import migrate, open_sqlite
from coterie.store.postgres import DatabaseAddress, open_postgres, read_revision
from tests.operators import KEYS

from .. import postgres

ROLES = ["client", "cos", "data_owner", "expansion", "thirdparty"]
"""Names of modules in ``coterie.store`` and of their folders of revisions."""


@pytest.mark.parametrize("role", ROLES)
def test_migrating_an_empty_file_gives_the_declared_tables(role, tmp_path):
    metadata = importlib.import_module(f"coterie.store.{role}").metadata
    engine = open_sqlite(tmp_path / "store.db", role)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
    engine.dispose()


@pytest.mark.parametrize("role", ROLES)
def test_opening_a_migrated_file_again_changes_nothing(role, tmp_path):
    assert opened(tmp_path / "store.db", role) == opened(tmp_path / "store.db", role)


@pytest.mark.parametrize("role", ROLES)
def test_the_script_for_new_stores_leaves_what_all_migrations_leave(role):
    assert sorted(ROLES) == sorted(newest.SCHEMAS)
    written = Path(coterie.store.__file__).parent / "migrations" / role / "newest.sql"
    assert written.read_text() == newest.of_migrations(role), "python -m coterie.store.newest --write"
    assert newest.newest(role).revision == revisions(role)[-1]


@pytest.mark.parametrize("role", ROLES)
def test_a_store_made_by_the_script_is_the_one_that_migrations_make(role, tmp_path):
    migrated = sa.create_engine(f"sqlite:///{tmp_path / 'migrated.db'}", poolclass=sa.pool.NullPool)
    migrate(migrated, role, by_script=False)
    migrated.dispose()
    assert opened(tmp_path / "store.db", role) == opened(tmp_path / "migrated.db", role)
    contents = []
    for name in ("store.db", "migrated.db"):
        with contextlib.closing(sqlite3.connect(tmp_path / name)) as connection:
            contents.append(list(connection.iterdump()))
    assert contents[0] == contents[1]


def test_new_and_current_stores_are_opened_without_alembic(tmp_path):
    program = (
        "import sys; from pathlib import Path; from coterie.store.engine import open_sqlite\n"
        "for _ in range(2): open_sqlite(Path(sys.argv[1]), 'cos').dispose()\n"
        "assert not [name for name in sys.modules if name.startswith('alembic')]"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "cos.db")], check=True)


def test_a_file_with_other_tables_is_no_new_store(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE runs (mine TEXT)")
        connection.commit()
    with pytest.raises(StoreError, match="already exists"):
        open_sqlite(tmp_path / "other.db", "cos")
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        assert [name for (name,) in connection.execute("SELECT name FROM sqlite_master")] == ["runs"]


def opened(path, role):
    engine = open_sqlite(path, role)
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master ORDER BY name").all()
    engine.dispose()
    return rows


# --- from earlier revisions ------------------------------------------------------------------------------------------


def revisions(role):
    """Return the revisions of a role's tables, the first first."""
    folder = Path(coterie.store.__file__).parent / "migrations" / role
    return [f"{role}_{path.name[:4]}" for path in sorted(folder.glob("0*.py"))]


def made_at(path, role, revision):
    """Make a store whose tables are of a revision."""
    engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.pool.NullPool)
    migrate(engine, role, to=revision)
    engine.dispose()


def revision_of(path):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT version_num FROM alembic_version").fetchone()[0]


EARLIER = [(role, revision) for role in ROLES for revision in revisions(role)[:-1]]


@pytest.mark.parametrize(("role", "earlier"), EARLIER, ids=lambda one: one)
def test_a_store_of_each_earlier_revision_is_migrated_after_a_copy_was_made(role, earlier, tmp_path):
    made_at(tmp_path / "store.db", role, earlier)
    called = []

    def before(held, wanted):
        # Nothing is changed yet.
        called.append((held, wanted, revision_of(tmp_path / "store.db")))

    engine = open_sqlite(tmp_path / "store.db", role, before=before)
    metadata = importlib.import_module(f"coterie.store.{role}").metadata
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
    engine.dispose()
    assert called == [(earlier, revisions(role)[-1], earlier)]


@pytest.mark.parametrize("role", ROLES)
def test_nothing_is_copied_of_a_new_store_nor_of_one_of_the_newest_revision(role, tmp_path):
    def before(held, wanted):
        pytest.fail("there is nothing to migrate")

    for _ in range(2):
        open_sqlite(tmp_path / "store.db", role, before=before).dispose()


def test_a_migration_that_fails_half_way_leaves_the_store_as_it_was(tmp_path):
    path = tmp_path / "client.db"
    made_at(path, "client", "client_0005")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        # The last migration finds a table of this name, after the one before it has made its own.
        connection.execute("CREATE TABLE preferences (something INTEGER)")
        connection.commit()
    before = tables(path)
    with pytest.raises(StoreError, match="preferences"):
        open_sqlite(path, "client")
    assert revision_of(path) == "client_0005"
    assert tables(path) == before


def tables(path):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()


def test_a_copy_that_cannot_be_made_prevents_the_migration(tmp_path):
    made_at(tmp_path / "cos.db", "cos", "cos_0005")

    def before(held, wanted):
        raise StoreError("no room", trouble="full")

    with pytest.raises(StoreError, match="no room"):
        open_sqlite(tmp_path / "cos.db", "cos", before=before)
    assert revision_of(tmp_path / "cos.db") == "cos_0005"


# --- what a service does before --------------------------------------------------------------------------------------


def state_of_a_client(folder):
    """Return the settings of a client host whose state an earlier release made."""
    state = folder / "state"
    (state / "private").mkdir(parents=True)
    (state / "private" / "array.npy").write_bytes(b"1" * 100)
    (state / "identities.key").write_bytes(b"secret")
    made_at(state / "client.db", "client", "client_0006")
    peer = {"address": "127.0.0.1:1", "name": "peer"}
    return ClientSettings(
        name="host-0",
        state=state,
        listen="127.0.0.1:1",
        run="run",
        cos=peer,
        thirdparty=peer,
        operator_keys=KEYS,
    )


def test_the_backup_before_a_migration_restores_the_whole_state_at_the_earlier_revision(tmp_path):
    settings = state_of_a_client(tmp_path)
    (settings.state / "before-client_0006.tar").write_bytes(b"of an earlier upgrade")
    before = backed_up("client", settings)
    open_sqlite(settings.state / "client.db", "client", before=before).dispose()
    assert revision_of(settings.state / "client.db") == "client_0009"
    (archive,) = settings.state.glob("*.tar")
    assert archive.name == "before-client_0009.tar"
    assert archive.stat().st_mode & 0o777 == 0o600
    assert not list(settings.state.glob(".*"))

    back = settings.model_copy(update={"state": tmp_path / "back"})
    manifest = restore_service("client", back, archive)
    assert manifest.files.keys() == {"client.db", "identities.key", "private/array.npy"}
    assert revision_of(back.state / "client.db") == "client_0006"
    # It answered in sums that this state does not know.
    assert restored.sits_out(back.state, "run")
    # No other backup holds the archive.
    later = back_up("client", settings.state, tmp_path / "later.tar", "1")
    assert later.files.keys() == manifest.files.keys()


def test_copies_of_the_state_that_a_kill_left_are_removed_at_the_next_start(tmp_path):
    settings = state_of_a_client(tmp_path)
    write = backup._write

    def killed(*args):
        write(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(target=open_killed, args=(settings, killed))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert list(settings.state.glob(".before-*"))
    # Even if nothing is to be migrated, or without a backup.
    backed_up("client", settings.model_copy(update={"backup_before_migration": False}))
    assert not list(settings.state.glob(".*"))
    assert (settings.state / "identities.key").exists()


def open_killed(settings, killed):
    backup._write = killed
    open_sqlite(settings.state / "client.db", "client", before=backed_up("client", settings))


def test_a_service_that_is_told_to_migrates_without_a_backup(tmp_path):
    settings = state_of_a_client(tmp_path).model_copy(update={"backup_before_migration": False})
    open_sqlite(settings.state / "client.db", "client", before=backed_up("client", settings)).dispose()
    assert revision_of(settings.state / "client.db") == "client_0009"
    assert not list(settings.state.glob("*.tar"))


def test_a_state_that_cannot_be_backed_up_is_not_migrated_and_the_message_says_what_to_do(tmp_path):
    settings = state_of_a_client(tmp_path)
    (settings.state / "link").symlink_to("identities.key")
    with pytest.raises(StoreError) as raised:
        open_sqlite(settings.state / "client.db", "client", before=backed_up("client", settings))
    assert "has to be migrated to client_0009, which needs a backup first" in str(raised.value)
    assert "backup_before_migration = false" in str(raised.value)
    assert revision_of(settings.state / "client.db") == "client_0006"
    assert not list(settings.state.glob("*.tar"))


def test_runs_in_a_database_are_in_the_backup_at_the_earlier_revision(tmp_path):
    with postgres.running() as server:
        keys = server.keys(server.database())
        place = DatabaseAddress(**keys)
        engine = place.engine()
        migrate(engine, "cos", to="cos_0005")
        row = {"run_id": "run", "request": b"\x00", "plan_hash": b"\xff", "state": "{}", "snapshot": 2**40}
        with engine.begin() as connection:
            connection.execute(cos.runs.insert(), row)
        engine.dispose()
        settings = CosSettings(
            name="cos",
            state=tmp_path / "state",
            listen="127.0.0.1:1",
            thirdparty={"address": "127.0.0.1:1", "name": "peer"},
            database=keys,
        )
        (settings.state / "tls").mkdir(parents=True)
        (settings.state / "tls" / "key.pem").write_bytes(b"secret")
        reading, writing = open_postgres(place, "cos", before=backed_up("cos", settings, place))
        reading.dispose()
        writing.dispose()
        assert read_revision(place) == revisions("cos")[-1]
    back = CosSettings(
        name="cos",
        state=tmp_path / "back",
        listen="127.0.0.1:1",
        thirdparty={"address": "127.0.0.1:1", "name": "peer"},
    )
    manifest = restore_service("cos", back, settings.state / f"before-{revisions('cos')[-1]}.tar")
    assert manifest.files.keys() == {"cos.db", "tls/key.pem"}
    assert revision_of(back.state / "cos.db") == "cos_0005"
    with contextlib.closing(sqlite3.connect(back.state / "cos.db")) as connection:
        assert connection.execute("SELECT run_id, plan_hash, snapshot FROM runs").fetchall() == [
            ("run", b"\xff", 2**40)
        ]


def test_versions_of_models_in_a_database_are_not_left_out_of_the_backup_without_a_word(tmp_path):
    with postgres.running() as server:
        keys = server.keys(server.database())
        place = DatabaseAddress(**keys)
        engine = place.engine()
        migrate(engine, "cos", to="cos_0005")
        cos.shared.create_all(engine)
        settings = CosSettings(
            name="cos",
            state=tmp_path / "state",
            listen="127.0.0.1:1",
            thirdparty={"address": "127.0.0.1:1", "name": "peer"},
            database=keys,
            standby=True,
        )
        (settings.state / "tls").mkdir(parents=True)
        (settings.state / "tls" / "key.pem").write_bytes(b"secret")
        row = {"run_id": "run", "round": 1, "part": 0, "version": 1, "content": b"model"}
        with engine.begin() as connection:
            connection.execute(cos.model_versions.insert(), row)
        with pytest.raises(StoreError) as raised:
            open_postgres(place, "cos", before=backed_up("cos", settings, place))
        assert "versions of models in the database" in str(raised.value)
        assert "pg_dump" in str(raised.value)
        assert "backup_before_migration = false" in str(raised.value)
        assert read_revision(place) == "cos_0005"
        assert not list(settings.state.glob("*.tar"))
        # Without any, the archive has everything.
        with engine.begin() as connection:
            connection.execute(cos.model_versions.delete())
        engine.dispose()
        for one in open_postgres(place, "cos", before=backed_up("cos", settings, place)):
            one.dispose()
        assert read_revision(place) == revisions("cos")[-1]
        assert list(settings.state.glob("*.tar"))
