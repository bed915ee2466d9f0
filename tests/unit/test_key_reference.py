"""The reference of all configuration."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from coterie.config.key_paths import expectation_at, keys, table_at
from coterie.config.key_reference import markdown
from coterie.config.load import ROLES
from coterie.config.run import RunSettings
from coterie.config.services import DataOwnerSettings, settings_model

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
MODELS: list[type[BaseModel]] = [RunSettings, *map(settings_model, ROLES)]


def test_the_page_in_docs_is_current() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == markdown(), "run: python -m coterie.config.key_reference --write docs/configuration.md"


@pytest.mark.parametrize("model", MODELS)
def test_every_key_stands_in_the_page_with_its_meaning(model: type[BaseModel]) -> None:
    rows = markdown().splitlines()
    for key in keys(model):
        name = f"`[{key.name}]`" if key.is_table else f"`{key.name}`"
        assert any(row.startswith(f"| {name} | {key.takes} |") for row in rows), key.name


@pytest.mark.parametrize("model", MODELS)
def test_no_key_takes_a_pattern_that_only_programmers_read(model: type[BaseModel]) -> None:
    assert [key.name for key in keys(model) if "matches" in key.takes] == []


@pytest.mark.parametrize("model", MODELS)
def test_every_key_has_a_description(model: type[BaseModel]) -> None:
    assert [key.name for key in keys(model) if not key.description] == []


def test_every_row_of_a_table_has_four_cells() -> None:
    rows = [line for line in markdown().splitlines() if line.startswith("|")]
    assert {row.replace("\\|", "").count("|") for row in rows} == {5}


def test_a_required_key_of_an_optional_table_is_required_only_with_it() -> None:
    page = markdown()
    assert "| `enrol.ca_file` | path | required in `[enrol]` |" in page
    assert "| `state` | path | **required** |" in page
    assert "| `metrics` | host:port | absent |" in page


def test_the_keys_of_every_service_are_not_repeated_for_each_role() -> None:
    assert markdown().count("| `log_level` |") == 1


@pytest.mark.parametrize(
    ("model", "path", "expected"),
    [
        (RunSettings, ("federation", "hosts"), "integer, at least 1"),
        (RunSettings, ("split", "train"), "number, above 0, below 1"),
        (RunSettings, ("split", "ties"), 'one of "hash", "file"'),
        (RunSettings, ("reference",), "true or false"),
        (RunSettings, ("seeds",), "array of integers, at least 1 long"),
        (RunSettings, ("seeds", 0), "integer"),
        (RunSettings, ("data", "columns", "user"), "string"),
        (DataOwnerSettings, ("owners", 3, "items"), "path"),
        (DataOwnerSettings, ("owners",), "array of tables, at least 1 long"),
        (DataOwnerSettings, ("cos",), "table with address, name, standbys"),
        (DataOwnerSettings, ("advertise",), "host:port"),
        (DataOwnerSettings, ("log_level",), 'one of "debug", "info", "warning", "error"'),
        (DataOwnerSettings, ("leave_after_epoch",), "integer, at least 1"),
        (RunSettings, ("nothing",), None),
        (RunSettings, ("name", "below"), None),
    ],
)
def test_what_a_key_takes_is_said_in_words(
    model: type[BaseModel], path: tuple[str | int, ...], expected: str | None
) -> None:
    assert expectation_at(model, path) == expected


def test_a_table_is_found_by_its_path_also_where_it_is_optional() -> None:
    assert table_at(RunSettings, ("data", "synthetic")) is not None
    assert table_at(DataOwnerSettings, ("enrol",)) is not None
    assert table_at(DataOwnerSettings, ("owners", 0)) is not None
    assert table_at(RunSettings, ("name",)) is None


def test_the_module_prints_the_page_or_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "coterie.config.key_reference")
    monkeypatch.setattr(sys, "argv", ["reference"])
    runpy.run_module("coterie.config.key_reference", run_name="__main__")
    assert capsys.readouterr().out == markdown()

    monkeypatch.setattr(sys, "argv", ["reference", "--write", str(tmp_path / "page.md")])
    runpy.run_module("coterie.config.key_reference", run_name="__main__")
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == markdown()
