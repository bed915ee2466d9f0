r"""Values of latent vectors as integers, and pseudo meta-latents as clients use them.

A value v, clipped at the bound B, has the code ``round(v (2^(b-1) - 1) / B) + 2^(b-1)``, from 1 to 2^b - 1.  A
combination holds ``sum_i a_i code_i`` with weights that sum to 2^16, so its value is known without the weights::

    v = (sum / 2^16 - 2^(b-1)) B / (2^(b-1) - 1)

Means of m key users lie closer together than key users do: their standard deviation is ``sqrt(sum_i a_i^2) / 2^16`` of
theirs, about .45 for m = 5.  `rescaled` undoes that, coordinate by coordinate, by mean and variance of key users.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.crypto.latent_terms import FRACTION_BITS, LatentTerms
from coterie.errors import CryptoError

__all__ = ["Moments", "condition_number", "encode_latent", "latents_of_sums", "rescaled"]


class Moments(NamedTuple):
    """Mean and variance of key users' latent vectors by coordinate, from a secure sum over key users."""

    mean: NDArray[np.float64]
    """Shape (d,)."""
    variance: NDArray[np.float64]
    """Shape (d,)."""

    @classmethod
    def of_sums(cls, values: NDArray[np.floating], squares: NDArray[np.floating], users: int) -> Moments:
        """Return the moments given sums of values and of squares, shape (d,) each, over so many users.

        Raises
        ------
        CryptoError
            Without users.
        """
        if users < 1:
            raise CryptoError(f"moments of {users} key users, expected at least 1")
        mean = np.asarray(values, np.float64) / users
        # Sums are rounded, so a variance of 0 may come out below.
        return cls(mean, np.maximum(np.asarray(squares, np.float64) / users - mean**2, 0))


def encode_latent(latent: NDArray[np.floating], terms: LatentTerms) -> NDArray[np.uint32]:
    """Return the codes of a latent vector, uint32 (d,).

    Raises
    ------
    CryptoError
        When it has another length, or values that are not finite.
    """
    if latent.shape != (terms.dimension,):
        raise CryptoError(f"a latent vector of shape {latent.shape}, expected ({terms.dimension},)")
    if not np.isfinite(latent).all():
        raise CryptoError("a latent vector has values that are not finite")
    half, bound = 1 << (terms.bits - 1), terms.bound / 1000
    scaled = np.rint(np.clip(latent.astype(np.float64), -bound, bound) * ((half - 1) / bound))
    return (scaled + half).astype(np.uint32)


def latents_of_sums(sums: NDArray[np.integer], terms: LatentTerms) -> NDArray[np.float64]:
    """Return the values that weighted sums of codes stand for, in an array of the same shape."""
    half, bound = 1 << (terms.bits - 1), terms.bound / 1000
    centred = sums.astype(np.int64) - (half << FRACTION_BITS)
    return centred / (1 << FRACTION_BITS) * (bound / (half - 1))


def rescaled(latents: NDArray[np.floating], moments: Moments) -> NDArray[np.float64]:
    """Return pseudo meta-latents with the mean and variance of key users in each coordinate.

    Parameters
    ----------
    latents : ndarray of float, shape (count, d)
    moments : Moments
        Of key users.

    Returns
    -------
    ndarray of float64, shape (count, d)
        A coordinate in which all pseudo meta-latents are equal stays at key users' mean.
    """
    centred = latents - latents.mean(axis=0)
    spread = centred.std(axis=0)
    scale = np.divide(np.sqrt(moments.variance), spread, out=np.zeros_like(spread), where=spread > 0)
    found: NDArray[np.float64] = moments.mean + centred * scale
    return found


def condition_number(latents: NDArray[np.floating]) -> float:
    """Return the condition number of centred latent vectors whose coordinates have variance 1.

    The largest singular value divided by the least of the first min(count - 1, d): infinite if they span less.
    """
    centred = latents - latents.mean(axis=0)
    spread = centred.std(axis=0)
    if not (spread > 0).all() or len(latents) < 2:
        return float("inf")
    values = np.linalg.svd(centred / spread, compute_uv=False)[: min(len(latents) - 1, latents.shape[1])]
    return float(values[0] / values[-1]) if values[-1] > 0 else float("inf")
