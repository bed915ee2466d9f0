"""Conversion of keys and vectors to and from ``phe``, another implementation of Paillier.

``phe`` is under GPLv3 and imported here only, when one of these functions is called.  Facts that ``phe`` does not have
are separate arguments: the record of a key, the packing of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gmpy2 import mpz

from coterie.crypto.paillier.elements import split
from coterie.crypto.paillier.keys import Factor, PublicKey, SecretKey
from coterie.crypto.paillier.obfuscators import Mode
from coterie.crypto.paillier.packing import Packing
from coterie.crypto.paillier.vector import EncryptedVector
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CryptoError

if TYPE_CHECKING:
    from phe import EncryptedNumber, PaillierPrivateKey, PaillierPublicKey

__all__ = [
    "from_stock",
    "public_from_stock",
    "secret_from_stock",
    "to_stock",
    "to_stock_public",
    "to_stock_secret",
]


def to_stock_public(public: PublicKey) -> PaillierPublicKey:
    """Convert a public key to ``phe``."""
    import phe

    return phe.PaillierPublicKey(int(public.n))


def to_stock_secret(secret: SecretKey) -> PaillierPrivateKey:
    """Convert a secret key to ``phe``."""
    import phe

    p, q = (int(factor.prime) for factor in secret.factors)
    return phe.PaillierPrivateKey(to_stock_public(secret.public), p, q)


def public_from_stock(
    stock: PaillierPublicKey, set_public: bytes, created: int, run: str, *, comparison: bool = False
) -> PublicKey:
    """Convert a public key from ``phe``, with the rest of its record.

    Raises
    ------
    CryptoError
        As `PublicKey`.
    """
    bits = stock.n.bit_length()
    return PublicKey(mpz(stock.n), set_public, bits, created, run, comparison=comparison)


def secret_from_stock(stock: PaillierPrivateKey, public: PublicKey) -> SecretKey:
    """Convert a secret key from ``phe``.

    The key decrypts.  It draws no obfuscators and fails `SecretKey.check`, because the form of its factors is not
    known, even where the key was made here.

    Raises
    ------
    VerificationError
        WRONG_KEY when it is not the record's.
    """
    return SecretKey(public, Factor(mpz(stock.p), mpz(0)), Factor(mpz(stock.q), mpz(0)))


def to_stock(vector: EncryptedVector) -> list[EncryptedNumber]:
    """Convert a vector to ``phe``: each ciphertext becomes an encrypted integer, its packed plaintext."""
    import phe

    public = to_stock_public(vector.public)
    return [phe.EncryptedNumber(public, int(residue)) for residue in vector.residues]


def from_stock(
    numbers: Sequence[EncryptedNumber], public: PublicKey, packing: Packing, count: int, *, addends: int = 1
) -> EncryptedVector:
    """Convert encrypted integers of ``phe``, which are packed plaintexts, to a vector.

    ``phe`` obfuscates a number here if it was not before; sums of its own count as that.

    Raises
    ------
    VerificationError
        WRONG_KEY when a number is under another key, MALFORMED when it is no ciphertext.
    CryptoError
        When a number is not whole, or there are too many or too few.
    """
    for number in numbers:
        if number.public_key.n != public.n:
            raise VerificationError(Reason.WRONG_KEY, "a number of phe is under another key")
        if number.exponent:
            raise CryptoError(f"a number of phe has exponent {number.exponent}, expected 0: a whole number")
    try:
        units, shifts = split([mpz(number.ciphertext()) for number in numbers], public.n)
    except ZeroDivisionError:
        raise VerificationError(Reason.MALFORMED, "a number of phe is not invertible") from None
    # Its obfuscators are distributed as in mode A: powers r^n of a uniform r.
    return EncryptedVector.checked(public, packing, count, Mode.KEY_HOLDER, units, shifts, addends)
