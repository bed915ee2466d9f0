import dataclasses
import hashlib
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coterie.data import (
    TEST,
    TRAIN,
    VALIDATION,
    Dataset,
    Split,
    SyntheticSpec,
    cold_items,
    cold_users,
    generate,
    hold_marked_out,
    leave_last_out,
    leave_marked_out,
    leave_random_out,
    random,
    read_split,
    temporal,
)
from coterie.errors import DataError

DATA = generate(SyntheticSpec(users=30, items=60, interactions=600))


def history(times: list[int]) -> Dataset:
    """One user with one item per time."""
    count = len(times)
    return Dataset(
        name="history",
        users=("u",),
        items=tuple(f"i{index}" for index in range(count)),
        user=np.zeros(count, np.int32),
        item=np.arange(count, dtype=np.int32),
        rating=np.ones(count, np.float32),
        time=np.array(times, np.int64),
    )


def reordered(data: Dataset, order: np.ndarray) -> Dataset:
    assert data.time is not None
    return dataclasses.replace(
        data, user=data.user[order], item=data.item[order], rating=data.rating[order], time=data.time[order]
    )


def test_the_first_interactions_train_the_next_validate_and_the_last_test() -> None:
    split = temporal(history([30, 20, 10, 50, 40, 90, 80, 70, 60, 100]), train=0.8, validation=0.25)
    assert split.part.tolist() == [0, 0, 0, 0, 0, 2, 1, 1, 0, 2]


@settings(max_examples=50, deadline=None)
@given(st.floats(0.05, 1), st.floats(0, 0.95), st.integers(-5, 5))
def test_no_user_tests_on_what_is_older_than_its_training(train: float, validation: float, seed: int) -> None:
    split = temporal(DATA, train, validation, seed)
    assert DATA.time is not None
    for user in range(len(DATA.users)):
        mine = DATA.user == user
        times = [DATA.time[mine & (split.part == part)] for part in (TRAIN, VALIDATION, TEST)]
        filled = [part for part in times if len(part)]
        assert len(times[0]) >= 1
        assert all(early.max() <= late.min() for early, late in itertools.pairwise(filled))
        trained = max(1, int(np.floor(mine.sum() * train + 1e-9)))
        assert len(times[2]) == mine.sum() - trained
        assert len(times[1]) == int(np.floor(trained * validation + 1e-9))


def test_shares_are_exact_where_binary_fractions_are_not() -> None:
    split = temporal(history(list(range(100))), train=0.29, validation=0)
    assert split.train.sum() == 29


def test_the_only_interaction_of_a_user_trains() -> None:
    assert temporal(history([5]), train=0.5).part.tolist() == [TRAIN]


def test_without_validation_nothing_validates() -> None:
    assert not temporal(DATA, validation=0).validation.any()


def test_equal_times_are_ordered_by_the_seed_and_not_by_the_file() -> None:
    data = history([7] * 40)
    backwards = np.arange(40)[::-1]
    split = temporal(data, seed=1)
    np.testing.assert_array_equal(temporal(reordered(data, backwards), seed=1).part, split.part[backwards])
    assert not np.array_equal(split.part, temporal(data, seed=2).part)
    assert split.part.tolist() != sorted(split.part.tolist())


def test_a_random_split_has_the_same_shares_and_ignores_time_and_file_order() -> None:
    split = random(DATA, 0.8, 0.1, seed=4)
    by_time = temporal(DATA, 0.8, 0.1, seed=4)
    np.testing.assert_array_equal(np.bincount(split.part), np.bincount(by_time.part))
    assert not np.array_equal(split.part, by_time.part)
    order = np.random.default_rng(0).permutation(len(DATA))
    np.testing.assert_array_equal(random(reordered(DATA, order), 0.8, 0.1, seed=4).part, split.part[order])
    assert not np.array_equal(split.part, random(DATA, 0.8, 0.1, seed=5).part)


def test_the_last_interaction_tests_and_the_one_before_validates() -> None:
    data = history([30, 20, 50, 10, 40])
    assert leave_last_out(data).part.tolist() == [TRAIN, TRAIN, TEST, TRAIN, VALIDATION]
    assert leave_last_out(data, validation=False).part.tolist() == [TRAIN, TRAIN, TEST, TRAIN, TRAIN]


@pytest.mark.parametrize("validation", [True, False])
def test_a_user_with_fewer_than_three_interactions_keeps_them_all_in_training(validation: bool) -> None:
    for count in (1, 2):
        assert not leave_last_out(history(list(range(count))), validation=validation).part.any()
    assert leave_last_out(history([0, 1, 2]), validation=validation).test.sum() == 1


@given(st.integers(-5, 5), st.booleans(), st.sampled_from(["hash", "file"]))
def test_no_user_leaves_out_what_is_older_than_its_training(seed: int, validation: bool, ties: str) -> None:
    split = leave_last_out(DATA, ties=ties, validation=validation, seed=seed)
    assert DATA.time is not None
    for user in range(len(DATA.users)):
        mine = DATA.user == user
        times = [DATA.time[mine & (split.part == part)] for part in (TRAIN, VALIDATION, TEST)]
        enough = mine.sum() >= 3
        assert [len(part) for part in times[1:]] == [int(enough and validation), int(enough)]
        filled = [part for part in times if len(part)]
        assert all(early.max() <= late.min() for early, late in itertools.pairwise(filled))


def test_ties_of_the_last_second_are_broken_by_the_seed_whatever_the_order_of_rows() -> None:
    data = history([1, 7, 7, 7, 7, 7, 7, 7])
    backwards = np.arange(8)[::-1]
    parts = {tuple(leave_last_out(data, seed=seed).part.tolist()) for seed in range(20)}
    assert len(parts) > 5
    split = leave_last_out(data, seed=1)
    turned = leave_last_out(reordered(data, backwards), seed=1)
    np.testing.assert_array_equal(turned.part, split.part[backwards])


def test_ties_by_file_take_the_later_row_whatever_the_seed() -> None:
    data = history([9, 7, 9, 9, 1])
    for seed in (0, 1):
        assert leave_last_out(data, ties="file", seed=seed).part.tolist() == [0, 0, 1, 2, 0]


def test_another_tie_rule_and_data_without_times_are_refused() -> None:
    with pytest.raises(DataError, match="ties is 'random'; expected 'hash' or 'file'"):
        leave_last_out(DATA, ties="random")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"no last interaction to hold out.*published"):
        leave_last_out(dataclasses.replace(DATA, time=None))


def test_a_marked_interaction_tests_and_the_seed_draws_the_one_that_validates() -> None:
    data = dataclasses.replace(history(list(range(30))), time=None)
    marked = np.arange(30) == 4
    splits = [leave_marked_out(data, marked, seed=seed).part for seed in range(10)]
    assert all(part[4] == TEST and (part == TEST).sum() == 1 for part in splits)
    assert all((part == VALIDATION).sum() == 1 for part in splits)
    assert len({int(part.tolist().index(VALIDATION)) for part in splits}) > 4
    assert not leave_marked_out(data, marked, validation=False).validation.any()


def test_a_user_without_a_marked_interaction_keeps_everything_in_training() -> None:
    marked = np.zeros(len(DATA), bool)
    marked[np.flatnonzero(DATA.user == 2)[0]] = True
    part = leave_marked_out(DATA, marked).part
    assert set(DATA.user[part != TRAIN].tolist()) == {2}


def test_two_marked_interactions_of_one_user_are_refused() -> None:
    with pytest.raises(DataError, match="2 interactions of user 'u' are held out"):
        leave_marked_out(history([1, 2, 3]), np.array([True, True, False]))
    with pytest.raises(DataError, match=r"marked has shape \(2,\)"):
        leave_marked_out(history([1, 2, 3]), np.array([True, True]))


def test_data_without_times_cannot_be_split_by_time_and_the_error_names_the_way_out() -> None:
    with pytest.raises(DataError, match=r"synthetic has no timestamps.*random"):
        temporal(dataclasses.replace(DATA, time=None))


@pytest.mark.parametrize(("train", "validation"), [(0, 0.1), (1.1, 0.1), (0.8, -0.1), (0.8, 1)])
def test_shares_out_of_range_are_refused(train: float, validation: float) -> None:
    with pytest.raises(DataError, match="expected a share"):
        random(DATA, train, validation)


@pytest.mark.parametrize(
    "part", [np.array([0, 3], np.uint8), np.array([0], np.int64), np.zeros((1, 1), np.uint8)]
)
def test_a_split_of_other_values_or_types_is_refused(part: np.ndarray) -> None:
    with pytest.raises(DataError, match="expected"):
        Split(part)


def test_a_split_survives_its_file_and_a_reordered_data_set(tmp_path: Path) -> None:
    split = temporal(DATA)
    path = tmp_path / "split.csv"
    split.write(path, DATA)
    np.testing.assert_array_equal(read_split(path, DATA).part, split.part)
    order = np.random.default_rng(1).permutation(len(DATA))
    np.testing.assert_array_equal(read_split(path, reordered(DATA, order)).part, split.part[order])


@settings(deadline=None)
@given(
    st.lists(
        st.text(st.sampled_from("\r\n,\"\\'; \t\x00\x85\u2028\ufeffab"), min_size=1),
        min_size=2,
        max_size=2,
        unique=True,
    )
)
@example(["\r", "\n"])
@example(['a,"b"', "c\r\nd"])
@example(["a\r", '"'])
def test_any_keys_survive_the_file(keys: list[str]) -> None:
    data = dataclasses.replace(history([1, 2]), users=(keys[0],), items=tuple(keys))
    split = temporal(data, train=0.5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "s.csv")
        split.write(path, data)
        assert read_split(path, data).part.tolist() == split.part.tolist()


def test_a_split_that_cannot_be_written_whole_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    data = dataclasses.replace(history([1, 2]), items=("a", "\ud800"))  # which UTF-8 cannot hold
    path = tmp_path / "s.csv"
    path.write_text("something else")
    with pytest.raises(UnicodeEncodeError):
        temporal(data, train=0.5).write(path, data)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("s.csv", "something else")]


def test_the_digest_is_that_of_the_documented_bytes() -> None:
    data = dataclasses.replace(history([1, 2]), items=("b", "a"))
    expected = (
        b"coterie.split.v1\0"
        + (2).to_bytes(8, "little")
        + b"\x01\0\0\0u\x01\0\0\0a\x02"
        + b"\x01\0\0\0u\x01\0\0\0b\x00"
    )
    assert temporal(data, train=0.5).sha256(data) == hashlib.sha256(expected).hexdigest()


def test_the_digest_ignores_row_order_and_sees_every_part() -> None:
    split = temporal(DATA)
    order = np.random.default_rng(2).permutation(len(DATA))
    assert Split(split.part[order]).sha256(reordered(DATA, order)) == split.sha256(DATA)
    other = split.part.copy()
    other[17] = (other[17] + 1) % 3
    assert Split(other).sha256(DATA) != split.sha256(DATA)


def test_a_split_of_another_length_has_no_digest() -> None:
    with pytest.raises(DataError, match="the split has 2 rows but synthetic has 600 interactions"):
        Split(np.zeros(2, np.uint8)).sha256(DATA)


def test_a_split_file_of_another_digest_is_refused(tmp_path: Path) -> None:
    split = random(DATA)
    path = tmp_path / "split.csv"
    split.write(path, DATA)
    digest, other = split.sha256(DATA), random(DATA, seed=1).sha256(DATA)
    np.testing.assert_array_equal(read_split(path, DATA, digest).part, split.part)
    with pytest.raises(DataError, match=f"is the split {digest}; expected {other}"):
        read_split(path, DATA, other)
    path.write_text(path.read_text().replace(",test\n", ",train\n", 1))
    with pytest.raises(DataError, match=f"expected {digest}"):
        read_split(path, DATA, digest)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"user,item,part\nu,i\xe9,train\n", "byte 18: not UTF-8"),
        (b"\x89HDF\r\n\x1a\n", "byte 0: not UTF-8"),
        (b'user,item,part\n"' + b"u" * 140_000, "line 2: field larger than field limit"),
    ],
    ids=["latin-1", "binary", "endless field"],
)
def test_a_split_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "split.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_split(tmp_path / "split.csv", history([1, 2]))


def test_a_random_interaction_of_each_user_is_held_out_without_times_and_in_any_order_of_rows() -> None:
    timeless = dataclasses.replace(DATA, time=None)
    split = leave_random_out(timeless, seed=1)
    enough = np.bincount(DATA.user, minlength=len(DATA.users)) >= 3
    for rows in (split.test, split.validation):
        np.testing.assert_array_equal(np.bincount(DATA.user[rows], minlength=len(DATA.users)), enough)
    shuffled = reordered(DATA, np.random.default_rng(0).permutation(len(DATA)))
    other = leave_random_out(dataclasses.replace(shuffled, time=None), seed=1)
    assert other.sha256(shuffled) == split.sha256(DATA)
    assert leave_random_out(timeless, seed=2).sha256(DATA) != split.sha256(DATA)
    untold = leave_random_out(timeless, validation=False, seed=1)
    np.testing.assert_array_equal(untold.test, split.test)
    assert not untold.validation.any()


def test_users_of_too_few_interactions_keep_them_in_training() -> None:
    assert not leave_random_out(history([1, 2])).part.any()


def test_marked_interactions_are_held_out_whatever_their_number_of_a_user() -> None:
    marked = DATA.item < 20
    split = hold_marked_out(DATA, marked, validation=0.25, seed=3)
    np.testing.assert_array_equal(split.test, marked)
    others = np.bincount(DATA.user[~marked], minlength=len(DATA.users))
    validating = np.bincount(DATA.user[split.validation], minlength=len(DATA.users))
    np.testing.assert_array_equal(validating, others // 4)
    assert not hold_marked_out(DATA, marked, validation=0).validation.any()
    with pytest.raises(DataError, match="marked has shape"):
        hold_marked_out(DATA, marked[1:])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("user,item\n", r"line 1: 'user,item'; expected 'user,item,part'"),
        ("", "line 1: ''"),
        ("user,item,part\nu,i0\n", "line 2: 2 fields; expected 3"),
        ("user,item,part\nu,i9,train\n", "line 2: history has no interaction of user 'u' with item 'i9'"),
        ("user,item,part\nu,i0,trian\n", r"line 2, column 'part': 'trian'.*did you mean 'train'"),
        ("user,item,part\nu,i0,train\nu,i0,test\n", "line 3: user 'u' and item 'i0' a second time"),
        (
            "user,item,part\nu,i0,train\n",
            "1 of the 2 interactions of history, the first of user 'u' with item 'i1'",
        ),
    ],
)
def test_a_split_file_that_does_not_fit_is_refused_with_its_line(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "split.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_split(path, history([1, 2]))


def test_a_split_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read the split"):
        read_split(tmp_path / "none.csv", DATA)


# --- Whole users, whole items --------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.floats(0.01, 0.6), st.floats(0, 0.3), st.integers(-5, 5), st.sampled_from(["user", "item"]))
def test_cold_users_and_items_are_in_one_part_with_everything_they_have(
    test: float, validation: float, seed: int, what: str
) -> None:
    whole = {"user": cold_users, "item": cold_items}[what]
    index = getattr(DATA, what)
    split = whole(DATA, test, validation, seed)
    present = len(np.unique(index))
    parts = [set(index[split.part == part].tolist()) for part in (TRAIN, VALIDATION, TEST)]
    assert not any(one & other for one, other in itertools.combinations(parts, 2))
    assert len(parts[2]) == max(1, round(test * present))
    assert len(parts[1]) == (max(1, round(validation * present)) if validation else 0)
    assert sum(map(len, parts)) == present


@pytest.mark.parametrize("whole", [cold_users, cold_items])
def test_the_same_users_or_items_are_cold_in_any_order_of_rows(whole: Callable[..., Split]) -> None:
    order = np.random.default_rng(0).permutation(len(DATA))
    split, again = whole(DATA, 0.2, 0.1, seed=3), whole(reordered(DATA, order), 0.2, 0.1, seed=3)
    np.testing.assert_array_equal(again.part, split.part[order])
    assert again.sha256(reordered(DATA, order)) == split.sha256(DATA)
    assert whole(DATA, 0.2, 0.1, seed=4).sha256(DATA) != split.sha256(DATA)


@pytest.mark.parametrize("whole", [cold_users, cold_items])
@pytest.mark.parametrize(
    ("test", "validation", "message"),
    [
        (0.0, 0.0, "test is 0.0"),
        (1.0, 0.0, "test is 1.0"),
        (float("nan"), 0.0, "test is nan"),
        (0.1, 1.0, "validation is 1.0"),
        (0.1, -0.1, "validation is -0.1"),
        (0.6, 0.5, "would be held out"),
    ],
)
def test_shares_of_whole_users_that_leave_none_are_refused(
    whole: Callable[..., Split], test: float, validation: float, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        whole(DATA, test, validation)
