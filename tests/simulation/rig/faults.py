"""Draw, record and replay the faults of a schedule.

A schedule without faults is always the same.  Each occasion on which something can go wrong (a message on one link, an
effect that one party carries out, ...) is numbered within its place, and asks here for a fault.  A drawn fault is
recorded as a ``Fault``: place, number, kind.  A schedule is therefore the list of its faults, and so is any part of
that list, which lets a search find the shortest part that still fails.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["CHOICES", "Drawn", "Fault", "Faults", "Replayed"]

CHOICES: Mapping[str, tuple[str, ...]] = {
    # A message is lost, arrives late (and so out of order), or arrives twice.
    "message": ("drop", "delay", "delay", "twice"),
    # The process of the server or of a host dies before or after an effect, and restarts.
    "cos": ("crash",),
    "host": ("crash",),
    # The server is told, rightly or wrongly, that a host is gone.
    "presence": ("lost",),
    # The local step takes long, fails, or never ends.
    "train": ("slow", "fail", "hang"),
    # An intruder sends a message that must be refused.
    "intruder": (
        "conflict",
        "garbage",
        "long",
        "short",
        "bound",
        "wrong step",
        "stranger",
        "old round",
    ),
    # A key holder gives a wrong decryption.
    "decrypt": ("lie",),
    # The server shows a member another briefing than the others.
    "deceit": ("drop one", "add one", "swap", "other round"),
}
"""Kinds of faults for each kind of place."""

_LONGEST: Mapping[str, float] = {"drop": 0, "delay": 14, "twice": 14, "crash": 8, "slow": 20}
"""Longest delay or down time, seconds; some exceed a step's patience."""


@dataclass(frozen=True)
class Fault:
    """One fault of a schedule.

    Parameters
    ----------
    place : str
        Kind of place and its name: ``"message h0>cos"``, ``"cos"``, ``"host h1"``, ...
    number : int
        Number of the occasion at that place, from 0.
    what : str
        One of the kind's ``CHOICES``.
    amount : float
        Seconds for kinds that take time; otherwise a number from 0 to 1 by which a choice is made.
    """

    place: str
    number: int
    what: str
    amount: float = 0.0

    def __str__(self) -> str:
        """Return the fault as one readable line."""
        return f"{self.place}, occasion {self.number}: {self.what} {self.amount:g}"

    def plain(self) -> dict[str, str | int | float]:
        """Return the fault as a mapping for JSON."""
        return dataclasses.asdict(self)


class Faults(Protocol):
    """A source of faults for a schedule: drawn, or replayed from a list."""

    def at(self, place: str) -> Fault | None:
        """Return what goes wrong on the next occasion at a place."""
        ...


class Drawn:
    """Faults drawn by a seed.

    Parameters
    ----------
    rng : random.Random
    rates : mapping of str to float
        Probability of a fault on each occasion, by kind of place.
    most, most_crashes : int
        Most faults and crashes of the whole schedule; there are no more after them, so every schedule ends.
    """

    def __init__(
        self, rng: random.Random, rates: Mapping[str, float], most: int = 40, most_crashes: int = 6
    ) -> None:
        self.recorded: list[Fault] = []
        self._rng, self._rates, self._most, self._crashes = rng, rates, most, most_crashes
        self._occasions: Counter[str] = Counter()

    def at(self, place: str) -> Fault | None:
        """Return what goes wrong on the next occasion at a place."""
        number = self._occasions[place]
        self._occasions[place] = number + 1
        kind = place.partition(" ")[0]
        if self._rng.random() >= self._rates.get(kind, 0.0) or len(self.recorded) >= self._most:
            return None
        what = self._rng.choice(CHOICES[kind])
        if what == "crash":
            if not self._crashes:
                return None
            self._crashes -= 1
        # Cubed, so that short times are as likely as long ones.
        amount = (
            round(self._rng.random() ** 3 * _LONGEST[what], 3) if what in _LONGEST else self._rng.random()
        )
        fault = Fault(place, number, what, amount)
        self.recorded.append(fault)
        return fault


class Replayed:
    """Faults replayed from a list."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.recorded: Sequence[Fault] = tuple(faults)
        self._faults = {(fault.place, fault.number): fault for fault in self.recorded}
        self._occasions: Counter[str] = Counter()

    def at(self, place: str) -> Fault | None:
        """Return what goes wrong on the next occasion at a place."""
        number = self._occasions[place]
        self._occasions[place] = number + 1
        return self._faults.get((place, number))
