"""The hold-out that the authors of NCF published for MovieLens 1M: a test item and 99 negatives for each user.

Their files (https://github.com/hexiangnan/neural_collaborative_filtering) number users and items from 0 in the order in
which the ratings name them; a third file leads from their item numbers back to MovieLens' keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.data.dataset import Dataset
from coterie.data.tables import Dialect, FileTable, read_text
from coterie.errors import DataError

__all__ = ["FOLDER", "NO_ITEM", "PublishedHoldout", "read_ncf_holdout"]

FOLDER = "ncf-split"
"""Folder of the files, below the data set's."""

NO_ITEM = -1
"""Fills rows of negatives that are shorter than the longest."""

_TAB = Dialect("\t")
_TEST, _NEGATIVE, _ITEMS = "ml-1m.test.rating", "ml-1m.test.negative", "item_index_to_movieid.tsv"


@dataclass(frozen=True, eq=False)
class PublishedHoldout:
    """The published hold-out, in the numbering of a data set.

    Parameters
    ----------
    test : ndarray of bool, shape (N,)
        The interactions that test, one for each user that the files name.
    negatives : ndarray of int32, shape (U, m)
        Items to rank the test item among; ``NO_ITEM`` behind the last one of a row.
    own : ndarray of bool, shape (U,)
        Users whose test item was listed among their own negatives.
    """

    test: NDArray[np.bool_]
    negatives: NDArray[np.int32]
    own: NDArray[np.bool_]


def read_ncf_holdout(folder: Path, dataset: Dataset, *, keep_own: bool = False) -> PublishedHoldout:
    """Read the published test items and negatives.

    For 156 users of MovieLens 1M the test item stands among its own negatives.  There it would be ranked against
    itself, and as equal scores count against the model it would lose a rank: it is removed, and 98 negatives remain.

    Parameters
    ----------
    folder : Path
        Folder that has ``ml-1m.test.rating``, ``ml-1m.test.negative`` and ``item_index_to_movieid.tsv``.
    dataset : Dataset
        The ratings, with MovieLens' own keys.
    keep_own : bool
        Leave such duplicates in: the other reading of the files.

    Returns
    -------
    PublishedHoldout

    Raises
    ------
    DataError
        A file that is absent or malformed; a user, item or interaction that the data set lacks; a negative with which
        the user interacted; files that do not fit each other.
    """
    items = _items(folder / _ITEMS, dataset)
    held = read_text(folder / _TEST, _TAB, ("user", "item", "rating", "time"))
    user = _users(held, _integers(held, "user"), dataset)
    item = _looked_up(held, "item", items)
    test = _rows_of(held, user, item, dataset)

    width = _width(folder / _NEGATIVE)
    table = read_text(folder / _NEGATIVE, _TAB, ("pair", *(f"negative {n + 1}" for n in range(width))))
    _refuse_another_pair(table, held)
    negative = np.stack([_looked_up(table, f"negative {n + 1}", items) for n in range(width)], axis=1)
    own = negative == item[:, None]
    _refuse_seen(table, user, np.where(own, NO_ITEM, negative), dataset)
    if not keep_own:
        negative = np.where(own, NO_ITEM, negative)
        negative = np.take_along_axis(
            negative, np.argsort(negative == NO_ITEM, axis=1, kind="stable"), axis=1
        )
    negatives = np.full((len(dataset.users), width), NO_ITEM, np.int32)
    negatives[user] = negative
    doubled = np.zeros(len(dataset.users), np.bool_)
    doubled[user] = own.any(axis=1)
    return PublishedHoldout(test=test, negatives=negatives, own=doubled)


def _items(path: Path, dataset: Dataset) -> NDArray[np.int32]:
    """Return the data set's item for each number of the files, ``NO_ITEM`` for items that nobody rated here."""
    table = read_text(path, _TAB, ("index", "key"))
    number = _integers(table, "index")
    if not np.array_equal(np.sort(number), np.arange(len(table))):
        raise DataError(f"{path}: the item numbers are not 0 to {len(table) - 1}, each once")
    of_key = {key: index for index, key in enumerate(dataset.items)}
    items = np.empty(len(table), np.int32)
    items[number] = [of_key.get(key, NO_ITEM) for key in table.texts("key")]
    return items


def _integers(table: FileTable, column: str) -> NDArray[np.int64]:
    number = table.numbers(column, 0)
    if (wrong := number != np.floor(number)).any():
        row = int(wrong.argmax())
        raise DataError(f"{table.path}, line {row + 1}: {number[row]:g}; expected a whole number")
    return number.astype(np.int64)


def _users(table: FileTable, number: NDArray[np.int64], dataset: Dataset) -> NDArray[np.int32]:
    """Return the data set's users: the files count from 0, MovieLens from 1."""
    of_key = {key: index for index, key in enumerate(dataset.users)}
    user = np.array([of_key.get(str(one + 1), -1) for one in number.tolist()], np.int32)
    if (absent := user < 0).any():
        row = int(absent.argmax())
        raise DataError(f"{table.path}, line {row + 1}: {dataset.name} has no user {number[row] + 1}")
    if len(np.unique(user)) < len(user):
        raise DataError(f"{table.path} names a user twice; expected one test item for each")
    return user


def _looked_up(table: FileTable, column: str, items: NDArray[np.int32]) -> NDArray[np.int32]:
    number = _integers(table, column)
    unknown = (number >= len(items)) | (items[np.minimum(number, len(items) - 1)] == NO_ITEM)
    if unknown.any():
        row = int(unknown.argmax())
        raise DataError(f"{table.path}, line {row + 1}: item {number[row]}; the data set has no such item")
    return items[number]


def _rows_of(
    table: FileTable, user: NDArray[np.int32], item: NDArray[np.int32], dataset: Dataset
) -> NDArray[np.bool_]:
    wanted = _cell(user, item, dataset)
    present = _cell(dataset.user, dataset.item, dataset)
    if (absent := ~np.isin(wanted, present)).any():
        row = int(absent.argmax())
        raise DataError(
            f"{table.path}, line {row + 1}: {dataset.name} has no interaction of user "
            f"{dataset.users[user[row]]!r} with item {dataset.items[item[row]]!r}"
        )
    return np.isin(present, wanted)


def _refuse_seen(
    table: FileTable, user: NDArray[np.int32], negative: NDArray[np.int32], dataset: Dataset
) -> None:
    cells = _cell(user[:, None], negative, dataset)
    seen = np.isin(cells, _cell(dataset.user, dataset.item, dataset)) & (negative != NO_ITEM)
    if seen.any():
        row, column = (int(index) for index in np.argwhere(seen)[0])
        raise DataError(
            f"{table.path}, line {row + 1}: item {dataset.items[negative[row, column]]!r} is a negative of user "
            f"{dataset.users[user[row]]!r}, who interacted with it"
        )


def _cell(user: NDArray[np.int32], item: NDArray[np.int32], dataset: Dataset) -> NDArray[np.int64]:
    return user.astype(np.int64) * len(dataset.items) + item


def _width(path: Path) -> int:
    """Return the number of negatives in the first line."""
    try:
        with path.open(encoding="utf-8") as file:
            width = file.readline().count("\t")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if not width:
        raise DataError(f"{path}, line 1: no negative; expected '(user,item)' and negatives, tab-separated")
    return width


def _refuse_another_pair(table: FileTable, held: FileTable) -> None:
    """Refuse negatives that are listed for other pairs than the test items, or in another order."""
    pairs = table.texts("pair")
    expected = [f"({u},{i})" for u, i in zip(held.texts("user"), held.texts("item"), strict=True)]
    if len(pairs) != len(expected):
        raise DataError(
            f"{table.path} has {len(pairs)} lines and {held.path.name} {len(expected)}; expected as many"
        )
    for row, (pair, wanted) in enumerate(zip(pairs, expected, strict=True)):
        if pair != wanted:
            raise DataError(f"{table.path}, line {row + 1}: {pair!r}; expected {wanted!r}")
