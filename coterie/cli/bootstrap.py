"""``coterie bootstrap``: lay out a federation across containers or machines before its first process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import JsonOption, SetOption
from coterie.cli.output import Output
from coterie.errors import ConfigError

__all__ = ["bootstrap"]


def bootstrap(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File that describes the run, as examples/drift.toml.")
    ],
    into: Annotated[
        Path, typer.Option("--into", metavar="FOLDER", help="Folder in which each party gets a folder.")
    ],
    address: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PARTY=HOST:PORT",
            help="Address of a party, as in cos=10.0.0.5:7443. Absent: PARTY:7443. May be repeated.",
        ),
    ] = None,
    invite: Annotated[
        bool,
        typer.Option(
            "--invite",
            help="Write an invitation for `coterie enrol` instead of each party's configuration.",
        ),
    ] = False,
    sets: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Prepare a federation for containers or several machines.

    Makes the certificate authority, a folder for each party with its token, data and configuration, and the
    operator's order. Each folder belongs to one party: mount it, or copy it to the party's machine, and start
    `coterie serve ROLE --config FOLDER/config.toml` there. Folders that exist are not changed. If --invite is given,
    parties make keys and configurations on their own machines: `coterie enrol FOLDER/invitation --into NEW`.
    """
    output = Output("bootstrap", as_json=json)
    addresses = dict(_pair(text) for text in address or ())
    from coterie.config.load import load
    from coterie.config.run import RunSettings

    settings = load(RunSettings, file, sets=sets or ()).settings

    from coterie.launch import bootstrap as steps
    from coterie.secure_sum.registry import KEYED
    from coterie.studies.run_plan import new_run_id

    order = steps.held_order(into)
    if order is not None:
        output.say(f"{into} holds the run {order.run_id} already; nothing is changed")
    else:
        order = steps.bootstrap(
            settings, into, new_run_id(settings.name), addresses=addresses, invitations=invite
        )
        holders = (
            f", {settings.encryption.holders} decrypting clients"
            if settings.secure_sum == "encrypted"
            else ""
        )
        output.say(
            f"run {order.run_id}: {order.owners} data owners, {settings.federation.hosts} client hosts with "
            f"{order.users} users{holders}; one folder for each below {into}"
        )
        if invite and settings.secure_sum in KEYED:
            output.say(
                f"{into / 'operator' / steps.ROSTER_SIGNS} signs the roster of those who hold the key of sums, once "
                "they have joined: `coterie certs participants` prints their ids, `coterie certs roster` signs them"
            )
        if invite and settings.own.combines:
            output.say(
                f"{into / 'operator' / steps.ROSTER_SIGNS} signs the roster of the client hosts that hold the key of "
                "meta-latents, once they have joined: `coterie certs roster`"
            )
        if invite and settings.own.expands:
            output.say(
                f"{into / 'operator' / steps.ROSTER_SIGNS} signs the roster of the client hosts that hold the graph "
                "key, once they have joined: `coterie certs roster --purpose graph`"
            )
    output.finish({"run_id": order.run_id, "folder": into, "owners": order.owners, "users": order.users})


def _pair(text: str) -> tuple[str, str]:
    party, equals, place = text.partition("=")
    if not equals or ":" not in place:
        raise ConfigError(f"--address {text!r}: expected PARTY=HOST:PORT, as in cos=10.0.0.5:7443")
    return party, place
