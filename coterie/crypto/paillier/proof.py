"""Proofs of decryption: a holder of the secret key shows, for many ciphertexts at once, what they decrypt to.

A ciphertext is ``c = (1 + m n) r^n mod n^2``.  The numbers ``e_j`` have 128 bits, and nobody can choose them, because
they are hashed from everything that is claimed.  The proof is

    R = (prod c_j^e_j mod n)^(1 / n mod phi(n)) mod n,

which is ``prod r_j^e_j``, and it is checked that

    prod c_j^e_j = (1 + n sum e_j m_j) R^n mod n^2.

A wrong plaintext passes only if it leaves ``sum e_j m_j`` unchanged modulo n, which holds for one in 2^128 of the
``e_j``.  The proof is a product of roots of obfuscators: for a sum over many contributors it reveals nothing about one.

Assumed: SHAKE-256 is a random oracle (Fiat and Shamir 1986; Bellare, Garay and Rabin 1998 on small exponents).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import gmpy2
from gmpy2 import mpz

from coterie.crypto.explicit import encode
from coterie.crypto.paillier.keys import PublicKey, SecretKey
from coterie.crypto.paillier.multi_power import multi_power
from coterie.crypto.verification import Reason, VerificationError

__all__ = ["check", "prove"]

_EXPONENT_BYTES = 16


def prove(
    secret: SecretKey, context: bytes, units: Sequence[mpz], shifts: Sequence[mpz], plaintexts: Sequence[mpz]
) -> bytes:
    """Return the proof that ciphertexts decrypt to these plaintexts, as long as n.

    Parameters
    ----------
    secret : SecretKey
    context : bytes
        Further bytes that the proof is bound to, such as the hash of a plan; `check` needs the same.
    units, shifts : sequence of mpz
        The ciphertexts.
    plaintexts : sequence of mpz
        Plaintexts of the ciphertexts.
    """
    public = secret.public
    exponents = _exponents(public, context, units, shifts, plaintexts)
    (p, _), (q, _) = ((factor.prime, factor.order) for factor in secret.factors)
    roots = []
    for prime in (p, q):
        product = multi_power([unit % prime for unit in units], exponents, prime)
        roots.append(gmpy2.powmod(product, gmpy2.invert(public.n, prime - 1), prime))
    root = roots[0] + p * ((roots[1] - roots[0]) * gmpy2.invert(p, q) % q)
    proof: bytes = root.to_bytes(public.modulus_bytes, "big")
    return proof


def check(
    public: PublicKey,
    context: bytes,
    units: Sequence[mpz],
    shifts: Sequence[mpz],
    plaintexts: Sequence[mpz],
    proof: bytes,
) -> None:
    """Check a proof of `prove`.

    Raises
    ------
    VerificationError
        MALFORMED when the proof or a plaintext is out of range, WRONG_KEY when the proof is not valid for them.
    """
    n, square = public.n, public.n_squared
    root = mpz.from_bytes(proof, "big")
    if len(proof) != public.modulus_bytes or not 0 < root < n or gmpy2.gcd(root, n) != 1:
        raise VerificationError(Reason.MALFORMED, "a proof of decryption is out of range")
    if len(plaintexts) != len(units) or not all(0 <= plaintext < n for plaintext in plaintexts):
        raise VerificationError(Reason.MALFORMED, "a decrypted number is missing or out of range")
    exponents = _exponents(public, context, units, shifts, plaintexts)
    product = multi_power(units, exponents, square)
    shift = sum((e * (b - m) for e, b, m in zip(exponents, shifts, plaintexts, strict=True)), mpz(0))
    if product * (1 + shift % n * n) % square != gmpy2.powmod(root, n, square):
        raise VerificationError(Reason.WRONG_KEY, "what was decrypted is not what is in the ciphertexts")


def _exponents(
    public: PublicKey, context: bytes, units: Sequence[mpz], shifts: Sequence[mpz], plaintexts: Sequence[mpz]
) -> list[int]:
    size = public.modulus_bytes
    claimed = hashlib.sha256()
    for parts in zip(units, shifts, plaintexts, strict=True):
        for part in parts:
            claimed.update(part.to_bytes(size, "big"))
    label = encode("decryption-proof", public.key_id, context, len(plaintexts), claimed.digest())
    drawn = hashlib.shake_256(label).digest(_EXPONENT_BYTES * len(plaintexts))
    return [
        int.from_bytes(drawn[start : start + _EXPONENT_BYTES])
        for start in range(0, len(drawn), _EXPONENT_BYTES)
    ]
