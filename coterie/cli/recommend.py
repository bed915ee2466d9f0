"""``coterie recommend`` and ``coterie receipt``: ask a user's host in a local run, in progress or ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.options import JsonOption
from coterie.cli.output import Output, columns, printable

if TYPE_CHECKING:
    from rich.table import Table

    from coterie.launch.local_run import LocalRun, Suggestion

__all__ = ["RunOption", "UserOption", "chosen", "receipt", "recommend"]

_RUNS = Path("runs")

UserOption = Annotated[str, typer.Option("--user", metavar="NAME", help="Name of the user in the data set.")]
RunOption = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="FOLDER",
        help="Folder of a run. Absent: the newest in ./runs that has not stopped early.",
    ),
]


def recommend(
    user: Annotated[
        str | None, typer.Option("--user", metavar="NAME", help="Name of a user in the data set.")
    ] = None,
    new_user: Annotated[
        Path | None,
        typer.Option(
            "--new-user",
            metavar="FILE",
            help="CSV file of a person who never took part: a column `item`, and `rating` where there are ratings.",
        ),
    ] = None,
    all_users: Annotated[
        bool, typer.Option("--all-users", help="All users of the run, into the file of --out.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="--all-users only: CSV file to write: user,rank,item,score."
        ),
    ] = None,
    k: Annotated[int, typer.Option("--k", metavar="N", min=1, max=1000, help="Number of items.")] = 10,
    run: RunOption = None,
    json: JsonOption = False,
) -> None:
    """Recommend items that a user has not seen yet.

    With --user, asks the host that keeps the user's history, over mutual TLS. If the run has ended, its third party,
    its server and that host are started again from their stores while they answer.

    With --all-users, computes from the folder of a finished run what each user's host would answer. The hosts are
    asked, with services that are started once, where the run's model is sealed or not one of rounds.

    With --new-user, computes from the model of a finished run, here and without any service: nothing of the file is
    kept or sent. Items are named as in the data set. A system that learns more of a user in training than its model
    and the user's items tell refuses.
    """
    _refuse_others(user, new_user, all_users, out)
    from coterie.telemetry.logs import configure

    configure("error", service="launcher")
    output = Output("recommend", as_json=json)
    if new_user is not None:
        _recommend_to_new(output, chosen(output, run), new_user, k)
    elif user is not None:
        _recommend_to_user(output, chosen(output, run), user, k)
    elif out is not None:
        _recommend_to_all(output, chosen(output, run), out, k)


def _refuse_others(user: str | None, new_user: Path | None, all_users: bool, out: Path | None) -> None:
    """Refuse a command line that asks for no user, or for several kinds of them."""
    from coterie.errors import ConfigError

    given = {"--user": user is not None, "--new-user": new_user is not None, "--all-users": all_users}
    named = [name for name, there in given.items() if there]
    if len(named) != 1:
        found = " and ".join(named) if named else "no user"
        raise ConfigError(
            f"{found}; expected one of {', '.join(given)}",
            hint="--user names a user of the run, --new-user the file of a person who never took part",
        )
    if all_users != (out is not None):
        raise ConfigError(
            "--all-users without --out" if all_users else f"--out with {named[0]}",
            hint="--all-users --out FILE writes recommendations to all users of the run into one file",
        )


def _recommend_to_user(output: Output, run: LocalRun, user: str, k: int) -> None:
    import asyncio

    from coterie.launch import local_run

    found = asyncio.run(local_run.recommend(run, user, k))
    output.say(
        f"user {user} of run {found.run}, by {found.host} and version {found.version} of the model",
        _ranked(found.suggestions),
    )
    output.finish(
        {
            "run": found.run,
            "user": found.user,
            "host": found.host,
            "version": found.version,
            "items": found.suggestions,
        }
    )


def _recommend_to_new(output: Output, run: LocalRun, file: Path, k: int) -> None:
    from coterie.launch.new_user import recommend_to_new

    found = recommend_to_new(run, file, k)
    rated = f", {found.rated} of them with a rating" if found.rated else ""
    output.say(
        f"new user of run {found.run}, by {found.system}, version {found.version} of the model and "
        f"{_counted(found.known, 'item')} of {file}{rated}"
    )
    if found.repeated:
        output.say(f"{_counted(found.repeated, 'earlier row')} of items named again later: not counted")
    if found.unknown:
        named = ", ".join(map(repr, found.unknown_items))
        more = ", ..." if found.unknown > len(found.unknown_items) else ""
        output.say(f"{_counted(found.unknown, 'item')} not known to the run, not counted: {named}{more}")
    if found.suggestions:
        output.say(_ranked(found.suggestions))
    else:
        output.say("nothing to recommend: the run learned nothing of these items, too few users had them")
    output.finish(
        {
            "run": found.run,
            "system": found.system,
            "version": found.version,
            "read": {
                name: getattr(found, name)
                for name in ("known", "rated", "repeated", "unknown", "unknown_items")
            },
            "items": found.suggestions,
        }
    )


def _recommend_to_all(output: Output, run: LocalRun, out: Path, k: int) -> None:
    import time

    from coterie.launch.all_users import recommend_into

    begun = time.monotonic()
    found = recommend_into(run, out, k, output.say)
    seconds = time.monotonic() - begun
    output.say(
        f"{out}: {found.rows} items to {_counted(found.users, 'user')} of run {found.run}, by version {found.version} "
        f"of the model, in {seconds:.0f} s"
    )
    if found.without:
        output.say(f"{_counted(found.without, 'user')} without recommendations: nothing is known of them")
    output.finish(
        {
            "run": found.run,
            "version": found.version,
            "path": out,
            "users": found.users,
            "without": found.without,
            "rows": found.rows,
            "seconds": round(seconds, 3),
        }
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _ranked(suggestions: Sequence[Suggestion]) -> Table:
    """Return the table of suggestions; without titles where no item has one."""
    from rich.text import Text

    table = columns()
    titled = any(one.title for one in suggestions)
    table.add_column("rank", justify="right")
    table.add_column("item")
    if titled:
        table.add_column("title")
    table.add_column("score", justify="right")
    for one in suggestions:
        title = [Text(printable(one.title or ""))] if titled else []
        table.add_row(str(one.rank), Text(printable(one.item)), *title, f"{one.score:.4f}")
    return table


def receipt(user: UserOption, run: RunOption = None, json: JsonOption = False) -> None:
    """Print what has left a user's host, to whom, and how protected.

    Also prints what the host refused. The receipt of each user includes what the host sent for all its users together.
    Times are UTC.
    """
    import asyncio

    from rich.text import Text

    from coterie.launch import local_run
    from coterie.telemetry.logs import configure
    from coterie.telemetry.quantities import volume

    configure("error", service="launcher")
    output = Output("receipt", as_json=json)
    answer = asyncio.run(local_run.receipt(chosen(output, run), user))
    table = columns("to", "what", "protection")
    for name in ("values", "bytes"):
        table.add_column(name, justify="right")
    table.add_column("when, UTC", no_wrap=True)
    for one in answer.disclosures:
        table.add_row(
            Text(one.recipient),
            Text(one.kind),
            Text(one.protection),
            str(one.count),
            volume(one.bytes),
            _times(one.first_ms, one.last_ms),
        )
    output.say(table)
    if answer.declined:
        refused = columns("asked by", "refused, because")
        refused.add_column("times", justify="right")
        refused.add_column("when, UTC", no_wrap=True)
        for no in answer.declined:
            refused.add_row(
                Text(no.recipient), Text(no.reason), str(no.count), _times(no.first_ms, no.last_ms)
            )
        output.say("", refused)
    sent = ("recipient", "kind", "protection", "count", "bytes", "first_ms", "last_ms")
    declined = ("recipient", "reason", "count", "first_ms", "last_ms")
    output.finish(
        {
            "user": user,
            "disclosures": [{name: getattr(one, name) for name in sent} for one in answer.disclosures],
            "declined": [{name: getattr(one, name) for name in declined} for one in answer.declined],
        }
    )


def chosen(output: Output, folder: Path | None) -> LocalRun:
    """Return the run that a command line names, or the newest one that has not stopped before its end."""
    from coterie.launch.local_run import LocalRun, newest_answering

    if folder is not None:
        return LocalRun.at(folder)
    run, stopped = newest_answering(_RUNS)
    for run_id in stopped:
        output.say(f"run {run_id} stopped before its end: passed over")
    return run


def _times(first_ms: int, last_ms: int) -> str:
    """Return a span of time as text, to the minute; its end only if it differs."""
    import datetime

    first, last = (datetime.datetime.fromtimestamp(ms / 1e3, datetime.UTC) for ms in (first_ms, last_ms))
    begin, end = f"{first:%Y-%m-%d %H:%M}", f"{last:%Y-%m-%d %H:%M}"
    if begin == end:
        return begin
    return f"{begin} to\n{end if first.date() != last.date() else f'{last:%H:%M}'}"
