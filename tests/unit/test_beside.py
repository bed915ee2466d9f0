"""The second federation of a run, and what the report says of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from coterie.config.run import RunSettings
from coterie.errors import ConfigError, CoterieError, RunError
from coterie.studies import experiment
from coterie.studies.beside import as_report, beside
from coterie.studies.run_record import kept_record
from coterie.studies.saved_settings import read_settings
from coterie.telemetry.report import Course, Report
from coterie.telemetry.report_facts import summary


def settings(*changes: str, **given: object) -> RunSettings:
    plain = {"system": "fedncf", "secure_sum": "masked", "beside": {"label": "in clear", "changes": changes}}
    return RunSettings.model_validate({**plain, **given})


def test_without_changes_there_is_no_second_federation() -> None:
    assert beside(settings()) is None
    assert beside(RunSettings()) is None


def test_a_second_federation_has_the_changes_and_all_else_of_the_run() -> None:
    run = settings("secure_sum=clear", "rounds.passes=2", rounds={"group": 50, "cohort": 40})
    other = beside(run)
    assert other is not None
    assert (other.secure_sum, other.rounds.passes) == ("clear", 2)
    assert (other.rounds.group, other.rounds.cohort) == (50, 40)
    assert beside(other) is None
    same = other.model_copy(update={"secure_sum": "masked", "rounds": run.rounds, "beside": run.beside})
    assert same == run


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("rounds.cohrt=3", r"beside\.changes: .*rounds\.cohrt.*rounds\.cohort"),
        ("rounds.passes=none", r"beside\.changes: .*rounds\.passes = .none. .*expected integer"),
        ("secure_sum", r"beside\.changes: .*secure_sum"),
        ("secure_sum=denoised", r"beside\.changes: .*denoised"),
        ("system=fcf", "another system"),
        ("data.path=other.csv", "another data"),
        ("split.validation=0.4", "another split"),
        ("seeds=[1]", "another seeds"),
    ],
)
def test_changes_that_cannot_be_compared_are_refused(change: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){words}"):
        beside(settings(change))


def report(**beside_parts: object) -> Report:
    return Report.read(
        {
            "label": "FedGMF",
            "metrics": {"ndcg@10": 0.4},
            "reference": {"popularity": {"metrics": {"ndcg@10": 0.2}}},
            "attacks": {
                "cluster": {"auc": 0.99, "popularity_auc": 0.99},
                "disaggregate": {"auc": 0.6, "auc_with_popularity": 0.67, "popularity_auc": 0.66},
            },
            **beside_parts,
        }
    )


def test_the_summary_has_the_verdict_and_the_attack_that_gains_most() -> None:
    quality, attacks = summary(report())
    assert quality.startswith("FedGMF is ahead of Popularity")
    assert attacks.endswith("with an AUC of 0.6700, popularity alone with 0.6600.")


def test_the_summary_has_the_attack_on_the_second_federation() -> None:
    attacked = Course().having(attacks={"disaggregate": {"auc": 1.0, "popularity_auc": 0.66}})
    second = as_report(settings("secure_sum=clear"), attacked, {"ndcg@10": 0.3})
    assert summary(report(beside=second.content()))[2] == "Beside it, in clear: an AUC of 1.0000."
    unnamed = second.having(label="")
    assert summary(report(beside=unnamed.content()))[2] == "Beside it, secure_sum=clear: an AUC of 1.0000."


def test_without_figures_there_is_no_summary() -> None:
    assert summary(Report()) == []
    assert summary(Report.read({"attacks": {"cluster": {"auc": 0.5}}})) == []


# --- a run with a second federation ------------------------------------------------------------------------------

ROUNDS = {
    "passes": 2,
    "evaluate_every": 1,
    "patience": 0,
    "cohort": 20,
    "group": 20,
    "min_cohort": 10,
    "min_sum": 10,
}
DATA = {"synthetic": {"users": 40, "items": 50, "interactions": 900}}


def small(folder: Path, *changes: str, **given: object) -> RunSettings:
    return settings(
        *changes,
        secure_sum="clear",
        rounds=ROUNDS,
        data=DATA,
        output=folder,
        reference=False,
        federation={"hosts": 2},
        **given,
    )


def run(settings: RunSettings, **given: Any) -> tuple[Report, Path]:
    said: list[str] = given.pop("said", [])
    done = experiment.run(settings, "r", lambda seed, event: None, None, warn=said.append, **given)
    return asyncio.run(done)


def test_a_second_federation_that_cannot_train_is_refused_before_the_first_one(tmp_path: Path) -> None:
    asked = small(tmp_path, "rounds.cohort=60", "rounds.group=60", "rounds.min_cohort=50")
    with pytest.raises(CoterieError, match=r"(?s)second federation \(beside\).*50"):
        run(asked)
    assert not list(tmp_path.iterdir())


def test_a_second_federation_that_fails_costs_the_run_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = experiment.train_in_process
    trained: list[RunSettings] = []

    def train(settings: RunSettings, *given: Any, **named: Any) -> Any:
        trained.append(settings)
        if len(trained) == 2:
            raise RunError("no sum was formed")
        return first(settings, *given, **named)

    monkeypatch.setattr(experiment, "train_in_process", train)
    said: list[str] = []
    made, folder = run(small(tmp_path, "rounds.passes=1"), said=said)
    assert made.beside is not None
    assert made.beside.failed == "no sum was formed"
    assert made.metrics
    assert any("second federation" in one and "no sum was formed" in one for one in said)
    assert "no result, as it failed (no sum was formed)" in " ".join(summary(made))
    kept = json.loads((folder / "report.json").read_text())
    assert kept["beside"]["failed"] == "no sum was formed"


def test_a_run_that_is_taken_up_has_the_second_federation_of_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The default of `fedncf.private_rate` follows from the model, and settings that are kept name every key.
    asked = small(tmp_path, "fedncf.model=mlp")
    began = beside(asked)
    assert began is not None
    _, folder = run(asked)
    record = kept_record(folder)
    assert record is not None
    (folder / "beside" / "course.json").unlink()
    trained: list[RunSettings] = []
    first = experiment.train_in_process

    def train(settings: RunSettings, *given: Any, **named: Any) -> Any:
        trained.append(settings)
        return first(settings, *given, **named)

    monkeypatch.setattr(experiment, "train_in_process", train)
    run(read_settings(folder / "settings.json"), taken_up=record)
    (again,) = trained
    assert again.own == began.own
    assert again.rounds == began.rounds
