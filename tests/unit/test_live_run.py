"""Parts of the live page: what each event changes, and that nothing grows without bound."""

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie.config.run import RunSettings
from coterie.systems.reports import read_report
from coterie.web.board import Board
from coterie.web.live_run import MOST_ALERTS, MOST_LINES, MOST_PARTIES, MOST_ROUNDS, LiveRun
from coterie.web.processes import ProcessFigures
from coterie.web.thinned import Thinned
from coterie.wire.v1 import operator_pb2 as wire

TESTS = Path(__file__).parents[1]
EVENTS = runpy.run_path(str(TESTS / "live_events.py"))
SETTINGS = RunSettings.model_validate({"system": "fedncf", "secure_sum": "masked", "rounds": {"passes": 9}})


class Followed:
    """A run on a board, with a clock that a test moves."""

    def __init__(self, settings: RunSettings = SETTINGS) -> None:
        self.board, self.now = Board(), 1000.0
        self.live = LiveRun(self.board, settings, "run-1", "example", clock=lambda: self.now)

    def see(self, *events: wire.WatchRunResponse) -> None:
        for event in events:
            self.live.update(0, event)

    def part(self, name: str) -> Any:
        return self.board.part(name)


@pytest.fixture
def run() -> Followed:
    return Followed()


def a_round(**given: Any) -> wire.WatchRunResponse:
    usual = {
        "round": 5,
        "purpose": "train",
        "users": 60,
        "members": 4,
        "summed": 60,
        "phases": ["submit"],
        "seconds": [3.0],
    }
    return wire.WatchRunResponse(round=wire.RoundEvent(**{**usual, **given}))


def party(name: str, change: str) -> wire.WatchRunResponse:
    return wire.WatchRunResponse(party=wire.PartyEvent(party=name, change=change))


def test_a_run_begins_empty_and_says_what_it_does(run: Followed) -> None:
    run.live.stage("reading the data set")
    assert run.part("now")["stage"] == "reading the data set"
    assert run.part("now")["of"] == 9
    assert run.part("parties") == []
    assert run.part("lines")[-1]["text"] == "reading the data set"
    assert run.part("end") is None


def test_parties_come_go_and_come_back(run: Followed) -> None:
    run.see(party("client/host-0", "joined"), party("client/host-0", "lost"))
    assert [one["state"] for one in run.part("parties")] == ["gone"]
    assert run.part("alerts")[-1]["text"] == "client/host-0 lost"
    run.see(party("client/host-0", "returned"))
    assert [one["state"] for one in run.part("parties")] == ["here"]
    assert run.part("alerts")[-1]["kind"] == "good"


def test_users_who_come_later_are_told_by_their_number(run: Followed) -> None:
    run.see(wire.WatchRunResponse(grown=wire.GrowEvent(users=40, total=160, from_pass=3)))
    words = "40 users who came later take part from pass 3 on, 160 in all"
    assert run.part("lines")[-1]["text"] == words


def test_a_silent_owner_is_late_until_a_round_that_it_answers(run: Followed) -> None:
    run.see(party("data-owner/drama", "joined"), a_round(silent_owners=["drama"]))
    assert run.part("parties")[0]["state"] == "late"
    assert "drama said nothing of its items in time" in run.part("alerts")[-1]["text"]
    run.see(a_round(round=6))
    assert run.part("parties")[0]["state"] == "here"


def test_abandoned_rounds_dropouts_and_refusals_are_counted_with_their_reasons(run: Followed) -> None:
    run.see(
        a_round(reason="too few members", summed=0),
        a_round(round=6, dropped=1, refused=2),
        a_round(round=7, liars=1, left_out=3, withdrawn=["a cause"]),
    )
    assert run.part("now")["totals"] == {
        "rounds": 3,
        "abandoned": 1,
        "dropped": 1,
        "refused": 2,
        "left_out": 3,
    }
    told = [one["text"] for one in run.part("alerts")]
    assert told == [
        "round 5 (train) was abandoned: too few members",
        "round 6 (train): 1 of 4 members dropped out",
        "round 7 (train): 1 members revealed wrong shares",
        "round 7 (train): 3 members were left out of the sum",
        "round 7 (train): a cause",
    ]


def test_a_round_in_progress_shows_the_steps_that_the_last_one_had(run: Followed) -> None:
    def progress(step: str, heard: int) -> wire.WatchRunResponse:
        now = wire.RoundProgress(round=2, purpose="train", phase=step, members=3, answered=heard)
        return wire.WatchRunResponse(progress=wire.ProgressEvent(round=now))

    run.see(progress("submit", 1))
    assert run.part("round")["steps"] == ["submit"]
    run.see(a_round(phases=["advertise", "submit", "apply"], seconds=[1, 2, 3]), progress("submit", 2))
    shown = run.part("round")
    assert shown["steps"] == ["advertise", "submit", "apply"]
    assert (shown["step"], shown["heard"], shown["purpose"]) == ("submit", 2, "a cohort trains")
    run.see(wire.WatchRunResponse(phase=wire.PhaseEvent(phase=wire.RunPhase.RUN_PHASE_DONE)))
    assert run.part("round") is None


def test_rates_are_those_between_two_counts_and_a_restarted_server_counts_from_zero(run: Followed) -> None:
    def counted(received: int) -> wire.WatchRunResponse:
        return wire.WatchRunResponse(progress=wire.ProgressEvent(bytes_in=received, bytes_out=2 * received))

    run.see(counted(1000))
    run.now += 2
    run.see(counted(5000))
    assert (run.part("now")["rate_in"], run.part("now")["rate_out"]) == (2000, 4000)
    run.now += 2
    run.see(counted(10))  # started again
    assert run.part("traffic") == [[1002.0, 2000, 4000]]


def test_curves_are_by_metric_and_a_further_federation_has_its_own(run: Followed) -> None:
    run.live.stage("starting the services, secure sum masked", SETTINGS)
    run.see(*EVENTS["evaluations"](1, 4))
    run.live.stage("beside it, in clear: starting the services, secure sum clear", SETTINGS)
    run.see(*EVENTS["evaluations"](1, 3))
    quality = run.part("quality")
    assert [one["label"] for one in quality["curves"]] == ["this run", "beside it, in clear"]
    assert quality["names"] == ["hit_ratio@10", "ndcg@10"]
    assert quality["curves"][0]["points"]["hit_ratio@10"] == [[1, 0.12], [2, 0.14], [3, 0.16]]
    assert run.part("parties") == []


def test_a_metric_that_nobody_measured_is_left_out(run: Followed) -> None:
    metrics = wire.MetricsEvent(epoch=1, names=["ndcg@10", "rmse"], means=[0.5, float("nan")])
    run.see(wire.WatchRunResponse(metrics=metrics))
    assert list(run.part("quality")["curves"][0]["points"]) == ["ndcg@10"]


def test_the_end_shows_verdict_and_baselines(run: Followed) -> None:
    sample = runpy.run_path(str(TESTS / "sample_report.py"))["sample_report"]()
    run.see(*EVENTS["evaluations"](1, 3))
    report = read_report(sample)
    run.live.ended(report, "runs/one/report.html")
    end = run.part("end")
    assert end["ok"]
    assert end["report"] == "runs/one/report.html"
    assert len(run.part("quality")["references"]) == len(report.reference) > 0


def test_a_run_that_fails_says_why(run: Followed) -> None:
    run.live.failed("client/host-0 ended with status 3")
    assert run.part("end") == {"ok": False, "text": ["client/host-0 ended with status 3"], "report": ""}
    assert run.part("alerts")[-1]["kind"] == "bad"


def long_run() -> Iterator[wire.WatchRunResponse]:
    for number in range(1, 3001):
        yield party(f"client/host-{number}", "joined")
        yield a_round(round=number, dropped=1, reason="x" * 5000 if number % 7 == 0 else "")
        counters = wire.ProgressEvent(bytes_in=number * 1000, bytes_out=number * 900)
        yield wire.WatchRunResponse(progress=counters)
        yield from EVENTS["evaluations"](number, number + 1)


def test_nothing_grows_however_long_a_run_takes(run: Followed) -> None:
    sizes = []
    for number, event in enumerate(long_run()):
        run.now += 1
        run.see(event)
        if number in (3000, 11_999):
            _, parts = run.board.since("")
            sizes.append({name: len(text) for name, text in parts.items()})
    limits = {"lines": MOST_LINES, "alerts": MOST_ALERTS, "parties": MOST_PARTIES, "rounds": MOST_ROUNDS}
    for name, most in limits.items():
        assert len(run.part(name)) == most, name
    assert run.part("now")["hidden"] == 3000 - MOST_PARTIES
    curve = run.part("quality")["curves"][0]["points"]["ndcg@10"]
    assert len(curve) <= 301
    assert (curve[0][0], curve[-1][0]) == (1, 3000)
    assert len(run.part("traffic")) <= 241
    assert sum(sizes[1].values()) < 1.6 * sum(sizes[0].values())
    assert sum(sizes[1].values()) < 150_000


@pytest.mark.parametrize("added", range(1, 60))
def test_thinned_points_keep_the_first_and_the_last_and_stay_few(added: int) -> None:
    series = Thinned(8)
    for value in range(added):
        series.add([value])
    points = [point[0] for point in series.points]
    assert (points[0], points[-1]) == (0, added - 1)
    assert points == sorted(set(points))
    assert len(points) <= 9
    assert len(points) >= min(added, 4)


def test_a_process_has_the_cpu_of_the_last_while_and_one_that_ended_has_none(tmp_path: Path) -> None:
    now = [10.0]

    def write(ticks: int) -> None:
        fields = ["S", *["0"] * 10, str(ticks), "0", *["0"] * 8, "300", "0"]
        (tmp_path / "7" / "stat").write_text(f"7 (odd ) name) {' '.join(fields)}")

    (tmp_path / "7").mkdir()
    figures = ProcessFigures(tmp_path, clock=lambda: now[0])
    write(100)
    first = figures.read([("cos/cos", 7), ("client/host-0", 8)])
    assert [one["alive"] for one in first] == [True, False]
    assert first[0]["cpu"] is None
    now[0] += 2
    write(200)
    assert figures.read([("cos/cos", 7)])[0]["cpu"] == pytest.approx(0.5)


def test_a_board_tells_only_what_changed_and_takes_no_numbers_that_browsers_cannot_read() -> None:
    board = Board()
    board.put("a", 1)
    mark, changed = board.since("")
    assert changed == {"a": "1"}
    board.put("a", 1)
    assert board.since(mark) == (mark, {})
    with pytest.raises(ValueError, match="JSON"):
        board.put("a", float("nan"))
    assert json.loads(board.since("")[1]["a"]) == 1
