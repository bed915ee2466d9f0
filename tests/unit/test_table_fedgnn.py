"""FedGNN's models with all ratings in one place, and its table."""

import numpy as np
import pytest

from coterie.config.run import RunSettings
from coterie.evaluation.rated import figures
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load, make_feed
from coterie.studies.tables.row import with_options
from coterie.systems.fedgnn.central import co_raters, train
from coterie.systems.fedgnn.settings import FedGnnSettings
from coterie.systems.fedgnn.study import STUDY
from coterie.systems.fedgnn.study.references import central_values, fedgnn_references
from coterie.systems.fedgnn.study.table import FEDGNN
from coterie.systems.shared.factor_steps import UserData

SPEC = {"users": 60, "items": 80, "interactions": 1_500, "genres": 4}
LEARNING = {"factors": 4, "local_epochs": 3}


def settings(**learning):
    return RunSettings.model_validate(
        {
            "system": "fedgnn",
            "data": {"synthetic": SPEC},
            "fedgnn": {**LEARNING, **learning},
            "rounds": {"passes": 6, "evaluate_every": 3, "group": 60},
            "federation": {"hosts": 2},
        }
    )


def test_all_ratings_in_one_place_give_the_federation_s_model_but_for_rounding():
    run = settings()
    feed = make_feed(run, load(run), 0)
    federated = train_in_process(run, feed, run_id="a-run", seed=0, see=lambda event: None).known["history"]
    central = central_values(run, feed, 0)
    assert [step for step, _ in central] == [one["epoch"] for one in federated]
    for (_, values), one in zip(central, federated, strict=True):
        for name in ("rmse", "train_rmse", "validation_rmse"):
            assert figures(values)[name] == pytest.approx(one["metrics"][name], abs=2e-3)


def test_simpler_models_learn_less_of_the_training_part_and_biases_nothing_else():
    run = settings()
    feed = make_feed(run, load(run), 0)
    ends = {
        form: figures(central_values(run, feed, 0, form)[-1][1])["train_rmse"]
        for form in ("graph", "product", "biases")
    }
    assert ends["graph"] < ends["product"] <= ends["biases"] + 1e-9
    assert ends["biases"] < feed.dataset.rating[feed.split.train].std()


def test_biases_alone_keep_embeddings_at_zero():
    rng = np.random.default_rng(0)
    users = [
        UserData(rng.choice(20, 8, replace=False), rng.integers(1, 6, 8).astype(float)) for _ in range(9)
    ]
    keys = np.arange(9)
    for version in train(users, FedGnnSettings(factors=3), keys, 20, rounds=3, seed=1, form="biases"):
        assert not version.users[:, 2:].any()
        assert not version.items[:, 2:].any()


def test_exact_neighbours_share_an_item_and_are_drawn_once():
    items = [[0, 1], [1, 2], [3], [2, 0], [4]]
    users = [UserData(np.array(own), np.full(len(own), 3.0)) for own in items]
    found, counts = co_raters(users, 2, 6, seed=1)
    assert counts.tolist() == [2, 2, 0, 2, 0]
    assert sorted(found[0].tolist()) == [1, 3]
    again, _ = co_raters(users, 2, 6, seed=1)
    assert (again == found).all()


def test_a_run_s_references_have_the_same_model_with_all_ratings_in_one_place():
    run = settings(neighbours=4)
    feed = make_feed(run, load(run), 0)
    found = fedgnn_references(run, feed, 0)
    assert {"gat", "item_mean", "popularity", "random"} <= set(found)
    assert len(found["gat"].history) == 3


def test_each_row_of_the_table_is_made_and_compared():
    names = {row.name for row in FEDGNN.rows()}
    assert len(names) == len(FEDGNN.rows())
    assert {name for pair in FEDGNN.compared for name in pair} <= names
    run = settings()
    feed = make_feed(run, load(run), 0)
    for row in FEDGNN.rows():
        made = row.engine(run, row.options, feed, 0)
        assert made.metrics["rmse"] > 0
        assert len(made.per_user["user_rmse"]) == 60


def test_every_setting_that_tuning_draws_makes_a_run():
    run, rng = settings(), np.random.default_rng(3)
    for row in (one for one in FEDGNN.rows() if one.name in ("central", "product", "bias-steps")):
        for _ in range(5):
            drawn = {name: row.space[name].sample(rng) for name in row.space}
            made = with_options(run, drawn).table(FedGnnSettings)
            assert drawn == {name: getattr(made, name.partition(".")[2]) for name in drawn}
    assert STUDY.space.keys() > {"fedgnn.factors", "fedgnn.layer_rate"}
