"""Packing of many integers into one plaintext, in slots that do not overflow in a sum of at most C vectors.

A code of ``b`` bits has a slot of ``w = b + ceil(log2 C)`` bits; slot 0 is the least significant.  The slots end 96
bits and ``ceil(log2 C)`` below ``2^(|n| - 4)``.  So a number that is uniform modulo n hardly ever looks packed
(``pads``), and libraries which take the upper third of their range for negative numbers read a packed one as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gmpy2 import mpz
from numpy.typing import NDArray

from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CryptoError

__all__ = ["Packing"]

_ZERO_BITS = 96
_SPARE_BITS = 4
_MOST_CODE_BITS = 31
_MOST_SLOT_BITS = 56
_GROUP = 8  # slots of w bits are w bytes


@dataclass(frozen=True)
class Packing:
    """The layout of codes in plaintexts.

    Parameters
    ----------
    key_bits : int
        Length of the modulus.
    code_bits : int
        Bits ``b`` of a code, 2 to 31.
    addends : int
        The largest number ``C`` of vectors in a sum, 1 to 2^32 - 1.

    Raises
    ------
    CryptoError
        When a slot would be wider than 56 bits, or a plaintext has no room for one.
    """

    key_bits: int
    code_bits: int
    addends: int

    def __post_init__(self) -> None:
        if not 2 <= self.code_bits <= _MOST_CODE_BITS or not 1 <= self.addends < 1 << 32:
            raise CryptoError(
                f"a packing of {self.code_bits} bits for {self.addends} addends, expected 2 to {_MOST_CODE_BITS} bits"
                " and 1 to 2^32 - 1 addends"
            )
        if self.slot_bits > _MOST_SLOT_BITS or self.slots < 1:
            raise CryptoError(
                f"slots of {self.slot_bits} bits do not fit: at most {_MOST_SLOT_BITS}, and one within a modulus of "
                f"{self.key_bits} bits"
            )

    @property
    def guard_bits(self) -> int:
        """Bits by which a sum may be longer than an addend, ceil(log2 C)."""
        return (self.addends - 1).bit_length()

    @property
    def slot_bits(self) -> int:
        """Width ``w`` of a slot."""
        return self.code_bits + self.guard_bits

    @property
    def slots(self) -> int:
        """Number of slots of one plaintext."""
        return (self.key_bits - _SPARE_BITS - _ZERO_BITS - self.guard_bits) // self.slot_bits

    def ciphertexts(self, count: int) -> int:
        """Return the number of ciphertexts that ``count`` values take."""
        return -(-count // self.slots)

    def pack(self, codes: NDArray[np.integer], addends: int = 1) -> list[mpz]:
        """Return the plaintexts of a vector of codes.

        Parameters
        ----------
        codes : ndarray of integer, shape (N,)
            Each from 0 to ``addends (2^b - 1)``.
        addends : int, optional
            Number of users whose codes were added already, as those of one host's users are.

        Raises
        ------
        CryptoError
            When a code is out of range, or there are more addends than there is room for.
        """
        self.require_addends(addends)
        if codes.ndim != 1 or not np.issubdtype(codes.dtype, np.integer):
            raise CryptoError(f"codes are {codes.dtype} of shape {codes.shape}, expected integers in a row")
        most = self._most(addends)
        if codes.size and not (int(codes.min()) >= 0 and int(codes.max()) <= most):
            raise CryptoError(f"a code is negative or above {most}: it would run into the next slot")
        content = _to_bytes(self._in_rows(codes), self.slot_bits)
        size, flat = content.shape[1], content.tobytes()
        return [mpz.from_bytes(flat[at : at + size], "little") for at in range(0, len(flat), size)]

    def fits(self, plaintexts: Sequence[mpz]) -> bool:
        """Return whether plaintexts fill no more than the slots, as packed ones and sums of them do."""
        return all(plaintext >> self._top == 0 for plaintext in plaintexts)

    def unpack(self, plaintexts: Sequence[mpz], count: int, addends: int) -> NDArray[np.uint64]:
        """Return the codes that plaintexts hold, uint64 (count,).

        Parameters
        ----------
        plaintexts : sequence of mpz
        count : int
            Number of values; the last plaintext may have slots to spare.
        addends : int
            Number of users whose codes were added.

        Raises
        ------
        VerificationError
            MALFORMED when a code is too large for a sum of so many users, or a spare slot or what is above the slots is
            not empty: an addend was not made by ``pack``.
        CryptoError
            When there are more addends than there is room for, or too many or too few plaintexts.
        """
        self.require_addends(addends)
        if len(plaintexts) != self.ciphertexts(count):
            raise CryptoError(
                f"{len(plaintexts)} plaintexts for {count} values, expected {self.ciphertexts(count)}"
            )
        wrong = VerificationError(
            Reason.MALFORMED, f"a decrypted sum is none of {addends} packed vectors of {count} values"
        )
        if not self.fits(plaintexts):
            raise wrong
        groups = -(-self.slots // _GROUP)
        size = groups * self.slot_bits
        flat = b"".join([plaintext.to_bytes(size, "little") for plaintext in plaintexts])
        found = _from_bytes(np.frombuffer(flat, np.uint8), self.slot_bits)
        found = found.reshape(len(plaintexts), groups * _GROUP)[:, : self.slots].ravel()
        codes = found[:count]
        if int(codes.max(initial=0)) > self._most(addends) or found[count:].any():
            raise wrong
        return codes

    def require_addends(self, addends: int) -> None:
        """Raise `CryptoError` unless ``addends`` vectors can be added without overflow."""
        if not 1 <= addends <= self.addends:
            raise CryptoError(
                f"{addends} addends, this packing has room for 1 to {self.addends}",
                hint="pack with a larger number of addends",
            )

    @property
    def _top(self) -> int:
        """Bits of all slots."""
        return self.slots * self.slot_bits

    def _most(self, addends: int) -> int:
        return addends * ((1 << self.code_bits) - 1)

    def _in_rows(self, codes: NDArray[np.integer]) -> NDArray[np.uint64]:
        """Return codes as a row for each plaintext, padded with zeros to whole groups of eight."""
        rows = self.ciphertexts(codes.size)
        values = np.zeros(rows * self.slots, np.uint64)
        values[: codes.size] = codes
        wide = np.zeros((rows, -(-self.slots // _GROUP) * _GROUP), np.uint64)
        wide[:, : self.slots] = values.reshape(rows, self.slots)
        return wide


def _to_bytes(values: NDArray[np.uint64], width: int) -> NDArray[np.uint8]:
    """Pack each row's values, ``width`` bits each, little-endian; rows are whole groups of eight values."""
    columns = np.ascontiguousarray(values.reshape(-1, _GROUP).T)
    found = np.empty((width, columns.shape[1]), np.uint8)
    for place in range(width):
        low = 8 * place
        byte = np.zeros(columns.shape[1], np.uint64)
        for slot in range(low // width, (low + 7) // width + 1):
            byte |= _shifted(columns[slot], slot * width - low)
        found[place] = byte.astype(np.uint8)  # the lowest eight bits
    return np.ascontiguousarray(found.T).reshape(len(values), values.shape[1] // _GROUP * width)


def _from_bytes(content: NDArray[np.uint8], width: int) -> NDArray[np.uint64]:
    """Return the values that ``_to_bytes`` packed."""
    columns = np.ascontiguousarray(content.reshape(-1, width).T).astype(np.uint64)
    found = np.empty((_GROUP, columns.shape[1]), np.uint64)
    for slot in range(_GROUP):
        low = slot * width
        value = found[slot]
        value.fill(0)
        for place in range(low // 8, (low + width - 1) // 8 + 1):
            value |= _shifted(columns[place], 8 * place - low)
        value &= np.uint64((1 << width) - 1)
    return np.ascontiguousarray(found.T).ravel()


def _shifted(values: NDArray[np.uint64], left: int) -> NDArray[np.uint64]:
    """Return values shifted by ``left`` bits to the left; to the right where that is negative."""
    return values << np.uint64(left) if left >= 0 else values >> np.uint64(-left)
