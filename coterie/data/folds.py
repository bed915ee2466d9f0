"""The five folds that are published with MovieLens 100K: disjoint test sets of a fifth of the ratings each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.data.dataset import Dataset
from coterie.data.tables import Dialect, read_text
from coterie.errors import DataError

__all__ = ["FOLDS", "fold_parts", "has_folds"]

FOLDS = 5
"""Number of folds; fold n tests by ``u<n>.test`` and trains on ``u<n>.base``."""

_COLUMNS = ("user id", "item id", "rating", "timestamp")


def has_folds(folder: Path) -> bool:
    """Return whether a folder has the folds of MovieLens 100K."""
    return (folder / "u1.test").is_file()


def fold_parts(folder: Path, fold: int, dataset: Dataset) -> NDArray[np.bool_]:
    """Return which interactions a published fold tests by.

    Parameters
    ----------
    folder : Path
        Folder of MovieLens 100K.
    fold : int
        Number of the fold, 1 to 5.
    dataset : Dataset
        What was read from the folder, or a part of it.

    Returns
    -------
    ndarray of bool, shape (N,)

    Raises
    ------
    DataError
        A file is missing or malformed, or an interaction is in both files of the fold or in none.
    """
    number = {key: at for at, key in enumerate(dataset.items)}
    users = {key: at for at, key in enumerate(dataset.users)}
    own = dataset.user.astype(np.int64) * len(dataset.items) + dataset.item
    marked = []
    for part in ("base", "test"):
        table = read_text(folder / f"u{fold}.{part}", Dialect("\t"), _COLUMNS)
        pairs = zip(table.texts("user id"), table.texts("item id"), strict=True)
        listed = [
            users[user] * len(dataset.items) + number[item]
            for user, item in pairs
            if user in users and item in number
        ]
        marked.append(np.isin(own, np.array(listed, np.int64)))
    train, test = marked
    for wrong, where in ((train & test, "both in {} and in {}"), (~train & ~test, "neither in {} nor in {}")):
        if wrong.any():
            n = int(wrong.argmax())
            pair = dataset.users[dataset.user[n]], dataset.items[dataset.item[n]]
            raise DataError(
                f"{folder}: the rating of item {pair[1]} by user {pair[0]} is "
                f"{where.format(f'u{fold}.base', f'u{fold}.test')}; expected every rating in one of them"
            )
    return test
