"""Notations in which bytes can hold a list of item numbers: written as patterns to search for, and read back.

A number of an item is short, and short numbers occur by chance.  Patterns are therefore of eight bytes or more: at a
given position of bytes that do not depend on the user, one occurs with a probability of 2^-64 at most.  A search for
100,000 patterns in 100 MB then finds one by chance in 2 of 1,000,000 audits.  Lists that are read back have no
pattern; `HistorySearch` states the chance of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import comb, log2
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["LEAST_BYTES", "bitmaps", "lists_in", "lists_in_text", "numbers_in", "of_run", "runs", "varints"]

LEAST_BYTES = 8
"""Shortest pattern, bytes."""

_RUN = 4
"""Consecutive numbers of a pattern, no two of them adjacent: counters contain those."""
_VARINT_RUN = 8
"""Consecutive numbers of a pattern of varints, which may have a byte each."""
_DTYPES = ("<u2", ">u2", "<u4", ">u4", "<i8", ">i8")
_BIT_ORDERS: tuple[Literal["little", "big"], ...] = ("little", "big")
_SEPARATORS = (", ", ",", " ", ";", "-", "_", ":", "|", "/", "\n")
_TELLING_BITS = 40
"""Least information in a bitmap that is searched for: the logarithm of the number of sets of as many items."""
_NUMBER = re.compile(rb"(?<![0-9.])[0-9]{1,9}(?![0-9])(?!\.[0-9]*[1-9])")
_TEXT_RUN = re.compile(rb"[0-9]{1,9}(?:[^0-9A-Za-z.]{1,6}[0-9]{1,9})+")


def runs(items: Sequence[int] | npt.NDArray[np.integer]) -> list[tuple[int, ...]]:
    """Return the runs of four in the given and in ascending order that have no two adjacent numbers."""
    return sorted(run for run in _windows(items, _RUN) if np.abs(np.diff(run)).min() > 1)


def of_run(run: Sequence[int]) -> Iterator[bytes]:
    """Yield the patterns of a run: integers of 2, 4 and 8 bytes in both byte orders, and decimal text."""
    numbers = np.array(run, np.int64)
    for dtype in _DTYPES:
        if numbers.max() <= np.iinfo(dtype).max:
            yield numbers.astype(dtype).tobytes()
    digits = [str(number) for number in run]
    if sum(map(len, digits)) >= LEAST_BYTES:
        for separator in _SEPARATORS:
            yield separator.join(digits).encode()


def varints(items: Sequence[int] | npt.NDArray[np.integer]) -> Iterator[bytes]:
    """Yield runs of eight as varints, as packed fields of protobuf hold them, in the given and in ascending order."""
    for run in sorted(_windows(items, _VARINT_RUN)):
        if np.abs(np.diff(run)).min() > 1:
            yield b"".join(_varint(number) for number in run)


def bitmaps(items: Sequence[int] | npt.NDArray[np.integer], n_items: int) -> Iterator[bytes]:
    """Yield bitmaps over the catalogue, the lowest and the highest bit of a byte first, and a byte for each item.

    A bitmap is left out where the set of items is too small to be told from chance: fewer than 2^40 sets are as large.
    """
    own = sorted(set(map(int, items)))
    if not own or log2(comb(n_items, len(own))) < _TELLING_BITS:
        return
    mask = np.zeros(n_items, np.uint8)
    mask[own] = 1
    for order in _BIT_ORDERS:
        packed = np.packbits(mask, bitorder=order).tobytes()
        if len(packed) >= LEAST_BYTES:
            yield packed
    yield mask.tobytes()


def numbers_in(text: bytes) -> list[int]:
    """Return the whole numbers that stand in a text, in decimal notation; ``17.0`` is one, ``0.5`` is none."""
    return [int(found) for found in _NUMBER.findall(text)]


def lists_in_text(text: bytes) -> Iterator[list[int]]:
    """Yield lists of numbers of a text: those with only punctuation between them, and all numbers of a line."""
    for line in text.splitlines():
        together = [numbers_in(run.group()) for run in _TEXT_RUN.finditer(line)]
        yield from (numbers for numbers in together if len(numbers) > 1)
        every = numbers_in(line)
        if len(every) > 1 and together != [every]:
            yield every


def lists_in(data: bytes, n_items: int) -> Iterator[list[int]]:
    """Yield the lists of different item numbers that a field's bytes can stand for.

    Parameters
    ----------
    data : bytes
        All bytes of a field.
    n_items : int
        Length of the catalogue.

    Yields
    ------
    list of int
        As integers of 1, 2, 4 or 8 bytes in either byte order, as varints, as a bitmap over the catalogue, as an
        array with an entry for each item.
    """
    if len(data) < 2:
        return
    for dtype in ("u1", *_DTYPES):
        size = np.dtype(dtype).itemsize
        if len(data) % size == 0 and len(data) // size > 1:
            numbers = np.frombuffer(data, dtype)
            # Most fields are ruled out by their greatest number.
            if numbers.min() >= 0 and numbers.max() < n_items and len(np.unique(numbers)) == len(numbers):
                yield numbers.tolist()
    if (numbers_of := _read_varints(data, n_items)) is not None:
        yield numbers_of
    if len(data) == -(-n_items // 8):
        for order in _BIT_ORDERS:
            bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder=order)
            yield np.flatnonzero(bits[:n_items]).tolist()
    if len(data) in (n_items, 4 * n_items, 8 * n_items):
        entries = np.frombuffer(data, np.uint8).reshape(n_items, -1)
        yield np.flatnonzero(entries.any(axis=1)).tolist()


def _windows(items: Sequence[int] | npt.NDArray[np.integer], length: int) -> set[tuple[int, ...]]:
    given = np.asarray(items, np.int64)
    return {
        tuple(order[first : first + length].tolist())
        for order in (given, np.sort(given))
        for first in range(len(order) - length + 1)
    }


def _varint(number: int) -> bytes:
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*written, number])


def _read_varints(data: bytes, n_items: int) -> list[int] | None:
    """Return the different numbers below ``n_items`` that the whole of ``data`` is as varints; None otherwise."""
    if data[-1] & 0x80:
        return None
    found: list[int] = []
    number = shift = 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte & 0x80:
            continue
        if number >= n_items:
            return None
        found.append(number)
        number = shift = 0
    return found if len(set(found)) == len(found) > 1 else None
