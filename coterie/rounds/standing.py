"""How far members and key holders say that a run has come, so that a server restored from a backup can follow them.

Such a server opens rounds that its members joined long ago, and asks for sums at places that they have revealed.  They
decline, and say where they stand by their journals.  The server goes on from where more than half of the parties of its
round stand at least: fewer could send it anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from coterie.rounds.member_round import Journal
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import rounds_pb2 as wire

__all__ = ["Standing", "agreed"]

Place = tuple[int, int]

_MOST_PURPOSES = 16


@dataclass(frozen=True)
class Standing:
    """The last round that somebody joined, and the last place of each purpose where it helped to reveal a sum.

    Parameters
    ----------
    joined : int
    places : mapping of str to (int, int)
        Pass and part, by purpose.
    """

    joined: int = 0
    places: Mapping[str, Place] = field(default_factory=dict)

    @classmethod
    def of(cls, journals: Iterable[Journal]) -> Standing:
        """Return how far the furthest of some journals is."""
        joined, places = 0, dict[str, Place]()
        for journal in journals:
            joined = max(joined, journal.joined)
            for one in journal.ledger.entries:
                places[one.purpose] = max(places.get(one.purpose, one.place), one.place)
        return cls(joined, places)

    def to_bytes(self) -> bytes:
        """Return the message that goes with declining."""
        places = [
            wire.Place(purpose=purpose, pass_number=pass_number, part=part)
            for purpose, (pass_number, part) in sorted(self.places.items())
        ]
        return wire.Standing(joined=self.joined, places=places).SerializeToString(deterministic=True)

    @classmethod
    def from_bytes(cls, payload: bytes) -> Standing:
        """Parse the message that `to_bytes` writes.

        Raises
        ------
        Refusal
            INVALID_FIELD when the payload is no such message.
        """
        try:
            message = wire.Standing.FromString(payload)
        except DecodeError:
            message = None
        if message is None or len(message.places) > _MOST_PURPOSES:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "the payload is no Standing",
                field="chunk.data",
                expected="nothing, or a serialised Standing",
            )
        return cls(message.joined, {one.purpose: (one.pass_number, one.part) for one in message.places})

    def furthest(self, other: Standing) -> Standing:
        """Return the further of two standings, in each of their parts."""
        places = dict(self.places)
        for purpose, place in other.places.items():
            places[purpose] = max(places.get(purpose, place), place)
        return Standing(max(self.joined, other.joined), places)


def agreed(standings: Sequence[Standing], parties: int) -> Standing:
    """Return where more than half of some parties stand at least.

    Parameters
    ----------
    standings : sequence of Standing
        One of each party that said where it stands.
    parties : int
        Number of all parties, more than 0.
    """
    nth = parties // 2
    purposes = {purpose for one in standings for purpose in one.places}
    rounds = sorted((one.joined for one in standings), reverse=True)
    places = {}
    for purpose in sorted(purposes):
        said = sorted((one.places[purpose] for one in standings if purpose in one.places), reverse=True)
        if nth < len(said):
            places[purpose] = said[nth]
    return Standing(rounds[nth] if nth < len(rounds) else 0, places)
