"""``coterie enrol``: join a federation by an invitation that was made on another machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.options import JsonOption, SetOption
from coterie.cli.output import Output

if TYPE_CHECKING:
    from coterie.launch.joining import Enrol
    from coterie.net.credentials import TlsFiles

__all__ = ["enrol"]


def enrol(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="INVITATION",
            help="Invitation, written by `coterie certs invite` or `coterie bootstrap --invite`.",
        ),
    ],
    into: Annotated[
        Path, typer.Option("--into", metavar="FOLDER", help="Folder of the party, made when absent.")
    ],
    fingerprint: Annotated[
        str | None,
        typer.Option(
            metavar="SHA256",
            help="Fingerprint of the authority, as its operator told it over another channel.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Longest time to try to reach the third party.")
    ] = 60.0,
    sets: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Join a federation on this machine, by an invitation.

    Makes the party's keys, which never leave its folder, gets a certificate, and writes the configuration. Files that
    the invitation names, such as histories, must be beside it; --set names others, and the address to listen at.
    Afterwards `coterie serve ROLE --config FOLDER/config.toml` runs the party. After a failure, repeat the command.
    """
    output = Output("enrol", as_json=json)

    import asyncio

    from coterie.launch.invitation import Invitation
    from coterie.launch.joining import join, reads
    from coterie.telemetry.logs import configure

    invitation = Invitation.load(file)
    if fingerprint is not None:
        invitation.check_fingerprint(fingerprint)
    output.say(f"invitation for {invitation.party}, authority {invitation.fingerprint}")
    output.say(*(f"  {line}" for line in reads(invitation)))
    configure("warning", service=invitation.party)
    joined = asyncio.run(
        join(invitation, file.parent, into, _enrolling(invitation.role), sets=sets or (), timeout_s=timeout)
    )
    operating = invitation.role == "operator"
    start = f"coterie {'operate' if operating else f'serve {invitation.role}'} --config {joined.config}"
    output.say(f"{joined.tls.identity()} is enrolled; start it with `{start}`")
    for path in joined.missing:
        output.say(f"{path} is still to come from the operator, once everybody whom it names has joined")
    output.finish(
        {
            "role": invitation.role,
            "name": invitation.name,
            "config": joined.config,
            "authority": invitation.fingerprint,
            "fingerprint": joined.tls.identity().fingerprint.hex(),
            "copied": joined.copied,
            "missing": joined.missing,
            "start": start,
        }
    )


def _enrolling(role: str) -> Enrol:
    """Return the function that enrols a party of a role, in the same way as its service at its start."""
    if role != "operator":
        from coterie.cli.serve import find_service

        return find_service(role).enrol

    async def as_operator(settings: Any, tls: TlsFiles) -> None:
        from coterie.net.enrolment import enrol as enrol_party

        await enrol_party("operator", settings, tls, ())

    return as_operator
