"""Encryption of vectors of codes, their sum under encryption, and its decryption.

    c_j = (1 + (m_j + P_j) n) x_j mod n^2      x_j an obfuscator, m_j a packed plaintext, P_j a pad

The product of ciphertexts modulo n^2 encrypts the sum of their plaintexts.  Anybody who has the public key can form it,
and can also add anything else: the pads reveal that (``pads``), not the counts kept here.
Ciphertexts are pairs of a unit and a shift (``elements``), also where they are sent.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import gmpy2
import numpy as np
from gmpy2 import mpz
from numpy.typing import NDArray

from coterie.crypto.paillier.decryption import decrypt
from coterie.crypto.paillier.elements import join, split
from coterie.crypto.paillier.keys import PublicKey, SecretKey
from coterie.crypto.paillier.obfuscators import Mode, Obfuscators
from coterie.crypto.paillier.packing import Packing
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CryptoError

__all__ = ["EncryptedVector", "RunningSum", "decrypt_vector", "encrypt"]


@dataclass(frozen=True, repr=False)
class EncryptedVector:
    """Ciphertexts of one vector, or of a sum of vectors.

    Parameters
    ----------
    public : PublicKey
        The key.
    packing : Packing
        How codes lie in plaintexts.
    count : int
        Values.
    mode : Mode
        Mode of the obfuscators.
    units, shifts : tuple of mpz
        Ciphertexts; those of another party go through `checked`.
    addends : int, optional
        Number of users whose codes were added.
    """

    public: PublicKey
    packing: Packing
    count: int
    mode: Mode
    units: tuple[mpz, ...]
    shifts: tuple[mpz, ...]
    addends: int = 1

    def __post_init__(self) -> None:
        if self.packing.key_bits != self.public.bits:
            raise CryptoError(
                f"a packing for {self.packing.key_bits} bits under a key of {self.public.bits} bits"
            )
        if not len(self.units) == len(self.shifts) == self.packing.ciphertexts(self.count):
            raise CryptoError(
                f"{len(self.units)} ciphertexts for {self.count} values, "
                f"expected {self.packing.ciphertexts(self.count)}"
            )

    @classmethod
    def checked(
        cls,
        public: PublicKey,
        packing: Packing,
        count: int,
        mode: Mode,
        units: Sequence[mpz],
        shifts: Sequence[mpz],
        addends: int = 1,
    ) -> EncryptedVector:
        """Return a vector that another party formed, after a check of its ciphertexts.

        Raises
        ------
        VerificationError
            MALFORMED when a unit or shift is not below n, or a unit not invertible.
        CryptoError
            When there are too many or too few ciphertexts, or more addends than there is room for.
        """
        packing.require_addends(addends)
        found = cls(public, packing, count, mode, tuple(units), tuple(shifts), addends)
        n, product = public.n, mpz(1)
        for place, (unit, shift) in enumerate(zip(units, shifts, strict=True)):
            # Zero is the one unit not invertible that somebody without the secret key can name.
            if not (0 < unit < n and 0 <= shift < n):
                raise VerificationError(Reason.MALFORMED, f"ciphertext {place} is zero or not below n")
            product = product * unit % n
        if gmpy2.gcd(product, n) != 1:
            raise VerificationError(Reason.MALFORMED, "a ciphertext is not invertible")
        return found

    @property
    def residues(self) -> list[mpz]:
        """Ciphertexts as numbers below n^2."""
        return join(self.units, self.shifts, self.public.n)

    def __repr__(self) -> str:
        return f"<EncryptedVector of {self.count} values, {self.addends} addends, for {self.public!r}>"


def encrypt(
    codes: NDArray[np.integer],
    packing: Packing,
    obfuscators: Obfuscators,
    *,
    pads: Sequence[mpz] | None = None,
    addends: int = 1,
    plain: Collection[int] = (),
) -> EncryptedVector:
    """Encrypt a vector of codes.

    Parameters
    ----------
    codes : ndarray of integer, shape (N,)
    packing : Packing
    obfuscators : Obfuscators
        Source of the key's obfuscators; each is used once.
    pads : sequence of mpz, optional
        A number for each ciphertext that is added to its plaintext, below n; all zero when absent.
    addends : int, optional
        Number of users whose codes were added already.
    plain : collection of int, optional
        Positions of ciphertexts without an obfuscator, because everybody knows their plaintexts.

    Raises
    ------
    CryptoError
        When a code is out of range, as `Packing.pack`, or there are more or fewer pads; nothing is encrypted then.
    """
    public, shown = obfuscators.public, frozenset(plain)
    plaintexts = packing.pack(codes, addends)
    if pads is not None:
        if len(pads) != len(plaintexts):
            raise CryptoError(f"{len(pads)} pads for {len(plaintexts)} plaintexts")
        plaintexts = [plaintext + pad for plaintext, pad in zip(plaintexts, pads, strict=True)]
    drawn = iter(obfuscators.draw(len(plaintexts) - len(shown)))
    n, units, shifts = public.n, [], []
    for place, plaintext in enumerate(plaintexts):
        unit, shift = (mpz(1), mpz(0)) if place in shown else next(drawn)
        units.append(unit)
        shifts.append((plaintext + shift) % n)
    return EncryptedVector(
        public, packing, codes.size, obfuscators.mode, tuple(units), tuple(shifts), addends
    )


class RunningSum:
    """A sum under encryption: a running product at each ciphertext's position.

    Parameters
    ----------
    public : PublicKey
    packing : Packing
    count : int
        Values of each vector.
    zeros : sequence of mpz
        Plaintexts of an empty vector, where contributors may leave ciphertexts out.
    """

    def __init__(self, public: PublicKey, packing: Packing, count: int, zeros: Sequence[mpz] = ()) -> None:
        self.public, self.packing, self.count, self.zeros = public, packing, count, zeros
        self.addends = 0
        self._products: list[mpz] = []
        self._shifts: list[mpz] = []
        self._modes: frozenset[Mode] = frozenset()

    def add(self, vector: EncryptedVector) -> None:
        """Add a vector, or a sum of others.

        Raises
        ------
        VerificationError
            WRONG_KEY when it is under another key, MALFORMED when it has another length or packing.
        CryptoError
            When there would be more addends than there is room for.  Nothing is added then.
        """
        if vector.public != self.public:
            raise VerificationError(Reason.WRONG_KEY, "a vector under another key cannot be added")
        if vector.packing != self.packing or vector.count != self.count:
            raise VerificationError(
                Reason.MALFORMED, f"a vector of {vector.count} values in {vector.packing} cannot be added"
            )
        self._include(vector.units, vector.shifts, vector.addends, {vector.mode})

    def _include(
        self, products: Sequence[mpz], shifts: Sequence[mpz], addends: int, modes: AbstractSet[Mode]
    ) -> None:
        self.packing.require_addends(self.addends + addends)
        if self.addends:
            square = self.public.n_squared
            pairs = zip(self._products, products, strict=True)
            self._products = [product * unit % square for product, unit in pairs]
            self._shifts = [so_far + shift for so_far, shift in zip(self._shifts, shifts, strict=True)]
        else:
            self._products, self._shifts = list(products), list(shifts)
        self.addends += addends
        self._modes |= modes

    def plus(self, vector: EncryptedVector) -> RunningSum:
        """Return a copy of the sum with one vector added.

        Raises
        ------
        VerificationError, CryptoError
            As `add`.
        """
        # `add` makes new lists, so a copy may share the old ones.
        found = copy.copy(self)
        found.add(vector)
        return found

    def joined(self, other: RunningSum) -> RunningSum:
        """Return the sum of this one and another one of the same vectors, under the same key.

        Raises
        ------
        CryptoError
            When there would be more addends than there is room for.
        """
        if not other.addends:
            return self
        found = copy.copy(self)
        found._include(other._products, other._shifts, other.addends, other._modes)
        return found

    def total(self) -> EncryptedVector:
        """Return the sum so far.

        Its mode is D where every addend's mode is D, because only then the short exponent decrypts it; otherwise the
        last letter among A, B and C.

        Raises
        ------
        CryptoError
            When nothing was added.
        """
        if not self.addends:
            raise CryptoError("a sum of no vectors")
        mode = max(self._modes - {Mode.SUBGROUP}, default=Mode.SUBGROUP)
        n = self.public.n
        units, above = split(self._products, n)
        shifts = [(one + other) % n for one, other in zip(above, self._shifts, strict=True)]
        return EncryptedVector(
            self.public, self.packing, self.count, mode, tuple(units), tuple(shifts), self.addends
        )


def decrypt_vector(
    vector: EncryptedVector, secret: SecretKey, pads: Sequence[mpz] | None = None
) -> NDArray[np.uint64]:
    """Decrypt a vector: return the sums of codes, uint64 (count,), given the sum of the pads in each ciphertext.

    Raises
    ------
    VerificationError
        WRONG_KEY when the vector is under another key; MALFORMED when a ciphertext does not decrypt, or its content is
        no sum of so many packed vectors.
    """
    if vector.public != secret.public:
        raise VerificationError(
            Reason.WRONG_KEY, f"a vector for {vector.public!r} is not decrypted with {secret!r}"
        )
    plaintexts = decrypt(secret, vector.units, vector.shifts, vector.mode)
    if pads is not None:
        n = vector.public.n
        plaintexts = [(plaintext - pad) % n for plaintext, pad in zip(plaintexts, pads, strict=True)]
    return vector.packing.unpack(plaintexts, vector.count, vector.addends)
