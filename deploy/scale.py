#!/usr/bin/env python3
"""Write a compose overlay that adds client hosts, data owners or decrypting clients to the files beside this script.

    deploy/scale.py --hosts 8 --owners 5 --holders 5 > deploy/docker-compose.mine.yml
    docker compose -f docker-compose.yml -f docker-compose.privmvmf.yml -f docker-compose.mine.yml up

The overlay must be the last file of the command.  Added services are named like those of the other files.  A number
that is not given leaves that kind of service unchanged.  The script needs the standard library only.
"""

from __future__ import annotations

import argparse
import sys

MOST = 32
"""Largest number of services of a kind: the image of `bootstrap` has so many folders of each."""

BASE = {"host": 2, "owner": 3, "key": 3}
"""Numbers of services without the overlay, by kind; an overlay cannot remove services."""

_TARGETS = {"host": "client", "owner": "data-owner", "key": "decrypting-client"}

_HEADER = """\
# Overlay of docker-compose.yml, to be named after any other overlay: {told}.
#
#   docker compose -f docker-compose.yml -f docker-compose.scale.yml up
#
# Written by deploy/scale.py{options}; the script writes overlays for other numbers.
"""


_WAN_HEADER = """\
# Overlay of docker-compose.wan.yml: emulators for the services that the overlay of {told} adds.
#
#   docker compose -f docker-compose.yml -f docker-compose.wan.yml -f docker-compose.scale.yml \\
#     -f docker-compose.scale.wan.yml up
#
# Written by deploy/scale.py{options} --wan; the script writes overlays for other numbers.
"""


def overlay(
    hosts: int | None = None, owners: int | None = None, holders: int | None = None, *, wan: bool = False
) -> str:
    """Return the overlay, YAML.

    Parameters
    ----------
    hosts, owners, holders : int, optional
        Numbers of client hosts, active data owners and decrypting clients; None leaves a number unchanged.  Active
        owners are those of DRIFT and PrivMVMF; FedNCF always has one.
    wan : bool
        Whether to return the overlay of emulators for the added services instead.

    Raises
    ------
    ValueError
        A number is out of range, all numbers are None, or ``wan`` is set and no service is added.
    """
    wanted = {"host": hosts, "owner": owners, "key": holders}
    for kind, count in wanted.items():
        if count is not None and not BASE[kind] <= count <= MOST:
            raise ValueError(f"--{_option(kind)} {count}: expected {BASE[kind]} to {MOST}")
    environment = {
        "COTERIE_FEDERATION__HOSTS": hosts,
        "COTERIE_FEDERATION__OWNERS": owners,
        "COTERIE_FEDERATION__OWNER_PROCESSES": owners,
        "COTERIE_MVMF__ITEM_SERVERS": owners,
        "COTERIE_ENCRYPTION__HOLDERS": holders,
    }
    given = {name: count for name, count in environment.items() if count is not None}
    if not given:
        raise ValueError("nothing to change: expected --hosts, --owners or --holders")
    more = [f"{kind}-{n}" for kind, count in wanted.items() for n in range(BASE[kind], count or 0)]

    counts = {kind: count for kind, count in wanted.items() if count is not None}
    told = {
        "told": ", ".join(f"{count} {_NAMES[kind]}" for kind, count in counts.items()),
        "options": "".join(f" --{_option(kind)} {count}" for kind, count in counts.items()),
    }
    if wan:
        if not more:
            raise ValueError(
                "--wan: no service is added; docker-compose.wan.yml has emulators for the others"
            )
        return _WAN_HEADER.format(**told) + "services:\n" + "".join(map(_emulator, more))
    lines = [
        _HEADER.format(**told) + "services:",
        "  bootstrap:",
        "    environment:",
        *(f'      {name}: "{count}"' for name, count in given.items()),
    ]
    if more:
        lines += ["    volumes:", *(f"      - {name}:/federation/{name}" for name in more)]
    for n in range(BASE["owner"] if owners else 0):
        # Another overlay may have made this owner idle (its command is `version`).
        lines += [
            f"  owner-{n}:",
            "    command: serve data-owner --config /party/config.toml",
            "    restart: unless-stopped",
        ]
    for name in more:
        lines += [
            f"  {name}:",
            f"    extends: {{file: services.yml, service: {_TARGETS[name.partition('-')[0]]}}}",
            f'    volumes: ["{name}:/party"]',
            "    depends_on:",
            "      cos: {condition: service_healthy}",
        ]
    if more:
        lines += ["  operator:", "    depends_on:"]
        lines += [f"      {name}: {{condition: service_started}}" for name in more]
        lines += ["", "volumes:", *(f"  {name}:" for name in more)]
    return "\n".join(lines) + "\n"


def _emulator(name: str) -> str:
    variable = f"COTERIE_WAN_{name.upper().replace('-', '_')}"
    return f"""\
  wan-{name}:
    extends: {{file: services.yml, service: wan}}
    network_mode: service:{name}
    command: --from-environment {variable} --from-environment COTERIE_WAN
    environment: [COTERIE_WAN, {variable}]
"""


_NAMES = {"host": "client hosts", "owner": "data owners", "key": "decrypting clients"}


def _option(kind: str) -> str:
    return {"host": "hosts", "owner": "owners", "key": "holders"}[kind]


def main(arguments: list[str] | None = None) -> None:
    """Print the overlay."""
    parser = argparse.ArgumentParser(
        prog="deploy/scale.py",
        description="Write a compose overlay for more parties than docker-compose.yml has.",
        epilog="Name it after all other files: docker compose -f docker-compose.yml -f OVERLAY up",
    )
    parser.add_argument("--hosts", type=int, metavar="N", help=f"client hosts, {BASE['host']} to {MOST}")
    parser.add_argument(
        "--owners",
        type=int,
        metavar="M",
        help=f"active data owners, {BASE['owner']} to {MOST}; not for FedNCF",
    )
    parser.add_argument(
        "--holders",
        type=int,
        metavar="K",
        help=f"decrypting clients, {BASE['key']} to {MOST}; with docker-compose.privmvmf.yml only",
    )
    parser.add_argument(
        "--wan",
        action="store_true",
        help="write the overlay of emulators for the added services instead, for docker-compose.wan.yml",
    )
    given = parser.parse_args(arguments)
    try:
        sys.stdout.write(overlay(given.hosts, given.owners, given.holders, wan=given.wan))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
