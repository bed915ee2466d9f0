"""Canaries: recognisable private values that tests plant, and search for in everything that a party holds.

A test plants them (user names, item keys, runs of sealed records, lists of items, rows of factors and of private
state, contributions, secret keys) and searches every byte that a party received, stored, logged or exposed.  Each
canary is searched for raw and in the notations that logs use: hexadecimal and base64.  Lists of items are searched for
in all notations of `coterie.privacy.notations`, which states the chance of a wrong finding.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coterie.privacy.notations import LEAST_BYTES, bitmaps, of_run, runs, varints

__all__ = ["Canary", "CanaryKit", "PatternSearch", "pack_records"]

_RECORD = np.dtype([("item", "<u4"), ("flag", "u1")])
_RUN = 3
"""Consecutive records, ids or numbers that make a canary; shorter runs occur by chance."""
_CODES_RUN = 8
"""Consecutive codes, none of them that of zero, that make a canary: small contributions repeat codes."""
_ANCHOR = 4
_SLICE = 1 << 22


def pack_records(items: npt.ArrayLike, flags: npt.ArrayLike) -> bytes:
    """Return the plaintext of sealed records: uint32 item, little-endian, and uint8 flag, 5 bytes each.

    Parameters
    ----------
    items : array_like of int, shape (n,)
        Item indices.
    flags : array_like of bool, shape (n,)
        Whether the interaction is positive.
    """
    packed = np.empty(np.shape(items), dtype=_RECORD)
    packed["item"], packed["flag"] = items, flags
    return packed.tobytes()


@dataclass(frozen=True)
class Canary:
    """A private value to search for.

    Attributes
    ----------
    kind : str
        Kind of datum, as in the visibility matrix.
    pattern : bytes
        Its bytes in memory and on the wire; at least 8.
    holders : frozenset of str, optional
        The only parties that may hold it where the matrix says "its own"; None for any of that role.
    """

    kind: str
    pattern: bytes
    holders: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if len(self.pattern) < LEAST_BYTES:
            raise ValueError(
                f"a canary of {len(self.pattern)} bytes occurs by chance; {LEAST_BYTES} or more are needed"
            )

    def notations(self) -> Iterator[bytes]:
        """Yield the notations that are searched for: raw, hexadecimal, base64 at each of its three alignments."""
        yield self.pattern
        yield self.pattern.hex().encode()
        yield self.pattern.hex().upper().encode()
        for shift in range(3):
            # Only the characters that depend on the canary alone, whatever stands before and after it.
            padded = base64.b64encode(bytes(shift) + self.pattern)
            first = -(-shift * 8 // 6)
            inner = padded[first : (shift + len(self.pattern)) * 8 // 6]
            yield inner
            yield inner.translate(bytes.maketrans(b"+/", b"-_"))


class PatternSearch:
    """Finds many patterns at once in large buffers.

    Two look-ups of byte pairs leave few positions; only there are whole patterns compared.  The cost hardly
    depends on the number of patterns.

    Parameters
    ----------
    patterns : iterable of (bytes, int)
        Pattern, at least 4 bytes, and the number under which it is reported.

    Attributes
    ----------
    longest : int
        Length of the longest pattern, bytes.
    """

    def __init__(self, patterns: Iterable[tuple[bytes, int]]) -> None:
        self._pairs = np.zeros((2, 1 << 16), dtype=np.bool_)
        by_anchor: dict[int, list[tuple[int, bytes, int]]] = defaultdict(list)
        self.longest = _ANCHOR
        for pattern, number in patterns:
            at = _rarest(pattern)
            anchor = pattern[at : at + _ANCHOR]
            low, high = np.frombuffer(anchor, "<u2")
            self._pairs[0, low] = self._pairs[1, high] = True
            by_anchor[int.from_bytes(anchor, "little")].append((at, pattern, number))
            self.longest = max(self.longest, len(pattern))
        self._by_anchor = dict(by_anchor)
        self._anchors = np.array(sorted(by_anchor), dtype=np.uint32)

    def search(self, data: bytes) -> set[int]:
        """Return the numbers of all patterns in ``data``."""
        found: set[int] = set()
        if not len(self._anchors):
            return found
        for start in range(0, len(data), _SLICE):
            # Slices overlap by a byte less than an anchor; whole patterns are compared in ``data``.
            piece = np.frombuffer(data, np.uint8, min(_SLICE + _ANCHOR - 1, len(data) - start), start)
            for position in self._anchored(piece) + start:
                self._compare(data, int(position), found)
        return found

    def _anchored(self, piece: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """Return the positions of anchors."""
        if len(piece) < _ANCHOR:
            return np.zeros(0, np.int64)
        pairs = piece[:-1].astype(np.uint16)
        pairs |= piece[1:].astype(np.uint16) << np.uint16(8)
        likely = np.flatnonzero(self._pairs[0][pairs[:-2]])
        likely = likely[self._pairs[1][pairs[likely + 2]]]
        words = pairs[likely].astype(np.uint32) | (pairs[likely + 2].astype(np.uint32) << np.uint32(16))
        # The anchors are sorted already, and `numpy.isin` would sort them for each message.
        nearest = np.minimum(np.searchsorted(self._anchors, words), len(self._anchors) - 1)
        at: npt.NDArray[np.int64] = likely[self._anchors[nearest] == words]
        return at

    def _compare(self, data: bytes, position: int, found: set[int]) -> None:
        anchor = int.from_bytes(data[position : position + _ANCHOR], "little")
        for at, pattern, number in self._by_anchor[anchor]:
            if number not in found and position >= at and data.startswith(pattern, position - at):
                found.add(number)


def _rarest(pattern: bytes) -> int:
    """Return the position of the four bytes that are least likely in other data: all different, none zero."""
    return max(
        range(len(pattern) - _ANCHOR + 1),
        # The last of equal ones, because names have the same beginning.
        key=lambda at: (len(set(pattern[at : at + _ANCHOR]) - {0}), at),
    )


class CanaryKit:
    """Makes canaries from a seed, takes further ones, and searches for all of them.

    Parameters
    ----------
    seed : int
        The same seed makes the same values in every process of a test.
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._canaries: list[Canary] = []
        self._search: PatternSearch | None = None

    @property
    def canaries(self) -> tuple[Canary, ...]:
        """All canaries, in the order in which they were made or planted."""
        return tuple(self._canaries)

    def plant(self, kind: str, value: bytes | str, holders: Collection[str] | None = None) -> None:
        """Plant a value, to be searched for from now on.

        Parameters
        ----------
        kind : str
            Kind of datum, as in the visibility matrix.
        value : bytes or str
            Value to search for, at least 8 bytes.
        holders : collection of str, optional
            The only parties that may hold it.
        """
        pattern = value.encode() if isinstance(value, str) else bytes(value)
        only = None if holders is None else frozenset(holders)
        self._canaries.append(Canary(kind, pattern, only))
        self._search = None

    def user_names(self, count: int, holders: Collection[str] | None = None) -> list[str]:
        """Make names of users, ``canary-user-`` and 8 random letters, that must not leave their host."""
        return self._names("user_name", "canary-user-", count, holders)

    def item_keys(self, count: int, holders: Collection[str] | None = None) -> list[str]:
        """Make external keys of items in the reserved range, ``canary-item-`` and 8 random letters."""
        return self._names("item_key", "canary-item-", count, holders)

    def enrolment_tokens(self, count: int, holders: Collection[str] | None = None) -> list[str]:
        """Make one-time tokens, ``canary-token-`` and 8 random letters."""
        return self._names("enrolment_token", "canary-token-", count, holders)

    def interactions(
        self,
        items: Sequence[int] | npt.NDArray[np.integer],
        flags: Sequence[bool] | npt.NDArray[np.bool_],
        holders: Collection[str] | None = None,
        *,
        kind: str = "interaction",
    ) -> None:
        """Plant a user's records as one owner gets them: every run of three.

        Parameters
        ----------
        items : sequence of int, length n >= 3
            Indices in the model (positions in the catalogue) of the user's items, in the order of records.
        flags : sequence of bool, length n
            Whether each is positive.
        holders : collection of str, optional
            The only parties that may hold them: the user's host and this owner.
        kind : str
            ``"interaction"``; ``"history"`` for records of several owners, which only the user has together.
        """
        if len(items) < _RUN:
            raise ValueError(f"{len(items)} records occur by chance; {_RUN} or more are needed")
        for first in range(len(items) - _RUN + 1):
            window = slice(first, first + _RUN)
            self.plant(kind, pack_records(items[window], flags[window]), holders)

    def item_lists(
        self,
        items: Sequence[int] | npt.NDArray[np.integer],
        holders: Collection[str] | None = None,
        *,
        kind: str = "history",
        n_items: int | None = None,
    ) -> int:
        """Plant a user's items as arrays and texts hold them: every run of four in the notations of `of_run`.

        Runs are taken ascending and in the given order.  Runs with adjacent numbers occur in every counted list and are
        left out.  Every run takes some hundred patterns: of a large data set plant only some users.

        Parameters
        ----------
        items : sequence of int
            Indices in the model, in the order of the user's records.
        holders : collection of str, optional
            The only parties that may hold them: the user's host.
        kind : str
            ``"history"``, or ``"user_items"``.
        n_items : int, optional
            Length of the catalogue; with it, bitmaps over the catalogue are planted, too.

        Returns
        -------
        int
            Number of runs planted; 0 for a user whose items have no usable run.
        """
        telling = runs(items)
        patterns = {pattern for run in telling for pattern in of_run(run)} | set(varints(items))
        if n_items is not None:
            patterns |= set(bitmaps(items, n_items))
        for pattern in sorted(patterns):
            self.plant(kind, pattern, holders)
        return len(telling)

    def codes(
        self,
        kind: str,
        codes: npt.NDArray[np.uint32],
        zero: npt.ArrayLike,
        holders: Collection[str] | None = None,
    ) -> int:
        """Plant a contribution as sent in clear: runs of eight codes, none of which is the code of zero.

        Parameters
        ----------
        kind : str
            ``"user_update"``, ``"host_update"``.
        codes : ndarray of uint32, shape (size,)
            Before masking, in the order of the layout.
        zero : array_like of int, scalar or shape (size,)
            The codes of a contribution that changes nothing.
        holders : collection of str, optional
            The only parties that may hold it.

        Returns
        -------
        int
            Number of runs planted; they do not overlap.
        """
        moved = np.asarray(codes) != np.asarray(zero)
        found, first = 0, 0
        while first + _CODES_RUN <= len(codes):
            run = slice(first, first + _CODES_RUN)
            if moved[run].all():
                self.plant(kind, np.asarray(codes[run], "<u4").tobytes(), holders)
                found += 1
                first += _CODES_RUN
            else:
                # Behind the last of them that stands for zero.
                first += int(np.flatnonzero(~moved[run])[-1]) + 1
        return found

    def rows(self, kind: str, rows: npt.ArrayLike, holders: Collection[str] | None = None) -> None:
        """Plant rows of factors, gradients or private state by the bits of their first three numbers.

        Rows of zeros, as moments of an optimiser before its first step, are refused: zeros occur everywhere.

        Parameters
        ----------
        kind : str
            ``"user_factor"``, ``"item_gradient"``, ``"private_state"``, ...
        rows : array_like of float, shape (n, d), d >= 3
            As float32 on the wire and in stores.
        holders : collection of str, optional
            The only parties that may hold them.

        Raises
        ------
        ValueError
            When a row begins with three zeros.
        """
        for row in np.atleast_2d(np.asarray(rows, dtype="<f4")):
            if not row[:_RUN].any():
                raise ValueError(f"a row of {kind} that begins with zeros occurs by chance; leave it out")
            self.plant(kind, row[:_RUN].tobytes(), holders)

    def factors(
        self, kind: str, count: int, dim: int, holders: Collection[str] | None = None
    ) -> npt.NDArray[np.float32]:
        """Make and plant rows of factors, float32 (count, dim), normal with standard deviation 0.1."""
        rows = self._rng.normal(0.0, 0.1, (count, dim)).astype(np.float32)
        self.rows(kind, rows, holders)
        return rows

    @property
    def longest(self) -> int:
        """Length of the longest notation that is searched, bytes."""
        return self._patterns().longest

    def found(self, data: bytes) -> tuple[Canary, ...]:
        """Return the canaries that ``data`` holds in any notation."""
        return tuple(self._canaries[number] for number in sorted(self._patterns().search(data)))

    def search(self, data: bytes) -> set[str]:
        """Return the kinds of canaries that ``data`` holds."""
        return {canary.kind for canary in self.found(data)}

    def _patterns(self) -> PatternSearch:
        if self._search is None:
            self._search = PatternSearch(
                (notation, number)
                for number, canary in enumerate(self._canaries)
                for notation in dict.fromkeys(canary.notations())
            )
        return self._search

    def _names(self, kind: str, prefix: str, count: int, holders: Collection[str] | None) -> list[str]:
        letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
        names = [prefix + bytes(self._rng.choice(letters, 8)).decode() for _ in range(count)]
        for name in names:
            self.plant(kind, name, holders)
        return names
