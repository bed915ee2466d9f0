"""``coterie serve``: run one service process."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from coterie.cli.options import SetOption
from coterie.errors import ConfigError, PreflightError

if TYPE_CHECKING:
    from coterie.config.services import ClientSettings
    from coterie.process.next_wake import NextWake
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
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Role client: do what is due now, then end. For a device that a timer wakes (docs/device.md).",
        ),
    ] = False,
    wait: Annotated[
        float,
        typer.Option(
            "--wait",
            metavar="SECONDS",
            min=1.0,
            help="With --once: longest time without being asked for anything. A sum that was joined is stayed for.",
        ),
    ] = 600.0,
    sets: SetOption = None,
) -> None:
    """Run a service until SIGTERM or SIGINT, or --once.

    Configuration values come from the file, the environment (COTERIE_...) and --set; a later source wins. `coterie
    config reference` lists the keys. After SIGTERM the service finishes or hands back its work within 10 s.
    """
    if once:
        _wake(role, config, sets or (), wait)
        return
    # Set before NumPy is loaded: small matrix products gain nothing from threads, and the threads of several services
    # on a machine compete for its cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from coterie.config.load import load_service

    parts = [] if part is None else [f"part={json.dumps(part)}"]
    loaded = load_service(role, config, sets=[*(sets or ()), *parts])

    from coterie.process import runtime as process  # heavy (gRPC): only once the configuration is valid

    process.serve(find_service(role), loaded.settings)


def _wake(role: str, config: Path | None, sets: Sequence[str], wait_s: float) -> None:
    """Run the client service for one wake of a device; return at once where it is not due yet."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if role != "client":
        raise ConfigError(
            f"--once with the role {role!r}; expected client: only a person's device wakes on a schedule"
        )

    from coterie.config.load import load_service
    from coterie.process.next_wake import content_hash, read_next_wake
    from coterie.rounds.stance import STANCE

    # What the person changes while the device is awake is seen by the next wake.
    configured = "" if config is None else content_hash(config)
    settings = cast("ClientSettings", load_service(role, config, sets=[*sets, "check_in=true"]).settings)
    seen = f"{configured} {content_hash(settings.state / STANCE)}"
    known = read_next_wake(settings.state)
    if known is not None and known.seen == seen and known.waits(settings.run):
        _tell(known)
        return

    from coterie.process import runtime as process
    from coterie.process.wake import Wake

    process.serve(find_service(role), settings, Wake(wait_s, seen=seen))
    decided = read_next_wake(settings.state)
    if decided is not None and decided != known:
        _tell(decided)


def _tell(known: NextWake) -> None:
    at = datetime.fromtimestamp(known.at, UTC).isoformat(timespec="seconds")
    typer.echo(f"no wake is needed any more: {known.over}" if known.over else f"next wake: {at}")


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
