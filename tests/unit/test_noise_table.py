"""The table of privacy: its rows, what it states of epsilon, its verdict, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import invoke
from coterie.errors import ConfigError
from coterie.rounds.privacy import epsilon, privacy_of
from coterie.rounds.training import Purpose
from coterie.studies.run_plan import run_plan
from coterie.studies.tables.noise_cost import NOISES, TOLERATED, noise_tables
from coterie.studies.tables.prepared_table import PreparedTable
from coterie.studies.tables.row import with_options
from coterie.systems.registry import systems

GIVEN: dict[str, Any] = {
    "data": {"synthetic": {"users": 60, "items": 40, "interactions": 1200}},
    "rounds": {"privacy": {"most_items": 30}},
    "federation": {"hosts": 2},
}


def private(table: PreparedTable) -> dict[str, Any]:
    """Return the settings of each row's run, by name of the row."""
    return {row.name: with_options(table.settings, row.options) for row in table.table.rows()}


# --- the rows --------------------------------------------------------------------------------------------------


def test_rows_are_every_noise_in_either_place_and_the_published_one_at_each_value() -> None:
    (made,) = noise_tables(GIVEN, ["fedmf"])
    runs = private(made)
    assert list(runs) == [
        "exact",
        *(f"distributed-{noise:g}" for noise in NOISES),
        *(f"local-{noise:g}" for noise in NOISES),
        "per-value",
    ]
    assert not runs["exact"].rounds.privacy.terms.on
    for noise in NOISES:
        inside, alone = runs[f"distributed-{noise:g}"], runs[f"local-{noise:g}"]
        assert (inside.secure_sum, alone.secure_sum) == ("masked", "clear")
        # The server has each user's own contribution, and not a host's, whose noise is shared by many users.
        assert alone.rounds.party_per_user
        assert inside.rounds.privacy.noise == alone.rounds.privacy.noise == noise
        assert inside.rounds.privacy.most_items == alone.rounds.privacy.most_items == 30
    published = runs["per-value"].rounds.privacy
    assert (published.mechanism, published.clip, published.noise) == ("laplace", 0.1, 2.0)
    assert published.per_value


def test_bounds_and_passes_that_are_given_are_those_of_every_row() -> None:
    rounds = {"passes": 3, "privacy": {"clip": 0.25, "delta": 1e-6, "colluders": 2}}
    (made,) = noise_tables({**GIVEN, "rounds": rounds, "secure_sum": "encrypted"}, ["fedmf"], quick=False)
    runs = private(made)
    assert {run.rounds.passes for run in runs.values()} == {3}
    assert runs["distributed-1"].secure_sum == "encrypted"
    assert runs["distributed-1"].rounds.privacy.colluders == 2
    assert runs["local-1"].rounds.privacy.clip == 0.25
    assert runs["per-value"].rounds.privacy.delta == 1e-6


def test_without_names_one_system_of_each_task_has_a_table_and_what_is_left_out_is_said() -> None:
    said: list[str] = []
    made = noise_tables({**GIVEN, "rounds": {}}, say=said.append)
    assert [len(private(one)) for one in made] == [2 + 2 * len(NOISES)] * len(made)
    assert len(made) == 2
    assert len({one.table.headline for one in made}) == 2
    assert all(" is left out: " in line for line in said)


@pytest.mark.parametrize(
    ("system", "rounds", "message"),
    [
        ("drift", {}, "not trained in one process in rounds"),
        ("ease", {"passes": 1}, "ease has noise of its own"),
        ("fedmf", {"privacy": {"noise": 2.0}}, "rounds.privacy.noise 2.0: rows have noise of their own"),
        ("fedmf", {"privacy": {"place": "local"}}, "rounds.privacy.place 'local': rows have noise"),
        ("fedmf", {"cohorts": "independent"}, "cohorts 'independent': a user may be in any number"),
        ("fedmf", {"privacy": {"clip": 0.0}}, "clip 0 with place"),
    ],
)
def test_what_has_no_table_of_privacy_is_refused_with_the_reason(
    system: str, rounds: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        noise_tables({**GIVEN, "rounds": rounds}, [system])


def test_no_code_of_the_table_knows_a_systems_name() -> None:
    text = (Path(__file__).parents[2] / "coterie" / "studies" / "tables" / "noise_cost.py").read_text()
    assert not [
        name for system in systems().values() for name in (system.name, system.title) if f'"{name}"' in text
    ]


# --- the figures -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreparedTable, dict[str, Any]]:
    (one,) = noise_tables(GIVEN, ["fedmf"], quick=True)
    made, _ = one.evaluated(seeds=(0, 1), out=tmp_path_factory.mktemp("tables"))
    return one, made


def test_epsilon_of_a_row_is_that_of_the_sums_of_its_run(
    trained: tuple[PreparedTable, dict[str, Any]],
) -> None:
    one, made = trained
    runs = private(one)
    cells = {cell["row"]: cell for cell in made["rows"]}
    sums = {Purpose.SUPPORTS: 1, Purpose.EVALUATE: 2, Purpose.TRAIN: 2}
    assert "epsilon" not in cells["exact"]["metrics"]
    for name in ("distributed-1", "local-1"):
        terms = privacy_of(run_plan(runs[name], run_id="run", seed=0).rounds)
        assert cells[name]["metrics"]["epsilon"] == epsilon(terms, sums)
    # Each value costs epsilon 1 in each sum: of a user's whole data that is no bound worth the name.
    assert cells["per-value"]["metrics"]["epsilon"] > 10 * cells["local-1"]["metrics"]["epsilon"]
    assert cells["per-value"]["metrics"]["epsilon"] == int(cells["per-value"]["metrics"]["epsilon"])


def test_the_verdict_states_what_noise_costs_by_validation(
    trained: tuple[PreparedTable, dict[str, Any]],
) -> None:
    _, made = trained
    means = {
        row["row"]: {name: one["mean"] for name, one in row["metrics"].items()} for row in made["summary"]
    }
    costs = made["verdict"]["costs"]
    assert set(costs) == {"distributed-1", "local-1", "per-value"}
    for name, cost in costs.items():
        for metric, found in (("rmse", cost["cost"]), ("validation_rmse", cost["validation_cost"])):
            assert found == pytest.approx(means[name][metric] / means["exact"][metric] - 1)
    good = {name for name in ("distributed-1", "local-1") if costs[name]["validation_cost"] <= TOLERATED}
    assert set(made["verdict"]["best"].values()) == good
    (block,) = made["blocks"]
    assert block["notes"][0] == made["verdict"]["text"]
    assert [line[0] for line in block["rows"]] == [
        "no noise",
        "inside the sum",
        "at each user",
        "at each value, as published",
    ]
    assert "60 users" in block["title"]


def test_noise_without_room_fails_its_own_row_and_says_why(tmp_path: Path) -> None:
    given = {**GIVEN, "rounds": {"privacy": {"most_items": 30, "clip": 1e6}}}
    (one,) = noise_tables(given, ["fedmf"], quick=True)
    made, _ = one.evaluated(seeds=(0,), out=tmp_path, names=("exact", "local-1"))
    (block,) = made["blocks"]
    assert [line[-1] == "failed" for line in block["rows"]] == [False, True]
    assert any("has no room in a code" in note for note in block["notes"])


def test_the_last_version_counts_and_rows_whose_noise_would_choose_another_are_named(tmp_path: Path) -> None:
    given = {
        **GIVEN,
        "rounds": {"passes": 6, "evaluate_every": 1, "privacy": {"most_items": 30, "clip": 0.01}},
    }
    # A small clip: little noise on the model, which would diverge now and then, and as much as ever on metrics.
    (one,) = noise_tables(given, ["fedmf"])
    made, _ = one.evaluated(seeds=tuple(range(6)), out=tmp_path, names=("local-16",))
    assert {cell["step"] for cell in made["rows"]} == {6}
    # One of seven versions each time, by chance: six times the last has a probability of about 1 in 100,000.
    assert any(cell["facts"]["chosen"] != 6 for cell in made["rows"])
    assert any(
        note.endswith("chose another version than the last: local-16.") for note in made["blocks"][0]["notes"]
    )


# --- the command -----------------------------------------------------------------------------------------------

SMALL = (
    *("--set", "data.synthetic.users=60", "--set", "data.synthetic.items=40"),
    *("--set", "data.synthetic.interactions=1200", "--set", "rounds.passes=1"),
)


def test_the_command_makes_the_table_and_prints_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["evaluate", "--table", "privacy", "--seeds", "0", "--systems", "fedmf", "--json", *SMALL]
    arguments += ["--rows", "exact,distributed-4", "--out", str(tmp_path)]
    assert invoke(arguments) == 0
    printed = capsys.readouterr()
    (made,) = json.loads(printed.out)["result"]["tables"]
    assert [row["row"] for row in made["table"]["summary"]] == ["exact", "distributed-4"]
    assert "inside the sum" in made["table"]["verdict"]["text"]
    assert "at each user" not in made["table"]["verdict"]["text"]
    said = " ".join(printed.err.split())
    assert "--table privacy --systems fedmf --data synthetic --seeds 0 --set data.synthetic.users=60" in said
    assert "--set rounds.passes=1 --rows exact,distributed-4`" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "--table", "privacy", "--systems", "fedmg"], "no system 'fedmg'"),
        (
            ["evaluate", "--table", "privacy", "--systems", "fedmf", "--budget", "3"],
            "--budget with the table",
        ),
        (
            ["evaluate", "--table", "privacy", "--systems", "fedmf", "--rows", "local-7"],
            "has no row 'local-7'",
        ),
        (["evaluate", "--table", "privcy"], "did you mean 'privacy'?"),
        (["tune", "--table", "privacy"], "nothing of the table privacy is tuned"),
    ],
)
def test_the_command_refuses_what_makes_no_table_of_privacy(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke([*arguments, *SMALL]) == 10
    assert message in " ".join(capsys.readouterr().err.split())
