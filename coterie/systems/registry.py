"""Registry of the learning systems that are installed, by name.

Entry points of the group ``coterie.systems`` name the systems, those of Coterie included.  A system that cannot be
loaded is listed in `failures` with the distribution that it came from; all others go on working.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.data.attributes import AttributeTable
from coterie.errors import ConfigError, nearest
from coterie.privacy.declarations import KINDS, ROLES
from coterie.privacy.visibility import matrix
from coterie.rounds.sides import Arrays, FoldsIn, HostSide, KeepPrivate, NormBounded, OwnerSide, ServerSide
from coterie.secure_sum.registry import GIVES, NEEDS, SUMS
from coterie.systems.description import Driver, System
from coterie.systems.settings import SystemSettings
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.preferences import Preference
from coterie.telemetry.report import Report

__all__ = [
    "DEFAULT",
    "REMEDY",
    "Combination",
    "Discovered",
    "UnusableSystem",
    "asks_owners",
    "check_folds_in",
    "combination",
    "combinations",
    "discover",
    "distribution_of",
    "driver_of",
    "failure_of",
    "failures",
    "fewest_users",
    "folded_in",
    "folding_systems",
    "host_side",
    "in_rounds",
    "owner_side",
    "preferences_of",
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

REMEDY = "install a release of that distribution that goes with this one, or take it out"
"""Hint of the error about a system that cannot be used."""

_OURS = "coterie"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_TABLE = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class UnusableSystem:
    """A system that is installed and cannot be used.

    Attributes
    ----------
    name : str
        Name of its entry point.
    distribution : str
        Name and version of the distribution that it came with.
    why : str
        Reason why the system cannot be used.
    """

    name: str
    distribution: str
    why: str

    def __str__(self) -> str:
        return f"system {self.name!r} of {self.distribution} is left out: {self.why}"


@dataclass(frozen=True)
class Combination:
    """Answer to whether a system runs under a secure sum, with the reason.

    Parameters
    ----------
    system, secure_sum : str
    allowed : bool
    why : str
        Description of what the sum hides, or the reason why the two do not go together.
    form : str
        Form of the system, where forms differ; else empty.
    """

    system: str
    secure_sum: str
    allowed: bool
    why: str
    form: str = ""


@dataclass(frozen=True)
class Discovered:
    """Systems found among the installed distributions, usable or not.

    Attributes
    ----------
    systems : mapping of str to System
        Usable systems by name, those of Coterie first.
    distributions : mapping of str to str
        Name and version of each one's distribution, by the system's name.
    failures : tuple of UnusableSystem
        Systems that cannot be used.
    """

    systems: Mapping[str, System]
    distributions: Mapping[str, str]
    failures: tuple[UnusableSystem, ...]


def discover() -> Discovered:
    """Load the entry points of all distributions that Python finds; `systems` does so once for a process."""
    loaded: dict[str, System] = {}
    distributions: dict[str, str] = {}
    failed: list[UnusableSystem] = []
    # Coterie's own systems come first, so that no plug-in takes one of their names.
    points = sorted((_distribution(point), point.name, point.value) for point in _points())
    for distribution, name, value in sorted(points, key=lambda one: not _is_ours(one[0])):
        try:
            system = metadata.EntryPoint(name, value, GROUP).load()
            _check(name, system, distribution, loaded, distributions)
        # A plug-in is foreign code: the other systems go on working whatever it raises.
        except (Exception, SystemExit) as error:
            failed.append(UnusableSystem(name, distribution, _words(error)))
            continue
        loaded[name], distributions[name] = system, distribution
    return Discovered(MappingProxyType(loaded), MappingProxyType(distributions), tuple(failed))


_discovered = cache(discover)


def _points() -> Iterable[metadata.EntryPoint]:
    return metadata.entry_points(group=GROUP)


def _distribution(point: metadata.EntryPoint) -> str:
    if point.dist is None:
        return "an unknown distribution"
    # A damaged distribution may have no version, whatever the types say.
    return f"{point.dist.name} {point.dist.version or 'without a version'}"


def _is_ours(distribution: str) -> bool:
    return distribution.startswith(f"{_OURS} ")


def _words(error: BaseException) -> str:
    if isinstance(error, ConfigError):
        return error.message
    if isinstance(error, ImportError):
        return f"it cannot be imported: {error}"
    return f"{type(error).__name__}: {error}"


def _check(
    name: str,
    system: object,
    distribution: str,
    loaded: Mapping[str, System],
    distributions: Mapping[str, str],
) -> None:
    """Check the object that an entry point of a distribution names.

    Raises
    ------
    ConfigError
        The object is no system, has the name or the table of another one, lacks a required part, or has a form that is
        not open to its distribution.
    """
    if not isinstance(system, System):
        raise ConfigError(
            f"it names a {type(system).__name__}; expected a coterie.systems.description.System"
        )
    if system.name != name:
        raise ConfigError(
            f"its entry point is called {name!r} and the system {system.name!r}; expected one name"
        )
    if name in loaded:
        raise ConfigError(f"the name {name!r} is taken by {loaded[name].title} of {distributions[name]}")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"the name {name!r}; expected lower-case letters, digits and hyphens")
    _check_forms(system, distribution)
    _check_sides(system)
    _check_table(system, loaded, distributions)
    _check_declared(system)
    if not system.shown:
        raise ConfigError("it shows no metric (System.shown); expected at least one")
    _check_report(system)
    try:
        studied = find_spec(system.study) is not None
    except ImportError:
        studied = False
    if not studied:
        raise ConfigError(f"it has no module {system.study} (System.study)")


def _check_forms(system: System, distribution: str) -> None:
    """Check a system's forms: there are some, and those of a plug-in are in rounds.

    The services drive all other forms by code of Coterie's own systems.
    """
    if not system.forms:
        raise ConfigError("it has no form (System.forms); expected at least one")
    open_to_it = tuple(Driver) if _is_ours(distribution) else (Driver.ROUNDS,)
    for form, driver in system.forms.items():
        if driver not in open_to_it:
            found = driver.name if isinstance(driver, Driver) else repr(driver)
            raise ConfigError(
                f"its form {form!r} has the driver {found}; expected ROUNDS for every form of {distribution}, as "
                "the other drivers are not open to plug-ins"
            )


def _check_sides(system: System) -> None:
    """Check a system's sums and sides."""
    if not system.sums:
        raise ConfigError(f"it runs under no sum (System.sums); expected some of {', '.join(SUMS)}")
    if unknown := [str(secure_sum) for secure_sum in system.sums if secure_sum not in SUMS]:
        raise ConfigError(f"it runs under {', '.join(unknown)}; there are the sums {', '.join(SUMS)}")
    if system.in_rounds:
        for side, made in (("server", system.server), ("host", system.host)):
            if not callable(made):
                raise ConfigError(f"it is in rounds and has no side of the {side} (System.{side})")
    names = system.stepped
    if not (isinstance(names, tuple) and all(isinstance(name, str) for name in names)):
        raise ConfigError(
            f"it steps with {names!r} (System.stepped); expected a tuple of names of arrays of the server's side"
        )


def _check_table(system: System, loaded: Mapping[str, System], distributions: Mapping[str, str]) -> None:
    """Check a system's table of settings, and the defaults that it sets in other tables."""
    # Imported here, as the module of a run imports this one.
    from coterie.systems.run_settings import BaseRunSettings

    table, settings = system.table, system.settings
    if not _TABLE.fullmatch(table):
        raise ConfigError(f"its table is called {table!r}; expected lower-case letters, digits and _")
    if table in BaseRunSettings.model_fields or hasattr(BaseRunSettings, table) or table.startswith("model_"):
        raise ConfigError(f"its table [{table}] has a name that every run has for something else")
    for other in loaded.values():
        if other.table == table:
            raise ConfigError(f"its table [{table}] is that of {other.title} of {distributions[other.name]}")
    if not (isinstance(settings, type) and issubclass(settings, SystemSettings)):
        raise ConfigError(f"its settings are {settings!r}; expected a subclass of SystemSettings")
    for key, field in settings.model_fields.items():
        if hasattr(SystemSettings, key):
            raise ConfigError(f"its key {table}.{key} has the name of something that all settings answer")
        if field.is_required():
            raise ConfigError(f"its key {table}.{key} has no default; expected one for every key")
    _check_carried(table, settings())
    for former, key in system.moved.items():
        name, _, last = former.partition(".")
        if not last or key not in settings.model_fields or name in BaseRunSettings.model_fields:
            raise ConfigError(
                f"its former key {former!r} is now {table}.{key} (System.moved); expected a key of its table, by a key "
                "of a table that no run has any more"
            )
    for name, values in system.usual.items():
        known = getattr(
            getattr(BaseRunSettings.model_fields.get(name), "annotation", None), "model_fields", {}
        )
        if unknown := [key for key in values if key not in known]:
            raise ConfigError(f"it has a default for {name}.{unknown[0]} (System.usual), and no run has that")


def _check_carried(table: str, sent: SystemSettings) -> None:
    """Check that a plan can carry the settings of a system's table: the defaults come back as they were sent."""
    try:
        back = sent.from_json(sent.to_json())
        changed = [key for key in type(sent).model_fields if getattr(sent, key) != getattr(back, key)]
    # Foreign code again: the reason is that of whatever it raises.
    except Exception as error:
        raise ConfigError(f"a plan cannot carry its settings: {_words(error)}") from error
    if changed:
        key = changed[0]
        raise ConfigError(
            f"its key {table}.{key} is {getattr(sent, key)!r} by default, and {getattr(back, key)!r} after a plan "
            "has carried it; expected a type that JSON gives back"
        )


def _check_report(system: System) -> None:
    """Check that a system's report can be read whatever its keys hold, and that each key is described."""
    report = system.report
    if not (isinstance(report, type) and issubclass(report, Report)):
        raise ConfigError(f"its report is {report!r} (System.report); expected a subclass of Report")
    for key, field in report.model_fields.items():
        if field.is_required() or not field.description:
            raise ConfigError(
                f"the key {key} of its report (System.report) lacks a default or a description; expected both"
            )


def _check_declared(system: System) -> None:
    """Check that a system declares who may see what, in every form under every sum."""
    if not callable(system.declared):
        raise ConfigError("it declares no visibility (System.declared)")
    for form in system.forms:
        for secure_sum in system.sums:
            if system.objection(form, secure_sum):
                continue
            rows = system.declared(form, secure_sum)
            matrix(rows)
            if unknown := sorted({*rows} - {*KINDS}):
                raise ConfigError(f"it declares {', '.join(unknown)}, and there is no such kind of datum")
            roles = {role for may_see, _ in rows.values() for role in may_see}
            if unknown := sorted(roles - {*ROLES}):
                raise ConfigError(f"it declares what {', '.join(unknown)} may see, and there is no such role")


def systems() -> Mapping[str, System]:
    """Return the systems that can be used, by name, those of Coterie first."""
    return _discovered().systems


def failures() -> tuple[UnusableSystem, ...]:
    """Return the systems that are installed and cannot be used."""
    return _discovered().failures


def distribution_of(name: str) -> str:
    """Return name and version of the distribution that a usable system came with."""
    return _discovered().distributions[name]


def failure_of(name: str) -> UnusableSystem | None:
    """Return why the system of this name cannot be used; None where it can, or where none is installed."""
    if name in systems():
        return None
    return next((failure for failure in failures() if failure.name == name), None)


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
    broken = failure_of(name)
    if broken is not None:
        raise ConfigError(str(broken), hint=REMEDY)
    guess = nearest(name, systems())
    raise ConfigError(
        f"no system {name!r}; there are {', '.join(systems())}",
        hint=f"did you mean {guess!r}?" if guess else "install the distribution that brings it",
    )


def in_rounds(name: str) -> bool:
    """Return whether a system of this name is installed and is trained in rounds over cohorts of users."""
    found = systems().get(name)
    return found is not None and found.in_rounds


def driver_of(name: str, form: str) -> Driver | None:
    """Return the driver of a form of a system; None where there is no such system or form."""
    found = systems().get(name)
    return None if found is None else found.forms.get(form)


def combination(system: str, secure_sum: str, form: str = "") -> Combination:
    """Return whether a system runs under a sum, and why; unknown names are not allowed.

    Parameters
    ----------
    system, secure_sum : str
    form : str
        The system's first form unless given.
    """
    found = systems().get(system)
    if found is None:
        broken = failure_of(system)
        why = f"no such system; there are {', '.join(systems())}" if broken is None else str(broken)
        return Combination(system, secure_sum, False, why)
    if secure_sum not in SUMS:
        return Combination(system, secure_sum, False, f"no such sum; there are {', '.join(SUMS)}")
    shown = "" if found.in_rounds else form or next(iter(found.forms))
    if form and form not in found.forms:
        forms = ", ".join(found.forms)
        return Combination(system, secure_sum, False, f"no such form; there are {forms}", form)
    why = found.objection(shown, secure_sum)
    if not why and secure_sum not in found.sums:
        why = NEEDS.get(secure_sum) or f"the system is entered for {', '.join(found.sums)} only"
    if why:
        return Combination(system, secure_sum, False, why, shown)
    given = GIVES.get(secure_sum, "see the sum's own description")
    return Combination(
        system, secure_sum, True, given if found.gives is None else found.gives(shown, secure_sum), shown
    )


def combinations() -> list[Combination]:
    """Return a combination of every system, and of each form where forms differ, with every sum."""
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
    """Return the factory of a side; `_check` has made sure that there is one."""
    if make is None:
        raise ConfigError("the system has no such side")
    return make


def server_side(system: str, settings: str, n_items: int, seed: int, groups: int) -> ServerSide:
    """Build the server's side of a system in rounds.

    Raises
    ------
    ConfigError
        When there is no such system, or the settings are not its own.
    """
    return _side(_rounds(system).server)(settings, n_items, seed, groups)


def host_side(
    system: str,
    settings: str,
    data: HostData,
    keys: NDArray[np.uint64],
    seed: int,
    keep: KeepPrivate,
    *,
    norm_bound: float = 0.0,
) -> HostSide:
    """Build a host's side of a system in rounds.

    Parameters
    ----------
    system, settings, seed
        As in the plan of the run.
    data : HostData
        Data of the host's users.
    keys : ndarray of uint64, shape (users,)
        Each user's own number, which nobody else knows.
    keep : callable
        Takes initial private arrays of the users; returns the stored ones, if any.
    norm_bound : float
        Largest Euclidean norm of one user's contribution to training; 0 for none.

    Raises
    ------
    ConfigError
        When there is no such system, the settings are not its own, or it does not bound norms.
    ValueError
        When the data does not fit the system.
    """
    side = _side(_rounds(system).host)(settings, data, keys, seed, keep)
    if norm_bound:
        if not isinstance(side, NormBounded):
            raise ConfigError(
                f"rounds.aggregation.norm_bound {norm_bound:g}: hosts of the system {system!r} bound no norms"
            )
        side.norm_bound = norm_bound
    return side


def folding_systems() -> tuple[str, ...]:
    """Return the names of the systems that serve users who never took part in training."""
    return tuple(name for name, system in systems().items() if system.folds_in)


def check_folds_in(system: str) -> None:
    """Check that a system serves users who never took part in training.

    Raises
    ------
    ConfigError
        It does not; the message names the systems that do.
    """
    found = system_named(system)
    if not found.folds_in:
        raise ConfigError(
            f"{found.title} has no recommendations for users who never took part in training: what it needs of a user "
            "beside the model is learned in training",
            hint=f"systems that have: {', '.join(folding_systems())}",
        )


def folded_in(
    system: str,
    settings: str,
    data: HostData,
    keys: NDArray[np.uint64],
    seed: int,
    model: Mapping[str, NDArray[np.float32]],
) -> HostSide:
    """Build a host's side of users who never took part in training, by a finished model and their data alone.

    Parameters
    ----------
    system, settings, seed
        As for `host_side`.
    data : HostData
        Data of the users; what is to count is of the training part.
    keys : ndarray of uint64, shape (users,)
        A number for each user, from which it draws where the system's users draw.
    model : mapping
        As participants fetched it.

    Raises
    ------
    ConfigError
        As `check_folds_in`.
    DataError
        The data does not fit the system, such as a rating out of its range.
    """
    check_folds_in(system)

    def keep(initial: Arrays) -> Arrays:
        return initial

    side = host_side(system, settings, data, keys, seed, keep)
    if not isinstance(side, FoldsIn):
        raise ConfigError(
            f"the system {system!r} is said to serve new users (System.folds_in), and its host has no fold_in"
        )
    side.fold_in(model)
    return side


def asks_owners(system: str) -> bool:
    """Return whether a system asks data owners for something in each round of training."""
    found = systems().get(system)
    return found is not None and found.owner is not None


def ratings_of(system: str, settings: str) -> tuple[float, float] | None:
    """Return the lowest and the highest rating that a system learns from; None where it learns from no ratings.

    Raises
    ------
    ConfigError
        When the settings are not the system's own.
    """
    found = systems().get(system)
    return None if found is None or found.ratings is None else found.ratings(settings)


def publishes(system: str, settings: str) -> bool:
    """Return whether hosts of a run publish tags, embeddings or vectors at the third party, beside sums.

    Raises
    ------
    ConfigError
        When the settings are not the system's own.
    """
    found = systems().get(system)
    if found is None:
        return False
    own = found.settings.from_json(settings)
    return own.expands or own.combines


def preferences_of(system: str) -> tuple[Preference, ...]:
    """Return the preferences that users of a system may set; none where there is no such system."""
    found = systems().get(system)
    return () if found is None else found.preferences


def fewest_users(system: str, settings: str) -> int:
    """Return the fewest users whose sum of training key holders decrypt; 1 where a system names no number.

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
    """Build a data owner's side of a system.

    Parameters
    ----------
    system, settings, seed
        As in the plan of the run.
    items : ndarray of int, shape (n,)
        The owner's items, by position in the catalogue.
    features : AttributeTable
        Features of the items that the owner knows, a row for each item.

    Raises
    ------
    ConfigError
        When there is no such system, it asks owners for nothing, or the settings are not its own.
    """
    make = system_named(system).owner
    if make is None:
        raise ConfigError(f"system {system!r} asks data owners for nothing")
    return make(settings, items, features, seed)
