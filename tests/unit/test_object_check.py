"""``coterie check --config`` verifies what a COS has in a store of objects; preflight tries the store out."""

import asyncio
import json

import pytest

from coterie.cli.main import invoke
from coterie.config.services import CosSettings, ObjectSettings
from coterie.errors import ConfigError
from coterie.launch.object_check import check_objects
from coterie.launch.preflight_service import _objects
from coterie.store import objects as objects_module
from coterie.store.cos import shared
from coterie.store.postgres import DatabaseAddress, open_postgres
from coterie.store.version_objects import ORPHANS_AFTER_S

from .. import postgres
from ..object_stores import set_faults
from .test_version_objects import objects_at, put, rows_of
from .test_version_rows import arrays, begin


@pytest.fixture(scope="module")
def server():
    with postgres.running() as one:
        yield one


@pytest.fixture
def settings(server, tmp_path):
    return CosSettings(
        name="cos",
        state=tmp_path / "state",
        listen="127.0.0.1:1",
        thirdparty={"address": "127.0.0.1:1", "name": "peer"},
        standby=True,
        database=server.keys(server.database()),
        objects={"url": f"file://{tmp_path}/bucket"},
    )


@pytest.fixture
def kept(settings, tmp_path):
    """Make two versions of a run, and an object that nothing names."""
    engines = open_postgres(DatabaseAddress(**settings.database.model_dump()), "cos")
    shared.create_all(engines[-1])
    (tmp_path / "bucket").mkdir()
    objects = objects_at(tmp_path / "bucket", engines[-1])

    async def make():
        rows = rows_of(engines[-1], objects)
        for number in (1, 2):
            await put(engines[-1], rows, number, number, number)
        await objects.put("run", arrays(3), 3, 3)

    asyncio.run(make())
    begin(engines[-1], snapshot=2)
    for engine in engines:
        engine.dispose()
    return tmp_path / "bucket"


def of_version(bucket, number):
    (path,) = bucket.rglob(f"version-{number:010d}-*")
    return path


def statuses(findings):
    return [one.status for one in findings]


def test_whole_objects_pass_and_those_that_nothing_names_are_told_once_they_are_old(
    settings, kept, monkeypatch
):
    (one,) = check_objects(settings)
    assert (one.check, one.status, one.note) == (
        "objects",
        "ok",
        "2 versions of models, each as its row says",
    )
    now = objects_module.time.time()
    monkeypatch.setattr(objects_module.time, "time", lambda: now + 2 * ORPHANS_AFTER_S)
    left, _ = check_objects(settings)
    assert (left.status, left.problem.startswith("1 objects of more than 24 hours")) == ("warn", True)
    assert of_version(kept, 3).exists()
    left, _ = check_objects(settings, repair=True)
    assert left.problem.endswith("they were removed")
    assert statuses(check_objects(settings)) == ["ok"]
    assert len(list(kept.rglob("version-*"))) == 2


def test_a_lost_present_version_fails_and_a_damaged_older_one_is_a_warning(settings, kept):
    of_version(kept, 1).write_bytes(b"damaged")
    older, _ = check_objects(settings)
    assert (older.status, "version 1 of the model of run run" in older.problem) == ("warn", True)
    assert f"{of_version(kept, 1)} is damaged" in older.problem
    of_version(kept, 2).unlink()
    _, present, passed = check_objects(settings)
    assert (present.status, "is lost" in present.problem, "put it back" in present.fix) == (
        "fail",
        True,
        True,
    )
    assert passed.note.startswith("0 versions")


def test_the_command_takes_the_configuration_of_a_cos(settings, kept, capsys):
    settings.state.mkdir()
    (settings.state / "ca-key.pem").write_bytes(b"none")
    config = settings.state.parent / "config.toml"
    database = "".join(f"{key} = {json.dumps(value)}\n" for key, value in postgres_keys(settings).items())
    config.write_text(
        'name = "cos"\nstate = "state"\nlisten = "127.0.0.1:1"\nstandby = true\n'
        f'[thirdparty]\naddress = "127.0.0.1:1"\nname = "peer"\n[database]\n{database}'
        f'[objects]\nurl = "file://{kept}"\n'
    )
    assert invoke(["check", str(settings.state), "--config", str(config), "--json"]) == 40
    findings = json.loads(capsys.readouterr().out)["result"]["findings"]
    assert [one["status"] for one in findings if one["check"] == "objects"] == ["ok"]
    of_version(kept, 2).unlink()
    assert invoke(["check", str(settings.state), "--config", str(config), "--json"]) == 40
    said = json.loads(capsys.readouterr().out)
    assert "objects" in said["error"]["message"]


def postgres_keys(settings):
    held = settings.database.model_dump(mode="json", exclude_none=True)
    return {key: value for key, value in held.items() if key != "timeout_s"}


def test_a_configuration_without_a_store_of_objects_has_nothing_to_check(settings):
    with pytest.raises(ConfigError, match="names no store of objects"):
        check_objects(settings.model_copy(update={"objects": None}))


async def test_preflight_writes_reads_lists_and_removes_an_object(tmp_path):
    (tmp_path / "bucket").mkdir()
    found = await _objects(ObjectSettings(url=f"file://{tmp_path}/bucket"))
    assert (found.status, "gives it back" in found.note) == ("ok", True)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


async def test_preflight_tells_what_the_store_does_not_do(tmp_path):
    bucket = tmp_path / "bucket"
    (bucket / "models").mkdir(parents=True)
    for fault, said in (
        ({"full": True}, "No space left"),
        ({"away": True, "calls": ["read"]}, "cannot read"),
    ):
        set_faults(bucket, **fault)
        found = await _objects(ObjectSettings(url=f"faulty://{bucket}/models"))
        assert (found.status, said in found.problem, bool(found.fix)) == ("fail", True, True)
    found = await _objects(ObjectSettings(url="unheard://bucket"))
    assert (found.status, "fsspec does not know" in found.problem) == ("fail", True)


def test_a_store_of_objects_needs_a_standby(settings):
    values = settings.model_dump(exclude={"standby"})
    with pytest.raises(
        ValueError, match=r"\[objects\] is for versions of the model that a standby has to find"
    ):
        CosSettings(**values)
