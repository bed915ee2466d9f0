"""Division of a data set by a run's settings: the kinds of splits, and the metrics on them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from coterie_client.history import read_histories

from coterie.config.run import DataSettings, RunSettings, SplitSettings
from coterie.data import TEST, TRAIN, VALIDATION, Dataset, Split, leave_last_out, leave_random_out
from coterie.data.attributes import in_order, read_attributes
from coterie.data.split import PARTS
from coterie.errors import DataError
from coterie.studies.run_data import load, make_feed


def leaving(**options: object) -> RunSettings:
    return RunSettings(split=SplitSettings.model_validate({"kind": "leave-last-out", **options}))


def test_leaving_the_last_one_out_follows_its_seed_and_its_tie_rule() -> None:
    settings = leaving()
    data = load(settings)
    feed = make_feed(settings, data, 3)
    np.testing.assert_array_equal(feed.split.part, leave_last_out(data, seed=3).part)
    by_file = make_feed(leaving(ties="file"), data, 3)
    np.testing.assert_array_equal(by_file.split.part, leave_last_out(data, ties="file").part)
    assert not make_feed(leaving(validation=0), data, 3).split.validation.any()


def test_what_is_measured_is_what_the_split_holds_out_among_negatives_of_the_seed() -> None:
    settings = leaving()
    data = load(settings)
    one, other = (make_feed(settings, data, seed).leave_one_out() for seed in (0, 1))
    feed = make_feed(settings, data, 0)
    tests, validates = feed.split.part == TEST, feed.split.part == VALIDATION
    assert one.test[data.user[tests]].tolist() == data.item[tests].tolist()
    assert one.validation[data.user[validates]].tolist() == data.item[validates].tolist()
    assert not np.array_equal(one.negatives, other.negatives)


def test_a_published_hold_out_brings_its_own_negatives(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "ncf-split").mkdir(parents=True)
    (folder / "ratings_no_timestamp.dat").write_text("1::10::5\n1::20::4\n1::30::3\n2::40::5\n2::50::1\n")
    (folder / "ncf-split" / "item_index_to_movieid.tsv").write_text("0\t10\n1\t40\n2\t50\n")
    (folder / "ncf-split" / "ml-1m.test.rating").write_text("0\t0\t5\t1\n")
    (folder / "ncf-split" / "ml-1m.test.negative").write_text("(0,0)\t1\t2\n")
    settings = RunSettings(
        data=DataSettings(path=folder),
        split=SplitSettings(kind="published"),
        federation={"owners": 1, "hosts": 1},  # type: ignore[arg-type]
    )
    feed = make_feed(settings, load(settings), 0)
    holdout = feed.leave_one_out()
    assert [feed.dataset.items[item] for item in holdout.negatives[0]] == ["40", "50"]
    assert feed.dataset.items[holdout.test[0]] == "10"
    assert feed.dataset.items[holdout.validation[0]] in ("20", "30")


def test_a_published_hold_out_that_is_not_there_is_refused() -> None:
    settings = RunSettings(split=SplitSettings(kind="published"))
    with pytest.raises(DataError, match=r"synthetic has no published hold-out.*leave-last-out"):
        make_feed(settings, load(settings), 0)


SMALL = {"users": 30, "items": 40, "interactions": 300, "genres": 3}


def predicting(**given: object) -> RunSettings:
    return RunSettings.model_validate({"system": "fedmvmf", "data": {"synthetic": SMALL}, **given})


def test_hosts_and_owners_of_fedmvmf_read_what_the_feed_knows(tmp_path: Path) -> None:
    settings = predicting(mvmf={"item_servers": 2})
    feed = make_feed(settings, load(settings), 0)
    assert feed.partition.names == ("catalogue-0", "catalogue-1")
    assert (feed.partition.member.sum(axis=1) == 1).all()
    # Numbered as the server does, and nothing else is changed by that.
    assert feed.partition.member.argmax(axis=1).tolist() == [0] * 20 + [1] * 20
    alone = make_feed(predicting(), load(settings), 0)
    assert feed.features is not None
    assert alone.features is not None
    kept = dict(zip(feed.dataset.items, feed.features.values.tolist(), strict=True))
    assert kept == dict(zip(alone.dataset.items, alone.features.values.tolist(), strict=True))
    keys, wanted = ([feed.dataset.items[at] for at in feed.dataset.item.tolist()] for feed in (feed, alone))
    assert keys == wanted
    for host in range(2):
        data = feed.hosted(host)
        feed.write_histories(host, tmp_path / "histories.csv")
        names, interactions = read_histories(tmp_path / "histories.csv")
        rated = {(names[one.user - 1], one.item): one.rating for one in interactions}
        assert rated == {
            (data.users[user], data.items[item]): rating
            for user, item, rating in zip(data.user, data.item, data.rating, strict=True)
        }
        path = feed.write_attributes(host, tmp_path / "attributes.csv")
        assert path is not None
        told = in_order(data.users, *read_attributes(path, "user"))
        assert data.attributes is not None
        assert told.names == data.attributes.names == feed.attribute_names
        np.testing.assert_array_equal(told.values, data.attributes.values)
    for owner in range(2):
        own, features = feed.owned(owner)
        path = feed.write_features(owner, tmp_path / "features.csv")
        assert path is not None
        assert features is not None
        rows, table = read_attributes(path, "item")
        assert list(rows) == [feed.dataset.items[item] for item in own]
        np.testing.assert_array_equal(table.values, features.values)


def test_hosts_of_other_systems_are_given_neither_ratings_nor_attributes(tmp_path: Path) -> None:
    settings = RunSettings.model_validate({"system": "fedncf", "data": {"synthetic": SMALL}})
    feed = make_feed(settings, load(settings), 0)
    feed.write_histories(0, tmp_path / "histories.csv")
    assert (tmp_path / "histories.csv").read_text().splitlines()[0] == "user,item,positive,time,part"
    assert feed.write_attributes(0, tmp_path / "attributes.csv") is None
    assert feed.write_features(0, tmp_path / "features.csv") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["histories.csv"]


@pytest.mark.parametrize(
    ("kind", "of"), [("cold-users", lambda data: data.user), ("cold-items", lambda data: data.item)]
)
def test_whole_users_or_items_are_held_out_by_the_same_shares(
    kind: str, of: Callable[[Dataset], np.ndarray]
) -> None:
    settings = predicting(split={"kind": kind, "train": 0.7, "validation": 0.2})
    data = load(settings)
    part, whole = make_feed(settings, data, 0).split.part, of(data)
    held = [np.unique(whole[part == one]) for one in (TEST, VALIDATION, TRAIN)]
    assert not set(held[0]) & set(held[1])
    assert not (set(held[0]) | set(held[1])) & set(held[2])
    n = len(np.unique(whole))
    assert [len(one) for one in held] == [
        round(0.3 * n),
        round(0.14 * n),
        n - round(0.3 * n) - round(0.14 * n),
    ]


def test_ratings_out_of_the_range_of_the_settings_and_data_without_ratings_are_refused() -> None:
    settings = predicting(mvmf={"lowest": 2, "highest": 4})
    with pytest.raises(DataError, match=r"out of range, the lowest 1 and the highest 5; expected 2 to 4"):
        make_feed(settings, load(settings), 0)
    data = load(predicting())
    implicit = dataclasses.replace(data, rating=np.ones_like(data.rating))
    with pytest.raises(DataError, match="there is nothing to predict"):
        make_feed(predicting(), implicit, 0)


def test_a_genome_where_there_is_none_and_more_servers_than_items_are_refused() -> None:
    with pytest.raises(DataError, match=r"mvmf.features 'genome' with the synthetic set"):
        make_feed(predicting(mvmf={"features": "genome"}), load(predicting()), 0)
    with pytest.raises(DataError, match=r"mvmf\.item_servers 41 for 40 items"):
        make_feed(predicting(mvmf={"item_servers": 41}), load(predicting()), 0)
    without = make_feed(predicting(mvmf={"features": "none", "attributes": False}), load(predicting()), 0)
    assert (without.features, without.attributes) == (None, None)


def dividing_by(path: Path, sha256: str = "", **given: object) -> RunSettings:
    return RunSettings.model_validate({"split": {"kind": "file", "path": path, "sha256": sha256}, **given})


def test_a_run_by_the_file_of_another_has_the_same_split_for_any_seed(tmp_path: Path) -> None:
    settings = RunSettings.model_validate({"system": "fedncf"})
    data = load(settings)
    feed = make_feed(settings, data, 3)
    path = tmp_path / "split.csv"
    feed.split.write(path, feed.dataset)
    digest = feed.split.sha256(feed.dataset)
    for seed in (0, 1):
        again = make_feed(dividing_by(path, digest, system="fedncf"), data, seed)
        np.testing.assert_array_equal(again.split.part, feed.split.part)
        assert again.split.sha256(again.dataset) == digest
    with pytest.raises(DataError, match=f"is the split {digest}; expected {'0' * 64}"):
        make_feed(dividing_by(path, "0" * 64, system="fedncf"), data, 0)


@pytest.mark.parametrize("system", ["ease", "fcf", "fedncf"])
def test_data_without_times_are_divided_by_a_random_interaction_of_each_user(system: str) -> None:
    settings = RunSettings.model_validate({"system": system, "split": {"kind": "leave-random-out"}})
    timeless = dataclasses.replace(load(settings), time=None)
    feed = make_feed(settings, timeless, 2)
    np.testing.assert_array_equal(feed.split.part, leave_random_out(timeless, seed=2).part)
    assert (feed.leave_one_out().test >= 0).any()
    with pytest.raises(DataError, match=r"no timestamps.*'leave-random-out'"):
        make_feed(leaving(), timeless, 0)


@pytest.mark.parametrize(
    ("maker", "kind", "system", "message"),
    [
        ("fcf", "random", "fedncf", "as 'random' does: .* one held-out item of each user"),
        ("fedncf", "leave-last-out", "fedmvmf", "as 'leave-last-out' does: .* several held-out ratings"),
        ("fedmvmf", "cold-users", "fcf", "as 'cold-users' does: .* users that it has learned from"),
        ("fedmvmf", "cold-items", "fedmvmf", "holds out whole items"),
    ],
)
def test_a_file_whose_split_does_not_measure_the_system_is_refused(
    tmp_path: Path, maker: str, kind: str, system: str, message: str
) -> None:
    settings = RunSettings.model_validate({"system": maker, "split": {"kind": kind}})
    data = load(settings)
    feed = make_feed(settings, data, 0)
    feed.split.write(tmp_path / "split.csv", feed.dataset)
    with pytest.raises(DataError, match=message):
        make_feed(dividing_by(tmp_path / "split.csv", system=system), data, 0)


@pytest.mark.parametrize("absent", PARTS)
def test_a_file_without_a_part_that_is_needed_is_refused(tmp_path: Path, absent: str) -> None:
    settings = dividing_by(tmp_path / "split.csv", system="fcf")
    data = load(settings)
    others = np.array([number for number, name in enumerate(PARTS) if name != absent], np.uint8)
    Split(others[np.arange(len(data)) % 2]).write(tmp_path / "split.csv", data)
    with pytest.raises(DataError, match=f"has no part '{absent}', which fcf needs"):
        make_feed(settings, data, 0)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"kind": "file"}, "kind 'file' without path"),
        ({"kind": "random", "path": "split.csv"}, "path with kind 'random', which reads no file"),
        ({"kind": "random", "sha256": "0" * 64}, "sha256 with kind 'random', which reads no file"),
        ({"kind": "file", "path": "split.csv", "sha256": "0"}, "sha256"),
    ],
)
def test_settings_of_a_split_file_that_do_not_go_together_are_refused(
    split: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SplitSettings.model_validate(split)


def test_the_published_split_of_a_matlab_file_measures_systems_that_predict_ratings(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0)
    ratings = drawn.integers(1, 6, (20, 12)) * (drawn.random((20, 12)) < 0.6)
    tested = (ratings > 0) & (drawn.random(ratings.shape) < 0.2)
    with h5py.File(tmp_path / "some.mat", "w", userblock_size=512) as file:
        # MATLAB stores columns first.
        file["M"], file["Otest"], file["Otraining"] = ratings.T, tested.T, ((ratings > 0) & ~tested).T
    given = {"data": {"path": tmp_path / "some.mat"}, "split": {"kind": "published", "validation": 0.3}}
    settings = RunSettings.model_validate({"system": "fedmf", **given})
    feed = make_feed(settings, load(settings), 0)
    data, tests = feed.dataset, feed.split.test
    held = {
        (int(data.users[user]) - 1, int(data.items[item]) - 1)
        for user, item in zip(data.user[tests], data.item[tests], strict=True)
    }
    assert held == {(user, item) for user, item in np.argwhere(tested).tolist()}
    assert feed.split.validation.any()
    ranking = RunSettings.model_validate({"system": "fedncf", **given})
    with pytest.raises(DataError, match=r"as 'random' does: .*fedncf is measured by one held-out item"):
        make_feed(ranking, load(ranking), 0)


def test_filters_and_the_range_of_ratings_are_those_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "some.csv").write_text("user,item,rating\na,1,0\na,2,100\nb,1,50\nb,2,7\nc,3,-1\n")

    def reading(**options: object) -> RunSettings:
        return RunSettings(data=DataSettings.model_validate({"path": tmp_path / "some.csv", **options}))

    kept = load(reading(k_core=2))
    assert (kept.users, kept.items) == (("a", "b"), ("1", "2"))
    assert kept.notes == ("k_core 2: 1 interactions, 1 users and 1 items left out",)
    with pytest.raises(DataError, match=r"line 6, column 'rating': '-1'; expected a number from 0 to 100"):
        load(reading(rating_range=(0, 100)))
    with pytest.raises(DataError, match="k_core 3: nothing is left"):
        load(reading(k_core=3))
    for limits in ((5, 1), (float("-inf"), 5)):
        with pytest.raises(ValueError, match="rating_range"):
            reading(rating_range=limits)
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        reading(min_user=0)


def test_attributes_of_users_follow_a_filter() -> None:
    unfiltered = predicting()
    whole = make_feed(unfiltered, load(unfiltered), 0)
    filtering = predicting(data={"synthetic": SMALL, "min_user": 10})
    feed = make_feed(filtering, load(filtering), 0)
    assert 0 < len(feed.dataset.users) < len(whole.dataset.users)
    assert whole.attributes is not None
    assert feed.attributes is not None
    rows = [whole.dataset.users.index(user) for user in feed.dataset.users]
    np.testing.assert_array_equal(feed.attributes.values, whole.attributes.values[rows])
