#!/usr/bin/env python3
"""Write a compose overlay for more client hosts, data owners or decrypting clients than the files beside it have.

    deploy/scale.py --hosts 8 --owners 5 --holders 5 > deploy/docker-compose.mine.yml
    docker compose -f docker-compose.yml -f docker-compose.privmvmf.yml -f docker-compose.mine.yml up

Services are named as in the other files, and the overlay comes last.  What is not given stays as it is there.  The
standard library suffices.
"""

from __future__ import annotations

import argparse
import sys

MOST = 32
"""Folders of each kind that the image of `bootstrap` has."""

BASE = {"host": 2, "owner": 3, "key": 3}
"""How many there are without the overlay: nothing takes them away."""

_TARGETS = {"host": "client", "owner": "data-owner", "key": "decrypting-client"}

_HEADER = """\
# With docker-compose.yml, and behind any other overlay: {told}.
#
#   docker compose -f docker-compose.yml -f docker-compose.scale.yml up
#
# Written by deploy/scale.py{options}, which writes others.
"""


_WAN_HEADER = """\
# With docker-compose.wan.yml and the overlay of {told}: those that it adds are far away, too.
#
#   docker compose -f docker-compose.yml -f docker-compose.wan.yml -f docker-compose.scale.yml \\
#     -f docker-compose.scale.wan.yml up
#
# Written by deploy/scale.py{options} --wan, which writes others.
"""


def overlay(
    hosts: int | None = None, owners: int | None = None, holders: int | None = None, *, wan: bool = False
) -> str:
    """Return the overlay, YAML.

    Parameters
    ----------
    hosts, owners, holders : int, optional
        Client hosts, data owners at work, decrypting clients; None leaves them as they are.  Owners at work are those
        of DRIFT and PrivMVMF: FedNCF has one, whatever is asked for.
    wan : bool
        Return the overlay of emulators beside the services that are added.

    Raises
    ------
    ValueError
        A number is out of range, or all are None; or nothing is added that an emulator could stand beside.
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
        # Another overlay may have said that it has nothing to do.
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
        epilog="Put it behind all other files: docker compose -f docker-compose.yml -f OVERLAY up",
    )
    parser.add_argument("--hosts", type=int, metavar="N", help=f"client hosts, {BASE['host']} to {MOST}")
    parser.add_argument(
        "--owners",
        type=int,
        metavar="M",
        help=f"data owners at work, {BASE['owner']} to {MOST}; not for FedNCF",
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
        help="write another overlay: emulators of docker-compose.wan.yml beside the services that are added",
    )
    given = parser.parse_args(arguments)
    try:
        sys.stdout.write(overlay(given.hosts, given.owners, given.holders, wan=given.wan))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
