"""Byte format of encrypted vectors: a header of 44 bytes, then each ciphertext's unit and shift, as long as n each.

| bytes | field |
| --- | --- |
| 1 | version, 1 |
| 1 | mode, 1 to 4 |
| 1 | slot width w |
| 1 | bits of a code b |
| 4 | largest number of addends C |
| 4 | number of values N |
| 32 | key id |

All numbers are big-endian.  The format has no number of addends, because whoever formed the sum could write any; nor
the positions left out of a sparse vector, because the receiver knows them and their plaintexts.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from types import MappingProxyType

from gmpy2 import mpz

from coterie.crypto.paillier.keys import PublicKey
from coterie.crypto.paillier.obfuscators import Mode
from coterie.crypto.paillier.packing import Packing
from coterie.crypto.paillier.vector import EncryptedVector
from coterie.crypto.verification import Reason, VerificationError

__all__ = ["HEADER_BYTES", "from_bytes", "size", "to_bytes"]

_VERSION = 1
_HEADER = struct.Struct(">BBBBII32s")
HEADER_BYTES = _HEADER.size
_NOTHING: Mapping[int, mpz] = MappingProxyType({})
_MODES = frozenset(int(mode) for mode in Mode)


def size(public: PublicKey, packing: Packing, count: int, left_out: int = 0) -> int:
    """Return the length in bytes of a vector of ``count`` values without ``left_out`` of its ciphertexts."""
    return HEADER_BYTES + 2 * (packing.ciphertexts(count) - left_out) * public.modulus_bytes


def to_bytes(vector: EncryptedVector, left_out: Collection[int] = ()) -> bytes:
    """Return a vector's bytes, without the ciphertexts at the positions ``left_out``."""
    packing, public = vector.packing, vector.public
    fields = packing.slot_bits, packing.code_bits, packing.addends, vector.count
    header = _HEADER.pack(_VERSION, vector.mode, *fields, public.key_id)
    pairs = [
        pair
        for place, pair in enumerate(zip(vector.units, vector.shifts, strict=True))
        if place not in left_out
    ]
    return header + b"".join([part.to_bytes(public.modulus_bytes, "big") for pair in pairs for part in pair])


def from_bytes(
    content: bytes,
    public: PublicKey,
    packing: Packing,
    count: int,
    *,
    addends: int = 1,
    left_out: Mapping[int, mpz] = _NOTHING,
) -> EncryptedVector:
    """Parse a received vector, and check every ciphertext.

    Parameters
    ----------
    content : bytes
    public : PublicKey
        Expected key; packing and number of values are the expected ones, too.
    packing : Packing
    count : int
        Values.
    addends : int, optional
        Number of vectors in the sum, as known from elsewhere.
    left_out : mapping of int to mpz, optional
        Plaintexts by position of the ciphertexts that were not sent; the returned vector has these ciphertexts, without
        an obfuscator.

    Raises
    ------
    VerificationError
        BAD_VERSION; WRONG_KEY; MALFORMED when packing, number of values, mode or length are others, or a part of a
        ciphertext is out of range or its unit not invertible.
    CryptoError
        When there are more addends than there is room for.
    """
    if len(content) < HEADER_BYTES:
        raise _malformed(f"an encrypted vector of {len(content)} bytes is shorter than its header")
    version, number, *fields, key_id = _HEADER.unpack_from(content)
    if version != _VERSION:
        raise VerificationError(
            Reason.BAD_VERSION, f"an encrypted vector of format {version}, expected {_VERSION}"
        )
    if key_id != public.key_id:
        raise VerificationError(
            Reason.WRONG_KEY, f"an encrypted vector under key {key_id.hex()[:16]}, expected {public!r}"
        )
    expected = [packing.slot_bits, packing.code_bits, packing.addends, count]
    if fields != expected:
        raise _malformed(f"an encrypted vector with w, b, C, N = {fields}, expected {expected}")
    if number not in _MODES or (number == Mode.SUBGROUP and not public.subgroup):
        raise _malformed(f"an encrypted vector of mode {number}, which this key does not have")
    expected_bytes = size(public, packing, count, len(left_out))
    if len(content) != expected_bytes:
        raise _malformed(f"an encrypted vector of {len(content)} bytes, expected {expected_bytes}")
    width = public.modulus_bytes
    parts = [
        mpz.from_bytes(content[start : start + width], "big")
        for start in range(HEADER_BYTES, len(content), width)
    ]
    sent = zip(parts[::2], parts[1::2], strict=True)
    pairs = [
        (mpz(1), left_out[place]) if place in left_out else next(sent)
        for place in range(packing.ciphertexts(count))
    ]
    units, shifts = [unit for unit, _ in pairs], [shift for _, shift in pairs]
    return EncryptedVector.checked(public, packing, count, Mode(number), units, shifts, addends)


def _malformed(message: str) -> VerificationError:
    return VerificationError(Reason.MALFORMED, message)
