"""Processes of an orchestration server (COS) that has several: a pair, or coordinators and intakes.

All of them have one role and name, so one certificate's name, and a folder, a token and an address each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coterie.config.run import RunSettings
from coterie.errors import ConfigError
from coterie.launch.parties import PartyPlan, PlaceOfParty

__all__ = ["Replicas", "has_replicas", "lay_out_replicas", "require_one_process"]

_NAME = "cos"


@dataclass(frozen=True)
class Replicas:
    """The processes of a COS, and where callers find it.

    Parameters
    ----------
    parties : tuple of PartyPlan
        The processes, each with its own folder and configuration.
    peer : dict
        Table ``[cos]`` of the configuration of parties and operators.
    """

    parties: tuple[PartyPlan, ...]
    peer: dict[str, Any]


def has_replicas(settings: RunSettings) -> bool:
    """Return whether the COS of a run has several processes."""
    return settings.federation.intakes > 0 or settings.federation.coordinators > 1


def require_one_process(settings: RunSettings) -> None:
    """Check that the COS is one process, which a launcher on one machine starts.

    Raises
    ------
    ConfigError
        The settings ask for more.
    """
    if has_replicas(settings):
        federation = settings.federation
        raise ConfigError(
            f"federation.intakes = {federation.intakes}, federation.coordinators = {federation.coordinators}: on one "
            "machine the COS is one process",
            hint="`coterie bootstrap` prepares a COS of several processes (docs/replicas.md)",
        )


def lay_out_replicas(settings: RunSettings, layout: PlaceOfParty, balancer: str) -> Replicas:
    """Make a folder for each process of the COS, and return them with their configurations.

    Parameters
    ----------
    settings : RunSettings
        The run, whose COS has several processes.
    layout : callable
        Gives the folder and address of each process.
    balancer : str
        Address in front of the intakes, ``host:port``.
    """
    federation = settings.federation
    standby = federation.coordinators > 1
    shared: dict[str, Any] = {"standby": True} if standby else {}
    if federation.intakes:
        shared["part"] = "coordinator"
    kind = "coordinator" if federation.intakes else _NAME
    coordinators = [layout(_NAME, f"{kind}-{n}", n) for n in range(federation.coordinators)]
    addresses = [place.address for place in coordinators]
    parties = [PartyPlan(_NAME, _NAME, place, 0, _with_database(settings, shared)) for place in coordinators]
    if not federation.intakes:
        first, *others = addresses
        return Replicas(tuple(parties), {"address": first, "name": _NAME, "standbys": others})
    intake = {"part": "intake", "coordinator": addresses}
    for n in range(federation.intakes):
        place = layout(_NAME, f"intake-{n}", n)
        parties.append(PartyPlan(_NAME, _NAME, place, 0, _with_database(settings, intake)))
    return Replicas(tuple(parties), {"address": balancer, "name": _NAME})


def _with_database(settings: RunSettings, values: dict[str, Any]) -> dict[str, Any]:
    """Return a process's configuration with the database of the COS, where the run names it."""
    url = settings.federation.database
    return values if url is None else {**values, "database": {"url": url}}
