"""Weighted sums of encrypted vectors: integer weights in the exponent, and a fresh obfuscator on the result.

    c = prod_i c_i^(a_i) x mod n^2,   a_i >= 0,   sum_i a_i = A      holds   sum_i a_i m_i

A packing with room for ``A`` addends has room for every such sum, because it is one of A vectors, of which some are the
same.  Without the obfuscator the result would show its weights to anybody who has the ciphertexts.

The time depends on the weights.  Whoever may not know them must not be able to measure the process that computes.
"""

from __future__ import annotations

from collections.abc import Sequence

from coterie.crypto.paillier.elements import split
from coterie.crypto.paillier.multi_power import multi_power
from coterie.crypto.paillier.obfuscators import Mode, Obfuscators
from coterie.crypto.paillier.vector import EncryptedVector
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CryptoError

__all__ = ["combine"]


def combine(
    vectors: Sequence[EncryptedVector], weights: Sequence[int], obfuscators: Obfuscators
) -> EncryptedVector:
    """Return the weighted sum of encrypted vectors, obfuscated anew.

    Parameters
    ----------
    vectors : sequence of EncryptedVector
        Each of one addend, under one key, in one packing, of one length.
    weights : sequence of int
        One for each vector, at least 0; the result counts as a sum of as many addends as they sum to.
    obfuscators : Obfuscators
        Source of the key's obfuscators.

    Raises
    ------
    VerificationError
        WRONG_KEY when a vector or the obfuscators are of another key, MALFORMED for another length or packing.
    CryptoError
        When there is no vector, a weight too many or too few, a negative one, or their sum is above the packing's room.
    """
    if not vectors or len(vectors) != len(weights) or min(weights) < 0:
        raise CryptoError(
            f"{len(weights)} weights for {len(vectors)} vectors, expected one for each, none negative"
        )
    first = vectors[0]
    if any(one.public != obfuscators.public for one in vectors):
        raise VerificationError(Reason.WRONG_KEY, "vectors under different keys cannot be combined")
    if any((one.packing, one.count, one.addends) != (first.packing, first.count, 1) for one in vectors):
        raise VerificationError(Reason.MALFORMED, "vectors of different lengths, packings or addends")
    addends = sum(weights)
    first.packing.require_addends(addends)
    public, places = first.public, range(len(first.units))
    fresh = obfuscators.draw(len(places))
    products, shifts = [], []
    for place, (unit, shift) in zip(places, fresh, strict=True):
        power = multi_power([one.units[place] for one in vectors], weights, public.n_squared)
        products.append(power * unit % public.n_squared)
        weighted = zip(weights, vectors, strict=True)
        shifts.append(sum((weight * one.shifts[place] for weight, one in weighted), shift))
    units, above = split(products, public.n)
    modes = {one.mode for one in vectors} | {obfuscators.mode}
    return EncryptedVector(
        public,
        first.packing,
        first.count,
        # As of a sum: the short exponent of mode D decrypts only what has no other mode in it.
        max(modes - {Mode.SUBGROUP}, default=Mode.SUBGROUP),
        tuple(units),
        tuple((one + other) % public.n for one, other in zip(above, shifts, strict=True)),
        addends,
    )
