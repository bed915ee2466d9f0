"""The second federation of a run, and what the report says of it."""

from __future__ import annotations

import pytest

from coterie.config.run import RunSettings
from coterie.errors import ConfigError
from coterie.studies.beside import as_report, beside
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
