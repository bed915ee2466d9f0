"""Writing of a data set in the layout ``ml-latest``, which holds times, titles and genres in plain CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from coterie.data.dataset import UNKNOWN_GENRE, Dataset
from coterie.errors import DataError

__all__ = ["write_ml_latest"]


def write_ml_latest(dataset: Dataset, ratings: Path, items: Path) -> None:
    """Write a data set with times, titles and genres in the layout ``ml-latest``."""
    if dataset.time is None or dataset.item_genres is None or dataset.item_titles is None:
        raise DataError(f"{dataset.name} lacks times, genres or titles; expected all three to write it")
    rows = zip(
        (dataset.users[user] for user in dataset.user),
        (dataset.items[item] for item in dataset.item),
        (f"{rating:g}" for rating in dataset.rating.tolist()),
        dataset.time.tolist(),
        strict=True,
    )
    named = (
        "|".join(genre for genre, member in zip(dataset.genres, members, strict=True) if member)
        or UNKNOWN_GENRE
        for members in dataset.item_genres.tolist()
    )
    try:
        ratings.parent.mkdir(parents=True, exist_ok=True)
        _write_csv(ratings, ("userId", "movieId", "rating", "timestamp"), rows)
        _write_csv(
            items, ("movieId", "title", "genres"), zip(dataset.items, dataset.item_titles, named, strict=True)
        )
    except OSError as error:
        raise DataError(f"cannot write {error.filename}: {error.strerror}") from error


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
