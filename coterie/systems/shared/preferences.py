"""Preferences of users: numbers that each user may set at its own host, and that never leave it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Preference", "objection"]


@dataclass(frozen=True)
class Preference:
    """A number that each user of a system may set for itself.

    Attributes
    ----------
    name : str
        Name in files and calls.
    meaning : str
        What the number does, in words.
    lowest, highest : float
        Its range, both ends included.
    """

    name: str
    meaning: str
    lowest: float
    highest: float


def objection(system: str, known: Iterable[Preference], values: Mapping[str, float | None]) -> str:
    """Return why a system cannot take some users' preferences, without their values; empty where it can.

    Parameters
    ----------
    system : str
        Name of the system.
    known : iterable of Preference
        Those of the system.
    values : mapping of str to float
        Values by the preference's name; None to check the name only.
    """
    by_name = {one.name: one for one in known}
    for name, value in values.items():
        one = by_name.get(name)
        if one is None:
            expected = ", ".join(by_name) or "none"
            return f"system {system!r} has no preference {name!r}; expected {expected}"
        if value is not None and not (math.isfinite(value) and one.lowest <= value <= one.highest):
            return f"preference {name!r} is out of range; expected {one.lowest:g} to {one.highest:g}"
    return ""
