"""Progress display of a run in rounds."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from coterie.cli.progress import ProgressDisplay, headline
from coterie.config.run import RunSettings
from coterie.wire.v1 import operator_pb2 as wire
from coterie.wire.v1.orchestrator_pb2 import RoundsPlan, RunPlan

SETTINGS = RunSettings.model_validate({"system": "fedncf", "secure_sum": "masked", "rounds": {"passes": 9}})
STATE = wire.RunState(
    plan=RunPlan(rounds=RoundsPlan(cohort=20)),
    phase="RUN_PHASE_ROUNDS",
    epoch=3,
    version=7,
    hosts_alive=2,
    users=60,
)


def ended(**given: object) -> wire.WatchRunResponse:
    plain = {
        "round": 5,
        "purpose": "train",
        "users": 60,
        "members": 4,
        "summed": 60,
        "phases": ["submit", "unmask sum"],
        "seconds": [3.0, 1.0],
        "bytes_in": 8000,
    }
    return wire.WatchRunResponse(state=STATE, round=wire.RoundEvent(**{**plain, **given}))  # type: ignore[arg-type]


def shown(*events: wire.WatchRunResponse, terminal: bool = False, settings: RunSettings = SETTINGS) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=150, color_system=None)
    with ProgressDisplay(console, settings) as progress:
        for event in events:
            progress.update(0, event)
        if terminal:
            # The live table goes when the run ends: look at it before.
            console.print(progress._table(0))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_first_line_says_model_parties_and_sum() -> None:
    devices = {"system": "fedncf", "secure_sum": "masked", "rounds": {"experiment": False, "min_cohort": 2}}
    assert headline(RunSettings.model_validate(devices)) == "fedncf, gmf, hosts as parties, secure sum masked"
    assert headline(RunSettings()) == "drift, published, secure sum clear"


def test_the_first_line_and_the_table_say_where_floors_count_users() -> None:
    words = "an experiment: floors count users, not devices"
    assert headline(SETTINGS) == f"fedncf, gmf, hosts as parties, secure sum masked, {words}"
    assert headline(RunSettings.model_validate({"system": "fedmvmf"})) == (
        f"fedmvmf, ratings, hosts as parties, secure sum clear, {words}"
    )
    shielded = {"system": "drift", "drift": {"form": "shielded"}}
    assert headline(RunSettings.model_validate(shielded)).endswith(words)
    told = ended()
    assert "floors count users" not in shown(told, terminal=True)
    told.state.plan.rounds.experiment = True
    assert "floors count users, not devices" in shown(told, terminal=True)


def test_an_evaluation_is_a_line_with_both_rankings() -> None:
    metrics = wire.MetricsEvent(
        epoch=3,
        names=["hit_ratio@10", "ndcg@10", "hit_ratio_all@10", "map@10"],
        means=[0.5, 0.25, 0.125, 1.0],
    )
    said = shown(wire.WatchRunResponse(state=STATE, metrics=metrics))
    assert said == "pass 3/9  hit_ratio@10 0.5000  ndcg@10 0.2500  hit_ratio_all@10 0.1250\n"


def test_a_round_without_trouble_is_no_line() -> None:
    assert shown(ended()) == ""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"reason": "too few submitted", "summed": 0}, "round 5 (train) was abandoned: too few submitted"),
        ({"silent_owners": ["films"]}, "round 5 (train): films said nothing of its items in time"),
        ({"dropped": 1, "summed": 45}, "round 5 (train): 1 of 4 members dropped out, 45 of 60 users summed"),
    ],
)
def test_what_went_wrong_in_a_round_is_a_line(given: dict[str, object], words: str) -> None:
    assert shown(ended(**given)) == words + "\n"


def test_the_table_shows_round_cohort_bytes_and_time_by_phase() -> None:
    now = wire.RoundProgress(
        round=6, purpose="train", phase="share", members=4, answered=2, dropped=1, passes=3, of_passes=9
    )
    progress = wire.WatchRunResponse(
        state=STATE, progress=wire.ProgressEvent(round=now, bytes_in=5000, bytes_out=7000)
    )
    said = shown(ended(), ended(reason="late"), progress, terminal=True)
    for words in (
        "rounds of training, pass 3/9",
        "2 client hosts, 60 users",
        "6: a cohort trains, share, 2 of 3 heard, 1 dropped",
        "version 7, 1 rounds abandoned",
        "2.00 kB from each",
        "submit 75%  unmask sum 25%",
        "5.00 kB in, 7.00 kB out",
    ):
        assert words in said, words


def test_a_phase_that_only_a_newer_server_knows_is_named_by_its_number() -> None:
    event = wire.WatchRunResponse(state=STATE, phase=wire.PhaseEvent(phase=99))  # type: ignore[arg-type]
    assert shown(event) == "phase 99\n"
