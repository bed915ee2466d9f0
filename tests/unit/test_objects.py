"""A store of objects on the real disk: what it returns is what was written, and its faults are told without secrets."""

import asyncio
import json
import time
from importlib.util import find_spec

import pytest

from coterie.errors import ConfigError, StoreError
from coterie.launch.children import free_port
from coterie.store.objects import ObjectAddress, Stored, age_s, object_name

from ..object_stores import FAULTS, SECRET, set_faults


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "bucket"
    (made / "prefix").mkdir(parents=True)
    return made


def store_at(folder, protocol="faulty", **options):
    address = {"url": f"{protocol}://{folder}/prefix", "timeout_s": 20.0, **options}
    return ObjectAddress(**address).open()


@pytest.fixture(params=["file", "faulty"])
def store(request, folder):
    return store_at(folder, request.param)


async def test_an_object_comes_back_whole_and_only_under_its_own_name(store, folder):
    content = bytes(range(256)) * 1000
    name = object_name("base/run", "version-0000000001")
    stored = await store.put(name, content)
    assert stored == Stored(name, len(content), stored.sha256)
    assert await store.get(stored) == content
    assert (folder / "prefix" / name).read_bytes() == content
    other = await store.put(object_name("other/run", "version-0000000001"), b"of another")
    assert await store.names("base") == [name]
    assert await store.names("nobody") == []
    await store.remove(name)
    await store.remove(name)
    assert await store.names("base") == []
    assert await store.get(other) == b"of another"


async def test_a_store_is_tried_out_and_nothing_stays_there(store, folder):
    await store.try_out()
    assert not [path for path in folder.rglob("*") if path.is_file()]


async def test_a_store_that_fails_when_it_is_tried_out_keeps_nothing_of_it(folder):
    store = store_at(folder)
    set_faults(folder, calls=["list"], away=True)
    with pytest.raises(StoreError, match="cannot list"):
        await store.try_out()
    assert [path.name for path in folder.rglob("*") if path.is_file()] == [FAULTS]


def test_no_two_names_are_the_same_and_each_says_its_age():
    names = {object_name("base/run", "version-1") for _ in range(1000)}
    assert len(names) == 1000
    assert all(0 <= age_s(name) < 60 for name in names)
    assert age_s("base/run/of somebody else") is None


async def test_a_lost_and_a_damaged_object_are_named_with_what_to_do(store, folder):
    stored = await store.put("base/run/one", b"one version")
    path = folder / "prefix/base/run/one"
    for content, why in ((b"one versioN", "does not have its SHA-256"), (b"one", "has 3 bytes, expected 11")):
        path.write_bytes(content)
        with pytest.raises(StoreError, match=f"prefix/base/run/one is damaged: .*{why}") as told:
            await store.get(stored)
        assert (told.value.trouble, "put it back" in told.value.hint) == ("", True)
    path.unlink()
    with pytest.raises(StoreError, match=r"the object .*://.*/prefix/base/run/one is lost") as told:
        await store.get(stored)
    assert (told.value.trouble, "put it back" in told.value.hint) == ("", True)


async def test_a_folder_that_is_not_mounted_is_away_and_nothing_is_written_in_its_place(store, folder):
    stored = await store.put("base/run/one", b"one version")
    (folder / "prefix").rename(folder / "elsewhere")
    for call in (store.get(stored), store.put("base/run/two", b"two")):
        with pytest.raises(StoreError, match=r"the folder of objects.url is not there") as told:
            await call
        assert (told.value.trouble, "mount" in told.value.hint) == ("away", True)
    assert not (folder / "prefix").exists()


async def test_a_store_that_hangs_is_given_up_in_time_while_the_event_loop_goes_on(folder):
    store = store_at(folder, timeout_s=0.3)
    set_faults(folder, slow_s=2.0)
    since, turns = time.monotonic(), 0

    async def turn():
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    turning = asyncio.create_task(turn())
    with pytest.raises(StoreError, match=r"has not answered for 0.3 s: cannot write .*base/one") as told:
        await store.put("base/one", b"one")
    assert told.value.trouble == "away"
    assert time.monotonic() - since < 2.0
    assert turns > 2
    turning.cancel()
    # Many calls that hang at once are not joined by more.
    refused = await asyncio.gather(
        *(store.put(f"base/{number}", b"") for number in range(20)), return_exceptions=True
    )
    assert all(one.trouble == "away" for one in refused)
    with pytest.raises(StoreError, match=r"\d+ calls to .* hang"):
        await store.put("base/one", b"one")
    set_faults(folder)
    # They end, and the store is asked again.
    async with asyncio.timeout(60):
        while True:
            try:
                await store_of(store, folder).put(f"base/{time.monotonic_ns()}", b"again")
                break
            except StoreError:
                await asyncio.sleep(0.1)


def store_of(store, folder):
    """Return the store with as much time as a busy machine takes."""
    store._timeout_s = 20.0
    return store


async def test_a_full_store_says_so_and_keeps_no_part_of_an_object(folder):
    store = store_at(folder)
    set_faults(folder, full=True)
    with pytest.raises(StoreError, match=r"cannot write .*base/one: No space left on device") as told:
        await store.put("base/one", b"one")
    assert (told.value.trouble, told.value.hint) == ("full", "free space there")
    assert not (folder / "prefix/base/one").exists()


async def test_a_store_that_gives_other_bytes_back_has_not_taken_an_object(folder, monkeypatch):
    store = store_at(folder)
    monkeypatch.setattr(type(store._system), "cat_file", lambda *_, **__: b"other bytes")
    with pytest.raises(StoreError, match="is damaged"):
        await store.put("base/one", b"one")


@pytest.mark.parametrize("fault", ["away", "broken"])
async def test_no_message_has_a_key_of_the_options_or_the_environment(folder, tmp_path, fault):
    options = tmp_path / "options.json"
    options.write_text(json.dumps({"key": SECRET}))
    store = store_at(folder, options_file=options)
    set_faults(folder, **{fault: True})
    with pytest.raises(StoreError, match="no answer from") as told:
        await store.put("base/one", b"one")
    assert SECRET not in f"{told.value} {told.value.message}"
    assert "signature" not in told.value.message
    assert "user" not in told.value.message
    assert told.value.trouble == "away"


def test_an_address_that_cannot_be_used_is_refused_without_being_repeated(tmp_path):
    wrong = {
        "s3://user:hidden@bucket/folder": "holds a password",  # pragma: allowlist secret
        "https://host/folder?signature=hidden": "holds a password or a query",
        "ftp://user:hid/den@host/folder": "is no URL",  # pragma: allowlist secret
        "/folder/hidden": "is no URL",
        "file://folder/hidden": "names no folder of this machine",
        "memory://hidden": "a store that ends with its process",
        "unheard://hidden": "begins with unheard://, which fsspec does not know",
        "zip://hidden::s3://bucket": "is no URL",
    }
    for url, why in wrong.items():
        with pytest.raises(ConfigError, match=f"objects.url.*{why}") as told:
            ObjectAddress(url).open()
        assert "hid" not in str(told.value)
    for content, why in (("{", "is no JSON"), ("[1]", "is no JSON object")):
        options = tmp_path / "options.json"
        options.write_text(content)
        with pytest.raises(ConfigError, match=why):
            ObjectAddress("file:///folder", options).open()
    with pytest.raises(ConfigError, match=r"cannot read objects.options_file"):
        ObjectAddress("file:///folder", tmp_path / "none").open()


@pytest.fixture
def s3(tmp_path):
    """Options of a server on this machine that imitates S3; skips where its packages are not installed."""
    pytest.importorskip("s3fs", reason="pip install s3fs, of the version of fsspec")
    moto = pytest.importorskip("moto.server", reason="pip install 'moto[server]'")
    import fsspec

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=free_port())
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "a key", "secret": SECRET, "endpoint_url": f"http://{host}:{port}"}
    fsspec.filesystem("s3", **options).mkdir("bucket")
    path = tmp_path / "options.json"
    path.write_text(json.dumps(options))
    yield path
    server.stop()


async def test_objects_in_s3_are_as_those_on_a_disk(s3):
    store = ObjectAddress("s3://bucket/models", s3, 20.0).open()
    await store.try_out()
    content = bytes(range(256)) * 50_000
    stored = await store.put(object_name("base/run", "version-1"), content)
    assert await store.get(stored) == content
    assert await store.names("base") == [stored.name]
    assert await store.names("nobody") == []
    with pytest.raises(StoreError, match=r"is damaged: its content does not have its SHA-256"):
        await store.get(stored._replace(sha256=bytes(32)))
    await store.remove(stored.name)
    await store.remove(stored.name)
    with pytest.raises(StoreError, match=r"the object s3://bucket/models/base/run/.* is lost"):
        await store.get(stored)
    with pytest.raises(StoreError, match=r"cannot write s3://nowhere/one: .*bucket does not exist") as told:
        await ObjectAddress("s3://nowhere", s3, 20.0).open().put("one", b"one")
    assert told.value.trouble == "away"


@pytest.mark.skipif(find_spec("s3fs") is not None, reason="s3fs is installed")
def test_a_protocol_whose_package_is_missing_is_told_with_the_package():
    with pytest.raises(ConfigError, match=r"begins with s3://, which needs another package: .*s3fs") as told:
        ObjectAddress("s3://bucket/folder").open()
    assert "s3fs, gcsfs or adlfs" in told.value.hint
