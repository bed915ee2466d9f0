"""The table of floors: its rows, its knee, what chooses the knee, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import invoke
from coterie.errors import ConfigError
from coterie.studies.floors import MOST_CLOSED, MOST_TOLD, floors
from coterie.studies.run_data import make_feed
from coterie.studies.tables.prepared_table import PreparedTable
from coterie.studies.tables.row import with_options
from coterie.studies.tables.trade_off import FloorPoint, knee, trade_offs
from coterie.systems.registry import systems

GIVEN: dict[str, Any] = {
    "data": {"synthetic": {"users": 60, "items": 80, "interactions": 900}},
    "rounds": {"passes": 2, "evaluate_every": 1, "cohort": 20, "group": 20},
}


def point(group: int, min_touch: int, closed: float, told: float) -> FloorPoint:
    return FloorPoint(f"group-{group}-min-touch-{min_touch}", group, min_touch, closed, told)


# --- the knee --------------------------------------------------------------------------------------------------


def test_the_knee_has_the_smallest_groups_within_both_bounds_and_their_highest_floor() -> None:
    points = [
        point(100, 3, MOST_CLOSED * 2, 0.0),
        point(200, 3, MOST_CLOSED / 2, MOST_TOLD * 2),
        point(400, 3, MOST_CLOSED / 5, MOST_TOLD),
        point(400, 10, MOST_CLOSED, MOST_TOLD),
        point(800, 20, MOST_CLOSED / 5, 0.0),
    ]
    for order in (points, points[::-1]):
        assert knee(order) == points[3]


def test_a_floor_below_three_users_is_no_knee() -> None:
    assert knee([point(100, 1, 0.0, 0.0), point(100, 2, 0.0, 0.0)]) is None
    protected = point(800, 3, 0.9, 0.2)
    assert knee([point(100, 1, 0.0, 0.0), protected]) == protected
    assert knee([]) is None


def test_where_no_row_is_within_the_bounds_the_knee_is_the_least_bad() -> None:
    closing = point(100, 3, MOST_CLOSED * 10, 0.0)
    telling = point(200, 3, 0.0, MOST_TOLD * 4)
    both = point(400, 3, MOST_CLOSED * 3, MOST_TOLD * 2)
    found = knee([closing, telling, both])
    assert found == both
    assert found.excess == pytest.approx(3)


# --- the rows --------------------------------------------------------------------------------------------------


def test_rows_are_every_size_with_every_floor_and_the_population_without_one() -> None:
    (made,) = trade_offs({**GIVEN, "fcf": {}}, ["fcf"])
    assert [row.name for row in made.table.rows()] == [
        "group-20-min-touch-3",
        "group-20-min-touch-10",
        "everybody-min-touch-3",
        "everybody-min-touch-10",
        "everybody-min-touch-1",
    ]
    (one,) = trade_offs({**GIVEN, "fcf": {"min_touch": 4}}, ["fcf"], quick=True)
    assert [row.name for row in one.table.rows()] == [
        "group-20-min-touch-4",
        "everybody-min-touch-4",
        "everybody-min-touch-1",
    ]


def test_groups_are_cohorts_where_cohorts_are_groups_and_none_where_everybody_is_in_each() -> None:
    (groups,) = trade_offs(GIVEN, ["fedncf"])
    (everybody,) = trade_offs(GIVEN, ["fcf"])
    for row in groups.table.rows():
        rounds = with_options(groups.settings, row.options).rounds
        assert rounds.cohort == rounds.group
    for row in everybody.table.rows():
        rounds = with_options(everybody.settings, row.options).rounds
        assert (rounds.cohorts, rounds.cohort) == ("all", 20)


def test_every_system_that_closes_items_has_a_table_and_the_others_say_why_not() -> None:
    said: list[str] = []
    made = trade_offs(GIVEN, say=said.append)
    names = {one.table.name.removeprefix("floors-") for one in made}
    assert {"fcf", "fedncf", "fedmf"} <= names
    left_out = {name for name, system in systems().items() if any(system.title in line for line in said)}
    assert names.isdisjoint({name for name, system in systems().items() if not system.in_rounds})
    assert names | left_out == set(systems())


@pytest.mark.parametrize(
    ("system", "changed", "message"),
    [
        ("drift", {}, "not trained in one process in rounds"),
        ("fedncf", {"fedncf": {"touch": "exact"}}, "closes no items"),
        ("fedncf", {"rounds": {"cohorts": "random"}}, "expected 'groups' or 'all'"),
        ("fedncf", {"rounds": {"fit_groups": True}}, "expected false"),
        ("fedncf", {"rounds": {"group": 5}}, "group 5 is below min_cohort"),
    ],
)
def test_what_has_no_table_of_floors_is_refused_with_the_reason(
    system: str, changed: dict[str, Any], message: str
) -> None:
    given = {**GIVEN, **changed, "rounds": {**GIVEN["rounds"], **changed.get("rounds", {})}}
    with pytest.raises(ConfigError, match=message):
        trade_offs(given, [system])


def test_no_code_of_the_table_knows_a_systems_name() -> None:
    text = (Path(__file__).parents[2] / "coterie" / "studies" / "tables" / "trade_off.py").read_text()
    assert not [
        name for system in systems().values() for name in (system.name, system.title) if f'"{name}"' in text
    ]


# --- the figures -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreparedTable, dict[str, Any], Path]:
    (one,) = trade_offs(GIVEN, ["fcf"], quick=True)
    folder = tmp_path_factory.mktemp("tables")
    made, _ = one.evaluated(seeds=(0, 1), out=folder)
    return one, made, folder


def test_rows_have_the_floors_figures_beside_those_of_validation_and_test(
    trained: tuple[PreparedTable, dict[str, Any], Path],
) -> None:
    one, made, _ = trained
    options = {row.name: row.options for row in one.table.rows()}
    for cell in made["rows"]:
        settings = with_options(one.settings, options[cell["row"]])
        expected = floors(settings, make_feed(settings, one.dataset, cell["seed"]))
        assert expected is not None
        metrics = cell["metrics"]
        assert (metrics["closed_share"], metrics["closed_held_out"]) == (expected.closed, expected.held_out)
        assert (metrics["attack_auc"], metrics["popularity_auc"]) == (expected.auc, expected.popularity_auc)
        assert {"hit_ratio@10", "validation_hit_ratio@10"} <= metrics.keys()
        # All of the population's items that have anybody in training are open without a floor.
        if cell["row"] == "everybody-min-touch-1":
            assert metrics["closed_share"] == 0


def test_the_knee_is_marked_and_says_whether_it_is_within_the_bounds(
    trained: tuple[PreparedTable, dict[str, Any], Path],
) -> None:
    _, made, _ = trained
    verdict = made["verdict"]
    (block,) = made["blocks"]
    (marked,) = [line[0] for line in block["rows"] if line[0].endswith("(knee)")]
    labels = {row["row"]: row["label"] for row in made["summary"]}
    assert marked == f"{labels[verdict['row']]} (knee)"
    assert verdict["within"] == (verdict["closed"] <= MOST_CLOSED and verdict["told"] <= MOST_TOLD)
    assert verdict["text"].startswith("The knee is" if verdict["within"] else "No row is within both bounds")
    assert verdict["text"] == block["notes"][0]


def test_test_figures_do_not_move_the_knee(
    trained: tuple[PreparedTable, dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, made, folder = trained
    stem = "floors-fcf-synthetic"
    (tmp_path / stem).mkdir()
    for path in (folder / stem).iterdir():
        content = path.read_text()
        if path.suffix == ".json":
            record = json.loads(content)
            flipped = {
                name: value
                if name.startswith(("validation_", "closed", "attack", "popularity"))
                else 1 - value
                for name, value in record["metrics"].items()
            }
            content = json.dumps({**record, "metrics": flipped})
        (tmp_path / stem / path.name).write_text(content)
    again, _ = one.evaluated(seeds=(0, 1), out=tmp_path, resume=True)
    assert again["summary"][0]["metrics"]["hit_ratio@10"] != made["summary"][0]["metrics"]["hit_ratio@10"]
    assert again["verdict"] == made["verdict"]


# --- the command -----------------------------------------------------------------------------------------------

SMALL = (
    *("--set", "data.synthetic.users=60", "--set", "data.synthetic.items=80"),
    *("--set", "data.synthetic.interactions=900", "--set", "rounds.cohort=20", "--set", "rounds.group=20"),
)


def test_the_command_makes_the_table_and_takes_finished_rows_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["evaluate", "--table", "floors", "--quick", "--systems", "fcf", "--json", *SMALL]
    arguments += ["--rows", "everybody-min-touch-3", "--out", str(tmp_path), "--set", "rounds.passes=1"]
    assert invoke(arguments) == 0
    printed = capsys.readouterr()
    (made,) = json.loads(printed.out)["result"]["tables"]
    assert [row["row"] for row in made["table"]["summary"]] == ["everybody-min-touch-3"]
    said = " ".join(printed.err.split())
    assert "Test figures choose nothing." in said
    assert "--systems fcf --data synthetic --seeds 0 --set data.synthetic.users=60" in said
    assert "--set rounds.passes=1 --rows everybody-min-touch-3`" in said
    assert json.loads(Path(made["path"]).read_text())["verdict"] == made["table"]["verdict"]
    # Finished rows are taken over, to the second that they took.
    assert invoke([*arguments, "--resume"]) == 0
    (again,) = json.loads(capsys.readouterr().out)["result"]["tables"]
    assert again["table"]["rows"] == made["table"]["rows"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "--table", "floors", "--systems", "fcg"], "no system 'fcg'"),
        (
            ["evaluate", "--table", "floors", "--systems", "fcf", "--budget", "3"],
            "--budget with the table floors",
        ),
        (["evaluate", "--table", "floors", "--systems", "fcf", "--rows", "group-7"], "has no row 'group-7'"),
        (["evaluate", "--table", "floor"], "did you mean 'floors'?"),
        (["tune", "--table", "floors"], "nothing of the table floors is tuned"),
    ],
)
def test_the_command_refuses_what_makes_no_table_of_floors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke([*arguments, *SMALL]) == 10
    assert message in " ".join(capsys.readouterr().err.split())
