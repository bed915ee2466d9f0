"""Records of runs: endings, the lock, and the hashes of the files that a run reads."""

import datetime
import json
import time
from pathlib import Path

import pytest

from coterie.config.run import RunSettings
from coterie.errors import DataError, RunError
from coterie.process.runtime import in_use
from coterie.studies.run_record import (
    RUN_RECORD,
    RunRecord,
    changed_file,
    files_of,
    kept_record,
    now,
    recorded,
)

RECORDED = RunRecord(run_id="a", started="2026-01-01T00:00:00+00:00")


def stands(folder: Path) -> tuple[str, str]:
    found = kept_record(folder)
    assert found is not None
    return found.status, found.reason


def test_a_record_says_running_while_the_lock_is_held_and_then_how_the_run_ended(tmp_path: Path) -> None:
    with recorded(RECORDED, tmp_path):
        assert stands(tmp_path) == ("running", "")
        assert in_use(tmp_path)
        with pytest.raises(RunError, match="run a is still going"), recorded(RECORDED, tmp_path):
            pass
    assert not in_use(tmp_path)
    assert stands(tmp_path) == ("finished", "")
    assert json.loads((tmp_path / RUN_RECORD).read_text())["ended"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DataError("no such column"), ("failed", "no such column")),
        (ZeroDivisionError("by 0"), ("failed", "unexpected ZeroDivisionError: by 0")),
        (KeyboardInterrupt(), ("interrupted", "")),
    ],
)
def test_a_record_keeps_why_a_run_ended_early(
    error: BaseException, expected: tuple[str, str], tmp_path: Path
) -> None:
    with pytest.raises(type(error)), recorded(RECORDED, tmp_path):
        raise error
    assert stands(tmp_path) == expected


def test_a_record_that_is_damaged_or_newer_is_refused_and_none_is_none(tmp_path: Path) -> None:
    assert kept_record(tmp_path) is None
    (tmp_path / RUN_RECORD).write_text('{"format": 2, "coterie": "9.0"}')
    with pytest.raises(RunError, match=r"format 2; this release of Coterie reads 1 .*Coterie 9.0"):
        kept_record(tmp_path)
    for content in ("{", "[]", '{"format": 1}', '{"run_id": "a", "started": 3}'):
        (tmp_path / RUN_RECORD).write_text(content)
        with pytest.raises(RunError, match="no record of a run"):
            kept_record(tmp_path)


def test_every_file_that_settings_name_is_hashed_but_those_of_runs(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "inner").mkdir(parents=True)
    (data / "u.data").write_text("1")
    (data / "inner" / "more").write_text("2")
    (data / "runs").mkdir()
    (data / "runs" / "log").write_text("3")
    split = tmp_path / "split.csv"
    split.write_text("4")
    settings = RunSettings.model_validate(
        {
            "output": data / "runs",
            "data": {"path": data},
            "split": {"kind": "file", "path": split},
        }
    )
    found = files_of(settings)
    assert set(found) == {str(data / "u.data"), str(data / "inner" / "more"), str(split)}
    assert files_of(RunSettings()) == {}
    record = RunRecord(run_id="r", started=now(), files=found)
    assert changed_file(record, settings) is None
    (data / "u.data").write_text("5")
    assert changed_file(record, settings) == f"{data / 'u.data'} has changed"
    (data / "u.data").unlink()
    assert changed_file(record, settings) == f"{data / 'u.data'} is gone"


@pytest.mark.parametrize("above", [False, True])
def test_data_are_hashed_where_runs_lie_in_their_folder_or_above_it(tmp_path: Path, above: bool) -> None:
    data = tmp_path / "data"
    (data / "inner").mkdir(parents=True)
    (data / "u.data").write_text("1")
    runs = tmp_path if above else data
    kept = runs / "run-20261124-101500-abcd"
    kept.mkdir()
    (kept / "settings.json").write_text("{}")
    (kept / "cos.log").write_text("2")
    settings = RunSettings.model_validate({"output": runs, "data": {"path": data}})
    found = files_of(settings)
    assert set(found) == {str(data / "u.data")}
    record = RunRecord(run_id="r", started=now(), files=found)
    (kept / "report.json").write_text("{}")
    assert changed_file(record, settings) is None
    # Beside runs lie exports; a folder of the data may have a file of the name that runs have.
    (runs / "mlflow.db").write_text("4")
    assert changed_file(record, settings) is None
    (data / "more").mkdir()
    (data / "more" / "u.item").write_text("3")
    assert changed_file(record, settings) == f"{data / 'more' / 'u.item'} is new"


def test_a_folder_of_data_may_have_files_of_the_names_that_runs_have(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("u.data", "settings.json", "run.json"):
        (data / name).write_text("1")
    for output in (tmp_path, tmp_path / "runs", data):
        settings = RunSettings.model_validate({"output": output, "data": {"path": data}})
        assert set(files_of(settings)) == {
            str(data / name) for name in ("u.data", "settings.json", "run.json")
        }


def test_two_runs_that_begin_within_a_second_have_an_order() -> None:
    first = now()
    time.sleep(0.002)
    assert datetime.datetime.fromisoformat(first) < datetime.datetime.fromisoformat(now())
