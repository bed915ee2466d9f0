"""``coterie audit``: check the third party's transparency log, and the audit logs of services."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.exits import exits
from coterie.cli.options import JsonOption
from coterie.cli.output import Output, columns
from coterie.errors import (
    CertificateError,
    ConfigError,
    CryptoError,
    PeerError,
    PreflightError,
    RunError,
    StoreError,
)

__all__ = ["app"]

app = typer.Typer(help="Check the third party's log, and the audit logs of services.", no_args_is_help=True)

_RUNS = Path("runs")
_EXITS = exits(
    ConfigError,
    PreflightError,
    CertificateError,
    CryptoError,
    StoreError,
    PeerError,
    RunError,
    interrupted=True,
)


@app.command(epilog=_EXITS)
def log(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="Configuration of an operator, written by `coterie bootstrap`.",
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", metavar="FOLDER", help="Folder of a local run in progress. Absent: the newest in ./runs."
        ),
    ] = None,
    state: Annotated[
        list[Path] | None,
        typer.Option(
            "--state",
            metavar="FOLDER",
            help="State folder of a party, whose newest head and evidence are checked. Alone, they are checked by "
            "their signatures, without the log.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Replay the third party's log, and compare it with what parties keep.

    Fetches all entries, computes the root again, and verifies the signature of the head. Prints entries by kind, and
    names that were certified for several keys. Ends with status 31 when the log does not have its root, a kept head
    is of another log, or evidence holds against the third party.
    """
    output = Output("audit log", as_json=json)
    if config is not None and run is not None:
        raise ConfigError("both --config and --run", hint="one says where the federation is")
    import asyncio

    from coterie.config.load import load
    from coterie.config.operate import OperateSettings
    from coterie.launch.local_run import LocalRun, newest
    from coterie.launch.log_audit import LogAudit, judge_kept, of_local_run, of_operator, replay
    from coterie.telemetry.logs import configure

    configure("error", service="operator")
    states = state or []
    if states and config is None and run is None:
        compared, problems = judge_kept(states)
        _conclude(output, problems)
        output.say(f"{compared} heads, which do not contradict each other; the log was not asked")
        output.finish({"compared": compared})
        return

    async def work() -> LogAudit:
        if config is not None:
            settings = load(OperateSettings, config, relative_to=config.parent).settings
            return await replay(await of_operator(settings, states))
        return await replay(of_local_run(newest(_RUNS) if run is None else LocalRun.at(run)))

    found = asyncio.run(work())
    table = columns("kind", "entries")
    for kind, count in found.kinds.items():
        table.add_row(kind, str(count))
    output.say(f"log of {found.thirdparty}: {found.head.size} entries, root {found.head.root.hex()}", table)
    for name, count in found.several_keys.items():
        output.say(f"{name} was certified for {count} keys: did its party make a new one?")
    _conclude(output, found.problems)
    output.say(f"{found.compared} kept heads are of this log")
    output.finish(
        {
            "thirdparty": found.thirdparty,
            "size": found.head.size,
            "root": found.head.root.hex(),
            "kinds": found.kinds,
            "several_keys": found.several_keys,
            "compared": found.compared,
        }
    )


@app.command(epilog=exits(ConfigError, StoreError))
def verify(
    state: Annotated[Path, typer.Argument(metavar="STATE", help="State folder of a service, which may run.")],
    head: Annotated[
        str | None,
        typer.Option(
            "--head",
            metavar="N:HASH",
            help="Head that this command printed earlier: the log must still have this record.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check whether a service's audit log was altered.

    A record that was changed, put in or taken out breaks its chain of hashes. Prints the number of records of each
    kind and the log's head. Keep the head elsewhere: only by an earlier head does a log show that its end was cut off,
    or that the whole of it was written anew. Ends with status 40 when the log does not hold.
    """
    from coterie.telemetry.audit_log import verify as verified

    output = Output("audit verify", as_json=json)
    noted: tuple[int, str] | None = None
    if head is not None:
        number, _, digest = head.partition(":")
        if not number.isdecimal() or len(digest) != 64:
            raise ConfigError(
                f"{head!r} is no head of an audit log", hint="expected N:HASH, as this command prints it"
            )
        noted = int(number), digest
    found = verified(state)
    if noted is not None and found.hashes.get(noted[0]) != noted[1]:
        what = "is missing" if noted[0] not in found.hashes else "is another one"
        found.problems.append(f"record {noted[0]} {what}, by the head that was noted")
    table = columns("kind", "records")
    for kind, count in sorted(found.kinds.items()):
        table.add_row(kind, str(count))
    output.say(table, *found.problems)
    if found.problems:
        more = f", and {len(found.problems) - 1} more" if len(found.problems) > 1 else ""
        raise StoreError(
            f"the audit log in {state} does not hold: {found.problems[0]}{more}",
            hint="keep its files as they are; a copy elsewhere shows what was there",
        )
    output.say(f"records {found.first} to {found.last}, head {found.last}:{found.head}")
    output.finish({"first": found.first, "last": found.last, "head": found.head, "kinds": found.kinds})


def _conclude(output: Output, problems: list[str]) -> None:
    """Print what does not hold, and end with an error if there is anything."""
    output.say(*problems)
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise CryptoError(
            f"the third party's log does not hold: {problems[0]}{more}",
            hint="keep the log folders of all parties, and rely on nothing of this third party until it is explained",
        )
