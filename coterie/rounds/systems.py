"""The rounds-based systems, by name: a new paper is entered here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coterie.errors import ConfigError
from coterie.rounds.fedncf import FedNcfPlan, FedNcfServer
from coterie.rounds.system import ServerSide
from coterie.secure_sum.clear import ClearServer
from coterie.secure_sum.protocol import ServerHalf

__all__ = ["SUMS", "SYSTEMS", "Offered", "server_half", "server_side"]


@dataclass(frozen=True)
class Offered:
    """A rounds-based system.

    Parameters
    ----------
    server : callable
        ``(settings, items, seed, groups) -> ServerSide``; raises ConfigError on settings that are not its own.
    sums : tuple of str
        The secure sums under which it can run.
    """

    server: Callable[[str, int, int, int], ServerSide]
    sums: tuple[str, ...]


def _fedncf(settings: str, n_items: int, seed: int, groups: int) -> ServerSide:
    return FedNcfServer(FedNcfPlan.from_json(settings), n_items, seed, groups)


SYSTEMS: dict[str, Offered] = {"fedncf": Offered(_fedncf, ("clear", "masked"))}

SUMS: dict[str, Callable[[], ServerHalf]] = {"clear": ClearServer}


def server_side(system: str, settings: str, n_items: int, seed: int, groups: int) -> ServerSide:
    """Return the server's side of a system.

    Raises
    ------
    ConfigError
        When there is no such system, or the settings are not its own.
    """
    offered = SYSTEMS.get(system)
    if offered is None:
        raise ConfigError(f"no rounds-based system {system!r}", hint=f"there are: {', '.join(SYSTEMS)}")
    return offered.server(settings, n_items, seed, groups)


def server_half(secure_sum: str) -> ServerHalf:
    """Return the server's half of a secure sum.

    Raises
    ------
    ConfigError
        When there is no such sum.
    """
    make = SUMS.get(secure_sum)
    if make is None:
        raise ConfigError(f"no secure sum {secure_sum!r}", hint=f"there are: {', '.join(SUMS)}")
    return make()
