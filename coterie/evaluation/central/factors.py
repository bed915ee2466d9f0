"""Matrix factorisation of implicit feedback: iALS by our own solver; ALS and BPR by the package ``implicit``."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import util

import numpy as np
from numpy.typing import NDArray

from coterie.errors import PreflightError
from coterie.evaluation.baselines import als
from coterie.evaluation.central.interactions import Interactions, Lists
from coterie.evaluation.central.model import Central, hyperparameter
from coterie.evaluation.search import Choices, LogUniform
from coterie.evaluation.threads import one_thread

__all__ = ["Als", "Bpr", "Ials"]

_FACTORS = Choices((8, 16, 32, 64, 128))


class _Factors(Central):
    """Base of models whose scores are inner products of users' and items' factors."""

    learned = ("item_factors",)

    user_factors: NDArray[np.floating]
    item_factors: NDArray[np.floating]

    def _scores(self, users: NDArray[np.integer]) -> NDArray[np.floating]:
        scores: NDArray[np.floating] = self.user_factors[users] @ self.item_factors.T
        return scores

    @property
    def vector_length(self) -> int:
        """Number of factors of a user."""
        return int(self.item_factors.shape[1])

    def user_vectors(self, users: NDArray[np.integer]) -> NDArray[np.floating]:
        """Return users' factors, float (n, factors)."""
        found: NDArray[np.floating] = self.user_factors[users]
        return found

    def score_vectors(self, vectors: NDArray[np.floating]) -> NDArray[np.float32]:
        """Return scores of all items for users' factors; `Central.score_vectors` has the shapes."""
        with one_thread():
            scores: NDArray[np.floating] = vectors.astype(self.item_factors.dtype) @ self.item_factors.T
        return scores.astype(np.float32, copy=False)


@dataclass
class Ials(_Factors):
    r"""iALS with the weights and the ridge of Rendle et al. (2021, "iALS++", and 2022, "Revisiting iALS").

    Minimises :math:`\sum_{(u, i) \in S} (\hat y_{ui} - 1)^2 + \alpha_0 \sum_{u, i} \hat y_{ui}^2 + \lambda (\sum_u
    (|I_u| + \alpha_0 n)^\nu \|p_u\|^2 + \sum_i (|U_i| + \alpha_0 m)^\nu \|q_i\|^2)`, with :math:`\hat y_{ui} = p_u^T
    q_i`, :math:`m` users and :math:`n` items, by solving for all users, then for all items.

    Parameters
    ----------
    factors : int
    ridge : float
        :math:`\lambda`.
    alpha0 : float
        Weight of all pairs.
    nu : float
        Exponent of the frequencies in the ridge.
    epochs : int
        Number of times that users and items are solved for; users are solved for once more at the end.
    """

    name = "ials-central"
    label = "iALS, centralised"
    note = "frequency-scaled ridge (Rendle et al., 2021)"

    factors: int = hyperparameter(64, Choices((16, 32, 64, 128)), least=1)
    ridge: float = hyperparameter(0.01, LogUniform(1e-3, 0.1), above=0)
    alpha0: float = hyperparameter(0.1, LogUniform(0.01, 1.0), above=0)
    nu: float = hyperparameter(1.0, Choices((0.5, 0.75, 1.0)), least=0)
    epochs: int = hyperparameter(12, least=1)

    def _learn(self, data: Interactions) -> None:
        rng = np.random.default_rng(self.seed)
        self.item_factors = rng.normal(0, 0.1 / np.sqrt(self.factors), (data.n_items, self.factors))
        for _ in range(self.epochs):
            self.user_factors = self._solved(data.items_of, self.item_factors)
            self.item_factors = self._solved(data.users_of, self.user_factors)
        self.user_factors = self._solved(data.items_of, self.item_factors)

    def _of_people(self, people: Interactions) -> NDArray[np.floating]:
        return self._solved(people.items_of, self.item_factors) @ self.item_factors.T

    def _solved(self, rows: Lists, others: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the factors of all rows that minimise the loss with the other side's factors fixed."""
        every = self.alpha0 * (others.T @ others)
        scale = self.ridge * (rows.lengths + self.alpha0 * len(others)) ** self.nu
        solved = np.zeros((len(scale), self.factors))
        # A row without an entry has the factor 0.
        for row in np.flatnonzero(rows.lengths).tolist():
            own = others[rows[row]]
            normal = every + own.T @ own
            normal[np.diag_indices(self.factors)] += scale[row]
            solved[row] = np.linalg.solve(normal, own.sum(axis=0))
        return solved


class _OfImplicit(_Factors):
    """Base of models by the package ``implicit``."""

    @classmethod
    def objection(cls, n_items: int) -> str:
        """Return that the package is not installed; empty where it is."""
        absent = util.find_spec("implicit") is None
        return f"{cls.label} needs the package implicit: pip install 'coterie[baselines]'" if absent else ""


@dataclass
class Als(_OfImplicit):
    """Alternating least squares (Hu, Koren and Volinsky, 2008) by ``implicit`` (`coterie.evaluation.baselines.als`)."""

    name = "als"
    label = "ALS (implicit)"
    note = "all data in one place; another method than the paper's"

    factors: int = hyperparameter(64, _FACTORS, least=1)
    regularization: float = hyperparameter(0.01, LogUniform(1e-3, 100.0), least=0)
    alpha: float = hyperparameter(1.0, LogUniform(0.1, 100.0), above=0)
    iterations: int = hyperparameter(15, Choices((5, 10, 15, 30)), least=1)

    def _learn(self, data: Interactions) -> None:
        self.user_factors, self.item_factors = als(
            data.user,
            data.item,
            data.n_users,
            data.n_items,
            factors=self.factors,
            regularization=self.regularization,
            alpha=self.alpha,
            iterations=self.iterations,
            seed=self.seed,
        )

    def _of_people(self, people: Interactions) -> NDArray[np.floating]:
        """Return scores by the factors that one half step for users gives, as ``implicit`` recalculates them."""
        items = self.item_factors
        every = items.T @ items + self.regularization * np.eye(self.factors)
        own = np.zeros((people.n_users, self.factors))
        # A row without an entry has the factor 0.
        for row in np.flatnonzero(people.items_of.lengths).tolist():
            seen = items[people.items_of[row]]
            own[row] = np.linalg.solve(
                every + (self.alpha - 1) * (seen.T @ seen), self.alpha * seen.sum(axis=0)
            )
        return own @ items.T


@dataclass
class Bpr(_OfImplicit):
    """Matrix factorisation by Bayesian personalised ranking (Rendle et al., 2009), by ``implicit``, in one thread."""

    name = "bpr"
    label = "BPR-MF (implicit)"
    title = "BPR"
    note = "pairwise ranking loss (Rendle et al., 2009)"
    folds_in = False

    factors: int = hyperparameter(64, _FACTORS, least=1)
    rate: float = hyperparameter(0.05, LogUniform(5e-3, 0.2), above=0)
    regularization: float = hyperparameter(0.01, LogUniform(1e-4, 0.1), least=0)
    epochs: int = hyperparameter(100, Choices((50, 100, 200, 400)), least=1)

    def _learn(self, data: Interactions) -> None:
        try:
            from implicit.bpr import BayesianPersonalizedRanking
            from scipy.sparse import csr_matrix
        except ImportError as error:
            raise PreflightError(
                f"the row {self.label} needs the package implicit, but {error.name} is not installed",
                hint="pip install 'coterie[baselines]', or leave the row out",
            ) from error
        seen = csr_matrix(
            (np.ones(len(data), np.float32), (data.user, data.item)), shape=(data.n_users, data.n_items)
        )
        fitted = BayesianPersonalizedRanking(
            factors=self.factors,
            learning_rate=self.rate,
            regularization=self.regularization,
            iterations=self.epochs,
            random_state=self.seed,
            num_threads=1,
            use_gpu=False,
        )
        fitted.fit(seen, show_progress=False)
        # The last factor is the bias of an item; users have 1 there.
        self.user_factors = np.asarray(fitted.user_factors, np.float32)
        self.item_factors = np.asarray(fitted.item_factors, np.float32)
