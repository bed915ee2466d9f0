"""What a run's settings make of a data set: the kinds of splits and what is measured on them."""

from pathlib import Path

import numpy as np
import pytest

from coterie.config.run import DataSettings, RunSettings, SplitSettings
from coterie.data import TEST, VALIDATION, leave_last_out
from coterie.errors import DataError
from coterie.launch.feed import load, make_feed


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
