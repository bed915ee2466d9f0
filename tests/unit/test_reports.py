"""Stored reports are read by the model of their system."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.privacy.attacks.cluster import ClusterReport
from coterie.privacy.attacks.differencing import DifferencingReport
from coterie.privacy.attacks.disaggregate import DisaggregateReport
from coterie.privacy.attacks.intersect import IntersectReport
from coterie.systems.drift.report import DriftAttack, DriftReport, ThetaRun
from coterie.systems.drift.study.published_attacks import GradientSignReport, RequestedRowsReport
from coterie.systems.drift.study.windows_attacks import DirectionsReport, TouchedReport
from coterie.systems.fedncf.report import FedNcfAttack
from coterie.systems.fedncf.study.inversion import InversionReport
from coterie.systems.registry import systems
from coterie.systems.reports import read_report
from coterie.systems.shared.factor_report import FactorAttack
from coterie.systems.shared.study.profiles import ProfilesReport
from coterie.systems.shared.study.reconstruction_accuracy import ReconstructionReport
from coterie.telemetry.report import AttackFigures, Report

SAMPLE: Callable[[], dict[str, Any]] = runpy.run_path(str(Path(__file__).parents[1] / "sample_report.py"))[
    "sample_report"
]


def test_a_report_of_drift_has_its_own_keys_typed_and_is_written_as_it_was_read() -> None:
    stored = {**SAMPLE(), "visits": 7, "held_rows": 2}
    found = read_report(stored)
    assert isinstance(found, DriftReport)
    assert [one.theta for one in found.theta_study] == [1, 2, 5, 10, 20]
    assert isinstance(found.theta_study[0], ThetaRun)
    assert isinstance(found.attacks["gradient_sign"], DriftAttack)
    assert found.facts() == [
        ("Visits", "7 of users to owners; 2 rows never left their owner: too few users behind them")
    ]
    assert found.content() == stored


def test_keys_of_a_system_that_is_not_installed_are_kept() -> None:
    stored = {
        "system": "later",
        "theta_study": [{"theta": 1}],
        "visits": "many",
        "attacks": {"a": {"auc": 0.5, "b": "c"}},
    }
    found = read_report(stored)
    assert type(found) is Report
    assert found.content() == stored


def test_unknown_keys_of_older_reports_are_kept_and_malformed_ones_left_out() -> None:
    stored = {"system": "drift", "theta_study": [{"theta": 2, "old": 1}, {"theta": "two"}, 3], "visits": []}
    stored["attacks"] = {"gradient_sign": {"auc": 0.5, "flag_accuracy": "all", "old": "words"}, "b": 3}
    assert read_report(stored).content() == {
        "system": "drift",
        "theta_study": [{"theta": 2, "old": 1}, {}],
        "attacks": {"gradient_sign": {"auc": 0.5, "old": "words"}},
    }


@given(
    st.one_of(
        st.none(), st.text(), st.dictionaries(st.just("system"), st.one_of(st.none(), st.lists(st.text())))
    )
)
def test_whatever_is_stored_reads_as_a_report(stored: object) -> None:
    assert isinstance(read_report(stored), Report)


@pytest.mark.parametrize(
    ("figures", "reports"),
    [
        (AttackFigures, (ClusterReport, DifferencingReport, DisaggregateReport, IntersectReport)),
        (DriftAttack, (RequestedRowsReport, GradientSignReport, TouchedReport, DirectionsReport)),
        (FedNcfAttack, (InversionReport,)),
        (FactorAttack, (ProfilesReport, ReconstructionReport)),
    ],
)
def test_every_figure_that_an_attack_gives_has_a_field(
    figures: type[AttackFigures], reports: tuple[Any, ...]
) -> None:
    given = {key for one in reports for key in one.__annotations__}
    # In a report it is the AUC of the reconstruction (`coterie.systems.shared.study.attacks`).
    assert given - {"existence_auc"} <= figures.model_fields.keys()


def test_every_key_of_every_system_is_described() -> None:
    for system in systems().values():
        for key, field in system.report.model_fields.items():
            assert field.description, (system.name, key)
        assert system.report().content() == {}
