"""``coterie runs``: what is listed, shown, compared and removed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import coterie as ct
from coterie.cli.main import invoke

RUN = """
name = "small"
system = "fedncf"
secure_sum = "masked"
reference = false
data.synthetic = {users = 40, items = 60, interactions = 900}
fedncf.model = "gmf"
[rounds]
passes = 2
evaluate_every = 1
cohort = 20
group = 20
min_cohort = 10
min_sum = 10
"""


def envelope(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run a command with --json and return its envelope."""
    capsys.readouterr()
    invoke([*arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    found = envelope(capsys, *arguments)
    assert not found["ok"]
    return f"{found['error']['message']} ({found['error']['hint']})"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs that kept users' figures, one that kept none, and one with another split."""
    folder = tmp_path_factory.mktemp("made")
    before = Path.cwd()
    os.chdir(folder)
    try:
        (folder / "run.toml").write_text(RUN)
        kept = "federation.per_user_metrics=true"
        for sets in ((kept,), (kept, "fedncf.model=neumf"), (), (kept, "seeds=[1]")):
            assert invoke(["run", "run.toml", "--in-process", *(f"--set={one}" for one in sets)]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def runs(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The same runs in a working folder of the test's own, oldest first."""
    shutil.copytree(made / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    # In the order in which they were made: times in ids have seconds only.
    order = sorted((made / "runs").iterdir(), key=lambda one: (one / "settings.json").stat().st_mtime_ns)
    return [tmp_path / "runs" / one.name for one in order]


@pytest.fixture
def stopped(runs: list[Path]) -> Callable[..., Path]:
    """Return a function that makes a run which did not finish, with some record."""

    def make(name: str, **record: Any) -> Path:
        folder = runs[0].parent / name
        folder.mkdir()
        shutil.copy(runs[0] / "settings.json", folder)
        content = json.loads((runs[0] / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**content, "run_id": name, **record}))
        return folder

    return make


def test_runs_are_listed_with_how_each_stands(
    runs: list[Path], stopped: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    stopped("killed-20260101-000000-0001", status="running")
    stopped("broken-20260101-000000-0002", status="failed", reason="host-0 ended with status 9")
    going = stopped("going-20260101-000000-0003", status="running")
    # No run: other files, an unknown folder, a copy under another name, a link.
    (runs[0].parent / "notes.txt").write_text("mine")
    (runs[0].parent / "table").mkdir()
    shutil.copytree(runs[0], runs[0].parent / "my-copy")
    (runs[0].parent / "linked").symlink_to(runs[0])
    with (going / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = {one["run"]: one for one in envelope(capsys, "runs", "list")["result"]["runs"]}
        invoke(["runs", "list"])
    printed = capsys.readouterr().out
    stands = {name: one["status"] for name, one in found.items()}
    assert stands == {
        **{one.name: "finished" for one in runs},
        "killed-20260101-000000-0001": "interrupted",
        "broken-20260101-000000-0002": "failed",
        "going-20260101-000000-0003": "running",
    }
    assert found["broken-20260101-000000-0002"]["reason"] == "host-0 ended with status 9"
    report = json.loads((runs[0] / "report.json").read_text())
    own = found[runs[0].name]
    assert own["metrics"]["hit_ratio@10"] == report["metrics"]["hit_ratio@10"]["mean"]
    assert f"{report['metrics']['hit_ratio@10']['mean']:.4f}" in printed
    assert all(name in printed for name in (*stands, "interrupted", "running", "FedGMF", "FedNeuMF"))
    # The same code gives the table of the Python interface, which has finished runs only.
    assert set(ct.runs("runs")["run"]) == {one.name for one in runs}


def test_a_folder_without_runs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["runs", "list", "--in", str(tmp_path / "none")]) == 0
    assert "there is no run in" in capsys.readouterr().out
    assert "`coterie run FILE` makes one" in refusal(capsys, "runs", "show", "x", "--in", str(tmp_path))


def test_a_run_is_named_by_id_part_folder_or_newest(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (runs[0].name, str(runs[0]), runs[0].name[-4:]):
        assert envelope(capsys, "runs", "show", name)["result"]["run"] == runs[0].name
    assert envelope(capsys, "runs", "show")["result"]["run"] in {one.name for one in runs[-2:]}
    assert "4 runs in runs have 'small'" in refusal(capsys, "runs", "show", "small")
    assert f"did you mean {runs[0].name}" in refusal(capsys, "runs", "show", runs[0].name[:-1] + "z")
    assert "shows its 4 runs" in refusal(capsys, "runs", "show", "qqq")
    assert "is no folder of a run" in refusal(capsys, "runs", "show", str(runs[0].parent))


def test_a_run_that_stopped_is_shown_with_its_reason_and_where_its_logs_are(
    stopped: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    stopped("broken-20260101-000000-0002", status="failed", reason="no [bold]room[/bold]")
    assert invoke(["runs", "show", "broken"]) == 0
    printed = capsys.readouterr().out
    assert "failed, no [bold]room[/bold]" in printed
    assert "fedncf, masked" in printed
    assert "log.jsonl" in printed


def test_reports_of_an_older_and_a_newer_version_are_read_as_far_as_they_can_be_and_that_is_said(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((runs[0] / "report.json").read_text())
    newer = {**content, "format": 2, "metrics": {**content["metrics"], "later@10": {"middle": 3}}}
    (runs[0] / "report.json").write_text(json.dumps(newer))
    found = envelope(capsys, "runs", "show", runs[0].name)["result"]
    assert "of format 2 (Coterie " in found["note"]
    assert "newer than 1" in found["note"]
    assert found["metrics"]["hit_ratio@10"] == content["metrics"]["hit_ratio@10"]["mean"]
    older = {key: value for key, value in content.items() if key != "format"}
    (runs[1] / "report.json").write_text(json.dumps(older))
    (runs[1] / "run.json").unlink()
    assert "of an older version" in envelope(capsys, "runs", "show", runs[1].name)["result"]["note"]
    (runs[2] / "report.json").write_text("{")
    damaged = envelope(capsys, "runs", "show", runs[2].name)["result"]
    assert (damaged["status"], damaged["note"]) == (
        "interrupted",
        "report.json cannot be read: it is damaged",
    )
    (runs[3] / "run.json").write_text(json.dumps({"format": 9, "run_id": runs[3].name}))
    (runs[3] / "report.json").unlink()
    assert "format 9" in envelope(capsys, "runs", "show", runs[3].name)["result"]["note"]


def test_a_comparison_names_settings_that_differ_and_pairs_users(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    reports = [json.loads((one / "report.json").read_text()) for one in runs]
    found = envelope(capsys, "runs", "compare", runs[0].name, runs[1].name)["result"]
    settings = {one["key"]: (one["first"], one["second"]) for one in found["settings"]}
    assert settings["fedncf.model"] == ("gmf", "neumf")
    assert not {"name", "output", "federation.per_user_metrics"} & settings.keys()
    one = found["metrics"]["hit_ratio@10"]
    means = [report["metrics"]["hit_ratio@10"]["mean"] for report in reports[:2]]
    assert (one["first"], one["second"]) == tuple(means)
    assert one["difference"] == pytest.approx(means[1] - means[0])
    # Users' own figures have the means that the federation's sums came to, which are rounded.
    assert one["paired"]["mean"] == pytest.approx(one["difference"], abs=1e-3)
    assert one["paired"]["users"] == 40
    assert one["paired"]["low"] < one["paired"]["mean"] < one["paired"]["high"]
    assert found["unpaired"] == ""
    seconds = {row["name"]: (row["first"], row["second"]) for row in found["costs"]}
    assert seconds["Duration"] == (reports[0]["duration_s"], reports[1]["duration_s"])
    same = envelope(capsys, "runs", "compare", runs[0].name, runs[0].name)["result"]
    assert same["settings"] == []
    assert same["metrics"]["hit_ratio@10"]["paired"]["high"] == 0


def test_a_comparison_says_why_it_pairs_no_users(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def why(first: Path, second: Path) -> str:
        found = envelope(capsys, "runs", "compare", first.name, second.name)["result"]
        assert found["metrics"]["hit_ratio@10"]["paired"] is None
        return str(found["unpaired"])

    assert f"run {runs[2].name} kept no figures of its users" in why(runs[0], runs[2])
    assert why(runs[0], runs[3]) == "other seeds: 0 and 1"
    content = json.loads((runs[1] / "report.json").read_text())
    content["dataset"]["split_sha256"] = "0" * 64
    (runs[1] / "report.json").write_text(json.dumps(content))
    assert why(runs[0], runs[1]) == "other splits of the data for seed 0"
    content["dataset"]["name"] = "another"
    (runs[1] / "report.json").write_text(json.dumps(content))
    assert invoke(["runs", "compare", runs[0].name, runs[1].name]) == 0
    assert "on other data sets, synthetic and another" in capsys.readouterr().out


def test_a_damaged_file_of_users_and_a_run_without_figures_are_refused(
    runs: list[Path], stopped: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    killed = stopped("killed-20260101-000000-0001", status="running")
    assert "no figures to compare: it is interrupted" in refusal(
        capsys, "runs", "compare", runs[0].name, killed.name
    )
    (runs[1] / "users.csv").write_text("user,metric,value\nu1,hit_ratio@10,many\n")
    said = refusal(capsys, "runs", "compare", runs[0].name, runs[1].name)
    assert "users.csv holds no figures of users" in said


def test_the_page_of_a_comparison_escapes_what_runs_say_and_needs_nothing_from_elsewhere(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((runs[1] / "report.json").read_text())
    content["label"] = "<script>alert(1)</script>"
    content["settings"]["fedncf"]["model"] = "<b>bold</b>"
    (runs[1] / "report.json").write_text(json.dumps(content))
    page = tmp_path / "page.html"
    assert invoke(["runs", "compare", runs[0].name, runs[1].name, "--html", str(page)]) == 0
    text = page.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "&lt;b&gt;bold" in text
    assert "http" not in text.replace("http-equiv", "")
    assert "95% over users" in text
    nowhere = tmp_path / "none" / "page.html"
    assert "cannot write" in refusal(
        capsys, "runs", "compare", runs[0].name, runs[1].name, "--html", str(nowhere)
    )


def test_a_run_is_taken_up_where_its_launcher_was_killed_and_keeps_the_figures(
    runs: list[Path],
    stopped: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = stopped("small-20260101-000000-0001", status="running")
    settings = json.loads((folder / "settings.json").read_text())
    assert "was moved from" in refusal(capsys, "runs", "resume", folder.name)
    (folder / "settings.json").write_text(json.dumps({**settings, "output": str(folder.parent)}))
    found = envelope(capsys, "runs", "resume", folder.name)["result"]["report"]
    expected = json.loads((runs[0] / "report.json").read_text())
    for key in ("metrics", "history", "chosen"):
        assert [without_times(found[key])] == [without_times(expected[key])]
    assert found["started"] == expected["started"]
    assert len(found["taken_up"]) == 1
    assert (folder / "users.csv").read_text() == (runs[0] / "users.csv").read_text()
    assert "taken_up" not in expected
    # Finished now; and its seeds are not trained once more.
    (folder / "report.json").unlink()
    monkeypatch.setattr("coterie.studies.experiment.train_in_process", None)
    assert envelope(capsys, "runs", "resume", folder.name)["result"]["report"]["metrics"] == found["metrics"]
    assert envelope(capsys, "runs", "resume", folder.name)["result"]["status"] == "finished"


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if key != "time_s"}
    return [without_times(one) for one in value] if isinstance(value, list) else value


def test_a_run_that_cannot_be_taken_up_says_why(
    runs: list[Path], stopped: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = tmp_path / "ratings.csv"
    data.write_text("1")
    folder = stopped("killed-20260101-000000-0001", status="running", files={str(data): "0" * 64})
    assert f"{data} has changed" in refusal(capsys, "runs", "resume", "killed")
    data.unlink()
    assert f"{data} is gone" in refusal(capsys, "runs", "resume", "killed")
    (folder / "run.json").unlink()
    assert "without run.json" in refusal(capsys, "runs", "resume", "killed")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "is still going" in refusal(capsys, "runs", "resume", "killed")
    said = refusal(capsys, "resume", "killed-20260101-000000-0001")
    assert "`coterie runs resume killed-20260101-000000-0001`" in said
    broken = stopped("broken-20260101-000000-0002", status="failed", files={})
    (broken / "settings.json").write_text("{")
    assert "no settings of this release" in refusal(capsys, "runs", "resume", "broken")


def test_pruning_needs_a_condition_and_somebody_to_ask(
    runs: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nothing says which runs are to go" in refusal(capsys, "runs", "prune")
    assert "expected a number and m, h, d or w" in refusal(capsys, "runs", "prune", "--older-than", "soon")
    assert "expected --yes" in refusal(capsys, "runs", "prune", "--keep", "0")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("typer.confirm", lambda text: False)
    assert invoke(["runs", "prune", "--keep", "0"]) == 0
    printed = capsys.readouterr().out
    assert "nothing is removed" in printed
    assert runs[0].name in printed
    assert all(one.is_dir() for one in runs)


def test_pruning_removes_what_fits_and_nothing_else(
    runs: list[Path], stopped: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = runs[0].parent
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    old = stopped("old-20200101-000000-0001", status="running", started="2020-01-01T00:00:00+00:00")
    (old / "link").symlink_to(outside)
    going = stopped("going-20200101-000000-0002", status="running", started="2020-01-01T00:00:00+00:00")
    broken = stopped("broken-20260101-000000-0003", status="failed")
    (root / "table-20200101-000000-0004").mkdir()
    (root / "table-20200101-000000-0004" / "table.json").write_text("{}")
    (root / "linked-20200101-000000-0005").symlink_to(runs[0])
    with (going / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = envelope(capsys, "runs", "prune", "--older-than", "30d", "--failed", "--yes")["result"]
        assert [one["run"] for one in found["removed"]] == [old.name]
        assert found["bytes"] > 0
        assert broken.name in [
            one["run"] for one in envelope(capsys, "runs", "prune", "--failed", "--yes")["result"]["removed"]
        ]
        kept = envelope(capsys, "runs", "prune", "--keep", "2", "--yes")["result"]
        assert len(kept["removed"]) == 2
        left = [one["run"] for one in envelope(capsys, "runs", "list")["result"]["runs"]]
        assert len(left) == 3
        assert going.name in left
    assert (outside / "precious").read_text() == "mine"
    assert (root / "table-20200101-000000-0004" / "table.json").is_file()
    assert (root / "linked-20200101-000000-0005").is_symlink()
