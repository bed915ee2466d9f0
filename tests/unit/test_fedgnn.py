"""FedGNN: its layer and steps against derivatives and plain loops, many users at once, bad data."""

import math

import numpy as np
import pytest
from pydantic import ValidationError

from coterie.errors import ConfigError, DataError
from coterie.secure_sum.contribution import Contribution, UnboundedValueError
from coterie.systems.fedgnn.attention import Graphs, gradients
from coterie.systems.fedgnn.inductive import fitted_rows
from coterie.systems.fedgnn.local_step import contribute, hidden_rows, local_step, stacked_graphs, steps
from coterie.systems.fedgnn.mathematics import apply, initial, initial_factors, layout
from coterie.systems.fedgnn.settings import FedGnnSettings
from coterie.systems.shared.biases import ITEM, USER, scaled
from coterie.systems.shared.factor_steps import UserData, sample

ITEMS, K, M = 60, 3, 4
KEYS = [101, 7, 33, 4_000_000_000_000, 12]
SIZES = (3, 30, 9, 14, 22)
KNOWN = np.array([4, 0, 2, 1, 3])
SETTINGS = FedGnnSettings(factors=K, local_epochs=3, rate=0.2, private_rate=0.1, layer_rate=0.5)


def people(sizes=SIZES, seed=0):
    rng = np.random.default_rng(seed)
    return [
        UserData(rng.choice(ITEMS, size, replace=False), rng.integers(1, 6, size).astype(np.float32))
        for size in sizes
    ]


def model_of(settings=SETTINGS):
    """Return a model whose embeddings and layer are large enough to matter."""
    rng = np.random.default_rng(5)
    model = initial(settings, ITEMS, 1)
    model["items"][:, 2:] = rng.normal(0, 0.6, (ITEMS, K)).astype(np.float32)
    model["layer"] = rng.normal(0, 0.6, (K + 2, K)).astype(np.float32)
    return model


def around(users=5):
    """Return neighbours of users, some with fewer than others; what is beyond their number is never read."""
    rng = np.random.default_rng(6)
    embeddings = rng.normal(0, 0.6, (users, M, K)).astype(np.float32)
    for user in range(users):
        embeddings[user, KNOWN[user] :] = 1e6
    return embeddings, KNOWN[:users]


def rows_of(settings=SETTINGS):
    rng = np.random.default_rng(7)
    rows = initial_factors(settings, KEYS)
    rows[:, 2:] = rng.normal(0, 0.6, (len(KEYS), K)).astype(np.float32)
    return rows


def stepped(users=None, settings=SETTINGS, keys=KEYS, rows=None, neighbours="some", **more):
    users = people() if users is None else users
    found = local_step(
        model_of(settings),
        users,
        settings,
        keys,
        rows=rows_of(settings) if rows is None else rows,
        seed=1,
        round_=3,
        neighbours=around() if neighbours == "some" else neighbours,
        **more,
    )
    return sorted(found, key=lambda one: one.index)


def hidden_plainly(layer, row, items, neighbours, without=None):
    """Return a user's hidden embedding, node by node, by the formulas of the page."""
    p = row[2:]
    nodes = [p, *(item[2:] for n, item in enumerate(items) if n != without), *neighbours]
    weights, left, right = layer[:-2], layer[-2], layer[-1]
    logits = [float(left @ p + right @ node) for node in nodes]
    shares = [math.exp(one if one > 0 else 0.2 * one) for one in logits]
    mean = sum(share * node for share, node in zip(shares, nodes, strict=True)) / sum(shares)
    return p + weights @ mean


def loss_plainly(layer, row, items, neighbours, ratings):
    """Return the sum of squared errors, each item predicted by the graph without it."""
    return sum(
        (rating - row[USER] - item[ITEM] - hidden_plainly(layer, row, items, neighbours, n) @ item[2:]) ** 2
        for n, (item, rating) in enumerate(zip(items, ratings, strict=True))
    )


def derivative(of, at):
    """Return the derivative of a function by an array, by differences."""
    found = np.zeros_like(at)
    for place in np.ndindex(*at.shape):
        moved = [at.copy(), at.copy()]
        moved[0][place] -= 1e-6
        moved[1][place] += 1e-6
        found[place] = (of(moved[1]) - of(moved[0])) / 2e-6
    return found


def graphs_of(user, neighbours):
    rows, model = rows_of().astype(np.float64), model_of()
    own = people()[user]
    found = Graphs(
        rows[user : user + 1],
        model["items"][own.items][None].astype(np.float64),
        np.ones((1, len(own.items))),
        neighbours[None].astype(np.float64),
        np.ones((1, len(neighbours))),
    )
    return found, scaled(SETTINGS, own.ratings).astype(np.float64), model["layer"].astype(np.float64)


@pytest.mark.parametrize("user", [0, 2])
def test_derivatives_are_those_of_the_formulas_of_the_page(user):
    neighbours = around()[0][user][: KNOWN[user]].astype(np.float64)
    graphs, ratings, layer = graphs_of(user, neighbours)
    row, items = graphs.users[0], graphs.items[0]
    found = gradients(layer[None], graphs, ratings[None])
    n = len(items)
    own = derivative(lambda one: loss_plainly(layer, one, items, neighbours, ratings) / n, row)
    own[ITEM] = found.users[0, ITEM]  # the 1 of the row: it never moves, and nobody asks
    assert np.allclose(found.users[0], own, atol=1e-6)
    of_items = derivative(lambda one: loss_plainly(layer, row, one, neighbours, ratings), items)
    assert np.allclose(found.items[0], of_items, atol=1e-6)
    of_layer = derivative(lambda one: loss_plainly(one, row, items, neighbours, ratings) / n, layer)
    assert np.allclose(found.layers[0], of_layer, atol=1e-6)
    assert np.isclose((found.missed**2).sum(), loss_plainly(layer, row, items, neighbours, ratings))


def test_hidden_embeddings_are_those_of_the_formulas_and_do_not_depend_on_who_shares_a_batch():
    model, users, rows = model_of(), people(), rows_of()
    embeddings, known = around()
    together = hidden_rows(model, users, rows, (embeddings, known))
    for n, user in enumerate(users):
        items = model["items"][user.items].astype(np.float64)
        plain = hidden_plainly(
            model["layer"].astype(np.float64), rows[n].astype(np.float64), items, embeddings[n][: known[n]]
        )
        assert np.allclose(together[n, 2:], plain, atol=1e-5)
        assert (together[n, :2] == rows[n, :2]).all()
        alone = hidden_rows(model, [user], rows[n : n + 1], (embeddings[n : n + 1], known[n : n + 1]))
        assert alone.tobytes() == together[n : n + 1].tobytes()


def test_a_user_without_items_and_neighbours_attends_to_itself_alone():
    model, rows = model_of(), rows_of()[:1]
    nobody = UserData(np.empty(0, np.int64), np.empty(0, np.float32))
    found = hidden_rows(model, [nobody], rows)
    p = rows[0, 2:].astype(np.float64)
    assert np.allclose(found[0, 2:], p + model["layer"][:-2].astype(np.float64) @ p, atol=1e-6)


@pytest.mark.parametrize("neighbours", ["some", None])
def test_many_users_at_once_take_the_steps_that_each_takes_alone(neighbours):
    together = stepped(neighbours=neighbours)
    assert [one.index for one in together] == list(range(len(SIZES)))
    for n, user in enumerate(people()):
        own = None if neighbours is None else tuple(part[n : n + 1] for part in around())
        (alone,) = stepped([user], keys=[KEYS[n]], rows=rows_of()[n : n + 1], neighbours=own)
        for name in ("rows", "change", "layer", "kept"):
            assert getattr(alone, name).tobytes() == getattr(together[n], name).tobytes(), name
        assert alone.rng.random() == together[n].rng.random()


@pytest.mark.parametrize("neighbours", [None, "some"])
def test_steps_are_those_that_autograd_takes(neighbours):
    pytest.importorskip("torch")
    from bench.graph_step import torch_steps

    users, model = people(), model_of()
    known = around() if neighbours else None
    layer, taken = model["layer"].astype(np.float64), 0
    for stack, graphs, places in stacked_graphs(model["items"].astype(np.float64), users, rows_of(), known):
        ratings = np.zeros(places.shape)
        for row, user in enumerate(stack):
            ratings[row, : len(users[user].items)] = scaled(SETTINGS, users[user].ratings)
        opened = places % 7 > 0
        ours = steps(layer, graphs, ratings, SETTINGS, opened)
        change, layers, own = torch_steps(layer, graphs, ratings, SETTINGS, opened)
        np.testing.assert_allclose(ours.change, change, atol=1e-12)
        np.testing.assert_allclose(ours.layers, layers, atol=1e-12)
        np.testing.assert_allclose(ours.users, own, atol=1e-12)
        taken += len(stack)
    assert taken == len(users)


def test_steps_go_down_and_move_what_they_should():
    fine = SETTINGS.model_copy(
        update={"local_epochs": 1, "rate": 1e-3, "private_rate": 1e-3, "layer_rate": 1e-2}
    )
    for update, user in zip(stepped(settings=fine), people(), strict=True):
        n = update.index
        neighbours = around()[0][n][: KNOWN[n]].astype(np.float64)
        model, row = model_of(), rows_of()[n].astype(np.float64)
        order = np.argsort(user.items)
        items = model["items"][user.items[order]].astype(np.float64)
        ratings = scaled(SETTINGS, user.ratings[order]).astype(np.float64)
        layer = model["layer"].astype(np.float64)
        before = loss_plainly(layer, row, items, neighbours, ratings)
        assert np.isclose(before, update.loss)
        after = loss_plainly(
            layer + update.layer, update.kept.astype(np.float64), items + update.change, neighbours, ratings
        )
        assert after < before
        assert (update.change[:, USER] == 0).all()
        assert update.kept[ITEM] == 1


def test_closed_items_train_the_user_and_the_layer_and_their_rows_stay():
    allowed = np.zeros(ITEMS, np.bool_)
    allowed[::2] = True
    for closed, opened in zip(stepped(allowed=allowed), stepped(), strict=True):
        assert (closed.rows % 2 == 0).all()
        assert len(opened.rows) > len(closed.rows)
        assert closed.kept.any()
    nothing = stepped(allowed=np.zeros(ITEMS, np.bool_))
    assert all(len(one.rows) == 0 and one.layer.any() for one in nothing)


def test_pseudo_interacted_items_change_nothing_else_and_are_drawn_once():
    sampled = SETTINGS.model_copy(update={"samples": 1.0})
    drawn = sample(people(), KEYS, sampled.sampling(), ITEMS, seed=1)
    again = sample(people(), KEYS, sampled.sampling(), ITEMS, seed=1, round_=9)
    assert [user.sampled.tolist() for user in drawn] == [user.sampled.tolist() for user in again]
    for plain, noisy, user in zip(stepped(), stepped(drawn, settings=sampled), drawn, strict=True):
        for name in ("rows", "change", "layer", "kept"):
            assert getattr(plain, name).tobytes() == getattr(noisy, name).tobytes(), name
        assert noisy.sampled.tolist() == sorted(user.sampled.tolist())
        assert noisy.noise[:, ITEM].all()
        assert not set(noisy.sampled.tolist()) & set(user.items.tolist())


def test_an_update_is_what_a_contribution_holds_and_the_server_takes_means():
    shape = layout(SETTINGS, ITEMS)
    updates = stepped()
    contribution = Contribution(shape)
    for update in updates:
        contribute(update, contribution)
        contribution.count()
    sums = shape.decode(contribution.codes(), len(updates))
    raters = np.bincount(np.concatenate([user.items for user in people()]), minlength=ITEMS)
    moved = apply(model_of(), sums, raters=raters.astype(np.float64), users=len(updates))
    items, layer = np.zeros((ITEMS, K + 2)), np.zeros((K + 2, K))
    for update in updates:
        items[update.rows] += update.change
        layer += update.layer
    expected = model_of()["items"] + items / np.maximum(raters, 1)[:, None]
    assert np.allclose(moved["items"], expected, atol=1e-3)
    assert np.allclose(moved["layer"], model_of()["layer"] + layer / len(updates), atol=1e-3)


def test_a_step_that_diverges_sends_nothing():
    wild = SETTINGS.model_copy(
        update={"rate": 1e30, "private_rate": 1e30, "layer_rate": 1e30, "local_epochs": 9}
    )
    (update,) = stepped(people(SIZES[:1]), settings=wild, keys=KEYS[:1], rows=rows_of()[:1], neighbours=None)
    contribution = Contribution(layout(wild, ITEMS))
    with pytest.raises(UnboundedValueError, match="not a finite number"):
        contribute(update, contribution)


def test_data_that_does_not_fit_is_refused_without_telling_values():
    beyond = UserData(np.array([ITEMS]), np.array([3.0], np.float32))
    with pytest.raises(DataError, match="user 0 has an item beyond the 60"):
        stepped([beyond], keys=KEYS[:1], rows=rows_of()[:1], neighbours=None)
    wrong = UserData(np.array([1]), np.array([9.0], np.float32))
    with pytest.raises(DataError, match="user 0"):
        stepped([wrong], keys=KEYS[:1], rows=rows_of()[:1], neighbours=None)
    with pytest.raises(ValueError, match="rows have shape"):
        stepped(rows=rows_of()[:2])


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"lowest": 5, "highest": 1}, "lowest"),
        ({"factors": 0}, "factors"),
        ({"rate": 0}, "rate"),
        ({"layer_rate": -1}, "layer_rate"),
        ({"neighbour": 3}, "neighbour"),
        ({"neighbours": 3, "rotate_every": 19}, "every 20 passes .refresh.; expected 0, or 20 or more"),
        ({"rotate_every": 20}, "rotate_every 20 without neighbours has no effect; expected 0"),
    ],
)
def test_settings_out_of_range_are_refused(given, match):
    with pytest.raises(ValidationError, match=match):
        FedGnnSettings.model_validate(given)


def test_settings_come_back_from_a_plan():
    given = FedGnnSettings(factors=7, samples=2.0)
    assert FedGnnSettings.from_json(given.to_json()) == given
    # Plans from before the key was replaced in mid-run hash as they did.
    assert "rotate_every" not in given.to_json()
    rotating = FedGnnSettings(neighbours=4, rotate_every=40)
    assert FedGnnSettings.from_json(rotating.to_json()) == rotating
    with pytest.raises(ConfigError, match="missing"):
        FedGnnSettings.from_json('{"factors": 7}')


def test_a_user_who_never_trained_fits_its_own_row_near_the_least_of_its_loss():
    settings = FedGnnSettings(factors=K)
    model, users = model_of(settings), people()
    found = fitted_rows(model, users, settings, np.array(KEYS), seed=1)
    layer = model["layer"].astype(np.float64)
    for n, user in enumerate(users):
        items = model["items"][user.items].astype(np.float64)
        ratings = scaled(settings, user.ratings).astype(np.float64)

        def loss(row, items=items, ratings=ratings):
            own = loss_plainly(layer, row, items, np.empty((0, K)), ratings) / len(items)
            return own + settings.ridge * (row[USER] ** 2 + row[2:] @ row[2:])

        row = found[n].astype(np.float64)
        slope = derivative(loss, row)
        first = initial_factors(settings, KEYS[n : n + 1])[0].astype(np.float64)
        assert loss(row) < loss(first)
        assert (
            np.abs(np.delete(slope, ITEM)).max()
            < 0.1 * np.abs(np.delete(derivative(loss, first), ITEM)).max()
        )
        assert row[ITEM] == 1


def test_what_a_user_who_never_trained_gets_does_not_depend_on_others():
    settings = FedGnnSettings(factors=K)
    model, users = model_of(settings), people()
    together = fitted_rows(model, users, settings, np.array(KEYS), seed=1)
    for n, user in enumerate(users):
        alone = fitted_rows(model, [user], settings, np.array(KEYS[n : n + 1]), seed=1)
        assert alone.tobytes() == together[n : n + 1].tobytes()
