"""Obfuscators: the random n-th powers modulo n^2 that hide a plaintext, drawn in four modes, or ahead into a pool.

| mode | who | drawn as | further assumption |
| --- | --- | --- | --- |
| A, ``KEY_HOLDER`` | holder of the secret key | uniform among all n-th powers, modulo p^2 and q^2 apart | none |
| B, ``PUBLIC`` | everybody | ``h^(n r)``, ``h = -x^2 mod n``, r of half the length of n | none (factoring) |
| C, ``SHORT`` | everybody | the same with r of 512 bits | short exponents |
| D, ``SUBGROUP`` | both | powers of a base of order k_p k_q | the subgroup looks like the group |

B is Damgard, Jurik and Nielsen (2010), with Goldreich and Rosen (2003) for the length of r; D is Paillier (1999),
section 6.  In D everybody draws r of 768 bits, 128 more than the order has, and a holder draws below both orders.

All have tables of powers (``fixed_base``), made once for a key: about 40 MB at 3,072 bits in modes A and B.  The
tables of mode A are as secret as the key.
"""

from __future__ import annotations

import enum
import os
import weakref
from typing import ClassVar, NoReturn, Protocol

import gmpy2
from gmpy2 import mpz

from coterie.crypto.paillier.elements import split
from coterie.crypto.paillier.fixed_base import FixedBase
from coterie.crypto.paillier.keys import SUBGROUP_BITS, Factor, PublicKey, SecretKey
from coterie.errors import CryptoError

__all__ = ["HolderObfuscators", "Mode", "Obfuscators", "Pool", "PublicObfuscators"]

_SHORT_BYTES = 512 // 8
_SUBGROUP_BYTES = (2 * SUBGROUP_BITS + 128) // 8


class Mode(enum.IntEnum):
    """The way in which an obfuscator is drawn; the module's table has all four."""

    KEY_HOLDER = 1
    PUBLIC = 2
    SHORT = 3
    SUBGROUP = 4

    @property
    def assumption(self) -> str:
        """Assumption of this mode beyond composite residuosity and factoring; empty where there is none."""
        return _ASSUMPTIONS.get(self, "")


_ASSUMPTIONS = {
    Mode.SHORT: "powers with exponents of 512 bits look like any other powers",
    Mode.SUBGROUP: "elements of two prime orders of 320 bits look like any other elements",
}


class Obfuscators(Protocol):
    """A source of obfuscators for one public key, from which `encrypt` draws."""

    @property
    def public(self) -> PublicKey:
        """Public key of the obfuscators."""

    @property
    def mode(self) -> Mode:
        """Mode of the obfuscators."""

    def draw(self, count: int) -> list[tuple[mpz, mpz]]:
        """Return ``count`` fresh obfuscators as pairs of unit and shift."""


class HolderObfuscators:
    """Draws obfuscators of modes A and D with the secret key, modulo p^2 and q^2 apart.

    Its tables are secret.  They stay in memory and are never pickled.

    Parameters
    ----------
    secret : SecretKey
        Made by ``generate``: obfuscators are uniform because the factors' orders are known.
    mode : Mode, optional
        ``KEY_HOLDER`` or, with a subgroup key, ``SUBGROUP``.

    Raises
    ------
    CryptoError
        Another mode, or a key that does not allow it.
    """

    def __init__(self, secret: SecretKey, mode: Mode = Mode.KEY_HOLDER) -> None:
        if mode not in (Mode.KEY_HOLDER, Mode.SUBGROUP):
            raise CryptoError(f"the holder of a secret key draws no obfuscators of mode {mode.name}")
        if not secret.own:
            raise CryptoError(
                "a secret key that was made elsewhere only decrypts: the orders of its elements are not known"
            )
        _require_subgroup(secret.public, mode)
        self.public, self.mode = secret.public, mode
        self._halves = [_Half(factor, secret.public, mode) for factor in secret.factors]
        p, q = (half.square for half in self._halves)
        self._p_squared, self._q_squared, self._inverse = p, q, gmpy2.invert(p, q)

    def draw(self, count: int) -> list[tuple[mpz, mpz]]:
        """Return ``count`` fresh obfuscators as pairs of unit and shift."""
        drawn = []
        for _ in range(count):
            at_p, at_q = (half.draw() for half in self._halves)
            drawn.append(at_p + self._p_squared * ((at_q - at_p) * self._inverse % self._q_squared))
        return _pairs(drawn, self.public)

    def __repr__(self) -> str:
        return f"<HolderObfuscators {self.mode.name} of {self.public!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("tables of a secret key are never pickled")


class _Half:
    """Draws random elements of a known order modulo the square of one factor."""

    def __init__(self, factor: Factor, public: PublicKey, mode: Mode) -> None:
        prime = factor.prime
        if mode is Mode.SUBGROUP:
            self.order, element = factor.order, public.base
        else:
            self.order, element = prime - 1, _primitive_root(factor)
        self.square = prime * prime
        base = gmpy2.powmod(element, public.n, self.square)
        self._table = FixedBase(base, prime, (int(self.order).bit_length() + 7) // 8)

    def draw(self) -> mpz:
        """Return a uniformly drawn element."""
        # Orders fill whole bytes and have their highest bits set, so most draws are accepted.
        while True:
            drawn = os.urandom(self._table.exponent_bytes)
            if mpz.from_bytes(drawn, "little") < self.order:
                return self._table.power(drawn)


def _primitive_root(factor: Factor) -> mpz:
    """Return the least element of order p - 1 modulo p."""
    prime = factor.prime
    parts = [(prime - 1) // part for part in (2, factor.order, factor.rest)]
    root = mpz(2)
    while any(gmpy2.powmod(root, part, prime) == 1 for part in parts):
        root += 1
    return root


class PublicObfuscators:
    """Draws obfuscators of modes B, C and D with the public key only.

    Parameters
    ----------
    public : PublicKey
    mode : Mode, optional
        ``PUBLIC``, ``SHORT`` or, with a subgroup key, ``SUBGROUP``.

    Raises
    ------
    CryptoError
        Another mode, or a key that does not allow it.
    """

    def __init__(self, public: PublicKey, mode: Mode = Mode.PUBLIC) -> None:
        lengths = {Mode.PUBLIC: public.bits // 16, Mode.SHORT: _SHORT_BYTES, Mode.SUBGROUP: _SUBGROUP_BYTES}
        if mode not in lengths:
            raise CryptoError(f"obfuscators of mode {mode.name} need the secret key")
        _require_subgroup(public, mode)
        self.public, self.mode = public, mode
        element = public.base if mode is Mode.SUBGROUP else public.derived_base
        base = gmpy2.powmod(element, public.n, public.n_squared)
        self._table = FixedBase(base, public.n, lengths[mode])

    def draw(self, count: int) -> list[tuple[mpz, mpz]]:
        """Return ``count`` fresh obfuscators as pairs of unit and shift."""
        size = self._table.exponent_bytes
        return _pairs([self._table.power(os.urandom(size)) for _ in range(count)], self.public)

    def __repr__(self) -> str:
        return f"<PublicObfuscators {self.mode.name} of {self.public!r}>"


def _pairs(drawn: list[mpz], public: PublicKey) -> list[tuple[mpz, mpz]]:
    return list(zip(*split(drawn, public.n), strict=True))


def _require_subgroup(public: PublicKey, mode: Mode) -> None:
    if mode is Mode.SUBGROUP and not public.subgroup:
        raise CryptoError(
            "obfuscators of mode SUBGROUP need a subgroup key", hint="generate the key with subgroup = true"
        )


class Pool:
    """A pool of obfuscators drawn ahead, in the memory of one process, so that a ciphertext later takes one addition.

    Each obfuscator leaves the pool before it is used.  A forked child starts with an empty pool: an obfuscator that
    hides two plaintexts reveals their difference.  The pool is never written anywhere.

    Parameters
    ----------
    source : Obfuscators
        Draws obfuscators to fill the pool, and when the pool is empty.
    """

    __slots__ = ("__weakref__", "_ready", "_source")

    _living: ClassVar[weakref.WeakSet[Pool]] = weakref.WeakSet()

    def __init__(self, source: Obfuscators) -> None:
        self._source = source
        self._ready: list[tuple[mpz, mpz]] = []
        Pool._living.add(self)

    @property
    def public(self) -> PublicKey:
        """Public key of the obfuscators."""
        return self._source.public

    @property
    def mode(self) -> Mode:
        """Mode of the obfuscators."""
        return self._source.mode

    def fill(self, count: int) -> None:
        """Draw ``count`` more obfuscators into the pool."""
        self._ready += self._source.draw(count)

    def draw(self, count: int) -> list[tuple[mpz, mpz]]:
        """Return ``count`` obfuscators as pairs of unit and shift, freshly drawn where the pool has too few."""
        found: list[tuple[mpz, mpz]] = []
        # Popped one by one, so that two threads never take the same.
        while len(found) < count:
            try:
                found.append(self._ready.pop())
            except IndexError:
                return found + self._source.draw(count - len(found))
        return found

    def __len__(self) -> int:
        return len(self._ready)

    def __repr__(self) -> str:
        return f"<Pool of {len(self)} for {self.public!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a pool of obfuscators is never pickled")

    @classmethod
    def _empty_after_fork(cls) -> None:
        for pool in cls._living:
            pool._ready = []


os.register_at_fork(after_in_child=Pool._empty_after_fork)
