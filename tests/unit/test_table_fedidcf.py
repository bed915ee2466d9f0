"""FedIDCF's table, and IDCF with all data in one place."""

import numpy as np
import pytest

from coterie.config.run import RunSettings
from coterie.studies.run_data import load, make_feed
from coterie.systems.fedidcf.central import KnownRatings, train
from coterie.systems.fedidcf.settings import FedIdcfSettings
from coterie.systems.fedidcf.study.table import FEDIDCF, conditions

SETTINGS = {
    "system": "fedidcf",
    "data": {"synthetic": {"users": 80, "items": 60, "interactions": 2_000, "genres": 4}},
    "fedidcf": {"factors": 4, "hidden": 4, "factor_passes": 4, "latents": 30},
    "rounds": {"cohorts": "all", "passes": 10, "evaluate_every": 2},
    "federation": {"hosts": 1},
}


@pytest.fixture(scope="module")
def cells():
    run = RunSettings.model_validate(SETTINGS)
    feed = make_feed(run, load(run), 0)
    return {row.name: row.train(run, row.options, feed, 0) for row in FEDIDCF.rows()}


def test_every_row_is_of_one_run_and_of_one_kind_of_user(cells):
    assert len({one.history[one.best]["step"] for one in cells.values()}) == 1
    keys = np.isfinite(cells["fedmf-key"].per_user["user_rmse"])
    queries = np.isfinite(cells["biases-query"].per_user["user_rmse"])
    assert not (keys & queries).any()
    assert (keys | queries).all()
    for name, one in cells.items():
        expected = keys if name.endswith("-key") else queries
        assert (np.isfinite(one.per_user["user_rmse"]) == expected).all(), name


def test_figures_of_rows_are_those_of_the_run(cells):
    metrics = cells["fedmf-key"].metrics
    for name, figure in (
        ("fedmf-key", "key_rmse"),
        ("attention-key", "attention_key_rmse"),
        ("attention-query", "query_rmse"),
        ("biases-query", "biases_query_rmse"),
        ("fold-in-query", "fold_in_query_rmse"),
    ):
        assert cells[name].metrics["rmse"] == pytest.approx(metrics[figure], abs=1e-4), name


def test_everything_is_better_than_the_mean_and_query_users_are_predicted_like_by_a_fold_in(cells):
    rmse = {name: one.metrics["rmse"] for name, one in cells.items()}
    for kind in ("key", "query"):
        assert rmse[f"attention-{kind}"] < rmse[f"mean-{kind}"] - 0.05
        assert rmse[f"idcf-{kind}"] < rmse[f"mean-{kind}"] - 0.05
    assert abs(rmse["attention-query"] - rmse["fold-in-query"]) < 0.05


def test_conditions_and_named_members_are_among_the_facts(cells):
    facts = cells["fedmf-key"].facts
    assert facts["rank"] == 4
    assert facts["condition"] < 10
    assert facts["named"]["1"] == 1.0
    assert 0 < facts["cosine_median"] <= facts["cosine"] <= 1


def test_a_copy_of_a_key_user_s_vector_has_a_cosine_of_1_and_a_lower_rank_is_seen():
    own = np.random.default_rng(0).normal(size=(50, 4))
    found = conditions(own[:10], own, own)
    assert found.cosine == pytest.approx(1)
    flat = own.copy()
    flat[:, 3] = flat[:, 2]
    assert conditions(flat, flat, own).rank == 3


def test_in_one_place_the_attention_learns_the_ratings_that_it_is_trained_on():
    rng = np.random.default_rng(0)
    items = np.column_stack([np.ones(40), np.zeros(40), rng.normal(0, 1, (40, 3))]).astype(np.float32)
    vectors = rng.normal(0, 0.3, (60, 3))
    learners = []
    for vector in vectors:
        which = rng.choice(40, 25, replace=False)
        learners.append(KnownRatings(which, items[which, 2:].astype(np.float64) @ vector))
    settings = FedIdcfSettings(factors=3, hidden=6, attention_rate=0.05)
    versions = dict(train(items, vectors, learners, learners, settings, steps=80, seed=0))

    def error(rows):
        each = [
            np.mean((items[one.items].astype(np.float64) @ row - one.ratings) ** 2)
            for one, row in zip(learners, rows, strict=True)
        ]
        return float(np.mean(each))

    assert list(versions) == list(range(81))
    assert error(versions[80]) < 0.7 * error(versions[0])
    # Rows of fewer steps are the same ones.
    some = dict(train(items, vectors, learners, learners, settings, steps=80, seed=0, every=30))
    assert list(some) == [0, 30, 60, 80]
    assert all((rows == versions[step]).all() for step, rows in some.items())
