"""``coterie recommend`` and ``coterie receipt``: ask a user's host in a local run, in progress or ended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.options import JsonOption
from coterie.cli.output import Output, columns

if TYPE_CHECKING:
    from coterie.launch.local_run import LocalRun

__all__ = ["RunOption", "UserOption", "chosen", "receipt", "recommend"]

_RUNS = Path("runs")

UserOption = Annotated[str, typer.Option("--user", metavar="NAME", help="Name of the user in the data set.")]
RunOption = Annotated[
    Path | None,
    typer.Option("--run", metavar="FOLDER", help="Folder of a run. Absent: the newest in ./runs."),
]


def recommend(
    user: UserOption,
    k: Annotated[int, typer.Option("--k", metavar="N", min=1, max=1000, help="Number of items.")] = 10,
    run: RunOption = None,
    json: JsonOption = False,
) -> None:
    """Recommend items that a user has not seen yet.

    Asks the host that keeps the user's history, over mutual TLS. If the run has ended, its third party, its server
    and that host are started again from their stores while they answer.
    """
    import asyncio

    from rich.text import Text

    from coterie.launch import local_run
    from coterie.telemetry.logs import configure

    configure("error", service="launcher")
    found = asyncio.run(local_run.recommend(chosen(run), user, k))
    output = Output("recommend", as_json=json)
    table = columns()
    titled = any(one.title for one in found.suggestions)
    table.add_column("rank", justify="right")
    table.add_column("item")
    if titled:
        table.add_column("title")
    table.add_column("score", justify="right")
    for one in found.suggestions:
        title = [Text(one.title or "")] if titled else []
        table.add_row(str(one.rank), Text(one.item), *title, f"{one.score:.4f}")
    output.say(
        f"user {user} of run {found.run}, by {found.host} and version {found.version} of the model", table
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
    answer = asyncio.run(local_run.receipt(chosen(run), user))
    output = Output("receipt", as_json=json)
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


def chosen(folder: Path | None) -> LocalRun:
    """Return the run that a command line names, or the newest one."""
    from coterie.launch.local_run import LocalRun, newest

    return newest(_RUNS) if folder is None else LocalRun.at(folder)


def _times(first_ms: int, last_ms: int) -> str:
    """Return a span of time as text, to the minute; its end only if it differs."""
    import datetime

    first, last = (datetime.datetime.fromtimestamp(ms / 1e3, datetime.UTC) for ms in (first_ms, last_ms))
    begin, end = f"{first:%Y-%m-%d %H:%M}", f"{last:%Y-%m-%d %H:%M}"
    if begin == end:
        return begin
    return f"{begin} to\n{end if first.date() != last.date() else f'{last:%H:%M}'}"
