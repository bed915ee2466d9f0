"""Services of two releases in one federation: they train together, are upgraded one by one, or refuse by name."""

import contextlib
import os
import re
import sqlite3
import subprocess
import sys

import pytest
import sqlalchemy as sa

from coterie.store.backup import back_up_before
from coterie.store.engine import migrate
from coterie.wire.versions import NEWEST, UnsupportedVersionError
from tests.operators import KEYS

from .patience import ANOTHER_FORM, WAIT_S
from .release_before import build, set_back, upgrade
from .running import KEEP_UPDATES

MOST_LOST = 1
"""Rounds that may be lost for each role that is replaced."""


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """Return the folder with the packages of the release before."""
    return build(tmp_path_factory.mktemp("release-before"))


def tables_of_the_release_before(path):
    """Make the store of a COS anew, as the release before makes it, with what the tests watch in it."""
    path.unlink()
    path.touch(mode=0o600)
    engine = sa.create_engine(f"sqlite:///{path}")
    migrate(engine, "cos", to="cos_0006")
    engine.dispose()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for statement in KEEP_UPDATES:
            connection.execute(statement)
        connection.commit()


@pytest.fixture
def mixed(federation, before):
    """Return a function that makes a federation in which some parties, or roles, are of the release before."""

    def make(settings, old, **options):
        running = federation(settings, **options)
        configure = running._configure

        def configured():
            laid = configure()
            for party, child in running.children.items():
                if old is ... or party in old or child.role in old:
                    set_back(child, before)
                    if child.role == "cos":
                        tables_of_the_release_before(child.state / "cos.db")
            return laid

        running._configure = configured
        return running

    return make


def settings_of(small, secure_sum="masked", passes=3, **changes):
    users = 40
    return small(
        system="fedncf",
        secure_sum=secure_sum,
        split={"kind": "leave-last-out"},
        data={"synthetic": {"users": users, "items": 60, "interactions": 800}},
        rounds={
            "cohort": users,
            "group": users,
            "passes": passes,
            "evaluate_every": passes,
            "party_per_user": secure_sum == "masked",
        },
        federation={"hosts": 2, "party_timeout_s": 3.0, "most_abandoned": 50, **changes},
    )


def build_info(running, party):
    """Return the protocol on a process's metrics page; an empty text where it is of the release before."""
    found = re.search(r'coterie_build_info\{[^}]*\bprotocol="(\d+)"', running.page(party))
    return found[1] if found else ""


@pytest.mark.parametrize(
    "old",
    [
        ["client/host-0", "thirdparty"],
        ["cos", "client/host-1"],
        *(pytest.param([role], marks=ANOTHER_FORM) for role in ("cos", "thirdparty", "client")),
    ],
    ids=lambda old: " and ".join(old),
)
async def test_services_of_two_releases_train_together(small, mixed, old):
    async with mixed(settings_of(small), old) as running:
        await running.start()
        await running.a_round("a round over everybody", summed=40, dropped=0, reason="")
        said = {party: build_info(running, party) for party in running.children}
        report = await running.finish()
    assert report["phase"] == "done", report["reason"]
    assert {party for party, protocol in said.items() if not protocol} == {
        party for party, child in running.children.items() if party in old or child.role in old
    }
    assert all(one["reason"] == "" for one in report["rounds"])
    assert running.ended_well()


@pytest.mark.parametrize(
    "old", [["data-owner", "client/host-0"], pytest.param(["cos"], marks=ANOTHER_FORM)], ids=" and ".join
)
async def test_owners_and_hosts_of_two_releases_train_drift_together(small, mixed, old):
    async with mixed(small(), old) as running:
        await running.start()
        report = await running.finish()
    assert report["phase"] == "done", report["reason"]
    assert running.ended_well()


@pytest.mark.parametrize("old", ["decrypting-client/key-0", "client/host-0"])
async def test_encrypted_sums_are_formed_with_nobody_of_the_release_before_which_is_refused_by_name(
    small, mixed, old
):
    settings = settings_of(small, "encrypted", passes=1)
    async with mixed(settings, [old]) as running:
        await running.start()
        child = running.children[old]
        await running.comes_true(lambda: not child.alive, f"{old} ends")
        assert child.process.returncode != 0
        upgrade(child)
        child.start()
        report = await running.finish()
    assert report["phase"] == "done", report["reason"]
    assert f"{old} speaks version 1 of the protocol, and version 2 is asked for" in child.log.read_text()


async def replaced(running, party):
    """Stop a process in order, and start it again; return once the run goes on with everybody."""
    child = running.children[party]
    await child.stop()
    child.start()
    await running.becomes("SERVING", party)


@pytest.mark.long
async def test_every_role_is_upgraded_in_the_middle_of_a_run_and_some_go_back(small, mixed, before):
    settings = settings_of(small, passes=5000)
    async with mixed(settings, ...) as running:
        await running.start()
        await running.a_round("a round of the release before", summed=40, dropped=0, reason="")
        lost = {}

        async def each(how, *parties):
            for party in parties:
                seen = max(event.number for event in running.events)
                how(running.children[party])
                await replaced(running, party)
                await running.a_round(f"a round after {party}", summed=40, dropped=0, reason="")
                rounds = [
                    event.round for event in running.events if event.number > seen and event.HasField("round")
                ]
                lost[how.__name__, party] = [one.reason for one in rounds if one.reason]

        def go_back(child):
            set_back(child, before)

        hosts = running.parties("client")
        await each(upgrade, "thirdparty/directory", "cos/cos", *running.parties("data-owner"), *hosts)
        assert {build_info(running, party) for party in running.children} == {str(NEWEST)}
        # The tables of the others are of this release now: they go back with the backup that was made before.
        owner = running.parties("data-owner")[0]
        await each(go_back, owner)
        assert build_info(running, owner) == ""
        await running.stop_run("it was long enough")
        report = await running.finish()
    print({key: len(reasons) for key, reasons in lost.items()}, len(report["rounds"]), "rounds")
    assert {key: reasons for key, reasons in lost.items() if len(reasons) > MOST_LOST} == {}
    assert running.ended_well()


@pytest.mark.long
async def test_owners_and_hosts_of_drift_are_upgraded_in_the_middle_of_an_epoch(small, mixed):
    settings = small(drift={"epochs": 5000}, federation={"party_timeout_s": 3.0})
    async with mixed(settings, ...) as running:
        await running.start()
        await running.phase("epoch", 2)
        parties = ["cos/cos", *running.parties("data-owner"), *running.parties("client")]
        for party in ["thirdparty/directory", *parties]:
            before = (await running.run_state()).version
            upgrade(running.children[party])
            await replaced(running, party)
            await running.epochs(1)
            # No update that was applied is lost.
            assert (await running.run_state()).version > before
        assert {build_info(running, party) for party in running.children} == {str(NEWEST)}
        await running.stop_run("it was long enough")
        await running.finish()
    assert running.ended_well()


async def test_hosts_of_the_release_before_are_refused_by_name_where_the_plan_asks_for_more(small, mixed):
    old = "client/host-0"
    async with mixed(settings_of(small, oldest_protocol=NEWEST), [old]) as running:
        await running.start()
        child = running.children[old]
        await running.comes_true(lambda: not child.alive, f"{old} ends")
        assert child.process.returncode != 0
        # The host that was upgraded takes part.
        upgrade(child)
        child.start()
        report = await running.finish()
    assert report["phase"] == "done", report["reason"]
    said = f"{old} speaks version 1 of the protocol, and version {NEWEST} is asked for"
    assert f"error: {said}" in child.log.read_text()
    (line,) = [line for line in running.log("cos/cos") if line["event"] == "a party cannot join"]
    assert said in line["error"]
    assert "an upgrade of client/host-0" in line["error"]


async def test_an_operator_starts_no_run_at_a_server_of_the_release_before_that_knows_less_of_the_plan(
    small, mixed
):
    async with mixed(settings_of(small, oldest_protocol=NEWEST), ["cos"]) as running:
        with pytest.raises(UnsupportedVersionError) as raised:
            await running.start()
        assert "cos/cos computes another hash of the plan" in str(raised.value)
        assert "an upgrade of the cos" in str(raised.value)
        assert (
            await running.run_state()
        ).reason == "the operator and the cos are of releases that do not fit"


def test_the_release_before_restores_the_backup_that_this_one_makes_before_a_migration(before, tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    engine = sa.create_engine(f"sqlite:///{state / 'client.db'}")
    migrate(engine, "client", to="client_0006")
    engine.dispose()
    archive = back_up_before("client", state, "client_0008", "1.0.0")
    config = tmp_path / "config.toml"
    peer = '{address = "127.0.0.1:1", name = "peer"}'
    config.write_text(
        f'name = "host-0"\nstate = "{tmp_path / "back"}"\nlisten = "127.0.0.1:1"\nrun = "run"\n'
        f"operator_keys = {list(KEYS)!r}\ncos = {peer}\nthirdparty = {peer}\n".replace("'", '"')
    )
    done = subprocess.run(
        [sys.executable, "-P", "-m", "coterie", "restore", "client", str(archive), "--config", str(config)],
        env={**os.environ, "PYTHONPATH": str(before)},
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "back" / "client.db").exists()
    assert (tmp_path / "back" / "restored.json").exists()
