"""The table of poisoning: rules beside attacks, measured over honest users."""

import json
from functools import cache

import numpy as np
import pytest
from typer.testing import CliRunner

from coterie.cli.main import app
from coterie.errors import ConfigError
from coterie.studies.poisoning import POISONINGS, chosen_liars, pushed_item
from coterie.studies.run_data import make_feed
from coterie.studies.tables.cell import Cell
from coterie.studies.tables.paper_table import Results
from coterie.studies.tables.poisoned import LIARS, poisoned_tables
from coterie.studies.tables.tasks import RATING

GIVEN = {"data": {"synthetic": {"users": 80, "items": 60, "interactions": 2400}}, "rounds": {"passes": 4}}
RULES = ("sum", "bounded", "median", "trimmed-mean", "krum", "distance", "spectral", "norm-bound")


@cache
def table_of(system):
    (found,) = poisoned_tables(GIVEN, (system,))
    return found


def row(system, name):
    return next(one for one in table_of(system).table.rows() if one.name == name)


def trained(system, name):
    one = table_of(system)
    chosen = row(system, name)
    return chosen.train(one.settings, chosen.options, make_feed(one.settings, one.dataset, 0), 0)


def test_a_table_has_every_rule_with_every_attack_and_a_quick_one_the_main_ones():
    names = [one.name for one in table_of("fedmf").table.rows()]
    assert names == [f"{rule}-{attack}" for rule in RULES for attack in POISONINGS]
    (quick,) = poisoned_tables(GIVEN, ("fedmf",), quick=True)
    rows = quick.table.rows()
    assert len(rows) == 25
    assert {one.options["rounds.passes"] for one in rows} == {6}


def test_without_names_a_system_that_rates_and_one_that_ranks_have_tables():
    said = []
    found = poisoned_tables(GIVEN, say=said.append)
    assert [one.table.headline for one in found] == ["hit_ratio@10", "rmse"]
    assert any("EASE is left out: " in line for line in said)


@pytest.mark.parametrize(
    ("given", "names", "reason"),
    [
        ({}, ("nobody",), "no system 'nobody'"),
        ({}, ("drift",), "not trained in one process in rounds"),
        ({}, ("ease",), "ease learns from one sum over all users"),
        ({"rounds": {"aggregation": {"rule": "krum"}}}, ("fedmf",), "rows have rules of their own"),
        (
            {"rounds": {"aggregation": {"byzantine": 0.7}}},
            ("fedmf",),
            "expected a share above 0 and below 0.5",
        ),
        ({"rounds": {"aggregation": {"norm_bound": -1}}}, ("fedmf",), "expected a finite number"),
    ],
)
def test_what_has_no_table_is_refused_with_the_reason(given, names, reason):
    with pytest.raises(ConfigError, match=reason):
        poisoned_tables({**GIVEN, **given}, names)


def test_the_attacks_harm_the_plain_sum_and_the_rules_hold():
    value = {
        name: trained("fedmf", name).metrics["rmse"]
        for name in (
            "sum-none",
            "sum-boosted",
            "bounded-boosted",
            "median-boosted",
            "distance-boosted",
            "norm-bound-boosted",
        )
    }
    harm = {name: one - value["sum-none"] for name, one in value.items()}
    assert harm["sum-boosted"] > 0.05
    # A client that lies ignores the bound of its own host.
    assert harm["bounded-boosted"] > 0.05
    assert all(harm[f"{rule}-boosted"] < 0.03 for rule in ("median", "distance", "norm-bound"))


def test_figures_are_of_the_honest_users_alone():
    found = trained("fedmf", "sum-label-flip")
    one = table_of("fedmf")
    feed = make_feed(one.settings, one.dataset, 0)
    liars = chosen_liars(feed, LIARS, 0)
    assert found.facts["liars"] == liars.sum() == 8
    assert found.facts["pushed"] == feed.dataset.items[pushed_item(feed)]
    for values in found.per_user.values():
        assert np.isnan(values[liars]).all()
    squares, counts = (np.nansum(found.per_user[name]) for name in ("squared_error", "ratings"))
    assert found.metrics["rmse"] == pytest.approx(np.sqrt(squares / counts))
    seen = feed.split.part == 0
    has = np.zeros(len(liars), bool)
    has[feed.dataset.user[seen & (feed.dataset.item == pushed_item(feed))]] = True
    assert np.isnan(found.per_user["pushed"][has]).all()
    assert np.isfinite(found.per_user["pushed"][~has & ~liars]).all()


def test_a_run_without_liars_is_the_systems_own():
    plain = trained("fedmf", "sum-none")
    again = trained("fedmf", "sum-none")
    assert plain.metrics == again.metrics
    everybody = RATING.summed_up({name: value for name, value in plain.per_user.items() if name != "pushed"})
    assert everybody["rmse"] == plain.metrics["rmse"]


def test_the_command_makes_the_table(tmp_path):
    options = [
        "--table",
        "poisoning",
        "--systems",
        "fedmf",
        "--rows",
        "sum-none,sum-sybils,distance-sybils,bounded-none",
    ]
    sets = [f"data.synthetic.{key}={value}" for key, value in GIVEN["data"]["synthetic"].items()]
    sets += ["rounds.passes=4"]
    given = [part for one in sets for part in ("--set", one)]
    result = CliRunner().invoke(
        app, ["evaluate", *options, *given, "--seeds", "0", "--out", str(tmp_path), "--json"]
    )
    assert result.exit_code == 0, result.output
    made = json.loads((tmp_path / "poisoning-fedmf-synthetic.json").read_text())
    values, damages = made["blocks"]
    assert [line[0] for line in values["rows"]] == ["sum", "sum, norm bound at the hosts", "distance"]
    assert damages["rows"][0][1].startswith("+0.0000 (")
    assert set(made["verdict"]["damages"]) == {"sum", "distance", "bounded"}
    assert made["verdict"]["damages"]["sum"]["none"] == 0
    assert "Sybils" in made["verdict"]["text"]
    assert any(note.startswith("Bound of norms: ") for note in damages["notes"])


def results_of(damage, seeds=(0,)):
    """Results of rows of FedMF whose RMSE is 1 plus a damage, by row and seed; a reason instead of one is a failure."""
    rows = tuple(row("fedmf", name) for name in damage)
    cells = {}
    for name, values in damage.items():
        for value in values:
            record = {"metrics": {}, "facts": {"failed": value}, "best_on_test": None}
            if not isinstance(value, str):
                record |= {"metrics": {"rmse": 1 + value, "pushed": 0.25}, "facts": {}}
            cells.setdefault(name, []).append(Cell(record, None))
    return Results("set", seeds, rows, cells)


def test_a_run_that_fails_is_shown_and_worse_than_any_damage():
    results = results_of(
        {
            "sum-none": [0.0],
            "sum-boosted": [0.5],
            "sum-sybils": ["it diverged"],
            "distance-none": [0.01],
            "distance-boosted": [0.01],
            "distance-sybils": ["it diverged"],
            "median-none": [0.25],
            "median-boosted": [0.5],
            "median-sybils": [0.75],
        }
    )
    table = table_of("fedmf").table
    values, damages = (section(results) for section in table.sections)
    assert values.rows[0] == ("sum", "1.0000", "1.5000", "failed")
    assert damages.rows[0] == ("sum", "+0.0000 (25.0%)", "+0.5000", "failed")
    assert damages.rows[1] == ("distance", "+0.0100 (25.0%)", "+0.0100", "failed")
    assert "Failed (sum-sybils, distance-sybils): it diverged." in damages.notes
    verdict = table.verdict(results)
    assert verdict["failed"] == {"sum": ["sybils"], "distance": ["sybils"]}
    assert verdict["damages"]["distance"] == {"none": pytest.approx(0.01), "boosted": pytest.approx(0.01)}
    assert verdict["text"] == (
        "The plain sum fails with Sybils. The rule whose worst damage is least is median: +0.7500."
    )


def test_a_mean_over_seeds_does_not_pass_over_the_seed_that_failed():
    results = results_of({"sum-none": [0.0, 0.0], "sum-boosted": [0.5, "it diverged"]}, seeds=(0, 1))
    table = table_of("fedmf").table
    assert table.sections[0](results).rows == (("sum", "1.0000", "failed"),)
    assert table.verdict(results)["text"] == (
        "The plain sum fails with flipped labels, times 10. No rule has figures with every attack."
    )


def test_the_verdict_compares_rules_that_met_the_same_attacks():
    of_rows = {"sum-none": [0.0], "sum-boosted": [0.5], "bounded-none": [-0.1]}
    text = table_of("fedmf").table.verdict(results_of(of_rows))["text"]
    assert text == (
        "The attack that harms the plain sum most is flipped labels, times 10: +0.5000. "
        "The rule whose worst damage is least is sum: +0.5000."
    )


@pytest.mark.parametrize("option", [["--trials", "x.json"], ["--budget", "3"]])
def test_the_command_refuses_what_the_table_does_not_have(option):
    result = CliRunner().invoke(app, ["evaluate", "--table", "poisoning", *option])
    assert result.exit_code != 0
    assert "tunes nothing" in str(result.exception) + result.output
