"""Encrypted vectors as bytes: a header of 44 bytes, then each ciphertext at the same width; all big-endian.

| bytes | field |
| --- | --- |
| 1 | version, 1 |
| 1 | mode, 1 to 4 |
| 1 | slot width w |
| 1 | bits of a code b |
| 4 | largest number of addends C |
| 4 | number of values N |
| 32 | key id |

How many vectors are added up in it is not there: whoever formed the sum could write what it likes.
"""

from __future__ import annotations

import struct

import gmpy2
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
_MODES = frozenset(int(mode) for mode in Mode)


def size(public: PublicKey, packing: Packing, count: int) -> int:
    """Return the bytes of a vector of so many values."""
    return HEADER_BYTES + packing.ciphertexts(count) * public.residue_bytes


def to_bytes(vector: EncryptedVector) -> bytes:
    """Return a vector as it is sent."""
    packing, public = vector.packing, vector.public
    fields = packing.slot_bits, packing.code_bits, packing.addends, vector.count
    header = _HEADER.pack(_VERSION, vector.mode, *fields, public.key_id)
    return header + b"".join([residue.to_bytes(public.residue_bytes, "big") for residue in vector.residues])


def from_bytes(
    content: bytes, public: PublicKey, packing: Packing, count: int, *, addends: int = 1
) -> EncryptedVector:
    """Return a vector that was received, with every ciphertext checked.

    Parameters
    ----------
    content : bytes
    public : PublicKey
        The key that is expected; and so are the others.
    packing : Packing
    count : int
        Values.
    addends : int, optional
        How many vectors are added up in it, by what is known otherwise.

    Raises
    ------
    VerificationError
        BAD_VERSION; WRONG_KEY; MALFORMED when packing, number of values, mode or length are others, or a ciphertext is
        not below n^2 or not invertible.
    CryptoError
        When there are more addends than there is room for.
    """
    packing.require_addends(addends)
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
    if len(content) != size(public, packing, count):
        raise _malformed(
            f"an encrypted vector of {len(content)} bytes, expected {size(public, packing, count)}"
        )
    width = public.residue_bytes
    residues = tuple(
        [
            mpz.from_bytes(content[start : start + width], "big")
            for start in range(HEADER_BYTES, len(content), width)
        ]
    )
    require_ciphertexts(residues, public)
    return EncryptedVector(public, packing, count, Mode(number), residues, addends)


def require_ciphertexts(residues: tuple[mpz, ...], public: PublicKey) -> None:
    """Raise `VerificationError` unless all of these are invertible and below n^2."""
    product = mpz(1)
    for place, residue in enumerate(residues):
        if not 0 < residue < public.n_squared:
            raise _malformed(f"ciphertext {place} is zero or not below n^2")
        product = product * residue % public.n
    if gmpy2.gcd(product, public.n) != 1:
        raise _malformed("a ciphertext is not invertible")


def _malformed(message: str) -> VerificationError:
    return VerificationError(Reason.MALFORMED, message)
