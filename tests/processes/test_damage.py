"""Bits that flip in the files of each role: `coterie check` names the file, and a service notices where it matters."""

import asyncio
import contextlib
import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from coterie.cli.main import invoke
from coterie.errors import StoreError
from coterie.launch.state_check import check_state
from coterie.store.engine import open_sqlite
from tests.stores import add_beside_index

HOST, COS, THIRD_PARTY = "client/host-0", "cos/cos", "thirdparty/directory"
OWNER, HOLDER = "data-owner/catalogue", "decrypting-client/key-0"
STORES = {COS: "cos.db", HOST: "client.db", OWNER: "data_owner.db", THIRD_PARTY: "directory.db"}

pytestmark = pytest.mark.xdist_group("damage")


@pytest.fixture(scope="module")
def states(small, federation, tmp_path_factory):
    """Return copies of the state folders of a federation that trained and was stopped, by party."""
    settings = small(
        system="fedncf",
        secure_sum="encrypted",
        split={"kind": "leave-last-out"},
        data={"synthetic": {"users": 24, "items": 60, "interactions": 700}},
        rounds={"cohort": 24, "group": 24, "passes": 4, "evaluate_every": 1},
        encryption={"bits": 1024, "comparison": True},
        federation={"hosts": 3},
    )
    kept = tmp_path_factory.mktemp("states")

    async def to_the_end():
        async with federation(settings) as running:
            await running.start()
            assert (await running.finish())["phase"] == "done"
            await running.stop()
            for party, child in running.children.items():
                shutil.copytree(child.state, kept / party)

    asyncio.run(to_the_end())
    return kept


def flip(path, share):
    """Flip a bit of a file at a share of its length."""
    content = bytearray(path.read_bytes())
    content[min(int(share * len(content)), len(content) - 1)] ^= 0x10
    told = path.stat()
    path.write_bytes(bytes(content))
    # A medium that fails writes no time.
    os.utime(path, ns=(told.st_atime_ns, told.st_mtime_ns))


def faults(state, **how):
    return [finding for finding in check_state(state, **how) if finding.status == "fail"]


@pytest.fixture
def state_of(states, tmp_path):
    """Return a function that gives a copy of a party's state folder."""

    def copied(party):
        return Path(shutil.copytree(states / party, tmp_path / "state"))

    return copied


@pytest.mark.parametrize("party", [COS, HOST, OWNER, THIRD_PARTY, HOLDER])
def test_what_a_service_left_is_whole(state_of, party):
    state = state_of(party)
    found = check_state(state)
    assert {finding.status for finding in found} == {"ok"}, found
    if party in STORES:
        assert {one.check: one.note for one in found}[f"store {STORES[party]}"] == "as its service left it"


@pytest.mark.parametrize("share", [0.0, 0.31, 0.5, 0.77, 0.93])
@pytest.mark.parametrize(
    ("party", "pattern"),
    [
        *STORES.items(),
        (COS, "models/*/version-*.safetensors"),
        (HOST, "private/*.npy"),
        (HOST, "identities.key"),
        (HOST, "bundles.pb"),
        (HOST, "directory.key"),
        (HOST, "log/head.json"),
        (HOLDER, "keys/*.key"),
        (HOLDER, "journal.json"),
        (THIRD_PARTY, "ca-key.pem"),
        *((party, "tls/chain.pem") for party in (COS, HOST, OWNER, THIRD_PARTY, HOLDER)),
    ],
)
def test_a_bit_that_flips_is_noticed_and_the_file_named(state_of, party, pattern, share):
    state = state_of(party)
    files = [path for path in sorted(state.glob(pattern)) if path.is_file() and path.stat().st_size]
    assert files, sorted(state.rglob("*"))
    flip(files[-1], share)
    problems = [finding for finding in check_state(state) if finding.status == "fail"]
    assert problems, check_state(state)
    # Of arrays the folder is named, and of a certificate or key the pair.
    assert any(
        one in finding.problem for finding in problems for one in (files[-1].name, str(files[-1].parent))
    )
    assert all(finding.fix for finding in problems)


@pytest.mark.parametrize("party", STORES)
def test_a_store_that_changed_while_its_service_was_stopped_is_not_opened(state_of, party):
    path = state_of(party) / STORES[party]
    flip(path, 0.6)
    with pytest.raises(StoreError, match="is not as the service left it when it stopped") as refused:
        open_sqlite(path, path.stem.replace("directory", "thirdparty"))
    assert str(path) in refused.value.message
    assert "coterie restore" in refused.value.hint
    # Refused again, not only once; and taken when it is put back.
    with pytest.raises(StoreError):
        open_sqlite(path, path.stem.replace("directory", "thirdparty"))
    flip(path, 0.6)
    open_sqlite(path, path.stem.replace("directory", "thirdparty")).dispose()


def test_a_store_that_the_operator_changed_is_accepted_when_told_so(state_of):
    state = state_of(HOST)
    with contextlib.closing(sqlite3.connect(state / "client.db")) as held, held:
        held.execute("UPDATE history SET item = item")
        held.execute("DELETE FROM sent")
    (told,) = [one for one in check_state(state) if one.check == "store client.db"]
    assert told.status == "warn"
    assert "written since its service stopped" in told.problem
    assert {finding.status for finding in check_state(state, accept=True)} == {"ok"}
    assert {finding.status for finding in check_state(state)} == {"ok"}


def test_a_changed_byte_is_accepted_when_told_so_and_only_if_the_pages_fit_together(state_of):
    state = state_of(HOST)
    path = state / "client.db"
    with contextlib.closing(sqlite3.connect(path)) as held, held:
        held.execute("CREATE TABLE noted (text TEXT UNIQUE)")
        held.execute("INSERT INTO noted VALUES ('a-text-that-is-found')")
    assert faults(state, accept=True) == []
    whole = path.read_bytes()
    at = whole.index(b"a-text-that-is-found")
    # In the table or its index, which then differ: the seal stays, or the service would open the store.
    flip(path, (at + 2) / len(whole))
    assert [one.check for one in faults(state, accept=True)] == ["store client.db"]
    with pytest.raises(StoreError, match="is not as the service left it when it stopped"):
        open_sqlite(path, "client")
    path.write_bytes(whole.replace(b"a-text-that-is-found", b"a-text-that-is-fount"))
    assert faults(state, accept=True) == []
    open_sqlite(path, "client").dispose()


def test_after_a_crash_pages_that_do_not_fit_together_are_noticed_at_the_start(state_of):
    path = state_of(HOST) / "client.db"
    path.with_name("client.db-sum").unlink()
    content = bytearray(path.read_bytes())
    content[4096:8192] = bytes(4096)
    path.write_bytes(bytes(content))
    with pytest.raises(StoreError, match=r"client\.db is damaged"):
        open_sqlite(path, "client")


def test_indices_that_do_not_fit_their_table_are_made_again(state_of):
    state = state_of(HOST)
    path = state / "client.db"
    with contextlib.closing(sqlite3.connect(path)) as held:
        held.execute("CREATE INDEX by_bytes ON sent (bytes)")
        held.commit()
    add_beside_index(
        path,
        "by_bytes",
        "INSERT INTO sent SELECT user, recipient, 'more', 1, 2, 3, 4 FROM sent LIMIT 1",
    )
    with contextlib.closing(sqlite3.connect(path)) as held:
        rows = held.execute("SELECT count(*) FROM sent NOT INDEXED").fetchone()
    path.with_name("client.db-sum").unlink()
    assert "coterie check --repair" in faults(state)[0].fix
    assert [one.status for one in check_state(state, repair=True) if one.check == "store client.db"] == [
        "warn"
    ]
    assert faults(state) == []
    with contextlib.closing(sqlite3.connect(path)) as held:
        assert held.execute("SELECT count(*) FROM sent NOT INDEXED").fetchone() == rows


def test_a_store_whose_index_may_have_the_last_true_copy_is_not_repaired(state_of):
    state = state_of(THIRD_PARTY)
    path = state / "directory.db"
    with contextlib.closing(sqlite3.connect(path)) as held, held:
        held.execute("CREATE TABLE noted (text TEXT UNIQUE, why TEXT)")
        held.execute("INSERT INTO noted VALUES ('a-text-that-is-found', 'because')")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"a-text-that-is-foundbecause", b"a-text-that-is-fountbecause"))
    path.with_name("directory.db-sum").unlink()
    before = path.read_bytes()
    (problem,) = faults(state, repair=True)
    assert "its indices have what its tables lack" in problem.problem
    assert "coterie restore" in problem.fix
    assert path.read_bytes() == before
    assert not path.with_name("directory.db-sum").exists()


def test_a_damaged_older_version_of_a_model_is_removed_and_the_newest_is_not(state_of):
    state = state_of(COS)
    *older, newest = sorted(state.glob("models/*/version-*.safetensors"))
    flip(older[-1], 0.9)
    flip(newest, 0.9)
    problems = faults(state, repair=True)
    assert [newest.name in finding.problem for finding in problems] == [True]
    assert not older[-1].exists()
    assert newest.exists()


@pytest.mark.parametrize("party", [COS, HOST])
async def test_a_service_ends_by_name_over_a_damaged_store_and_starts_when_it_is_put_back(
    small, federation, party
):
    settings = small(
        system="fedncf",
        secure_sum="clear",
        split={"kind": "leave-last-out"},
        data={"synthetic": {"users": 24, "items": 60, "interactions": 700}},
        rounds={"cohort": 24, "group": 24, "passes": 5_000, "evaluate_every": 5_000},
        federation={"hosts": 2, "party_timeout_s": 5.0},
    )
    async with federation(settings) as running:
        await running.start()
        await running.a_round("a round of everybody", reason="", summed=24)
        child = running.children[party]
        await child.stop()
        path = child.state / STORES[party]
        flip(path, 0.5)
        child.start()
        await running.comes_true(lambda: not child.alive, "the service ends")
        assert child.process.returncode == StoreError.exit_code
        assert f"the store {path} is damaged" in child.last_words()
        flip(path, 0.5)
        child.start()
        await running.a_round("a round of everybody again", reason="", summed=24)
        await running.stop()


def test_the_command_says_what_to_restore_and_ends_with_the_status_of_stores(state_of, capsys):
    state = state_of(HOST)
    assert invoke(["check", str(state), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    flip(state / "client.db", 0.5)
    assert invoke(["check", str(state), "--json"]) == StoreError.exit_code
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    (damaged,) = [finding for finding in told["result"]["findings"] if finding["status"] == "fail"]
    assert str(state / "client.db") in damaged["problem"]
    assert "coterie restore" in damaged["fix"]
    assert invoke(["check", str(state / "nowhere")]) == 11
