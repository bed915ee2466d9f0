"""Keep the users who are registered and not in the population of a run, without going through the population again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from coterie_cos.participants import Registry

__all__ = ["WaitingUsers"]


class WaitingUsers:
    """Registered users outside the population, by party; used by `RoundsRun` to form waves of those who are present.

    Participants are looked at once each, as they come: a server that waits for parties looks again at each event.

    Parameters
    ----------
    registry : Registry
    users : sequence of int
        Slots of the population.
    """

    def __init__(self, registry: Registry, users: Sequence[int]) -> None:
        self._registry = registry
        slots = np.asarray(users, np.int64)
        self._within = np.zeros(int(slots.max(initial=-1)) + 1, bool)
        self._within[slots] = True
        self._looked = 0
        self._slots: dict[str, list[int]] = {}
        self._settled = False

    @property
    def settled(self) -> bool:
        """Whether there are no more users than when `settle` was called: nobody registered or came back since."""
        return self._settled and self._looked == self._registry.size

    def settle(self) -> None:
        """Take note that the users who are present now form no wave."""
        self._settled = True

    def took_in(self, slots: Iterable[int]) -> None:
        """Take note that users who waited are in the population now."""
        self._look()
        by_party: dict[str, set[int]] = {}
        for slot in slots:
            by_party.setdefault(self._registry.registered(slot).party, set()).add(slot)
        for party, within in by_party.items():
            left = [slot for slot in self._slots.pop(party, ()) if slot not in within]
            if left:
                self._slots[party] = left
        self._settled = False

    def came(self, party: str) -> None:
        """Take note that a party is present now."""
        if party in self._slots:
            self._settled = False

    def present(self, present: Callable[[str], bool], revoked: Callable[[bytes], bool]) -> list[int]:
        """Return the slots, ascending, of those whose party is present and who are not revoked."""
        self._look()
        registry = self._registry
        return sorted(
            slot
            for party, slots in self._slots.items()
            if present(party)
            for slot in slots
            if not revoked(registry.registered(slot).participant)
        )

    def _look(self) -> None:
        """Look at the participants who have come since it was done last."""
        registry = self._registry
        for slot in range(self._looked, registry.size):
            if slot < len(self._within) and self._within[slot]:
                continue
            one = registry.registered(slot)
            if one.is_user:
                self._slots.setdefault(one.party, []).append(slot)
        self._looked = registry.size
