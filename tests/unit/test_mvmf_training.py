"""FedMVMF over rounds, in memory: it learns, rounding costs nothing, attributes serve new users and new items."""

from functools import cache

import numpy as np
import pytest

from coterie.data import SyntheticSpec, cold_items, cold_users, generate, generate_user_attributes, random
from coterie.data.attributes import item_attributes
from coterie.evaluation import Rated, damped_mean, figures
from coterie.secure_sum.contribution import Contribution
from coterie.systems.fedmvmf.mathematics import initial_features, item_server_step
from coterie.systems.shared.factor_settings import FactorSettings
from coterie.systems.shared.factor_steps import UserData, contribute, local_step, sample, user_factors
from coterie.systems.shared.factors import (
    apply,
    from_attributes,
    initial,
    initial_factors,
    initial_server_state,
    layout,
    scores,
)

SPEC = SyntheticSpec(users=200, items=300, interactions=8_000, genres=5)
DATA, TOLD = generate(SPEC), generate_user_attributes(SPEC)
FEATURES = item_attributes(DATA)
SMALL = FactorSettings(factors=4, ridge=3.0)


class Host:
    """All users of a training part on one host, and the servers' steps."""

    def __init__(self, options, part, *, attributes=TOLD.values, features=FEATURES.values, allowed=None):
        order = np.lexsort((DATA.item, DATA.user))
        order = order[part[order]]
        user, item, rating = DATA.user[order], DATA.item[order], DATA.rating[order]
        self.learning = np.unique(user)
        self.options, self.attributes, self.features, self.allowed = options, attributes, features, allowed
        self.keys = self.learning.astype(np.int64) + 1_000
        bounds = np.searchsorted(user, [self.learning, self.learning + 1]).T
        users = [
            UserData(item[first:last], rating[first:last], attributes[u])
            for u, (first, last) in zip(self.learning, bounds, strict=True)
        ]
        popularity = np.bincount(item, minlength=len(DATA.items))
        self.users = sample(
            users, self.keys, options, len(DATA.items), seed=1, popularity=popularity, allowed=allowed
        )
        self.model = initial(options, len(DATA.items), attributes.shape[1], 1)
        self.state = initial_server_state(options, self.model)
        self.v = initial_features(options, features.shape[1], 1)
        self.kept = initial_factors(options, self.keys)

    def run(self, rounds, *, rounded=True, cohort=None):
        """Run rounds; return the users' loss in each."""
        shape = layout(self.options, len(DATA.items), self.attributes.shape[1])
        rng, losses = np.random.default_rng(0), []
        for t in range(rounds):
            members = np.arange(len(self.users))
            if cohort:
                members = np.sort(rng.choice(members, cohort, replace=False))
            contribution = Contribution(shape)
            exact = {each.name: np.zeros(each.shape) for each in shape.segments}
            losses.append(0.0)
            for update in local_step(
                self.model,
                [self.users[m] for m in members],
                self.options,
                self.keys[members],
                seed=1,
                round_=t,
                factors=self.kept[members],
                allowed=self.allowed,
            ):
                contribute(update, contribution)
                contribution.count()
                exact["items"][update.rows] += update.item_gradients
                if "attributes" in exact:
                    exact["attributes"] += update.attribute_gradients
                self.kept[members[update.index]] = update.kept
                losses[-1] += update.loss
            sums = shape.decode(contribution.codes(), contribution.users) if rounded else exact
            self.v, pull = item_server_step(self.model["items"], self.features, self.v, self.options)
            self.model, self.state = apply(
                self.model,
                self.state,
                sums,
                self.options,
                users=len(members),
                population=len(self.users),
                pull=pull,
            )
        return losses

    def factors(self):
        """Return factors of all users: the learning ones by their ratings, the others by their attributes."""
        found = from_attributes(self.attributes, self.model["attributes"], self.options)
        solved = self.options.update == "semi-als"
        found[self.learning] = (
            user_factors(self.model, self.users, self.options, allowed=self.allowed) if solved else self.kept
        )
        return found

    def figures(self, split, among=None, items=None):
        """Return the figures of the test part."""
        model = self.model if items is None else {**self.model, "items": items}
        factors = self.factors()
        rated = Rated(
            len(DATA.users), len(DATA.items), DATA.user, DATA.item, DATA.rating, split.part, among=among
        )
        return figures(rated.measure(lambda users: scores(model, factors[users])))


SEVERAL = range(6)
"""Seeds of splits of which a test takes the mean."""

EXISTING = [random(DATA, validation=0, seed=seed) for seed in SEVERAL[:3]]


@cache
def trained(seed=0, *, rounded=True, **options):
    """Return a host after ten rounds on the training part of a split, and the users' loss in each round."""
    host = Host(SMALL.model_copy(update=options), EXISTING[seed].train)
    return host, host.run(10, rounded=rounded)


def trained_figures(**options):
    """Return the means of figures over the splits of all users and items."""
    return means_of([trained(seed, **options)[0].figures(split) for seed, split in enumerate(EXISTING)])


def means_of(found):
    """Return the mean of each figure over several splits: a single one has few test ratings, new users or items."""
    return {name: np.mean([one[name] for one in found]) for name in ("ndcg_rated@10", "recall@10")}


@pytest.mark.parametrize(
    "options",
    [{}, {"weights": "incl-unc"}, {"weights": "obs-only"}, {"update": "sgd", "private_rate": 1e-3}],
    ids=str,
)
def test_rounds_lower_the_cost(options):
    _, losses = trained(**options)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("weights", ["sampled", "obs-only"])
def test_rounds_come_to_order_ratings_better_than_means_do(weights):
    by_mean = []
    for split in EXISTING:
        means = damped_mean(DATA.item[split.train], DATA.rating[split.train], len(DATA.items))
        table = np.broadcast_to(means, (len(DATA.users), len(DATA.items)))
        rated = Rated(len(DATA.users), len(DATA.items), DATA.user, DATA.item, DATA.rating, split.part)
        by_mean.append(figures(rated.measure(table.__getitem__)))
    learnt = trained_figures(weights=weights)
    assert learnt["ndcg_rated@10"] > means_of(by_mean)["ndcg_rated@10"] + 0.005


def test_weights_on_unrated_items_find_more_liked_ones_among_all():
    recall = {
        weights: trained_figures(weights=weights)["recall@10"]
        for weights in ("obs-only", "sampled", "incl-unc")
    }
    assert recall["incl-unc"] > 1.1 * recall["obs-only"]
    assert recall["sampled"] > 1.1 * recall["obs-only"]


def test_rounding_to_codes_of_24_bits_changes_no_figure_by_a_thousandth():
    found = trained(bits=24)[0].figures(EXISTING[0])
    exact = trained(rounded=False)[0].figures(EXISTING[0])
    for name, value in exact.items():
        assert found[name] == pytest.approx(value, rel=1e-3), name


def test_cohorts_of_a_quarter_learn_what_all_users_at_once_do():
    found = []
    for split in EXISTING:
        host = Host(SMALL, split.train)
        host.run(20, cohort=50)
        found.append(host.figures(split))
    assert means_of(found)["ndcg_rated@10"] > trained_figures()["ndcg_rated@10"] - 0.015


def test_attributes_tell_what_suits_new_users():
    # Users of whom nothing but the region is known, which says nothing.
    region = [column for column, name in enumerate(TOLD.names) if name.startswith("region")]
    with_crowd, without = [], []
    for seed in SEVERAL:
        split = cold_users(DATA, 0.2, seed=seed)
        for found, attributes in ((with_crowd, TOLD.values), (without, TOLD.values[:, region])):
            host = Host(SMALL, split.train, attributes=attributes)
            host.run(10)
            found.append(host.figures(split))
    better, worse = means_of(with_crowd), means_of(without)
    for name, value in better.items():
        assert value > worse[name] + 0.01, name


def test_features_tell_whom_new_items_suit():
    rng = np.random.default_rng(0)
    by_features, by_chance = [], []
    for seed in SEVERAL:
        split = cold_items(DATA, 0.2, seed=seed)
        warm = np.zeros(len(DATA.items), bool)
        warm[DATA.item[split.train]] = True
        host = Host(SMALL, split.train, allowed=warm)
        host.run(10)
        items = host.model["items"].copy()
        items[~warm] = from_attributes(FEATURES.values[~warm], host.v, SMALL)
        by_features.append(host.figures(split, ~warm, items))
        for _ in range(4):
            shuffled = items.copy()
            shuffled[~warm] = rng.permuted(items[~warm], axis=0)
            by_chance.append(host.figures(split, ~warm, shuffled))
    better, worse = means_of(by_features), means_of(by_chance)
    for name, value in better.items():
        assert value > worse[name] + 0.01, name
