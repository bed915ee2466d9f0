"""The study of FedMF: how many take part in each of its rounds, what its lines show, what stands beside."""

import dataclasses

import numpy as np
import pytest

from coterie.config.run import RunSettings
from coterie.rounds.conductor import cohort_rule
from coterie.rounds.policy import cohorts
from coterie.studies import tables
from coterie.studies.run_data import load, make_feed
from coterie.studies.run_plan import rounds_plan
from coterie.studies.tables.row import with_options
from coterie.systems.fedmf.settings import FedMfSettings
from coterie.systems.fedmf.study import table as fedmf
from coterie.systems.fedmf.study.table import EPOCHS, FEDMF, PARTICIPATION, ROUNDS, STEPS

SETTINGS = RunSettings.model_validate(
    {
        "system": "fedmf",
        "data": {"synthetic": {"users": 70, "items": 60, "interactions": 1500}},
        "rounds": {"min_cohort": 10, "min_sum": 10},
    }
)
# Six rounds are two, three or six passes.
SHORT = 6


def quickly(row):
    """Return a row of few rounds, with a short key where there is one."""
    if "rounds" not in row.options:
        return row
    short = {"rounds": SHORT}
    if "participate" in row.options:
        short |= {"encryption.bits": 1024, "encryption.comparison": True}
    return dataclasses.replace(row, options={**row.options, **short})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    table = dataclasses.replace(FEDMF, rows=lambda: tuple(map(quickly, FEDMF.rows())), studies={})
    found, _ = tables.evaluate(table, SETTINGS, seeds=(0, 1), out=tmp_path_factory.mktemp("tables"))
    return found


def ends(made, row):
    """Return training and test RMSE of a row after its last round, (seeds, 2)."""
    found = [one["history"][-1]["metrics"] for one in made["rows"] if one["row"] == row]
    return np.array([(one["train_rmse"], one["rmse"]) for one in found])


@pytest.mark.parametrize("users", [40, 70, 300, 610, 943])
def test_every_row_has_thirty_rounds_of_its_share_of_the_users_and_is_measured_after_every_sixth(users):
    for row in FEDMF.rows():
        share = row.options.get("participate")
        if share is None or row.options["rounds"] != ROUNDS:
            continue
        run = with_options(SETTINGS, fedmf._cohorts(share, ROUNDS, users)).rounds
        plan = rounds_plan(run, 0)
        each = cohorts(cohort_rule(plan, plan.beacon), users, 0)
        assert len(each) * run.passes == ROUNDS
        assert len(each) * run.evaluate_every == 6
        assert all(len(one) == round(share * users) for one in each)


def test_rows_count_rounds_and_not_passes(made):
    for row in ("fedmf", "fedmf-p30", "printed-p50", "printed-p70", "biased-p30", "fedmf-central"):
        (first, _) = [one for one in made["rows"] if one["row"] == row]
        assert [one["step"] for one in first["history"]] == [0, SHORT], row


def test_settings_of_rows_are_those_of_the_steps_and_differ_in_what_is_studied():
    rows = {row.name: row.options for row in FEDMF.rows()}
    for begin in STEPS:
        for share in PARTICIPATION:
            assert rows[f"{begin}-p{round(100 * share)}"] == {**rows[begin], "participate": share}
        for epochs in EPOCHS if begin != "biased" else ():
            assert rows[f"{begin}-e{epochs}"] == {**rows[begin], "fedmf.local_epochs": epochs}
    given = {name: value for name, value in rows["printed"].items() if name.startswith("fedmf.")}
    assert with_options(SETTINGS, given).fedmf == FedMfSettings(steps="sum")
    given = {name: value for name, value in rows["biased"].items() if name.startswith("fedmf.")}
    assert with_options(SETTINGS, given).fedmf == FedMfSettings()


def test_lines_show_the_ends_of_curves_and_rows_beside(made):
    assert len(made["blocks"]) == 7
    assert [line[0] for line in made["blocks"][0]["rows"]] == [
        "30% of the users",
        "50% of the users",
        "70% of the users",
        "100% of the users",
        "all ratings in one place",
        "mean of the item and of the user",
        "mean of the item",
    ]
    train, test = ends(made, "fedmf-p30").mean(axis=0)
    line = made["blocks"][0]["rows"][0]
    assert line[1].startswith(f"{train:.3f} ±")
    assert line[2].startswith(f"{test:.3f} ±")
    assert line[3].startswith(f"{test - train:.3f} ±")


def test_sums_change_no_error_and_ratings_in_one_place_differ_by_rounding(made):
    clear = ends(made, "sum-clear")
    for other in ("masked", "encrypted"):
        np.testing.assert_array_equal(ends(made, f"sum-{other}"), clear)
    np.testing.assert_allclose(ends(made, "sum-none"), clear, atol=2e-3)
    assert len({line[2] for line in made["blocks"][-2]["rows"][:3]}) == 1


def test_rows_of_means_stand_beside_and_know_nobody(made):
    feed = make_feed(SETTINGS, load(SETTINGS), 0)
    data, own, test = feed.dataset, feed.split.train, feed.split.test
    (first, _) = [one for one in made["rows"] if one["row"] == "item-mean"]
    overall = data.rating[own].mean()
    count = np.bincount(data.item[own], minlength=60)
    mean = (np.bincount(data.item[own], data.rating[own], 60) + 5 * overall) / (count + 5)
    assert first["metrics"]["rmse"] == pytest.approx(
        np.sqrt(((mean[data.item[test]] - data.rating[test]) ** 2).mean())
    )


def test_the_encrypted_sum_is_a_study_of_its_own_as_it_takes_long():
    usual = {row.name for row in tables.chosen_rows(FEDMF, None, "ml-latest-small")}
    assert {row.name for row in FEDMF.rows()} - usual == {"sum-encrypted"}


def test_rows_are_compared_by_the_errors_of_each_user(made):
    found = {(one["first"], one["second"], one["metric"]): one for one in made["differences"]}
    assert found.keys() == {
        (*pair, metric) for pair in fedmf._COMPARED for metric in ("user_rmse", "user_mae")
    }
    # Rounding of codes is all that divides a federation from ratings in one place.
    assert abs(found["fedmf", "fedmf-central", "user_rmse"]["mean"]) < 1e-4
    assert found["printed", "means", "user_rmse"]["users"] > 0
    assert made["blocks"][-1]["title"].startswith("Paired differences over users")


def test_rates_that_no_paper_prints_are_named_untuned(made):
    tuned = {one["row"]: one["tuned"] for one in made["summary"]}
    assert {tuned[row] for row in tuned if row.startswith("printed")} == {"fixed"}
    assert {tuned["fedmf"], tuned["fedmf-e5"], tuned["fedmf-central"]} == {"untuned"}
