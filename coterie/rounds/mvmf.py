"""FedMVMF in rounds: the sides of ``coterie.learning.mvmf``, with metrics in sums of their own.

Each group first sums which items its users have rated, as in FedNCF: items with fewer than ``min_touch`` raters in a
group stay closed for it.  How many have rated each open item, in all groups together, goes out with the model: by it
users draw the unrated items that have a weight, so that these look like rated ones.

An item that no group may train has no row to be learned.  Where a data owner knows features of it, the model has the
row that they predict (17), and so new items are ranked beside the others.  A user without ratings to learn from
contributes nothing and is served by its attributes (15).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.attributes import AttributeTable
from coterie.errors import ConfigError, DataError
from coterie.evaluation.holdout import TRAIN
from coterie.evaluation.leave_one_out import RANKED
from coterie.evaluation.rated import figures_of
from coterie.learning.mvmf import (
    MvmfSettings,
    apply,
    from_attributes,
    initial,
    initial_features,
    initial_server_state,
    item_server_step,
    layout,
    scores,
)
from coterie.learning.mvmf_local import UserData, UserUpdate, contribute, local_step, sample, user_factors
from coterie.learning.optimisers import ServerOptimiser
from coterie.rounds.gathering import gathered
from coterie.rounds.host_data import HostData
from coterie.rounds.measures import LARGEST, Measure, add_measures, measure_segments, measured_in, names_of
from coterie.rounds.system import Arrays, Summed, User
from coterie.rounds.training import Purpose
from coterie.secure_sum.plan import SumPlan
from coterie.wire.layout import Contribution, Layout, Segment

__all__ = ["CHOOSE_BY", "FIGURES", "MEASURES", "MvmfHost", "MvmfOwner", "MvmfPlan", "MvmfServer"]

_ROUNDING = 6
"""First element of the key under which the values of an evaluation are rounded; the local step has lower ones."""

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
class MvmfPlan:
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

    learning: MvmfSettings
    attributes: tuple[str, ...] = ()
    min_touch: int = 3
    new_items: bool = False

    def __post_init__(self) -> None:
        if self.min_touch < 1:
            raise ConfigError(f"min_touch is {self.min_touch}; expected at least 1")

    def to_json(self) -> str:
        """Return the settings as the contract's ``RunPlan.settings``."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> MvmfPlan:
        """Return the settings of a plan.

        Raises
        ------
        ConfigError
            When they are malformed, name something unknown, or a value is out of its range.
        """
        try:
            plain: dict[str, Any] = json.loads(text)
            learning = dict(plain.pop("learning"))
            server = ServerOptimiser(**learning.pop("server"))
            names = tuple(str(name) for name in plain.pop("attributes"))
            return cls(MvmfSettings(server=server, **learning), names, **plain)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"the settings of the plan are not those of FedMVMF: {error}",
                hint="the peers may be of another release",
            ) from error

    def layout(self, purpose: Purpose, n_items: int) -> Layout:
        """Return what a contribution of a purpose looks like."""
        match purpose:
            case Purpose.SUPPORTS:
                return Layout((Segment.whole("supports", (n_items,), 1),))
            case Purpose.EVALUATE:
                return Layout(measure_segments(MEASURES))
            case Purpose.TRAIN:
                return layout(self.learning, n_items, len(self.attributes))


class MvmfServer:
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

    asks_supports = True

    def __init__(self, plan: MvmfPlan, n_items: int, seed: int, groups: int) -> None:
        self.plan = plan
        self.metrics = names_of(MEASURES)
        self._n_items = n_items
        self._seed = seed
        self._groups = groups

    def initial(self) -> Arrays:
        """Return version 0 of the model, the optimiser's state, no supports and no predicted rows."""
        learning = self.plan.learning
        model = initial(learning, self._n_items, len(self.plan.attributes), self._seed)
        return {
            **_named(_MODEL, model),
            **_named(_SERVER, initial_server_state(learning, model)),
            "supports": np.zeros((self._groups, self._n_items), np.uint32),
            "popularity": np.zeros(self._n_items, np.float32),
            "predicted": np.zeros((self._n_items, learning.factors), np.float32),
            "has_predicted": np.zeros(self._n_items, np.uint8),
        }

    def layout(self, purpose: Purpose) -> Layout:
        """Return what a contribution of a purpose looks like."""
        return self.plan.layout(purpose, self._n_items)

    def apply(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the arrays after a sum."""
        if summed.purpose is Purpose.EVALUATE:
            return arrays
        if summed.purpose is Purpose.SUPPORTS:
            return self._supported(arrays, summed)
        kept = {name: value for name, value in arrays.items() if name != "pull"}
        model, state = apply(
            _unnamed(_MODEL, arrays),
            _unnamed(_SERVER, arrays),
            summed.sums,
            self.plan.learning,
            users=summed.users,
            population=summed.population,
            pull=arrays.get("pull"),
        )
        return {**kept, **_named(_MODEL, model), **_named(_SERVER, state)}

    def _supported(self, arrays: Arrays, summed: Summed) -> Arrays:
        own = summed.sums["supports"].astype(np.uint32)
        supports = arrays["supports"].copy()
        supports[summed.part] = own
        popularity = arrays["popularity"]
        # What users draw by stays the same during a run, also when groups are drawn anew.
        if summed.pass_number == 0:
            popularity = popularity + np.where(own >= self.plan.min_touch, own, 0).astype(np.float32)
        return {**arrays, "supports": supports, "popularity": popularity}

    def told(self, arrays: Arrays, answers: Sequence[Arrays]) -> Arrays:
        """Return the arrays with what data owners say of their items for the round that is applied next.

        Parameters
        ----------
        arrays : dict
        answers : sequence of dict
            Of `MvmfOwner.answer`.  Of an item of several owners pulls are added, predicted rows averaged.
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
        model = _unnamed(_MODEL, arrays)
        popularity = arrays["popularity"].astype(np.float32)
        new = (popularity == 0) & (arrays["has_predicted"] > 0)
        model["items"] = np.where(new[:, None], arrays["predicted"], model["items"]).astype(np.float32)
        if self.plan.learning.weights != "sampled":
            popularity = np.minimum(popularity, 1)
        if not len(self.plan.attributes):
            del model["attributes"]
        return {**model, "popularity": popularity.astype(np.float32)}

    def opened(self, arrays: Arrays) -> NDArray[np.bool_] | None:
        """Return which items each group may train."""
        opened: NDArray[np.bool_] = arrays["supports"] >= self.plan.min_touch
        return opened

    def measured(
        self, purpose: Purpose, sums: Mapping[str, NDArray[np.float64]]
    ) -> dict[str, tuple[float, float]]:
        """Return sum and count over users of the metrics in a sum."""
        return measured_in(sums, MEASURES)

    def figures(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, int]]:
        """Return means over users, F1 of the mean precision and recall, and RMSE over all ratings together."""
        return figures_of(totals)


def _named(prefix: str, arrays: Mapping[str, NDArray[np.float32]]) -> Arrays:
    return {prefix + name: value for name, value in arrays.items()}


def _unnamed(prefix: str, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
    return {
        name.removeprefix(prefix): value.astype(np.float32, copy=False)
        for name, value in arrays.items()
        if name.startswith(prefix)
    }


class MvmfHost:
    """The side of a host.

    Parameters
    ----------
    plan : MvmfPlan
    data : HostData
        Interactions without a rating teach nothing and are measured by nothing.
    keys : ndarray of uint64, shape (users,)
        Each user's own number, which nobody else knows.
    private : dict of str to ndarray
        ``factors``: what each user kept, float32 (users, K); changed in place.  Only SGD looks at it.
    seed : int
        Of the run.

    Attributes
    ----------
    withheld : ndarray of int, shape (users,)
        Rated items that were closed in the user's last round of training.
    measured : dict of str to ndarray of float64, shape (users,)
        Metrics as they were last measured for a contribution.

    Raises
    ------
    DataError
        A rating out of the plan's range, or attributes that are not those of the plan.
    """

    def __init__(
        self, plan: MvmfPlan, data: HostData, keys: NDArray[np.uint64], private: Arrays, seed: int
    ) -> None:
        self.plan = plan
        self.keys = keys
        self.private = private
        self.seed = seed
        self.withheld = np.zeros(len(data.users), np.int64)
        self.measured: Mapping[str, NDArray[np.float64]] = {}
        self._data = data
        self._users = _users(plan, data)
        self._rates = np.array([len(user.items) > 0 for user in self._users], np.bool_)
        self._rated = data.rated()
        self._drawn: dict[bytes, dict[int, UserData]] = {}

    def layout(self, purpose: Purpose) -> Layout:
        """Return what a contribution of a purpose looks like."""
        return self.plan.layout(purpose, len(self._data.items))

    def contributions(
        self,
        plan: SumPlan,
        model: Mapping[str, NDArray[np.float32]],
        opened: NDArray[np.bool_] | None,
        members: Mapping[int, Sequence[User]],
    ) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        """Yield the codes of each member's contribution, in any order."""
        purpose = Purpose(plan.purpose)
        pairs = [(member, user) for member, users in members.items() for user in users]
        match purpose:
            case Purpose.SUPPORTS:
                each = self._supports(pairs)
            case Purpose.EVALUATE:
                each = self._evaluated(plan, model, pairs)
            case Purpose.TRAIN:
                each = self._trained(plan, model, opened, pairs)
        return gathered(self.layout(purpose), members, each)

    def _supports(self, pairs: Sequence[tuple[int, User]]) -> Iterator[_Added]:
        for member, user in pairs:
            yield member, partial(_add_support, self._users[user.index].items)

    def _evaluated(
        self, plan: SumPlan, model: Mapping[str, NDArray[np.float32]], pairs: Sequence[tuple[int, User]]
    ) -> Iterator[_Added]:
        index = np.array([user.index for _, user in pairs], np.intp)
        self.measured = found = self.measure(model, index, round_=plan.round)
        absent = np.full(len(self.keys), np.nan)
        table = np.stack([found.get(name, absent)[index] for name in names_of(MEASURES)], axis=1)
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
    ) -> Iterator[_Added]:
        learning, whole = self.plan.learning, self._whole(model)
        for group in sorted({user.group for _, user in pairs}):
            own = [(member, user.index) for member, user in pairs if user.group == group]
            for member, user in own:
                if not self._rates[user]:
                    yield member, _add_nothing
            own = [(member, user) for member, user in own if self._rates[user]]
            index = np.array([user for _, user in own], np.intp)
            allowed = _open_anywhere(model) if opened is None else opened[group]
            for update in local_step(
                whole,
                self._sampled(index, model, allowed, plan.round),
                learning,
                self.keys[index],
                seed=self.seed,
                round_=plan.round,
                factors=self.private["factors"][index],
                allowed=allowed,
            ):
                member, user = own[update.index]
                # A step that diverged sends nothing, and must not be where the next one begins.
                if np.isfinite(update.kept).all():
                    self.private["factors"][user] = update.kept
                self.withheld[user] = update.withheld
                yield member, partial(_add_update, update)

    def _whole(self, model: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
        """Return the factors of a model; without attributes there is an empty table of them."""
        none = np.empty((0, self.plan.learning.factors), np.float32)
        return {"items": model["items"], "attributes": model.get("attributes", none)}

    def _sampled(
        self,
        index: NDArray[np.intp],
        model: Mapping[str, NDArray[np.float32]],
        allowed: NDArray[np.bool_],
        round_: int,
    ) -> list[UserData]:
        """Return users' data with the unrated items that have a weight; drawn once, unless the plan says otherwise."""
        learning = self.plan.learning
        held: dict[int, UserData] = {}
        if learning.weights == "sampled" and not learning.resample:
            drawn_by = allowed.tobytes() + model["popularity"].tobytes()
            if drawn_by not in self._drawn and len(self._drawn) > _DRAWINGS:
                self._drawn.clear()
            held = self._drawn.setdefault(drawn_by, held)
        fresh = [user for user in index.tolist() if user not in held]
        found = sample(
            [self._users[user] for user in fresh],
            self.keys[fresh],
            learning,
            len(self._data.items),
            seed=self.seed,
            popularity=model["popularity"],
            allowed=allowed,
            round_=round_,
        )
        held.update(zip(fresh, found, strict=True))
        return [held[user] for user in index.tolist()]

    def measure(
        self, model: Mapping[str, NDArray[np.float32]], index: NDArray[np.intp], *, round_: int = 0
    ) -> dict[str, NDArray[np.float64]]:
        """Return metrics of some users, float64 (users,) by name; they do not leave the host.

        Parameters
        ----------
        model : mapping
        index : ndarray of int
            Of the users; others have NaN.
        round_ : int
            By which unrated items are drawn, where they are drawn anew in each round.
        """
        factors = np.zeros((len(self.keys), self.plan.learning.factors), np.float32)
        factors[index] = self.factors(model, index, round_=round_)
        rated = self._rated
        if self.plan.new_items:
            rated = dataclasses.replace(rated, among=~_open_anywhere(model))
        return rated.measure(lambda users: scores(model, factors[users]), index)

    def factors(
        self, model: Mapping[str, NDArray[np.float32]], index: NDArray[np.intp], *, round_: int = 0
    ) -> NDArray[np.float32]:
        """Return factors of some users at a version, float32 (n, K): of one without ratings by its attributes."""
        learning, whole = self.plan.learning, self._whole(model)
        told = np.stack([self._users[user].attributes for user in index.tolist()]) if len(index) else None
        if told is None:
            return np.empty((0, learning.factors), np.float32)
        found = from_attributes(told, whole["attributes"], learning)
        rates = self._rates[index]
        own = index[rates]
        if learning.update == "sgd":
            found[rates] = self.private["factors"][own]
        elif len(own):
            # Whatever its group: a user is measured, and served, by all items that are open to anybody.
            allowed = _open_anywhere(model)
            users = self._sampled(own, model, allowed, round_)
            found[rates] = user_factors(whole, users, learning, allowed=allowed)
        return found

    def recommend(self, model: Mapping[str, NDArray[np.float32]], user: int) -> NDArray[np.float32]:
        """Return a user's predicted ratings of all items, float32 (I,)."""
        found: NDArray[np.float32] = scores(model, self.factors(model, np.array([user], np.intp)))[0]
        return found


_DRAWINGS = 256
"""Lists of open items for which drawn items are remembered: more than a run has groups on one host."""

_Added = tuple[int, Callable[[Contribution], None]]


def _open_anywhere(model: Mapping[str, NDArray[np.float32]]) -> NDArray[np.bool_]:
    opened: NDArray[np.bool_] = model["popularity"] > 0
    return opened


def _users(plan: MvmfPlan, data: HostData) -> list[UserData]:
    """Return what each user learns from: its rated items of the training part, ascending, and its attributes."""
    n_users = len(data.users)
    table = data.attributes
    if table is None:
        table = AttributeTable(plan.attributes, np.full((n_users, len(plan.attributes)), np.nan, np.float32))
    if table.names != plan.attributes:
        raise DataError(
            f"this host's attributes are {', '.join(table.names) or 'none'}; the run's are "
            f"{', '.join(plan.attributes) or 'none'}",
            hint="the columns of the attributes file must be those of the run, in the same order",
        )
    own = (data.part != RANKED) & np.isfinite(data.rating)
    lowest, highest = plan.learning.lowest, plan.learning.highest
    beyond = own & ((data.rating < lowest) | (data.rating > highest))
    if beyond.any():
        raise DataError(
            f"{np.count_nonzero(beyond)} ratings of this host are out of range; expected {lowest:g} to {highest:g}",
            hint="mvmf.lowest and mvmf.highest say what the range is",
        )
    train = np.flatnonzero(own & (data.part == TRAIN))
    train = train[np.lexsort((data.item[train], data.user[train]))]
    user, item, rating = data.user[train], data.item[train], data.rating[train]
    bounds = np.searchsorted(user, np.arange(n_users + 1))
    return [
        UserData(item[first:last], rating[first:last], table.values[position])
        for position, (first, last) in enumerate(pairwise(bounds.tolist()))
    ]


def _add_support(items: NDArray[np.integer], contribution: Contribution) -> None:
    # Whole numbers are not rounded: nothing is drawn.
    contribution.add("supports", np.ones(len(items)), np.random.default_rng(0), rows=items)


def _add_measures(values: NDArray[np.float64], rng: np.random.Generator, contribution: Contribution) -> None:
    add_measures(contribution, values, rng)


def _add_update(update: UserUpdate, contribution: Contribution) -> None:
    contribute(update, contribution)


def _add_nothing(contribution: Contribution) -> None:
    """Of a user who has rated nothing: who joins later is not learned from."""


class MvmfOwner:
    """The side of a data owner that knows features of its items: the paper's item server.

    Parameters
    ----------
    plan : MvmfPlan
    items : ndarray of int, shape (n,)
        Its items, by position in the catalogue.
    features : AttributeTable
        A row for each of them.
    seed : int
        Of the run.

    Raises
    ------
    DataError
        Another number of rows than items.
    """

    def __init__(
        self, plan: MvmfPlan, items: NDArray[np.integer], features: AttributeTable, seed: int
    ) -> None:
        if len(features) != len(items):
            raise DataError(f"features of {len(features)} items for the {len(items)} of this owner")
        order = np.argsort(items)
        self._learning = plan.learning
        self._items = items[order].astype(np.int64)
        self._features = features.values[order]
        self.private: Arrays = {"factors": initial_features(plan.learning, len(features.names), seed)}
        """``V`` as the last round left it, float32 (n_features, K); only SGD looks at it."""

    def answer(self, model: Mapping[str, NDArray[np.float32]]) -> Arrays:
        """Return what is told of the items in a round, and let ``V`` move on.

        Parameters
        ----------
        model : mapping
            The version that the round trains.

        Returns
        -------
        dict of str to ndarray
            ``items``, uint32 (n,), ascending, and ``pull``, float32 (n, K): the sum of :math:`f(j, d)` over the
            features of items that are trained; ``new_items``, uint32 (m,), and ``rows``, float32 (m, K): the factors
            that features predict (17) of the others, of which any feature is known.
        """
        trained = _open_anywhere(model)[self._items]
        own, others = self._items[trained], self._items[~trained]
        # V is what explains the features of items whose factors are learned: predicted ones would confirm themselves.
        factors, pull = item_server_step(
            model["items"][own], self._features[trained], self.private["factors"], self._learning
        )
        self.private = {"factors": factors}
        told = self._features[~trained]
        known = ~np.isnan(told).all(axis=1) if told.shape[1] else np.zeros(len(told), np.bool_)
        rows = from_attributes(told[known], factors, self._learning)
        return {
            "items": own.astype(np.uint32),
            "pull": pull,
            "new_items": others[known].astype(np.uint32),
            "rows": rows,
        }
