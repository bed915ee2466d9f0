r"""Membership of pseudo meta-latents: guesses by somebody who reads them and knows all key users' latent vectors.

The attacker looks for m vectors whose weighted mean, with weights that sum to 1, is the published one.  It begins with
the largest weights of a non-negative least squares over all candidates, and exchanges one member at a time for the
candidate that leaves the least residual, from several beginnings.  With at least m latent coordinates the true members
leave none but rounding, so an attacker who finds them knows it.

With one member (m = 1, no combination) every member is found at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.errors import DataError

__all__ = ["guess_members", "share_named"]

_BEGINNINGS = 5
_EXCHANGES = 20


def guess_members(
    published: NDArray[np.float64], candidates: NDArray[np.float64], members: int, seed: int = 0
) -> NDArray[np.intp]:
    """Guess the key users behind each pseudo meta-latent.

    Parameters
    ----------
    published : ndarray of float64, shape (count, d)
    candidates : ndarray of float64, shape (n, d)
        Latent vectors of all key users.
    members : int
        Key users m of a combination.
    seed : int, optional
        Of the beginnings.

    Returns
    -------
    ndarray of int, shape (count, m)

    Raises
    ------
    DataError
        When there are fewer candidates than members, or other coordinates.
    """
    if len(candidates) < members or published.shape[1:] != candidates.shape[1:]:
        raise DataError(
            f"{len(candidates)} candidates of shape {candidates.shape[1:]} for {members} members of vectors of shape "
            f"{published.shape[1:]}"
        )
    # A last coordinate of 1 asks for weights that sum to 1, on the scale of the others.
    scale = float(np.linalg.norm(candidates, axis=1).mean()) or 1.0
    cloud = np.column_stack([candidates, np.full(len(candidates), scale)])
    rng = np.random.default_rng(seed)
    found = [_guess(np.append(one, scale), cloud, members, rng) for one in published]
    return np.array(found, np.intp).reshape(len(published), members)


def share_named(guessed: NDArray[np.intp], truth: NDArray[np.intp]) -> float:
    """Return the share of true members that were named, over all combinations."""
    named = [np.isin(row, guess).mean() for row, guess in zip(truth, guessed, strict=True)]
    return float(np.mean(named))


def _guess(
    target: NDArray[np.float64], cloud: NDArray[np.float64], members: int, rng: np.random.Generator
) -> NDArray[np.intp]:
    if members == 1:
        return np.array([np.argmin(((cloud - target) ** 2).sum(axis=1))], np.intp)
    from scipy.optimize import nnls  # no service needs it

    weights, _ = nnls(cloud.T, target)
    support = np.argsort(-weights)[: max(members, int((weights > 0).sum()))]
    best, least = support[:members], np.inf
    for beginning in range(_BEGINNINGS):
        chosen = support[:members] if not beginning else rng.choice(support, members, replace=False)
        chosen, residual = _exchanged(target, cloud, chosen.copy())
        if residual < least:
            best, least = chosen, residual
    return best


def _exchanged(
    target: NDArray[np.float64], cloud: NDArray[np.float64], chosen: NDArray[np.intp]
) -> tuple[NDArray[np.intp], float]:
    """Exchange members, one at a time, as long as the residual falls."""
    least = _residual(target, cloud[chosen])
    for _ in range(_EXCHANGES):
        before = least
        for place in range(len(chosen)):
            others = np.delete(chosen, place)
            basis, _ = np.linalg.qr(cloud[others].T)
            left = target - basis @ (basis.T @ target)
            apart = cloud - (cloud @ basis) @ basis.T
            size = (apart**2).sum(axis=1)
            gain = np.divide((apart @ left) ** 2, size, out=np.zeros_like(size), where=size > 1e-12)
            gain[others] = -1
            chosen[place] = int(np.argmax(gain))
            least = _residual(target, cloud[chosen])
        if least >= before * (1 - 1e-9):
            break
    return chosen, least


def _residual(target: NDArray[np.float64], rows: NDArray[np.float64]) -> float:
    fit, *_ = np.linalg.lstsq(rows.T, target, rcond=None)
    return float(((target - fit @ rows) ** 2).sum())
