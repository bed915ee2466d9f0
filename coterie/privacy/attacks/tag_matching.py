r"""Tag matching: a third party with public ratings guesses which item a tag of graph expansion stands for.

The attacker sees which uploads have which tags, without names, and knows who rated what from elsewhere.  Two attacks:

- *Signatures*: the number of tags of an upload is its *degree*.  A tag whose uploads have the same degrees as the
  raters of exactly one item is that item.
- *Likelihood*: each upload may be any public user of the same degree.  With :math:`q_{uv}` for the probability that
  upload u is user v, and R for the public ratings, the score of item i for tag t is

  .. math:: \sum_{u \in t} \log \sum_v q_{uv} R_{vi} + \log P(|t| \mid i)

  with the number of uploads of a tag binomial over the item's buckets.  From the guesses q is estimated again, some
  rounds over.  An attacker who knows whose uploads are whose, in collusion with the COS, begins and ends with that q.

Splitting the tags of popular items into buckets stops the first attack, and a cap on the number of tags, which gives
most users the same degree, the second; `coterie.studies.tag_matching` measures both on real data.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coterie.errors import DataError

__all__ = ["MatchedTags", "TagView", "match_by_likelihood", "match_by_signature", "scored_matches"]

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Doubles = npt.NDArray[np.float64]

_LEAST = 1e-3
"""Floor of a probability: the attacker's model is never certain."""
_SINGLE_BUCKET_VARIANCE = 0.01


@dataclass(frozen=True)
class TagView:
    """The third party's view of a graph: pairs of tag and upload, each numbered from 0 in an order that says nothing.

    Attributes
    ----------
    tags, uploads : ndarray of int, shape (p,)
        Tag and upload of each pair.
    n_tags, n_uploads : int

    Raises
    ------
    DataError
        When the arrays do not fit each other or the numbers.
    """

    tags: Ids
    uploads: Ids
    n_tags: int
    n_uploads: int

    def __post_init__(self) -> None:
        if len(self.tags) != len(self.uploads):
            raise DataError(f"{len(self.tags)} tags and {len(self.uploads)} uploads: not pairs")
        for name, ids, limit in (("tag", self.tags, self.n_tags), ("upload", self.uploads, self.n_uploads)):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
                raise DataError(f"a {name} of the view is outside 0 to {limit - 1}")

    @property
    def users(self) -> Ids:
        """Number of uploads of each tag, shape (n_tags,)."""
        return np.bincount(self.tags, minlength=self.n_tags)

    @property
    def degrees(self) -> Ids:
        """Number of tags of each upload, shape (n_uploads,)."""
        return np.bincount(self.uploads, minlength=self.n_uploads)


@dataclass(frozen=True)
class MatchedTags:
    """The guesses of an attack.

    Attributes
    ----------
    items : ndarray of int, shape (n_tags,)
        Item guessed for each tag; -1 for none.
    users : ndarray of int, shape (n_uploads,)
        Public user guessed for each upload; -1 for none.
    """

    items: Ids
    users: Ids


def match_by_signature(view: TagView, ratings: Flags) -> MatchedTags:
    """Match tags and items by the degrees of their users.

    Parameters
    ----------
    view : TagView
    ratings : ndarray of bool, shape (U, I)
        Public ratings: who rated what.
    """
    of_tags, of_items = view.degrees, ratings.sum(axis=1)
    by_degrees: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for item in np.flatnonzero(ratings.any(axis=0)):
        by_degrees[tuple(sorted(of_items[ratings[:, item]].tolist()))].append(int(item))
    members = np.split(view.uploads[np.argsort(view.tags, kind="stable")], np.cumsum(view.users)[:-1])
    signatures = [tuple(sorted(of_tags[uploads].tolist())) for uploads in members]
    repeated: dict[tuple[int, ...], int] = defaultdict(int)
    for one in signatures:
        repeated[one] += 1
    guesses = np.full(view.n_tags, -1, np.int64)
    for tag, one in enumerate(signatures):
        if repeated[one] == 1 and len(by_degrees.get(one, ())) == 1:
            guesses[tag] = by_degrees[one][0]
    return MatchedTags(guesses, np.full(view.n_uploads, -1, np.int64))


def match_by_likelihood(
    view: TagView,
    ratings: Flags,
    published: Ids,
    buckets: Ids,
    most_tags: int,
    *,
    rounds: int = 1,
    owners: Ids | None = None,
) -> MatchedTags:
    """Match tags and items by the probability of their users.

    Parameters
    ----------
    view : TagView
    ratings : ndarray of bool, shape (U, I)
        Public ratings: who rated what.
    published : ndarray of int, shape (I,)
        Number of users who publish each item, which is public.
    buckets : ndarray of int, shape (I,)
        Number of buckets of each item.
    most_tags : int
        Most tags of an upload.
    rounds : int, optional
        How often users are guessed from tags, and tags from users.
    owners : ndarray of int, shape (n_uploads,), optional
        Public user of each upload, for an attacker who knows.
    """
    from scipy.sparse import csr_matrix

    degrees = np.minimum(ratings.sum(axis=1), most_tags)
    same = view.degrees[:, None] == degrees[None, :]
    if owners is not None:
        same = np.arange(len(ratings))[None, :] == owners[:, None]
    likely: Doubles = same / np.maximum(same.sum(axis=1, keepdims=True), 1)
    pairs = csr_matrix(
        (np.ones(len(view.tags)), (view.tags, view.uploads)), shape=(view.n_tags, view.n_uploads)
    )
    rated = ratings.astype(np.float64)
    mean = published / buckets
    variance = np.where(buckets > 1, mean * (1 - 1 / buckets) + 0.25, _SINGLE_BUCKET_VARIANCE)
    prior = -((view.users[:, None] - mean) ** 2) / (2 * variance) - np.log(variance) / 2 + np.log(buckets)
    for _ in range(max(1, rounds)):
        scores: Doubles = pairs @ np.log(likely @ rated + _LEAST) + prior
        if owners is None:
            users = pairs.T @ np.log(_softmax(scores) @ rated.T + _LEAST)
            likely = _softmax(np.where(same, users, -np.inf))
    guessed = np.where(same.any(axis=1), likely.argmax(axis=1), -1)
    return MatchedTags(scores.argmax(axis=1), guessed)


def scored_matches(matched: MatchedTags, items: Ids, users: Ids) -> dict[str, float]:
    """Return the shares of tags, items and uploads that were identified.

    Parameters
    ----------
    matched : MatchedTags
    items : ndarray of int, shape (n_tags,)
        True item of each tag.
    users : ndarray of int, shape (n_uploads,)
        True user of each upload.

    Returns
    -------
    dict of str to float
        ``tags``; ``items``, the mean over items of the share of each item's tags; ``uploads``.
    """
    right = matched.items == items
    several = np.bincount(items)
    of_items = np.bincount(items, weights=right)[several > 0] / several[several > 0]
    return {
        "tags": float(right.mean()),
        "items": float(of_items.mean()),
        "uploads": float((matched.users == users).mean()),
    }


def _softmax(scores: Doubles) -> Doubles:
    most = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(most), most, 0.0))
    total: Doubles = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
    return total
