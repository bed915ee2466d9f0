"""FedNCF: the local step of many users, contributions, and what the orchestrator makes of their sum."""

import json
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from coterie.errors import ConfigError, DataError
from coterie.secure_sum.contribution import Contribution, Segment
from coterie.systems.fedncf.local_step import _draw, contribute, local_step
from coterie.systems.fedncf.mathematics import (
    apply,
    balance,
    expected_touches,
    initial,
    initial_private,
    initial_server_state,
    layout,
    scores,
)
from coterie.systems.fedncf.networks import MODELS, Architecture
from coterie.systems.fedncf.settings import Aggregation, FedNcfSettings, published, tuned

ITEMS = 60
SMALL = {"dim": 3, "mlp_embedding": 4, "layers": (6, 5)}
KEYS = [101, 7, 33, 4_000_000_000_000, 12, 5]


def histories(sizes=(3, 30, 9, 1, 14, 22), seed=0):
    rng = np.random.default_rng(seed)
    return [rng.choice(ITEMS, size, replace=False) for size in sizes]


def make(model="neumf", **options):
    return FedNcfSettings(model=model, **SMALL, **options)


def train(options, *, keys=KEYS, data=None, private=None, round_=3, model=None, **more):
    model = model or initial(options, ITEMS, 1)
    private = private or initial_private(options, keys)
    data = data or histories()
    updates = local_step(model, private, data, options, keys, seed=1, round_=round_, **more)
    return sorted(updates, key=lambda update: update.index)


WAYS = {
    "one step": {},
    "three epochs": {"local_epochs": 3, "local_rate": 0.1},
    "batches": {"batch_size": 16, "local_rate": 0.1, "local_epochs": 2},
    "batches with Adam": {
        "batch_size": 16,
        "local_optimiser": "adam",
        "local_rate": 0.01,
        "local_epochs": 2,
    },
    "proximal": {"local_epochs": 3, "local_rate": 0.1, "proximal": 0.5},
    "proximal Adam": {"local_epochs": 2, "local_optimiser": "adam", "local_rate": 0.01, "proximal": 0.5},
    "plain private": {"private_optimiser": "sgd", "batch_size": 20, "local_rate": 0.05},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_the_batched_step_is_a_loop_over_users_with_autograd(model, way):
    pytest.importorskip("torch")
    from bench.local_step import torch_user

    options = make(model, **WAYS[way])
    shared, private = initial(options, ITEMS, 1), initial_private(options, KEYS)
    for round_ in (0, 1):  # the second with moments
        updates = train(options, private=private, round_=round_, model=shared)
        for update, data, key in zip(updates, histories(), KEYS, strict=True):
            rng = np.random.default_rng(np.random.SeedSequence(key, spawn_key=(2, 1, round_)))
            kept = {name: value[update.index] for name, value in private.arrays().items()}
            theirs = torch_user(options, shared, kept, data, rng)
            change = theirs["items"] - shared["items"]
            # Float32 on both sides; sums in another order.
            close = {"rtol": 2e-3, "atol": 2e-5}
            np.testing.assert_allclose(update.row_deltas, change[update.rows], **close)
            assert not np.delete(change, update.rows, axis=0).any()
            np.testing.assert_allclose(update.network_delta, theirs["network"] - shared["network"], **close)
            np.testing.assert_allclose(update.private.embedding[0], theirs["embedding"], **close)
            np.testing.assert_allclose(update.loss, theirs["loss"], rtol=1e-4)
            if options.private_optimiser == "adam":
                np.testing.assert_allclose(update.private.first[0], theirs["first"], **close)
                np.testing.assert_allclose(update.private.second[0], theirs["second"], **close)
        for update in updates:
            private.put([update.index], update.private)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_a_user_learns_the_same_bits_alone_and_beside_others(model, way):
    options = make(model, **WAYS[way])
    together = train(options)
    data = histories()
    for u in reversed(range(len(KEYS))):
        (alone,) = train(options, keys=[KEYS[u]], data=[data[u]])
        for name in ("rows", "row_deltas", "network_delta", "instances", "loss"):
            np.testing.assert_array_equal(getattr(alone, name), getattr(together[u], name))
        for name, value in alone.private.arrays().items():
            np.testing.assert_array_equal(value, together[u].private.arrays()[name])


def test_the_sum_is_the_same_however_users_are_spread_over_hosts():
    options = make(batch_size=16, local_rate=0.05, touch="exact")
    data = histories()

    def host(users):
        contribution = Contribution(layout(options, ITEMS))
        for update in train(options, keys=[KEYS[u] for u in users], data=[data[u] for u in users]):
            contribute(update, contribution, options)
            contribution.count()
        return contribution.codes()

    whole = host(range(6))
    np.testing.assert_array_equal(host([4, 0]) + host([5, 3, 1]) + host([2]), whole)


def test_what_was_private_is_only_read():
    options = make()
    private = initial_private(options, KEYS)
    before = private.take(range(6))
    train(options, private=private)
    for name, value in private.arrays().items():
        np.testing.assert_array_equal(value, before.arrays()[name])


@given(
    st.lists(st.integers(0, 39), unique=True, max_size=40),
    st.sampled_from([0, 1, 7, 16]),
    st.integers(0, 3),
)
@settings(deadline=None, max_examples=80)
def test_draws_meet_every_interaction_once_an_epoch_and_other_items_beside(history, batch, epochs):
    options = make(negatives=3, batch_size=batch)
    mine = np.array(history, np.int64)
    work = _draw(0, mine, np.random.default_rng(0), options, 40, epochs)
    if not len(mine) or len(mine) == 40 or not epochs:
        assert work.instances == 0
        assert not len(work.touched)
        return
    assert work.instances == 4 * len(mine)
    assert work.counts.sum() == epochs * work.instances
    item = work.touched[work.row]
    times = np.rint(work.weight * work.counts[work.step]).astype(int)
    for step in range(len(work.counts)):
        here = item[work.step == step]
        assert len(set(here.tolist())) == len(here)
        assert times[work.step == step].sum() == work.counts[step]
    positive = work.label == 1
    met = np.bincount(item[positive], weights=times[positive], minlength=40)
    np.testing.assert_array_equal(met[mine], epochs)
    assert met.sum() == epochs * len(mine)
    assert not set(item[~positive].tolist()) & set(mine.tolist())
    assert len(set(work.touched.tolist())) == len(work.touched)


def test_negatives_are_uniform_over_what_is_not_known():
    history = np.array([11, 12, 59, 40, 0])
    work = _draw(0, history, np.random.default_rng(0), make(), ITEMS, 2000)
    negative = work.label == 0
    times = np.bincount(
        work.touched[work.row][negative], weights=(work.weight * 25)[negative], minlength=ITEMS
    )
    expected = np.full(ITEMS, 2000 * 20 / 55)
    expected[history] = 0
    assert np.abs(times - expected).max() < 5 * np.sqrt(2000 * 20 / 55)
    assert not times[history].any()


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_closed_items_stay_and_everything_else_is_as_if_they_were_open(way):
    options = make(**WAYS[way])
    allowed = np.arange(ITEMS) % 3 > 0
    for every, some in zip(train(options), train(options, allowed=allowed), strict=True):
        sent = allowed[every.rows]
        np.testing.assert_array_equal(some.rows, every.rows[sent])
        np.testing.assert_array_equal(some.row_deltas, every.row_deltas[sent])
        np.testing.assert_array_equal(some.network_delta, every.network_delta)
        np.testing.assert_array_equal(some.private.embedding, every.private.embedding)
        assert not sent.all()


@pytest.mark.parametrize("way", ["one step", "batches"])
def test_the_balance_changes_what_negatives_add_to_rows_and_nothing_else(way):
    options = make(**{**WAYS[way], "local_epochs": 1, "batch_size": 0 if way == "one step" else 1000})
    options = (
        options if way == "one step" else options.model_copy(update={"proximal": 1e-30})
    )  # the other code
    weights = np.linspace(1, 3, ITEMS).astype(np.float32)
    data = histories()
    for plain, weighed in zip(train(options), train(options, balance=weights), strict=True):
        factor = np.where(np.isin(plain.rows, data[plain.index]), 1, weights[plain.rows])
        np.testing.assert_allclose(
            weighed.row_deltas, plain.row_deltas * factor[:, None], rtol=1e-3, atol=1e-6
        )
        np.testing.assert_array_equal(weighed.network_delta, plain.network_delta)
        np.testing.assert_array_equal(weighed.private.embedding, plain.private.embedding)


def test_the_balance_is_all_participants_by_those_who_send_the_row():
    opened = np.array([[True, True, False, False], [True, False, True, False]])
    np.testing.assert_allclose(balance(opened, np.array([100, 300])), [1, 4, 4 / 3, 1])


def test_users_without_anything_to_learn_from_send_zeros_and_keep_what_they_have():
    options = make(touch="exact")
    empty, all_of_it = np.empty(0, np.int64), np.arange(ITEMS)
    private = initial_private(options, [1, 2])
    updates = train(options, keys=[1, 2], data=[empty, all_of_it], private=private)
    assert [update.index for update in updates] == [0, 1]
    contribution = Contribution(layout(options, ITEMS))
    for update in updates:
        assert update.instances == 0
        assert np.isnan(update.loss)
        np.testing.assert_array_equal(update.private.embedding[0], private.embedding[update.index])
        contribute(update, contribution, options)
        contribution.count()
    sums = contribution.layout.decode(contribution.codes(), 2)
    assert not any(value.any() for value in sums.values())
    model = initial(options, ITEMS, 1)
    plain = options.model_copy(update={"server_optimiser": "fedavg"})
    moved, _ = apply(model, {}, sums, plain, users=2)
    for name, value in model.items():
        np.testing.assert_array_equal(moved[name], value)


def test_partial_work_is_the_work_of_fewer_epochs():
    options = make(local_epochs=3, local_rate=0.1, proximal=0.1)
    epochs = [1, 3, 2, 0, 3, 1]
    updates = train(options, epochs=epochs)
    for u, count in enumerate(epochs):
        if not count:
            assert not updates[u].instances
            continue
        fewer = train(options, keys=[KEYS[u]], data=[histories()[u]], epochs=[count])[0]
        np.testing.assert_array_equal(updates[u].network_delta, fewer.network_delta)
        assert updates[u].private.steps[0] == count


def test_a_history_beyond_the_catalogue_is_refused():
    with pytest.raises(DataError, match="60"):
        train(make(), keys=[1], data=[np.array([3, ITEMS])])


def test_other_rounds_seeds_and_users_draw_differently():
    options = make()
    data = [histories()[1]] * 2
    one, two = train(options, keys=[1, 2], data=data)
    (later,) = train(options, keys=[1], data=data[:1], round_=4)
    for other in (two, later):
        # Of few items they may draw the same ones, then not as often.
        same = np.array_equal(one.rows, other.rows) and np.array_equal(one.row_deltas, other.row_deltas)
        assert not same


def by_hand(options, updates):
    """Average as the papers write it, from the updates themselves."""
    n = np.array([update.instances for update in updates], float)
    rows = np.zeros((len(updates), ITEMS, options.architecture.width))
    touched = np.zeros((len(updates), ITEMS))
    for u, update in enumerate(updates):
        rows[u, update.rows] = update.row_deltas
        touched[u, update.rows] = 1
    network = np.array([update.network_delta for update in updates], float)
    if options.aggregation == "simple":
        return rows.mean(axis=0), network.mean(axis=0)
    weighted = (n[:, None] * network).sum(axis=0) / n.sum()
    if options.aggregation == "fedavg":
        return (n[:, None, None] * rows).sum(axis=0) / n.sum(), weighted
    return rows.sum(axis=0) / np.maximum(touched.sum(axis=0), 1)[:, None], weighted


def summed(options, updates):
    contribution = Contribution(layout(options, ITEMS))
    for update in updates:
        contribute(update, contribution, options)
        contribution.count()
    assert not contribution.clipped
    return contribution.layout.decode(contribution.codes(), len(updates))


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_each_aggregation_is_what_the_papers_say(aggregation):
    options = make(
        aggregation=aggregation, touch="exact", server_optimiser="fedavg", bits=24, n_cap=200,
        local_epochs=2, local_rate=0.1, row_bound=0.5, network_bound=0.5,
    )  # fmt: skip
    updates = train(options)
    model = initial(options, ITEMS, 1)
    moved, state = apply(model, {}, summed(options, updates), options, users=6)
    rows, network = by_hand(options, updates)
    assert not state
    np.testing.assert_allclose(moved["items"] - model["items"], rows, atol=1e-5)
    np.testing.assert_allclose(moved["network"] - model["network"], network, atol=1e-5)
    assert np.abs(rows).max() > 1e-3


def test_rows_that_nobody_touched_keep_their_value():
    options = make(touch="exact", negatives=1, server_optimiser="fedavg")
    updates = train(options, keys=[1], data=[np.array([3, 4])])
    model = initial(options, ITEMS, 1)
    moved, _ = apply(model, {}, summed(options, updates), options, users=1)
    still = np.setdiff1d(np.arange(ITEMS), updates[0].rows)
    assert len(still) > ITEMS // 2
    np.testing.assert_array_equal(moved["items"][still], model["items"][still])
    assert (moved["items"][updates[0].rows] != model["items"][updates[0].rows]).any()


def test_without_counts_rows_are_divided_by_what_is_expected_or_left_to_the_optimiser():
    options = make(touch="once", server_optimiser="fedavg", bits=24)
    updates = train(options)
    sums = summed(options, updates)
    assert "touched" not in sums
    model = initial(options, ITEMS, 1)
    expected = np.linspace(0.2, 6, ITEMS)
    moved, _ = apply(model, {}, sums, options, users=6, expected=expected)
    by_count = sums["items"] / np.maximum(expected, 1)[:, None]
    np.testing.assert_allclose(moved["items"] - model["items"], by_count, atol=1e-6)
    with pytest.raises(ConfigError, match="expected touch counts"):
        apply(model, {}, sums, options, users=6)
    adaptive = options.model_copy(update={"server_optimiser": "fedadam"})
    start = initial_server_state(adaptive, model)
    free, _ = apply(model, start, sums, adaptive, users=6)
    counted, _ = apply(model, start, sums, adaptive, users=6, expected=expected)
    np.testing.assert_allclose(free["items"], counted["items"], atol=1e-4)


def test_the_cap_bounds_a_participants_weight():
    options = make(n_cap=20, server_optimiser="fedavg")
    sums = summed(options, train(options))
    sizes = [5 * len(each) for each in histories()]
    assert sums["instances"] == sum(min(size, 20) for size in sizes)


@given(
    st.lists(st.integers(1, 25), min_size=40, max_size=60),
    st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=3)
def test_expected_touches_are_those_that_happen_on_average(sizes, seed):
    options = make("gmf", negatives=2)
    rng = np.random.default_rng(seed)
    popularity = rng.dirichlet(np.ones(ITEMS))
    data = [rng.choice(ITEMS, size, replace=False, p=popularity) for size in sizes]
    support = np.bincount(np.concatenate(data), minlength=ITEMS)
    allowed = support > 0
    expected = expected_touches(support, np.mean(sizes), options, users=len(data))
    met = np.zeros(ITEMS)
    for round_ in range(10):
        for update in train(options, keys=range(len(data)), data=data, round_=round_, allowed=allowed):
            met[update.rows] += 1 / 10
    assert not expected[~allowed].any()
    # Sizes differ, the expectation takes their mean: it is no exact count.
    assert np.abs(met - expected)[allowed].mean() < 0.15 * len(data)
    assert abs(met.sum() / expected.sum() - 1) < 0.25


def test_scaffold_keeps_a_control_variate_with_the_participant_and_its_mean_with_the_model():
    options = make(
        scaffold=True,
        local_epochs=3,
        local_rate=0.1,
        bits=24,
        touch="exact",
        server_optimiser="fedavg",
    )
    model, private = initial(options, ITEMS, 1), initial_private(options, KEYS)
    for round_ in range(2):
        updates = train(options, model=model, private=private, round_=round_)
        if not round_:  # without history the control variate is the mean gradient
            for update in updates:
                np.testing.assert_allclose(
                    update.private.control[0], -update.network_delta / 0.3, rtol=1e-4, atol=1e-6
                )
        for update in updates:
            private.put([update.index], update.private)
        model, _ = apply(model, {}, summed(options, updates), options, users=6, population=6)
        np.testing.assert_allclose(model["control"], private.control.mean(axis=0), atol=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_candidates_have_the_scores_that_they_have_among_all_items(model):
    options = make(model)
    shared, private = initial(options, ITEMS, 1), initial_private(options, KEYS)
    found = scores(shared, private.embedding, options)
    candidates = np.tile([4, 3, 0, 1], (6, 1))
    some = scores(shared, private.embedding, options, candidates)
    np.testing.assert_allclose(some, found[:, [4, 3, 0, 1]], rtol=1e-5)


def test_private_state_goes_slot_by_slot():
    options = make(scaffold=True)
    private = initial_private(options, KEYS)
    assert {len(value) for value in private.arrays().values()} == {6}
    one = private.take([2])
    one.embedding += 1
    one.steps += 5
    private.put([4], one)
    np.testing.assert_array_equal(private.embedding[4], one.embedding[0])
    assert private.steps.tolist() == [0, 0, 0, 0, 5, 0]
    np.testing.assert_array_equal(
        initial_private(options, [KEYS[2]]).embedding[0], initial_private(options, KEYS).embedding[2]
    )


def test_a_layout_ends_with_the_segments_of_the_caller():
    options = make(touch="exact")
    found = layout(options, ITEMS, (Segment.whole("hits", (), 1),))
    names = [segment.name for segment in found.segments]
    assert names == ["items", "touched", "network", "instances", "hits"]
    assert found.size == ITEMS * 8 + options.architecture.network_size + 2


def test_federated_training_learns_to_rank():
    options = make("gmf", touch="once", server_optimiser="fedadam", server_rate=0.05, row_bound=20.0)
    # Two camps: each likes half of the items.
    rng = np.random.default_rng(0)
    data = [rng.choice(30, 12, replace=False) + 30 * (u % 2) for u in range(40)]
    model, private = initial(options, ITEMS, 1), initial_private(options, range(40))
    state = initial_server_state(options, model)
    for round_ in range(30):
        updates = train(options, keys=range(40), data=data, model=model, private=private, round_=round_)
        model, state = apply(model, state, summed(options, updates), options, users=40, global_round=round_)
        for update in updates:
            private.put([update.index], update.private)
    found = scores(model, private.embedding, options)
    unseen = np.ones((40, ITEMS), bool)
    for u, items in enumerate(data):
        unseen[u, items] = False
    for u in range(40):
        own = np.arange(30) + 30 * (u % 2)
        other = np.arange(30) + 30 * (1 - u % 2)
        assert np.median(found[u, own[unseen[u, own]]]) > np.quantile(found[u, other], 0.9)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("make_settings", [tuned, published])
def test_the_settings_that_are_offered_send_changes_within_their_bounds(make_settings, model):
    options = make_settings(model)
    assert options.architecture.width == Architecture(model).width
    # A network whose output begins where it ends changes little at first.
    for output_bias, changed in (("log-odds", ("items",)), ("zero", ("items", "network"))):
        shared = initial(options.model_copy(update={"output_bias": output_bias}), ITEMS, 1)
        contribution = Contribution(layout(options, ITEMS))
        for update in train(options, model=shared):
            contribute(update, contribution, options)
            contribution.count()
        assert not contribution.clipped
        sums = contribution.layout.decode(contribution.codes(), 6)
        # More than rounding: the changes are large beside the steps of the codes.
        for name in changed:
            assert np.abs(sums[name]).max() > 100 * contribution.layout[name].step
    with pytest.raises(ValidationError, match="model"):
        make_settings("svd")


@pytest.mark.parametrize(
    "wrong",
    [
        {"aggregation": "median"}, {"touch": "never"}, {"local_optimiser": "lion"}, {"negatives": 0},
        {"local_epochs": 0}, {"batch_size": -1}, {"local_rate": float("nan")}, {"proximal": -1.0},
        {"decay": 0.0}, {"bits": 4}, {"n_cap": 0}, {"output_bias": "one"},
        {"server_optimiser": "lion"}, {"private_optimiser": "lion"}, {"server_beta1": 1.0}, {"layers": ()},
        {"layers": (4, 0)}, {"dim": 0}, {"scaffold": True, "local_optimiser": "adam"}, {"median": True},
        *(
            {name: value}
            for name in ("local_rate", "private_rate", "server_rate", "server_tau", "row_bound", "network_bound",
                         "user_bound", "proximal", "decay")
            for value in (float("nan"), float("inf"), -1.0)
        ),
        *(
            {name: 0.0}
            for name in ("local_rate", "private_rate", "server_rate", "server_tau", "row_bound", "network_bound",
                         "user_bound")
        ),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused_in_python_and_in_a_plan(wrong):
    given = {**make().model_dump(), **wrong}
    with pytest.raises(ValidationError):
        FedNcfSettings(**given)
    with pytest.raises(ConfigError, match=r"the settings of the plan are not of FedNcfSettings"):
        FedNcfSettings.from_json(json.dumps(given))


def test_a_size_that_is_out_of_range_and_settings_that_do_not_go_together_are_named():
    with pytest.raises(ValidationError, match=r"layers \(4, 0\)"):
        FedNcfSettings(layers=(4, 0))
    with pytest.raises(ConfigError, match=r"scaffold needs local_optimiser 'sgd'; it is 'adam'"):
        FedNcfSettings.from_json('{"scaffold":true,"local_optimiser":"adam"}')


@pytest.mark.parametrize("text", ["", "[]", "{", '{"learning":{}}', '{"dim":"12"}', '{"scaffold":1}'])
def test_a_plan_with_other_settings_is_refused(text):
    with pytest.raises(ConfigError, match="the settings of the plan are not of FedNcfSettings"):
        FedNcfSettings.from_json(text)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("make_settings", [tuned, published])
def test_a_plan_carries_every_setting(make_settings, model):
    settings = make_settings(model)
    assert FedNcfSettings.from_json(settings.to_json()) == settings
    # A plan has a key that came later only where it differs from its default.
    plain = FedNcfSettings.model_fields.keys() - FedNcfSettings.omitted
    assert json.loads(settings.to_json()).keys() == plain
    weighed = settings.model_copy(update={"popularity": 0.5})
    assert FedNcfSettings.from_json(weighed.to_json()) == weighed


def test_network_and_optimiser_follow_the_settings_of_a_copy():
    settings = make("gmf")
    assert settings.architecture.width == 3
    changed = settings.model_copy(update={"dim": 5, "server_optimiser": "fedyogi"})
    assert (changed.architecture.width, changed.server.name) == (5, "fedyogi")
