"""Differential privacy of sums in rounds: clip, noise, room of codes, accounting, plans, and whole runs."""

import dataclasses
import math
import os
from decimal import Decimal
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest, laplace
from scipy.stats import norm as gauss

from coterie.config.run import RunSettings
from coterie.errors import ConfigError
from coterie.rounds.privacy import (
    check_plan,
    epsilon,
    evaluated_in,
    most_sums,
    privacy_of,
    spent,
    with_taken,
)
from coterie.rounds.sides import User
from coterie.rounds.training import Purpose
from coterie.secure_sum.clipped import ClippedContribution, Clipper
from coterie.secure_sum.contribution import Layout, Segment
from coterie.secure_sum.discrete_noise import (
    LARGEST_SCALE,
    LARGEST_VARIANCE,
    _below_exponential,
    _bounds,
    _chosen,
    _decided,
    _Gaussian,
    _Laplace,
    _smaller,
    discrete_gaussian,
    discrete_laplace,
)
from coterie.secure_sum.noise_accounting import concentrated, epsilon_of
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.privacy import EXACT, Privacy, check_privacy
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load, make_feed
from coterie.studies.run_plan import run_plan
from coterie.systems.ease.settings import EaseSettings
from coterie.systems.private_sides import _more, _shortened, planned_host_side
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.members_of_host import gathered

LAYOUT = Layout(
    (
        Segment("items", (6, 2), 1.0, 12, "touched"),
        Segment.whole("touched", (6,), 1),
        Segment("metrics", (2,), 1.0, 12, measures=True),
        dataclasses.replace(Segment.whole("wholes", (2,), 500), measures=True),
    )
)
GAUSSIAN = Privacy("distributed", "gaussian", noise=2.0, clip=0.5, most_items=3, most_metrics=8.0)
LAPLACE = Privacy("local", "laplace", noise=2.0, clip=0.5, most_items=3, most_metrics=8.0)


# --- samples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1, 2, 3, 10, 31, 32, 100])
def test_samples_have_the_probabilities_of_the_discrete_laplace(scale):
    count, furthest = 200_000, 4 * scale
    drawn = discrete_laplace(scale, count, np.random.default_rng(scale).bytes)
    x = np.arange(-furthest, furthest + 1)
    p = (math.exp(1 / scale) - 1) / (math.exp(1 / scale) + 1) * np.exp(-np.abs(x) / scale)
    inside = np.abs(drawn) <= furthest
    seen = np.bincount(drawn[inside] + furthest, minlength=len(x))
    beyond = count * (1 - p.sum())
    square = ((seen - count * p) ** 2 / (count * p)).sum() + ((~inside).sum() - beyond) ** 2 / beyond
    assert square < len(p) + 10 * math.sqrt(2 * len(p))
    # Another scale would be told apart.
    other = np.exp(-np.abs(x) / (1.1 * scale)) * np.tanh(1 / (2.2 * scale))
    assert ((seen - count * other) ** 2 / (count * other)).sum() > 2 * square + 100


@pytest.mark.parametrize("scale", [10**6, LARGEST_SCALE])
def test_samples_of_large_scales_are_those_of_the_discrete_laplace(scale):
    drawn = discrete_laplace(scale, 100_000, np.random.default_rng(scale).bytes) / scale
    assert kstest(drawn, laplace.cdf).pvalue > 1e-4
    assert kstest(drawn, laplace(scale=1.05).cdf).pvalue < 1e-4
    # The law begins anew beyond its blocks.
    beyond = np.abs(drawn) > 8
    assert abs(beyond.sum() - 100_000 * math.exp(-8)) < 30


@pytest.mark.parametrize("scale", [0, -3, LARGEST_SCALE + 1])
def test_scales_out_of_range_are_refused(scale):
    with pytest.raises(ValueError, match=f"a scale of {scale}; expected 1 to"):
        discrete_laplace(scale, 1)


@pytest.mark.parametrize("variance", [10**8 + 1, 10**12, LARGEST_VARIANCE])
def test_samples_of_large_variances_are_those_of_the_discrete_gaussian(variance):
    drawn = discrete_gaussian(variance, 100_000, np.random.default_rng(variance).bytes) / math.sqrt(variance)
    # Steps are so fine that the distribution function is that of the continuous one.
    assert kstest(drawn, gauss.cdf).pvalue > 1e-4
    assert kstest(drawn, gauss(scale=1.05).cdf).pvalue < 1e-4


@pytest.mark.parametrize(("over", "under"), [(1, 2), (25, 49), (0, 3), (9, 5), (2**50 + 1, 3 * 2**49)])
def test_values_of_a_block_are_kept_by_the_quotient_of_their_weights(over, under):
    count = 200_000
    random = np.random.default_rng(7).bytes
    words = np.frombuffer(random(8 * count), np.int64) & (2**53 - 1)
    drawn = _smaller(np.full(count, over, np.int64), under, words, random).sum()
    p = math.exp(-over / under)
    assert abs(drawn - count * p) < 5 * math.sqrt(count * p * (1 - p)) + 1e-9


def test_a_decision_that_is_too_close_for_floating_point_numbers_is_made_by_further_bits():
    """A uniform number whose 53 bits are those of the probability is decided by the bits that follow."""
    first = int(Decimal("0.36787944117144232159552377016146086744581113103176") * 2**53)
    assert _below_exponential(first - 1, 1, 1, os.urandom)
    assert not _below_exponential(first + 1, 1, 1, os.urandom)
    assert _below_exponential(first, 1, 1, bytes)
    assert not _below_exponential(first, 1, 1, lambda size: b"\xff" * size)
    assert _below_exponential(2**53 - 1, 0, 1, os.urandom)


@pytest.mark.parametrize(
    "law", [_Gaussian(4), _Gaussian(300), _Gaussian(10**6), _Laplace(1), _Laplace(100), _Laplace(10**6)]
)
def test_blocks_are_chosen_by_exact_weights_also_at_their_bounds(law):
    bounds = _bounds(law, 64)
    assert list(bounds) == sorted(set(bounds))
    assert bounds[-1] < 2**192
    for position in (0, 3, len(bounds) // 4):
        word = bounds[position] >> 128
        rest = (bounds[position] & (2**128 - 1)).to_bytes(16, "little")
        below, above = (int.from_bytes(rest, "little") + step for step in (-(2**20), 2**20))
        assert _decided(law, word, lambda size, n=below: n.to_bytes(size, "little")) == position
        assert _decided(law, word, lambda size, n=above: n.to_bytes(size, "little")) == position + 1
        # Words at a bound itself are decided so, too.
        short = [np.uint32(word >> 32).tobytes(), np.uint32(word & (2**32 - 1)).tobytes()]
        words = [*short, below.to_bytes(16, "little")]
        assert _chosen(law, 1, lambda size, left=words: left.pop(0)).tolist() == [position]


@pytest.mark.parametrize(
    "law", [_Gaussian(10**6), _Gaussian(LARGEST_VARIANCE), _Laplace(100), _Laplace(10**6)]
)
def test_words_that_keep_a_whole_block_are_below_the_least_quotient_of_it(law):
    blocks = np.arange(0, 220, 7)
    place = np.full(len(blocks), law.width - 1)
    over, under = law.quotients(blocks * law.width + place, place)
    for word, one in zip(np.broadcast_to(law.sure(blocks), len(blocks)).tolist(), over.tolist(), strict=True):
        # In units of 2^-32: a word below it, with any bits behind its first 21, is below the quotient; and it is close.
        least = (Decimal(-one) / under).exp() * 2**32
        assert word % 2**11 == 0
        assert least - 2**12 < word <= least


# --- clip --------------------------------------------------------------------------------------------------------


def contribution(terms, values, touched, wholes=(3.0, 4.0), seed=0):
    rng = np.random.default_rng(seed)
    found = ClippedContribution(LAYOUT, clip=terms.bounds)
    rows = np.flatnonzero(touched)
    found.add("items", np.asarray(values)[rows], rng, rows=rows)
    found.add("touched", np.ones(len(rows)), rng, rows=rows)
    found.add("metrics", np.array([0.5, 1.0]), rng)
    found.add("wholes", np.asarray(wholes), rng)
    found.count()
    found.settle()
    return found, {name: found.steps[place] for name, place in LAYOUT.places.items()}


@given(st.integers(0, 10_000), st.sampled_from([GAUSSIAN, LAPLACE]), st.floats(1e-3, 10))
def test_no_contribution_is_longer_than_its_bounds_once_it_is_rounded(seed, terms, size):
    rng = np.random.default_rng(seed)
    touched = rng.random(6) < 0.7
    _, steps = contribution(terms, size * rng.normal(size=(6, 2)), touched, 400 * rng.random(2), seed)
    order = terms.bounds.order
    assert np.linalg.norm(steps["items"] * LAYOUT["items"].step, order) <= terms.clip * (1 + 1e-12)
    assert steps["touched"].sum() == min(touched.sum(), 3)
    assert np.linalg.norm(steps["wholes"], order) <= terms.most_metrics


def test_a_short_contribution_is_as_it_was_but_for_rounding():
    values = np.full((6, 2), 0.03)
    found, steps = contribution(GAUSSIAN, values, np.array([1, 1, 0, 0, 0, 1]))
    assert found.shortened == 0
    assert (
        np.abs(steps["items"].reshape(6, 2)[[0, 1, 5]] * LAYOUT["items"].step - 0.03).max()
        < LAYOUT["items"].step
    )
    assert steps["touched"].tolist() == [1, 1, 0, 0, 0, 1]
    assert steps["wholes"].tolist() == [3, 4]


def test_a_user_with_many_items_sends_neither_counts_nor_rows_of_those_that_are_dropped():
    _, steps = contribution(GAUSSIAN, np.full((6, 2), 0.05), np.ones(6))
    gone = steps["touched"] == 0
    assert gone.sum() == 3
    rows = steps["items"].reshape(6, 2)
    assert not rows[gone].any()
    assert rows[~gone].all()


def test_a_long_contribution_keeps_its_direction():
    values = np.random.default_rng(0).normal(size=(6, 2))
    found, steps = contribution(dataclasses.replace(GAUSSIAN, most_items=6), values, np.ones(6))
    assert found.shortened == 1
    sent = steps["items"].reshape(6, 2) * LAYOUT["items"].step
    assert np.sum(sent * values) / np.linalg.norm(sent) / np.linalg.norm(values) > 0.9999
    assert np.linalg.norm(sent) == pytest.approx(0.5, rel=0.01)


def test_each_value_is_clipped_by_itself_where_the_terms_say_so():
    terms = dataclasses.replace(LAPLACE, per_value=True, clip=0.1, most_items=6)
    _, steps = contribution(terms, np.linspace(-1, 1, 12).reshape(6, 2), np.ones(6))
    sent = steps["items"] * LAYOUT["items"].step
    assert np.abs(sent).max() <= 0.1
    assert np.abs(sent[0]) == pytest.approx(0.1, rel=0.01)


def add_values(found, user):
    rng = np.random.default_rng(user)
    rows = rng.permutation(6)[: user % 7]
    if len(rows):
        found.add(
            "items",
            (rng.normal(size=(len(rows), 2)) * (1 if user % 3 else 0.01)).astype(np.float32),
            rng,
            rows=rows,
        )
        found.add("touched", np.ones(len(rows)), rng, rows=rows)
    if user % 2:
        found.add("metrics", rng.random(2), rng)
        found.add("wholes", np.floor(10 * rng.random(2)), rng)


def add_user(found, user):
    add_values(found, user)
    found.count()


@pytest.mark.parametrize("terms", [GAUSSIAN, LAPLACE, dataclasses.replace(LAPLACE, per_value=True, clip=0.1)])
@pytest.mark.parametrize("together", [1, 20, 10_000])
def test_users_that_are_clipped_together_contribute_what_they_would_alone(terms, together, monkeypatch):
    monkeypatch.setattr("coterie.secure_sum.clipped._TOGETHER", together)
    whole, alone = ClippedContribution(LAYOUT, clip=terms.bounds), np.zeros(LAYOUT.size, np.uint32)
    shortened = 0
    for user in range(12):
        add_user(whole, user)
        one = ClippedContribution(LAYOUT, clip=terms.bounds)
        add_user(one, user)
        alone += one.codes()
        shortened += one.shortened
    assert np.array_equal(whole.codes(), alone)
    assert (whole.shortened, whole.users) == (shortened, 12)
    assert terms.per_value or 0 < shortened < 12


@pytest.mark.parametrize("terms", [GAUSSIAN, LAPLACE, dataclasses.replace(LAPLACE, per_value=True, clip=0.1)])
@pytest.mark.parametrize(("together", "held"), [(1, 10_000), (20, 10_000), (10_000, 70), (10_000, 10_000)])
def test_users_of_several_members_are_clipped_together_and_each_contributes_what_it_would_alone(
    terms, together, held, monkeypatch
):
    monkeypatch.setattr("coterie.secure_sum.clipped._TOGETHER", together)
    monkeypatch.setattr("coterie.secure_sum.clipped._HELD", held)
    # Members of one user, of two that do not follow one another, and of three.
    whose = [0, 1, 2, 3, 1, 4, 4, 4, 5, 6, 7, 8]
    members = {member: [User(n, 0) for n, one in enumerate(whose) if one == member] for member in set(whose)}
    each = [(member, partial(add_values, user=user)) for user, member in enumerate(whose)]
    found = dict(gathered(LAYOUT, members, each, clip=terms.bounds))
    assert sorted(found) == sorted(members)
    for member, users in members.items():
        alone = ClippedContribution(LAYOUT, clip=terms.bounds)
        for user in users:
            add_user(alone, user.index)
            alone.settle()
        assert np.array_equal(found[member], alone.codes())


def test_values_beyond_a_bound_are_counted_for_the_contribution_that_they_are_in():
    layout = Layout((Segment("items", (3,), 1.0, 8),))
    clipper = Clipper(layout, dataclasses.replace(LAPLACE, per_value=True, clip=5.0).bounds)
    within, beyond = (ClippedContribution(layout, clip=GAUSSIAN.bounds, clipper=clipper) for _ in range(2))
    within.add("items", np.array([0.5, -1.0, 1.0]), np.random.default_rng(0))
    within.count()
    beyond.add("items", np.array([3.0, 0.0, -2.0]), np.random.default_rng(0))
    beyond.count()
    clipper.settle()
    assert (within.clipped, beyond.clipped) == (0, 2)
    assert beyond.steps.tolist() == [127, 0, -127]


def test_values_of_one_segment_that_come_twice_are_refused_because_their_norm_is_unknown():
    found = ClippedContribution(LAYOUT, clip=GAUSSIAN.bounds)
    for _ in range(2):
        found.add("metrics", np.zeros(2), np.random.default_rng(0))
    with pytest.raises(ValueError, match="segment metrics: rows were added twice"):
        found.count()


def test_sampled_and_rated_items_are_clipped_together():
    values, rows = np.full((2, 2), 3.0), np.array([1, 4])
    apart, together = (ClippedContribution(LAYOUT, clip=GAUSSIAN.bounds) for _ in range(2))
    apart.add("items", values[:1], np.random.default_rng(0), rows[:1])
    apart.add("items", values[1:], np.random.default_rng(0), rows[1:], noise=True)
    together.add("items", values, np.random.default_rng(0), rows)
    for one in (apart, together):
        one.count()
    assert np.array_equal(apart.codes(), together.codes())
    sent = apart.steps * LAYOUT["items"].step
    assert 0 < np.linalg.norm(sent) <= GAUSSIAN.clip
    assert not apart.noise.any()


def test_a_value_that_is_not_finite_is_refused_as_without_a_clip():
    with pytest.raises(ValueError, match="not a finite number"):
        contribution(GAUSSIAN, np.full((6, 2), np.nan), np.ones(6))


# --- noise and room ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("terms", [GAUSSIAN, LAPLACE])
def test_each_sum_costs_the_same_whatever_it_holds(terms):
    """The cost of each kind, from the noise that is really drawn and the norms that the clip allows."""
    spread = terms.spread(LAYOUT, 20)
    norms = {
        "items": terms.clip / LAYOUT["items"].step,
        "touched": 16 * (math.sqrt(3) if terms is GAUSSIAN else 3),
        "metrics": (math.sqrt(2) if terms is GAUSSIAN else 2) / LAYOUT["metrics"].step,
        "wholes": 16 * 8.0,
    }
    if terms is GAUSSIAN:
        cost = sum(
            concentrated((2 * one) ** 2, math.ceil(spread[name] ** 2), 20, 100) for name, one in norms.items()
        )
    else:
        cost = sum(2 * one / math.ceil(spread[name]) for name, one in norms.items())
    assert cost <= terms.cost(LAYOUT.size)
    assert cost == pytest.approx(terms.cost(LAYOUT.size), rel=0.02)


@pytest.mark.parametrize("terms", [GAUSSIAN, LAPLACE])
def test_sums_with_noise_decode_to_the_values_and_as_much_noise_as_stated(terms):
    noisy, users = terms.noisy(LAYOUT, 20), 5
    random = np.random.default_rng(1).bytes
    found = []
    for _ in range(150):
        zero = np.zeros(LAYOUT.size, np.int64)
        steps = sum(terms.with_noise(LAYOUT, (20, 20), 1, zero, random) for _ in range(users))
        assert noisy.possible(steps.astype(np.uint32) + noisy.zeros(users), users)
        decoded = noisy.decode(steps.astype(np.uint32) + noisy.zeros(users), users)
        found.append(np.concatenate([value.ravel() for value in decoded.values()]))
    real = np.array(found)
    spread = terms.spread(LAYOUT, 20)
    for name, place in LAYOUT.places.items():
        each = (
            spread[name]
            * (LAYOUT[name].step if LAYOUT[name].clip else 1 / 16)
            * (1 if terms is GAUSSIAN else math.sqrt(2))
        )
        assert np.std(real[:, place]) == pytest.approx(each * math.sqrt(users), rel=0.15)


def test_values_are_decoded_as_they_were_where_noise_is_small_and_codes_are_coarser_where_it_is_large():
    small = dataclasses.replace(GAUSSIAN, noise=1e-6)
    steps = np.arange(-3, LAYOUT.size - 3) * 40
    steps[12:] %= 2
    random = np.random.default_rng(1).bytes
    for terms, largest in ((small, 0.8), (GAUSSIAN, 20)):
        noisy = terms.noisy(LAYOUT, 20)
        total = terms.with_noise(LAYOUT, (20, 20), 1, steps, random)
        decoded = noisy.decode(total.astype(np.uint32) + noisy.zeros(1), 1)
        for name, place in LAYOUT.places.items():
            expected = steps[place].reshape(LAYOUT[name].shape) * LAYOUT[name].step
            assert np.abs(decoded[name] - expected).max() < largest
    assert GAUSSIAN.noisy(LAYOUT, 20)["metrics"].step > 2 * LAYOUT["metrics"].step
    assert small.noisy(LAYOUT, 20)["metrics"].step == pytest.approx(LAYOUT["metrics"].step, rel=1e-9)


def test_noise_of_members_of_several_users_has_the_variance_of_all_of_them():
    random = np.random.default_rng(2).bytes
    drawn = [GAUSSIAN.draw(LAYOUT, 20, 9, random)[:12] for _ in range(300)]
    assert np.std(drawn) == pytest.approx(3 * GAUSSIAN.spread(LAYOUT, 20)["items"], rel=0.1)
    local = dataclasses.replace(GAUSSIAN, place="local")
    drawn = [local.draw(LAYOUT, 20, 9, random)[:12] for _ in range(300)]
    assert np.std(drawn) == pytest.approx(local.spread(LAYOUT, 20)["items"], rel=0.1)


def test_users_who_may_collude_are_made_up_for_by_the_others():
    alone = GAUSSIAN.spread(LAYOUT, 20)["items"]
    assert dataclasses.replace(GAUSSIAN, colluders=15).spread(LAYOUT, 20)["items"] == pytest.approx(2 * alone)


def test_noise_without_room_in_a_code_is_refused():
    with pytest.raises(ValueError, match="has no room in a code; expected fewer bits, less noise"):
        dataclasses.replace(GAUSSIAN, place="local", noise=1e6).noisy(LAYOUT, 20)


# --- accounting --------------------------------------------------------------------------------------------------


def analytic(mu, delta):
    """Epsilon of the Gaussian mechanism with sensitivity over deviation mu (Balle and Wang, 2018), by bisection."""
    low, high = 0.0, 1e4
    while high - low > 1e-6:
        middle = (low + high) / 2
        lost = gauss.cdf(mu / 2 - middle / mu) - math.exp(middle + gauss.logcdf(-mu / 2 - middle / mu))
        low, high = (middle, high) if lost > delta else (low, middle)
    return high


@pytest.mark.parametrize("noise", [0.5, 2.0, 10.0, 60.0])
@pytest.mark.parametrize("sums", [1, 30, 400])
def test_epsilon_lies_between_that_of_the_gaussian_mechanism_and_the_bound_of_zcdp(noise, sums):
    terms = dataclasses.replace(GAUSSIAN, noise=noise)
    found = epsilon(terms, {Purpose.TRAIN: sums})
    exact = analytic(2 * math.sqrt(sums) / noise, terms.delta)
    assert exact <= found <= epsilon_of(sums * terms.cost(1), terms.delta) * 1.02
    # The looser bound in closed form, rho + 2 sqrt(rho ln(1 / delta)).
    rho = sums * 2 / noise**2
    assert found <= (rho + 2 * math.sqrt(rho * math.log(1 / terms.delta))) * 1.001


@pytest.mark.parametrize("noise", [0.05, 2.0, 40.0])
@pytest.mark.parametrize("sums", [1, 30])
def test_epsilon_of_laplace_noise_is_at_most_the_sum_and_the_bound_of_zcdp(noise, sums):
    terms = dataclasses.replace(LAPLACE, noise=noise)
    found, each = epsilon(terms, {Purpose.EVALUATE: sums}), 2 / noise
    assert 0 < found <= sums * each * (1 + 1e-9)
    assert found <= epsilon_of(sums * each**2 / 2, terms.delta) * 1.02
    if sums == 1:
        assert found == pytest.approx(each, rel=0.01)


def test_the_published_noise_for_each_value_costs_as_many_epsilons_as_there_are_values():
    published = Privacy("local", "laplace", noise=2.0, clip=0.1, per_value=True)
    assert epsilon(published, {Purpose.TRAIN: 4}, {Purpose.TRAIN: 107_648}) == 4 * 107_648
    assert epsilon(published, {Purpose.TRAIN: 4}) == math.inf


def test_users_are_tallied_by_the_sums_in_which_they_were():
    taken = with_taken((), Purpose.TRAIN, np.array([0, 1, 2]), 5)
    taken = with_taken(taken, Purpose.TRAIN, np.array([0, 4]), 5)
    taken = with_taken(taken, Purpose.EVALUATE, np.arange(5), 5)
    assert taken == ((1, 0, 1, 2), (2, 0, 1, 1), (1, 0, 1, 0), (1, 0, 1, 1))
    found = spent(GAUSSIAN, taken)
    assert (found.sums, found.users) == (3, 5)
    assert found.largest == epsilon(GAUSSIAN, {Purpose.TRAIN: 3})
    assert found.median == epsilon(GAUSSIAN, {Purpose.TRAIN: 2})
    assert spent(GAUSSIAN, ()).largest == 0


# --- terms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "secure_sum", "said"),
    [
        ({"clip": 0.0}, "masked", "clip 0 with place 'distributed': expected a finite number above 0"),
        ({"clip": -1.0}, "masked", "clip -1 with place"),
        ({"noise": 0.0}, "masked", "noise 0 with place 'distributed': expected a finite number above 0"),
        ({"noise": math.nan}, "masked", "noise nan"),
        ({"place": "none"}, "masked", "with place 'none': nobody would add noise"),
        ({"place": "none", "noise": 0.0, "per_value": True}, "masked", "with place 'none'"),
        ({}, "clear", "'distributed' with secure_sum 'clear': each user's part of the noise alone"),
        ({"mechanism": "laplace"}, "masked", "parts of users do not add up to Laplace noise"),
        ({"place": "local", "per_value": True}, "clear", "per_value with mechanism 'gaussian'"),
        ({"delta": 0.0}, "masked", "delta 0: expected above 0 and below 1"),
        ({"delta": 1.0}, "masked", "delta 1: expected above 0 and below 1"),
        ({"place": "local", "colluders": 2}, "clear", "colluders 2 with place 'local'"),
        ({"place": "local"}, "shared-key", "secure_sum 'shared-key'"),
        ({"place": "local"}, "denoised", "secure_sum 'denoised'"),
        ({"place": "everywhere"}, "clear", "expected one of none, local, distributed"),
        ({"mechanism": "uniform"}, "masked", "expected one of gaussian, laplace"),
        ({"most_items": 0}, "masked", "most_items 0: expected at least 1"),
        ({"most_metrics": 0.0}, "masked", "most_metrics 0 with place"),
    ],
)
def test_terms_that_contradict_each_other_or_the_sum_are_refused(changes, secure_sum, said):
    with pytest.raises(ConfigError, match=said):
        check_privacy(dataclasses.replace(GAUSSIAN, **changes), secure_sum)


def test_terms_that_can_be_met_pass():
    check_privacy(EXACT, "shared-key")
    for secure_sum in ("masked", "encrypted"):
        check_privacy(GAUSSIAN, secure_sum)
    for secure_sum in ("clear", "masked", "encrypted"):
        check_privacy(LAPLACE, secure_sum)


# --- whole runs --------------------------------------------------------------------------------------------------

SMALL = {"users": 60, "items": 40, "interactions": 1200}
SPLITS = {"fedmf": "random", "fedmvmf": "random"}


def run(system, place="none", secure_sum="clear", *, alone=False, **privacy):
    rounds = {"passes": 2, "evaluate_every": 1, "min_sum": 20, "party_per_user": alone, "cohorts": "all"}
    return RunSettings.model_validate(
        {
            "system": system,
            "secure_sum": secure_sum,
            "split": {"kind": SPLITS.get(system, "leave-last-out")},
            "data": {"synthetic": SMALL},
            "rounds": {**rounds, "privacy": {"place": place, **privacy}},
            "federation": {"hosts": 3},
        }
    )


def plan_of(settings):
    return run_plan(settings, run_id="run", seed=0)


def trained(settings):
    feed = make_feed(settings, load(settings), 0)
    return train_in_process(settings, feed, run_id="test", seed=0, see=lambda event: None)


def apart(one, other):
    """Return the distance of two trained models in lengths of the first."""
    pairs = [(value, other[name]) for name, value in one.items() if name.startswith("model")]
    return math.sqrt(
        sum(np.square(a - b, dtype=float).sum() for a, b in pairs)
        / sum(np.square(a, dtype=float).sum() for a, _ in pairs)
    )


@pytest.mark.parametrize("system", ["fedmf", "fcf", "fedmvmf", "fedncf", "fpl", "ials"])
def test_each_system_learns_with_hardly_any_noise_what_it_learns_without_and_something_else_with_much(system):
    wide = {"clip": 1e3, "most_items": 10_000, "most_metrics": 1e4}
    exact = trained(run(system)).trained.arrays
    little = trained(run(system, "local", noise=1e-7, **wide)).trained.arrays
    much = trained(run(system, "local", noise=2.0, clip=0.5)).trained.arrays
    assert apart(exact, little) < 0.1
    assert apart(exact, much) > 3 * apart(exact, little)
    assert all(np.isfinite(value).all() for value in much.values())


@pytest.mark.parametrize(
    ("place", "secure_sum", "mechanism"),
    [
        ("local", "clear", "laplace"),
        ("distributed", "masked", "gaussian"),
    ],
)
def test_a_run_with_noise_tallies_the_sums_of_each_user(place, secure_sum, mechanism):
    settings = run(
        "fedmf",
        place,
        secure_sum,
        alone=True,
        mechanism=mechanism,
        noise=1.0,
        clip=0.01,
        most_items=2,
        most_metrics=1,
    )
    found = trained(settings)
    assert found.trained.state.taken == ((60, 1, 3, 2),)
    # The plan allows for as many.
    assert sum(most_sums(plan_of(settings).rounds).values()) == 6


@pytest.mark.parametrize("secure_sum", ["masked", "encrypted"])
def test_distributed_noise_comes_out_of_a_sum_whatever_hides_it(secure_sum):
    """With little noise the model is that of exact sums, and the codes have room for it in masks and in ciphertexts."""
    pytest.importorskip("gmpy2")
    wide = {"clip": 1e3, "most_items": 10_000, "most_metrics": 1e4}

    def model(place, **private):
        settings = run("fedmf", place, secure_sum, **private)
        small = {
            "encryption": {"bits": 1024, "comparison": True, "obfuscators": "short"},
            "fedmf": {"factors": 4},
        }
        return trained(
            RunSettings.model_validate({**settings.model_dump(exclude_unset=True), **small})
        ).trained.arrays

    exact, little = model("none"), model("distributed", noise=1e-7, **wide)
    assert apart(exact, little) < 0.1
    assert apart(exact, model("distributed", noise=4.0, clip=0.5)) > 3 * apart(exact, little)


def test_system_of_its_own_noise_is_refused():
    with pytest.raises(ValueError, match=r"ease has noise of its own; expected ease\.noise"):
        RunSettings.model_validate(
            {
                "system": "ease",
                "secure_sum": "masked",
                "rounds": {
                    "privacy": {"place": "distributed", "noise": 1, "clip": 1},
                    "party_per_user": True,
                },
            }
        )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rounds": {"cohorts": "independent"}}, "a user may be in any number of cohorts"),
        ({"secure_sum": "encrypted", "encryption": {"sparse": True}}, "who sends which places has no noise"),
        ({"rounds": {"aggregation": {"norm_bound": 1}}}, "the clip bounds norms"),
        ({"secure_sum": "clear", "rounds": {"aggregation": {"rule": "median"}}}, "noise is in every place"),
        ({"system": "drift"}, "is for systems in rounds, and drift has none"),
        (
            {"rounds": {"privacy": {"place": "distributed", "noise": 1, "clip": 1, "colluders": 20}}},
            "colluders 20",
        ),
        ({"rounds": {"privacy": {"place": "none", "noise": 1}}}, "nobody would add noise"),
        ({"rounds": {"privacy": {"place": "local", "noise": 1}}}, "clip 0 with place 'local'"),
    ],
)
def test_settings_that_do_not_go_with_noise_are_refused_before_a_run(given, said):
    private = {"place": "local", "noise": 1, "clip": 1}
    top = {"system": "fedmf", "secure_sum": "masked", "federation": {"hosts": 7}, **given}
    with pytest.raises(ValueError, match=said):
        RunSettings.model_validate({**top, "rounds": {"privacy": private, **given.get("rounds", {})}})


def test_a_plan_carries_the_terms_and_the_most_that_the_run_may_cost():
    rounds = plan_of(run("fedmf", "local", noise=8.0, clip=0.5, delta=1e-6)).rounds
    assert privacy_of(rounds) == Privacy("local", noise=8.0, clip=0.5, delta=1e-6)
    assert rounds.privacy.epsilon == epsilon(privacy_of(rounds), {Purpose.TRAIN: 6})
    assert not plan_of(run("fedmf")).rounds.HasField("privacy")
    assert privacy_of(plan_of(run("fedmf")).rounds) is EXACT


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epsilon": 0.5}, "epsilon 0.5: the sums of this plan may cost"),
        ({"epsilon": math.nan}, "epsilon nan"),
        ({"place": "none"}, "place 'none' in a plan"),
        ({"noise": -1.0}, "noise -1"),
        ({"place": "distributed"}, "'distributed' with secure_sum 'clear'"),
    ],
)
def test_hosts_and_the_server_refuse_a_plan_whose_terms_cannot_be_met(changes, said):
    plan = plan_of(run("fedmf", "local", noise=8.0, clip=0.5))
    check_plan(plan)
    for name, value in changes.items():
        setattr(plan.rounds.privacy, name, value)
    with pytest.raises(ConfigError, match=said):
        check_plan(plan)


def test_hosts_refuse_evaluations_that_a_plan_with_noise_does_not_have():
    rounds = plan_of(run("fedmf", "local", noise=8.0, clip=0.5)).rounds
    rounds.passes, rounds.evaluate_every = 12, 5
    assert [number for number in range(13) if evaluated_in(rounds, number)] == [0, 5, 10, 12]
    assert most_sums(rounds)[Purpose.EVALUATE] == 4
    rounds.redraw = 5
    assert most_sums(rounds)[Purpose.SUPPORTS] == 3


class Sides:
    """A host's side of FedMF with noise, and what it sends."""

    def __init__(self, kept=None, **privacy):
        settings = run("fedmf", "local", **{"noise": 1.0, "clip": 0.5, **privacy})
        self.kept = dict(kept or {})
        data = make_feed(settings, load(settings), 0).hosted(0)
        self.plan = plan_of(settings)
        self.side = planned_host_side(self.plan, data, np.arange(len(data.users), dtype=np.uint64), self.keep)
        self.users = [User(index, 0) for index in range(len(data.users))]

    def keep(self, initial):
        self.kept = {**initial, **self.kept}
        return self.kept

    def sent(self, number=1, purpose="supports", pass_number=0):
        plan = SumPlan(
            "run", number, purpose, "clear", b"m" * 32, b"l" * 32, (), min_sum=20, pass_number=pass_number
        )
        ((_, codes),) = self.side.contributions(plan, {}, None, {0: self.users})
        return codes


def test_a_sum_of_items_that_is_formed_again_has_the_same_noise_also_after_a_restart():
    first = Sides()
    codes = first.sent()
    assert np.array_equal(first.sent(number=5), codes)
    assert np.array_equal(Sides(first.kept).sent(), codes)
    # Another place, another host, or another history has other noise.
    assert not np.array_equal(first.sent(pass_number=1), codes)
    assert not np.array_equal(Sides().sent(), codes)


def test_the_same_noise_never_meets_two_contributions():
    """Two contributions in two rounds under the same noise would show their difference without any."""
    plans = [
        SumPlan("run", number, purpose, "clear", b"m" * 32, b"l" * 32, ())
        for number in (1, 2)
        for purpose in ("train",)
    ]
    codes = np.arange(4, dtype=np.uint32)
    assert len({_more(plan, values) for plan in plans for values in (codes, codes + np.uint32(1))}) == 4
    supports = [SumPlan("run", number, "supports", "clear", b"m" * 32, b"l" * 32, ()) for number in (1, 2)]
    assert len({_more(plan, codes) for plan in supports}) == 1


def test_a_server_cuts_off_what_only_noise_can_have_added():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(500, 20))
    assert np.linalg.norm(_shortened(noise, 1.0)) < 0.3 * np.linalg.norm(noise)
    signal = 10 * rng.normal(size=(500, 20))
    near = _shortened(signal + noise, 1.0)
    assert np.linalg.norm(near - signal) < 1.05 * np.linalg.norm(noise)
    assert _shortened(np.zeros((0, 3)), 1.0).shape == (0, 3)
    assert _shortened(np.array([5.0]), 0.0).tolist() == [5.0]


def test_a_system_whose_hosts_do_not_clip_is_refused():
    plan = plan_of(run("fedmf", "local", noise=8.0, clip=0.5))
    plan.system, plan.settings = "ease", EaseSettings().to_json()
    data = HostData(("u",), ("a",), np.zeros(1, int), np.zeros(1, int), np.zeros(1, int), np.full(1, np.nan))
    with pytest.raises(ConfigError, match="hosts of this system do not clip contributions"):
        planned_host_side(plan, data, np.zeros(1, np.uint64), lambda made: made)
