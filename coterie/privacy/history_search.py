"""Search for a user's history by multiplicity: two or more of one user's items together, in any order.

One item key is public.  Several keys of one user together are that user's history, unless they are a list that is
public as a whole: the catalogue, or the items of a data owner.  Numbers of items are short and occur everywhere, so a
list of numbers is judged by chance.  An audit draws the items of the users that it searches for uniformly from the
catalogue.  In a list of n different numbers that does not depend on such a user, the count of the user's items then has
a hypergeometric distribution, and the list is the user's history where so large a count has a chance below
`CHANCE`.  At 10^-12 a list, an audit of a million lists for ten users finds something by chance once in 100,000 times.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from math import comb
from typing import NamedTuple

from coterie.privacy.canaries import Canary, PatternSearch
from coterie.privacy.notations import lists_in_text, numbers_in

__all__ = ["CHANCE", "History", "HistorySearch", "chance", "lists_in_page"]

CHANCE = 1e-12
"""Chance below which a list of numbers is no coincidence."""

_NUMBERS = re.compile(rb"[0-9]+(?:\.[0-9]+)?")


class History(NamedTuple):
    """The items of one user, by their numbers in the catalogue.

    Attributes
    ----------
    items : frozenset of int
    holders : frozenset of str
        The only parties that may hold them together: the user's host.
    """

    items: frozenset[int]
    holders: frozenset[str]


@lru_cache(maxsize=4096)
def chance(n_items: int, own: int, listed: int, common: int) -> float:
    """Return the chance that a list drawn at random has so many of a user's items, or more.

    Parameters
    ----------
    n_items : int
        Length of the catalogue.
    own : int
        Number of the user's items.
    listed : int
        Number of different items in the list.
    common : int
        Number of the user's items in the list.
    """
    ways = sum(
        comb(own, both) * comb(n_items - own, listed - both) for both in range(common, min(own, listed) + 1)
    )
    return ways / comb(n_items, listed)


class HistorySearch:
    """Finds several items of one user together.

    Parameters
    ----------
    catalogue : sequence of str
        Keys of all items in the order of their numbers.
    lists : collection of sequences of str
        Further public lists of keys, in their order: those of data owners.
    """

    def __init__(self, catalogue: Sequence[str], lists: Collection[Sequence[str]] = ()) -> None:
        self.n_items = len(catalogue)
        self._number = {key: number for number, key in enumerate(catalogue)}
        self._lists = [list(catalogue), *map(list, lists)]
        self._complete = {frozenset(self._number[key] for key in listed) for listed in self._lists}
        self._histories: list[History] = []
        self._keys = PatternSearch(
            (notation, number)
            for key, number in self._number.items()
            for notation in dict.fromkeys(Canary("item_key", key.encode()).notations())
        )

    def plant(self, items: Collection[int], holders: Collection[str]) -> None:
        """Search for a user's items from now on, by their numbers.

        Raises
        ------
        ValueError
            Even the whole list of these items would not be told from chance.
        """
        own = len(set(items))
        if chance(self.n_items, own, own, own) >= CHANCE:
            raise ValueError(
                f"{own} of {self.n_items} items occur by chance; take more items or a longer catalogue"
            )
        self._histories.append(History(frozenset(items), frozenset(holders)))

    def keys_in(self, data: bytes) -> set[int]:
        """Return the numbers of the items whose keys are in ``data``, raw, in hexadecimal or base64."""
        return self._keys.search(data)

    def is_public(self, found: Collection[int]) -> bool:
        """Return whether items are those of a public list, all of them."""
        return frozenset(found) in self._complete

    def by_keys(self, found: Collection[int]) -> list[History]:
        """Return the users of whom two or more items are among those whose keys were found together."""
        together = frozenset(found)
        if self.is_public(together):
            return []
        return [each for each in self._histories if len(each.items & together) > 1]

    def by_public_list(self, keys: Sequence[str]) -> list[History]:
        """Return the users whose items a list of keys shows in a field that holds public lists.

        A public list, or a part of it without gaps, shows nobody's as long as it is in its order.
        """
        for listed in self._lists:
            if keys and keys[0] in listed:
                first = listed.index(keys[0])
                if listed[first : first + len(keys)] == list(keys):
                    return []
        numbers = [self._number[key] for key in keys if key in self._number]
        return [each for each in self._histories if len(each.items.intersection(numbers)) > 1]

    def by_list(self, numbers: Collection[int]) -> list[History]:
        """Return the users of whom a list of numbers has more items than chance explains.

        Numbers that follow each other without a gap are counted and show nobody's.
        """
        listed = {number for number in numbers if 0 <= number < self.n_items}
        if len(listed) < 2 or max(listed) - min(listed) == len(listed) - 1:
            return []
        return [
            each
            for each in self._histories
            if (common := len(each.items & listed)) > 1
            and chance(self.n_items, len(each.items), len(listed), common) < CHANCE
        ]

    def by_page(self, page: bytes) -> list[History]:
        """Return the users of whom a log or a page shows several items: by keys anywhere on it, or by numbers."""
        found = self.by_keys(self.keys_in(page))
        for numbers in lists_in_page(page):
            found += self.by_list(numbers)
        return list(dict.fromkeys(found))


def lists_in_page(page: bytes) -> Iterator[Collection[int]]:
    """Yield the lists of numbers on a page: within lines, and down the columns of lines that differ in numbers only.

    Such columns are the values of a metric, those of a label, the fields of an event in a log.
    """
    yield from lists_in_text(page)
    columns: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for line in page.splitlines():
        same = _NUMBERS.sub(b"#", line)
        for position, number in enumerate(_NUMBERS.findall(line)):
            columns[same, position].update(numbers_in(number))
        for field, value in _fields(line).items():
            columns[field].update(numbers_in(str(value).encode()))
    yield from (numbers for numbers in columns.values() if len(numbers) > 1)


def _fields(line: bytes) -> dict[tuple[object, ...], object]:
    """Return the fields of a line of a log in JSON, by event and name; none of another line."""
    if not line.startswith(b"{"):
        return {}
    try:
        fields = json.loads(line)
    except ValueError:
        return {}
    return {(fields.get("event"), name): value for name, value in fields.items()}
