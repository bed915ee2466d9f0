"""A rounds-based run in this process: what its report says, and that neither sum nor repetition changes a number."""

from __future__ import annotations

import asyncio
import json
import weakref
from typing import Any

import numpy as np
import pytest

from coterie.config.run import RunSettings
from coterie.errors import ConfigError, RunError
from coterie.studies import experiment
from coterie.studies import local_training as training
from coterie.studies.in_process import InProcess, train_in_process
from coterie.studies.run_data import load, make_feed
from coterie.wire.v1 import operator_pb2 as wire

SMALL = {
    "system": "fedncf",
    "reference": False,
    "data": {"synthetic": {"users": 60, "items": 80, "interactions": 1200}},
    "rounds": {"cohort": 20, "group": 20, "passes": 3, "evaluate_every": 2},
    "federation": {"hosts": 3},
}


def settings(**given: Any) -> RunSettings:
    return RunSettings.model_validate({**SMALL, **given})


def trained(**given: Any) -> tuple[InProcess, list[wire.WatchRunResponse]]:
    made = settings(**given)
    events: list[wire.WatchRunResponse] = []
    feed = make_feed(made, load(made), 0)
    return train_in_process(made, feed, run_id="test", seed=0, see=events.append), events


@pytest.fixture(scope="module")
def clear() -> tuple[InProcess, list[wire.WatchRunResponse]]:
    return trained()


def test_the_masked_sum_changes_no_number(clear: tuple[InProcess, list[wire.WatchRunResponse]]) -> None:
    masked, _ = trained(secure_sum="masked")
    for name, value in clear[0].trained.arrays.items():
        np.testing.assert_array_equal(masked.trained.arrays[name], value)
    assert masked.known["chosen"] == clear[0].known["chosen"]


def test_users_as_parties_learn_what_hosts_learn(
    clear: tuple[InProcess, list[wire.WatchRunResponse]],
) -> None:
    # The first version is the same; its metrics are rounded with other draws, in steps of 3e-5 each.
    users, _ = trained(rounds={**SMALL["rounds"], "party_per_user": True})  # type: ignore[dict-item]
    expected = clear[0].known["history"][0]["metrics"]
    assert users.known["history"][0]["metrics"] == pytest.approx(expected, abs=1e-4)
    assert {one["members"] for one in users.known["rounds"]} == {20}


@pytest.mark.parametrize("party_per_user", [False, True], ids=["hosts", "users"])
def test_cohorts_drawn_anew_in_each_round_train_and_everybody_is_measured(party_per_user: bool) -> None:
    rounds = {**SMALL["rounds"], "cohorts": "independent", "party_per_user": party_per_user}  # type: ignore[dict-item]
    made, _ = trained(rounds=rounds, fedncf={"touch": "exact"})
    # Three rounds cover 60 users at 20 each.
    assert sum(one["purpose"] == "train" for one in made.known["rounds"]) == 3 * 3
    assert not made.known["abandoned"]
    assert all(entry["users"]["hit_ratio@10"] == 60 for entry in made.known["history"])


def test_every_round_and_evaluation_is_kept_in_order(
    clear: tuple[InProcess, list[wire.WatchRunResponse]],
) -> None:
    known = clear[0].known
    rounds = known["rounds"]
    assert [one["round"] for one in rounds] == list(range(1, len(rounds) + 1))
    purposes = [one["purpose"] for one in rounds]
    # Three groups, evaluation, two passes of three cohorts, evaluation, one pass, evaluation.
    assert purposes == ["supports"] * 3 + ["evaluate"] + ["train"] * 6 + ["evaluate"] + ["train"] * 3 + [
        "evaluate"
    ]
    assert [one["version"] for one in rounds if one["purpose"] == "train"] == list(range(1, 10))
    assert {one["users"] for one in rounds if one["purpose"] == "train"} == {20}
    assert all(one["summed"] == one["users"] and not one["reason"] for one in rounds)
    assert [one["epoch"] for one in known["history"]] == [0, 2, 3]
    assert known["chosen"] in [
        {key: one[key] for key in ("version", "epoch", "metrics", "users")} for one in known["history"]
    ]
    assert (known["phase"], known["groups"], known["abandoned"]) == ("done", 3, 0)


def test_watchers_see_every_round_and_evaluation_and_the_end_last(
    clear: tuple[InProcess, list[wire.WatchRunResponse]],
) -> None:
    known, events = clear[0].known, clear[1]
    assert [e.round.round for e in events if e.HasField("round")] == [one["round"] for one in known["rounds"]]
    assert [e.metrics.epoch for e in events if e.HasField("metrics")] == [0, 2, 3]
    assert events[-1].phase.phase == wire.RunPhase.RUN_PHASE_DONE
    assert {e.state.users for e in events} == {60}


def test_sums_do_not_outlive_their_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []
    run_round = training.run_round

    def watched(*given: Any) -> Any:
        outcome = run_round(*given)
        made.append(weakref.ref(outcome.total))
        return outcome

    monkeypatch.setattr(training, "run_round", watched)
    kept = trained()
    assert len(made) == len(kept[0].known["rounds"]) > 5
    assert not [one for one in made if one() is not None]


def test_a_report_in_process_has_the_keys_of_one_of_services(tmp_path: Any) -> None:
    made = settings(output=tmp_path, reference=True)
    report, folder = asyncio.run(experiment.run(made, "test", lambda seed, event: None, None))
    held = json.loads((folder / "report.json").read_text())
    assert held["system"] == "fedncf"
    assert held["form"] == "hosts"
    assert held["in_process"] is True
    assert held["metrics"]["hit_ratio@10"]["mean"] == held["chosen"]["metrics"]["hit_ratio@10"]
    assert held["protection"]["sum"] == "clear"
    assert {"popularity", "random"} <= held["reference"].keys()
    assert held["rounds"] == report.content()["rounds"]
    assert (folder / "report.html").is_file()


def test_a_local_step_that_diverges_ends_the_run_with_the_reason() -> None:
    far = {"rate": 1e30, "private_rate": 1e30, "steps": "sum"}
    wild = {"system": "fedmf", "split": {"kind": "random"}, "fedmf": far}
    with pytest.raises(RunError, match="the local step failed"):
        trained(**wild, rounds={**SMALL["rounds"], "choose_by": "validation_rmse"})


@pytest.mark.parametrize("system", ["fedncf", "fedmf"])
def test_a_key_that_participants_share_changes_no_number(system: str) -> None:
    given: dict[str, Any] = {"system": system, "encryption": {"bits": 1024, "comparison": True}}
    if system == "fedmf":
        given |= {"split": {"kind": "random"}, "rounds": {**SMALL["rounds"], "choose_by": "validation_rmse"}}
    alone, _ = trained(**given)
    shared, _ = trained(**given, secure_sum="shared-key")
    measured = [[one["metrics"] for one in each.known["history"]] for each in (shared, alone)]
    assert measured[0] == measured[1]
    assert shared.trained.best.keys() == alone.trained.best.keys()
    for name, value in alone.trained.best.items():
        np.testing.assert_array_equal(shared.trained.best[name], value, err_msg=name)


def test_drift_is_refused_in_one_process_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="owners work side by side"):
        asyncio.run(experiment.run(RunSettings(), "test", lambda seed, event: None, None))
