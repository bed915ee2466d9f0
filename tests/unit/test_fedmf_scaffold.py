"""SCAFFOLD in FedMF: unlike users agree on the minimum, and what changes of control variates would tell."""

from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from coterie.config.run import RunSettings
from coterie.data import SyntheticSpec, generate, random
from coterie.data.keyed_order import key_hash
from coterie.errors import ConfigError
from coterie.evaluation.holdout import TRAIN
from coterie.rounds.sides import Summed, User
from coterie.rounds.training import Purpose
from coterie.studies.run_plan import run_plan
from coterie.systems.fedmf.host import FedMfHost
from coterie.systems.fedmf.local_step import local_step
from coterie.systems.fedmf.mathematics import apply, initial, initial_factors, layout, moving, scaled
from coterie.systems.fedmf.server import FedMfServer
from coterie.systems.fedmf.settings import FedMfSettings
from coterie.systems.shared.factor_steps import UserData
from coterie.systems.shared.host_data import HostData

DATA = generate(SyntheticSpec(users=60, items=80, interactions=1_500, genres=4))
SPLIT = random(DATA, validation=0.1, seed=3)
PLAN = FedMfSettings(factors=4, local_epochs=4, scaffold=True, min_touch=2, bits=24)


class Federation:
    """A server's and a host's side, whose users take part in rounds by their groups."""

    def __init__(self, plan, data, groups, private=None):
        self.plan, self.groups = plan, np.asarray(groups)
        keys = key_hash(data.users, 0)

        def keep(made):
            return made if private is None else {**made, **private}

        self.host = FedMfHost(plan, data, keys, 0, keep)
        self.server = FedMfServer(plan, len(data.items), 0, int(self.groups.max()) + 1)
        self.arrays = self.server.initial()
        self.round = 0
        self.lost = ()
        for group in range(int(self.groups.max()) + 1):
            self.sum(Purpose.SUPPORTS, (group,))

    def contributed(self, purpose, users):
        """Let users take part in a round; return the decoded sum over those of them who are heard, all but ``lost``."""
        self.round += 1
        asked = SimpleNamespace(purpose=purpose.value, round=self.round, pass_number=0, noise_floor=0)
        members = {int(user): [User(int(user), int(self.groups[user]))] for user in users}
        opened = None if purpose is Purpose.SUPPORTS else self.server.opened(self.arrays)
        shape = self.server.layout(purpose)
        self.codes = codes = dict(self.host.contributions(asked, self.model, opened, members))
        heard = [user for user in codes if user not in self.lost]
        return shape.decode(np.sum([codes[user] for user in heard], axis=0, dtype=np.uint32), len(heard))

    def sum(self, purpose, groups):
        """Form one sum over whole groups."""
        users = np.flatnonzero(np.isin(self.groups, groups))
        sums = self.contributed(purpose, users)
        heard = len(users) - np.isin(users, self.lost).sum()
        shares = np.zeros(int(self.groups.max()) + 1)
        shares[list(groups)] = heard / len(users)
        summed = Summed(purpose, sums, int(heard), 0, groups[0], shares, len(self.groups))
        self.arrays = self.server.apply(self.arrays, summed)

    @property
    def model(self):
        return self.server.model(self.arrays)

    def mean_control(self):
        """Return the mean over groups of the mean of users' own control variates, over those who train an item."""
        opened = self.server.opened(self.arrays)
        total = np.zeros((opened.shape[1], self.plan.width))
        for group, allowed in enumerate(opened):
            control, count = np.zeros_like(total), np.zeros(len(total))
            for user in np.flatnonzero(self.groups == group):
                items = self.host._users[user].items
                control[items] += self.host.private["control"][user, items]
                count[items] += 1
            total[allowed] += (control / np.maximum(count, 1)[:, None])[allowed]
        return total / np.maximum(opened.sum(axis=0), 1)[:, None]


def one_row(p, centre, groups, scaffold, rounds, lost=()):
    """Return a federation that has trained one row, which each user, with a fixed p, would have at its own centre.

    ``lost`` has the users whose contributions are lost in each of the first rounds.
    """
    plan = FedMfSettings(
        biases=False,
        factors=1,
        local_epochs=10,
        rate=0.02,
        private_rate=1e-12,
        ridge=0.0,
        lowest=-10.0,
        highest=10.0,
        min_touch=1,
        bits=24,
        scaffold=scaffold,
    )
    users = np.arange(len(p))
    rating = (p * centre).astype(np.float32)
    data = HostData(
        [str(n) for n in users], ["x"], users, np.zeros_like(users), np.full(len(p), TRAIN, np.uint8), rating
    )
    small = Federation(plan, data, groups, {"factors": p[:, None].astype(np.float32)})
    kinds = int(max(groups)) + 1
    for n in range(rounds):
        small.lost = lost[n] if n < len(lost) else ()
        small.sum(Purpose.TRAIN, (n % kinds,))
    return small


def end(*given):
    return one_row(*given).model["items"].item()


P, CENTRE = np.array([1.0, 3.0]), np.array([2.0, -1.0])
BEST = (P**2 * CENTRE).sum() / (P**2).sum()
"""Minimum of the sum of (p (centre - q))^2 over both users."""


def test_two_unlike_users_end_at_the_minimum_and_without_correction_beside_it():
    # Ten steps take each user this share of the way to its own minimum, and the mean goes where both forces balance.
    gone = 1 - (1 - 2 * 0.02 * P**2) ** 10
    beside = (gone * CENTRE).sum() / gone.sum()
    assert abs(beside - BEST) > 0.4
    assert end(P, CENTRE, [0, 0], False, 200) == pytest.approx(beside, abs=1e-4)
    assert end(P, CENTRE, [0, 0], True, 200) == pytest.approx(BEST, abs=1e-4)


def test_two_unlike_users_in_rounds_of_their_own_end_at_the_minimum_too():
    assert abs(end(P, CENTRE, [0, 1], False, 400) - BEST) > 0.1
    assert end(P, CENTRE, [0, 1], True, 400) == pytest.approx(BEST, abs=1e-4)


def test_a_contribution_that_is_lost_leaves_an_error_that_stays_and_is_known():
    """The user keeps a control variate of which the server has not heard: the gradient ends at that error."""
    p, centre = np.array([1.0, 3.0, 2.0, 1.0]), np.array([2.0, -1.0, 0.5, 1.0])
    best = (p**2 * centre).sum() / (p**2).sum()
    small = one_row(p, centre, [0] * 4, True, 300, [(3,), ()])
    error = small.host.private["control"].mean() - small.model["control"].item()
    slope = 2 * (p**2).mean()
    off = small.model["items"].item() - best
    assert off == pytest.approx(error / slope, abs=1e-4)
    assert 0.01 < abs(off) < abs(end(p, centre, [0] * 4, False, 300) - best)


def held():
    return HostData(DATA.users, DATA.items, DATA.user, DATA.item, SPLIT.part, DATA.rating)


@pytest.mark.parametrize("change_bound", [4.0, 0.05])
@pytest.mark.parametrize("groups", [np.zeros(60, int), np.arange(60) % 3], ids=["all", "three groups"])
def test_the_server_comes_to_the_mean_of_control_variates_that_it_never_sees(groups, change_bound):
    plan = PLAN.model_copy(update={"change_bound": change_bound, "min_touch": 7})
    small = Federation(plan, held(), groups)
    parts = [tuple(np.unique(groups))] if not groups.any() else [(1,), (0,), (2,), (0,)]
    for part in parts * 2:
        small.sum(Purpose.TRAIN, part)
        np.testing.assert_allclose(small.model["control"], small.mean_control(), atol=2e-5)
    closed = ~small.server.opened(small.arrays).any(axis=0)
    assert closed.any()
    assert not small.model["control"][closed].any()
    assert np.abs(small.model["control"][~closed]).max() > 1e-2


def test_a_host_that_starts_again_goes_on_with_the_control_variates_that_it_kept():
    whole, begun = Federation(PLAN, held(), np.zeros(60, int)), Federation(PLAN, held(), np.zeros(60, int))
    whole.sum(Purpose.TRAIN, (0,))
    begun.sum(Purpose.TRAIN, (0,))
    kept = {name: value.copy() for name, value in begun.host.private.items()}
    again = Federation(PLAN, held(), np.zeros(60, int), kept)
    again.arrays, again.round = begun.arrays, begun.round
    forgot = Federation(PLAN, held(), np.zeros(60, int), {"factors": kept["factors"]})
    forgot.arrays, forgot.round = begun.arrays, begun.round
    for one in (whole, again, forgot):
        one.sum(Purpose.TRAIN, (0,))
    np.testing.assert_array_equal(again.model["items"], whole.model["items"])
    assert np.abs(forgot.model["items"] - whole.model["items"]).max() > 1e-3


# --- The local step -------------------------------------------------------------------------------------------------

ITEMS, K = 40, 5
KEYS = [101, 7, 33, 12]


def people():
    rng = np.random.default_rng(0)
    return [
        UserData(rng.choice(ITEMS, size, replace=False), rng.integers(1, 6, size).astype(np.float32))
        for size in (3, 25, 0, 11)
    ]


def state(options):
    rng = np.random.default_rng(1)
    of_items = moving(options)[1].astype(np.float32)
    model = initial(options, ITEMS, 1)
    model["control"] = 0.2 * of_items * rng.standard_normal((ITEMS, options.width)).astype(np.float32)
    own = 0.2 * of_items * rng.standard_normal((len(KEYS), ITEMS, options.width)).astype(np.float32)
    return model, own


def stepped(options, chosen=range(4)):
    model, own = state(options)
    users, keys = people(), np.array(KEYS)[list(chosen)]
    kept = initial_factors(options, keys)
    found = local_step(
        model,
        [users[n] for n in chosen],
        options,
        keys,
        factors=kept,
        seed=1,
        round_=3,
        controls=[own[n] for n in chosen],
    )
    return sorted(found, key=lambda one: one.index)


@pytest.mark.parametrize("biases", [False, True])
def test_steps_are_the_printed_ones_rating_by_rating(biases):
    options = FedMfSettings(biases=biases, factors=3, ridge=0.1, local_epochs=5, rate=0.2, scaffold=True)
    model, own = state(options)
    of_users, of_items = moving(options)
    q, common = model["items"].astype(np.float64), model["control"]
    for user, (update, data) in enumerate(zip(stepped(options), people(), strict=True)):
        p, copy = initial_factors(options, KEYS)[user].astype(np.float64), q.copy()
        taken = np.zeros_like(q)
        ratings = scaled(options, data.ratings).astype(np.float64)
        for _ in range(options.local_epochs):
            dp, dq = 2 * options.ridge * p, np.zeros_like(q)
            for item, rating in zip(data.items, ratings, strict=True):
                missed = rating - p @ copy[item]
                dp = dp - 2 * missed * copy[item] / len(data.items)
                dq[item] = of_items * (-2 * missed * p + 2 * options.ridge * copy[item])
                taken[item] += dq[item] / options.local_epochs
                dq[item] += common[item] - own[user, item]
            p, copy = p - options.private_rate * of_users * dp, copy - options.rate * dq
        np.testing.assert_allclose(update.kept, p, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(update.change, (copy - q)[update.rows], rtol=1e-5, atol=1e-6)
        # Option II: the mean of the gradients that were taken.
        np.testing.assert_allclose(update.control, taken[update.rows], rtol=1e-4, atol=1e-6)


def test_a_user_contributes_the_same_bits_alone_and_beside_others():
    options = FedMfSettings(factors=3, local_epochs=5, scaffold=True)
    together = stepped(options)
    for n in range(4):
        (alone,) = stepped(options, [n])
        for name in ("rows", "change", "kept", "control"):
            np.testing.assert_array_equal(getattr(alone, name), getattr(together[n], name))


# --- What changes of control variates would tell --------------------------------------------------------------------


def counted_raters(sums, model, travelled):
    """Return how many users behind a sum touched each row, from sums of changes of rows and of control variates."""
    # Each user's control variate changes by -c - change / (K eta), so the sum has as many c as users.
    change = -(sums["control"] + sums["items"] / travelled)
    largest = np.abs(model["control"]).argmax(axis=1)[:, None]
    c = np.take_along_axis(model["control"].astype(np.float64), largest, axis=1)[:, 0]
    found = np.take_along_axis(change, largest, axis=1)[:, 0]
    return np.divide(found, c, out=np.zeros_like(c), where=np.abs(c) > 1e-3)


def test_sums_as_printed_would_tell_who_of_a_random_cohort_rated_what_and_sums_of_rows_alone_do_not():
    """The attack on the paper's form: the server learns how many users of each cohort have rated each item."""
    small = Federation(PLAN, held(), np.zeros(60, int))
    small.sum(Purpose.TRAIN, (0,))
    model, kept = small.model, small.host.private["control"].copy()
    chosen = np.random.default_rng(0).permutation(60)[:20]
    opened = small.server.opened(small.arrays)[0]
    raters = np.zeros(len(DATA.items))
    for user in chosen:
        raters[small.host._users[user].items] += 1
    sums = small.contributed(Purpose.TRAIN, chosen)
    travelled = PLAN.local_epochs * PLAN.rate
    changes = (small.host.private["control"] - kept).sum(axis=0, dtype=np.float64)
    printed = counted_raters({**sums, "control": changes}, model, travelled)
    told = opened & (np.abs(model["control"]).max(axis=1) > 1e-2)
    assert told.sum() > 50
    assert np.ptp(raters[told]) > 5
    np.testing.assert_allclose(printed[told], raters[told], atol=0.1)
    # As built there is no sum of control variates: the only one that the server has is computed with what it expects.
    assert set(sums) == {"items"}
    assert {one.name for one in layout(PLAN, len(DATA.items)).segments} == {"items"}


def test_a_server_that_sees_single_contributions_can_follow_control_variates_and_so_undo_the_correction():
    """In clear control variates hide nothing: they begin at 0, and each contribution tells the next ones."""
    small = Federation(PLAN, held(), np.zeros(60, int))
    followed = np.zeros_like(small.host.private["control"][0], np.float64)
    opened = small.server.opened(small.arrays)[0]
    touched = small.host._users[7].items[opened[small.host._users[7].items]]
    for _ in range(3):
        common = small.model["control"].astype(np.float64)
        small.sum(Purpose.TRAIN, (0,))
        sent = small.server.layout(Purpose.TRAIN).decode(small.codes[7], 1)["items"]
        followed[touched] -= (common + sent / (PLAN.local_epochs * PLAN.rate))[touched]
    assert np.abs(followed).max() > 0.1
    np.testing.assert_allclose(followed, small.host.private["control"][7], atol=1e-4)


@pytest.mark.parametrize("kinds", [1, 3])
def test_two_versions_tell_participants_no_more_than_which_groups_train_an_item(kinds):
    small = Federation(PLAN.model_copy(update={"min_touch": 6}), held(), np.arange(60) % kinds)
    before = small.model
    small.sum(Purpose.TRAIN, (0,))
    opened = small.server.opened(small.arrays)
    after, travelled = small.model, PLAN.local_epochs * PLAN.rate
    # What a participant knows: both versions, of which the model has moved by the mean over the cohort's raters.
    mean = -(after["items"].astype(np.float64) - before["items"]) / travelled
    largest = np.abs(mean).argmax(axis=1)[:, None]
    moved, mean = (np.take_along_axis(one, largest, axis=1)[:, 0] for one in (after["control"], mean))
    told = opened[0] & (np.abs(mean) > 1e-3)
    assert told.sum() > 10
    np.testing.assert_allclose(moved[told] / mean[told], 1 / opened.sum(axis=0)[told], rtol=1e-3)
    assert len(set(small.arrays["supports"][0][told])) > 3


# --- Settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"local_epochs": 1},
            "with local_epochs 1: a single step drifts nowhere; expected local_epochs above 1",
        ),
        ({"steps": "sum"}, "tells everybody how many users have rated an item; expected steps 'mean'"),
        ({"stragglers": 0.2}, "all users take the same number of steps; expected stragglers 0"),
        ({"proximal": 0.1}, "would have the proximal term in it; expected proximal 0"),
        ({"samples": 2}, "rows of sampled items have made-up gradients; expected samples 0"),
    ],
    ids=str,
)
def test_what_does_not_go_with_control_variates_is_refused_with_the_reason(change, words):
    with pytest.raises(ValidationError) as caught:
        FedMfSettings(scaffold=True, **change)
    assert words in str(caught.value)
    FedMfSettings(**change)


def run_with(**rounds):
    return RunSettings.model_validate({"system": "fedmf", "fedmf": {"scaffold": True}, "rounds": rounds})


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        ({"cohorts": "random"}, "of whom it knows the number in fixed groups alone"),
        ({"cohorts": "independent"}, "of whom it knows the number in fixed groups alone"),
        ({"cohorts": "groups", "redraw": 5}, "groups that are not drawn anew"),
        ({"cohorts": "groups", "cohort": 200, "group": 100}, "expected a cohort no larger"),
        ({"experiment": False, "most_users": 900}, "expected most_users 0"),
        ({"aggregation": {"rule": "median"}}, "expected rule sum and no norm_bound"),
        ({"aggregation": {"norm_bound": 2.0}}, "expected rule sum and no norm_bound"),
        (
            {"privacy": {"place": "local", "mechanism": "gaussian", "noise": 1.0, "clip": 1.0}},
            "expected place 'none'",
        ),
    ],
    ids=str,
)
def test_sums_over_raters_that_the_server_cannot_know_are_refused(rounds, words):
    with pytest.raises(ValidationError) as caught:
        run_with(**rounds)
    assert words in str(caught.value)
    assert words not in str(RunSettings.model_validate({"system": "fedmf"}).own.problems(run_with()))


def test_the_signed_plan_names_control_variates_only_where_there_are_some():
    plain, corrected = (
        run_plan(RunSettings.model_validate({"system": "fedmf", "fedmf": fedmf}), run_id="a-run", seed=0)
        for fedmf in ({}, {"scaffold": True})
    )
    assert "scaffold" not in plain.settings
    assert '"scaffold":true' in corrected.settings
    assert FedMfSettings.from_json(corrected.settings).scaffold
    assert FedMfSettings(scaffold=True).variant.endswith(", SCAFFOLD")


def test_shares_of_groups_and_kept_control_variates_have_to_be_there():
    options = FedMfSettings(factors=3, scaffold=True)
    model = initial(options, ITEMS, 1)
    sums = {"items": np.zeros((ITEMS, options.width))}
    with pytest.raises(
        ConfigError, match=r"shares of groups: none; with scaffold expected one for each of 40 items"
    ):
        apply(model, sums, options, raters=np.ones(ITEMS))
    with pytest.raises(ValueError, match=r"control variates of 0 users; with scaffold expected those of 4"):
        next(
            local_step(
                model, people(), options, KEYS, factors=initial_factors(options, KEYS), seed=1, round_=1
            )
        )
