"""Histories of a host's users: what a file may say, and what becomes of items that are no interactions."""

from pathlib import Path

import numpy as np
import pytest
from coterie_client import history
from coterie_client.history import Catalogued, Histories, read_histories
from coterie_client.service import _people

from coterie.config.services import ClientSettings
from coterie.errors import DataError
from coterie.evaluation.holdout import TEST, TRAIN
from coterie.evaluation.leave_one_out import RANKED
from coterie.evaluation.unseen import best_unseen
from coterie.store.client import Interaction
from coterie.store.engine import Writer, open_sqlite
from tests.operators import KEYS

HEAD = "user,item,positive,time,part\n"
ITEMS = ["a", "b", "c", "d"]
OWNER = bytes(32)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "histories.csv"
    path.write_text(
        HEAD + "ann,a,1,10,0\nann,b,1,11,2\nben,a,1,5,0\nann,c,0,0,3\nann,d,0,0,3\nann,d,0,0,3\nben,x,0,0,3\n"
    )
    return path


@pytest.fixture
async def histories(file: Path, tmp_path: Path):
    writer = Writer(engine := open_sqlite(tmp_path / "client.db", "client"))
    one = Histories(engine, writer)
    await one.take(*read_histories(file))
    yield one
    writer.close()
    engine.dispose()


@pytest.fixture
def catalogue() -> Catalogued:
    index = {key: n for n, key in enumerate(ITEMS)}
    return Catalogued(1, index, (OWNER,), np.ones((len(ITEMS), 1), bool))


async def test_items_to_rank_among_stand_behind_the_interactions_as_often_as_they_are_listed(
    histories: Histories, catalogue: Catalogued
) -> None:
    user, item, part, _ = histories.interactions(catalogue)
    rows = [(histories.names[u], ITEMS[i], p) for u, i, p in zip(user, item, part, strict=True)]
    assert rows == [
        ("ann", "a", TRAIN),
        ("ann", "b", TEST),
        ("ben", "a", TRAIN),
        ("ann", "c", RANKED),
        ("ann", "d", RANKED),
        ("ann", "d", RANKED),
    ]


async def test_nobody_takes_them_for_interactions(histories: Histories, catalogue: Catalogued) -> None:
    assert histories.holdout(catalogue, at_most=len(ITEMS)).part.tolist() == [TRAIN, TEST, TRAIN]
    assert histories.seen(histories.number("ann"), catalogue) == {0}
    await histories.queue(catalogue)
    assert [rows.rows.tolist() for _, rows in histories.waiting(OWNER)] == [[1], [3]]


async def test_the_last_rating_of_an_item_counts_and_it_is_missing_where_there_is_none(
    tmp_path: Path, catalogue: Catalogued
) -> None:
    path = tmp_path / "rated.csv"
    path.write_text(
        "user,item,positive,time,part,rating\nann,a,1,10,0,1\nann,b,1,11,2,\nben,c,0,5,0,0.5\nann,a,1,12,0,4.5\n"
    )
    writer = Writer(engine := open_sqlite(tmp_path / "rated.db", "client"))
    try:
        await Histories(engine, writer).take(*read_histories(path))
        # Taken up from the store, as after a restart.
        rating = Histories(engine, writer).interactions(catalogue)[3]
    finally:
        writer.close()
        engine.dispose()
    np.testing.assert_array_equal(rating, np.array([4.5, np.nan, 0.5], np.float32))


async def test_a_host_of_very_many_users_has_no_interactions_in_memory_until_something_needs_all(
    file: Path, tmp_path: Path, catalogue: Catalogued, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "IN_MEMORY", 1)
    writer = Writer(engine := open_sqlite(tmp_path / "client.db", "client"))
    try:
        one = Histories(engine, writer)
        # As when it starts for the first time.
        await one.take(*read_histories(file))
        assert one.in_blocks
        assert one._held is None
        await one.take([], [Interaction(1, "c", True, 20, TRAIN, None)])
        assert one._held is None
        assert one.seen(1, catalogue) == {0, 2}
        assert one.holdout(catalogue, at_most=len(ITEMS)).part.tolist() == [TRAIN, TEST, TRAIN, TRAIN]
        await one.take([], [Interaction(2, "b", True, 21, TRAIN, None)])
        assert one.seen(2, catalogue) == {0, 1}
        assert one._held is not None
        assert len(one._held) == len(one) == len(Histories(engine, writer)) == 9
    finally:
        writer.close()
        engine.dispose()


@pytest.mark.parametrize("rating", ["nan", "inf", "four"])
def test_a_rating_that_is_no_number_is_refused_with_its_line(rating: str, file: Path) -> None:
    file.write_text(f"user,item,positive,time,part,rating\nann,a,1,10,0,3\nann,b,1,10,0,{rating}\n")
    with pytest.raises(DataError, match=r"line 3: .*as rating a number or nothing"):
        read_histories(file)


@pytest.mark.parametrize(
    "row", ["ann,a,1,10,4", "ann,a,2,10,0", "ann,,1,10,0", "ann,a,1,soon,0", "ann,a,1,10"]
)
def test_a_row_out_of_range_is_refused_with_its_line(row: str, file: Path) -> None:
    file.write_text(HEAD + "ann,a,1,10,0\n" + row + "\n")
    with pytest.raises(
        DataError, match="line 3: expected item, positive 0 or 1, time in seconds, part 0, 1, 2 or 3"
    ):
        read_histories(file)


def test_users_of_whom_only_attributes_are_known_are_users_without_a_history(
    file: Path, tmp_path: Path
) -> None:
    (tmp_path / "known.csv").write_text("user,age\nzoe,1\nben,2\n")
    peer = {"address": "127.0.0.1:1", "name": "a"}
    given = {"name": "h", "state": tmp_path, "listen": "127.0.0.1:0", "cos": peer, "thirdparty": peer}
    given["operator_keys"] = KEYS
    both = {**given, "histories": file, "attributes": tmp_path / "known.csv"}
    names, interactions = _people(ClientSettings.model_validate(both))
    assert names == ["ann", "ben", "zoe"]
    assert {one.user for one in interactions} == {1, 2}
    alone = ClientSettings.model_validate({**given, "attributes": tmp_path / "known.csv"})
    assert _people(alone) == (["zoe", "ben"], [])
    assert _people(ClientSettings.model_validate(given)) == ([], [])


def test_of_whom_nothing_is_known_nothing_is_recommended() -> None:
    assert best_unseen(ITEMS, np.zeros(4, np.float32), set(), 2) == ([], [])
    assert best_unseen(ITEMS, np.array([0, 1, 0, 1], np.float32), {1}, 2) == (["d", "a"], [1.0, 0.0])
