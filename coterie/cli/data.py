"""``coterie data``: describe, split, generate and fetch data sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from coterie.cli.exits import exits
from coterie.cli.options import JsonOption, located
from coterie.cli.output import Output
from coterie.errors import DataError

if TYPE_CHECKING:
    from coterie.data import Dataset
    from coterie.systems.run_settings import DataSettings
    from coterie.systems.settings import ConfigModel

__all__ = ["app"]

app = typer.Typer(help="Describe, split, generate and fetch data sets.", no_args_is_help=True)

_Model = TypeVar("_Model", bound="ConfigModel")

_RATINGS, _ITEMS = "ratings.csv", "movies.csv"
"""Files of the layout ``ml-latest``, which holds times, titles and genres in plain CSV."""

_KINDS_WITH = {
    "train": ("temporal", "random", "cold-users", "cold-items"),
    "ties": ("leave-last-out",),
}
"""Kinds of splits that an option decides about; the others would ignore it."""

_Path = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help="Data set: a file, or the folder of a known data set; or a name below data/ or COTERIE_DATA.",
    ),
]
_Layout = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="LAYOUT",
        help="Layout: ml-100k, ml-1m, ml-latest, recbole, foursquare, mat, numpy, csv, tsv or parquet. Absent: "
        "recognised.",
    ),
]
_Column = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OURS=THEIRS",
        help="Name of the column for user, item, rating or time, in CSV, TSV, Parquet, NumPy. May be repeated.",
    ),
]
_RatingRange = Annotated[
    tuple[float, float] | None,
    typer.Option(
        metavar="LOWEST HIGHEST", help="Ratings outside of this range are errors (data.rating_range)."
    ),
]
_MinUser = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, help="Fewest interactions of a user who is kept, counted once (data.min_user)."
    ),
]
_MinItem = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, help="Fewest interactions of an item that is kept, counted once (data.min_item)."
    ),
]
_KCore = Annotated[
    int,
    typer.Option(
        metavar="K",
        min=1,
        help="Fewest interactions of all users and items that are kept, counted until nothing drops out (data.k_core).",
    ),
]


@app.command(epilog=exits(DataError))
def describe(
    path: _Path,
    layout: _Layout = None,
    column: _Column = None,
    rating_range: _RatingRange = None,
    min_user: _MinUser = 1,
    min_item: _MinItem = 1,
    k_core: _KCore = 1,
    as_json: JsonOption = False,
) -> None:
    """Print the size of a data set and what it lacks.

    Users, items, interactions, sparsity, time span, ratings and genres; what cannot be done without what is missing;
    what reading it changed and filters left out.
    """
    from coterie.data import describe as summarise

    _, dataset = _read(path, layout, column, rating_range, min_user, min_item, k_core)
    summary = summarise(dataset)
    output = Output("data describe", as_json=as_json)
    output.say(*_prose(summary))
    output.finish(summary)


@app.command(epilog=exits(DataError))
def split(
    path: _Path,
    kind: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="temporal, random, leave-last-out, leave-random-out, published, cold-users or cold-items.",
        ),
    ] = "temporal",
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, help="Seed; a run with it has the same split.")
    ] = 0,
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")] = Path("split.csv"),
    train: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Share that does not test (split.train); for temporal, random, cold-users and cold-items.",
        ),
    ] = None,
    validation: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Share of the training part that validates (split.validation)."),
    ] = None,
    ties: Annotated[
        str | None, typer.Option(metavar="RULE", help="hash or file (split.ties); for leave-last-out.")
    ] = None,
    layout: _Layout = None,
    column: _Column = None,
    rating_range: _RatingRange = None,
    min_user: _MinUser = 1,
    min_item: _MinItem = 1,
    k_core: _KCore = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the split of a data set as CSV.

    A row has user, item and part (train, validation or test) of an interaction. A run with split.kind = "file" and
    split.path reads the file, except one of kind cold-items; with the SHA-256 that is printed as split.sha256 it
    refuses any other split.
    """
    from coterie.data.split import PARTS
    from coterie.studies.run_data import divided
    from coterie.systems.run_settings import SplitSettings

    given = {"kind": kind, "train": train, "validation": validation, "ties": ties}
    if kind == "file":
        raise DataError("a split of kind 'file' is read from a file; expected another kind")
    options = _checked(SplitSettings, {name: value for name, value in given.items() if value is not None})
    for option, kinds in _KINDS_WITH.items():
        if given[option] is not None and kind not in kinds:
            raise DataError(
                f"--{option} with kind {kind!r}, which ignores it; expected kind {' or '.join(map(repr, kinds))}"
            )
    source = located(path)
    _refuse_out(out, source, overwrite=overwrite)
    data, dataset = _read(source, layout, column, rating_range, min_user, min_item, k_core)
    made = divided(data, options, dataset, seed)
    try:
        made.write(out, dataset)
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror}") from error
    sizes = {name: int((made.part == number).sum()) for number, name in enumerate(PARTS)}
    digest = made.sha256(dataset)

    output = Output("data split", as_json=as_json)
    output.say(f"{', '.join(f'{name} {size:,}' for name, size in sizes.items())} interactions in {out}")
    output.say(f"split_sha256 {digest}")
    notes = []
    if kind == "cold-items":
        notes.append(
            f"no run of Coterie reads this file, as a system has to know beforehand that items are new: split.kind = "
            f"{kind!r} makes the same split in a run with seed {seed}"
        )
    output.say(*(f"note: {note}" for note in notes))
    output.finish(
        {"path": out, "split_sha256": digest, "kind": kind, "seed": seed, "parts": sizes, "notes": notes}
    )


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
    from coterie.data.written import write_ml_latest

    write_ml_latest(synthesise(spec), *files)

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


def _refuse_out(out: Path, source: Path, *, overwrite: bool) -> None:
    """Check that a split may be written to a file: it is no part of the data set, and is new or may be replaced.

    Raises
    ------
    DataError
        It is, or it may not.
    """
    of_data = out.samefile(source) if out.exists() and source.exists() else False
    if of_data or (source.is_dir() and source.resolve() in out.resolve().parents):
        raise DataError(
            f"--out {out} is {'' if of_data else 'in '}the data set {source}; expected a file outside of it",
            hint="--out names the file of the split",
        )
    if out.exists() and not out.is_file():
        raise DataError(f"--out {out} is no regular file; expected the name of a file to write")
    if out.exists() and not overwrite:
        raise DataError(f"{out} already there", hint="--overwrite replaces it")


def _read(
    path: Path,
    layout: str | None,
    column: Sequence[str] | None,
    rating_range: tuple[float, float] | None,
    min_user: int,
    min_item: int,
    k_core: int,
) -> tuple[DataSettings, Dataset]:
    """Read a data set as a run with the same options would, and return the run's settings, too."""
    from coterie.studies.run_data import read_interactions
    from coterie.systems.run_settings import DataSettings

    found = located(path)
    options = _checked(
        DataSettings,
        {
            "path": found,
            "layout": layout,
            "columns": _columns(column or ()),
            "rating_range": rating_range,
            "min_user": min_user,
            "min_item": min_item,
            "k_core": k_core,
        },
    )
    return options, read_interactions(found, options)


def _checked(model: type[_Model], values: Mapping[str, Any]) -> _Model:
    """Return settings of values from the command line.

    Raises
    ------
    DataError
        A value that the settings refuse.
    """
    from pydantic import ValidationError

    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        raise DataError(f"{key}: {said}" if key else said) from None


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
