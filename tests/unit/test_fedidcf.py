"""FedIDCF's attention, moments and caps: derivatives, weights that differ between users, terms of the set."""

import math

import numpy as np
import pytest
from pydantic import ValidationError

from coterie.crypto.latent_codes import Moments
from coterie.systems.fedidcf.attention import Attention, gradients_of, told
from coterie.systems.fedidcf.mathematics import (
    KeyMoments,
    capped,
    is_query,
    layout,
    moments_of,
    no_moments,
    terms_of,
)
from coterie.systems.fedidcf.settings import FedIdcfSettings, Stage

K, H, COUNT = 4, 5, 7
RNG = np.random.default_rng(1)
LATENTS, LIKED = RNG.normal(size=(COUNT, K)), RNG.normal(size=(3, K))
SETTINGS = FedIdcfSettings(factors=K, hidden=H, latents=30)


def model(seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.5, (K, H)) for name in ("query", "key")}


def rated(n, seed=0):
    rng = np.random.default_rng(seed)
    rows = np.column_stack([np.ones(n), rng.normal(0, 0.2, n), rng.normal(0, 0.5, (n, K))])
    return rows, rng.uniform(-1, 1, n)


def known(users=100, mean=0.1, variance=0.04):
    return KeyMoments(users, 1.0, Moments(np.full(K, mean), np.full(K, variance)))


def test_users_who_like_different_items_get_different_weights_and_so_vectors():
    attention = Attention(model(), LATENTS, 1.0)
    weights = np.array([attention.weights(one) for one in LIKED])
    assert weights.sum(axis=1) == pytest.approx(np.ones(3))
    assert (weights > 0).all()
    assert abs(weights[0] - weights[1]).max() > 0.01
    assert attention.vector(LIKED[0]) == pytest.approx(weights[0] @ LATENTS)


def test_the_printed_form_gives_every_user_the_same_weights():
    # exp(e [W_q d, W_k p_k]) is exp(e_1 W_q d) exp(e_2 W_k p_k): the user's factor cancels in the normalisation.
    parameters, e = model(), RNG.normal(size=2 * H)
    scores = np.array(
        [
            [e @ np.concatenate([d @ parameters["query"], p @ parameters["key"]]) for p in LATENTS]
            for d in LIKED
        ]
    )
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    assert weights[0] == pytest.approx(weights[1])


def test_gradients_are_those_of_the_loss():
    parameters, target = model(), RNG.normal(size=K)

    def loss():
        return float(((Attention(parameters, LATENTS, 1.5).vector(LIKED[0]) - target) ** 2).sum())

    attention = Attention(parameters, LATENTS, 1.5)
    found = attention.gradients(LIKED[0], 2 * (attention.vector(LIKED[0]) - target))
    for parameter, gradient in zip(parameters.values(), found, strict=True):
        for place in ((0, 0), (2, 3), (3, 4)):
            kept, values = parameter[place], []
            for step in (1e-6, -1e-6):
                parameter[place] = kept + step
                values.append(loss())
            parameter[place] = kept
            assert gradient[place] == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4, abs=1e-7)


def test_half_of_a_user_s_ratings_is_predicted_from_the_other_half():
    rows, ratings = rated(40)
    parameters, rng = model(), np.random.default_rng(7)
    shown = np.random.default_rng(7).random(40) < 0.5

    def loss():
        attention = Attention(parameters, LATENTS, 1.0)
        own = told(rows[shown], ratings[shown])
        found = own.bias + rows[~shown, 1] + rows[~shown, 2:] @ attention.vector(own.liked)
        return float(((found - ratings[~shown]) ** 2).sum())

    gradient, _ = gradients_of(Attention(parameters, LATENTS, 1.0), rows, ratings, rng)
    kept, values = parameters["query"][1, 2], []
    for step in (1e-6, -1e-6):
        parameters["query"][1, 2] = kept + step
        values.append(loss())
    parameters["query"][1, 2] = kept
    assert gradient[1, 2] == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4)


def test_a_bias_is_the_shrunken_mean_of_what_items_leave_and_nobody_s_is_0():
    rows, ratings = rated(9)
    found = told(rows, ratings)
    missed = ratings - rows[:, 1]
    assert found.bias == pytest.approx(missed.sum() / 12)
    assert found.liked == pytest.approx((missed - found.bias) @ rows[:, 2:] / 19)
    nobody = told(rows[:0], ratings[:0])
    assert nobody.bias == 0
    assert not nobody.liked.any()


def test_moments_come_from_sums_and_are_unknown_without_key_users():
    vectors = RNG.normal(0.2, 0.5, (50, K))
    sums = np.concatenate([[50, 50 * 0.09], vectors.sum(axis=0), (vectors**2).sum(axis=0)])
    found = moments_of(sums)
    assert (found.users, found.unit) == (50, pytest.approx(0.3))
    assert found.moments.mean == pytest.approx(vectors.mean(axis=0))
    assert found.moments.variance == pytest.approx(vectors.var(axis=0))
    assert found.length == pytest.approx(np.sqrt((vectors**2).sum(axis=1).mean()))
    assert moments_of(no_moments(SETTINGS)) is None


def test_long_vectors_are_shortened_to_the_cap_and_no_other_is_changed():
    long, short = np.full(K, 3.0), np.full(K, 0.01)
    limit = known().length
    assert np.linalg.norm(capped(SETTINGS, known(), long)) == pytest.approx(limit)
    assert capped(SETTINGS, known(), long) == pytest.approx(long * limit / np.linalg.norm(long))
    assert (capped(SETTINGS, known(), short) == short).all()
    uncapped = SETTINGS.model_copy(update={"cap": 0.0})
    assert (capped(uncapped, known(), long) == long).all()


def test_terms_follow_from_moments_and_have_room_for_every_capped_vector():
    terms = terms_of(SETTINGS, known())
    terms.check()
    assert (terms.combinations, terms.most, terms.least, terms.members) == (30, 100, 30, 5)
    assert terms.bound / 1000 >= known().length
    assert terms.bound == math.ceil(1000 * known().length)
    # With fewer key users there are fewer combinations, so that a fifth of them may be lost; below 20, none.
    few = SETTINGS.model_copy(update={"latents": 200})
    for users, count in ((249, 199), (250, 200), (1000, 200), (100, 80), (24, 20), (20, 20)):
        found = terms_of(few, known(users=users))
        found.check()
        assert (found.combinations, found.least, found.most) == (count, count, users)
    terms_of(SETTINGS, known(users=20)).check()
    assert terms_of(SETTINGS, known(users=19)) is None
    assert terms_of(SETTINGS, None) is None
    assert terms_of(SETTINGS.model_copy(update={"members": 30}), known(users=59)) is None
    wide = SETTINGS.model_copy(update={"cap": 0.0})
    assert terms_of(wide, known()).bound == 2000


def test_every_user_draws_by_its_own_number_whether_it_trains():
    keys = np.arange(1000, dtype=np.uint64)
    found = is_query(SETTINGS, keys, 0)
    assert found.mean() == pytest.approx(0.2, abs=0.04)
    assert (is_query(SETTINGS, keys[::-1], 0)[::-1] == found).all()
    assert (is_query(SETTINGS, keys, 1) != found).any()


def test_stages_follow_each_other_once():
    found = [SETTINGS.model_copy(update={"factor_passes": 2}).stage(n) for n in range(6)]
    assert found == [
        Stage.FACTORS,
        Stage.FACTORS,
        Stage.MOMENTS,
        Stage.PUBLISH,
        Stage.ATTENTION,
        Stage.ATTENTION,
    ]


def test_a_contribution_has_room_for_many_users():
    assert layout(SETTINGS, 10).capacity >= 60_000


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"biases": False}, "expected biases true"),
        ({"steps": "sum"}, "expected biases true"),
        ({"scaffold": True}, "expected scaffold false"),
        ({"query": 1.0}, "less than 1"),
        ({"members": 2}, "greater than or equal to 3"),
    ],
)
def test_settings_out_of_range_are_refused(given, match):
    with pytest.raises(ValidationError, match=match):
        FedIdcfSettings(**given)
