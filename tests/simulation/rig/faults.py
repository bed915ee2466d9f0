"""What goes wrong in a schedule: drawn by a seed, recorded, and played again from the record.

A schedule without faults is always the same.  Each place where something can go wrong (a message of one link, an
effect that one party carries out, ...) asks here, and is numbered.  What was drawn is recorded as a ``Fault``: place,
number, what.  So a schedule is the list of its faults, a part of that list is a schedule, too, and the shortest list
that still fails can be found by leaving out.
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
    # A message: never arrives, arrives late (and so out of order), arrives twice.
    "message": ("drop", "delay", "delay", "twice"),
    # Before or after an effect of the server or of a host: its process dies, and comes back.
    "cos": ("crash",),
    "host": ("crash",),
    # The server is told, rightly or wrongly, that a host is gone.
    "presence": ("lost",),
    # The local step takes long, fails, or never ends.
    "train": ("slow", "fail", "hang"),
    # Somebody sends what must be refused.
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
    # A key holder says that something else was in the sum.
    "decrypt": ("lie",),
    # The server shows a member something else than the others.
    "deceit": ("drop one", "add one", "swap", "other round"),
}
"""For each kind of place, what can go wrong there."""

_LONGEST: Mapping[str, float] = {"drop": 0, "delay": 14, "twice": 14, "crash": 8, "slow": 20}
"""Longest delay or down time, seconds: longer than a step's patience for some."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Parameters
    ----------
    place : str
        Kind of place and its name: ``"message h0>cos"``, ``"cos"``, ``"host h1"``, ...
    number : int
        Which occasion at that place, from 0.
    what : str
        One of the kind's ``CHOICES``.
    amount : float
        Seconds, where there are some; a number from 0 to 1 to choose with elsewhere.
    """

    place: str
    number: int
    what: str
    amount: float = 0.0

    def __str__(self) -> str:
        """Return it as one line for people."""
        return f"{self.place}, occasion {self.number}: {self.what} {self.amount:g}"

    def plain(self) -> dict[str, str | int | float]:
        """Return it for JSON."""
        return dataclasses.asdict(self)


class Faults(Protocol):
    """Where faults come from."""

    def at(self, place: str) -> Fault | None:
        """Return what goes wrong on the next occasion at a place."""
        ...


class Drawn:
    """Faults drawn by a seed.

    Parameters
    ----------
    rng : random.Random
    rates : mapping of str to float
        By kind of place, the probability of a fault on each occasion.
    most, most_crashes : int
        Faults and crashes of the whole schedule; after them nothing goes wrong any more, so every schedule ends.
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
        # Short ones are as likely as long ones: cubed.
        amount = (
            round(self._rng.random() ** 3 * _LONGEST[what], 3) if what in _LONGEST else self._rng.random()
        )
        fault = Fault(place, number, what, amount)
        self.recorded.append(fault)
        return fault


class Replayed:
    """Faults from a list."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.recorded: Sequence[Fault] = tuple(faults)
        self._faults = {(fault.place, fault.number): fault for fault in self.recorded}
        self._occasions: Counter[str] = Counter()

    def at(self, place: str) -> Fault | None:
        """Return what goes wrong on the next occasion at a place."""
        number = self._occasions[place]
        self._occasions[place] = number + 1
        return self._faults.get((place, number))
