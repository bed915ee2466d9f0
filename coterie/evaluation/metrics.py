"""Ranking metrics, computed for all users at once.

Every metric is per user, so that sums can be formed where the users are and leave as sums. Users without a
relevant candidate have none: NaN, not zero.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.errors import RunError

__all__ = ["descending", "pair_loss", "ranking"]

_ELEMENTS_AT_ONCE = 1 << 21
"""Scores whose sort keys are in memory together: 16 MB."""
_FEW = 4
"""Candidates are few where the items are at least so many times as many."""
_NOT_A_CANDIDATE = np.iinfo(np.int64).max


def ranking(
    scores: NDArray[np.floating],
    relevant: NDArray[np.bool_],
    candidates: NDArray[np.bool_],
    k: int = 10,
) -> dict[str, NDArray[np.float64]]:
    r"""Rank each user's candidates by score and compute the metrics of the first ``k``.

    :math:`rel_i` is 1 if the item at rank :math:`i` is relevant, else 0, and :math:`R` is the number of the
    user's relevant candidates.

    ``precision@k``
        :math:`\sum_{i \le k} rel_i / k`; ``k`` also where there are fewer candidates.
    ``recall@k``
        :math:`\sum_{i \le k} rel_i / R`.
    ``hit_ratio@k``
        1 if any of the first ``k`` is relevant, else 0 (FedNCF, with one relevant item).
    ``map@k``
        :math:`\sum_{i \le k} rel_i \, precision@i / \min(k, R)`, over users DRIFT's MAP (6.1.1).
    ``ndcg@k``
        :math:`\sum_{i \le k} rel_i / \log_2(i + 1)`, over its largest value with :math:`\min(k, R)` relevant
        items (DRIFT's NDCG with the usual gain; FedNCF's with one relevant item).
    ``ndcg_printed@k``
        As DRIFT prints it (6.1.1): gain :math:`2^{rel_i - 1}`, so a relevant item gains 1 and any other item
        1/2, over :math:`\sum_{i \le k} 1 / \log_2(i + 1)`, "when all the items are pertinent". A ranking
        without a single relevant item has 0.5, and one relevant item among many candidates cannot reach 1:
        read it beside ``ndcg@k`` only. Ranks beyond the last candidate gain nothing.

    Equal scores count against the model: among them the items that are not relevant come first. Scores are
    compared as float32.

    Parameters
    ----------
    scores : ndarray of float, shape (n, I)
        Finite for every candidate.
    relevant : ndarray of bool, shape (n, I)
        Relevant items; one that is not also a candidate does not count.
    candidates : ndarray of bool, shape (n, I)
        Items that are ranked.
    k : int
        At least 1.

    Returns
    -------
    dict of str to ndarray of float64, shape (n,)
        The keys above with the number for ``k``. NaN for users without a relevant candidate.

    Raises
    ------
    ValueError
        Shapes that differ, or ``k`` below 1.
    RunError
        A candidate's score is not finite: the model has diverged.
    """
    if not scores.shape == relevant.shape == candidates.shape or scores.ndim != 2:
        raise ValueError(
            f"scores {scores.shape}, relevant {relevant.shape}, candidates {candidates.shape}; "
            "expected one shape (n, I)"
        )
    if k < 1:
        raise ValueError(f"k is {k}; expected at least 1")
    scores, relevant, candidates = _closed_up(scores, relevant, candidates)
    users, items = scores.shape
    hits = np.zeros((users, k), dtype=np.bool_)
    filled = np.zeros((users, k), dtype=np.bool_)
    total = np.zeros(users, dtype=np.int64)
    step = max(1, _ELEMENTS_AT_ONCE // max(items, 1))
    for first in range(0, users, step):
        rows = slice(first, first + step)
        wanted = relevant[rows] & candidates[rows]
        top = _first_keys(_sort_keys(scores[rows], wanted, candidates[rows], first), k)
        filled[rows, : top.shape[1]] = top != _NOT_A_CANDIDATE
        hits[rows, : top.shape[1]] = (top & 1).astype(np.bool_) & (top != _NOT_A_CANDIDATE)
        total[rows] = np.count_nonzero(wanted, axis=1)
    return _judge(hits, filled, total)


def pair_loss(
    scores: NDArray[np.floating], positive: NDArray[np.bool_], negative: NDArray[np.bool_]
) -> NDArray[np.float64]:
    r"""Return the mean of :math:`-\log \sigma(s_i - s_j)` over each user's pairs, i positive, j negative.

    The loss of DRIFT and SAROS (3.4) without the ridge term, over all pairs of the user instead of a block's.

    Parameters
    ----------
    scores : ndarray of float, shape (n, I)
    positive, negative : ndarray of bool, shape (n, I)

    Returns
    -------
    ndarray of float64, shape (n,)
        NaN for users without a pair.

    Raises
    ------
    ValueError
        Shapes that differ.
    """
    if not scores.shape == positive.shape == negative.shape or scores.ndim != 2:
        raise ValueError(
            f"scores {scores.shape}, positive {positive.shape}, negative {negative.shape}; "
            "expected one shape (n, I)"
        )
    loss = np.full(len(scores), np.nan)
    for user, row in enumerate(scores):
        above, below = row[positive[user]].astype(np.float64), row[negative[user]].astype(np.float64)
        if not len(above) or not len(below):
            continue
        step = max(1, _ELEMENTS_AT_ONCE // len(below))
        # log(1 + exp(s_j - s_i)) without overflow.
        parts = [
            np.logaddexp(0.0, below - above[first : first + step, None]).sum()
            for first in range(0, len(above), step)
        ]
        loss[user] = sum(parts) / (len(above) * len(below))
    return loss


def descending(scores: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return integers in the reverse order of scores, equal where scores are equal.

    The bits of a float32 order like an integer once those of negative numbers are flipped.

    Parameters
    ----------
    scores : ndarray of float
        Scores, of any shape; finite.  They are compared as float32.

    Returns
    -------
    ndarray of int64
        Integers of the same shape, each of 32 bits with its sign.
    """
    # Adding zero turns -0 into +0, which it equals.
    bits = (scores.astype(np.float32) + np.float32(0)).view(np.int32)
    ascending = np.where(bits < 0, bits ^ np.int32(0x7FFF_FFFF), bits)
    return (~ascending).astype(np.int64)


def _closed_up(
    scores: NDArray[np.floating], relevant: NDArray[np.bool_], candidates: NDArray[np.bool_]
) -> tuple[NDArray[np.floating], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the three with the columns of candidates alone, (n, most candidates of a row), where they are few.

    A row's candidates stay in their order, so the ranking is the same.
    """
    counts = np.count_nonzero(candidates, axis=1)
    width = int(counts.max(initial=0))
    if width * _FEW > candidates.shape[1]:
        return scores, relevant, candidates
    row, item = np.nonzero(candidates)
    found = scores[row, item]
    if not np.isfinite(found).all():
        # The ranking refuses them, and names the item by its column.
        return scores, relevant, candidates
    shape, place = (len(scores), width), np.arange(len(row)) - (counts.cumsum() - counts)[row]
    few = np.zeros(shape, scores.dtype), np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    for table, values in zip(few, (found, relevant[row, item], True), strict=True):
        table[row, place] = values
    return few


def _sort_keys(
    scores: NDArray[np.floating],
    relevant: NDArray[np.bool_],
    candidates: NDArray[np.bool_],
    first_user: int,
) -> NDArray[np.int64]:
    """Return integers whose ascending order is the ranking, the lowest bit telling the relevant items.

    One number per item carries score, tie rule and relevance, so a partition of plain integers replaces an
    indirect sort.
    """
    score = scores.astype(np.float32)
    if not (finite := np.isfinite(score) | ~candidates).all():
        user, item = (int(index) for index in np.argwhere(~finite)[0])
        raise RunError(
            f"the score of user {first_user + user} for item {item} is {score[user, item]}; "
            "expected a finite one",
            hint="the model has diverged: a lower learning rate or more regularisation",
        )
    keys = np.left_shift(descending(score), 1) | relevant
    return np.where(candidates, keys, _NOT_A_CANDIDATE)


def _first_keys(keys: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """Return the ``k`` smallest of each row, sorted; (n, min(k, I))."""
    if k < keys.shape[1]:
        keys = np.partition(keys, k - 1, axis=1)[:, :k]
    return np.sort(keys, axis=1)


def _judge(
    hits: NDArray[np.bool_], filled: NDArray[np.bool_], total: NDArray[np.int64]
) -> dict[str, NDArray[np.float64]]:
    """Compute the metrics from the relevance at each rank; hits and filled (n, k), total (n,)."""
    k = hits.shape[1]
    rank = np.arange(1, k + 1)
    discount = 1 / np.log2(rank + 1)
    found = hits.sum(axis=1)
    reachable = np.minimum(total, k)
    ideal = np.concatenate([[np.nan], np.cumsum(discount)])[reachable]
    precision_at_hits = np.where(hits, np.cumsum(hits, axis=1) / rank, 0.0).sum(axis=1)
    # Dividing by NaN instead of zero gives NaN to users without relevant candidates.
    relevant = np.where(total > 0, total, np.nan)
    counted = np.where(total > 0, 1.0, np.nan)
    gain = np.where(hits, 1.0, np.where(filled, 0.5, 0.0))
    return {
        f"map@{k}": precision_at_hits / np.where(total > 0, reachable, np.nan),
        f"ndcg@{k}": (hits @ discount) / ideal,
        f"precision@{k}": found / k * counted,
        f"recall@{k}": found / relevant,
        f"hit_ratio@{k}": (found > 0) * counted,
        f"ndcg_printed@{k}": (gain @ discount) / discount.sum() * counted,
    }
