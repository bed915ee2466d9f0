"""The report of a run: the COS's facts as the report shows them, and several seeds together."""

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.config.run import RunSettings
from coterie.studies.outcome import SeedOutcome, from_cos, network, together, write
from coterie.studies.reference import Reference
from coterie.systems.reports import read_report
from coterie.telemetry.report import Course, Report

KEYS = {
    "run_id", "system", "form", "secure_sum", "dataset", "seeds", "metrics", "reference", "traffic",
    "cpu_seconds", "peak_rss_mb", "visibility", "versions",
}  # fmt: skip


def known(ndcg: float = 0.25) -> dict[str, Any]:
    """Return an account of the COS: an owner joined before the first phase was recorded."""
    phases = [
        (1_100, "gather", 0, 0),
        (1_200, "intake", 1, 0),
        (1_900, "epoch", 2, 40),
        (2_500, "done", 2, 80),
    ]
    return {
        "version": 80,
        "staleness": {"max_staleness": 9, "refused": 1, "histogram": {"0": 79}},
        "parties": [{"time_ms": 1_000, "party": "data-owner/a", "change": "joined"}],
        "waits": [{"time_ms": 6_500, "reason": "too few are there"}, {"time_ms": 7_500, "reason": ""}],
        "resumes": [],
        "phases": [
            {"time_ms": at, "phase": phase, "epoch": epoch, "version": version, "owners": 2, "hosts": 1}
            for at, phase, epoch, version in phases
        ],
        "history": [
            {
                "epoch": epoch,
                "version": version,
                "time_ms": at,
                "owners": 2,
                "withheld": 0,
                "users": {"ndcg@10": 30, "train_loss": 999},
                "metrics": {"ndcg@10": value, "train_loss": 0.5},
            }
            for epoch, version, at, value in ((1, 40, 1_850, 0.1), (2, 80, 2_450, ndcg))
        ],
    }


def single(seed: int, ndcg: float) -> SeedOutcome:
    """Return the outcome of one seed."""
    course = from_cos(known(ndcg)).having(
        traffic={"Exchange": {"calls": 80}},
        cpu_seconds={"cos/cos": {"total": 1.0}},
        peak_rss_mb={"cos/cos": 100.0},
        visibility={"cos/cos": {"interaction": "not seen"}},
    )
    rows = {"saros": Reference({"ndcg@10": ndcg / 2}, [{"epoch": 1}])}
    return SeedOutcome(seed, f"split of {seed}", course, rows)


def report(*singles: SeedOutcome) -> Report:
    seeds = tuple(one.seed for one in singles)
    dataset = {"name": "set", "users": 30, "items": 5, "interactions": 90}
    return together(RunSettings(seeds=seeds), dataset, "run-1", singles)


def test_events_count_from_the_first_thing_that_happened() -> None:
    events = from_cos(known()).events
    assert [one.time_s for one in events] == [0.0, 0.1, 0.2, 0.9, 1.5, 5.5, 6.5]
    assert events[0].text == "data-owner/a joined"
    assert [one.text for one in events[5:]] == ["waits: too few are there", "goes on"]
    assert events[3].text == "epoch 2: owners pass over their blocks"


def test_changes_of_parties_that_the_server_counts_and_does_not_list_are_told_in_one_event() -> None:
    listed = [one["change"] for one in known()["parties"]]
    changes = {"joined": listed.count("joined") + 999_990, "lost": listed.count("lost") + 3}
    told = [one.text for one in from_cos({**known(), "party_changes": changes}).events]
    assert [one for one in told if "counted" in one] == [
        "earlier changes of parties are counted only: 999,990 joined, 3 lost"
    ]
    whole = {one: listed.count(one) for one in listed}
    assert from_cos({**known(), "party_changes": whole}).events == from_cos(known()).events


def test_the_history_keeps_the_training_loss_apart_and_counts_the_users_who_were_measured() -> None:
    history = from_cos(known()).history
    assert [one.metrics for one in history] == [{"ndcg@10": 0.1}, {"ndcg@10": 0.25}]
    assert [one.train_loss for one in history] == [0.5, 0.5]
    assert {one.users for one in history} == {30}
    assert history[-1].time_s == 1.45


def test_an_account_without_any_event_has_none() -> None:
    empty = {**known(), "parties": [], "waits": [], "phases": [], "history": []}
    assert from_cos(empty).events == from_cos(empty).owners_timeline == ()
    assert from_cos(empty).content()["events"] == []


def test_several_seeds_have_mean_and_standard_deviation_and_one_has_no_spread() -> None:
    assert report(single(0, 0.2)).content()["metrics"]["ndcg@10"] == {"mean": 0.2, "std": None}
    both = report(single(0, 0.2), single(1, 0.4)).content()
    assert both["metrics"]["ndcg@10"] == {"mean": pytest.approx(0.3), "std": pytest.approx(0.1414, abs=1e-4)}
    assert both["reference"]["saros"]["metrics"]["ndcg@10"]["mean"] == pytest.approx(0.15)
    assert [one["seed"] for one in both["per_seed"]] == [0, 1]


def test_a_report_has_the_documented_keys_and_names_the_split(tmp_path: Path) -> None:
    made = report(single(3, 0.2))
    assert made.content().keys() >= KEYS
    assert made.dataset.split_sha256 == "split of 3"
    # DRIFT's published form has no sums.
    assert made.experiment is False
    write(made, tmp_path)
    stored = json.loads((tmp_path / "report.json").read_text())
    assert stored["metrics"] == made.content()["metrics"]
    assert read_report(stored) == made
    assert "DRIFT" in (tmp_path / "report.html").read_text()


def test_the_networks_share_is_of_the_rounds_and_where_there_are_none_of_training() -> None:
    def account(*ms: float) -> dict[str, Any]:
        return {"called": {f"rpc{n}": {"network_ms": one} for n, one in enumerate(ms)}}

    accounts = {"cos/cos": account(9e9), "client/host-0": account(500.0, 250.0), "data-owner/a": account()}
    rounds = [{"seconds": {"train": 1.0, "apply": 0.5}}, {"seconds": {"train": 1.5}}]
    assert network(Course(rounds=rounds, history=()), accounts).content() == {
        "seconds": 3.0,
        "of": 2,
        "by_party": {
            "client/host-0": {"seconds": 0.75, "share": 0.25},
            "data-owner/a": {"seconds": 0.0, "share": 0.0},
        },
    }
    asynchronous = network(Course(history=[{"time_s": 1.0}, {"time_s": 1.5}]), accounts)
    assert (asynchronous.of, asynchronous.by_party["client/host-0"].share) == (None, 0.5)
    assert network(Course(history=()), accounts).by_party["client/host-0"].share is None
