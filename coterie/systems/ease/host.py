"""Host's side of EASE: counts its users' items and pairs of items, or sketches these, measures, recommends."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.leave_one_out import LeaveOneOut
from coterie.rounds.inputs import inputs_of
from coterie.rounds.sides import KeepPrivate, User
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Contribution, Layout
from coterie.secure_sum.discrete_noise import discrete_gaussian
from coterie.secure_sum.noise_stream import SEED_BYTES, noise_stream
from coterie.secure_sum.plan import SumPlan
from coterie.systems.ease.mathematics import diagonal_of, pair_places, pairs_of, rows_of, scores, symmetric
from coterie.systems.ease.settings import METRICS, EaseSettings
from coterie.systems.ease.sketch import directions, row_of, scorer, signs
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.members_of_host import Added, gathered
from coterie.systems.shared.metric_segments import add_measures
from coterie.systems.shared.popularity import with_popularity

__all__ = ["EaseHost"]

_SAMPLE, _ROUNDING, _SKETCH = 1, 2, 3
"""First element of the key under which each use of a user's own number draws."""

_Model = Mapping[str, NDArray[np.float32]]


class EaseHost:
    """Host's side of EASE.

    Parameters
    ----------
    settings : EaseSettings
    data : HostData
        Data of the users; an interaction counts, whatever its rating.
    keys : ndarray of uint64, shape (users,)
        Each user's own number, which nobody else knows.
    seed : int
        Seed of the run.
    keep : callable
        Keeps the seeds of users' noise, which the operating system draws; without noise users keep nothing.

    Attributes
    ----------
    measured : mapping of str to ndarray of float64, shape (users,)
        Metrics as they were last measured for a contribution.
    """

    likeness = "weight of your item in the score, from the item-item matrix"

    def __init__(
        self, settings: EaseSettings, data: HostData, keys: NDArray[np.uint64], seed: int, keep: KeepPrivate
    ) -> None:
        self.measured: Mapping[str, NDArray[np.float64]] = {}
        self._settings = settings
        self._holdout: LeaveOneOut = data.leave_one_out(seed)
        self._keys = keys
        self._seed = seed
        self._items = [np.sort(items) for items in self._holdout.training()]
        self._counted = [self._sampled(user) for user in range(len(keys))]
        self._seeds = self._kept_seeds(keep) if settings.noise else None

    def _kept_seeds(self, keep: KeepPrivate) -> NDArray[np.uint8]:
        """Return a seed for each user, uint8 (users, SEED_BYTES): the same for the whole run, whatever restarts."""
        drawn = secrets.token_bytes(len(self._keys) * SEED_BYTES)
        return keep({"noise": np.frombuffer(drawn, np.uint8).reshape(-1, SEED_BYTES)})["noise"]

    def _sampled(self, user: int) -> NDArray[np.integer]:
        """Return the items by which a user counts: the same in both sums."""
        items, most = self._items[user], self._settings.most_items
        if not most or len(items) <= most:
            return items
        return np.sort(self._rng(user, _SAMPLE).choice(items, most, replace=False))

    def _rng(self, user: int, *use: int) -> np.random.Generator:
        key = (*use[:1], self._seed, *use[1:])
        return np.random.default_rng(np.random.SeedSequence(int(self._keys[user]), spawn_key=key))

    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of a contribution to a sum of this purpose."""
        return self._settings.layout(purpose, self._holdout.n_items)

    def inputs(self, purpose: Purpose) -> tuple[str, ...]:
        """Return the names of what contributions for a purpose depend on beside plan and model."""
        return inputs_of(purpose, opens=True)

    def contributions(
        self,
        plan: SumPlan,
        model: _Model,
        opened: NDArray[np.bool_] | None,
        members: Mapping[int, Sequence[User]],
    ) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        """Yield each member and the codes of its contribution, in any order."""
        match Purpose(plan.purpose):
            case Purpose.EVALUATE:
                layout = self.layout(Purpose.EVALUATE)
                return gathered(layout, members, self._evaluated(plan, model, members))
            case Purpose.SUPPORTS:
                return self._counts(plan, members, self._add_items)
            case Purpose.TRAIN if self._settings.sketch:
                return self._counts(plan, members, self._sketches(plan, model, opened))
            case Purpose.TRAIN:
                return self._counts(plan, members, partial(self._add_pairs, opened))

    def _counts(
        self,
        plan: SumPlan,
        members: Mapping[int, Sequence[User]],
        add: Callable[[Contribution, User], None],
    ) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        layout = self.layout(Purpose(plan.purpose))
        for member, users in members.items():
            contribution = Contribution(layout)
            for user in users:
                add(contribution, user)
                contribution.count()
            if self._seeds is not None:
                contribution.steps += self._noise(plan, self._seeds[[user.index for user in users]])
            yield member, contribution.codes()

    def _noise(self, plan: SumPlan, seeds: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Return the noise of a member, which has the variance of all its users' together."""
        settings, n_items = self._settings, self._holdout.n_items
        supports = Purpose(plan.purpose) is Purpose.SUPPORTS
        values = n_items if supports else pairs_of(n_items)
        drawn = discrete_gaussian(
            settings.variance * len(seeds), values, noise_stream(seeds.tobytes(), plan, "ease-noise")
        )
        return drawn if supports else settings.packing.packed(drawn)

    def _add_items(self, contribution: Contribution, user: User) -> None:
        # So many whole steps are a count of one.
        contribution.steps[self._counted[user.index]] += self._settings.parts

    def _add_pairs(self, opened: NDArray[np.bool_] | None, contribution: Contribution, user: User) -> None:
        items, n_items = self._counted[user.index], self._holdout.n_items
        if opened is not None:
            items = items[opened[user.group][items]]
        codes, values = self._settings.packing.codes(pair_places(items, n_items), pairs_of(n_items))
        # Whole numbers are not rounded: nothing is drawn.
        contribution.add("pairs", values, np.random.default_rng(0), rows=codes)

    def _sketches(
        self, plan: SumPlan, model: _Model, opened: NDArray[np.bool_] | None
    ) -> Callable[[Contribution, User], None]:
        """Return a function that adds a user's part of a sketch to a contribution."""
        everything = np.ones(self._holdout.n_items, np.bool_)
        drawn = None if plan.pass_number else signs(self._seed, self._holdout.n_items, self._settings.sketch)
        told = directions(model) if drawn is None else None

        def add(contribution: Contribution, user: User) -> None:
            open_to = everything if opened is None else opened[user.group]
            items = self._counted[user.index]
            items = items[open_to[items]]
            if drawn is not None:
                row = row_of(items, drawn, everything)
            elif told is not None:
                row = row_of(items, told, open_to)
            else:
                # No item is open.
                return
            rng = self._rng(user.index, _SKETCH, plan.pass_number)
            contribution.add("sketch", np.broadcast_to(row, (len(items), len(row))), rng, rows=items)

        return add

    def _evaluated(
        self, plan: SumPlan, model: _Model, members: Mapping[int, Sequence[User]]
    ) -> Iterator[Added]:
        pairs = [(member, user.index) for member, users in members.items() for user in users]
        index = np.array([user for _, user in pairs], np.intp)
        # The metrics of single users do not leave the host.
        self.measured = found = self.measure(model, index)
        for member, user in pairs:
            values = np.array([found[name][user] for name in METRICS])
            yield (
                member,
                partial(add_measures, values=values, rng=self._rng(user, _ROUNDING, plan.round)),
            )

    def measure(self, model: _Model, index: NDArray[np.intp] | None = None) -> dict[str, NDArray[np.float64]]:
        """Return each user's metrics, float64 (users,) by name; they do not leave the host."""
        score = self._scorer(model)

        def all_items(users: NDArray[np.intp]) -> NDArray[np.floating]:
            return np.stack([score(self._items[user]) for user in users.tolist()])

        def candidates(users: NDArray[np.intp], items: NDArray[np.int32]) -> NDArray[np.floating]:
            return np.take_along_axis(all_items(users), items.astype(np.intp), axis=1)

        return self._holdout.measure(candidates, all_items, index)

    def fold_in(self, model: _Model) -> None:
        """Set nothing: users keep nothing, and their scores follow from their items and the model."""

    def recommend(self, model: _Model, user: int) -> NDArray[np.float32]:
        """Return a user's scores of all items, float32 (I,); with popularity closed ones have that alone."""
        # One user needs few rows: the whole matrix is not made.
        return self._scorer(model, whole=False)(self._items[user])

    def scorer(self, model: _Model) -> Callable[[int], NDArray[np.float32]]:
        """Return a function from a user to what `recommend` returns, with the whole matrix of weights in memory."""
        own = self._scorer(model)
        return lambda user: own(self._items[user])

    def alike(
        self, model: _Model, items: NDArray[np.integer], others: NDArray[np.integer]
    ) -> NDArray[np.float64]:
        """Return what each of others adds to the score of each of some items, float64 (items, others)."""
        own = self._scorer(model, whole=False, popularity=False)
        found = np.zeros((len(items), len(others)))
        for column, other in enumerate(others):
            found[:, column] = own(np.array([other]))[items]
        return found

    def _scorer(
        self, model: _Model, *, whole: bool = True, popularity: bool = True
    ) -> Callable[[NDArray[np.integer]], NDArray[np.float32]]:
        """Return a function from a user's items to its scores of all items; `whole` makes all rows of P at once."""
        opened, weight = model["open"] > 0, self._settings.popularity if popularity else 0
        if self._settings.sketch:
            own = scorer(model)
        else:
            upper = _triangle(model)
            inverse = symmetric(upper) if whole else None
            rows = partial(rows_of, upper) if inverse is None else inverse.__getitem__
            own = partial(scores, rows, diagonal_of(upper), opened)

        def with_levels(items: NDArray[np.integer]) -> NDArray[np.float32]:
            found = own(items)
            if weight:
                found[~opened] = 0
            return with_popularity(found, model, weight)

        return with_levels


def _triangle(model: _Model) -> NDArray[np.float32]:
    """Return P over the open items as a triangle; empty before the model is trained."""
    return model.get("precision", np.zeros(0, np.float32))
