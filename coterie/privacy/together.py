"""Search of the messages in a transcript for several items of one user together.

Each message is taken apart into its fields, payloads in chunks and unknown fields included.  Fields that hold lists of
users' items by their declaration (`ITEM_LISTS`) are left out here: the kinds of datum cover them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from google.protobuf.wrappers_pb2 import BytesValue

from coterie.privacy.fields import UNCLASSIFIED, kind_of
from coterie.privacy.history_search import History, HistorySearch, lists_in_page
from coterie.privacy.notations import lists_in
from coterie.privacy.payloads import CARRIERS, CarriedPayloads
from coterie.privacy.transcript import TranscriptEntry

__all__ = ["ITEM_LISTS", "Leaf", "Together", "leaves"]

ITEM_LISTS = frozenset({"interaction", "requested_rows", "recommendation", "user_update", "sent_places"})
"""Kinds of datum that list items of users, so that their fields hold several by design."""

_PUBLIC_LISTS = frozenset({"item_key", "holding"})
_BETWEEN = b"\xff" * 8


class Leaf(NamedTuple):
    """A field of a message that holds no further messages.

    Attributes
    ----------
    path : str
        Message and name of the field; an unknown field has its number.
    kind : str
        Kind of datum.
    values : list
        Its values: strings, bytes or whole numbers.
    """

    path: str
    kind: str
    values: list[str] | list[bytes] | list[int]


def leaves(message: Message, kind: str | None = None) -> Iterator[Leaf]:
    """Yield the fields that are set in a message, at any depth, with the kind of the outermost field that has one."""
    for descriptor, value in message.ListFields():
        own = kind or kind_of(descriptor)
        path = f"{message.DESCRIPTOR.name}.{descriptor.name}"
        values: list[Any] = [value] if isinstance(value, str | bytes | int | float | Message) else list(value)
        if isinstance(values[0], Message):
            for each in values:
                yield from leaves(each, own)
        elif isinstance(values[0], str | bytes):
            yield Leaf(path, own or UNCLASSIFIED, values)
        else:
            yield Leaf(path, own or UNCLASSIFIED, [int(each) for each in values if each == each // 1])
    yield from _unknown(message.DESCRIPTOR.name, unknown_fields(message))


def unknown_fields(message: Message) -> Iterable[Any]:
    """Return the fields of a message that its type does not have, each with ``field_number`` and ``data``."""
    # The stubs of protobuf do not say that a set can be iterated over.
    return cast(Iterable[Any], UnknownFieldSet(message))


def _unlabelled(data: bytes) -> Empty:
    """Return bytes as a message without known fields; a message with one field that holds them where they are none."""
    try:
        return Empty.FromString(data)
    except DecodeError:
        return Empty.FromString(BytesValue(value=data).SerializeToString())


def _unknown(name: str, fields: Iterable[Any], depth: int = 3) -> Iterator[Leaf]:
    """Yield unknown fields, and the fields of the messages that they may hold; those that repeat are one."""
    found: dict[str, list[Any]] = defaultdict(list)
    for each in fields:
        path = f"{name}.#{each.field_number}"
        if isinstance(each.data, UnknownFieldSet):
            yield from _unknown(path, cast(Iterable[Any], each.data), depth)
        elif isinstance(each.data, int | bytes):
            found[path].append(each.data)
            if isinstance(each.data, bytes) and depth:
                yield from _unknown(path, unknown_fields(_unlabelled(each.data)), depth - 1)
    for path, values in found.items():
        yield Leaf(path, UNCLASSIFIED, values)


class Together:
    """Finds several items of one user in the messages of one party.

    Parameters
    ----------
    search : HistorySearch
        Users to look for.
    """

    def __init__(self, search: HistorySearch) -> None:
        self._search = search
        self._carried = CarriedPayloads()
        # One item in each of many messages: keys and numbers by peer, direction and field.
        self._keys: dict[str, set[int]] = defaultdict(set)
        self._numbers: dict[str, set[int]] = defaultdict(set)

    def add(self, entry: TranscriptEntry, message: Message) -> list[tuple[str, History]]:
        """Take the next message; return the fields that show several items of one user, with the user's items."""
        source = f"{entry.rpc} {entry.direction}"
        found = self._in(source, entry, message)
        if isinstance(message, CARRIERS):
            try:
                payload = self._carried.add(entry, message)
            except DecodeError:
                payload = None
            for each in payload or ():
                found += self._in(source, entry, each if isinstance(each, Message) else _unlabelled(each))
        return found

    def rest(self) -> list[tuple[str, History]]:
        """Return what fields show over all messages of a peer together, an item in each."""
        found = [(field, each) for field, keys in self._keys.items() for each in self._search.by_keys(keys)]
        for field, numbers in self._numbers.items():
            found += [(field, each) for each in self._search.by_list(numbers)]
        return found

    def _in(self, source: str, entry: TranscriptEntry, message: Message) -> list[tuple[str, History]]:
        found: list[tuple[str, History]] = []
        together: dict[str, list[bytes]] = defaultdict(list)
        numbers: dict[str, list[int]] = defaultdict(list)
        for leaf in leaves(message):
            if leaf.kind in ITEM_LISTS or (leaf.path == "Chunk.data" and isinstance(message, CARRIERS)):
                continue
            where = f"{source}: {leaf.path}"
            texts = [each for each in leaf.values if isinstance(each, str)]
            if leaf.kind in _PUBLIC_LISTS and texts:
                found += [(where, each) for each in self._search.by_public_list(texts)]
                continue
            blobs = [each.encode() if isinstance(each, str) else each for each in leaf.values]
            if numbered := [each for each in blobs if isinstance(each, int)]:
                numbers[leaf.path] += numbered
                continue
            contents = [each for each in blobs if isinstance(each, bytes)]
            together[leaf.path] += contents
            found += self._in_field(where, contents)
        for path, values in numbers.items():
            found += [(f"{source}: {path}", each) for each in self._search.by_list(values)]
            if len(values) == 1:
                self._numbers[f"{source}, {entry.peer}: {path}"].update(values)
        return found + self._by_keys(source, entry, together)

    def _by_keys(
        self, source: str, entry: TranscriptEntry, together: dict[str, list[bytes]]
    ) -> list[tuple[str, History]]:
        """Return what the keys in one message show, and note the keys of each field."""
        whole = _BETWEEN.join(_BETWEEN.join(contents) for contents in together.values())
        if not self._search.keys_in(whole):
            return []
        found: list[tuple[str, History]] = []
        every: set[int] = set()
        for path, contents in together.items():
            keys = self._search.keys_in(_BETWEEN.join(contents))
            found += [(f"{source}: {path}", each) for each in self._search.by_keys(keys)]
            if not self._search.is_public(keys):
                self._keys[f"{source}, {entry.peer}: {path}"] |= keys
                every |= keys
        return found or [(source, each) for each in self._search.by_keys(every)]

    def _in_field(self, where: str, contents: Sequence[bytes]) -> list[tuple[str, History]]:
        """Return what numbers in the bytes or the texts of a field show."""
        lists = [one for each in contents for one in lists_in(each, self._search.n_items)]
        # Numbers in texts that are not all of ASCII are left to the patterns.
        lists += [list(one) for each in contents if each.isascii() for one in lists_in_page(each)]
        if len(contents) > 1:
            lists.append([int(each) for each in contents if each.isdigit()])
        return [(where, each) for one in lists for each in self._search.by_list(one)]
