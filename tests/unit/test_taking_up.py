"""How an interrupted run is taken up: which federations go on from their stores, and which begin anew."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from coterie.config.run import RunSettings
from coterie.errors import RunError
from coterie.launch.children import Child
from coterie.launch.kept_runs import KeptRun
from coterie.launch.laid_out import LaidOut
from coterie.launch.taking_up import Interrupted, interrupted
from coterie.store import cos as store
from coterie.studies.run_record import RunRecord
from coterie.studies.saved_settings import save_settings

RUN = "taken-20260101-000000-0001"


def run_of(
    tmp_path: Path, phase: str | None, record: dict[str, Any] | None = None, **settings: Any
) -> KeptRun:
    """Make the folder of a run whose launcher was killed, with a server's store in some phase."""
    folder = tmp_path / RUN
    made = RunSettings.model_validate({"system": "fedncf", "output": tmp_path, **settings})
    save_settings(made, folder)
    known = {"run_id": RUN, "started": "2026-01-01T00:00:00+00:00", **(record or {})}
    RunRecord.model_validate(known).write(folder)
    children = (Child("thirdparty", "directory", folder / "thirdparty"), Child("cos", "cos", folder / "cos"))
    for child in children:
        child.configure({"listen": "127.0.0.1:1"})
    (folder / "operator").mkdir()
    (folder / "operator" / "token").write_text("secret")
    LaidOut(children, 1, 7).write(folder)
    if phase is not None:
        (folder / "cos" / "state").mkdir()
        engine = sa.create_engine(f"sqlite:///{folder / 'cos' / 'state' / 'cos.db'}")
        store.runs.create(engine)
        with engine.begin() as connection:
            state = json.dumps({"phase": phase})
            row = {"run_id": RUN, "request": b"", "plan_hash": b"", "state": state, "snapshot": 0}
            connection.execute(sa.insert(store.runs).values(row))
        engine.dispose()
    return KeptRun(folder)


def goes(found: Interrupted) -> tuple[bool, str]:
    return found.goes_on, found.why


@pytest.mark.parametrize(
    ("phase", "secure_sum", "goes_on"),
    [
        (None, "masked", True),
        ("gather", "masked", True),
        ("done", "masked", True),
        ("rounds", "clear", True),
        ("rounds", "masked", False),
        ("failed", "clear", False),
    ],
)
def test_a_federation_goes_on_where_no_sum_can_be_lost(
    phase: str | None, secure_sum: str, goes_on: bool, tmp_path: Path
) -> None:
    run = run_of(tmp_path, phase, secure_sum=secure_sum)
    assert interrupted(run).goes_on is goes_on
    if phase == "rounds":
        wanted = interrupted(run, go_on=True)
        assert wanted.goes_on
        assert ("it is lost" in wanted.why) == (secure_sum == "masked")


def test_recorded_messages_and_old_tokens_make_it_begin_anew(tmp_path: Path) -> None:
    recorded = run_of(tmp_path / "a", "rounds", secure_sum="clear", federation={"transcripts": True})
    assert "are recorded" in interrupted(recorded).why
    old = run_of(tmp_path / "b", "rounds", secure_sum="clear")
    assert interrupted(old).goes_on
    a_day_ago = time.time() - 24 * 3600
    os.utime(old.folder / "operator" / "token", (a_day_ago, a_day_ago))
    assert goes(interrupted(old))[0] is False
    assert "have expired" in interrupted(old).why


def test_a_federation_that_was_not_laid_out_or_has_finished_is_none_in_progress(tmp_path: Path) -> None:
    run = run_of(tmp_path, "done", secure_sum="clear")
    (run.folder / "course.json").write_text("{}")
    assert goes(interrupted(run)) == (False, "")
    (run.folder / "course.json").unlink()
    (run.folder / "federation.json").unlink()
    assert goes(interrupted(run)) == (False, "")


def test_a_newer_record_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path, "rounds", secure_sum="clear")
    (run.folder / "run.json").write_text(json.dumps({"format": 7, "run_id": RUN}))
    with pytest.raises(RunError, match=r"cannot be taken up: .*format 7"):
        interrupted(KeptRun(run.folder))
