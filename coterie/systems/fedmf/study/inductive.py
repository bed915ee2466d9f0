r"""Users who never trained, from pseudo meta-latents: a study after FedIDCF, in one process, on a published split.

Run as ``python -m coterie.systems.fedmf.study.inductive FILE [--query 0.2] [--seed 0]`` with a MATLAB file of ratings.

1. A share of the users, *query users*, is left out.  FedMF with biases learns items and the others, *key users*.
2. Key users' latent vectors are combined as the third party combines them (`coterie.crypto.latent_weights`), on the
   integers that it would combine under encryption, and rescaled by key users' mean and variance.
3. *Attention* is trained on key users: each one's ratings are divided anew in each step, one half says what the user
   likes, :math:`d = \sum_i e_{ui} q_i / (n_u + s)` with errors e of the biases, the other half is predicted by
   :math:`p = \sum_k c_k p_k`, :math:`c = \mathrm{softmax}_k((d W_q)(p_k W_k) / \sqrt h)`.  A step is
   a sum of users' gradients, which a secure sum could form; here it is formed in clear.
4. A query user has a bias of its own and the vector that attention gives for its training ratings.

A tenth of the training ratings of key users chooses versions; test ratings are used for the printed figures only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.crypto.latent_codes import Moments, condition_number, encode_latent, latents_of_sums, rescaled
from coterie.crypto.latent_terms import LatentTerms
from coterie.crypto.latent_weights import draw_combinations
from coterie.data.matlab import published_parts, read_mat
from coterie.studies.latent_members import named
from coterie.systems.fedmf.central import train
from coterie.systems.fedmf.settings import FedMfSettings

__all__ = ["Attention", "main", "study"]

_Floats = NDArray[np.float64]

_ROUNDS, _EVERY = 60, 5
_STEPS, _RATE, _HIDDEN = 100, 0.02, 16
_USER_RIDGE, _SHRINK = 3.0, 10.0
_COMBINATIONS, _MEMBERS = 256, 5
_FOLD_IN_RIDGE = 10.0
_SHARES = (1, 3, 5, 10)


@dataclass
class Attention:
    """Weights of pseudo meta-latents for a user, from what the user likes.

    Parameters
    ----------
    query, key : ndarray of float64, shape (K, h)
        :math:`W_q` and :math:`W_k`.
    """

    query: _Floats
    key: _Floats

    @classmethod
    def drawn(cls, factors: int, hidden: int, rng: np.random.Generator) -> Attention:
        """Return random first parameters."""
        query, key = (rng.normal(0, factors**-0.5, (factors, hidden)) for _ in range(2))
        return cls(query, key)

    def weights(self, liked: _Floats, latents: _Floats) -> _Floats:
        """Return each user's weights of pseudo meta-latents, shape (users, count); rows sum to 1.

        Parameters
        ----------
        liked : ndarray of float64, shape (users, K)
            d of each user.
        latents : ndarray of float64, shape (count, K)
        """
        scores = (liked @ self.query) @ (latents @ self.key).T / np.sqrt(self.query.shape[1])
        grown = np.exp(scores - scores.max(axis=1, keepdims=True))
        found: _Floats = grown / grown.sum(axis=1, keepdims=True)
        return found

    def gradients(
        self, liked: _Floats, latents: _Floats, values: _Floats, slope: _Floats
    ) -> tuple[_Floats, _Floats]:
        """Return the gradients of both parameters, sums over users.

        Parameters
        ----------
        liked, latents : ndarray of float64
            As for `weights`.
        values : ndarray of float64, shape (count, K)
            Vectors that are mixed.
        slope : ndarray of float64, shape (users, K)
            Gradient of each user's loss along its vector.
        """
        root = np.sqrt(self.query.shape[1])
        weights = self.weights(liked, latents)
        along = slope @ values.T
        inner = weights * (along - (weights * along).sum(axis=1, keepdims=True)) / root
        return liked.T @ (inner @ (latents @ self.key)), latents.T @ (inner.T @ (liked @ self.query))


class _Adam:
    def __init__(self, rate: float) -> None:
        self._rate, self._step = rate, 0
        self._moments: dict[int, tuple[_Floats, _Floats]] = {}

    def move(self, *pairs: tuple[_Floats, _Floats]) -> None:
        self._step += 1
        for at, (parameter, gradient) in enumerate(pairs):
            first, second = self._moments.get(at, (np.zeros_like(gradient), np.zeros_like(gradient)))
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
            self._moments[at] = first, second
            corrected = np.sqrt(second / (1 - 0.999**self._step)) + 1e-8
            parameter -= self._rate * first / (1 - 0.9**self._step) / corrected


@dataclass(frozen=True)
class _Part:
    """Ratings on the scale from -1 to 1."""

    user: NDArray[np.intp]
    item: NDArray[np.intp]
    rating: _Floats

    def of(self, which: NDArray[np.bool_]) -> _Part:
        return _Part(self.user[which], self.item[which], self.rating[which])


class _Factors:
    """Item factors of phase 1, and what follows from them for users."""

    def __init__(self, items: _Floats, n_users: int) -> None:
        self.bias, self.items = items[:, 1], items[:, 2:]
        self._n_users = n_users

    def user_bias(self, part: _Part) -> _Floats:
        missed = np.bincount(part.user, part.rating - self.bias[part.item], self._n_users)
        return missed / (np.bincount(part.user, minlength=self._n_users) + _USER_RIDGE)

    def liked(self, part: _Part, bias: _Floats) -> _Floats:
        missed = part.rating - self.bias[part.item] - bias[part.user]
        counts = np.bincount(part.user, minlength=self._n_users) + _SHRINK
        columns = [np.bincount(part.user, missed * one[part.item], self._n_users) for one in self.items.T]
        return np.stack(columns, axis=1) / counts[:, None]

    def predicted(self, part: _Part, bias: _Floats, vectors: _Floats) -> _Floats:
        mixed = (vectors[part.user] * self.items[part.item]).sum(axis=1)
        found: _Floats = bias[part.user] + self.bias[part.item] + mixed
        return found

    def folded_in(self, part: _Part) -> tuple[_Floats, _Floats]:
        """Return bias and vector of each user by ridge regression on its own ratings."""
        rows = np.column_stack([np.ones(len(self.items)), self.items])
        ridge = np.diag([_USER_RIDGE] + [_FOLD_IN_RIDGE] * self.items.shape[1])
        found = np.zeros((self._n_users, rows.shape[1]))
        order = np.argsort(part.user, kind="stable")
        ends = np.searchsorted(part.user[order], np.arange(self._n_users + 1))
        for user in range(self._n_users):
            own = order[ends[user] : ends[user + 1]]
            x, y = rows[part.item[own]], part.rating[own] - self.bias[part.item[own]]
            found[user] = np.linalg.solve(x.T @ x + ridge, x.T @ y)
        return found[:, 0], found[:, 1:]


def _rmse(predicted: _Floats, part: _Part, half: float) -> float:
    return float(half * np.sqrt(np.mean((part.rating - np.clip(predicted, -1, 1)) ** 2)))


def study(
    fit: _Part,
    test: _Part,
    n_users: int,
    n_items: int,
    *,
    lowest: float,
    highest: float,
    query: float,
    seed: int,
) -> Mapping[str, object]:
    """Run the study; return root mean squared errors on test ratings and the conditions of pseudo meta-latents.

    Parameters
    ----------
    fit, test : _Part
        Ratings of both parts, on the scale from -1 to 1.
    n_users, n_items : int
    lowest, highest : float
        Range of ratings.
    query : float
        Share of users who take no part in training.
    seed : int
    """
    rng, half = np.random.default_rng(seed), (highest - lowest) / 2
    queries = np.zeros(n_users, np.bool_)
    queries[rng.permutation(n_users)[: round(query * n_users)]] = True
    validated = rng.random(len(fit.user)) < 0.1
    validated &= ~queries[fit.user]
    known, checked = fit.of(~validated), fit.of(validated)
    of_keys = known.of(~queries[known.user])
    key_test, query_test = test.of(~queries[test.user]), test.of(queries[test.user])

    # Phase 1
    settings = FedMfSettings(lowest=lowest, highest=highest)
    middle = (lowest + highest) / 2
    rated = of_keys.rating * half + middle
    best, chosen = np.inf, None
    versions = train(
        of_keys.user, of_keys.item, rated, settings, range(n_users), n_items, rounds=_ROUNDS, seed=seed
    )
    for number, one in enumerate(versions):
        if number % _EVERY == 0 and number:
            error = _rmse((one.users[checked.user] * one.items[checked.item]).sum(axis=1), checked, half)
            if error < best:
                best, chosen = error, one
    if chosen is None:
        raise AssertionError("some version has the least error")
    factors = _Factors(chosen.items, n_users)
    keys = np.flatnonzero(~queries & (np.bincount(of_keys.user, minlength=n_users) > 0))
    own = chosen.users[keys, 2:]

    # Pseudo meta-latents
    bound = max(1, int(np.ceil(1000 * np.abs(own).max())))
    terms = LatentTerms(own.shape[1], _COMBINATIONS, len(keys), len(keys), bound, _MEMBERS)
    codes = np.array([encode_latent(row, terms) for row in own], np.int64)
    drawn = draw_combinations(len(keys), _MEMBERS, _COMBINATIONS)
    sums = np.array([np.array(one.weights) @ codes[list(one.members)] for one in drawn])
    published = latents_of_sums(sums, terms)
    moments = Moments.of_sums(own.sum(axis=0), (own**2).sum(axis=0), len(own))
    latents = rescaled(published, moments)

    # Phase 2
    scaled = latents / np.sqrt(moments.variance).mean()
    bias = factors.user_bias(known)
    liked = factors.liked(known, bias)
    unit = liked[keys].std()
    attention, adam = Attention.drawn(own.shape[1], _HIDDEN, rng), _Adam(_RATE)
    least, vectors, steps = np.inf, np.zeros_like(liked), 0
    for step in range(_STEPS + 1):
        if step % 10 == 0:
            made = attention.weights(liked / unit, scaled) @ latents
            error = _rmse(factors.predicted(checked, bias, made), checked, half)
            if error < least:
                least, vectors, steps = error, made, step
        shown = rng.random(len(of_keys.user)) < 0.5
        told, asked = of_keys.of(shown), of_keys.of(~shown)
        part_bias = factors.user_bias(told)
        part_liked = factors.liked(told, part_bias) / unit
        mixed = attention.weights(part_liked, scaled) @ latents
        missed = factors.predicted(asked, part_bias, mixed) - asked.rating
        slope = np.stack(
            [np.bincount(asked.user, 2 * missed * one[asked.item], n_users) for one in factors.items.T],
            axis=1,
        )
        by_query, by_key = attention.gradients(part_liked, scaled, latents, slope / len(missed))
        adam.move((attention.query, by_query), (attention.key, by_key))

    nothing = np.zeros_like(vectors)
    folded = factors.folded_in(known)
    direct = (chosen.users[key_test.user] * chosen.items[key_test.item]).sum(axis=1)

    def errors(bias: _Floats, vectors: _Floats) -> dict[str, float]:
        parts = {"key users": key_test, "query users": query_test}
        return {who: _rmse(factors.predicted(one, bias, vectors), one, half) for who, one in parts.items()}

    mean = np.full(len(test.rating), known.rating.mean())
    centre = own - own.mean(axis=0)
    made = latents - latents.mean(axis=0)
    cosines = (made @ centre.T) / np.outer(np.linalg.norm(made, axis=1), np.linalg.norm(centre, axis=1))
    return {
        "rmse": {
            "factors of phase 1": {"key users": _rmse(direct, key_test, half)},
            "attention": errors(bias, vectors),
            "biases only": errors(bias, nothing),
            "ridge fold-in": errors(*folded),
            "global mean": {"all": _rmse(mean, test, half)},
        },
        "spread of query vectors": float(vectors[queries].std(axis=0).mean() / own.std(axis=0).mean()),
        "steps of attention": steps,
        "key users": len(keys),
        "rank": int(np.linalg.matrix_rank(published)),
        "shrinkage": float((published.std(axis=0) / own.std(axis=0)).mean()),
        "condition number": condition_number(latents),
        "largest cosine": float(cosines.max()),
        "members named": {m: named(own, m) for m in _SHARES},
    }


def main(arguments: list[str] | None = None) -> int:
    """Print the study of a file as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m coterie.systems.fedmf.study.inductive", description=__doc__
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--query", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    print(json.dumps(_of_file(given.file, given.query, given.seed), indent=1))
    return 0


def _of_file(path: Path, query: float, seed: int) -> Mapping[str, object]:
    dataset = read_mat(path)
    tested = published_parts(path, dataset)
    lowest, highest = float(dataset.rating.min()), float(dataset.rating.max())
    rating = (dataset.rating - (lowest + highest) / 2) / ((highest - lowest) / 2)
    whole = _Part(dataset.user.astype(np.intp), dataset.item.astype(np.intp), rating.astype(np.float64))
    return study(
        whole.of(~tested),
        whole.of(tested),
        len(dataset.users),
        len(dataset.items),
        lowest=lowest,
        highest=highest,
        query=query,
        seed=seed,
    )


if __name__ == "__main__":
    sys.exit(main())
