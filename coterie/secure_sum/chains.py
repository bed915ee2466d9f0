"""The chains of one host: keys of shares for later masked sums, derived from an earlier agreement of two members.

In a masked sum members seal shares for their neighbours under keys that each pair agrees on.  Where the run's plan says
so (`RoundsPlan.channel_rounds`), two members that meet again go along a chain of keys in place of a new agreement:
three HMACs instead of an X25519 scalar multiplication (``coterie.crypto.masking``).

**When a pair uses its chain.**  A member says in its signed advertisement with which neighbours it holds a chain, and a
pair uses it where both say so.  What it advertised is given up in this sum, and the chain goes on, or a new one begins,
only when it has opened what the other one sealed for it.  So the two hold the same key, or one of them says that it
holds none and both agree anew.

**Forward secrecy** is that of an agreement for each sum.  A chain keeps the key of its next sum only, and a chain that
was advertised and under which nothing was opened is given up, as a share that was sealed and not delivered could be
opened with it.  Whoever takes a member's memory opens no share of an earlier sum.  It opens those of *later* sums of
this pair as long as the chain lasts, where with an agreement for each sum it opens none.  Chains are in memory only,
and a process that was started again agrees anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import NamedTuple, NoReturn

__all__ = ["MOST_SUMS", "Chain", "Chains", "chained_bits", "chained_bytes", "chains_for", "is_chained"]

MOST_SUMS = 1000
"""Most sums of one agreement that a plan may ask for."""

_MOST_CHAINS = 1 << 16


class Chain(NamedTuple):
    """The key of a pair of members for their next sum.

    Parameters
    ----------
    key : bytes
        32 bytes; a secret.
    sums : int
        Sums for which keys were derived from the agreement, that in which it was made included.
    """

    key: bytes
    sums: int

    def __repr__(self) -> str:
        return f"<Chain of {self.sums} sums>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Chain holds a secret and is never pickled")


class Chains:
    """The chains that the members of one host hold in one run.  Safe to share between threads.

    A member takes its chains out when it advertises them, so that two sums never derive keys from the same one, and
    gives back those that go on.  A member is in one sum at a time: after two at once its chains may differ from those
    of the others, who then open nothing of the next sum's and agree anew.

    Parameters
    ----------
    sums : int
        Sums for which an agreement is used (`RoundsPlan.channel_rounds`), at least 1.
    most : int
        Most chains that are held; beyond it the pairs that were not used for the longest time agree anew.
    """

    __slots__ = ("_held", "_lock", "_most", "_sums")

    def __init__(self, sums: int, most: int = _MOST_CHAINS) -> None:
        self._sums = sums
        self._most = most
        self._held: OrderedDict[tuple[bytes, bytes], Chain] = OrderedDict()
        self._lock = Lock()

    def take(self, own: bytes, peers: Iterable[bytes]) -> dict[bytes, Chain]:
        """Take the chains of a participant with others out; return them by the other one's id."""
        with self._lock:
            found = {peer: self._held.pop((own, peer), None) for peer in peers}
        return {peer: chain for peer, chain in found.items() if chain is not None}

    def give(self, own: bytes, chains: Mapping[bytes, Chain]) -> None:
        """Hold a participant's chains with others, by the other one's id; give up those that had all their sums."""
        with self._lock:
            for peer, chain in chains.items():
                if chain.sums < self._sums:
                    self._held[own, peer] = chain
            while len(self._held) > self._most:
                self._held.popitem(last=False)

    def __len__(self) -> int:
        return len(self._held)

    def __reduce__(self) -> NoReturn:
        raise TypeError("Chains hold secrets and are never pickled")


def chains_for(sums: int) -> Chains | None:
    """Return the chains of a host in a run whose plan has so many `channel_rounds`; None where it has none."""
    return Chains(min(sums, MOST_SUMS)) if sums else None


def chained_bytes(neighbours: int) -> int:
    """Return the length of the bits in the advertisement of a member with so many neighbours."""
    return -(-neighbours // 8)


def chained_bits(around: Iterable[int], chained: Iterable[int]) -> bytes:
    """Return a bit for each neighbour, ascending, the lowest bit of a byte first: 1 for those in ``chained``."""
    around, held = tuple(around), frozenset(chained)
    bits = bytearray(chained_bytes(len(around)))
    for at, member in enumerate(around):
        bits[at // 8] |= (member in held) << at % 8
    return bytes(bits)


def is_chained(bits: bytes, at: int) -> bool:
    """Return the bit of the neighbour at a place, counted from 0; False where there are no bits."""
    return at // 8 < len(bits) and bool(bits[at // 8] >> at % 8 & 1)
