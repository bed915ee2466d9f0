"""A backup holds everything that a party is, comes back as it was, and is checked before it counts."""

import fcntl
import io
import json
import sqlite3
import tarfile

import pytest
import sqlalchemy as sa

from coterie.cli.main import invoke
from coterie.config.services import ClientSettings, CosSettings
from coterie.crypto import restored
from coterie.errors import StoreError
from coterie.launch.backup import back_up_service, restore_service
from coterie.store import cos as cos_store
from coterie.store.backup import back_up, read_manifest, restore
from coterie.store.engine import open_sqlite
from coterie.store.postgres import DatabaseAddress, open_postgres
from tests.operators import KEYS

from .. import postgres

PEER = {"address": "127.0.0.1:1", "name": "peer"}


def run_row(run_id="run"):
    return {"run_id": run_id, "request": b"\x00", "plan_hash": b"\xff", "state": "{}", "snapshot": 2**40}


def filled(state):
    """Return the state folder of a COS with a run in it, and the engine that a running service would have."""
    (state / "tls").mkdir(parents=True)
    (state / "models" / "run").mkdir(parents=True)
    for path, content, mode in [
        ("tls/key.pem", b"secret", 0o600),
        ("tls/chain.pem", b"chain", 0o644),
        ("models/run/version-0000000001-0000000002.safetensors", bytes(3000), 0o600),
        ("lock", b"", 0o600),
        ("account.json", b"{}", 0o644),
        (".part", b"half", 0o600),
    ]:
        (state / path).write_bytes(content)
        (state / path).chmod(mode)
    engine = open_sqlite(state / "cos.db", "cos")
    with engine.begin() as connection:
        connection.execute(cos_store.runs.insert(), run_row())
    return engine


def tree(state):
    return {
        path.relative_to(state).as_posix(): (path.read_bytes(), path.stat().st_mode & 0o777)
        for path in state.rglob("*")
        if path.is_file() and path.suffix != ".db"
    }


def runs_in(path):
    with sqlite3.connect(path) as connection:
        return connection.execute("SELECT run_id, snapshot FROM runs ORDER BY run_id").fetchall()


@pytest.fixture
def state(tmp_path):
    filled(tmp_path / "state").dispose()
    return tmp_path / "state"


@pytest.fixture
def archive(tmp_path, state):
    back_up("cos", state, tmp_path / "backup.tar", "1")
    return tmp_path / "backup.tar"


def test_what_comes_back_is_what_there_was_with_its_modes(tmp_path):
    engine = filled(tmp_path / "state")
    # A service that runs: something is only in its write-ahead log.
    with engine.connect() as held:
        held.execute(cos_store.runs.insert(), run_row("later"))
        held.commit()
        held.execute(cos_store.runs.insert(), run_row("not committed"))
        manifest = back_up("cos", tmp_path / "state", tmp_path / "backup.tar", "1")
    engine.dispose()
    assert (tmp_path / "backup.tar").stat().st_mode & 0o777 == 0o600
    assert manifest == read_manifest(tmp_path / "backup.tar")
    assert restore("cos", tmp_path / "again", tmp_path / "backup.tar") == manifest
    before = tree(tmp_path / "state")
    for left_out in ("lock", "account.json", ".part", "cos.db-wal", "cos.db-shm"):
        before.pop(left_out, None)
    assert tree(tmp_path / "again") == before
    assert (tmp_path / "again").stat().st_mode & 0o777 == 0o700
    assert runs_in(tmp_path / "again" / "cos.db") == [("later", 2**40), ("run", 2**40)]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_nothing_is_replaced(tmp_path, state, archive):
    with pytest.raises(StoreError, match=r"backup\.tar exists"):
        back_up("cos", state, archive, "1")
    with pytest.raises(StoreError, match="state is not empty"):
        restore("cos", state, archive)
    with pytest.raises(StoreError, match="lies in the state folder"):
        back_up("cos", state, state / "backup.tar", "1")
    (tmp_path / "empty").mkdir()
    restore("cos", tmp_path / "empty", archive)
    assert runs_in(tmp_path / "empty" / "cos.db")


def test_a_seal_that_an_earlier_release_took_along_is_not_restored(tmp_path, monkeypatch):
    filled(tmp_path / "state").dispose()
    (tmp_path / "state" / "cos.db-sum").write_text("0  cos.db\n0 0\n")
    # Stores are copied as they are; the seal, a file like any other, is taken along.
    monkeypatch.setattr("coterie.store.backup.check_seal", lambda path: "no")
    monkeypatch.setattr("coterie.store.backup._BESIDE", ("-wal", "-shm", "-journal"))
    assert "cos.db-sum" in back_up("cos", tmp_path / "state", tmp_path / "a.tar", "1").files
    monkeypatch.undo()
    restore("cos", tmp_path / "back", tmp_path / "a.tar")
    assert not (tmp_path / "back" / "cos.db-sum").exists()
    open_sqlite(tmp_path / "back" / "cos.db", "cos").dispose()


def test_a_state_folder_with_a_link_is_not_backed_up(tmp_path, state):
    (state / "tls" / "other.pem").symlink_to("/etc/passwd")
    with pytest.raises(StoreError, match=r"other\.pem is a link"):
        back_up("cos", state, tmp_path / "links.tar", "1")
    assert not (tmp_path / "links.tar").exists()


@pytest.mark.parametrize("place", [0, 700, 3000, 5000, -20_000])
def test_a_changed_byte_is_found(tmp_path, archive, place):
    content = bytearray(archive.read_bytes())
    content[place] ^= 1
    archive.write_bytes(content)
    with pytest.raises(StoreError, match="is no backup, or damaged"):
        restore("cos", tmp_path / "again", archive)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("length", [0, 100, 1500, 5000])
def test_a_backup_that_was_cut_short_is_found(tmp_path, archive, length):
    archive.write_bytes(archive.read_bytes()[:length])
    with pytest.raises(StoreError, match="no backup, or damaged"):
        restore("cos", tmp_path / "again", archive)
    assert not (tmp_path / "again").exists()


def made(path, named, *, listed=None, kind=tarfile.REGTYPE, **head):
    """Make an archive by hand: a file ``named``, which its manifest lists as such or otherwise."""
    content = b"content"
    digest = "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"  # pragma: allowlist secret
    listed = [named] if listed is None else listed
    files = [{"path": one, "size": len(content), "mode": 0o600, "sha256": digest} for one in listed]
    manifest = json.dumps(
        {"format": 1, "role": "cos", "version": "1", "made": 1, "files": files, **head}
    ).encode()
    with tarfile.open(path, "w") as tar:
        for name, text, of in (("MANIFEST.json", manifest, tarfile.REGTYPE), (named, content, kind)):
            member = tarfile.TarInfo(name)
            member.size, member.type, member.linkname = len(text), of, "/etc/passwd"
            tar.addfile(member, io.BytesIO(text))
    return path


def test_an_archive_made_by_hand_can_be_restored(tmp_path):
    restore("cos", tmp_path / "again", made(tmp_path / "good.tar", "tls/key.pem"))
    assert (tmp_path / "again" / "tls" / "key.pem").read_bytes() == b"content"


@pytest.mark.parametrize(
    "name", ["../outside", "/tmp/outside", "a/../../outside", "./inside", "a//b", "", "..", "a\\b"]
)
def test_no_file_is_written_outside_of_the_folder(tmp_path, name):
    with pytest.raises(StoreError, match=r"would lie outside|in two ways"):
        restore("cos", tmp_path / "again", made(tmp_path / "bad.tar", name))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["bad.tar"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"kind": tarfile.SYMTYPE}, "not what its manifest says"),
        ({"kind": tarfile.LNKTYPE}, "not what its manifest says"),
        ({"kind": tarfile.FIFOTYPE}, "not what its manifest says"),
        ({"listed": []}, "not what its manifest says"),
        ({"listed": ["key", "another"]}, "1 of its files are missing"),
        ({"listed": ["key", "key"]}, "names a file twice"),
        ({"format": 2}, "format 1 is expected"),
        ({"role": "client"}, "is the state of a client, not of a cos"),
        ({"made": "yesterday"}, "its manifest cannot be read"),
    ],
)
def test_what_is_in_the_archive_is_what_its_manifest_says(tmp_path, how, said):
    with pytest.raises(StoreError, match=said):
        restore("cos", tmp_path / "again", made(tmp_path / "bad.tar", "key", **how))
    assert not (tmp_path / "again").exists()


def test_a_store_that_does_not_open_is_not_restored(tmp_path):
    with pytest.raises(StoreError, match=r"its store cos\.db is not whole"):
        restore("cos", tmp_path / "again", made(tmp_path / "bad.tar", "cos.db"))


# --- by configuration ------------------------------------------------------------------------------------------------


def client(state):
    return ClientSettings(
        name="host",
        state=state,
        listen="127.0.0.1:1",
        cos=PEER,
        thirdparty=PEER,
        run="mine",
        operator_keys=KEYS,
    )


def test_a_host_has_to_stop_and_sits_out_its_run_when_it_comes_back(tmp_path):
    settings = client(tmp_path / "state")
    (settings.state / "holder").mkdir(parents=True)
    (settings.state / "identities.key").write_bytes(b"keys")
    open_sqlite(settings.state / "client.db", "client").dispose()
    archive = tmp_path / "host.tar"
    with (settings.state / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="a service runs on"):
            back_up_service("client", settings, archive)
        with pytest.raises(StoreError, match="a service runs on"):
            restore_service("client", settings, archive)
    back_up_service("client", settings, archive)
    for name, nothing_since, stays_out in (("again", False, True), ("moved", True, False)):
        later = client(tmp_path / name)
        restore_service("client", later, archive, nothing_since=nothing_since)
        assert restored.sits_out(later.state, "mine") is stays_out
        assert not restored.sits_out(later.state, "another")
        assert bool(restored.objections(later.state, "mine", "masked")) is stays_out
        assert restored.objections(later.state, "mine", "clear") == []
    # What was restored once stays so in a backup of its own.
    back_up_service("client", client(tmp_path / "again"), tmp_path / "second.tar")
    restore_service("client", client(tmp_path / "third"), tmp_path / "second.tar", nothing_since=True)
    assert restored.sits_out(tmp_path / "third", "mine")


def test_a_backup_of_another_run_or_party_is_refused_by_name(tmp_path):
    settings = client(tmp_path / "state")
    settings.state.mkdir()
    (settings.state / "identities.key").write_bytes(b"keys")
    archive = tmp_path / "host.tar"
    back_up_service("client", settings.model_copy(update={"run": "first"}), archive)
    later = client(tmp_path / "later")
    with pytest.raises(StoreError, match=r"another run: client/host took part in 'first' then, .* 'mine'"):
        restore_service("client", later, archive)
    with pytest.raises(StoreError, match="is a backup of client/host, not of client/someone"):
        restore_service("client", later.model_copy(update={"name": "someone", "run": "first"}), archive)
    assert not later.state.exists()
    restore_service("client", later, archive, other_run=True, nothing_since=False)
    assert restored.sits_out(later.state, "mine")
    # It has not run since in that run; what it did in this one is not in the archive.
    again = client(tmp_path / "again")
    restore_service("client", again, archive, other_run=True, nothing_since=True)
    assert restored.sits_out(again.state, "mine")


def test_what_was_lost_is_said_with_the_time_of_the_earliest_backup(tmp_path):
    assert restored.lost(tmp_path, "mine", 3) == ""
    restored.mark_restored(tmp_path, ["mine"], 1_700_000_000)
    restored.mark_restored(tmp_path, ["mine"], 1_800_000_000)
    said = restored.lost(tmp_path, "mine", 3)
    assert said.endswith("made at 2023-11-14 22:13:20 UTC: what it did after round 3 is lost")
    assert restored.lost(tmp_path, "mine", 0).endswith("all that it did in the run is lost")
    assert restored.objections(tmp_path, "mine", "masked", 3)[0].startswith(said)
    # As an earlier release wrote it.
    (tmp_path / restored.MARK).write_text('{"runs": ["mine"]}')
    assert restored.lost(tmp_path, "mine") == "the state was restored from a backup"


def test_the_commands_say_what_they_did_and_what_is_wrong(tmp_path, state, capsys):
    config = tmp_path / "cos.toml"
    text = 'name = "cos"\nstate = "{}"\nlisten = "127.0.0.1:1"\nthirdparty = {{address = "127.0.0.1:1", name = "a"}}\n'
    config.write_text(text.format(state))
    archive = tmp_path / "backup.tar"
    assert invoke(["backup", "cos", str(archive), "--config", str(config), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["role"] == "cos"
    assert invoke(["backup", "cos", str(archive), "--config", str(config)]) == 40
    assert "exists" in capsys.readouterr().err
    config.write_text(text.format(tmp_path / "again"))
    assert invoke(["restore", "cos", str(archive), "--config", str(config)]) == 0
    assert "4 files" in capsys.readouterr().out
    assert runs_in(tmp_path / "again" / "cos.db") == [("run", 2**40)]


def test_runs_in_a_database_are_in_the_backup_and_come_back_to_a_database_or_a_file(tmp_path):
    def settings(state, database=None):
        return CosSettings(name="cos", state=state, listen="127.0.0.1:1", thirdparty=PEER, database=database)

    with postgres.running() as server:
        keys = server.keys(server.database())
        reading, writing = open_postgres(DatabaseAddress(**keys), "cos")
        # The service runs, and holds the lock.
        with writing.connect() as held:
            held.execute(cos_store.runs.insert(), run_row())
            held.commit()
            (tmp_path / "state" / "models").mkdir(parents=True)
            (tmp_path / "state" / "models" / "one").write_bytes(b"model")
            archive = tmp_path / "backup.tar"
            manifest = back_up_service("cos", settings(tmp_path / "state", keys), archive)
            assert sorted(manifest.files) == ["cos.db", "models/one"]
            with pytest.raises(StoreError, match="another service uses"):
                restore_service("cos", settings(tmp_path / "again", keys), archive)
        for engine in (reading, writing):
            engine.dispose()
        with pytest.raises(StoreError, match="the database has rows in runs already"):
            restore_service("cos", settings(tmp_path / "again", keys), archive)
        assert not (tmp_path / "again").exists()

        other = server.keys(server.database())
        restore_service("cos", settings(tmp_path / "again", other), archive)
        kept = [path.name for path in (tmp_path / "again").rglob("*") if path.is_file()]
        assert sorted(kept) == ["current.jsonl", "one"], "the model, and the audit log, which has the restore"
        reading, writing = open_postgres(DatabaseAddress(**other), "cos")
        with reading.connect() as connection:
            found = connection.execute(sa.select(cos_store.runs)).mappings().one()
            assert {**found} == run_row()
        for engine in (reading, writing):
            engine.dispose()
    restore_service("cos", settings(tmp_path / "file"), archive)
    assert runs_in(tmp_path / "file" / "cos.db") == [("run", 2**40)]
