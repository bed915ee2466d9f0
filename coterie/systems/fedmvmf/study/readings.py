r"""Precision, recall and NDCG of predicted ratings, under every reading that PrivMVMF's text leaves open.

PrivMVMF prints precision .2931 and recall .2208 beside an NDCG of .8313 (table 4).  Its appendix .2 sets a threshold of
4 and 10 recommended items, and leaves open *among which items* these are the best ones, whether 4 itself is above the
threshold, whether precision is of ten or of what was recommended, which users count, and which gain an item without a
rating has.  The first of these moves the figures by more than any two systems differ.  So one matrix of predicted
ratings is measured here under each, and a table shows which come near.

A reading of precision and recall is a set of `Candidates`, what is relevant among them, and what the mean is over; one
of NDCG is a set, a gain, and the rank at which the sums stop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.errors import RunError
from coterie.evaluation.holdout import TEST
from coterie.evaluation.leave_one_out import ScoreAll
from coterie.evaluation.metrics import descending
from coterie.evaluation.rated import Rated

__all__ = [
    "GAINS",
    "OVER",
    "RELEVANT",
    "SAMPLED",
    "Candidates",
    "GradedReading",
    "Reading",
    "candidates",
    "graded_readings",
    "measure_readings",
    "readings",
]

SAMPLED = (100, 400, 800, 900, 1000, 1600)
"""Numbers of unrated items that are sampled beside a user's test items."""

RELEVANT: Mapping[str, str] = {
    "liked": "rated 4 or more",
    "above": "rated above 4",
    "rated": "rated at all",
}
"""Definitions of a relevant candidate, by name; the 4 is `Rated.relevant_from`."""

OVER: Mapping[str, str] = {
    "having": "mean over users with a relevant item",
    "tested": "mean over all users with a test item, 0 where nothing is relevant",
    "pooled": "all hits over all recommendations, and over all relevant items",
}
"""Ways of averaging, by name."""

GAINS: Mapping[str, str] = {
    "printed": "gain 2^(x-1), 0 of an unrated item",
    "zeros": "gain 2^(x-1), an unrated item being a rating of 0 with gain 1/2",
    "usual": "gain 2^x-1",
}
"""Gain of an item in NDCG, by name."""

_PRINTED_RANKS = 5
"""Last rank of the sum in the paper's (54), though it is called DCG@10."""

_ELEMENTS_AT_ONCE = 1 << 20
"""Scores whose sort keys are in memory together: 8 MB."""
_NOT_A_CANDIDATE = np.iinfo(np.int64).max
_CODE_BITS = 24
"""Bits in a sort key for the code of an item's rating."""


@dataclass(frozen=True)
class Candidates:
    """A set of candidate items, of which the best ten are recommended.

    Parameters
    ----------
    name : str
    sentence : str
        Description of the set.
    base : str
        ``"unseen"``, ``"all"``, ``"rated"`` or ``"sampled"``.
    sampled : int
        Unrated items beside the test items, where ``base`` is ``"sampled"``; all of them where there are fewer.
    known : bool
        Whether ratings of training and validation count as well as those of the test part.
    predicted : bool
        Whether of the best ten only those are recommended whose predicted rating is one that would be liked.
    short : bool
        Whether precision is of what is recommended, which may be fewer than ten; otherwise of ten, always.
    """

    name: str
    sentence: str
    base: str
    sampled: int = 0
    known: bool = False
    predicted: bool = False
    short: bool = False


@dataclass(frozen=True)
class Reading:
    """A reading of precision and recall.

    Parameters
    ----------
    candidates : Candidates
    relevant : str
        Key of `RELEVANT`.
    over : str
        Key of `OVER`.
    """

    candidates: Candidates
    relevant: str
    over: str

    @property
    def name(self) -> str:
        """Short name, from the names of the candidates, of relevance and of the averaging."""
        return f"{self.candidates.name}/{self.relevant}/{self.over}"

    @property
    def sentence(self) -> str:
        """Description of the reading."""
        return (
            f"{self.candidates.sentence}; relevant is what is {RELEVANT[self.relevant]}; {OVER[self.over]}."
        )


@dataclass(frozen=True)
class GradedReading:
    """A reading of NDCG, as a mean over users with a test item.

    Parameters
    ----------
    candidates : Candidates
    gain : str
        Key of `GAINS`.
    ranks : int
        Last rank of the sums.
    """

    candidates: Candidates
    gain: str
    ranks: int

    @property
    def name(self) -> str:
        """Short name, from the names of the candidates, of the gain and the last rank."""
        return f"{self.candidates.name}/{self.gain}/{self.ranks}"

    @property
    def sentence(self) -> str:
        """Description of the reading."""
        return f"{self.candidates.sentence}; {GAINS[self.gain]}; sums to rank {self.ranks}."


def candidates(sampled: Sequence[int] = SAMPLED) -> tuple[Candidates, ...]:
    """Return every set of candidates.

    Parameters
    ----------
    sampled : sequence of int
        Numbers of unrated items beside the test items.

    Raises
    ------
    ValueError
        A number twice, or one below 1.
    """
    if any(number < 1 for number in sampled) or len(set(sampled)) < len(sampled):
        raise ValueError(f"sampled is {tuple(sampled)}; expected different numbers of at least 1")
    unseen = "all items not seen in training or validation"
    own = "the user's own test items"
    return (
        Candidates("unseen", unseen, "unseen"),
        Candidates(
            "unseen-predicted", f"{unseen}, of the best ten those predicted liked", "unseen",
            predicted=True, short=True,
        ),
        Candidates("all", "all items, trained ones too, of which only test items are relevant", "all"),
        Candidates("all-known", "all items, and ratings of any part are relevant", "all", known=True),
        Candidates("rated", own, "rated"),
        Candidates("rated-short", f"{own}, precision of fewer than ten where there are no more", "rated", short=True),
        Candidates(
            "rated-predicted", f"{own}, of the best ten those predicted liked", "rated",
            predicted=True, short=True,
        ),
        *(
            Candidates(f"sampled-{number}", f"test items and {number} sampled unrated ones", "sampled", number)
            for number in sampled
        ),
    )  # fmt: skip


def readings(sampled: Sequence[int] = SAMPLED) -> tuple[Reading, ...]:
    """Return every reading of precision and recall, in the order of `RELEVANT`.

    Parameters
    ----------
    sampled : sequence of int
        As in `candidates`.
    """
    return tuple(
        Reading(one, relevant, over) for relevant in RELEVANT for one in candidates(sampled) for over in OVER
    )


def graded_readings(sampled: Sequence[int] = SAMPLED, k: int = 10) -> tuple[GradedReading, ...]:
    """Return every reading of NDCG.

    Sets of candidates that differ only in the denominator of precision share one reading.

    Parameters
    ----------
    sampled : sequence of int
        As in `candidates`.
    k : int
        Ranks that count, beside the 5 of the paper's (54).
    """
    return tuple(
        GradedReading(one, gain, ranks)
        for one in candidates(sampled)
        for gain in GAINS
        for ranks in dict.fromkeys((k, min(k, _PRINTED_RANKS)))
        # Among rated items nothing is unrated.
        if not one.short and not (one.base == "rated" and gain == "zeros")
    )


def measure_readings(
    rated: Rated,
    score_all: ScoreAll,
    *,
    seed: int = 0,
    sampled: Sequence[int] = SAMPLED,
    predicts: bool = True,
) -> dict[str, float]:
    """Measure predicted ratings under every reading.

    Equal scores count against the model: among them unrated items come first, then the lowest rating.  Scores are
    compared as float32.  The sampled items are the first ones of an order of all unrated items that is drawn once for
    each user, from the seed and the user's position, so that every ranker meets the same, and fewer are among more.

    Parameters
    ----------
    rated : Rated
        Ratings, with ``among`` left out.  Its test part is measured, with its ``k`` and ``relevant_from``.
    score_all : callable
        Predicted ratings of all items for some users: positions (n,) to float (n, n_items), finite.
    seed : int
        Seed of the sampled items; not negative.
    sampled : sequence of int
        As in `candidates`.
    predicts : bool
        Whether the scores are ratings.  If not, readings that compare them with one have no figure.

    Returns
    -------
    dict of str to float
        ``precision@k/...``, ``recall@k/...`` and ``f1@k/...`` (of these two, (53)) with names of `Reading`, and
        ``ndcg/...`` with names of `GradedReading`.  Figures for which no user has a value are left out.

    Raises
    ------
    RunError
        A score that is not finite: the model has diverged.
    ValueError
        Scores of another shape, a number of sampled items below 1, a rating that is not above 0, or ``among``.
    """
    if rated.among is not None:
        raise ValueError("rated.among is given; expected none, as readings name their candidates themselves")
    if len(rated.rating) and not rated.rating.min() > 0:
        raise ValueError(f"a rating is {rated.rating.min():g}; expected ratings above 0, which is no rating")
    sets = [one for one in candidates(sampled) if predicts or not one.predicted]
    counter = _Counter(rated, sets, seed)
    parts = [counter.count(users, scores) for users, scores in _scored(rated, score_all)]
    if not parts:
        return {}
    counted = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    found: dict[str, float] = {}
    for reading in readings(sampled):
        one = reading.candidates
        if one not in sets:
            continue
        pair = _averaged(
            counted[_hits(one, reading.relevant)],
            counted[_recommended(one)],
            counted[_relevant(one.known, reading.relevant)],
            reading.over,
        )
        if pair is not None:
            precision, recall = pair
            both = precision + recall
            found[f"precision@{rated.k}/{reading.name}"] = precision
            found[f"recall@{rated.k}/{reading.name}"] = recall
            found[f"f1@{rated.k}/{reading.name}"] = 2 * precision * recall / both if both else 0.0
    for graded in graded_readings(sampled, rated.k):
        found[f"ndcg/{graded.name}"] = float(counted[f"ndcg/{graded.name}"].mean())
    return found


def _hits(one: Candidates, relevant: str) -> str:
    return f"hits/{one.name}/{relevant}"


def _recommended(one: Candidates) -> str:
    return f"recommended/{one.name}"


def _relevant(known: bool, relevant: str) -> str:
    return f"relevant/{'known' if known else 'test'}/{relevant}"


def _averaged(
    hits: NDArray[np.float64], recommended: NDArray[np.float64], relevant: NDArray[np.float64], over: str
) -> tuple[float, float] | None:
    """Return mean precision and recall from each user's counts; None when no user has a relevant item."""
    having = relevant > 0
    if not having.any():
        return None
    if over == "pooled":
        return float(hits.sum() / max(recommended.sum(), 1.0)), float(hits.sum() / relevant.sum())
    precision, recall = hits / np.maximum(recommended, 1), hits / np.maximum(relevant, 1)
    if over == "having":
        precision, recall = precision[having], recall[having]
    return float(precision.mean()), float(recall.mean())


def _scored(rated: Rated, score_all: ScoreAll) -> Iterator[tuple[NDArray[np.intp], NDArray[np.floating]]]:
    """Yield users with a test item and their scores, in blocks of bounded memory."""
    tested = np.unique(rated.user[rated.part == TEST]).astype(np.intp)
    step = max(1, _ELEMENTS_AT_ONCE // max(rated.n_items, 1))
    for first in range(0, len(tested), step):
        users = tested[first : first + step]
        scores = score_all(users)
        if scores.shape != (len(users), rated.n_items):
            raise ValueError(f"scores have shape {scores.shape}; expected ({len(users)}, {rated.n_items})")
        if not np.isfinite(scores).all():
            raise RunError(
                "a predicted rating is not a finite number",
                hint="the model has diverged: a lower learning rate or more regularisation",
            )
        yield users, scores


class _Counter:
    """Counts hits, recommended and relevant items of each user, from which all readings are computed."""

    def __init__(self, rated: Rated, sets: Sequence[Candidates], seed: int) -> None:
        self._rated = rated
        self._sets = sets
        self._seed = seed
        self._order = np.argsort(rated.user, kind="stable")
        self._bounds = np.searchsorted(rated.user[self._order], np.arange(rated.n_users + 1))
        values, code = np.unique(rated.rating.astype(np.float64), return_inverse=True)
        # Code 0 is no rating; a higher one is a higher rating.
        self._code = code.reshape(-1).astype(np.int64) + 1
        self._relevant = {
            "liked": np.append(False, values >= rated.relevant_from),
            "above": np.append(False, values > rated.relevant_from),
            "rated": np.append(False, np.ones(len(values), np.bool_)),
        }
        self._gain = {
            "printed": np.append(0.0, np.exp2(values - 1)),
            "zeros": np.append(0.5, np.exp2(values - 1)),
            "usual": np.append(0.0, np.exp2(values) - 1),
        }
        discount = 1 / np.log2(np.arange(rated.k) + 2.0)
        self._discounts = {
            ranks: np.where(np.arange(rated.k) < ranks, discount, 0.0)
            for ranks in dict.fromkeys((rated.k, min(rated.k, _PRINTED_RANKS)))
        }

    def count(self, users: NDArray[np.intp], scores: NDArray[np.floating]) -> dict[str, NDArray[np.float64]]:
        """Count for some users, (n,), with scores (n, I): hits, recommended and relevant items, and NDCG; (n,)."""
        rated = self._rated
        code, tested = self._ratings(users)
        own = np.where(tested, code, 0)
        keys = descending(scores) << _CODE_BITS
        liked = scores.astype(np.float32) >= np.float32(rated.relevant_from)
        bases = self._bases(users, code, tested)
        found: dict[str, NDArray[np.float64]] = {}
        for known, counted in ((False, own), (True, code)):
            for name, relevant in self._relevant.items():
                found[_relevant(known, name)] = relevant[counted].sum(axis=1).astype(np.float64)
        for one in self._sets:
            counted, base = code if one.known else own, bases[one.base, one.sampled]
            best, filled = _first(keys | counted, base & liked if one.predicted else base, rated.k)
            for name, relevant in self._relevant.items():
                found[_hits(one, name)] = (relevant[best] & filled).sum(axis=1).astype(np.float64)
            number = filled.sum(axis=1) if one.short else np.full(len(users), rated.k)
            found[_recommended(one)] = number.astype(np.float64)
            if not one.short:
                ideal, there = _first((-counted << _CODE_BITS) | counted, base, rated.k)
                for gain, table in self._gain.items():
                    for ranks, discount in self._discounts.items():
                        largest = (table[ideal] * there) @ discount
                        found[f"ndcg/{one.name}/{gain}/{ranks}"] = (table[best] * filled) @ discount / largest
        return found

    def _ratings(self, users: NDArray[np.intp]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return codes of ratings, (n, I), and whether each is of the test part."""
        rated = self._rated
        counts = self._bounds[users + 1] - self._bounds[users]
        starts = np.repeat(self._bounds[users] - (np.cumsum(counts) - counts), counts)
        rows = self._order[starts + np.arange(int(counts.sum()))]
        place, item = np.repeat(np.arange(len(users)), counts), rated.item[rows]
        code = np.zeros((len(users), rated.n_items), np.int64)
        code[place, item] = self._code[rows]
        tested = np.zeros(code.shape, np.bool_)
        tested[place, item] = rated.part[rows] == TEST
        return code, tested

    def _bases(
        self, users: NDArray[np.intp], code: NDArray[np.int64], tested: NDArray[np.bool_]
    ) -> dict[tuple[str, int], NDArray[np.bool_]]:
        """Return whether each item is a candidate, (n, I), by base and number of sampled items."""
        unrated = code == 0
        found = {
            ("unseen", 0): unrated | tested,
            ("all", 0): np.ones(code.shape, np.bool_),
            ("rated", 0): tested,
        }
        if any(one.sampled for one in self._sets):
            drawn = np.stack(
                [np.random.default_rng((self._seed, user)).random(code.shape[1]) for user in users.tolist()]
            )
            order = np.argsort(np.where(unrated, drawn, np.inf), axis=1, kind="stable")
            place = np.empty_like(order)
            np.put_along_axis(place, order, np.arange(code.shape[1])[None, :], axis=1)
            for number in {one.sampled for one in self._sets if one.sampled}:
                found["sampled", number] = tested | (unrated & (place < number))
        return found


def _first(
    keys: NDArray[np.int64], among: NDArray[np.bool_], k: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the codes of the ``k`` lowest keys of each row, and at which of these ranks there is one; (n, k)."""
    chosen = np.where(among, keys, _NOT_A_CANDIDATE)
    if k < chosen.shape[1]:
        chosen = np.partition(chosen, k - 1, axis=1)[:, :k]
    chosen = np.sort(chosen, axis=1)
    code = np.zeros((len(keys), k), np.int64)
    filled = np.zeros((len(keys), k), np.bool_)
    filled[:, : chosen.shape[1]] = chosen != _NOT_A_CANDIDATE
    code[:, : chosen.shape[1]] = np.where(chosen == _NOT_A_CANDIDATE, 0, chosen & ((1 << _CODE_BITS) - 1))
    return code, filled
