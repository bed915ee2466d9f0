"""Base of the host's side of systems that learn from users' own items: supports, evaluation, members."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.errors import DataError
from coterie.evaluation.holdout import TRAIN
from coterie.evaluation.leave_one_out import RANKED
from coterie.rounds.inputs import inputs_of
from coterie.rounds.sides import Arrays, User
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Contribution, Layout
from coterie.secure_sum.plan import SumPlan
from coterie.systems.shared.alike import ComparedByVectors
from coterie.systems.shared.factor_steps import UserData
from coterie.systems.shared.factors import scores
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.members_of_host import Added, UserByUser
from coterie.systems.shared.metric_segments import add_measures, names_of, units_of
from coterie.systems.shared.rated_server import Layouts, open_anywhere

__all__ = ["KeptUpdate", "RatedHost", "add_nothing", "training_ratings"]

_ROUNDING = 6
"""First element of the key under which the values of an evaluation are rounded; no local step has it."""


class KeptUpdate(Protocol):
    """The outcome of one user's local step."""

    @property
    def index(self) -> int:
        """Position of the user among those that stepped together."""

    @property
    def kept(self) -> NDArray[np.float32]:
        """Factor that the user keeps."""


class RatedHost(ComparedByVectors, UserByUser):
    """Base of a host's side; subclasses add local steps, measurement and factors, and set ``private``.

    Parameters
    ----------
    layouts : Layouts
        Layouts of contributions, from the same settings as at the server.
    data : HostData
    keys : ndarray of uint64, shape (users,)
        Each user's own number, which nobody else knows.
    seed : int
        Seed of the run.
    users : sequence of UserData
        Training data of each user.

    Attributes
    ----------
    private : dict of str to ndarray
        Private arrays, a row for each user; changed in place.  ``factors`` are what local steps begin with.
    measured : dict of str to ndarray of float64, shape (users,)
        Metrics as they were last measured for a contribution.
    """

    private: Arrays

    def __init__(
        self,
        layouts: Layouts,
        data: HostData,
        keys: NDArray[np.uint64],
        seed: int,
        users: Sequence[UserData],
    ) -> None:
        self.keys = keys
        self.seed = seed
        self.measured: Mapping[str, NDArray[np.float64]] = {}
        self._layouts = layouts
        self._data = data
        self._users = users
        self._rates = np.array([len(user.items) > 0 for user in users], np.bool_)

    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of a contribution to a sum of this purpose."""
        return self._layouts.layout(purpose)

    def inputs(self, purpose: Purpose) -> tuple[str, ...]:
        """Return the names of what contributions for a purpose depend on beside plan and model."""
        return inputs_of(purpose, opens=True)

    def _items(self, user: int) -> NDArray[np.integer]:
        return self._users[user].items

    def _evaluated(
        self, plan: SumPlan, model: Mapping[str, NDArray[np.float32]], pairs: Sequence[tuple[int, User]]
    ) -> Iterator[Added]:
        index = np.array([user.index for _, user in pairs], np.intp)
        self.measured = found = self.measure(model, index, round_=plan.round)
        absent = np.full(len(self.keys), np.nan)
        names = names_of(self._layouts.measures)
        table = np.stack([found.get(name, absent)[index] for name in names], axis=1)
        table = table / units_of(self._layouts.measures)
        for (member, user), values in zip(pairs, table, strict=True):
            key = (_ROUNDING, self.seed, plan.round)
            rng = np.random.default_rng(np.random.SeedSequence(int(self.keys[user.index]), spawn_key=key))
            yield member, partial(_add_measures, values, rng)

    def _trained(
        self,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        opened: NDArray[np.bool_] | None,
        pairs: Sequence[tuple[int, User]],
    ) -> Iterator[Added]:
        for group, own, others in self._of_groups(pairs):
            for member in others:
                # A user without ratings contributes nothing.
                yield member, add_nothing
            index = np.array([user for _, user in own], np.intp)
            allowed = open_anywhere(model) if opened is None else opened[group]
            for update, add in self._stepped(plan, model, index, allowed):
                member, user = own[update.index]
                # A step that diverged sends nothing, and must not be where the next one begins.
                if np.isfinite(update.kept).all():
                    self.private["factors"][user] = update.kept
                yield member, add

    @abstractmethod
    def _stepped(
        self,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        index: NDArray[np.intp],
        allowed: NDArray[np.bool_],
    ) -> Iterator[tuple[KeptUpdate, Callable[[Contribution], None]]]:
        """Yield the update of each of some users with ratings, and what adds it to a contribution."""

    def _of_groups(
        self, pairs: Sequence[tuple[int, User]]
    ) -> Iterator[tuple[int, list[tuple[int, int]], list[int]]]:
        """Yield each group with (member, position) of its users with ratings, and the members of the others."""
        for group in sorted({user.group for _, user in pairs}):
            own = [(member, user.index) for member, user in pairs if user.group == group]
            yield (
                group,
                [(member, user) for member, user in own if self._rates[user]],
                [member for member, user in own if not self._rates[user]],
            )

    @abstractmethod
    def measure(
        self, model: Mapping[str, NDArray[np.float32]], index: NDArray[np.intp], *, round_: int = 0
    ) -> dict[str, NDArray[np.float64]]:
        """Return metrics of some users, float64 (users,) by name; they do not leave the host."""

    @abstractmethod
    def factors(
        self, model: Mapping[str, NDArray[np.float32]], index: NDArray[np.intp], *, round_: int = 0
    ) -> NDArray[np.float32]:
        """Return factors of some users at a version, float32 (n, K)."""

    def recommend(self, model: Mapping[str, NDArray[np.float32]], user: int) -> NDArray[np.float32]:
        """Return a user's predicted ratings of all items, float32 (I,)."""
        found: NDArray[np.float32] = self._predicted(model, self.factors(model, np.array([user], np.intp)))[0]
        return found

    def _predicted(
        self, model: Mapping[str, NDArray[np.float32]], factors: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return what a model predicts of all items for users with these factors, float32 (users, I)."""
        return scores(model, factors)


def training_ratings(
    data: HostData, lowest: float, highest: float, table: str
) -> list[tuple[NDArray[np.integer], NDArray[np.floating]]]:
    """Return each user's rated items of the training part, ascending, and their ratings.

    Parameters
    ----------
    data : HostData
    lowest, highest : float
        Range of ratings.
    table : str
        Name of the configuration table that holds the range, for the error.

    Raises
    ------
    DataError
        A rating out of the range, in any part.
    """
    own = (data.part != RANKED) & np.isfinite(data.rating)
    beyond = own & ((data.rating < lowest) | (data.rating > highest))
    if beyond.any():
        raise DataError(
            f"ratings of this host out of range: {np.count_nonzero(beyond)}; expected {lowest:g} to {highest:g}",
            hint=f"{table}.lowest and {table}.highest say what the range is",
        )
    train = np.flatnonzero(own & (data.part == TRAIN))
    train = train[np.lexsort((data.item[train], data.user[train]))]
    user, item, rating = data.user[train], data.item[train], data.rating[train]
    bounds = np.searchsorted(user, np.arange(len(data.users) + 1))
    return [(item[first:last], rating[first:last]) for first, last in pairwise(bounds.tolist())]


def add_nothing(contribution: Contribution) -> None:
    """Add nothing, as the part of a user who has rated nothing."""


def _add_measures(values: NDArray[np.float64], rng: np.random.Generator, contribution: Contribution) -> None:
    add_measures(contribution, values, rng)
