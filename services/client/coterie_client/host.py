"""What every client host has, whatever it takes part in."""

from __future__ import annotations

import asyncio
import csv
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from google.protobuf.message import DecodeError, Message

from coterie.config.services import ClientSettings
from coterie.crypto.identity import Bundle, Identity
from coterie.data.attributes import AttributeTable
from coterie.errors import PeerError
from coterie.net.channel import Channel
from coterie.parties.party import Party
from coterie.process.runtime import Runtime
from coterie.rounds.consent import Consent
from coterie.store import client as store
from coterie.store.engine import Writer
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie_client.history import Catalogued, Histories

if TYPE_CHECKING:
    from coterie.parties.custody import Custody

__all__ = ["Host", "Recommended", "TakingPart", "best_unseen", "catalogued", "now_ms", "read"]

M = TypeVar("M", bound=Message)

Recommended = tuple[list[str], list[float], int]
"""Item keys, scores, model version; best first."""


@dataclass(frozen=True)
class Host:
    """A host: its users' keys and histories, its store, its connection to the COS.

    User ``n`` stands at position ``n - 1`` of ``identities``, ``bundles`` and the party's slots.
    """

    settings: ClientSettings
    runtime: Runtime
    party: Party
    identities: Sequence[Identity]
    bundles: Sequence[Bundle]
    histories: Histories
    engine: sa.Engine
    writer: Writer
    directory_key: bytes
    told: tuple[Mapping[str, int], AttributeTable] | None = None
    """What is known of users: row by name, and the rows; None where nothing is."""
    thirdparty: Channel | None = None
    """To the key directory; only where keys are fetched."""
    revoked: Callable[[], Collection[bytes]] = frozenset
    """Gives the ids of all revoked participants, as known now."""
    custody: Custody | None = None
    """Of the run's key, where the host holds it with others."""

    @property
    def consent(self) -> Consent:
        """What this host agrees to take part in."""
        return self.settings.consent.consent(len(self.identities))

    async def fetch_catalogue(self) -> wire.Catalogue:
        """Fetch the newest catalogue."""
        _, payload = await self.party.fetch(wire.FetchKind.FETCH_KIND_CATALOGUE)
        return read(wire.Catalogue, payload)

    async def note_sent(self, recipient: str, kind: str, count: int, size: int, user: int = 0) -> None:
        """Write down that something has left; user 0 is the host as a whole."""
        thing = store.Sent(user, recipient, kind, count, size, now_ms())
        await self.writer.run(lambda connection: store.add_sent(connection, [thing]))

    async def note_refused(self, recipient: str, reasons: Sequence[str]) -> None:
        """Write down what was refused for all users of the host."""
        things = [store.Refused(0, recipient, reason, now_ms()) for reason in reasons]
        await self.writer.run(lambda connection: store.add_declined(connection, things))

    def write_per_user(
        self,
        point: int,
        measured: Mapping[str, npt.NDArray[np.float64]],
        users: Sequence[int] | None = None,
    ) -> None:
        """Append each user's metrics to ``metrics.csv``: point, slot, metric, value.

        Parameters
        ----------
        point : int
            Of the evaluation.
        measured : mapping of str to ndarray of float64, shape (users,)
        users : sequence of int, optional
            Positions at this host; all when absent.
        """
        path = self.settings.state / "metrics.csv"
        fresh = not path.exists()
        slots = self.party.slots
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if fresh:
                writer.writerow(["point", "slot", "metric", "value"])
            for name, values in measured.items():
                for user in range(len(slots)) if users is None else users:
                    writer.writerow([point, slots[user], name, values[user]])


class TakingPart(Protocol):
    """A way of taking part in a run."""

    metrics: Sequence[str]
    """Metrics that leave, inside sums."""

    async def begin(self, running: asyncio.TaskGroup) -> None:
        """Take up what was under way; what goes on beside the tasks runs in the group."""

    async def told(self, tasks: Sequence[wire.Task]) -> None:
        """Take note of the tasks that are open now."""

    async def finished(self) -> None:
        """Take note that nothing more will be asked."""

    def recorded(self, item: str) -> int:
        """Take note of a new interaction; return how many owners hold the item and will be sent it."""

    async def recommend(self, user: int, k: int) -> Recommended:
        """Return the best items for a user, from 1, without what it has seen."""

    async def stop(self) -> None:
        """Send nothing more."""

    def close(self) -> None:
        """Close what it has opened; the store takes no more writes."""


def now_ms() -> int:
    """Return the time, Unix milliseconds."""
    return time.time_ns() // 1_000_000


def read(kind: type[M], payload: bytes | None) -> M:
    """Return the message that a fetched payload must be.

    Raises
    ------
    PeerError
        When it is none.
    """
    try:
        return kind.FromString(payload or b"")
    except DecodeError as error:
        raise PeerError(f"the COS sent what is no {kind.DESCRIPTOR.name}") from error


def best_unseen(
    items: Sequence[str], scores: npt.NDArray[np.floating], seen: set[int], k: int
) -> tuple[list[str], list[float]]:
    """Return keys and scores of the best items that are not seen; equal ones in the order of the catalogue.

    Of scores that are all equal none is best: of such a user nothing is known, and nothing is recommended.
    """
    if len(scores) > 1 and (scores == scores[0]).all():
        return [], []
    order = np.argsort(-scores, kind="stable")[: k + len(seen)]
    best = [int(item) for item in order if int(item) not in seen][:k]
    return [items[item] for item in best], [float(scores[item]) for item in best]


def catalogued(message: wire.Catalogue, owners: Sequence[bytes]) -> Catalogued:
    """Return a catalogue as a host uses it; ``owners`` are the participants of its owners."""
    member = np.zeros((len(message.items), len(message.owners)), bool)
    item = np.repeat(np.arange(len(message.items)), np.array(message.owner_counts, np.int64))
    member[item, np.array(message.owner_positions, np.int64)] = True
    return Catalogued(
        version=message.version,
        index={key: n for n, key in enumerate(message.items)},
        owners=tuple(owners),
        member=member,
    )
