"""Host's side of Popular: adds the weight of each user to the items that the user has."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.baselines import from_table
from coterie.evaluation.leave_one_out import LeaveOneOut
from coterie.rounds.inputs import inputs_of
from coterie.rounds.sides import User
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Contribution, Layout
from coterie.secure_sum.plan import SumPlan
from coterie.systems.shared.members_of_host import gathered
from coterie.systems.shared.metric_segments import add_measures
from coterie_popular.mathematics import METRICS, layout, weight
from coterie_popular.settings import PopularSettings

__all__ = ["PopularHost"]

Model = Mapping[str, NDArray[np.float32]]


class PopularHost:
    """Host's side of Popular: keeps the items of its users, makes contributions and recommends."""

    def __init__(
        self, settings: PopularSettings, holdout: LeaveOneOut, keys: NDArray[np.uint64], seed: int
    ) -> None:
        self.measured: Mapping[str, NDArray[np.float64]] = {}
        self._settings = settings
        self._holdout = holdout
        self._items = holdout.training()
        self._keys = keys
        self._seed = seed

    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of a contribution to a sum of this purpose."""
        return layout(purpose, self._holdout.n_items, self._settings.bits)

    def inputs(self, purpose: Purpose) -> tuple[str, ...]:
        """Return what contributions depend on beside plan and model: the order of the items."""
        return inputs_of(purpose, opens=False)

    def contributions(
        self,
        plan: SumPlan,
        model: Model,
        opened: NDArray[np.bool_] | None,
        members: Mapping[int, Sequence[User]],
    ) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        """Yield each member's contribution, the sum over its users."""
        purpose = Purpose(plan.purpose)
        if purpose is Purpose.EVALUATE:
            # The metrics of single users do not leave the host.
            shape = self._holdout.n_users, self._holdout.n_items
            scores = np.broadcast_to(model["items"][:, 0], shape)
            self.measured = self._holdout.measure(*from_table(scores))
        add = self._train if purpose is Purpose.TRAIN else self._evaluate
        return gathered(self.layout(purpose), members, self._each(plan, members, add))

    def _each(
        self,
        plan: SumPlan,
        members: Mapping[int, Sequence[User]],
        add: Callable[[int, np.random.Generator, Contribution], None],
    ) -> Iterator[tuple[int, Callable[[Contribution], None]]]:
        for member, users in members.items():
            for user in users:
                # Seeded by the user's own number, so that draws do not depend on how users are spread over hosts.
                own = np.random.SeedSequence(int(self._keys[user.index]), spawn_key=(self._seed, plan.round))
                yield member, partial(add, user.index, np.random.default_rng(own))

    def _train(self, user: int, rng: np.random.Generator, contribution: Contribution) -> None:
        items = self._items[user]
        if len(items):
            each = weight(len(items), self._settings.damping)
            contribution.add("items", np.full((len(items), 1), each), rng, rows=items)
            contribution.add("touched", np.ones(len(items)), rng, rows=items)

    def _evaluate(self, user: int, rng: np.random.Generator, contribution: Contribution) -> None:
        add_measures(contribution, np.array([self.measured[name][user] for name in METRICS]), rng)

    def fold_in(self, model: Model) -> None:
        """Set nothing, as users keep nothing: the model serves those who never took part, too."""

    def recommend(self, model: Model, user: int) -> NDArray[np.float32]:
        """Return a user's scores of all items, which are the same for every user."""
        return model["items"][:, 0]
