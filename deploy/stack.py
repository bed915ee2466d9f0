#!/usr/bin/env python3
"""Write a Docker Swarm stack from the compose files: one machine's federation on several.

    docker compose -f docker-compose.yml [-f OVERLAY ...] config | deploy/stack.py > stack.yml
    docker stack deploy --compose-file stack.yml --resolve-image never coterie

Each party runs on the node that has the label ``coterie.PARTY=true``, on its folder below ``--folders`` there, which
``coterie bootstrap`` made and you copied (deploy/README.md, Docker Swarm).  A service's name is where the others look
for it, so folders fit as they are.  What a stack cannot have is left out or said in its way; what this script does not
know is refused.  Needs PyYAML.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import yaml

KEPT = frozenset(
    {"image", "command", "healthcheck", "networks", "read_only", "cap_drop", "stop_grace_period"}
)
KEPT |= {"logging", "environment", "labels", "configs"}
"""Keys of a service that mean the same in a stack."""

DROPPED = frozenset({"build", "depends_on", "extends", "pull_policy", "security_opt", "container_name"})
"""Keys that a stack cannot have: images are there, services wait for each other by themselves, and that a process gains
no rights is the engines' to say (``"no-new-privileges": true`` in their configuration)."""

TRANSLATED = frozenset({"restart", "mem_limit", "cpus", "pids_limit", "tmpfs", "volumes", "ports", "deploy"})

LEFT_OUT = ("bootstrap", "prometheus")
"""Services that only one machine can have: they read files of the folder of the compose files, or all volumes."""


class NotAStackError(ValueError):
    """The input is no federation, or has what cannot be said in a stack."""


def stack(compose: Mapping[str, Any], folders: PurePosixPath) -> dict[str, Any]:
    """Return the stack of a compose file whose overlays and variables are resolved.

    Parameters
    ----------
    compose : mapping
        What ``docker compose config`` prints.
    folders : PurePosixPath
        Where the parties' folders are on each node.

    Raises
    ------
    NotAStackError
        Something is missing, or not known here.
    """
    services = compose.get("services")
    if not isinstance(services, Mapping) or "cos" not in services:
        raise NotAStackError(
            "the input has no service `cos`: expected what `docker compose -f docker-compose.yml config` prints"
        )
    made = {
        name: _service(name, service, folders)
        for name, service in services.items()
        if name not in LEFT_OUT and not _idle(service)
    }
    used = {network for service in made.values() for network in service["networks"]}
    return {
        "version": "3.9",
        "services": made,
        "networks": {
            name: {"driver": "overlay", "internal": bool((value or {}).get("internal"))}
            for name, value in (compose.get("networks") or {}).items()
            if name in used
        },
    }


def _idle(service: Mapping[str, Any]) -> bool:
    """Whether a service has nothing to do in this run, as overlays say it."""
    return _words(service.get("command")) == ["version"]


def _service(name: str, service: Mapping[str, Any], folders: PurePosixPath) -> dict[str, Any]:
    service = {key: value for key, value in service.items() if value is not None}
    unknown = sorted(service.keys() - KEPT - DROPPED - TRANSLATED)
    if unknown:
        raise NotAStackError(f"services.{name}.{unknown[0]}: not known how to say this in a stack")
    made = {key: service[key] for key in sorted(KEPT & service.keys())}
    made["networks"] = sorted(service.get("networks") or ["default"])
    made["volumes"] = [
        *(_tmpfs(name, text) for text in service.get("tmpfs") or ()),
        *(_folder(name, volume, folders) for volume in service.get("volumes") or ()),
    ]
    ends = service.get("restart") in (None, "no")
    limits = {
        "cpus": service.get("cpus"),
        "memory": service.get("mem_limit"),
        "pids": service.get("pids_limit"),
    }
    made["deploy"] = {
        "replicas": 1,
        # A virtual address has nothing to choose from here, and connections last.
        "endpoint_mode": "dnsrr",
        "placement": {"constraints": [f"node.labels.coterie.{name} == true"]},
        "restart_policy": {"condition": "on-failure" if ends else "any", "delay": "2s"},
        # Two processes never work on one folder.
        "update_config": {"order": "stop-first"},
        "resources": {"limits": {key: str(value) for key, value in limits.items() if value is not None}},
    }
    # The only one that is a number there.
    if "pids" in made["deploy"]["resources"]["limits"]:
        made["deploy"]["resources"]["limits"]["pids"] = int(made["deploy"]["resources"]["limits"]["pids"])
    return made


def _words(command: object) -> list[str]:
    if isinstance(command, str):
        return command.split()
    return [str(word) for word in command] if isinstance(command, list) else []


def _tmpfs(name: str, text: str) -> dict[str, Any]:
    """Say ``/tmp:mode=1777,size=64m`` as a mount."""
    target, _, rest = text.partition(":")
    options = dict(option.partition("=")[::2] for option in rest.split(",") if option)
    unknown = sorted(options.keys() - {"mode", "size"})
    if unknown:
        raise NotAStackError(f"services.{name}.tmpfs: the option {unknown[0]!r} is not known here")
    # Its mode is 1777 by itself.
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
    """Read compose's answer from standard input and print the stack."""
    parser = argparse.ArgumentParser(
        prog="deploy/stack.py",
        description="Write a Docker Swarm stack from what `docker compose config` prints.",
    )
    parser.add_argument(
        "--folders",
        default="/srv/coterie",
        type=PurePosixPath,
        metavar="FOLDER",
        help="where parties' folders are on the nodes (default: /srv/coterie)",
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
        made = stack(read, given.folders)
    except (NotAStackError, yaml.YAMLError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    yaml.safe_dump(made, sys.stdout, sort_keys=False)


if __name__ == "__main__":
    main()
