"""Versions of a model in a store of objects: rows name what is there, and only what nothing names is removed."""

import asyncio

import pytest

from coterie.errors import StoreError
from coterie.store import objects as objects_module
from coterie.store import version_objects as module
from coterie.store.cos import model_objects, model_versions, shared
from coterie.store.engine import open_sqlite
from coterie.store.objects import ObjectAddress
from coterie.store.version_objects import VersionObjects, needed_objects, own_folder
from coterie.store.versions import VersionRows, Versions

from ..object_stores import FAULTS, set_faults
from .test_version_rows import arrays, begin, held, same, write


@pytest.fixture
def engine(tmp_path):
    made = open_sqlite(tmp_path / "cos.db", "cos")
    shared.create_all(made)
    yield made
    made.dispose()


@pytest.fixture
def bucket(tmp_path):
    made = tmp_path / "bucket"
    made.mkdir()
    return made


def objects_at(bucket, engine):
    found = VersionObjects(ObjectAddress(f"file://{bucket}", timeout_s=20.0).open())
    with engine.begin() as connection:
        found.folder = own_folder(connection)
    return found


@pytest.fixture
def objects(bucket, engine):
    return objects_at(bucket, engine)


def reading(engine):
    def read(work):
        with engine.connect() as connection:
            return work(connection)

    return read


def rows_of(engine, objects, run="run"):
    return VersionRows(run, reading(engine), kept=True, objects=objects)


async def put(engine, rows, number, version, round_, run="run"):
    """Write a version as a COS does; return the names of objects that nothing names any more."""
    stored = await rows.objects.put(run, arrays(number), version, round_)
    with engine.begin() as connection:
        return rows.write_object(connection, stored, version, round_)


def files(bucket):
    return {str(path.relative_to(bucket)) for path in bucket.rglob("*") if path.is_file()}


def named(engine):
    with engine.connect() as connection:
        return module.named_objects(connection)


async def settled(objects):
    """Wait until nothing is being removed."""
    await asyncio.gather(*objects._removing)


async def test_a_version_is_in_the_store_and_not_in_the_database_and_is_read_back(engine, objects, tmp_path):
    rows = rows_of(engine, objects)
    for number in (1, 2):
        assert await put(engine, rows, number, number, 10 * number) == []
    with engine.connect() as connection:
        assert connection.execute(model_versions.select()).all() == []
    begin(engine, snapshot=20)
    # Another COS that takes office: it fetches what it needs first, and restores from that at once.
    taking = objects_at(objects.store._root, engine)
    versions = Versions(tmp_path / "models", rows_of(engine, taking))
    with pytest.raises(StoreError, match="is not fetched yet") as told:
        versions.load(20)
    assert told.value.trouble == "away"
    with engine.connect() as connection:
        needed = needed_objects(connection)
        assert needed_objects(connection, "run") == needed
        assert needed_objects(connection, "another") == []
    assert [(one.run_id, one.round, one.version) for one in needed] == [("run", 20, 2)]
    await taking.fetch(needed)
    assert same(versions.load(20), arrays(2))
    taking.drop()
    # An older one is read when it is asked for, and not while the event loop waits.
    assert not versions.at_hand(1)
    await versions.read_version(1)
    assert versions.at_hand(1)
    assert same(versions.load_version(1), arrays(1))
    await versions.read_version(7)
    assert versions.load_version(7) is None


async def test_the_same_versions_are_kept_as_in_files_and_the_others_are_removed(
    engine, objects, bucket, tmp_path
):
    rows, kept = rows_of(engine, objects), Versions(tmp_path / "models")
    for version in range(1, 57):
        await put(engine, rows, version, version, 2 * version)
        kept.save(arrays(version), version, 2 * version)
        with engine.begin() as connection:
            gone = rows.prune(connection, 2 * version, [7])
        objects.remove(gone)
        kept.prune(2 * version, [7])
    await settled(objects)
    assert held(engine, rows) == [(version, made) for _, version, made in kept.files()]
    assert files(bucket) == named(engine)
    assert len(files(bucket)) == 5


async def test_a_version_that_is_made_again_has_another_object_and_no_row_names_the_first(
    engine, objects, bucket
):
    rows = rows_of(engine, objects)
    await put(engine, rows, 1, 1, 5)
    (first,) = files(bucket)
    gone = await put(engine, rows, 2, 1, 5)
    assert gone == [first]
    # Another coordinator, which has been replaced and does not know it, writes the same round: to a third object.
    await objects_at(bucket, engine).put("run", arrays(3), 1, 5)
    assert len(files(bucket)) == 3
    await rows.read_version(1)
    assert same(rows.load_version(1), arrays(2))


async def test_a_version_in_rows_gives_way_to_an_object_and_the_other_way_round(engine, objects, tmp_path):
    rows = rows_of(engine, objects)
    write(engine, lambda connection: rows.write(connection, arrays(1), 1, 5))
    write(engine, lambda connection: rows.write(connection, arrays(2), 2, 6))
    assert await put(engine, rows, 3, 2, 6) == []
    assert held(engine, rows) == [(1, 5), (2, 6)]
    assert same(rows.load(5), arrays(1))
    await rows.read_version(2)
    assert same(rows.load_version(2), arrays(3))
    # A COS whose configuration names no store any more says so.
    without = Versions(tmp_path / "models", VersionRows("run", reading(engine), kept=True))
    with pytest.raises(StoreError, match=r"is in a store of objects, as .*, and this COS has no \[objects\]"):
        without.load(6)
    write(engine, lambda connection: rows.write(connection, arrays(4), 2, 6))
    assert same(without.load(6), arrays(4))
    with engine.connect() as connection:
        assert connection.execute(model_objects.select()).all() == []


async def test_a_lost_or_damaged_present_version_is_told_and_an_older_one_is_not_served(
    engine, objects, bucket, tmp_path
):
    rows = rows_of(engine, objects)
    for number in (1, 2):
        await put(engine, rows, number, number, number)
    begin(engine, snapshot=2)
    for path in bucket.rglob("version-*"):
        if "version-0000000002" in path.name:
            path.write_bytes(path.read_bytes()[:-1] + b"\0")
        else:
            path.unlink()
    with engine.connect() as connection:
        needed = needed_objects(connection)
    with pytest.raises(
        StoreError, match=r"the model of run run cannot be read: the object file://.* is damaged"
    ) as told:
        await objects.fetch(needed)
    assert (told.value.trouble, "put it back" in told.value.hint) == ("", True)
    versions = Versions(tmp_path / "models", rows)
    await versions.read_version(1)
    assert versions.load_version(1) is None


async def test_only_old_objects_that_nothing_names_are_removed_and_none_of_another_database(
    engine, objects, bucket, tmp_path, monkeypatch
):
    rows = rows_of(engine, objects)
    await put(engine, rows, 1, 1, 1)
    (kept,) = files(bucket)
    await objects.put("run", arrays(2), 2, 2)
    other = open_sqlite(tmp_path / "other.db", "cos")
    shared.create_all(other)
    await objects_at(bucket, other).put("run", arrays(3), 3, 3)
    other.dispose()
    (bucket / objects.folder / "run" / "of somebody else").write_bytes(b"")
    assert len(files(bucket)) == 4

    async def read(work):
        return reading(engine)(work)

    objects.clean(read)
    await settled(objects)
    # All are young.
    assert len(files(bucket)) == 4
    now = objects_module.time.time()
    monkeypatch.setattr(objects_module.time, "time", lambda: now + 2 * module.ORPHANS_AFTER_S)
    objects.clean(read)
    await settled(objects)
    # A clock that was set, and not time, made them old: this process has just written one that no row names yet.
    assert len(files(bucket)) == 4
    objects = objects_at(bucket, engine)
    objects.clean(read)
    await settled(objects)
    assert kept in files(bucket)
    assert len(files(bucket)) == 3
    assert not [name for name in files(bucket) if f"{objects.folder}/run/version-0000000002" in name]


async def test_a_cos_that_was_never_in_office_writes_no_object(bucket):
    objects = VersionObjects(ObjectAddress(f"file://{bucket}").open())
    with pytest.raises(StoreError, match="not in office") as told:
        await objects.put("run", arrays(1), 1, 1)
    assert told.value.trouble == "away"
    assert not files(bucket)


async def test_an_object_that_is_not_given_back_is_removed_as_the_next_try_has_another_name(engine, bucket):
    objects = VersionObjects(ObjectAddress(f"faulty://{bucket}", timeout_s=20.0).open())
    objects.folder = "base"
    set_faults(bucket, calls=["read"], away=True)
    for _ in range(3):
        with pytest.raises(StoreError, match="cannot read"):
            await objects.put("run", arrays(1), 1, 1)
    await settled(objects)
    assert files(bucket) == {FAULTS}


async def test_parties_that_ask_for_one_old_version_at_once_have_it_read_once(engine, objects, monkeypatch):
    rows = rows_of(engine, objects)
    await put(engine, rows, 1, 1, 1)
    asked = []
    get = objects.store.get

    async def counted(stored):
        asked.append(stored)
        return await get(stored)

    monkeypatch.setattr(objects.store, "get", counted)
    await asyncio.gather(*(rows.read_version(1) for _ in range(10)))
    assert len(asked) == 1
    assert same(rows.load_version(1), arrays(1))
