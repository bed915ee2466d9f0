"""Attention over pseudo meta-latents: weights differ between users, gradients are those of the loss, a study runs."""

import numpy as np
import pytest

from coterie.systems.fedmf.study.inductive import Attention, _Part, study

RNG = np.random.default_rng(1)
LATENTS, LIKED = RNG.normal(size=(7, 4)), RNG.normal(size=(3, 4))


def test_users_who_like_different_items_get_different_weights():
    weights = Attention.drawn(4, 5, np.random.default_rng(0)).weights(LIKED, LATENTS)
    assert weights.sum(axis=1) == pytest.approx(np.ones(3))
    assert (weights > 0).all()
    assert abs(weights[0] - weights[1]).max() > 0.01


def test_gradients_are_those_of_the_loss():
    attention, target = Attention.drawn(4, 5, np.random.default_rng(0)), RNG.normal(size=(3, 4))

    def loss():
        return float(((attention.weights(LIKED, LATENTS) @ LATENTS - target) ** 2).sum())

    slope = 2 * (attention.weights(LIKED, LATENTS) @ LATENTS - target)
    found = attention.gradients(LIKED, LATENTS, LATENTS, slope)
    for parameter, gradient in zip((attention.query, attention.key), found, strict=True):
        for place in ((0, 0), (2, 3), (3, 4)):
            kept, values = parameter[place], []
            for step in (1e-6, -1e-6):
                parameter[place] = kept + step
                values.append(loss())
            parameter[place] = kept
            assert gradient[place] == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4, abs=1e-7)


def test_gradients_of_users_add_up():
    attention, slope = Attention.drawn(4, 5, np.random.default_rng(0)), RNG.normal(size=(3, 4))
    whole = attention.gradients(LIKED, LATENTS, LATENTS, slope)
    each = [attention.gradients(LIKED[[u]], LATENTS, LATENTS, slope[[u]]) for u in range(3)]
    for at in range(2):
        assert sum(one[at] for one in each) == pytest.approx(whole[at])


def test_query_users_are_predicted_as_well_as_by_a_fold_in_and_conditions_hold():
    rng = np.random.default_rng(0)
    users, items = 400, 120
    user, item = np.nonzero(rng.random((users, items)) < 0.3)
    truth = rng.normal(0, 0.25, users)[user] + rng.normal(0, 0.25, items)[item]
    truth = np.clip(truth + rng.normal(0, 0.2, len(user)), -1, 1)
    tested = rng.random(len(user)) < 0.1
    whole = _Part(user, item, truth)
    found = study(
        whole.of(~tested), whole.of(tested), users, items, lowest=1.0, highest=5.0, query=0.2, seed=0
    )
    errors = found["rmse"]
    query = {name: each["query users"] for name, each in errors.items() if "query users" in each}
    assert query["attention"] < query["ridge fold-in"] + 0.02
    assert query["attention"] < errors["global mean"]["all"] - 0.1
    assert found["key users"] == 320
    assert found["rank"] == 20
    assert found["condition number"] < 10
    assert found["members named"][1] == 1.0
