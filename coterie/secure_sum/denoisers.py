"""Denoisers of a sum: which connections take noise out of it, and for whom; members and server compute it alike.

Connections stand in an order that the run's beacon draws, and the first of them denoise: ``D`` of them, so that each
group of members has about twice the floor of users, but three at least.  Members are cut into ``D`` groups of about
equal size; group ``g`` has two denoisers, the connections at places ``g + 1`` and ``g + 2`` of the ring, and no member
of theirs.  Each
denoiser serves two groups.  Both denoisers of a group add up the same noise, so that one that lies is noticed.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from coterie.crypto.explicit import encode

__all__ = ["COPIES", "FEWEST_DENOISERS", "Denoisers"]

COPIES = 2
"""Denoisers of each member."""

FEWEST_DENOISERS = 3
"""Connections that a denoised sum needs: each member has two denoisers on connections of others."""

_ROOM = 2
"""Users of a group, in floors, where there are connections enough: some may drop out."""


@dataclass(frozen=True)
class Denoisers:
    """The denoisers of one sum.

    Parameters
    ----------
    seed : bytes
        What orders connections and members: from the run's beacon.
    devices : sequence of str
        Connection of each member of the plan.
    participants : sequence of bytes
        Participant of each member.
    users : sequence of int
        Users that each member covers.
    floor : int
        Fewest users whose noise is added up.
    """

    seed: bytes
    devices: Sequence[str]
    participants: Sequence[bytes]
    users: Sequence[int]
    floor: int

    @cached_property
    def ring(self) -> tuple[int, ...]:
        """Members whose keys the denoisers use: the first member of each denoising connection, in ring order.

        Empty where there are too few connections.
        """
        first: dict[str, int] = {}
        for member, device in enumerate(self.devices):
            first.setdefault(device, member)
        if len(first) < FEWEST_DENOISERS:
            return ()
        wanted = sum(self.users) // (_ROOM * max(self.floor, 1))
        count = min(max(wanted, FEWEST_DENOISERS), len(first))
        order = sorted(first, key=lambda device: self._drawn("denoiser", device.encode()))
        return tuple(first[device] for device in order[:count])

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """Group of each member; empty where there are too few connections.

        One member after the other, in an order that the seed draws, joins the group with the fewest users, the lowest
        of equals, of those whose denoisers are on other connections.
        """
        if not self.ring:
            return ()
        denoising = [
            {self.devices[self.ring[place]] for place in self.of_group(group)}
            for group in range(len(self.ring))
        ]
        sizes = [(0, group) for group in range(len(self.ring))]
        found = [0] * len(self.devices)
        for member in sorted(
            range(len(found)), key=lambda one: self._drawn("denoised", self.participants[one])
        ):
            passed = []
            while self.devices[member] in denoising[sizes[0][1]]:
                passed.append(heapq.heappop(sizes))
            users, group = sizes[0]
            heapq.heapreplace(sizes, (users + self.users[member], group))
            for one in passed:
                heapq.heappush(sizes, one)
            found[member] = group
        return tuple(found)

    def of_group(self, group: int) -> tuple[int, int]:
        """Return the places on the ring of a group's two denoisers."""
        return (group + 1) % len(self.ring), (group + 2) % len(self.ring)

    def served_by(self, place: int) -> tuple[int, int]:
        """Return the groups that the denoiser at a place of the ring serves, ascending."""
        one, other = sorted(((place - 1) % len(self.ring), (place - 2) % len(self.ring)))
        return one, other

    def of_member(self, member: int) -> tuple[int, int]:
        """Return the members whose keys a member seals its noise for: those of its group's denoisers."""
        one, other = self.of_group(self.groups[member])
        return self.ring[one], self.ring[other]

    def place_of(self, device: str) -> int | None:
        """Return the place of a connection on the ring; None where it does not denoise."""
        return next((place for place, member in enumerate(self.ring) if self.devices[member] == device), None)

    def users_in(self, group: int) -> int:
        """Return the number of users of a group."""
        return sum(users for users, of in zip(self.users, self.groups, strict=True) if of == group)

    @property
    def shortfall(self) -> str:
        """Why these members cannot be served; empty when they can."""
        if not self.ring:
            return (
                f"a denoised sum over members of {len(set(self.devices))} connections; it takes {FEWEST_DENOISERS}, "
                "because each member has two denoisers on connections of others"
            )
        least = min(map(self.users_in, range(len(self.ring))))
        if least >= self.floor:
            return ""
        return f"a denoiser would serve a group of {least} users; the plan's floor is {self.floor}"

    def _drawn(self, purpose: str, name: bytes) -> bytes:
        return hashlib.sha256(encode(purpose, self.seed, name)).digest()
