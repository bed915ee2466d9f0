"""Progress display of a run in rounds."""

from __future__ import annotations

import io
import threading

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
            console.print(progress._table())
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


def test_users_who_come_later_are_one_line() -> None:
    grown = wire.GrowEvent(users=40, total=160, from_pass=3)
    said = shown(wire.WatchRunResponse(state=STATE, grown=grown))
    assert said == "40 users who came later take part from pass 3 on, 160 in all\n"


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


class Clock:
    """A clock that a test turns forward."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1_700_000_000 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("coterie.cli.progress.time", made)
    return made


def silent() -> tuple[Console, ProgressDisplay]:
    """Return a display whose thread is not running, so that the test alone says when time has passed."""
    console = Console(file=io.StringIO(), width=150, color_system=None)
    return console, ProgressDisplay(console, SETTINGS)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_goes_on_is_said_when_nothing_was_said_for_two_seconds(clock: Clock) -> None:
    console, progress = silent()
    progress.stage("reading the data set")
    clock.now += 1.9
    progress.beat()
    assert text(console) == ""
    clock.now += 0.1
    progress.beat()
    assert text(console) == "reading the data set, for 2 s\n"


def test_the_longer_a_run_the_rarer_it_says_what_goes_on(clock: Clock) -> None:
    console, progress = silent()
    clock.now += 1000
    progress.stage("seed 0: starting the services", SETTINGS)
    before = text(console)
    clock.now += 50
    progress.beat()
    assert text(console) == before
    clock.now += 5
    progress.beat()
    assert text(console) == before + "seed 0: starting the services, for 55 s\n"


def test_a_round_under_way_is_said_with_the_time_that_is_left(clock: Clock) -> None:
    console, progress = silent()
    progress.update(0, wire.WatchRunResponse(state=STATE, metrics=wire.MetricsEvent(epoch=0)))
    counters = wire.ProgressEvent(round=wire.RoundProgress(round=8, purpose="train", answered=2, members=4))
    clock.now += 10
    progress.update(0, wire.WatchRunResponse(state=STATE, progress=counters))
    progress.beat()
    # Two of nine passes are done after 10 seconds.
    assert (
        text(console).splitlines()[-1]
        == "pass 3/9, round 8: a cohort trains, 2 of 4 heard, at most 35 s left"
    )


def test_what_happened_before_a_run_was_taken_up_says_nothing_of_the_time_that_is_left(clock: Clock) -> None:
    console, progress = silent()
    before = round(progress._begun_ms) - 60_000
    for epoch in (0, 1, 2):
        told = wire.MetricsEvent(epoch=epoch)
        progress.update(0, wire.WatchRunResponse(state=STATE, time_ms=before + epoch, metrics=told))
    counters = wire.ProgressEvent(round=wire.RoundProgress(round=8, purpose="train", answered=2, members=4))
    clock.now += 10
    progress.update(0, wire.WatchRunResponse(state=STATE, progress=counters))
    progress.beat()
    assert text(console).splitlines()[-1] == "pass 3/9, round 8: a cohort trains, 2 of 4 heard"


def test_lines_come_by_themselves_while_a_run_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.cli.progress._QUIET_S", 0.0)
    monkeypatch.setattr("coterie.cli.progress._QUIET_SHARE", 0.0)
    console, progress = silent()
    said = threading.Event()
    monkeypatch.setattr(console, "print", lambda *parts, **options: said.set())
    with progress:
        assert said.wait(60)


def test_a_federation_that_follows_another_is_shown_by_its_own_settings() -> None:
    console, progress = silent()
    progress.update(0, wire.WatchRunResponse(state=STATE, metrics=wire.MetricsEvent(epoch=3)))
    other = RunSettings.model_validate({"system": "fedncf", "rounds": {"passes": 2}})
    progress.stage("beside it: starting the services", other)
    progress.update(0, wire.WatchRunResponse(metrics=wire.MetricsEvent(epoch=1)))
    assert text(console).splitlines() == ["pass 3/9  ", "beside it: starting the services", "pass 1/2  "]


@pytest.mark.parametrize(
    ("epoch", "words"), [(4, "done after pass 4 of 9: stopped early"), (9, "done"), (0, "done")]
)
def test_a_run_that_stops_early_says_so(epoch: int, words: str) -> None:
    event = wire.WatchRunResponse(
        state=wire.RunState(epoch=epoch, phase="RUN_PHASE_DONE"),
        phase=wire.PhaseEvent(phase="RUN_PHASE_DONE", epoch=epoch),
    )
    assert shown(event) == words + "\n"


def test_brackets_are_no_markup_in_the_live_table() -> None:
    state = wire.RunState()
    state.CopyFrom(STATE)
    state.waiting = "[red]a[/red] host"
    assert "[red]a[/red] host" in shown(wire.WatchRunResponse(state=state), terminal=True)
    assert "[bold]" not in shown(wire.WatchRunResponse(state=state), terminal=True)
