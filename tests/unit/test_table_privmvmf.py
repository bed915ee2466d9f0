"""The table of PrivMVMF: what its rows hold out, how presets differ, what stands beside the paper."""

import dataclasses

import pytest

from coterie.config.run import RunSettings
from coterie.studies import tables
from coterie.studies.run_data import load, make_feed
from coterie.studies.tables.row import with_options
from coterie.systems.fedmvmf.study.table import SCENARIOS

TABLE = tables.find("privmvmf")
SETTINGS = RunSettings.model_validate(
    {"system": "fedmvmf", "data": {"synthetic": {"users": 40, "items": 60, "interactions": 900}}}
)
QUICK = {"rounds.passes": 1, "rounds.evaluate_every": 1}


def quickly(row):
    """Return a row of one pass."""
    trained = row.name.startswith("fedmvmf")
    return dataclasses.replace(row, options={**row.options, **(QUICK if trained else {})})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    table = dataclasses.replace(TABLE, rows=lambda: tuple(map(quickly, TABLE.rows())))
    found, _ = tables.evaluate(table, SETTINGS, seeds=(0,), out=tmp_path_factory.mktemp("tables"))
    return found


def test_every_row_is_in_the_block_of_its_scenario_beside_the_paper(made):
    *blocks, compared = made["blocks"]
    assert len(blocks) == len(SCENARIOS)
    assert compared["title"].startswith("Paired differences over users")
    shown = [(block["title"], line[0]) for block in blocks for line in block["rows"]]
    assert len(shown) == len(TABLE.rows()) == len(made["rows"])
    for block, ndcg in zip(blocks, ("0.83", "0.71", "0.82"), strict=True):
        first = block["rows"][0]
        assert first[0] == "FedMVMF, paper's weights"
        assert first[1] == ndcg
        assert all(line[1] == "\N{EN DASH}" for line in block["rows"][1:])
        assert 0 < float(first[5]) <= 1


def test_each_scenario_divides_the_data_in_its_own_way(made):
    splits = {}
    for record in made["rows"]:
        ends = next((one for one in SCENARIOS if one and record["row"].endswith(one)), "")
        splits.setdefault(ends, set()).add(record["split_sha256"])
    assert splits.keys() == SCENARIOS.keys()
    assert all(len(found) == 1 for found in splits.values())
    assert len(set.union(*splits.values())) == len(SCENARIOS)
    data = load(SETTINGS)
    for scenario, (_, options) in SCENARIOS.items():
        feed = make_feed(with_options(SETTINGS, options), data, 0)
        assert {feed.split.sha256(data)} == splits[scenario]


def test_presets_are_the_settings_that_a_run_has_by_their_name():
    for row in TABLE.rows():
        name = row.name.removeprefix("fedmvmf-")
        if name in ("paper", "top-n", "both"):
            named = RunSettings.model_validate({"system": "fedmvmf", "mvmf": {"preset": name}})
            assert with_options(SETTINGS, row.options).mvmf.to_json() == named.mvmf.to_json(), name


def test_rows_that_are_trained_differ(made):
    ours = {one["row"]: one["metrics"]["ndcg_rated@10"] for one in made["rows"]}
    assert len({ours[f"fedmvmf-{name}"] for name in ("paper", "top-n", "both", "both-drawn-anew")}) == 4


def test_rows_are_compared_user_by_user_in_every_scenario(made):
    pairs = {(one["first"], one["second"]) for one in made["differences"]}
    assert ("fedmvmf-paper", "item-mean") in pairs
    assert ("fedmvmf-paper-cold-users", "popularity-cold-users") in pairs
    assert ("fedmvmf-paper-cold-items", "random-cold-items") in pairs
    figures = {one["row"]: one["metrics"]["ndcg_rated@10"]["mean"] for one in made["summary"]}
    for one in made["differences"]:
        if one["metric"] == "ndcg_rated@10":
            assert one["mean"] == pytest.approx(figures[one["first"]] - figures[one["second"]], abs=1e-4)


def test_presets_that_nothing_has_tuned_are_named_untuned(made):
    tuned = {one["row"]: one["tuned"] for one in made["summary"]}
    assert {tuned[row] for row in tuned if row.startswith("fedmvmf")} == {"untuned"}
