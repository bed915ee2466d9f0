"""Figures of runs for other programs, read back by the programs' own readers."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import invoke
from coterie.errors import CoterieError, PeerError, PreflightError
from coterie.telemetry.report import Report
from coterie.telemetry.run_export import points, to_csv
from coterie.telemetry.run_export_mlflow import to_mlflow
from coterie.telemetry.run_export_tensorboard import to_tensorboard

from ..sample_report import sample_report


def report(**changes: Any) -> Report:
    content = {**sample_report(), "started": "2026-03-14T09:15:02+00:00", "duration_s": 61.5, **changes}
    return Report.read(content)


def of_two_seeds() -> Report:
    one = sample_report()["history"][:2]
    other = [{**entry, "metrics": {"ndcg@10": 0.75}} for entry in one]
    records = [{"seed": 3, "history": one}, {"seed": 5, "history": other}]
    return report(seeds=[3, 5], per_seed=records)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_files_have_the_figures_of_the_report(tmp_path: Path) -> None:
    found = report()
    names = {path.stem for path in to_csv(found, tmp_path / "csv")}
    assert names == {"metrics", "history", "rounds", "costs", "settings"}
    metrics = {(row["row"], row["metric"]): row for row in table(tmp_path / "csv" / "metrics.csv")}
    assert float(metrics["run", "ndcg@10"]["mean"]) == found.metrics["ndcg@10"].mean
    assert float(metrics["run", "ndcg@10"]["std"]) == found.metrics["ndcg@10"].std
    saros = found.reference["saros"].metrics["ndcg@10"].mean
    assert float(metrics["saros", "ndcg@10"]["mean"]) == saros
    history = table(tmp_path / "csv" / "history.csv")
    assert len(history) == len(points(found)) > 20
    settings = {row["key"]: row["value"] for row in table(tmp_path / "csv" / "settings.csv")}
    assert settings["drift.dim"] == "16"
    spent = {row["cost"]: float(row["value"]) for row in table(tmp_path / "csv" / "costs.csv")}
    assert spent["duration_seconds"] == 61.5


def test_each_seed_has_a_curve_of_its_own() -> None:
    found = [one for one in points(of_two_seeds()) if one.metric == "ndcg@10"]
    assert [one.seed for one in found] == [3, 3, 5, 5]
    assert [one.value for one in found[2:]] == [0.75, 0.75]


def test_tensorboard_reads_curves_final_figures_and_settings(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = of_two_seeds()
    made = to_tensorboard(found, tmp_path)
    assert made == tmp_path / found.run_id

    def events(folder: Path) -> Any:
        read = EventAccumulator(str(folder))
        read.Reload()
        return read

    curve = events(made / "seed-5").Scalars("ndcg_at_10")
    expected = [one for one in points(found) if (one.seed, one.metric) == (5, "ndcg@10")]
    assert [(one.step, one.value) for one in curve] == [(one.step, one.value) for one in expected]
    assert curve[0].wall_time == pytest.approx(1773479702.0 + expected[0].time_s)
    whole = events(made)
    mean = found.metrics["ndcg@10"].mean
    assert whole.Scalars("final/ndcg_at_10")[0].value == pytest.approx(mean, rel=1e-6)
    assert whole.Scalars("cost/duration_seconds")[0].value == 61.5
    (text,) = whole.Tensors("settings/text_summary")
    assert b"| drift.dim | 16 |" in text.tensor_proto.string_val[0]
    saros = found.reference["saros"].metrics["ndcg@10"].mean
    read = events(made / "baseline-saros").Scalars("final/ndcg_at_10")
    assert read[0].value == pytest.approx(saros, rel=1e-6)
    with pytest.raises(PreflightError, match="holds events of this run already"):
        to_tensorboard(found, tmp_path)


def test_mlflow_reads_parameters_curves_final_figures_and_files(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    found = report()
    kept = tmp_path / "report.json"
    kept.write_text(json.dumps(found.content()))
    store = tmp_path / "made" / "tracked.db"
    made = to_mlflow(found, str(store), (kept,))
    client = MlflowClient(f"sqlite:///{store}")
    run = client.get_run(made)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == found.run_id
    assert run.info.end_time - run.info.start_time == 61_500
    assert run.data.params["drift.dim"] == "16"
    assert run.data.metrics["final/ndcg_at_10"] == found.metrics["ndcg@10"].mean
    saros = found.reference["saros"].metrics["ndcg@10"].mean
    assert run.data.metrics["baseline_saros/ndcg_at_10"] == saros
    assert run.data.tags["split_sha256"] == found.dataset.split_sha256
    curve = client.get_metric_history(made, "seed_0/ndcg_at_10")
    expected = [one for one in points(found) if one.metric == "ndcg@10"]
    assert [(one.step, one.value) for one in curve] == [(one.step, one.value) for one in expected]
    (file,) = client.list_artifacts(made)
    assert (file.path, file.file_size) == ("report.json", kept.stat().st_size)
    assert (store.parent / "tracked-artifacts").is_dir()
    with pytest.raises(PreflightError, match=r"is in sqlite:.* already"):
        to_mlflow(found, str(store))
    other = to_mlflow(report(run_id="another-20260314-091502-7f3b"), str(store))
    assert other != made


def test_an_export_to_mlflow_that_was_cut_off_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    found, store = report(), str(tmp_path / "tracked.db")
    log_batch = MlflowClient.log_batch

    def cut_off(self: MlflowClient, run_id: str, *given: Any, **named: Any) -> None:
        if named.get("metrics"):
            raise KeyboardInterrupt
        log_batch(self, run_id, *given, **named)

    monkeypatch.setattr(MlflowClient, "log_batch", cut_off)
    with pytest.raises(KeyboardInterrupt):
        to_mlflow(found, store)
    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    made = to_mlflow(found, store)
    client = MlflowClient(f"sqlite:///{store}")
    experiment = client.get_run(made).info.experiment_id
    (kept,) = client.search_runs([experiment])
    assert kept.info.run_id == made
    assert kept.data.metrics["final/ndcg_at_10"] == found.metrics["ndcg@10"].mean
    with pytest.raises(PreflightError, match="already"):
        to_mlflow(found, store)


def test_a_tracking_server_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(PeerError, match=r"MLflow cannot use http://127\.0\.0\.1:9"):
        to_mlflow(report(), "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("package", "write", "extra"),
    [("mlflow", to_mlflow, "mlflow"), ("tensorboardX", to_tensorboard, "tensorboard")],
)
def test_a_missing_package_names_its_extra(
    package: str, write: Any, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PreflightError) as refused:
        write(report(), tmp_path / "to" if package != "mlflow" else str(tmp_path / "to.db"))
    assert package in refused.value.message
    assert refused.value.hint == f"pip install 'coterie[{extra}]'"


def test_the_command_exports_a_finished_run_and_names_the_kinds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "drift-20260314-091502-7f3a"
    run.mkdir(parents=True)
    (run / "settings.json").write_text("{}")
    (run / "report.json").write_text(json.dumps(report().content()))
    at = ("--in", str(tmp_path / "runs"), "--json")
    for to, made in (
        ("csv", run / "csv" / "metrics.csv"),
        ("tensorboard", run.parent / "tensorboard" / run.name),
    ):
        assert invoke(["runs", "export", "newest", "--to", to, *at]) == 0
        assert made.exists()
        assert json.loads(capsys.readouterr().out)["result"]["to"] == to
    assert invoke(["runs", "export", "newest", "--to", "csv", "--out", str(tmp_path / "else"), *at]) == 0
    assert (tmp_path / "else" / "rounds.csv").is_file()
    capsys.readouterr()
    assert invoke(["runs", "export", "newest", "--to", "wandb", *at]) == 10
    assert "expected csv, tensorboard, mlflow" in json.loads(capsys.readouterr().out)["error"]["message"]
    (run / "report.json").unlink()
    assert invoke(["runs", "export", "newest", "--to", "csv", *at]) == 60
    assert (
        "no figures to export: it is interrupted" in json.loads(capsys.readouterr().out)["error"]["message"]
    )
    assert (
        invoke(["runs", "export", "newest", "--to", "csv", "--out", str(run / "settings.json" / "x"), *at])
        == 60
    )


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for write in (to_csv, to_tensorboard):
        with pytest.raises(CoterieError, match="cannot write"):
            write(report(), tmp_path / "file" / "to")
    with pytest.raises(CoterieError, match="cannot write"):
        to_mlflow(report(), str(tmp_path / "file" / "to.db"))
