"""EASE: a linear model of items from items, in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import PreflightError
from coterie.evaluation.central.interactions import Interactions, Lists
from coterie.evaluation.central.model import Central, hyperparameter
from coterie.evaluation.central.neighbours import together
from coterie.evaluation.search import LogUniform

__all__ = ["Ease"]

_TABLES = 3
"""Tables (n_items, n_items) in memory at once: the counts, the inverse, and the solver's copy."""


def _type_for(n_items: int, memory_mb: float) -> type[np.floating[Any]] | None:
    """Return the most exact type whose tables fit the memory; None where none fits."""
    for kind in (np.float64, np.float32):
        if _TABLES * n_items**2 * np.dtype(kind).itemsize <= memory_mb * 2**20:
            return kind
    return None


def _too_large(n_items: int, memory_mb: float) -> str:
    """Return what is wrong with a catalogue that does not fit the memory; empty where it fits."""
    if _type_for(n_items, memory_mb) is not None:
        return ""
    needed = math.ceil(_TABLES * n_items**2 * np.dtype(np.float32).itemsize / 2**20)
    return f"EASE on {n_items} items needs {needed} MB for dense tables; expected at most {memory_mb:g} MB"


@dataclass
class Ease(Central):
    r"""EASE (Steck, 2019): :math:`\min_B \|X - X B\|^2 + \lambda \|B\|^2` with :math:`B_{jj} = 0`.

    Equation (8): :math:`B = I - P \,\mathrm{diag}(1 / P_{jj})`, where :math:`P = (X^T X + \lambda I)^{-1}`.  A user's
    scores are the sum of the rows of :math:`B` of its items.

    Parameters
    ----------
    ridge : float
        :math:`\lambda`.
    memory_mb : float
        Memory that the dense tables may take, MB; float32 is used where float64 does not fit.
    """

    name = "ease-central"
    label = "EASE, centralised"
    note = "closed form (Steck, 2019)"
    learned = ("weights",)

    ridge: float = hyperparameter(300.0, LogUniform(10.0, 5000.0), above=0)
    memory_mb: float = hyperparameter(2048.0, above=0)

    @classmethod
    def objection(cls, n_items: int) -> str:
        """Return why EASE, with its default memory, cannot learn a catalogue of this size; empty where it can."""
        return _too_large(n_items, cls.defaults()["memory_mb"])

    def _learn(self, data: Interactions) -> None:
        n = data.n_items
        kind = _type_for(n, self.memory_mb)
        if kind is None:
            raise PreflightError(
                _too_large(n, self.memory_mb), hint="a larger memory_mb, or leave the row out"
            )
        gram = np.empty((n, n), kind)
        for row, counts in enumerate(together(data.users_of, data.items_of)):
            gram[row] = counts
        gram[np.diag_indices(n)] += kind(self.ridge)
        inverse = np.linalg.inv(gram)
        self.weights = inverse / -np.diag(inverse)
        self.weights[np.diag_indices(n)] = 0

    def _scores(self, users: NDArray[np.integer]) -> NDArray[np.floating]:
        return self._summed(self._data.items_of, users)

    def _of_people(self, people: Interactions) -> NDArray[np.floating]:
        return self._summed(people.items_of, np.arange(people.n_users))

    def _summed(self, items_of: Lists, users: NDArray[np.integer]) -> NDArray[np.floating]:
        return np.stack([self.weights[items_of[user]].sum(axis=0) for user in users.tolist()])
