"""Decryption modulo p^2 and q^2, a thread for each, joined by the Chinese remainder theorem (Paillier 1999, section 7).

A ciphertext ``a (1 + b n)`` has ``m = L(a^e mod p^2) / (e q) + b mod p`` with ``L(x) = (x - 1) / p`` and an exponent
``e`` that takes the obfuscator to 1: p - 1, or k_p where all ciphertexts are of mode D.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import gmpy2
from gmpy2 import mpz

from coterie.crypto.paillier.keys import Factor, SecretKey
from coterie.crypto.paillier.obfuscators import Mode
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CryptoError

__all__ = ["decrypt"]


def decrypt(secret: SecretKey, units: Sequence[mpz], shifts: Sequence[mpz], mode: Mode) -> list[mpz]:
    """Return the plaintexts of ciphertexts, each from 0 to n - 1.

    Nearly all of the work is exponentiation, during which gmpy2 releases the GIL.  The time depends on the key.

    Parameters
    ----------
    secret : SecretKey
    units, shifts : sequence of mpz
        Ciphertexts: any subset of a vector's.
    mode : Mode
        Mode of all the ciphertexts; ``KEY_HOLDER`` for those of ``phe``.

    Raises
    ------
    VerificationError
        MALFORMED when a ciphertext is not invertible, or in mode D not of the subgroup.
    CryptoError
        In mode D, when this is no subgroup key.
    """
    if mode is Mode.SUBGROUP and not (secret.public.subgroup and secret.own):
        raise CryptoError("ciphertexts of mode SUBGROUP are decrypted with a subgroup key")
    p, q = (factor.prime for factor in secret.factors)
    with ThreadPoolExecutor(2, thread_name_prefix="paillier") as threads:
        at_q = threads.submit(_residues, units, shifts, secret.factors[1], p, mode)
        at_p = threads.submit(_residues, units, shifts, secret.factors[0], q, mode)
        inverse = gmpy2.invert(p, q)
        return [
            below + p * ((above - below) * inverse % q)
            for below, above in zip(at_p.result(), at_q.result(), strict=True)
        ]


def _residues(
    units: Sequence[mpz], shifts: Sequence[mpz], factor: Factor, other: mpz, mode: Mode
) -> list[mpz]:
    """Return plaintexts modulo one factor."""
    prime = factor.prime
    square, exponent = prime * prime, factor.order if mode is Mode.SUBGROUP else prime - 1
    scale = gmpy2.invert(exponent * other, prime)
    found = []
    for power, shift in zip(gmpy2.powmod_base_list(list(units), exponent, square), shifts, strict=True):
        multiple, rest = gmpy2.f_divmod(power, prime)
        if rest != 1:
            raise VerificationError(
                Reason.MALFORMED, f"a ciphertext is not invertible, or not obfuscated in mode {mode.name}"
            )
        found.append((multiple * scale + shift) % prime)
    return found
