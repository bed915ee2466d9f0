"""``coterie serve``: run one service process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.options import SetOption
from coterie.errors import PreflightError

if TYPE_CHECKING:
    from coterie.process.runtime import Service

__all__ = ["find_service", "serve"]

_GROUP = "coterie.services"


def serve(
    role: Annotated[
        str,
        typer.Argument(
            metavar="ROLE", help="Role: cos, data-owner, client, decrypting-client or thirdparty."
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="Configuration of the service. Absent: environment and --set alone.",
        ),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(
            "--part",
            metavar="PART",
            help="Part of the COS: intake, coordinator or both. The same as --set part=PART.",
        ),
    ] = None,
    sets: SetOption = None,
) -> None:
    """Run a service until SIGTERM or SIGINT.

    Configuration values come from the file, the environment (COTERIE_...) and --set; a later source wins. `coterie
    config reference` lists the keys. After SIGTERM the service finishes or hands back its work within 10 s.
    """
    # Set before NumPy is loaded: small matrix products gain nothing from threads, and the threads of several services
    # on a machine compete for its cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from coterie.config.load import load_service

    parts = [] if part is None else [f"part={json.dumps(part)}"]
    loaded = load_service(role, config, sets=[*(sets or ()), *parts])

    from coterie.process import runtime as process  # heavy (gRPC): only once the configuration is valid

    process.serve(find_service(role), loaded.settings)


def find_service(role: str) -> Service:
    """Return the service that an installed package registers for a role.

    Raises
    ------
    PreflightError
        No service is registered for the role, or it cannot be imported.
    """
    from importlib.metadata import entry_points

    registered = entry_points(group=_GROUP)
    found = next(iter(registered.select(name=role)), None)
    if found is None:
        known = ", ".join(sorted(registered.names)) or "none"
        raise PreflightError(
            f"no installed package provides the service {role!r}; there are: {known}",
            hint="install coterie again; services register as entry points when it is installed",
        )
    try:
        service: Service = found.load()
    except (ImportError, AttributeError) as error:
        raise PreflightError(
            f"the service {role!r} ({found.value}) cannot be imported: {error}",
            hint="is the package installed with everything that it needs?",
        ) from error
    return service
