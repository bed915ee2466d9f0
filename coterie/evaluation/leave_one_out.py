"""Leave-one-out evaluation: one held-out item of each user, ranked among sampled items and among all unseen ones.

The protocol of FedNCF (6.1) and of NCF before it.  Sampled metrics mislead: among 100 items a weak model finds the
held-out one easily, and two models can change places when all items are ranked (Krichene and Rendle, 2020).  So both
rankings are measured, always.  As in `Holdout`, the same code measures at a client host, for centralised references and
for trivial rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from coterie.errors import RunError
from coterie.evaluation.holdout import TEST, TRAIN, VALIDATION

__all__ = [
    "CHOOSE_BY",
    "HEADLINE",
    "NEGATIVES",
    "NO_ITEM",
    "RANKED",
    "LeaveOneOut",
    "ScoreAll",
    "ScoreCandidates",
    "UserItems",
    "as_if_own_kept",
    "metric_names",
    "sample_negatives",
]

NEGATIVES = 100
"""Number of sampled items among which a held-out item is ranked, as in FedNCF's experiments."""

NO_ITEM = -1
"""Fills rows of negatives that are shorter than the longest."""

HEADLINE = "hit_ratio@10"
"""The metric of the paper's tables."""

CHOOSE_BY = "validation_hit_ratio@10"
"""Metric by which versions and settings are chosen."""

RANKED = 3
"""Number of a further part: rows that are no interactions, but items among which held-out ones are ranked."""

_DOMAIN = b"coterie.negs.v1"
_USERS_AT_ONCE = 256

ScoreCandidates = Callable[[NDArray[np.intp], NDArray[np.int32]], NDArray[np.floating]]
"""Returns scores of some items for some users: positions (n,) and items (n, c) to float (n, c)."""

ScoreAll = Callable[[NDArray[np.intp]], NDArray[np.floating]]
"""Returns scores of all items for some users: positions (n,) to float (n, I)."""


def metric_names(k: int = 10, *, everything: bool = True) -> tuple[str, ...]:
    """Return the keys of `LeaveOneOut.measure`, in its order."""
    rankings = ("", "_all") if everything else ("",)
    return tuple(
        f"{prefix}{metric}{ranking}@{k}"
        for prefix in ("", "validation_")
        for ranking in rankings
        for metric in ("hit_ratio", "ndcg")
    )


def as_if_own_kept(
    values: Mapping[str, NDArray[np.float64]], own: NDArray[np.bool_], k: int = 10
) -> dict[str, NDArray[np.float64]]:
    """Return the metrics as if test items listed among their own negatives had been left there.

    Such an item is ranked against itself and, as equal scores count against the model, loses one rank: the other
    reading of the published negatives of NCF.

    Parameters
    ----------
    values : mapping of str to ndarray of float64, shape (U,)
        As `LeaveOneOut.measure` returns them, the duplicates having been removed.
    own : ndarray of bool, shape (U,)
        Users whose test item was among its own negatives.
    k : int

    Returns
    -------
    dict of str to ndarray of float64, shape (U,)
        ``hit_ratio_own_kept@k``, ``ndcg_own_kept@k``.
    """
    hit, gain = values[f"hit_ratio@{k}"].copy(), values[f"ndcg@{k}"].copy()
    # The gain 1 / log2(r + 2) of a hit tells the number r of candidates ahead of it.
    lower = own & (hit > 0)
    ahead = np.rint(2 ** (1 / gain[lower])) - 2 + 1
    hit[lower] = ahead < k
    gain[lower] = np.where(ahead < k, 1 / np.log2(ahead + 2), 0.0)
    return {f"hit_ratio_own_kept@{k}": hit, f"ndcg_own_kept@{k}": gain}


def sample_negatives(
    users: Sequence[str],
    items: Sequence[str],
    user: NDArray[np.integer],
    item: NDArray[np.integer],
    *,
    seed: int,
    count: int = NEGATIVES,
) -> NDArray[np.signedinteger]:
    """Draw for each user items with which it never interacted, in any part.

    Each user has a generator of its own, seeded by ``seed`` and the user's key, that draws from the items in the order
    of their keys: the same sample wherever the user is hosted, whoever sits beside it, in whichever order users and
    items are numbered, and for every version of the model.

    Parameters
    ----------
    users, items : sequence of str
        External keys; position is the number used below.
    user, item : ndarray of int, shape (N,)
        All interactions, of all parts.
    seed : int
        Fits 64 bits, signed.
    count : int
        Number of items for each user, at least 1.

    Returns
    -------
    ndarray of int, shape (U, count)
        Distinct items, of 16 or 32 bits; ``NO_ITEM`` at the end of rows of users with fewer unseen items than
        ``count``, who get all.

    Raises
    ------
    ValueError
        ``count`` is below 1.
    """
    if count < 1:
        raise ValueError(f"count is {count}; expected at least 1")
    by_key = np.array(sorted(range(len(items)), key=items.__getitem__), np.int32)
    rank = np.empty(len(items), np.int64)
    rank[by_key] = np.arange(len(items))
    order = np.argsort(user, kind="stable")
    bounds = np.searchsorted(user[order], np.arange(len(users) + 1))
    seeded = hashlib.blake2b(digest_size=16, key=seed.to_bytes(8, "little", signed=True), person=_DOMAIN)
    negatives = np.full((len(users), count), NO_ITEM, _narrowest(len(items)))
    for position, key in enumerate(users):
        unseen = np.ones(len(items), np.bool_)
        unseen[rank[item[order[bounds[position] : bounds[position + 1]]]]] = False
        pool = by_key[unseen]
        if len(pool) > count:
            digest = seeded.copy()
            digest.update(key.encode())
            generator = np.random.default_rng(int.from_bytes(digest.digest(), "little"))
            pool = generator.choice(pool, count, replace=False)
        negatives[position, : len(pool)] = pool
    return negatives


def _narrowest(n_items: int) -> type[np.signedinteger]:
    """Return the type that takes the least memory for items and ``NO_ITEM``: a host may have very many users."""
    return np.int16 if n_items <= np.iinfo(np.int16).max else np.int32


class UserItems(Sequence[NDArray[np.int32]]):
    """Items of users, one array for all of them: that of one user is cut out when it is asked for.

    Parameters
    ----------
    items : ndarray of int32, shape (n,)
    first, last : ndarray of int, shape (U,)
        Where the items of each user begin and end.
    """

    def __init__(
        self, items: NDArray[np.int32], first: NDArray[np.integer], last: NDArray[np.integer]
    ) -> None:
        self._items, self._first, self._last = items, first, last

    def take(self, users: NDArray[np.intp]) -> UserItems:
        """Return the items of some users, by position."""
        return UserItems(self._items, self._first[users], self._last[users])

    def whole(self) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
        """Return all items one after the other, and the position of the user of each."""
        counts = self._last - self._first
        users = np.repeat(np.arange(len(self)), counts)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return users, self._items[np.repeat(self._first, counts) + within]

    def __len__(self) -> int:
        return len(self._first)

    @overload
    def __getitem__(self, at: SupportsIndex) -> NDArray[np.int32]: ...
    @overload
    def __getitem__(self, at: slice) -> list[NDArray[np.int32]]: ...
    def __getitem__(self, at: SupportsIndex | slice) -> NDArray[np.int32] | list[NDArray[np.int32]]:
        if isinstance(at, slice):
            return [self[user] for user in range(*at.indices(len(self)))]
        return self._items[self._first[at] : self._last[at]]

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        for first, last in zip(self._first, self._last, strict=True):
            yield self._items[first:last]


@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """The leave-one-out hold-out of ``U`` users: at most one item of each for testing and one for validating.

    Arrays are kept in the narrowest type that holds them.

    Parameters
    ----------
    n_items : int
        Number of items, ``I``.
    user, item : ndarray of int, shape (N,)
        Positions of user and item; no pair twice.
    part : ndarray of int, shape (N,)
        ``TRAIN``, ``VALIDATION`` or ``TEST``.
    negatives : ndarray of int, shape (U, m)
        Items to rank the held-out ones among, as `sample_negatives` draws them or as they were published; ``NO_ITEM``
        where there are fewer.
    k : int
        Number of ranks that count.

    Raises
    ------
    ValueError
        Arrays that do not fit each other, two held-out items of one user in the same part, ``k`` below 1.
    """

    n_items: int
    user: NDArray[np.integer]
    item: NDArray[np.integer]
    part: NDArray[np.integer]
    negatives: NDArray[np.signedinteger]
    k: int = 10

    def __post_init__(self) -> None:
        if not self.user.shape == self.item.shape == self.part.shape or self.user.ndim != 1:
            raise ValueError(
                f"user {self.user.shape}, item {self.item.shape}, part {self.part.shape}; expected one shape (N,)"
            )
        if self.negatives.ndim != 2 or (len(self.user) and self.user.max() >= len(self.negatives)):
            raise ValueError(f"negatives is of shape {self.negatives.shape}; expected a row for each user")
        for name, index in (("item", self.item), ("negatives", self.negatives)):
            if index.size and index.max() >= self.n_items:
                raise ValueError(f"{name} holds {index.max()}; expected less than {self.n_items}")
        if self.k < 1:
            raise ValueError(f"k is {self.k}; expected at least 1")
        for part in (TEST, VALIDATION):
            held = self.user[self.part == part]
            if len(np.unique(held)) < len(held):
                raise ValueError("a user has two held-out items in one part; expected at most one")
        narrow = _narrowest(self.n_items)
        for name, kind in (("user", np.int32), ("item", narrow), ("part", np.int8), ("negatives", narrow)):
            object.__setattr__(self, name, getattr(self, name).astype(kind, copy=False))

    @classmethod
    def sampled(
        cls,
        users: Sequence[str],
        items: Sequence[str],
        user: NDArray[np.integer],
        item: NDArray[np.integer],
        part: NDArray[np.integer],
        *,
        seed: int,
        count: int = NEGATIVES,
        k: int = 10,
    ) -> LeaveOneOut:
        """Return a hold-out with negatives drawn by `sample_negatives`; the arguments are those of both."""
        negatives = sample_negatives(users, items, user, item, seed=seed, count=count)
        return cls(len(items), user, item, part, negatives, k)

    @classmethod
    def ranked(
        cls,
        n_users: int,
        n_items: int,
        user: NDArray[np.integer],
        item: NDArray[np.integer],
        part: NDArray[np.integer],
        k: int = 10,
    ) -> LeaveOneOut:
        """Return a hold-out whose negatives are listed with the interactions, as rows of part ``RANKED``.

        Parameters
        ----------
        n_users, n_items : int
        user, item, part : ndarray of int, shape (N,)
            Interactions and, as ``RANKED``, the items that held-out ones are ranked among.
        k : int
        """
        given = part == RANKED
        order = np.argsort(user[given], kind="stable")
        owner, listed = user[given][order], item[given][order]
        counts = np.bincount(owner, minlength=n_users)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        negatives = np.full((n_users, int(counts.max(initial=0))), NO_ITEM, np.int32)
        negatives[owner, place] = listed
        return cls(n_items, user[~given], item[~given], part[~given], negatives, k)

    @property
    def n_users(self) -> int:
        """Number of users, ``U``."""
        return len(self.negatives)

    @cached_property
    def test(self) -> NDArray[np.int32]:
        """Test item of each user, int32 (U,); ``NO_ITEM`` for users without one."""
        return self._held(TEST)

    @cached_property
    def validation(self) -> NDArray[np.int32]:
        """Validation item of each user, int32 (U,); ``NO_ITEM`` for users without one."""
        return self._held(VALIDATION)

    def measure(
        self,
        score_candidates: ScoreCandidates,
        score_all: ScoreAll | None = None,
        users: NDArray[np.intp] | None = None,
    ) -> dict[str, NDArray[np.float64]]:
        r"""Compute hit ratio and NDCG of each user from scores.

        Let ``r`` be the number of candidates that score at least as high as the held-out item (so equal scores count
        against the model; scores are compared as float32).  Then ``hit_ratio@k`` is 1 if ``r < k``, else 0, and
        ``ndcg@k`` is :math:`1 / \log_2(r + 2)` if ``r < k``, else 0.

        Parameters
        ----------
        score_candidates : callable
            Scores some items for some users. Each user that has something to measure is asked for once, for its test
            item, its validation item and its negatives.
        score_all : callable, optional
            Scores all items for some users; without it the keys with ``_all`` are absent.
        users : ndarray of int, shape (n,), optional
            Measure these only; all if left out.

        Returns
        -------
        dict of str to ndarray of float64, shape (U,)
            NaN where a user has nothing to measure.

            ``hit_ratio@k``, ``ndcg@k``
                The test item among the negatives.
            ``hit_ratio_all@k``, ``ndcg_all@k``
                The test item among all items that the user has not interacted with in training or validation.
            ``validation_...``
                The same for the validation item; the test item is no candidate there.

        Raises
        ------
        RunError
            A score that is not finite: the model has diverged.
        ValueError
            Scores of another shape.
        """
        found = {
            name: np.full(self.n_users, np.nan)
            for name in metric_names(self.k, everything=score_all is not None)
        }
        for chosen in self._batches(users):
            self._among_negatives(chosen, score_candidates, found)
            if score_all is not None:
                self._among_all(chosen, score_all, found)
        return found

    def _among_negatives(
        self,
        chosen: NDArray[np.intp],
        score_candidates: ScoreCandidates,
        found: dict[str, NDArray[np.float64]],
    ) -> None:
        test, validation, negatives = self.test[chosen], self.validation[chosen], self.negatives[chosen]
        candidates = np.column_stack([test, validation, negatives])
        present = candidates != NO_ITEM
        # Placeholders (``NO_ITEM``) are scored as item 0 and then left out.
        scores = _as_float32(
            score_candidates(chosen, np.where(present, candidates, 0)), candidates.shape, present
        )
        others, real = scores[:, 2:], present[:, 2:]
        self._judge("", "", chosen, test, _ahead(others, scores[:, 0], real), found)
        # Published negatives may hold the test item itself: for the validation item it is no candidate.
        real = real & (negatives != test[:, None]) & (negatives != validation[:, None])
        self._judge("validation_", "", chosen, validation, _ahead(others, scores[:, 1], real), found)

    def _among_all(
        self, chosen: NDArray[np.intp], score_all: ScoreAll, found: dict[str, NDArray[np.float64]]
    ) -> None:
        rows, items = self._interactions(chosen)
        unseen = np.ones((len(chosen), self.n_items), np.bool_)
        unseen[rows, items] = False
        needed = unseen.copy()
        each = np.arange(len(chosen))
        held = (self.test[chosen], self.validation[chosen])
        for one in held:
            needed[each[one != NO_ITEM], one[one != NO_ITEM]] = True
        scores = _as_float32(score_all(chosen), unseen.shape, needed)
        for prefix, one in zip(("", "validation_"), held, strict=True):
            # The other held-out item is seen, hence no candidate; nor is the item itself, which is not ahead of itself.
            ahead = _ahead(scores, scores[each, np.maximum(one, 0)], unseen)
            self._judge(prefix, "_all", chosen, one, ahead, found)

    def _judge(
        self,
        prefix: str,
        ranking: str,
        chosen: NDArray[np.intp],
        held: NDArray[np.int32],
        ahead: NDArray[np.intp],
        found: dict[str, NDArray[np.float64]],
    ) -> None:
        has = held != NO_ITEM
        hit = ahead[has] < self.k
        found[f"{prefix}hit_ratio{ranking}@{self.k}"][chosen[has]] = hit
        found[f"{prefix}ndcg{ranking}@{self.k}"][chosen[has]] = np.where(
            hit, 1 / np.log2(ahead[has] + 2.0), 0.0
        )

    def training(self) -> UserItems:
        """Return the training items of each user, ascending: int32 (n_u,)."""
        mine = self.part == TRAIN
        user, item = self.user[mine], self.item[mine].astype(np.int32)
        order = np.lexsort((item, user))
        bounds = np.searchsorted(user[order], np.arange(self.n_users + 1))
        return UserItems(item[order], bounds[:-1], bounds[1:])

    def _held(self, part: int) -> NDArray[np.int32]:
        held = np.full(self.n_users, NO_ITEM, np.int32)
        mine = self.part == part
        held[self.user[mine]] = self.item[mine]
        return held

    def _batches(self, users: NDArray[np.intp] | None) -> Iterator[NDArray[np.intp]]:
        among = np.arange(self.n_users) if users is None else users
        measured = among[(self.test[among] != NO_ITEM) | (self.validation[among] != NO_ITEM)]
        for first in range(0, len(measured), _USERS_AT_ONCE):
            yield measured[first : first + _USERS_AT_ONCE]

    @cached_property
    def _by_user(self) -> UserItems:
        """Return all items of each user, of every part."""
        order = np.argsort(self.user, kind="stable")
        bounds = np.searchsorted(self.user[order], np.arange(self.n_users + 1))
        return UserItems(self.item[order].astype(np.int32), bounds[:-1], bounds[1:])

    def _interactions(self, chosen: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.integer]]:
        """Return all interactions of some users, of every part: position in ``chosen`` and item."""
        return self._by_user.take(chosen).whole()


def _ahead(
    scores: NDArray[np.float32], held: NDArray[np.float32], candidates: NDArray[np.bool_]
) -> NDArray[np.intp]:
    """Count the candidates that the held-out item does not beat; scores and candidates (n, c), held (n,)."""
    return np.asarray(np.count_nonzero((scores >= held[:, None]) & candidates, axis=1))


def _as_float32(
    scores: NDArray[np.floating], shape: tuple[int, ...], needed: NDArray[np.bool_]
) -> NDArray[np.float32]:
    if scores.shape != shape:
        raise ValueError(f"scores are of shape {scores.shape}; expected {shape}")
    single = np.asarray(scores, np.float32)
    if not (np.isfinite(single) | ~needed).all():
        raise RunError(
            f"a score is {single[needed & ~np.isfinite(single)][0]}; expected a finite one",
            hint="the model has diverged: a lower learning rate or more regularisation",
        )
    return single
