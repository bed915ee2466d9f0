"""Noise of EASE: samples beside the exact probabilities, epsilon beside an independent computation."""

import math
import os

import numpy as np
import pytest

from coterie.secure_sum.discrete_noise import LARGEST_VARIANCE, discrete_gaussian
from coterie.secure_sum.noise_accounting import concentrated, epsilon_of
from coterie.systems.ease.accounting import support_parts
from coterie.systems.ease.settings import EaseSettings


def seeded(number):
    rng = np.random.default_rng(number)
    return rng.bytes


def probabilities(variance, furthest):
    x = np.arange(-furthest, furthest + 1)
    whole = np.arange(-200 * math.isqrt(variance) - 200, 200 * math.isqrt(variance) + 201)
    return np.exp(-(x**2) / (2 * variance)) / np.exp(-(whole.astype(float) ** 2) / (2 * variance)).sum()


@pytest.mark.parametrize("variance", [1, 2, 3, 9, 100])
def test_samples_have_the_probabilities_of_the_discrete_gaussian(variance):
    drawn, furthest = discrete_gaussian(variance, 200_000, seeded(variance)), 3 * math.isqrt(variance)
    inside = np.abs(drawn) <= furthest
    seen = np.bincount(drawn[inside] + furthest, minlength=2 * furthest + 1)
    p = probabilities(variance, furthest)
    expected, beyond = 200_000 * p, 200_000 * (1 - p.sum())
    square = ((seen - expected) ** 2 / expected).sum() + ((~inside).sum() - beyond) ** 2 / beyond
    # Chi-square of as many degrees of freedom as cells: its mean and ten of its standard deviations.
    cells = len(p)
    assert square < cells + 10 * math.sqrt(2 * cells)
    assert abs(drawn.mean()) < 8 * math.sqrt(variance / 200_000)


def test_another_distribution_would_be_told_apart():
    drawn = np.rint(np.random.default_rng(0).normal(0, 1, 200_000)).astype(int)
    p = probabilities(1, 3)
    seen = np.bincount(drawn[np.abs(drawn) <= 3] + 3, minlength=7)
    assert ((seen - 200_000 * p) ** 2 / (200_000 * p)).sum() > 8 + 10 * math.sqrt(16)


def test_the_largest_variance_and_the_randomness_of_the_operating_system():
    drawn = discrete_gaussian(LARGEST_VARIANCE, 4_000)
    assert 0.8 < np.square(drawn.astype(float)).mean() / LARGEST_VARIANCE < 1.2
    assert discrete_gaussian(4, 0).shape == (0,)
    first = discrete_gaussian(4, 50, os.urandom)
    assert first.dtype == np.int64


@pytest.mark.parametrize("variance", [0, -1, LARGEST_VARIANCE + 1])
def test_variances_out_of_range_are_refused(variance):
    with pytest.raises(ValueError, match=f"a variance of {variance}; expected 1 to"):
        discrete_gaussian(variance, 1)


def delta_of(epsilon, rho):
    """Return the least delta of the conversion for an epsilon, by ternary search in the logarithm of alpha - 1."""

    def logarithm(at):
        more = math.exp(at)
        alpha = 1 + more
        return more * (alpha * rho - epsilon) - math.log(more) + alpha * math.log(1 - 1 / alpha)

    low, high = -12.0, 18.0
    for _ in range(300):
        first, second = low + (high - low) / 3, high - (high - low) / 3
        if logarithm(first) < logarithm(second):
            high = second
        else:
            low = first
    return math.exp(min(logarithm(low), 0.0))


def gaussian_delta(epsilon, rho):
    """Return the exact delta of a Gaussian mechanism of rho-zCDP (Balle and Wang, 2018)."""
    mu = math.sqrt(2 * rho)

    def below(x):
        return 0.5 * math.erfc(-x / math.sqrt(2))

    return below(mu / 2 - epsilon / mu) - math.exp(epsilon) * below(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize("rho", [0.001, 0.05, 0.5, 2.0, 10.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
def test_epsilon_is_that_at_which_the_conversion_has_this_delta(rho, delta):
    found = epsilon_of(rho, delta)
    assert delta_of(found, rho) == pytest.approx(delta, rel=1e-3)
    # No less than what the Gaussian mechanism has, and no more than the simple conversion.
    assert gaussian_delta(found, rho) < delta
    assert found < rho + 2 * math.sqrt(rho * math.log(1 / delta))


@pytest.mark.parametrize(
    ("rho", "delta"), [(0.0, 1e-5), (-1.0, 1e-5), (math.nan, 1e-5), (1.0, 0.0), (1.0, 1.0)]
)
def test_an_epsilon_that_is_not_defined_is_refused(rho, delta):
    with pytest.raises(ValueError, match="expected rho above 0 and delta between 0 and 1"):
        epsilon_of(rho, delta)


def test_with_enough_noise_of_each_user_a_sum_costs_what_one_gaussian_of_all_noise_costs():
    assert concentrated(600.0, 9.0, 1_000, 1_000_000) == pytest.approx(600 / (2 * 9 * 1_000), rel=1e-9)
    # The noise of many users with little each is far from Gaussian, and a long sum shows it.
    assert concentrated(600.0, 0.25, 1_000, 1_000_000) > 100


def test_no_two_histories_differ_more_than_the_sensitivity_says():
    m, n = 4, 9
    rng = np.random.default_rng(0)
    largest = 0.0
    for trial in range(200):
        x, y = np.zeros(n), np.zeros(n)
        first, second = rng.choice(n, m, replace=False), rng.choice(n, m, replace=False)
        if trial == 0:
            first, second = np.arange(m), np.arange(m) + m
        x[first] = y[second] = 1
        upper = np.triu_indices(n)
        off = (np.outer(x, x) - np.outer(y, y))[upper]
        largest = max(largest, float(off @ off))
    assert largest == m * (m + 1)


@pytest.mark.parametrize("most", [1, 2, 7, 8, 50, 2_000])
def test_supports_cost_about_as_much_as_pairs_and_never_less_precision_than_one_part(most):
    parts = support_parts(most)
    assert parts == math.ceil(math.sqrt((most + 1) / 2))
    assert most * (most + 1) <= 2 * most * parts**2


def test_more_users_and_more_noise_cost_less_and_more_items_cost_more():
    base = EaseSettings(noise=2.0, most_items=20)
    known = base.epsilon(1_000, 500)
    assert base.epsilon(4_000, 500) < known
    assert EaseSettings(noise=4.0, most_items=20).epsilon(1_000, 500) < known
    assert EaseSettings(noise=2.0, most_items=40).epsilon(1_000, 500) > known
    rho = (20 * 21 + 2 * 20 * 4**2) / (2 * 4 * 1_000)
    assert known == pytest.approx(epsilon_of(rho, 1e-5), rel=1e-6)
