"""``coterie data``: describe, generate and fetch data sets."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.exits import exits
from coterie.cli.options import JsonOption
from coterie.cli.output import Output
from coterie.errors import DataError

if TYPE_CHECKING:
    from coterie.data import Dataset

__all__ = ["app"]

app = typer.Typer(help="Describe, generate and fetch data sets.", no_args_is_help=True)

_RATINGS, _ITEMS = "ratings.csv", "movies.csv"
"""Files of the layout ``ml-latest``, which holds times, titles and genres in plain CSV."""


@app.command(epilog=exits(DataError))
def describe(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Data set: a file, or the folder of a known data set.")
    ],
    layout: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="LAYOUT",
            help="Layout: ml-100k, ml-1m, ml-latest, recbole, csv, tsv or parquet. Absent: recognised.",
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OURS=THEIRS",
            help="Name of the column for user, item, rating or time, in CSV, TSV and Parquet. May be repeated.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the size of a data set and what it lacks.

    Users, items, interactions, sparsity, time span, ratings and genres; what cannot be done without what is missing;
    what reading it changed.
    """
    from coterie.data import describe as summarise
    from coterie.data import read

    summary = summarise(read(path, layout, columns=_columns(column or ())))
    output = Output("data describe", as_json=as_json)
    output.say(*_prose(summary))
    output.finish(summary)


@app.command(epilog=exits(DataError))
def generate(
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder for ratings.csv and movies.csv.")],
    users: Annotated[int, typer.Option(metavar="N", min=1, help="Number of users.")] = 300,
    items: Annotated[int, typer.Option(metavar="N", min=1, help="Number of items.")] = 400,
    interactions: Annotated[int, typer.Option(metavar="N", min=1, help="Number of interactions.")] = 24_000,
    genres: Annotated[int, typer.Option(metavar="N", min=1, help="Number of genres.")] = 6,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, help="Seed; the same seed gives the same files.")
    ] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a synthetic data set as CSV.

    In the layout of the MovieLens releases (ml-latest); with genres, times and a latent structure to learn.
    """
    from coterie.data import SyntheticSpec
    from coterie.data import generate as synthesise

    spec = SyntheticSpec(users=users, items=items, interactions=interactions, genres=genres, seed=seed)
    files = [out / _RATINGS, out / _ITEMS]
    present = [str(file) for file in files if file.exists()]
    if present and not overwrite:
        raise DataError(f"{' and '.join(present)} already there", hint="--overwrite replaces it")
    _write(synthesise(spec), *files)

    output = Output("data generate", as_json=as_json)
    output.say(f"{interactions:,} interactions of {users:,} users with {items:,} items in {out}")
    output.finish({"path": out, "files": files, "layout": "ml-latest", "spec": spec})


@app.command(epilog=exits(DataError))
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Data set: ml-100k, ml-1m or ml-latest-small.")],
    target: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder in which the data set gets a folder.")
    ] = Path("data"),
    as_json: JsonOption = False,
) -> None:
    """Download a data set from its publisher and check it.

    Without a network it says where the publisher keeps the set and how to place it by hand.
    """
    from coterie.data.fetch import fetch as download

    folder = download(name, target)
    output = Output("data fetch", as_json=as_json)
    output.say(f"{name} is in {folder}")
    output.finish({"name": name, "path": folder})


def _columns(pairs: Sequence[str]) -> dict[str, str]:
    columns = {}
    for pair in pairs:
        ours, equals, theirs = pair.partition("=")
        if not (ours and equals and theirs):
            raise typer.BadParameter(
                f"{pair!r}: expected OURS=THEIRS, as in user=customer", param_hint="--column"
            )
        columns[ours.strip()] = theirs.strip()
    return columns


def _prose(summary: Mapping[str, Any]) -> Iterable[Any]:
    from rich.table import Table

    sizes = Table(box=None, show_header=False, pad_edge=False)
    for name in ("users", "items", "interactions"):
        sizes.add_row(name, f"{summary[name]:,}")
    sizes.add_row("sparsity", f"{summary['sparsity']:.2%}")
    if span := summary["time_span"]:
        sizes.add_row("time", f"{span['first']} to {span['last']} ({span['days']:,} days)")
    for name in ("ratings", "genres"):
        if counts := summary[name]:
            sizes.add_row(name, ", ".join(f"{value}: {count:,}" for value, count in counts.items()))
    yield summary["name"]
    yield sizes
    for remark in summary["missing"]:
        yield f"missing: {remark}"
    for remark in summary["notes"]:
        yield f"note: {remark}"


def _write(dataset: Dataset, ratings: Path, items: Path) -> None:
    """Write a data set with times, titles and genres in the layout ``ml-latest``."""
    from coterie.data.dataset import UNKNOWN_GENRE

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
