#!/usr/bin/env python3
"""Write a Docker Swarm stack from the compose files, to run their federation on several machines.

    docker compose -f docker-compose.yml [-f OVERLAY ...] config | deploy/stack.py > stack.yml
    docker stack deploy --compose-file stack.yml --resolve-image never coterie

Each party runs on the node that has the label ``coterie.PARTY=true``.  Its folder is below ``--folders`` on that node;
``coterie bootstrap`` makes the folders and the operator copies them (docs/swarm.md).  Services find each other by
their names, as in compose, so the folders need no change.  Keys of compose that a stack lacks are left out or
translated; keys that this script does not know are refused.  The script needs PyYAML.

With docker-compose.replicas.yml, ``--database-network`` names a network of the swarm in which PostgreSQL is: its socket
in a volume needs one machine.  The URL is in the folders (``federation.database`` of ``coterie bootstrap``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import yaml

KEPT = frozenset({"image", "command", "networks", "read_only", "cap_drop", "stop_grace_period"})
KEPT |= {"logging", "environment", "labels", "configs"}
"""Keys of a service that mean the same in a stack and are copied."""

DROPPED = frozenset({"build", "depends_on", "extends", "pull_policy", "security_opt", "container_name"})
"""Keys that a stack lacks and that are left out.  The images are on the nodes already, and services wait for each other
by themselves.  The engines' configuration keeps processes from gaining rights (``"no-new-privileges": true``)."""

TRANSLATED = frozenset({"restart", "mem_limit", "cpus", "pids_limit", "tmpfs", "volumes", "ports", "deploy"})
TRANSLATED |= {"healthcheck"}

LEFT_OUT = ("bootstrap", "prometheus")
"""Services that are left out: they read files beside the compose files, or all volumes, so they need one machine."""


DATABASE, SOCKET = "database", "database-socket"
"""Service and volume of a database that others reach by a socket."""

BALANCER = "coterie-balancer"
"""Image of the balancer, which has no folder."""

ALIVE = ("CMD", "python3", "-I", "-S", "/opt/coterie/probe.py", "--alive", "/party/state")
"""Check that holds while a service answers.  A swarm ends tasks that are not healthy, and gives their names to nobody;
one that waits for its peers, or as a standby, is not healthy and must not end."""


class NotAStackError(ValueError):
    """The input is no federation, or has a key that a stack cannot express."""


def stack(
    compose: Mapping[str, Any], folders: PurePosixPath, database_network: str | None = None
) -> dict[str, Any]:
    """Return the stack of a compose file whose overlays and variables are resolved.

    Parameters
    ----------
    compose : mapping
        Output of ``docker compose config``, parsed.
    folders : PurePosixPath
        Folder of the parties' folders on each node.
    database_network : str, optional
        Network of the swarm in which the database is.

    Raises
    ------
    NotAStackError
        A part is missing, or is not known to this script.
    """
    services = compose.get("services")
    if not isinstance(services, Mapping) or "cos" not in services:
        raise NotAStackError(
            "the input has no service `cos`: expected what `docker compose -f docker-compose.yml config` prints"
        )
    if DATABASE in services and database_network is None:
        raise NotAStackError(
            f"services.{DATABASE}: its socket needs one machine; expected --database-network with the network of a "
            "database elsewhere"
        )
    left_out = (*LEFT_OUT, DATABASE) if DATABASE in services else LEFT_OUT
    made = {
        name: _service(name, service, folders, database_network)
        for name, service in services.items()
        if name not in left_out and not _idle(service)
    }
    used = {network for service in made.values() for network in service["networks"]}
    networks: dict[str, Any] = {
        name: {"driver": "overlay", "internal": bool((value or {}).get("internal"))}
        for name, value in (compose.get("networks") or {}).items()
        if name in used
    }
    if DATABASE in services:
        networks[DATABASE] = {"external": True, "name": database_network}
    return {"version": "3.9", "services": made, "networks": networks}


def _idle(service: Mapping[str, Any]) -> bool:
    """Return whether a service is idle in this run; overlays make it idle by the command ``version``."""
    return _words(service.get("command")) == ["version"]


def _service(
    name: str, service: Mapping[str, Any], folders: PurePosixPath, database_network: str | None
) -> dict[str, Any]:
    service = {key: value for key, value in service.items() if value is not None}
    unknown = sorted(service.keys() - KEPT - DROPPED - TRANSLATED)
    if unknown:
        raise NotAStackError(f"services.{name}.{unknown[0]}: not known how to say this in a stack")
    made = {key: service[key] for key in sorted(KEPT & service.keys())}
    volumes = list(service.get("volumes") or ())
    at_the_database = [volume for volume in volumes if _source(volume) == SOCKET]
    made["networks"] = _networks(service.get("networks") or ["default"], database=bool(at_the_database))
    if at_the_database:
        # The URL of the socket, where an overlay has set it: that of the network is in the folder.
        made["environment"] = {
            key: value
            for key, value in (made.get("environment") or {}).items()
            if not (key == "COTERIE_DATABASE__URL" and "host=/" in str(value))
        }
    if _is_balancer(service):
        volumes = []
    made["volumes"] = [
        *(_tmpfs(name, text) for text in service.get("tmpfs") or ()),
        *(_folder(name, volume, folders) for volume in volumes if _source(volume) != SOCKET),
    ]
    if (health := _health(service)) is not None:
        made["healthcheck"] = health
    ends = service.get("restart") in (None, "no")
    limits = {
        "cpus": service.get("cpus"),
        "memory": service.get("mem_limit"),
        "pids": service.get("pids_limit"),
    }
    made["deploy"] = {
        "replicas": 1,
        # Each service has one replica, so a virtual address has nothing to balance.
        "endpoint_mode": "dnsrr",
        "placement": {"constraints": [f"node.labels.coterie.{name} == true"]},
        "restart_policy": {"condition": "on-failure" if ends else "any", "delay": "2s"},
        # The old process must end first: two processes never work on one folder.
        "update_config": {"order": "stop-first"},
        "resources": {"limits": {key: str(value) for key, value in limits.items() if value is not None}},
    }
    # A stack takes the limit of processes as a number, and the other limits as text.
    if "pids" in made["deploy"]["resources"]["limits"]:
        made["deploy"]["resources"]["limits"]["pids"] = int(made["deploy"]["resources"]["limits"]["pids"])
    return made


def _health(service: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the check of a service by which a swarm ends it; None where it has none."""
    if _is_balancer(service):
        # It is healthy once an intake is, and ends by itself where it fails.
        return {"disable": True}
    given = service.get("healthcheck")
    if not given or given.get("disable"):
        return dict(given) if given else None
    # Until it has its certificate, a service answers nobody.
    return {
        "test": list(ALIVE),
        "interval": given.get("interval", "5s"),
        "timeout": "5s",
        "retries": 6,
        "start_period": "10m",
    }


def _is_balancer(service: Mapping[str, Any]) -> bool:
    return str(service.get("image")).rpartition("/")[2].partition(":")[0] == BALANCER


def _networks(given: object, *, database: bool) -> list[str] | dict[str, Any]:
    """Return a service's networks, with the names that it has there besides its own; a list where it has none."""
    named = dict(given) if isinstance(given, Mapping) else dict.fromkeys(given)  # type: ignore[call-overload]
    aliases = {name: (value or {}).get("aliases") for name, value in named.items()}
    names = sorted([*named, DATABASE] if database else named)
    if not any(aliases.values()):
        return names
    return {name: {"aliases": aliases[name]} if aliases.get(name) else {} for name in names}


def _source(volume: object) -> str:
    """Return the name of a volume, or the path of a file, that a service mounts."""
    if isinstance(volume, Mapping):
        return str(volume.get("source"))
    return str(volume).partition(":")[0]


def _words(command: object) -> list[str]:
    if isinstance(command, str):
        return command.split()
    return [str(word) for word in command] if isinstance(command, list) else []


def _tmpfs(name: str, text: str) -> dict[str, Any]:
    """Return the mount that ``/tmp:mode=1777,size=64m`` stands for."""
    target, _, rest = text.partition(":")
    options = dict(option.partition("=")[::2] for option in rest.split(",") if option)
    unknown = sorted(options.keys() - {"mode", "size"})
    if unknown:
        raise NotAStackError(f"services.{name}.tmpfs: the option {unknown[0]!r} is not known here")
    # The mode is left out: the default of a tmpfs mount is 1777.
    size = {"tmpfs": {"size": _bytes(name, options["size"])}} if "size" in options else {}
    return {"type": "tmpfs", "target": target, **size}


def _bytes(name: str, text: str) -> int:
    number, unit = text[:-1], text[-1:].lower()
    factors = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
    if unit.isdigit():
        number, unit = text, ""
    if not number.isdigit() or (unit and unit not in factors):
        raise NotAStackError(f"services.{name}.tmpfs: size {text!r}: expected a number with k, m or g")
    return int(number) * factors.get(unit, 1)


def _folder(name: str, volume: object, folders: PurePosixPath) -> dict[str, Any]:
    """Return the party's folder on its node in place of a named volume."""
    if isinstance(volume, str):
        source, target = volume.split(":")[:2]
    elif isinstance(volume, Mapping) and volume.get("type") == "volume":
        source, target = volume["source"], volume["target"]
    else:
        source, target = "/", ""
    if "/" in source:
        raise NotAStackError(f"services.{name}.volumes: expected named volumes only, got {volume}")
    return {"type": "bind", "source": str(folders / source), "target": target}


def main(arguments: list[str] | None = None) -> None:
    """Read the output of ``docker compose config`` from standard input, and print the stack."""
    parser = argparse.ArgumentParser(
        prog="deploy/stack.py",
        description="Write a Docker Swarm stack from the output of `docker compose config`.",
    )
    parser.add_argument(
        "--folders",
        default="/srv/coterie",
        type=PurePosixPath,
        metavar="FOLDER",
        help="folder of the parties' folders on each node (default: /srv/coterie)",
    )
    parser.add_argument(
        "--database-network",
        metavar="NETWORK",
        help="network of the swarm in which PostgreSQL is, for docker-compose.replicas.yml",
    )
    given = parser.parse_args(arguments)
    if not given.folders.is_absolute():
        parser.error(f"--folders {given.folders}: expected an absolute path")
    try:
        read = yaml.safe_load(sys.stdin)
        if not isinstance(read, Mapping):
            raise NotAStackError(
                "the input is empty or no mapping: expected what `docker compose config` prints"
            )
        made = stack(read, given.folders, given.database_network)
    except (NotAStackError, yaml.YAMLError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    yaml.safe_dump(made, sys.stdout, sort_keys=False)


if __name__ == "__main__":
    main()
