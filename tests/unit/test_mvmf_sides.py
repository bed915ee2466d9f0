"""FedMVMF's sides of server, host and data owner: what each hands over, trained in one process."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from coterie.data import SyntheticSpec, cold_items, cold_users, generate, generate_user_attributes, random
from coterie.data.attributes import AttributeTable, item_attributes
from coterie.data.keyed_order import key_hash
from coterie.data.partition import Partition, spread_users
from coterie.errors import ConfigError, DataError
from coterie.evaluation.baselines import damped_mean
from coterie.evaluation.holdout import TEST, TRAIN
from coterie.evaluation.rated import figures, figures_of
from coterie.rounds.sides import Summed, User
from coterie.rounds.training import Purpose
from coterie.studies.in_process import train_plan
from coterie.studies.run_data import Feed
from coterie.systems.fedmvmf.host import FedMvmfHost
from coterie.systems.fedmvmf.owner import FedMvmfOwner
from coterie.systems.fedmvmf.server import FedMvmfServer
from coterie.systems.fedmvmf.settings import PRESETS, FedMvmfPlan
from coterie.systems.shared.factors import from_attributes
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.metric_segments import names_of
from coterie.systems.shared.rated_measures import FIGURES, MEASURES
from coterie.wire.v1.orchestrator_pb2 import CohortKind, RoundsPlan, RunPlan

SPEC = SyntheticSpec(users=60, items=80, interactions=1_500, genres=4)
DATA, TOLD = generate(SPEC), generate_user_attributes(SPEC)
FEATURES = item_attributes(DATA)
PLAN = FedMvmfPlan(preset="paper", factors=4, ridge=3.0, attribute_names=TOLD.names, min_touch=1)


def feed_of(split, hosts=2, **changes):
    made = Feed(
        dataset=DATA,
        positive=np.ones(len(DATA), np.bool_),
        split=split,
        partition=Partition(("catalogue",), np.ones((len(DATA.items), 1), np.bool_)),
        host=spread_users(len(DATA.users), hosts, 0),
        attributes=TOLD,
        features=FEATURES,
    )
    return dataclasses.replace(made, **changes)


def trained(feed, plan=PLAN, *, secure_sum="clear", hosts=2, passes=15, **rounds):
    made = RoundsPlan(
        **{
            "cohorts": CohortKind.COHORT_KIND_ALL,
            "cohort": 20,
            "group": 60,
            "beacon": bytes(32),
            "min_cohort": 20,
            "min_sum": 20,
            "experiment": True,
            "passes": passes,
            "evaluate_every": 5,
            "choose_by": "validation_ndcg_rated@10",
            **rounds,
        }
    )
    run = RunPlan(
        run_id="a-run",
        system="fedmvmf",
        form="users" if made.party_per_user else "hosts",
        secure_sum=secure_sum,
        settings=plan.to_json(),
        rounds=made,
    )
    return train_plan(run, feed, hosts=hosts, see=lambda event: None)


EXISTING = random(DATA, validation=0.1, seed=3)
SEVERAL = range(4)
"""Seeds of divisions of the data: a comparison of figures must come out the same for each, or in their mean."""


def held(part=EXISTING.part, attributes=TOLD, rating=DATA.rating):
    return HostData(DATA.users, DATA.items, DATA.user, DATA.item, part, rating, attributes)


def host(plan=PLAN, data=None):
    keys = key_hash(DATA.users, 0)
    return FedMvmfHost(plan, held() if data is None else data, keys, 0, lambda private: private)


def model_of(plan=PLAN, groups=1):
    """Return a server, its arrays with every item open, and the model of version 0."""
    server = FedMvmfServer(plan, len(DATA.items), 0, groups)
    arrays = server.initial()
    arrays["popularity"] = np.bincount(DATA.item, minlength=len(DATA.items)).astype(np.float32)
    return server, arrays, server.model(arrays)


def codes(side, purpose, model, opened=None, users=range(60), per_user=False, round_=1):
    """Return the decoded sum of some users, each a member of its own or all of them one."""
    members = {n: [User(n, 0)] for n in users} if per_user else {0: [User(n, 0) for n in users]}
    asked = SimpleNamespace(purpose=purpose.value, round=round_, pass_number=0)
    total = sum(one for _, one in side.contributions(asked, model, opened, members))
    return side.layout(purpose).decode(total.astype(np.uint32), len(users))


def test_settings_come_back_from_the_plan_as_they_were():
    for preset in PRESETS.values():
        plan = FedMvmfPlan(**preset, attribute_names=("age: 1", "age: 2"), min_touch=5, new_items=True)
        assert FedMvmfPlan.from_json(plan.to_json()) == plan


def test_what_stays_with_whoever_starts_the_run_is_no_part_of_the_plan():
    plan = FedMvmfPlan(preset="both", attributes=False, features="none", genome="a-folder", item_servers=3)
    assert plan.to_json() == FedMvmfPlan(**PRESETS["both"]).to_json()
    assert not FedMvmfPlan.local & set(json.loads(plan.to_json()))


@pytest.mark.parametrize(
    "change",
    [
        {"min_touch": 0},
        {"more": 1},
        {"learning": {"factors": 4}},
        {"factors": "4"},
        {"weights": "dense"},
        {"lowest": 4.0, "highest": 3.0},
        {"attribute_names": 3},
        {"attribute_names": [3]},
        {"new_items": 1},
    ],
    ids=str,
)
def test_settings_that_are_not_of_the_system_are_refused(change):
    text = json.dumps({**json.loads(PLAN.to_json()), **change})
    with pytest.raises(ConfigError):
        FedMvmfPlan.from_json(text)


def test_it_orders_ratings_better_than_means_do_and_every_figure_is_there():
    gains = []
    for seed in SEVERAL:
        split = random(DATA, validation=0.1, seed=seed)
        known = trained(feed_of(split), passes=15, evaluate_every=15).known
        assert known["phase"] == "done"
        chosen, train = known["chosen"]["metrics"], split.train
        assert tuple(sorted(chosen)) == tuple(sorted(FIGURES))
        means = damped_mean(DATA.item[train], DATA.rating[train], len(DATA.items))
        table = np.broadcast_to(means, (len(DATA.users), len(DATA.items)))
        beside = figures(feed_of(split).rated().measure(table.__getitem__))
        gains.append([chosen[name] - beside[name] for name in ("ndcg_rated@10", "recall@10")])
    # A user's few test ratings have few orders: single divisions differ by as much.
    ndcg, recall = np.mean(gains, axis=0)
    assert ndcg > 0.003
    assert recall > 0.1


def test_figures_in_a_sum_are_those_of_all_users_at_one_place():
    made = trained(feed_of(EXISTING), passes=5)
    last = made.known["history"][-1]
    server = FedMvmfServer(PLAN, len(DATA.items), 0, 1)
    model = server.model(made.trained.arrays)
    measured = host().measure(model, np.arange(60))
    expected = figures(measured)
    for name in FIGURES:
        assert last["metrics"][name] == pytest.approx(expected[name], abs=2e-3), name
    assert last["users"]["rmse"] == np.count_nonzero(~np.isnan(measured["ratings"]))


@pytest.mark.parametrize(
    ("secure_sum", "hosts", "users"), [("clear", 1, False), ("clear", 3, True), ("masked", 3, False)]
)
def test_numbers_depend_neither_on_the_sum_nor_on_how_users_are_spread(secure_sum, hosts, users):
    plain = trained(feed_of(EXISTING, 2), passes=2, evaluate_every=2)
    other = trained(
        feed_of(EXISTING, hosts),
        passes=2,
        evaluate_every=2,
        hosts=hosts,
        secure_sum=secure_sum,
        party_per_user=users,
    )
    assert other.known["history"][-1]["metrics"] == plain.known["history"][-1]["metrics"]


@pytest.mark.parametrize(
    "learning",
    [
        *PRESETS.values(),
        {"preset": "paper", "update": "sgd", "private_rate": 1e-3},
        {"preset": "paper", "resample": True},
        {"biases": False, "weights": "obs-only"},
    ],
    ids=["ratings", "paper", "top-n", "both", "sgd", "resample", "obs-only"],
)
def test_every_way_of_learning_comes_to_order_ratings_better(learning):
    plan = FedMvmfPlan(**learning, attribute_names=TOLD.names, min_touch=1)
    for seed in SEVERAL[:2]:
        split = random(DATA, validation=0.1, seed=seed)
        history = trained(feed_of(split), plan, passes=5).known["history"]
        assert history[-1]["metrics"]["ndcg_rated@10"] > history[0]["metrics"]["ndcg_rated@10"] + 0.02


def test_groups_train_only_items_that_enough_of_their_own_users_have_rated():
    plan = PLAN.model_copy(update={"min_touch": 3})
    made = trained(
        feed_of(EXISTING), plan, cohorts=CohortKind.COHORT_KIND_GROUPS, group=20, passes=2, evaluate_every=2
    )
    arrays = made.trained.arrays
    assert len(arrays["supports"]) == 3
    np.testing.assert_array_equal(
        arrays["popularity"], np.where(arrays["supports"] >= 3, arrays["supports"], 0).sum(axis=0)
    )
    side, (_, _, model) = host(plan), model_of(plan)
    opened = arrays["supports"] >= 3
    sums = codes(side, Purpose.TRAIN, model, opened)
    assert not sums["items"][~opened[0]].any()
    assert sums["items"][opened[0]].any(axis=1).mean() > 0.9


def test_users_without_ratings_contribute_nothing_and_are_served_by_their_attributes():
    split = cold_users(DATA, test=0.2, seed=1)
    side, (_, _, model) = host(data=held(split.part)), model_of()
    cold = np.unique(DATA.user[split.part == TEST])
    sums = codes(side, Purpose.TRAIN, model, users=cold.tolist())
    assert not sums["items"].any()
    assert not sums["attributes"].any()
    expected = from_attributes(TOLD.values[cold], model["attributes"], PLAN)
    np.testing.assert_array_equal(side.factors(model, cold), expected)
    assert codes(side, Purpose.TRAIN, model)["items"].any()


def test_new_users_are_told_more_by_attributes_than_without():
    nothing = AttributeTable((), np.empty((60, 0), np.float32))
    for seed in SEVERAL[:3]:
        split = cold_users(DATA, test=0.3, validation=0.1, seed=seed)
        found = [
            trained(
                feed_of(split, attributes=told),
                PLAN.model_copy(update={"attribute_names": told.names}),
                passes=10,
            ).known["chosen"]["metrics"]["precision@10"]
            for told in (TOLD, nothing)
        ]
        assert found[0] > found[1] + 0.05


def test_new_items_have_the_rows_that_their_features_predict_and_are_ranked_among_themselves():
    plan = PLAN.model_copy(update={"new_items": True})
    recall = []
    for seed in SEVERAL:
        split = cold_items(DATA, test=0.2, validation=0.1, seed=seed)
        with_features, without = (
            trained(feed_of(split, features=features), plan, passes=10, evaluate_every=10)
            for features in (FEATURES, None)
        )
        recall.append([one.known["history"][-1]["metrics"]["recall@10"] for one in (with_features, without)])
    told, untold = np.mean(recall, axis=0)
    assert told > untold + 0.05
    server = FedMvmfServer(plan, len(DATA.items), 0, 1)
    arrays = with_features.trained.arrays
    new = np.unique(DATA.item[split.part != TRAIN])
    np.testing.assert_array_equal(server.model(arrays)["items"][new], arrays["predicted"][new])
    assert arrays["predicted"][new].any(axis=1).all()
    assert not without.trained.arrays["predicted"].any()


def test_an_owner_tells_of_its_own_items_and_of_new_ones_only_what_features_predict():
    _, _, model = model_of()
    model = {**model, "popularity": np.where(np.arange(80) % 4 == 0, 0, model["popularity"])}
    own = np.arange(10, 50)
    told = FEATURES.values[own].copy()
    told[2] = np.nan  # item 12, which is new
    owner = FedMvmfOwner(PLAN, own, AttributeTable(FEATURES.names, told), 0)
    answer = owner.answer(model)
    np.testing.assert_array_equal(answer["items"], [n for n in own if n % 4])
    np.testing.assert_array_equal(answer["new_items"], [n for n in own if n % 4 == 0 and n != 12])
    np.testing.assert_array_equal(
        answer["rows"],
        from_attributes(FEATURES.values[answer["new_items"]], owner.private["factors"], PLAN),
    )


def test_answers_of_several_owners_are_added_and_an_absent_one_changes_only_its_items():
    server, arrays, model = model_of()
    halves = [np.arange(40), np.arange(40, 80)]
    answers = [
        FedMvmfOwner(PLAN, own, AttributeTable(FEATURES.names, FEATURES.values[own]), 0).answer(model)
        for own in halves
    ]
    sums = {"items": np.zeros((80, 4)), "attributes": np.zeros((len(TOLD.names), 4))}

    def stepped(given):
        summed = Summed(Purpose.TRAIN, sums, 60, 0, 0, np.ones(1), 60)
        return server.apply(server.told(arrays, given), summed)["model.items"]

    both, first, none = stepped(answers), stepped(answers[:1]), stepped([])
    np.testing.assert_array_equal(both[:40], first[:40])
    np.testing.assert_array_equal(first[40:], none[40:])
    assert (both[:40] != none[:40]).any()
    assert (both[40:] != none[40:]).any()
    assert "pull" not in server.apply(
        server.told(arrays, answers), Summed(Purpose.TRAIN, sums, 60, 0, 0, np.ones(1), 60)
    )


@pytest.mark.parametrize("rating", [0.0, 5.5])
def test_a_rating_out_of_range_is_refused(rating):
    with pytest.raises(DataError, match=r"ratings of this host out of range: 1; expected 0.5 to 5"):
        host(data=held(rating=np.where(np.arange(len(DATA)) == 7, rating, DATA.rating)))


def test_attributes_that_are_not_those_of_the_run_are_refused():
    other = AttributeTable(TOLD.names[::-1], TOLD.values)
    with pytest.raises(DataError, match="this host's attributes are"):
        host(data=held(attributes=other))


def test_a_host_that_knows_nothing_of_its_users_takes_part_without_their_attributes():
    _, _, model = model_of()
    sums = codes(host(data=held(attributes=None)), Purpose.TRAIN, model)
    assert not sums["attributes"].any()
    assert sums["items"].any()


def test_interactions_without_a_rating_neither_teach_nor_count():
    rating = np.where(np.arange(len(DATA)) % 2, DATA.rating, np.nan)
    side, (_, _, model) = host(data=held(rating=rating)), model_of()
    supports = codes(side, Purpose.SUPPORTS, model)["supports"]
    own = (EXISTING.part == TRAIN) & np.isfinite(rating)
    np.testing.assert_array_equal(supports, np.bincount(DATA.item[own], minlength=80))


def test_the_sums_of_squares_are_over_all_ratings_together():
    side, (_, _, model) = host(), model_of()
    totals = FedMvmfServer(PLAN, 80, 0, 1).measured(Purpose.EVALUATE, codes(side, Purpose.EVALUATE, model))
    assert tuple(totals) == names_of(MEASURES)
    factors = side.factors(model, np.arange(60))
    test = EXISTING.part == TEST
    missed = (factors[DATA.user[test]] * model["items"][DATA.item[test]]).sum(axis=1) - DATA.rating[test]
    assert totals["ratings"][0] == np.count_nonzero(test)
    assert figures_of(totals)["rmse"][0] == pytest.approx(np.sqrt((missed**2).mean()), rel=1e-4)


def test_drawn_items_stay_the_same_from_round_to_round_unless_asked_otherwise():
    _, _, model = model_of()

    def touched(plan):
        side = host(plan)
        # With a weight on unrated items, the rows that one user touches are its rated and its drawn ones.
        return [
            codes(side, Purpose.TRAIN, model, users=[3], round_=n)["items"].any(axis=1).tolist()
            for n in (1, 2)
        ]

    once = touched(PLAN)
    assert once[0] == once[1]
    again = touched(PLAN.model_copy(update={"resample": True}))
    assert again[0] != again[1]


def test_what_was_closed_to_all_groups_at_first_stays_so_when_they_are_drawn_anew():
    server = FedMvmfServer(PLAN.model_copy(update={"min_touch": 3}), 3, 0, 2)
    arrays = server.initial()

    def asked(arrays, group, supports, pass_number):
        sums = {"supports": np.array(supports, np.float64)}
        return server.apply(arrays, Summed(Purpose.SUPPORTS, sums, 5, pass_number, group, np.ones(2), 10))

    for group, supports in enumerate(([4, 2, 0], [1, 2, 0])):
        arrays = asked(arrays, group, supports, 0)
    assert server.opened(arrays).tolist() == [[True, False, False], [False, False, False]]
    assert arrays["popularity"].tolist() == [4, 0, 0]
    for group, supports in enumerate(([2, 4, 0], [3, 0, 0])):
        arrays = asked(arrays, group, supports, 60)
    assert server.opened(arrays).tolist() == [[False, False, False], [True, False, False]]
    assert arrays["popularity"].tolist() == [4, 0, 0]
