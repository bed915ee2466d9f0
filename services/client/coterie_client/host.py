"""Define a client host's shared state, and the interface of its part in a run."""

from __future__ import annotations

import asyncio
import csv
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
import structlog
from google.protobuf.message import DecodeError, Message

from coterie.config.services import ClientSettings
from coterie.crypto import clocks
from coterie.crypto.authority import name_in
from coterie.crypto.identity import Bundle, Identity
from coterie.crypto.verification import Reason, VerificationError
from coterie.data.attributes import AttributeTable
from coterie.data.whole_file import cut_to_whole_lines
from coterie.errors import CertificateError, PeerError
from coterie.net.channel import Channel
from coterie.net.directory import Directory
from coterie.parties.party import Party
from coterie.process.runtime import Runtime
from coterie.rounds.consent import Consent
from coterie.rounds.plan_hash import holding_of
from coterie.rounds.sides import Likeness
from coterie.secure_sum.bundles import bundle_from_wire
from coterie.store import client as store
from coterie.store.engine import Writer
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie_client.history import Catalogued, Histories
from coterie_client.preferences import Preferences

if TYPE_CHECKING:
    from coterie.parties.custody import Custody

__all__ = [
    "Host",
    "Recommended",
    "TakingPart",
    "catalogued",
    "now_ms",
    "objections_to_owners",
    "read",
    "require_holdings",
    "without_owners",
]

_log = structlog.get_logger("coterie.client")

M = TypeVar("M", bound=Message)

Recommended = tuple[list[str], list[float], int]
"""Item keys, scores, model version; best first."""


@dataclass(frozen=True)
class Host:
    """A host: its users' keys and histories, its store, its connection to the COS.

    User ``n`` has position ``n - 1`` in ``identities``, ``bundles`` and the party's slots.
    """

    settings: ClientSettings
    runtime: Runtime
    party: Party
    identities: Sequence[Identity]
    bundles: Sequence[Bundle]
    histories: Histories
    preferences: Preferences
    engine: sa.Engine
    writer: Writer
    directory_key: bytes
    told: tuple[Mapping[str, int], AttributeTable] | None = None
    """Users' attributes: row by user name, and the table; None when none are configured."""
    thirdparty: Channel | None = None
    """Connection to the key directory, from which encryption keys are fetched."""
    revoked: Callable[[], Collection[bytes]] = frozenset
    """Gives the ids of all revoked participants, as known now."""
    custody: Custody | None = None
    """Custody of the run's key, where the host holds a share of it."""
    directory: Directory | None = None
    """The key directory, from which keys of other hosts' users are looked up."""
    _refused: set[tuple[str, str]] = field(default_factory=set)
    """Data owners that were refused, by name, each with the reason; they are noted once."""

    @property
    def consent(self) -> Consent:
        """The conditions under which this host's users take part in a run."""
        return self.settings.consent.consent(len(self.identities))

    async def fetch_catalogue(self) -> wire.Catalogue:
        """Fetch the newest catalogue.

        Raises
        ------
        PeerError
            When what the COS sends is no catalogue.
        VerificationError
            NOT_LISTED when an owner in it does not hold what the operator says.
        """
        _, payload = await self.party.fetch(wire.FetchKind.FETCH_KIND_CATALOGUE)
        catalogue = read(wire.Catalogue, payload)
        await asyncio.to_thread(require_holdings, catalogue, self.party.plan.holdings)
        return catalogue

    async def fetch_recipients(self) -> wire.Catalogue:
        """Fetch the newest catalogue, without the data owners to which this host must send nothing.

        All items stay, in their order.  Refusals of owners are on every user's receipt, with the reason.

        Raises
        ------
        PeerError
            When what the COS sends is no catalogue.
        """
        _, payload = await self.party.fetch(wire.FetchKind.FETCH_KIND_CATALOGUE)
        catalogue = read(wire.Catalogue, payload)
        refused = await asyncio.to_thread(
            objections_to_owners, catalogue, self.party.plan.holdings, self.directory_key
        )
        for position, reason in refused.items():
            name = catalogue.owners[position].name
            if (name, reason) not in self._refused:
                self._refused.add((name, reason))
                _log.warning("sends nothing to a data owner", owner=name, reason=reason)
                await self.note_refused(f"data-owner/{name}", [reason])
        return without_owners(catalogue, refused) if refused else catalogue

    async def note_sent(self, recipient: str, kind: str, count: int, size: int, user: int = 0) -> None:
        """Add an entry to the disclosure receipt; user 0 is the host as a whole.

        Callers that know the size note before they send: nothing then leaves without an entry when the host ends
        meanwhile, and what never arrived may have one.
        """
        thing = store.Sent(user, recipient, kind, count, size, now_ms())
        await self.writer.run(lambda connection: store.add_sent(connection, [thing]))

    async def note_refused(self, recipient: str, reasons: Sequence[str]) -> None:
        """Add refusals, for all users of the host, to the disclosure receipt."""
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
            Number of the evaluation.
        measured : mapping of str to ndarray of float64, shape (users,)
        users : sequence of int, optional
            Positions of users at this host; all when absent.
        """
        path = self.settings.state / "metrics.csv"
        # A host that was killed while it wrote measures again.
        cut_to_whole_lines(path)
        fresh = not path.exists() or not path.stat().st_size
        slots = self.party.slots
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if fresh:
                writer.writerow(["point", "slot", "metric", "value"])
            for name, values in measured.items():
                for user in range(len(slots)) if users is None else users:
                    writer.writerow([point, slots[user], name, values[user]])


class TakingPart(Protocol):
    """A client host's part in a run; one implementation for each kind of run."""

    metrics: Sequence[str]
    """Names of metrics that leave the host, inside sums."""

    async def forget_published(self) -> int:
        """Have what the host's users published beside sums deleted at the third party; return how many uploads."""

    async def begin(self, running: asyncio.TaskGroup) -> None:
        """Resume interrupted work, and start background work in the task group."""

    async def told(self, tasks: Sequence[wire.Task]) -> None:
        """Take the COS's list of open tasks."""

    async def finished(self) -> None:
        """Take note that the run is over: the COS sends no more tasks."""

    def recorded(self, item: str) -> int:
        """Take note of a new interaction; return how many owners will be sent it."""

    async def recommend(self, user: int, k: int) -> Recommended:
        """Return the best unseen items for a user, whose number counts from 1."""

    async def because(self, user: int, items: Sequence[str]) -> Likeness | None:
        """Return a user's own item that is most like each of some items; None where models compare no items."""

    async def stop(self) -> None:
        """Send nothing more."""

    def close(self) -> None:
        """Close files; the store takes no more writes."""


def now_ms() -> int:
    """Return the time, Unix milliseconds."""
    return time.time_ns() // 1_000_000


def read(kind: type[M], payload: bytes | None) -> M:
    """Parse a fetched payload as a message of a kind.

    Raises
    ------
    PeerError
        When the payload is no such message.
    """
    try:
        return kind.FromString(payload or b"")
    except DecodeError as error:
        raise PeerError(f"the COS sent what is no {kind.DESCRIPTOR.name}") from error


def require_holdings(catalogue: wire.Catalogue, holdings: Sequence[wire.Holding]) -> None:
    """Require that each owner in a catalogue holds exactly the items that the run's plan says.

    A plan without holdings leaves this to the COS.

    Raises
    ------
    PeerError
        When items and owners do not fit together.
    VerificationError
        NOT_LISTED when the plan does not name an owner, or says that it holds other items.
    """
    if not holdings:
        return
    stated = {one.owner: one for one in holdings}
    for owner, keys in zip(catalogue.owners, _owned(catalogue), strict=True):
        if not _holds(stated.get(owner.name), keys):
            raise VerificationError(Reason.NOT_LISTED, _other_items(owner.name))


def objections_to_owners(
    catalogue: wire.Catalogue, holdings: Sequence[wire.Holding], directory_key: bytes
) -> dict[int, str]:
    """Return why nothing may be sent to some owners of a catalogue, by their positions there.

    An owner has the TLS name of a data-owner process, and keys that this process enrolled.  The plan that the operator
    signed says which process that is, and which items the owner holds; a plan without holdings leaves both to the COS.

    Parameters
    ----------
    catalogue : Catalogue
    holdings : sequence of Holding
        Those of the run's plan.
    directory_key : bytes
        Raw Ed25519 public key of the directory, 32 bytes.

    Raises
    ------
    PeerError
        When items and owners of the catalogue do not fit together.
    """
    stated = {one.owner: one for one in holdings}
    times = Counter(owner.name for owner in catalogue.owners)
    now = clocks.now()
    found = dict[int, str]()
    for position, (owner, keys) in enumerate(zip(catalogue.owners, _owned(catalogue), strict=True)):
        try:
            party = name_in("data-owner", owner.tls_name)
            bundle = bundle_from_wire(owner.bundle)
            bundle.verify(directory_key, now)
            bundle.require_party(f"data-owner/{party}")
        except (CertificateError, VerificationError, Refusal) as error:
            found[position] = f"the COS introduces as a data owner what is none: {error.message}"
            continue
        said = stated.get(owner.name)
        if times[owner.name] > 1:
            found[position] = f"the COS introduces {times[owner.name]} data owners of this name"
        elif holdings and not _holds(said, keys):
            found[position] = _other_items(owner.name)
        elif said is not None and said.party != party:
            found[position] = (
                f"the COS introduces data owner {owner.name!r} as one of {party!r}, and the signed plan says "
                f"{said.party!r}"
            )
    return found


def _holds(stated: wire.Holding | None, keys: Sequence[str]) -> bool:
    """Return whether an owner holds just these items by the plan."""
    return stated is not None and stated == holding_of(stated.owner, keys, stated.party)


def without_owners(catalogue: wire.Catalogue, refused: Collection[int]) -> wire.Catalogue:
    """Return a catalogue without the owners at some positions; items that only they hold stay, without an owner."""
    kept = [position for position in range(len(catalogue.owners)) if position not in refused]
    moved = {position: index for index, position in enumerate(kept)}
    found = wire.Catalogue(
        version=catalogue.version,
        items=catalogue.items,
        owners=[catalogue.owners[position] for position in kept],
    )
    positions = iter(catalogue.owner_positions)
    for count in catalogue.owner_counts:
        left = [moved[one] for one in itertools.islice(positions, count) if one in moved]
        found.owner_counts.append(len(left))
        found.owner_positions.extend(left)
    return found


def _owned(catalogue: wire.Catalogue) -> list[list[str]]:
    """Return the keys of each owner's items.

    Raises
    ------
    PeerError
        When items and owners do not fit together.
    """
    owned: list[list[str]] = [[] for _ in catalogue.owners]
    positions = iter(catalogue.owner_positions)
    try:
        for key, count in zip(catalogue.items, catalogue.owner_counts, strict=True):
            for position in itertools.islice(positions, count):
                owned[position].append(key)
    except (IndexError, ValueError) as error:
        raise PeerError("the COS sent a catalogue whose items and owners do not fit together") from error
    return owned


def _other_items(owner: str) -> str:
    return f"the items that the server names for data owner {owner!r} are not those of the signed plan"


def catalogued(message: wire.Catalogue, owners: Sequence[bytes]) -> Catalogued:
    """Build the host's form of a catalogue; ``owners`` are participant ids of its owners, in its order."""
    member = np.zeros((len(message.items), len(message.owners)), bool)
    item = np.repeat(np.arange(len(message.items)), np.array(message.owner_counts, np.int64))
    member[item, np.array(message.owner_positions, np.int64)] = True
    return Catalogued(
        version=message.version,
        index={key: n for n, key in enumerate(message.items)},
        owners=tuple(owners),
        member=member,
    )
