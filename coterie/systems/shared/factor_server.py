"""FedMVMF in rounds: its plan, and the side of the server; hosts and data owners have modules of their own.

Each group first sums which items its users have rated, as in FedNCF: items with fewer than ``min_touch`` raters in a
group stay closed for it.  How many have rated each open item, in all groups together, goes out with the model: by it
users draw the unrated items that have a weight, so that these look like rated ones.

An item that no group may train has no row to be learned.  Where a data owner knows features of it, the model has the
row that they predict (17), and so new items are ranked beside the others.  A user without ratings to learn from
contributes nothing and is served by its attributes (15).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import Arrays, Summed, named, unnamed
from coterie.secure_sum.contribution import Layout
from coterie.systems.shared.factors import MvmfSettings, apply, initial, initial_server_state, layout
from coterie.systems.shared.metric_segments import LARGEST, Measure
from coterie.systems.shared.optimisers import ServerOptimiser
from coterie.systems.shared.rated_server import RatedPlan, RatedServer, open_anywhere

__all__ = ["CHOOSE_BY", "FIGURES", "MEASURES", "MvmfPlan", "MvmfServer", "open_anywhere"]

_PARTS = ("", "validation_")
_RANKED = ("ndcg_rated@10", "precision@10", "recall@10")
_SUMS = ("squared_error", "ratings")

MEASURES: tuple[str | Measure, ...] = (
    *(prefix + name for prefix in _PARTS for name in _RANKED),
    *(Measure(prefix + name, LARGEST) for prefix in _PARTS for name in _SUMS),
)
"""What a user's measurement has (`coterie.evaluation.rated`); those of a sum of squares may be above 1."""

FIGURES = tuple(prefix + name for prefix in _PARTS for name in (*_RANKED, "f1@10", "rmse"))
"""What an evaluation comes to."""

CHOOSE_BY = "validation_ndcg_rated@10"
"""By what the version that counts is chosen unless a run says otherwise."""

_MODEL, _SERVER = "model.", "server."


@dataclass(frozen=True)
class MvmfPlan(RatedPlan):
    """What the plan of a run says about FedMVMF.

    Parameters
    ----------
    learning : MvmfSettings
    attributes : tuple of str
        Names of the users' attributes, in the order of the rows of ``U``; what hosts know must have the same.
    min_touch : int
        Fewest users of a group that must have rated an item for the group to train it.
    new_items : bool
        Whether, in the search among all unseen items, only those are ranked that nobody may train: the paper's
        measurement of new items.

    Raises
    ------
    ConfigError
        A value out of its range.
    """

    system: ClassVar[str] = "FedMVMF"

    learning: MvmfSettings
    attributes: tuple[str, ...] = ()
    min_touch: int = 3
    new_items: bool = False

    @classmethod
    def _of(cls, plain: dict[str, Any]) -> MvmfPlan:
        learning = dict(plain.pop("learning"))
        server = ServerOptimiser(**learning.pop("server"))
        names = tuple(str(name) for name in plain.pop("attributes"))
        return cls(MvmfSettings(server=server, **learning), names, **plain)

    @property
    def measures(self) -> tuple[str | Measure, ...]:
        """What a user's measurement has."""
        return MEASURES

    def of_training(self, n_items: int) -> Layout:
        """Return what a contribution to a round of training looks like."""
        return layout(self.learning, n_items, len(self.attributes))


class MvmfServer(RatedServer):
    """The side of the orchestration server.

    Parameters
    ----------
    plan : MvmfPlan
    n_items : int
    seed : int
        Of the run.
    groups : int
        Groups of the population.
    """

    def __init__(self, plan: MvmfPlan, n_items: int, seed: int, groups: int) -> None:
        super().__init__(plan, n_items, seed, groups)
        self.plan = plan

    def initial(self) -> Arrays:
        """Return version 0 of the model, the optimiser's state, no supports and no predicted rows."""
        learning = self.plan.learning
        model = initial(learning, self._n_items, len(self.plan.attributes), self._seed)
        return {
            **named(_MODEL, model),
            **named(_SERVER, initial_server_state(learning, model)),
            **self.no_supports(),
            "predicted": np.zeros((self._n_items, learning.factors), np.float32),
            "has_predicted": np.zeros(self._n_items, np.uint8),
        }

    def trained(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the arrays after a sum of training."""
        kept = {name: value for name, value in arrays.items() if name != "pull"}
        model, state = apply(
            unnamed(_MODEL, arrays),
            unnamed(_SERVER, arrays),
            summed.sums,
            self.plan.learning,
            users=summed.users,
            population=summed.population,
            pull=arrays.get("pull"),
        )
        return {**kept, **named(_MODEL, model), **named(_SERVER, state)}

    def told(self, arrays: Arrays, answers: Sequence[Arrays]) -> Arrays:
        """Return the arrays with what data owners say of their items for the round that is applied next.

        Parameters
        ----------
        arrays : dict
        answers : sequence of dict
            Of `coterie.systems.fedmvmf.owner.MvmfOwner.answer`.  Of an item of several owners pulls are added,
            predicted rows averaged.
        """
        shape = (self._n_items, self.plan.learning.factors)
        pull, rows, count = np.zeros(shape), np.zeros(shape), np.zeros(self._n_items)
        for one in answers:
            pull[one["items"]] += one["pull"]
            rows[one["new_items"]] += one["rows"]
            count[one["new_items"]] += 1
        predicted, has = arrays["predicted"].copy(), arrays["has_predicted"].copy()
        fresh = count > 0
        predicted[fresh] = (rows[fresh] / count[fresh, None]).astype(np.float32)
        has[fresh] = 1
        return {**arrays, "pull": pull.astype(np.float32), "predicted": predicted, "has_predicted": has}

    def model(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        """Return item and attribute factors, and how many users have rated each item that is open anywhere.

        Where nothing is drawn by it, ``popularity`` is 1 for items that are open anywhere and 0 for the others.
        """
        model = unnamed(_MODEL, arrays)
        popularity = arrays["popularity"].astype(np.float32)
        new = (popularity == 0) & (arrays["has_predicted"] > 0)
        model["items"] = np.where(new[:, None], arrays["predicted"], model["items"]).astype(np.float32)
        if self.plan.learning.weights != "sampled":
            popularity = np.minimum(popularity, 1)
        if not len(self.plan.attributes):
            del model["attributes"]
        return {**model, "popularity": popularity.astype(np.float32)}
