"""Which system runs under which secure sum, and why not under the others."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.systems.registry import KEYED, SUMS, SYSTEMS

__all__ = ["Combination", "combination", "combinations"]

_DRIFT = "drift"
_PROTECTS = {
    "clear": "the server sees the contribution of each party; a host adds up its users before",
    "masked": "the server sees sums over whole cohorts, and no contribution of a single party",
    "encrypted": "the same, by those who hold the key: the server and one of them together see everything",
    "shared-key": "participants hold the key: the server sees sums of metrics and neither contributions nor the model; "
    "it and one participant together see everything",
}


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


_OF_DRIFT = {
    ("published", "clear"): (True, "asynchronous, no rounds: each owner's update in clear"),
    ("published", "masked"): (
        False,
        "a sum needs rounds, and the published form has none: each owner's update is applied by itself; the shielded "
        "form has windows",
    ),
    ("shielded", "clear"): (
        True,
        "users keep their rows; the server sees each owner's sum over a window, of rows with k_min users",
    ),
    ("shielded", "masked"): (
        True,
        "users keep their rows; the server sees sums of at least three owners over a window, and of no single one",
    ),
    ("published", "encrypted"): (False, "a sum needs rounds, and the published form has none"),
    ("published", "shared-key"): (False, "a sum needs rounds, and the published form has none"),
    **{("shielded", under): (False, "windows are summed in clear or masked") for under in KEYED},
}


def combination(system: str, secure_sum: str, form: str = "published") -> Combination:
    """Return one combination; of names that nobody entered, one that is not allowed.

    Parameters
    ----------
    system, secure_sum : str
    form : str
        Of DRIFT.
    """
    if system == _DRIFT:
        unknown = (False, f"no such form or sum; there are {', '.join(' '.join(one) for one in _OF_DRIFT)}")
        return Combination(system, secure_sum, *_OF_DRIFT.get((form, secure_sum), unknown), form)
    if system not in SYSTEMS:
        return Combination(system, secure_sum, False, f"no such system; there are {', '.join(_systems())}")
    if secure_sum not in SUMS:
        return Combination(system, secure_sum, False, f"no such sum; there are {', '.join(SUMS)}")
    if secure_sum not in SYSTEMS[system].sums:
        offered = ", ".join(SYSTEMS[system].sums)
        return Combination(system, secure_sum, False, f"the system is entered for {offered} only")
    return Combination(system, secure_sum, True, _PROTECTS.get(secure_sum, "see the sum's own description"))


def combinations() -> list[Combination]:
    """Return every system under every sum."""
    return [
        combination(system, secure_sum, form)
        for system in _systems()
        for form in (("published", "shielded") if system == _DRIFT else ("",))
        for secure_sum in SUMS
    ]


def _systems() -> tuple[str, ...]:
    return (_DRIFT, *SYSTEMS)
