"""Visibility of data in a run: which role may see what, by system, form and secure sum."""

from __future__ import annotations

from collections.abc import Iterator

from coterie.errors import ConfigError
from coterie.privacy import visibility
from coterie.privacy.declarations import Access, AccessRows
from coterie.systems.registry import combination, systems

__all__ = ["declared", "matrix", "rows_of"]


def rows_of(system: str, form: str, secure_sum: str) -> AccessRows:
    """Return the visibility that a system declares, by kind of datum.

    Raises
    ------
    ConfigError
        The system does not run in this form under this sum.
    """
    found = systems().get(system)
    if found is None or form not in found.forms or not combination(system, secure_sum, form).allowed:
        known = "; ".join(", ".join(each) for each in declared())
        raise ConfigError(
            f"no visibility is declared for {system}, {form}, {secure_sum}", hint=f"declared: {known}"
        )
    return found.declared(form, secure_sum)


def matrix(system: str, form: str, secure_sum: str) -> dict[str, dict[str, Access]]:
    """Return the access of each role to each kind of datum.

    Parameters
    ----------
    system, form, secure_sum : str
        As in the plan of a run.

    Raises
    ------
    ConfigError
        The system does not run in this form under this sum.
    """
    return visibility.matrix(rows_of(system, form, secure_sum))


def declared() -> Iterator[tuple[str, str, str]]:
    """Yield every combination of system, form and secure sum that is allowed."""
    for name, system in systems().items():
        for form in system.forms:
            for secure_sum in system.sums:
                if combination(name, secure_sum, form).allowed:
                    yield name, form, secure_sum
