r"""Disaggregation attack: solves the sums over known, changing cohorts for each participant's contribution.

The rows of :math:`S` are the sums, and :math:`A_{ru} = 1` where round :math:`r` covers participant :math:`u`.  Then
:math:`S = A X + N`: the unknown :math:`X_{ui}` is what :math:`u` contributes to item :math:`i` in the mean over rounds,
and :math:`N` is how contributions vary about it.  Ridge regression about the mean participant is the best linear
guess; how strongly to shrink is chosen for each item by the marginal likelihood of its sums.  No mask helps: the
masked sum is what the attack starts from.

Touch counts give the guess at once.  Without them the changes of the rows remain.  In a product model those of one
participant lie along one line, forwards for items that it has and backwards for items that it was given as negatives.
The attack finds the line, and weighs the position on it against popularity in a mixture of two normal distributions,
fitted to all pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from coterie.privacy.attacks.rounds_view import RoundView, known_slots
from coterie.privacy.attacks.scoring import Truth, mean_auc

__all__ = ["DisaggregateReport", "Disaggregation", "disaggregate", "report"]

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

_SHRINKAGES = 10.0 ** np.arange(-6, 5, 0.5)
"""Candidate ratios of noise to signal, relative to the mean eigenvalue of the rounds."""

_LIKELIER = 1e-6
"""Gain in log-likelihood for which a larger ratio is taken; rounding errors are far below."""

_CHUNK_VALUES = 1 << 25
"""Most values of estimates in memory at once."""

_SAMPLED_PAIRS = 1 << 21
"""Most pairs to which the mixture is fitted; more would not change the fit."""

_STEPS = 30


@dataclass(frozen=True, eq=False)
class Disaggregation:
    """The result of the attack: estimates for every pair of user and item.

    Attributes
    ----------
    counts : ndarray of float32, shape (U, I), optional
        Expected touch count of each pair, from touch counts.
    odds : ndarray of float32, shape (U, I), optional
        Log-odds that the user has the item, from the rows, the touch counts if there are any, and popularity.
    """

    counts: Floats | None
    odds: Floats | None


class DisaggregateReport(TypedDict):
    """AUC of users' interactions over all their pairs, beside the AUC of popularity alone.

    ``counts_auc`` is by touch counts, ``rows_auc`` by the changes of the rows together with what counts there are;
    ``auc`` is the better of the two.  None where there was nothing to attack.
    """

    auc: float | None
    counts_auc: float | None
    rows_auc: float | None
    popularity_auc: float | None
    users: int
    pairs: int
    rounds: int
    smallest_cohort: int | None


def report(views: Iterable[RoundView], truth: Truth) -> DisaggregateReport:
    """Attack a run's sums and judge the result.

    Parameters
    ----------
    views : iterable of RoundView
        All sums of the run; they are held in memory unless their arrays are mapped from files.
    truth : Truth
        The users' true interactions; the attacker knows the popularity of items from it, and no more.
    """
    kept = known_slots(views, truth.n_users)
    consumed, popularity = truth.consumed(), truth.popularity()
    found = disaggregate(kept, popularity, truth.n_users)
    counts = None if found.counts is None else mean_auc(found.counts, consumed)[0]
    odds = None if found.odds is None else mean_auc(found.odds, consumed)[0]
    popularity_auc, users = mean_auc(popularity, consumed)
    return DisaggregateReport(
        auc=max((auc for auc in (counts, odds) if auc is not None), default=None),
        counts_auc=counts,
        rows_auc=odds,
        popularity_auc=popularity_auc,
        users=users,
        pairs=len(truth.users),
        rounds=len(kept),
        smallest_cohort=min((len(view.slots) for view in kept), default=None),
    )


def disaggregate(views: Sequence[RoundView], popularity: Doubles, n_users: int) -> Disaggregation:
    """Solve the sums of many rounds for the participants' contributions.

    Parameters
    ----------
    views : sequence of RoundView
        T sums; those with touch counts and those with rows may be different ones.
    popularity : ndarray of float64, shape (I,)
        Number of users who have each item, as publicly known.
    n_users : int
        U; slots are below.

    Returns
    -------
    Disaggregation
        Takes of the order of ``min(T, U)^2 max(T, U) + T U I d`` operations, and memory for ``(T + U) I`` values and
        ``T I d``.
    """
    with_counts = [(view, view.touched) for view in views if view.touched is not None]
    with_rows = [(view, view.rows) for view in views if view.rows is not None and view.rows.any()]
    counts = solved = None
    features = []
    if with_counts:
        members = _members([view for view, _ in with_counts], n_users)
        fitted = _fit(members, np.stack([touched for _, touched in with_counts]), 1)
        counts = np.concatenate([part[..., 0] for _, part in fitted.estimates()], axis=1)
        if with_rows:
            spread = np.sqrt(np.mean(counts**2, axis=0))
            features.append(np.divide(counts, spread, out=np.zeros_like(counts), where=spread > 0))
        counts = counts + fitted.mean.astype(np.float32)
    if with_rows:
        members = _members([view for view, _ in with_rows], n_users)
        # Contributions shrink as the model learns: each round counts relative to its own size.
        sums = np.stack([rows.ravel() / np.sqrt(np.mean(np.square(rows))) for _, rows in with_rows])
        solved = _along_own_line(_fit(members, sums, with_rows[0][1].shape[1]))
        features.append(solved)
    odds = None if solved is None else _weighed(features, popularity, n_users)
    return Disaggregation(counts, odds)


def _members(views: Sequence[RoundView], n_users: int) -> Doubles:
    members = np.zeros((len(views), n_users))
    for row, view in zip(members, views, strict=True):
        row[view.slots] = 1
    return members


@dataclass(frozen=True, eq=False)
class _Fitted:
    """Ridge regression in the eigenbasis of the rounds."""

    mean: Doubles
    """Mean contribution of a participant, (I * d,)."""
    basis: Doubles
    """Eigenbasis of the rounds, (U, k)."""
    gain: Doubles
    """Shrunken size of each component, (k, I)."""
    components: Doubles
    """Components of the sums in the eigenbasis, (k, I * d)."""
    width: int

    def estimates(self) -> Iterator[tuple[slice, Floats]]:
        """Yield each user's difference from the mean, float32 (U, items, d), for some items at a time."""
        users, d = len(self.basis), self.width
        n_items = self.gain.shape[1]
        step = max(1, _CHUNK_VALUES // (users * d))
        basis = self.basis.astype(np.float32)
        for first in range(0, n_items, step):
            part = slice(first, min(first + step, n_items))
            scaled = self.components[:, first * d : part.stop * d] * np.repeat(self.gain[:, part], d, axis=1)
            yield part, (basis @ scaled.astype(np.float32)).reshape(users, -1, d)


def _fit(members: Doubles, sums: npt.NDArray[np.floating], width: int) -> _Fitted:
    """Fit ``members @ X = sums``, with sums of shape (T, I * width)."""
    rounds, users = members.shape
    sizes = members.sum(axis=1)
    mean = sums.sum(axis=0, dtype=np.float64) / sizes.sum()
    rest = sums - sizes[:, None] * mean
    # The smaller of the two Gram matrices has the same eigenvalues.
    if rounds >= users:
        size, basis = np.linalg.eigh(members.T @ members)
        kept = size > size[-1] * 1e-9
        size, basis = size[kept], basis[:, kept]
        components = (basis.T @ (members.T @ rest)) / np.sqrt(size)[:, None]
    else:
        size, left = np.linalg.eigh(members @ members.T)
        kept = size > size[-1] * 1e-9
        size, left = size[kept], left[:, kept]
        components = left.T @ rest
        basis = members.T @ left / np.sqrt(size)
    shrinkage = _shrinkage(size, components, np.square(rest).sum(axis=0), rounds, width)
    gain = np.sqrt(size)[:, None] / (size[:, None] + shrinkage)
    return _Fitted(mean, basis, gain, components, width)


def _shrinkage(size: Doubles, components: Doubles, total: Doubles, rounds: int, width: int) -> Doubles:
    """Return the likeliest ratio of noise to signal of each item, (I,), for normal contributions and noise."""
    power = np.square(components).reshape(len(size), -1, width).sum(axis=2)
    outside = np.maximum(total.reshape(-1, width).sum(axis=1) - power.sum(axis=0), 0)
    best = np.full(len(outside), -np.inf)
    chosen = np.zeros(len(outside))
    for ratio in float(size.mean()) * _SHRINKAGES:
        variance = 1 + size / ratio
        noise = ((1 / variance) @ power + outside) / (rounds * width)
        likelihood = -rounds * np.log(np.maximum(noise, 1e-30)) - np.log(variance).sum()
        # Sums over one participant each say nothing about noise: all ratios are as likely, but for the last bits, and
        # the first, the least, stays.
        better = likelihood > best + _LIKELIER
        best[better] = likelihood[better]
        chosen[better] = ratio
    return chosen


def _along_own_line(fitted: _Fitted) -> Floats:
    """Return each pair's position on the line of its user, float32 (U, I), in units of the item's spread."""
    users = len(fitted.basis)
    gram = np.zeros((users, fitted.width, fitted.width), np.float32)
    for _, part in fitted.estimates():
        scaled = _scaled(part)
        gram += scaled.transpose(0, 2, 1) @ scaled
    line = np.linalg.eigh(gram)[1][:, :, -1:]
    found = np.concatenate([(_scaled(part) @ line)[..., 0] for _, part in fitted.estimates()], axis=1)
    # Few items are a user's own, and their rows move in every round: the long tail points forwards.
    forwards = np.where(np.sum(found**3, axis=1) < 0, -1, 1)
    return np.asarray(found * forwards[:, None]).astype(np.float32)


def _scaled(part: Floats) -> Floats:
    spread = np.sqrt(np.mean(np.sum(np.square(part), axis=2), axis=0))
    scaled: Floats = np.divide(part, spread[:, None], out=np.zeros_like(part), where=spread[:, None] > 0)
    return scaled


def _weighed(features: Sequence[Floats], popularity: Doubles, n_users: int) -> Floats:
    """Return log-odds by a mixture of two normal distributions whose prior is popularity; float32 (U, I)."""
    prior = (popularity + 0.5) / (max(n_users, float(popularity.max(initial=0))) + 1)
    prior_odds = np.log(prior / (1 - prior))
    n_items = len(popularity)
    pairs = n_users * n_items
    rng = np.random.default_rng(0)
    some = rng.integers(0, pairs, _SAMPLED_PAIRS) if pairs > _SAMPLED_PAIRS else np.arange(pairs)
    X = np.stack([feature.ravel()[some] for feature in features], axis=1).astype(np.float64)
    base = prior_odds[some % n_items]
    if not X.std(axis=0).all():
        return np.repeat(prior_odds.astype(np.float32)[None], n_users, axis=0)
    share = 1 / (1 + np.exp(-base))
    for _ in range(_STEPS):
        own, others = _normal(X, share), _normal(X, 1 - share)
        odds = base + _log_density(X, *own) - _log_density(X, *others)
        share = 1 / (1 + np.exp(-np.clip(odds, -500, 500)))
    found = np.empty((n_users, n_items), np.float32)
    for user in range(n_users):
        x = np.stack([feature[user] for feature in features], axis=1).astype(np.float64)
        found[user] = prior_odds + _log_density(x, *own) - _log_density(x, *others)
    return found


def _normal(X: Doubles, weight: Doubles) -> tuple[Doubles, Doubles]:
    total = max(float(weight.sum()), 1e-12)
    mean = weight @ X / total
    apart = X - mean
    return mean, (apart * weight[:, None]).T @ apart / total + 1e-9 * np.eye(X.shape[1])


def _log_density(X: Doubles, mean: Doubles, covariance: Doubles) -> Doubles:
    apart = X - mean
    distance = np.sum(apart @ np.linalg.inv(covariance) * apart, axis=1)
    return np.asarray(-0.5 * (distance + np.linalg.slogdet(covariance)[1]))
