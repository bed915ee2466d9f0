"""``coterie backup`` and ``coterie restore``: write the state of a service into one file, and restore it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.options import JsonOption, SetOption
from coterie.cli.output import Output

if TYPE_CHECKING:
    from coterie.store.backup import Manifest

__all__ = ["backup", "restore"]

_RoleArgument = Annotated[
    str,
    typer.Argument(metavar="ROLE", help="Role: cos, data-owner, client, decrypting-client or thirdparty."),
]
_ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="Configuration of the service.")
]


def backup(
    role: _RoleArgument,
    archive: Annotated[Path, typer.Argument(metavar="ARCHIVE", help="File to write; it must not exist.")],
    config: _ConfigOption = None,
    sets: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Write the state of a service, its keys included, into a file.

    A COS, a data owner and a third party may run meanwhile; stop a client host or a decrypting client first. The runs
    of a COS in PostgreSQL are read from there. The file holds private keys and data: protect it like the state folder.
    """
    from coterie.config.load import load_service
    from coterie.launch.backup import back_up_service

    manifest = back_up_service(role, load_service(role, config, sets=sets or ()).settings, archive)
    _told("backup", f"{archive}: the state of a {role}", manifest, as_json=json)


def restore(
    role: _RoleArgument,
    archive: Annotated[Path, typer.Argument(metavar="ARCHIVE", help="File that `coterie backup` wrote.")],
    config: _ConfigOption = None,
    nothing_since: Annotated[
        bool,
        typer.Option(
            "--nothing-since",
            help="State that the service has not run since the backup; it then goes on in protected sums.",
        ),
    ] = False,
    other_run: Annotated[
        bool,
        typer.Option(
            "--other-run",
            help="Take a backup made in another run; the service takes no part in protected sums of the present one.",
        ),
    ] = False,
    sets: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Restore the state of a service from a backup.

    The whole file is checked before anything is written. State folder and database must be absent or empty. A backup
    of another party, run or federation is refused. A restored
    party takes no further part in protected sums of its run, because the backup does not hold its answers since;
    --nothing-since states that there were none.
    """
    from coterie.config.load import load_service
    from coterie.launch.backup import restore_service

    settings = load_service(role, config, sets=sets or ()).settings
    manifest = restore_service(role, settings, archive, nothing_since=nothing_since, other_run=other_run)
    _told("restore", f"{settings.state}: the state of a {role}", manifest, _since(manifest), as_json=json)


def _since(manifest: Manifest) -> str:
    """Return what a restored state lacks, and what follows for the federation."""
    import time

    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest.made))
    follows = {
        "cos": "rounds and versions of the model since then are lost; the server says which once its parties tell it",
        "thirdparty": "enrolments, revocations and keys since then are forgotten; parties that were shown more of its "
        "log stop, until they are told to take it (docs/upkeep.md)",
    }.get(manifest.role, "its log says at the next start what it lacks of the run")
    return f"as it was at {made}: {follows}"


def _told(command: str, what: str, manifest: Manifest, *more: str, as_json: bool) -> None:
    output = Output(command, as_json=as_json)
    size = sum(size for size, _, _ in manifest.files.values())
    output.say(f"{what}, {len(manifest.files)} files, {size:,} bytes", *more)
    output.finish({"role": manifest.role, "made": manifest.made, "files": len(manifest.files), "bytes": size})
