"""Records of a host's users in a file: the same hold-out as in memory, and damage that is found and named."""

import resource
import signal
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.data.synthetic import SyntheticSpec, generate
from coterie.errors import StoreError
from coterie.evaluation.leave_one_out import LeaveOneOut
from coterie.evaluation.recorded import RecordedHoldout, records_of
from coterie.store.user_records import RecordFile, no_records

LABEL = bytes(range(32))


@given(st.lists(st.binary(max_size=30), max_size=40), st.data())
def test_records_are_those_that_were_written_in_any_order(tmp_path_factory, records, data):
    path = tmp_path_factory.mktemp("state") / "users.records"
    file = RecordFile.made(path, LABEL, len(records), iter(records))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(file) == len(records)
    chosen = data.draw(st.lists(st.integers(0, len(records) - 1))) if records else []
    for one in (file, RecordFile(path)):
        assert one.label == LABEL
        assert one.check() == 0
        content, first, last = one.read(np.array(chosen, np.intp))
        found = [content[a:b].tobytes() for a, b in zip(first, last, strict=True)]
        assert found == [records[user] for user in chosen]
        one.close()


def test_a_record_that_is_damaged_is_refused_with_the_name_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "users.records"
    RecordFile.made(path, LABEL, 3, [b"first", b"second", b"third"]).close()
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)
    file = RecordFile(path)
    assert file.check() == 1
    assert file.read(np.array([0, 1]))[0].tobytes().endswith(b"second")
    with pytest.raises(StoreError, match=r"users\.records is damaged: the record of a user") as raised:
        file.read(np.array([0, 1, 2]))
    assert raised.value.hint is not None
    assert "makes it again" in raised.value.hint
    assert "third" not in str(raised.value)


@pytest.mark.parametrize("damage", ["head", "table", "cut", "other"])
def test_a_file_that_is_not_whole_is_not_opened(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "users.records"
    RecordFile.made(path, LABEL, 3, [b"first", b"second", b"third"]).close()
    content = bytearray(path.read_bytes())
    match damage:
        case "head":
            content[20] ^= 1
        case "table":
            content[66] ^= 1
        case "cut":
            del content[-1:]
        case _:
            content[:] = b"something else"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"users\.records"):
        RecordFile(path)


def test_a_file_that_cannot_be_written_whole_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "users.records"
    RecordFile.made(path, LABEL, 1, [b"first"]).close()
    with pytest.raises(ValueError, match="1 records for 2 users"):
        RecordFile.made(path, LABEL, 2, [b"other"])
    with pytest.raises(ValueError, match="more records than the 1 users"):
        RecordFile.made(path, LABEL, 1, [b"other", b"one"])
    assert RecordFile(path).read(np.array([0]))[0].tobytes().endswith(b"first")
    assert [one.name for one in tmp_path.iterdir()] == ["users.records"]


def test_without_room_the_error_names_the_file_and_the_one_before_stays(tmp_path: Path) -> None:
    path = tmp_path / "users.records"
    RecordFile.made(path, LABEL, 1, [b"first"]).close()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5000, before[1]))
        with pytest.raises(StoreError, match=r"cannot write .*users\.records: File too large") as raised:
            RecordFile.made(path, LABEL, 3000, [b"other"] * 3000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, previous)
    # The host tries again until there is room.
    assert raised.value.trouble == "full"
    assert raised.value.hint
    assert RecordFile(path).read(np.array([0]))[0].tobytes().endswith(b"first")
    assert [one.name for one in tmp_path.iterdir()] == ["users.records"]


def test_a_file_is_removed_with_what_a_killed_process_left_of_one(tmp_path: Path) -> None:
    file = RecordFile.made(tmp_path / "users.records", LABEL, 1, [b"first"])
    (tmp_path / ".users.records.k1lled").write_bytes(b"private")
    for _ in range(2):
        no_records(tmp_path)
        assert not list(tmp_path.iterdir())
    assert file.read(np.array([0]))[0].tobytes().endswith(b"first")


@pytest.mark.parametrize("n_items", [150, 40_000])
def test_a_hold_out_in_records_is_measured_as_in_memory_to_the_last_bit(tmp_path: Path, n_items: int) -> None:
    data = generate(SyntheticSpec(users=300, items=150, interactions=4000))
    rng = np.random.default_rng(4)
    part = np.zeros(len(data.user), np.int8)
    # Not everybody has an item held out for each part.
    for user in range(0, 300, 2):
        own = np.flatnonzero(data.user == user)
        part[own[:1]] = 2
        part[own[1:2]] = rng.integers(0, 2)
    items = [*data.items, *(f"more-{n}" for n in range(n_items - len(data.items)))]
    held = LeaveOneOut.sampled(data.users, items, data.user, data.item, part, seed=5, count=70)
    path = tmp_path / "users.records"
    records = RecordedHoldout(len(items), RecordFile.made(path, LABEL, 300, records_of(held)))
    assert (records.n_users, records.n_items) == (held.n_users, held.n_items)
    table = rng.normal(size=(300, len(items))).astype(np.float32)

    def some(users, chosen):
        return table[users[:, None], chosen]

    for users in (None, rng.permutation(300)[:77]):
        expected = held.measure(some, table.__getitem__, users)
        found = records.measure(some, table.__getitem__, users)
        assert found.keys() == expected.keys()
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name])
    chosen = rng.permutation(300)[:50]
    for one, other in zip(records.training().take(chosen), held.training().take(chosen), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(records.training(), held.training(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert records.training()[7].tolist() == held.training()[7].tolist()
