"""Messages of a round outside of memory: the same bytes, whoever looks, for as long as somebody may look."""

import gc
import os
import stat
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import StoreError
from coterie.secure_sum.protocol import InParts, parts_of
from coterie.store import spool as module
from coterie.store.spool import Spool

MESSAGES = st.lists(st.tuples(st.integers(0, 9), st.binary(max_size=40)), max_size=30)
PLACES = st.tuples(st.integers(0, 50), st.integers(0, 50))


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch):
    """Few bytes go into the file as many do."""
    monkeypatch.setattr(module, "_SMALL", 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("spool")


def opened_in(folder):
    """Return the descriptors of this process whose files are, or were, in a folder."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            name = str(link.readlink())
        except FileNotFoundError:
            continue
        if name.startswith(f"{folder}/"):
            found.append(int(link.name))
    return found


def filled(spool, *messages):
    held = {}
    for member, message in enumerate(messages):
        held = spool.keep(held, member, message)
    return held


@given(MESSAGES, st.integers(0, 200), PLACES)
def test_messages_are_those_that_were_kept_and_earlier_ones_stay_as_they_were(folder, given_, memory, place):
    spool, held, expected, before = Spool(folder, memory), {}, {}, []
    for member, message in given_:
        before.append((held, expected))
        held, expected = spool.keep(held, member, message), {**expected, member: message}
    for kept, plain in [*before, (held, expected)]:
        assert dict(kept.items()) == plain
        assert kept == plain
        assert list(kept) == list(plain)
        assert len(kept) == len(plain)
        assert all(member in kept for member in plain)
        for member, message in plain.items():
            assert parts_of(kept)(member, *place) == message[place[0] : place[1]]
    assert -1 not in held


@given(MESSAGES, st.data())
def test_messages_added_to_earlier_ones_are_no_part_of_the_others(folder, given_, data):
    spool = Spool(folder, 20)
    made = [({}, {})]
    for member, message in given_:
        held, expected = data.draw(st.sampled_from(made))
        made.append((spool.keep(held, member, message), {**expected, member: message}))
    for held, expected in made[1:]:
        assert dict(held.items()) == expected
        assert list(held) == list(expected)
        assert [member in held for member in range(10)] == [member in expected for member in range(10)]


def test_a_message_is_added_without_a_copy_of_the_others(folder):
    spool, held, all_held = Spool(folder), {}, []
    tracemalloc.start()
    try:
        for member in range(2000):
            held = spool.keep(held, member, b"short")
            all_held.append(held)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A dictionary of its own for each takes eighty million bytes.
    assert most < 2_000_000
    assert [len(one) for one in all_held] == list(range(1, 2001))


def test_messages_of_one_step_are_no_part_of_those_of_the_next(folder):
    spool = Spool(folder, 0)
    one = filled(spool, b"a" * 20, b"b" * 20)
    other = spool.keep({}, 1, b"c" * 20)
    assert dict(one) == {0: b"a" * 20, 1: b"b" * 20}
    assert dict(other) == {1: b"c" * 20}
    assert one != other


def test_messages_of_another_spool_are_taken_over_as_they_are(folder):
    one = filled(Spool(folder, 0), b"a" * 20, b"b" * 30)
    both = Spool(folder, 0).keep(one, 2, b"c" * 20)
    assert dict(both) == {0: b"a" * 20, 1: b"b" * 30, 2: b"c" * 20}


@pytest.mark.parametrize("other", [{0: b"x" * 20}, {1: b"a" * 20}, {}, {0: b"a" * 20, 1: b""}])
def test_messages_differ_from_others(folder, other):
    held = filled(Spool(folder, 0), b"a" * 20)
    assert held != other
    assert held == {0: b"a" * 20}
    assert held != [b"a" * 20]


def test_small_messages_and_the_first_ones_stay_in_memory(tmp_path):
    spool = Spool(tmp_path, 30)
    held = filled(spool, b"first" * 4, b"small")
    assert not opened_in(tmp_path)
    held = spool.keep(held, 2, b"later" * 4)
    assert opened_in(tmp_path)
    assert dict(held) == {0: b"first" * 4, 1: b"small", 2: b"later" * 4}


def test_the_file_has_no_name_and_is_its_owners_alone(tmp_path):
    held = filled(Spool(tmp_path, 0), b"sealed shares")
    (descriptor,) = opened_in(tmp_path)
    status = os.fstat(descriptor)
    assert list(tmp_path.iterdir()) == []
    assert status.st_nlink == 0
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert held[0] == b"sealed shares"


def test_the_file_is_there_as_long_as_somebody_refers_to_messages_in_it(tmp_path):
    spool = Spool(tmp_path, 0)
    held, gone = filled(spool, b"sealed shares"), weakref.ref(spool)
    del spool
    gc.collect()
    assert held[0] == b"sealed shares"
    del held
    gc.collect()
    assert gone() is None
    assert not opened_in(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_where_there_is_no_room_messages_stay_in_memory(tmp_path, monkeypatch):
    missing = filled(Spool(tmp_path / "missing", 0), b"to nowhere at all")
    assert dict(missing) == {0: b"to nowhere at all"}
    spool = Spool(tmp_path, 0)
    held = filled(spool, b"while there is room")
    (descriptor,) = opened_in(tmp_path)
    beside, full = os.dup(descriptor), os.open("/dev/full", os.O_RDWR)
    os.dup2(full, descriptor)
    held = spool.keep(held, 1, b"when there is none")
    os.dup2(beside, descriptor)
    for each in (beside, full):
        os.close(each)
    # A write that was cut off is none.
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, message, at: whole(file, message[:5], at))
    held = spool.keep(held, 2, b"when there is little")
    monkeypatch.undo()
    held = spool.keep(held, 3, b"and when there is more")
    assert list(held.values()) == [
        b"while there is room",
        b"when there is none",
        b"when there is little",
        b"and when there is more",
    ]


def test_bytes_that_are_gone_are_an_error_and_not_others(tmp_path):
    held = filled(Spool(tmp_path, 0), b"one message", b"another message")
    (descriptor,) = opened_in(tmp_path)
    os.ftruncate(descriptor, 15)
    assert held[0] == b"one message"
    with pytest.raises(StoreError, match="of 15 bytes of a round's messages, 4 could be read back"):
        held[1]
    with pytest.raises(StoreError):
        held.part(1, 0, 6)


def test_threads_read_while_messages_are_added(folder):
    spool = Spool(folder, 0)
    held = filled(spool, *(bytes([n]) * 1000 for n in range(50)))

    def right(kept):
        return all(kept[member] == bytes([member]) * 1000 for member in kept)

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(right, held) for _ in range(20)]
        for member in range(50, 100):
            held = spool.keep(held, member, bytes([member]) * 1000)
        assert all(reader.result() for reader in readers)
    assert right(held)


def test_parts_of_messages_in_memory_are_read_in_the_same_way():
    plain = {3: b"0123456789"}
    assert not isinstance(plain, InParts)
    assert parts_of(plain)(3, 2, 5) == b"234"
