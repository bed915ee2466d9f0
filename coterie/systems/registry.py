"""The learning systems that are installed, by name.

Systems are found by the entry points of the group ``coterie.systems``, ours as anybody's.  One that cannot be loaded is
named with the distribution that it came from (`failures`); all others go on working.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.data.attributes import AttributeTable
from coterie.errors import ConfigError, nearest
from coterie.privacy.visibility import matrix
from coterie.rounds.sides import HostSide, Keep, OwnerSide, ServerSide
from coterie.secure_sum.registry import GIVES, SUMS
from coterie.systems.description import Driver, System
from coterie.systems.settings import SystemSettings
from coterie.systems.shared.host_data import HostData

__all__ = [
    "DEFAULT",
    "Combination",
    "Failure",
    "asks_owners",
    "combination",
    "combinations",
    "driver_of",
    "failures",
    "fewest_users",
    "host_side",
    "in_rounds",
    "owner_side",
    "ratings_of",
    "server_side",
    "system_named",
    "systems",
]

T = TypeVar("T")

DEFAULT = "drift"
"""The system of a run that names none."""

GROUP = "coterie.systems"
"""The group of entry points."""


@dataclass(frozen=True)
class Failure:
    """A system that is installed and cannot be used.

    Attributes
    ----------
    name : str
        Name of its entry point.
    distribution : str
        What it came with, name and version.
    why : str
        What is wrong.
    """

    name: str
    distribution: str
    why: str

    def __str__(self) -> str:
        return f"system {self.name!r} of {self.distribution} is left out: {self.why}"


@dataclass(frozen=True)
class Combination:
    """A system under a secure sum.

    Parameters
    ----------
    system, secure_sum : str
    allowed : bool
    why : str
        What the sum gives, or why the two do not go together.
    form : str
        Form of the system, where that makes a difference.
    """

    system: str
    secure_sum: str
    allowed: bool
    why: str
    form: str = ""


@cache
def _found() -> tuple[Mapping[str, System], tuple[Failure, ...]]:
    """Load every entry point; ours first, so that nobody takes a name of ours."""
    loaded: dict[str, System] = {}
    tables: dict[str, str] = {}
    failed: list[Failure] = []

    def rank(point: metadata.EntryPoint) -> tuple[bool, str, str]:
        return (_distribution(point)[0] != "coterie", *_distribution(point))

    for point in sorted(metadata.entry_points(group=GROUP), key=rank):
        made = point.value.partition(":")[0], " ".join(_distribution(point))
        try:
            system = point.load()
            _check(point.name, system, loaded, tables)
        # A plug-in is anybody's code: whatever it raises, the other systems go on working.
        except Exception as error:
            failed.append(Failure(point.name, made[1], _words(error)))
            continue
        loaded[system.name] = system
        tables[system.table] = system.name
    return MappingProxyType(loaded), tuple(failed)


def _distribution(point: metadata.EntryPoint) -> tuple[str, str]:
    return ("an unknown distribution", "") if point.dist is None else (point.dist.name, point.dist.version)


def _words(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return error.message
    if isinstance(error, ImportError):
        return f"its module cannot be imported: {error}"
    return f"{type(error).__name__}: {error}"


def _check(name: str, system: object, loaded: Mapping[str, System], tables: Mapping[str, str]) -> None:
    """Check what an entry point names.

    Raises
    ------
    ConfigError
        It is no system, has the name or the table of another one, or lacks what a system must have.
    """
    if not isinstance(system, System):
        raise ConfigError(
            f"it names a {type(system).__name__}; expected a coterie.systems.description.System"
        )
    if system.name != name:
        raise ConfigError(
            f"its entry point is called {name!r} and the system {system.name!r}; expected one name"
        )
    if system.name in loaded:
        raise ConfigError(f"the name {name!r} is taken by {loaded[name].title}")
    if system.table in tables:
        raise ConfigError(f"the table [{system.table}] is that of system {tables[system.table]!r}")
    if not (isinstance(system.settings, type) and issubclass(system.settings, SystemSettings)):
        raise ConfigError(f"its settings are {system.settings!r}; expected a subclass of SystemSettings")
    if unknown := [secure_sum for secure_sum in system.sums if secure_sum not in SUMS]:
        raise ConfigError(f"it runs under {', '.join(unknown)}; there are the sums {', '.join(SUMS)}")
    if not system.forms:
        raise ConfigError("it has no form; expected at least one")
    if system.in_rounds and (system.server is None or system.host is None):
        raise ConfigError("it is in rounds and has no side of the server or of the host")
    system.settings()  # every key of a table has a default
    for form in system.forms:
        for secure_sum in system.sums:
            if not system.objection(form, secure_sum):
                matrix(system.declared(form, secure_sum))


def systems() -> Mapping[str, System]:
    """Return the systems that can be used, by name, ours first."""
    return _found()[0]


def failures() -> tuple[Failure, ...]:
    """Return the systems that are installed and cannot be used."""
    return _found()[1]


def system_named(name: str) -> System:
    """Return a system by name.

    Raises
    ------
    ConfigError
        There is no such system, or it cannot be used.
    """
    found = systems().get(name)
    if found is not None:
        return found
    broken = next((failure for failure in failures() if failure.name == name), None)
    if broken is not None:
        raise ConfigError(str(broken), hint="install a release of it that goes with this one")
    guess = nearest(name, systems())
    raise ConfigError(
        f"no system {name!r}; there are {', '.join(systems())}",
        hint=f"did you mean {guess!r}?" if guess else None,
    )


def in_rounds(name: str) -> bool:
    """Whether there is a system of this name that is driven by rounds over cohorts of users."""
    found = systems().get(name)
    return found is not None and found.in_rounds


def driver_of(name: str, form: str) -> Driver | None:
    """Return what drives a form of a system; None where there is no such system or form."""
    found = systems().get(name)
    return None if found is None else found.forms.get(form)


def combination(system: str, secure_sum: str, form: str = "") -> Combination:
    """Return one combination; of names that nobody entered, one that is not allowed.

    Parameters
    ----------
    system, secure_sum : str
    form : str
        The system's first form unless given.
    """
    found = systems().get(system)
    if found is None:
        return Combination(system, secure_sum, False, f"no such system; there are {', '.join(systems())}")
    if secure_sum not in SUMS:
        return Combination(system, secure_sum, False, f"no such sum; there are {', '.join(SUMS)}")
    shown = "" if found.in_rounds else form or next(iter(found.forms))
    if form and form not in found.forms:
        forms = ", ".join(found.forms)
        return Combination(system, secure_sum, False, f"no such form; there are {forms}", form)
    why = found.objection(shown, secure_sum)
    if not why and secure_sum not in found.sums:
        why = f"the system is entered for {', '.join(found.sums)} only"
    if why:
        return Combination(system, secure_sum, False, why, shown)
    given = GIVES.get(secure_sum, "see the sum's own description")
    return Combination(
        system, secure_sum, True, given if found.gives is None else found.gives(shown, secure_sum), shown
    )


def combinations() -> list[Combination]:
    """Return every system under every sum."""
    return [
        combination(name, secure_sum, form)
        for name, system in systems().items()
        for form in (("",) if system.in_rounds else system.forms)
        for secure_sum in SUMS
    ]


def _rounds(name: str) -> System:
    found = system_named(name)
    if not found.in_rounds:
        raise ConfigError(f"system {name!r} has no rounds over cohorts of users")
    return found


def _side(make: T | None) -> T:
    """Return what makes a side, which `_check` has seen to be there."""
    if make is None:
        raise ConfigError("the system has no such side")
    return make


def server_side(system: str, settings: str, n_items: int, seed: int, groups: int) -> ServerSide:
    """Return the server's side of a system in rounds.

    Raises
    ------
    ConfigError
        When there is no such system, or the settings are not its own.
    """
    return _side(_rounds(system).server)(settings, n_items, seed, groups)


def host_side(
    system: str, settings: str, data: HostData, keys: NDArray[np.uint64], seed: int, keep: Keep
) -> HostSide:
    """Return a host's side of a system in rounds.

    Parameters
    ----------
    system, settings, seed
        As in the plan of the run.
    data : HostData
        What the users have.
    keys : ndarray of uint64, shape (users,)
        Each user's own number, which nobody else knows.
    keep : callable
        Takes up the users' private arrays where they were left.

    Raises
    ------
    ConfigError
        When there is no such system, or the settings are not its own.
    ValueError
        When the data does not fit the system.
    """
    return _side(_rounds(system).host)(settings, data, keys, seed, keep)


def asks_owners(system: str) -> bool:
    """Whether a system asks data owners for something in each round of training."""
    found = systems().get(system)
    return found is not None and found.owner is not None


def ratings_of(system: str, settings: str) -> tuple[float, float] | None:
    """Return the lowest and the highest rating that a system learns from; None where it learns from none.

    Raises
    ------
    ConfigError
        When the settings are not the system's own.
    """
    found = systems().get(system)
    return None if found is None or found.ratings is None else found.ratings(settings)


def fewest_users(system: str, settings: str) -> int:
    """Return the fewest users whose sum of training those who hold its key decrypt: 1 where a system names no number.

    Raises
    ------
    ConfigError
        When the settings are not the system's own.
    """
    found = systems().get(system)
    return 1 if found is None or found.fewest is None else found.fewest(settings)


def owner_side(
    system: str, settings: str, items: NDArray[np.integer], features: AttributeTable, seed: int
) -> OwnerSide:
    """Return a data owner's side of a system.

    Parameters
    ----------
    system, settings, seed
        As in the plan of the run.
    items : ndarray of int, shape (n,)
        The owner's items, by position in the catalogue.
    features : AttributeTable
        What the owner knows of them, a row for each.

    Raises
    ------
    ConfigError
        When there is no such system, it asks owners for nothing, or the settings are not its own.
    """
    make = system_named(system).owner
    if make is None:
        raise ConfigError(f"system {system!r} asks data owners for nothing")
    return make(settings, items, features, seed)
