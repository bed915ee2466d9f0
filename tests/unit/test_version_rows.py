"""Versions of a model in rows of the database, as in files."""

from functools import partial

import numpy as np
import pytest

from coterie.errors import StoreError
from coterie.store import versions as module
from coterie.store.cos import runs, shared
from coterie.store.engine import open_sqlite
from coterie.store.postgres import DatabaseAddress, open_postgres
from coterie.store.versions import VersionRows, Versions

from .. import postgres


@pytest.fixture(scope="module")
def server():
    with postgres.running() as one:
        yield one


@pytest.fixture(params=["file", "postgres"])
def engine(request, tmp_path):
    if request.param == "file":
        made = [open_sqlite(tmp_path / "cos.db", "cos")]
    else:
        server = request.getfixturevalue("server")
        made = [*open_postgres(DatabaseAddress(**server.keys(server.database())), "cos")]
    shared.create_all(made[-1])
    yield made[-1]
    for one in made:
        one.dispose()


def arrays(number):
    return {"items": np.arange(number, number + 12, dtype=np.float32).reshape(4, 3), "bias": np.ones(2)}


def rows_of(engine, run="run", *, kept=True):
    def read(work):
        with engine.connect() as connection:
            return work(connection)

    return VersionRows(run, read, kept=kept)


def write(engine, work):
    with engine.begin() as connection:
        work(connection)


def begin(engine, run="run", *, snapshot):
    """Put a run into the store, whose present version was made by the round ``snapshot``."""
    row = {"run_id": run, "request": b"", "plan_hash": b"", "state": "{}", "snapshot": snapshot}
    write(engine, lambda connection: connection.execute(runs.insert(), row))


def held(engine, rows):
    with engine.connect() as connection:
        return rows._held(connection)


def same(found, expected):
    return found.keys() == expected.keys() and all(
        np.array_equal(found[name], array) and found[name].dtype == array.dtype
        for name, array in expected.items()
    )


def test_a_version_is_cut_into_parts_and_comes_back_whole(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PART", 100)
    rows = rows_of(engine)
    write(engine, partial(rows.write, arrays=arrays(0), version=1, round_=5))
    # Made again after a start, before a snapshot named it.
    write(engine, partial(rows.write, arrays=arrays(7), version=1, round_=5))
    write(engine, partial(rows_of(engine, "other").write, arrays=arrays(1), version=1, round_=5))
    versions = Versions(tmp_path / "models", rows)
    assert same(versions.load(5), arrays(7))
    assert same(versions.load_version(1), arrays(7))
    assert versions.load_version(2) is None
    with pytest.raises(StoreError, match="names the version of the model that round "):
        versions.load(6)
    assert not versions.files()


def test_the_same_versions_are_kept_as_in_files(engine, tmp_path):
    rows, files = rows_of(engine), Versions(tmp_path)
    for version in range(1, 104):
        write(engine, partial(rows.write, arrays=arrays(version), version=version, round_=2 * version))
        files.save(arrays(version), version, 2 * version)
        write(engine, partial(rows.prune, present=2 * version, keep=[7]))
        files.prune(2 * version, [7])
    with engine.connect() as connection:
        assert rows._held(connection) == [(version, made) for _, version, made in files.files()]
    assert same(rows.load_version(7), arrays(7))
    assert same(rows.load_version(50), arrays(50))


def test_a_damaged_row_is_named_and_not_served(engine, tmp_path):
    rows = rows_of(engine)
    write(engine, partial(rows.write, arrays=arrays(0), version=3, round_=4))
    cut = module.table.update().values(content=b"damaged")
    write(engine, lambda connection: connection.execute(cut))
    versions = Versions(tmp_path, rows)
    with pytest.raises(StoreError, match="version of the model that round 4 of run made is damaged"):
        versions.load(4)
    assert versions.load_version(3) is None


def test_versions_of_a_cos_without_a_standby_are_found_once_it_has_one_and_the_other_way_round(
    engine, tmp_path
):
    before = Versions(tmp_path, rows_of(engine, kept=False))
    before.save(arrays(1), 1, 1)
    before.save(arrays(2), 2, 2)
    rows = rows_of(engine)
    begin(engine, snapshot=2)
    for _ in range(2):
        write(engine, partial(rows.take_files, files=before.files()))
    standby = Versions(tmp_path / "of another", rows)
    assert same(standby.load(2), arrays(2))
    assert same(standby.load_version(1), arrays(1))
    # Rows alone have the third version; a file made later of the same round is newer than a row.
    write(engine, partial(rows.write, arrays=arrays(3), version=3, round_=3))
    assert same(before.load(3), arrays(3))
    assert same(before.load_version(3), arrays(3))
    before.save(arrays(4), 3, 3)
    assert same(before.load(3), arrays(4))
    assert same(before.load_version(3), arrays(4))


def test_a_torn_file_of_a_spare_version_keeps_no_cos_from_taking_the_others_over(engine, tmp_path):
    before = Versions(tmp_path)
    for number in (1, 2, 3):
        before.save(arrays(number), number, number)
    torn = before.files()[0][0]
    torn.write_bytes(torn.read_bytes()[:40])
    begin(engine, snapshot=3)
    rows = rows_of(engine)
    write(engine, partial(rows.take_files, files=before.files()))
    assert held(engine, rows) == [(2, 2), (3, 3)]


def test_only_files_that_the_store_names_and_has_not_yet_are_taken_over(engine, tmp_path):
    before = Versions(tmp_path)
    for number in (1, 2, 3):
        before.save(arrays(number), number, number)
    # A run that is in no store, or in another one, and a run of the same id that has no version yet.
    rows = rows_of(engine)
    write(engine, partial(rows.take_files, files=before.files()))
    assert not held(engine, rows)
    begin(engine, "fresh", snapshot=0)
    fresh = rows_of(engine, "fresh")
    write(engine, partial(fresh.take_files, files=before.files()))
    assert not held(engine, fresh)
    # A crash left the third one, which no snapshot names.
    begin(engine, snapshot=2)
    write(engine, partial(rows.take_files, files=before.files()))
    assert held(engine, rows) == [(1, 1), (2, 2)]
    # What was deleted does not come back.
    write(
        engine, lambda connection: connection.execute(module.table.delete().where(module.table.c.round == 1))
    )
    write(engine, partial(rows.take_files, files=before.files()))
    assert held(engine, rows) == [(2, 2)]


def test_a_version_is_read_once_and_a_database_that_is_away_is_no_missing_version(engine, tmp_path):
    reads, away = [], []

    def read(work):
        reads.append(work)
        if away:
            raise StoreError("the store cannot be written now", trouble="away")
        with engine.connect() as connection:
            return work(connection)

    rows = VersionRows("run", read, kept=True)
    versions = Versions(tmp_path, rows)
    for number in (1, 2):
        write(engine, partial(rows.write, arrays=arrays(number), version=number, round_=number))
    assert same(versions.load_version(1), arrays(1))
    once = len(reads)
    away.append(True)
    assert same(versions.load_version(1), arrays(1))
    assert len(reads) == once
    with pytest.raises(StoreError) as failed:
        versions.load_version(2)
    assert failed.value.trouble == "away"
    away.clear()
    # Made again by a later round.
    write(engine, partial(rows.write, arrays=arrays(7), version=1, round_=3))
    assert same(versions.load_version(1), arrays(7))
