"""Public and secret Paillier keys (Paillier 1999), their generation, and the checks that parties make on them.

The modulus is ``n = p q``, the generator ``g = n + 1``.  The primes p and q have the same length, and their three
highest bits are set.  Both have the form ``p = 2 k p' + 1`` with a known prime ``k`` of 40 bits, or of 320 bits in a
*subgroup key*; p and q have different k.  So p and q are 3 modulo 4, gcd(p - 1, q - 1) is 2, and a holder of the secret
key knows the order of every element.

A public key has a record: the modulus, the public half of the set key, its creation time, its run, and the base of the
subgroup.  Its id is the SHA-256 of the explicit bytes (paillier-key, n, set key, bits, created, run, base).

Assumed: composite residuosity modulo n^2, hence that n is hard to factor; 3,072 bits stand for 128 bits of security.
Subgroup keys assume in addition that elements of prime orders of 320 bits look like any others (Paillier 1999,
section 6); to find such an order by collisions takes 2^160 steps.

Python cannot overwrite integers: a secret key stays in memory until its process ends.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from functools import cached_property
from typing import NamedTuple, NoReturn

import gmpy2
from gmpy2 import mpz

from coterie.crypto.explicit import encode
from coterie.crypto.key_id import paillier_key_id
from coterie.crypto.paillier.primes import SMALL_PRIMES_BELOW, draw_prime, has_small_factor, is_prime, uniform
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CryptoError

__all__ = ["DEFAULT_BITS", "LEAST_BITS", "SUBGROUP_BITS", "PublicKey", "SecretKey", "generate"]

DEFAULT_BITS = 3072
LEAST_BITS = 2048
"""Shortest modulus outside comparisons with the papers."""
_LEAST_TO_COMPARE = 1024
_ORDER_BITS = 40
SUBGROUP_BITS = 320
"""Bits of each of the two prime orders in a subgroup key."""
_SET_KEY_BYTES = 32
_EXTRA_BYTES = 16  # drawn beyond the modulus, so that reducing leaves nothing to see


def require_size(bits: int, comparison: bool) -> None:
    """Raise `CryptoError` unless a modulus of ``bits`` bits is allowed."""
    least = _LEAST_TO_COMPARE if comparison else LEAST_BITS
    if bits < least or bits % 16:
        raise CryptoError(
            f"a Paillier modulus of {bits} bits, expected a multiple of 16 from {least} on",
            hint=f"shorter keys, from {_LEAST_TO_COMPARE} bits on, are for comparisons with the papers only"
            if bits < least
            else None,
        )


class PublicKey:
    """A public Paillier key, with which contributors encrypt; checked as far as possible without the secret key.

    Parameters
    ----------
    n : int
        Modulus: odd, of exactly ``bits`` bits, without factors below 2^16.
    set_public : bytes
        X25519 public half of the set key, 32 bytes.
    bits : int
        Declared length of the modulus; a multiple of 16, at least 2048.
    created : int
        Seconds since 1970.
    run : str
    base : int, optional
        Base of a subgroup key, an element of order k_p k_q modulo n; 0 for other keys.
    comparison : bool, optional
        Whether this is for comparison with a paper, where 1024 bits are allowed.

    Raises
    ------
    CryptoError
        The length is not allowed.
    VerificationError
        MALFORMED when another parameter is not as above.
    """

    def __init__(
        self,
        n: mpz,
        set_public: bytes,
        bits: int,
        created: int,
        run: str,
        base: mpz = 0,
        *,
        comparison: bool = False,
    ) -> None:
        require_size(bits, comparison)
        self.n = mpz(n)
        self.base = mpz(base)
        self.set_public = set_public
        self.bits = bits
        self.created = created
        self.run = run
        if self.n.bit_length() != bits or self.n.is_even():
            raise _malformed(f"the modulus is even or does not have the declared {bits} bits")
        if has_small_factor(self.n):
            raise _malformed(f"the modulus has a factor below {SMALL_PRIMES_BELOW}")
        if len(set_public) != _SET_KEY_BYTES:
            raise _malformed(f"the set key has {len(set_public)} bytes, expected {_SET_KEY_BYTES}")
        # A base that is 1, -1 or 0 modulo a factor would obfuscate nothing there, or reveal the factor.
        if self.base and (
            not 0 < self.base < self.n or gmpy2.gcd(self.base * (self.base**2 - 1), self.n) != 1
        ):
            raise _malformed("the base of the subgroup is out of range or has too small an order")

    @cached_property
    def n_squared(self) -> mpz:
        """Modulus of ciphertexts."""
        return self.n * self.n

    @property
    def modulus_bytes(self) -> int:
        """Length of n in bytes; a ciphertext has twice as many."""
        return self.bits // 8

    @property
    def subgroup(self) -> bool:
        """Whether this is a subgroup key."""
        return bool(self.base)

    @cached_property
    def key_id(self) -> bytes:
        """SHA-256 of the record, 32 bytes."""
        size = self.modulus_bytes
        modulus = self.n.to_bytes(size, "big")
        base = self.base.to_bytes(size, "big") if self.base else b""
        return paillier_key_id(modulus, self.set_public, self.bits, self.created, self.run, base)

    @cached_property
    def derived_base(self) -> mpz:
        """Base of the public obfuscators, ``-x^2 mod n`` with ``x`` hashed from n (Damgard, Jurik, Nielsen 2010).

        The hash determines it, so nobody can choose a base of small order.
        """
        size = self.modulus_bytes
        label = encode("paillier-base", self.n.to_bytes(size, "big"))
        x = mpz.from_bytes(hashlib.shake_256(label).digest(size + _EXTRA_BYTES), "big") % self.n
        return -x * x % self.n

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublicKey) and self.key_id == other.key_id

    def __hash__(self) -> int:
        return hash(self.key_id)

    def __repr__(self) -> str:
        return f"<PublicKey {self.key_id.hex()[:16]}, {self.bits} bits>"


class Factor(NamedTuple):
    """A prime factor p of a modulus, with the known prime k of p - 1 = 2 k p'."""

    prime: mpz
    order: mpz
    """The prime k, of 40 bits, or 320 in a subgroup key; 0 where it is not known, as in a key made elsewhere."""

    @property
    def rest(self) -> mpz:
        """The other prime, p'."""
        return (self.prime - 1) // (2 * self.order)


class SecretKey:
    """A secret Paillier key: the two factors of a public key's modulus.  Never pickled, never printed.

    Parameters
    ----------
    public : PublicKey
    p, q : Factor
        In any order.

    Raises
    ------
    VerificationError
        WRONG_KEY when they are not two factors of the modulus.  ``check`` checks everything else.
    """

    def __init__(self, public: PublicKey, p: Factor, q: Factor) -> None:
        if p.prime * q.prime != public.n or min(p.prime, q.prime) < 2 or p.prime == q.prime:
            raise VerificationError(
                Reason.WRONG_KEY, "a secret key does not hold the two factors of the modulus"
            )
        self.public = public
        self.factors = (p, q) if p.prime < q.prime else (q, p)

    @property
    def own(self) -> bool:
        """Whether the form of the factors is known; a key made elsewhere has no known form and only decrypts."""
        return all(factor.order for factor in self.factors)

    def check(self) -> None:
        """Check the form of the factors and of the subgroup's base, as a holder does with a received secret key.

        Raises
        ------
        VerificationError
            MALFORMED when the factors or the base are not of the form that this module describes.
        """
        p, q = self.factors
        bits, order_bits = self.public.bits // 2, SUBGROUP_BITS if self.public.subgroup else _ORDER_BITS
        for prime, order in self.factors:
            if not order or prime.bit_length() != bits or prime >> (bits - 3) != 7:
                raise _malformed("a factor of the modulus does not have half its length, or an unknown form")
            if order.bit_length() != order_bits or (prime - 1) % (2 * order):
                raise _malformed(f"a factor of the modulus has no order of {order_bits} bits")
        parts = [part for factor in self.factors for part in (factor.prime, factor.order, factor.rest)]
        if not all(is_prime(part) for part in parts) or len(set(parts)) != len(parts):
            raise _malformed(
                "the factors of the modulus are not of the form 2 k p' + 1 with different primes"
            )
        phi = (p.prime - 1) * (q.prime - 1)
        if gmpy2.gcd(p.prime - 1, q.prime - 1) != 2 or gmpy2.gcd(self.public.n, phi) != 1:
            raise _malformed("the orders of both factors have more in common than 2")
        # The record's base is not 1 modulo either factor, so a prime order that takes it to 1 is its own.
        if self.public.subgroup and any(
            gmpy2.powmod(self.public.base, order, prime) != 1 for prime, order in self.factors
        ):
            raise _malformed("the base of the subgroup does not have the order that the secret key says")

    def to_bytes(self) -> bytes:
        """Return p, q, k_p, k_q, big-endian: p and q half as long as n, k_p and k_q 5 bytes, or 40 in a subgroup key.

        Raises
        ------
        CryptoError
            When the key was made elsewhere.
        """
        if not self.own:
            raise CryptoError("a secret key that was made elsewhere has no bytes here: its form is not known")
        size, order_size = _sizes(self.public)
        primes = b"".join(int(factor.prime).to_bytes(size) for factor in self.factors)
        return primes + b"".join(int(factor.order).to_bytes(order_size) for factor in self.factors)

    @classmethod
    def from_bytes(cls, public: PublicKey, content: bytes) -> SecretKey:
        """Parse the secret key of a public key, and check it in full.

        Raises
        ------
        VerificationError
            MALFORMED when the length or the form is not right, WRONG_KEY when it is another key's.
        """
        size, order_size = _sizes(public)
        if len(content) != 2 * (size + order_size):
            raise _malformed(f"a secret key of {len(content)} bytes, expected {2 * (size + order_size)}")
        ends = [0, size, 2 * size, 2 * size + order_size, len(content)]
        p, q, first, second = (
            mpz.from_bytes(content[start:end], "big") for start, end in itertools.pairwise(ends)
        )
        key = cls(public, Factor(p, first), Factor(q, second))
        key.check()
        return key

    def __repr__(self) -> str:
        return f"<SecretKey {self.public.key_id.hex()[:16]}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SecretKey is never pickled; seal its bytes for who may have it")


def generate(
    run: str,
    set_public: bytes,
    *,
    bits: int = DEFAULT_BITS,
    subgroup: bool = False,
    comparison: bool = False,
) -> SecretKey:
    """Draw a Paillier key pair.

    Parameters
    ----------
    run : str
        Run of the key.
    set_public : bytes
        X25519 public half of the set key, 32 bytes.
    bits : int, optional
        Length of the modulus.
    subgroup : bool, optional
        Whether ciphertexts may come from a small subgroup: faster to decrypt, under a further assumption.
    comparison : bool, optional
        Whether this is for comparison with a paper, where 1024 bits are allowed.

    Raises
    ------
    CryptoError
        The length is not allowed.
    """
    require_size(bits, comparison)
    order_bits = SUBGROUP_BITS if subgroup else _ORDER_BITS
    p, q = (Factor(*draw_prime(bits // 2, order_bits)) for _ in range(2))
    base = _subgroup_base(p, q) if subgroup else mpz(0)
    record = p.prime * q.prime, set_public, bits, int(time.time()), run, base
    key = SecretKey(PublicKey(*record, comparison=comparison), p, q)
    # Both factors might share a prime; nothing else can be wrong, and this is improbable, too.
    key.check()
    return key


def _subgroup_base(p: Factor, q: Factor) -> mpz:
    """Return an element of order k_p k_q modulo n."""
    parts = []
    for prime, order in (p, q):
        part = mpz(1)
        while part == 1:
            part = gmpy2.powmod(1 + uniform(prime - 1), (prime - 1) // order, prime)
        parts.append(part)
    step = (parts[1] - parts[0]) * gmpy2.invert(p.prime, q.prime) % q.prime
    return parts[0] + p.prime * step


def _sizes(public: PublicKey) -> tuple[int, int]:
    """Return the lengths in bytes of a factor and of its known prime k."""
    return public.bits // 16, (SUBGROUP_BITS if public.subgroup else _ORDER_BITS) // 8


def _malformed(message: str) -> VerificationError:
    return VerificationError(Reason.MALFORMED, message)
