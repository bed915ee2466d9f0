"""Keep a run's participants by slot, and the table of which owner holds which item."""

from __future__ import annotations

import struct
import tempfile
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from coterie.crypto.identity import Bundle
from coterie.crypto.merkle import RunningRoot, leaf_hash
from coterie.rounds.population import Ids
from coterie.store import cos as store
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1.common_pb2 import SlotRange
from coterie.wire.v1.orchestrator_pb2 import Catalogue, CatalogueOwner, Participant, ParticipantKind

__all__ = ["EXPECTED", "Registry", "Roll", "ranges"]


def ranges(slots: Iterable[int]) -> list[SlotRange]:
    """Return slots as ranges, in the order given."""
    found: list[SlotRange] = []
    for slot in slots:
        if found and found[-1].first + found[-1].count == slot:
            found[-1].count += 1
        else:
            found.append(SlotRange(first=slot, count=1))
    return found


_ID_BYTES = 32
_BEGINNING = 8
_SHORT = 16
"""Most slots of a range, on average, that are looked at one by one."""
_RECENT = 1 << 14
"""Most participants whose slots are not sorted in yet."""
_IN_MEMORY = 1 << 18
_ROWS = 500
_LENGTH = struct.Struct("<I")


_KEPT_OF_A_USER = Participant(kind=ParticipantKind.PARTICIPANT_KIND_USER).SerializeToString()


EXPECTED = b""
"""What the store has in the place of the message of a participant that `Registry.expect` was told of."""


def _holds(message: Participant) -> bool:
    return message.kind == ParticipantKind.PARTICIPANT_KIND_KEY_HOLDER


class Roll:
    """The participants of a registration under way: ids in memory, messages on disk; used by `Orchestrator`.

    Participants enter the registry only once all have been checked, and there may be very many.
    """

    def __init__(self) -> None:
        self._ids = bytearray()
        self.participants = Ids(self._ids)
        """Ids, in the order in which they came."""
        self.owners: dict[int, Participant] = {}
        """Messages of data owners, by position."""
        self.holders = False
        """Whether the participants are key holders."""
        self.tree: RunningRoot | None = None
        """The tree over the ids, of users who delegate together; None where each delegates for itself."""
        self.first_public = b""
        """Signing key of the first participant."""
        self.without_log = False
        """Whether the third party's log did not answer."""
        self.joining = False
        """Whether all participants have been checked and are being registered."""
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 - closed with the roll

    def takes(self, message: Participant) -> bool:
        """Return whether a participant may follow those before it.

        Key holders register apart from all others, and only users delegate together.
        """
        if self.tree is not None and (
            message.kind != ParticipantKind.PARTICIPANT_KIND_USER or message.HasField("delegation")
        ):
            return False
        return not self.participants or self.holders == _holds(message)

    def begin_tree(self) -> None:
        """Expect users who delegate together, all of whom come from now on."""
        self.tree = RunningRoot()

    def add(self, bundle: Bundle, message: Participant) -> None:
        """Append a participant, of whom this is the verified bundle."""
        participant = bundle.participant_id
        if self.tree is not None:
            self.tree.append(leaf_hash(participant))
        self.first_public = self.first_public or bundle.signing_public
        if message.kind == ParticipantKind.PARTICIPANT_KIND_DATA_OWNER:
            self.owners[len(self.participants)] = message
        self.holders |= _holds(message)
        self._ids += participant
        # Of users who delegate together nothing but the kind is read again, and there are very many.
        packed = message.SerializeToString() if self.tree is None else _KEPT_OF_A_USER
        self._file.write(_LENGTH.pack(len(packed)) + packed)

    def rows(self, slots: Sequence[int], party: str) -> Iterator[list[tuple[int, bytes, str, bytes]]]:
        """Yield rows for the store: slot, id, party, message; some hundreds at a time."""
        self._file.seek(0)
        for first in range(0, len(slots), _ROWS):
            some = range(first, min(first + _ROWS, len(slots)))
            yield [(slots[at], self.participants[at], party, self._message()) for at in some]

    def _message(self) -> bytes:
        (length,) = _LENGTH.unpack(self._file.read(_LENGTH.size))
        return self._file.read(length)

    def close(self) -> None:
        """Delete the file of messages."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class Registered:
    """A registered participant.

    Only a data owner's message is kept in memory, for the catalogue; users' messages, which are many, are in the store.
    """

    participant: bytes
    party: str
    owner: Participant | None
    is_holder: bool = False
    """Whether the participant is a key holder."""

    @property
    def is_owner(self) -> bool:
        """Whether the participant is a data owner."""
        return self.owner is not None

    @property
    def is_user(self) -> bool:
        """Whether the participant is a user."""
        return self.owner is None and not self.is_holder


class _Index:
    """The slots of participants by id, 12 bytes each: for most of them sorted by the first 8 bytes of the id.

    Ids are hashes, so hardly any two begin with the same 8 bytes; where they do, the whole ids are compared.

    Parameters
    ----------
    ids : bytearray
        Ids by slot, 32 bytes each; the registry's own, which grows.
    """

    def __init__(self, ids: bytearray) -> None:
        self._ids = ids
        self._beginnings = np.zeros(0, np.uint64)
        self._slots = np.zeros(0, np.uint32)
        self._recent: dict[bytes, int] = {}

    def add(self, participant: bytes, slot: int) -> None:
        """Note the slot of a participant that has none."""
        self._recent[participant] = slot

    def settle(self, most: int = 0) -> None:
        """Sort in participants that were added, if they are more than so many."""
        if len(self._recent) <= most:
            return
        fresh = np.frombuffer(b"".join(one[:_BEGINNING] for one in self._recent), ">u8").astype(np.uint64)
        slots = np.fromiter(self._recent.values(), np.uint32, len(self._recent))
        self._recent = {}
        beginnings = np.concatenate([self._beginnings, fresh])
        order = np.argsort(beginnings, kind="stable")
        self._beginnings, self._slots = beginnings[order], np.concatenate([self._slots, slots])[order]

    def find(self, participants: Sequence[bytes]) -> list[int | None]:
        """Return the slot of each participant; None for one that has none."""
        found = [self._recent.get(participant) for participant in participants]
        if not len(self._slots) or not found:
            return found
        # An id of another length is nobody's: no slot is found for its padded beginning.
        beginnings = b"".join(one[:_BEGINNING].ljust(_BEGINNING, b"\0") for one in participants)
        wanted = np.frombuffer(beginnings, ">u8").astype(np.uint64)
        first = np.searchsorted(self._beginnings, wanted)
        last = np.searchsorted(self._beginnings, wanted, side="right")
        for position in np.flatnonzero(last > first).tolist():
            for slot in self._slots[first[position] : last[position]].tolist():
                if self._ids[slot * _ID_BYTES : (slot + 1) * _ID_BYTES] == participants[position]:
                    found[position] = slot
                    break
        return found


class _BySlot(Sequence[Registered]):
    """The participants of a registry by slot; each is put together when it is asked for."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def __len__(self) -> int:
        return self._registry.size

    @overload
    def __getitem__(self, at: int) -> Registered: ...
    @overload
    def __getitem__(self, at: slice) -> list[Registered]: ...
    def __getitem__(self, at: int | slice) -> Registered | list[Registered]:
        if isinstance(at, slice):
            return [self._registry.registered(slot) for slot in range(*at.indices(len(self)))]
        return self._registry.registered(range(len(self))[at])


class Registry:
    """The participants and the catalogue of one run.

    Slots are given in the order of registration and never change; a participant that registers again keeps its slot.
    A participant takes about 52 bytes: very many users register.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        # By slot: id, 32 bytes, and number of the party.
        self._ids = bytearray()
        self._party = array("I")
        self._index = _Index(self._ids)
        self._parties: list[str] = []
        self._number: dict[str, int] = {}
        self._by_party: dict[str, array[int]] = {}
        self._users_at = Counter[str]()
        self._owner: dict[int, Participant] = {}
        self._holders: set[int] = set()
        self._expected: set[int] = set()
        """Slots of users whose party has not registered here."""
        self.by_slot: Sequence[Registered] = _BySlot(self)
        self.owners: list[int] = []
        """Slots of data owners, ascending."""
        self.items: list[str] = []
        self._item_index: dict[str, int] = {}
        self.held: dict[int, npt.NDArray[np.uint32]] = {}
        # The same as one flag for each item, for a look-up at every exchange.
        self._is_held: dict[int, npt.NDArray[np.bool_]] = {}
        self.catalogue_version = 0

    @property
    def size(self) -> int:
        """Number of slots."""
        return len(self._party)

    @property
    def parties(self) -> Collection[str]:
        """The parties that have registered participants."""
        return self._by_party.keys()

    def registered(self, slot: int) -> Registered:
        """Return the participant at a slot."""
        return Registered(
            bytes(self._ids[slot * _ID_BYTES : (slot + 1) * _ID_BYTES]),
            self._parties[self._party[slot]],
            self._owner.get(slot),
            slot in self._holders,
        )

    def people(self, slots: Sequence[int]) -> tuple[Ids, list[str]]:
        """Return the ids and the parties of the participants at some slots, in their order."""
        at = np.asarray(slots, np.int64)
        if not at.size:
            return Ids(b""), []
        # Before the views are made: one that an error's traceback holds would keep the arrays from growing.
        if not 0 <= int(at.min()) <= int(at.max()) < self.size:
            raise IndexError("a slot that is not given")
        table = np.frombuffer(self._ids, f"V{_ID_BYTES}")
        numbers = np.frombuffer(self._party, np.uint32)
        return Ids(table[at].tobytes()), [self._parties[number] for number in numbers[at].tolist()]

    def restore(self, connection: sa.Connection, catalogue_version: int) -> None:
        """Restore participants and items from the store."""
        for row in connection.execute(
            sa.select(store.participants)
            .where(store.participants.c.run_id == self._run_id)
            .order_by(store.participants.c.slot)
        ):
            message = Participant.FromString(row.message)
            is_owner = message.kind == ParticipantKind.PARTICIPANT_KIND_DATA_OWNER
            self._append(
                row.participant,
                row.party,
                message if is_owner else None,
                _holds(message),
                expected=row.message == EXPECTED,
            )
            self._index.settle(_RECENT)
        for row in connection.execute(
            sa.select(store.items.c.key)
            .where(store.items.c.run_id == self._run_id)
            .order_by(store.items.c.item)
        ):
            self._item_index[row.key] = len(self.items)
            self.items.append(row.key)
        for row in connection.execute(
            sa.select(store.holdings).where(store.holdings.c.run_id == self._run_id)
        ):
            self.hold(row.slot, np.frombuffer(row.items, "<u4"))
        self.catalogue_version = catalogue_version

    def add(
        self,
        party: str,
        participants: Sequence[bytes],
        owners: Mapping[int, Participant],
        holders: bool = False,
    ) -> list[int]:
        """Register participants of a party.

        Parameters
        ----------
        party : str
        participants : sequence of bytes
            Their ids.
        owners : mapping of int to Participant
            Messages of the participants that are data owners, by position.
        holders : bool
            Whether the participants are key holders.

        Returns
        -------
        list of int
            Slots in the order given.

        Raises
        ------
        Refusal
            CONFLICT when another party already speaks for one of the participants.
        """
        slots = list[int]()
        known = self._index.find(participants)
        own = self._number.get(party)
        if any(slot is not None and self._party[slot] != own for slot in known):
            raise Refusal(
                ErrorReason.ERROR_REASON_CONFLICT,
                "another party speaks for one of these participants in this run",
                field="participants",
                expected=f"a participant of {party}",
            )
        first = self.size
        added, returned = dict[bytes, int](), list[int]()
        for position, participant in enumerate(participants):
            slot = known[position]
            if slot is None:
                # One that comes twice was added a moment ago.
                slot = added.get(participant)
            if slot is None:
                slot = self._append(participant, party, owners.get(position), holders)
                added[participant] = slot
            elif slot in self._expected:
                self._expected.discard(slot)
                returned.append(slot)
            elif position in owners:
                self._owner[slot] = owners[position]
            slots.append(slot)
        if returned:
            self._by_party[party] = array("I", sorted([*self.slots_of(party), *returned]))
            self._users_at[party] += len(returned)
        if self.size > first:
            self._index.settle(_RECENT)
        return slots

    def expect(self, participants: Sequence[bytes], parties: Sequence[str]) -> list[int]:
        """Give slots to users who had registered with a server of which this one is an older copy; return their slots.

        Nobody speaks for those who are new here until their party registers again, which gives them the same slots.

        Raises
        ------
        Refusal
            CONFLICT when another party speaks for one of them here.
        """
        slots = list[int]()
        known = self._index.find(participants)
        # All before the first is given a slot, which nobody would write.
        for party, slot in zip(parties, known, strict=True):
            if slot is not None and self.registered(slot).party != party:
                raise Refusal(
                    ErrorReason.ERROR_REASON_CONFLICT,
                    "another party speaks for one of these participants in this run",
                    field="participants",
                    expected=f"a participant of {party}",
                )
        for participant, party, slot in zip(participants, parties, known, strict=True):
            slots.append(self._append(participant, party, None, expected=True) if slot is None else slot)
        self._index.settle(_RECENT)
        return slots

    def slot_of(self, participant: bytes) -> int | None:
        """Return the slot of a participant; None when it is not registered."""
        return self._index.find([participant])[0]

    def _append(
        self,
        participant: bytes,
        party: str,
        owner: Participant | None,
        is_holder: bool = False,
        *,
        expected: bool = False,
    ) -> int:
        if len(participant) != _ID_BYTES:
            raise ValueError(f"a participant's id of {len(participant)} bytes, expected {_ID_BYTES}")
        slot = self.size
        number = self._number.get(party)
        if number is None:
            number = self._number[party] = len(self._parties)
            self._parties.append(party)
        self._ids += participant
        self._party.append(number)
        self._index.add(participant, slot)
        if expected:
            self._expected.add(slot)
            return slot
        self._by_party.setdefault(party, array("I")).append(slot)
        if is_holder:
            self._holders.add(slot)
        if owner is not None:
            self._owner[slot] = owner
            self.owners.append(slot)
        if owner is None and not is_holder:
            self._users_at[party] += 1
        return slot

    def add_items(self, keys: Iterable[str]) -> tuple[npt.NDArray[np.uint32], list[str], int]:
        """Return indices of item keys; new keys get new indices.

        Returns
        -------
        indices : ndarray of uint32
            Indices of the keys, in their order.
        fresh : list of str
            The keys that were new.
        first : int
            Index of the first new key.
        """
        first = len(self.items)
        indices = []
        for key in keys:
            index = self._item_index.get(key)
            if index is None:
                index = self._item_index[key] = len(self.items)
                self.items.append(key)
            indices.append(index)
        return np.asarray(indices, np.uint32), self.items[first:], first

    def hold(self, slot: int, indices: npt.NDArray[np.uint32]) -> None:
        """Set the items that an owner holds, replacing earlier ones."""
        self.held[slot] = indices
        self._is_held[slot] = np.zeros(len(self.items), bool)
        self._is_held[slot][indices] = True

    def number_by_owner(self) -> bool:
        """Renumber the items: owner by owner in the order of their names, each owner's items in its own order.

        Before, indices follow the order in which owners happened to register.  Parties that fetched the catalogue
        before have to fetch it again.

        Returns
        -------
        bool
            Whether any index has changed.
        """
        order: dict[int, None] = {}
        for slot in sorted(self.held, key=self.by_name):
            order |= dict.fromkeys(self.held[slot].tolist())
        order |= dict.fromkeys(range(len(self.items)))
        before = list(order)
        if before == list(range(len(before))):
            return False
        number = np.empty(len(before), np.uint32)
        number[before] = np.arange(len(before), dtype=np.uint32)
        self.items = [self.items[item] for item in before]
        self._item_index = {key: item for item, key in enumerate(self.items)}
        for slot, held in list(self.held.items()):
            self.hold(slot, number[held])
        return True

    def by_name(self, slot: int) -> tuple[str, bytes]:
        """Return the sort key of an owner, name then id, where the order of registration must not matter."""
        one = self.by_slot[slot]
        return "" if one.owner is None else one.owner.name, one.participant

    def check_items(self, slot: int, items: npt.NDArray[np.uint32], *, field: str) -> None:
        """Check that an owner holds all items of strictly increasing indices.

        Raises
        ------
        Refusal
            UNKNOWN_ITEM when it does not hold one.
        """
        if not len(items):
            return
        own = self._is_held.get(slot)
        if own is None or int(items[-1]) >= len(own) or np.count_nonzero(own.take(items)) < len(items):
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_ITEM,
                f"{field} names an item that this data owner does not hold",
                field=field,
                expected="items of its registration",
            )

    def slots_of(self, party: str) -> Sequence[int]:
        """Return the slots for which a party speaks, ascending."""
        return self._by_party.get(party, ())

    def users_at(self, party: str) -> int:
        """Return for how many users a party speaks."""
        return self._users_at[party]

    def users_of(self, party: str) -> Iterator[tuple[int, bytes]]:
        """Yield slot and id of each user for whom a party speaks, ascending by slot."""
        for slot in self.slots_of(party):
            if slot not in self._owner and slot not in self._holders:
                yield slot, bytes(self._ids[slot * _ID_BYTES : (slot + 1) * _ID_BYTES])

    def own_slot(self, party: str, slot: int, *, owner: bool) -> Registered:
        """Return the participant at a slot, after checking that the party may speak for it.

        Raises
        ------
        Refusal
            UNKNOWN_PARTICIPANT for a slot that is empty, another party's, or of the other kind.
        """
        self._require_own(party, range(slot, slot + 1), owner=owner)
        return self.registered(slot)

    def _require_own(self, party: str, slots: range, *, owner: bool) -> None:
        """Require that a party may speak for all of some slots in a row, and that they are owners', or none is."""
        number = self._number.get(party)
        slot = slots.start
        # The slot of a user who is a member: NumPy would take longer than all else of a message.
        alone = len(slots) == 1 and slot < len(self._party) and self._party[slot] == number
        if alone and (slot in self._owner) == owner:
            return
        # A copy: a view that an error's traceback holds would keep the array from growing.
        parties = np.array(self._party[slots.start : slots.stop], np.uint32)
        bad = np.flatnonzero(parties != number) if number is not None else np.arange(len(slots))
        wrong = slots[int(bad[0])] if len(bad) else None
        if wrong is None and len(parties) < len(slots):
            wrong = slots[len(parties)]
        if wrong is None:
            wrong = next((slot for slot in slots if (slot in self._owner) != owner), None)
        if wrong is not None:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
                f"slot {wrong} is not one that {party} may speak for",
                field="slot",
                expected="a slot from this party's registration",
            )

    def own_slots(self, party: str, found: Iterable[SlotRange], *, owner: bool) -> list[int]:
        """Return the slots of ranges one by one, after checking that the party may speak for all.

        Raises
        ------
        Refusal
            UNKNOWN_PARTICIPANT as for `own_slot`, or when the ranges name more slots than there are.
        """
        parts = [(part.first, part.count) for part in found]
        # Check before the ranges are expanded: a range of a few bytes can name four billion slots.
        if sum(count for _, count in parts) > self.size:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
                "the ranges name more slots than the run has",
                field="slots",
                expected="slots from this party's registration, each once",
            )
        slots = [slot for first, count in parts for slot in range(first, first + count)]
        if len(slots) > _SHORT * len(parts) or not self._all_own(party, slots, owner=owner):
            # As whole ranges: quicker where they are long, and it names the slot that is wrong.
            for first, count in parts:
                self._require_own(party, range(first, first + count), owner=owner)
        return slots

    def _all_own(self, party: str, slots: Sequence[int], *, owner: bool) -> bool:
        """Return whether a party may speak for all of some slots; quicker for few slots."""
        of, owners, number = self._party, self._owner, self._number.get(party)
        if max(slots, default=0) >= len(of):
            return False
        return all(of[slot] == number and (slot in owners) == owner for slot in slots)

    def users(self) -> int:
        """Return how many users are registered."""
        return self.size - len(self.owners) - len(self._holders)

    def catalogue(self, present: Mapping[int, bool]) -> Catalogue:
        """Return the item -> owners table over the owners that are present."""
        slots = [slot for slot in sorted(self.held) if present.get(slot, False)]
        member = np.zeros((len(self.items), len(slots)), bool)
        owners = []
        for position, slot in enumerate(slots):
            message = self._owner.get(slot)
            if message is None:
                raise AssertionError("only data owners hold items")
            member[self.held[slot], position] = True
            owners.append(
                CatalogueOwner(
                    slot=slot,
                    bundle=message.bundle,
                    name=message.name,
                    address=message.address,
                    tls_name=message.tls_name,
                )
            )
        return Catalogue(
            version=self.catalogue_version,
            owners=owners,
            items=self.items,
            owner_counts=member.sum(axis=1).tolist(),
            owner_positions=np.nonzero(member)[1].tolist(),
        )

    def roster(self) -> npt.NDArray[np.uint8]:
        """Return the participant ids of users by slot, uint8 (slots, 32); zeros where the slot is no user."""
        table = np.array(self._ids, np.uint8).reshape(-1, _ID_BYTES)
        table[[*self.owners, *self._holders]] = 0
        return table
