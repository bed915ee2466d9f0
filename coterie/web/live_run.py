"""What the live page shows of a run: built from the events that the terminal's progress display gets, too.

Everything here comes from ``WatchRun``, from the report, and from the launcher's own processes.  Nothing of it belongs
to a single user, as the declarations of `run_state` say.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coterie.config.run import RunSettings
from coterie.privacy.declarations import KINDS, ROLES, Access
from coterie.privacy.visibility import matrix
from coterie.systems.description import Driver
from coterie.telemetry.report import Report
from coterie.telemetry.report_facts import row_label, summary
from coterie.telemetry.run_words import came_later_words, ended_words, phase_words, purpose_words
from coterie.telemetry.time_left import TimeLeft
from coterie.web.board import Board
from coterie.web.processes import ProcessFigures
from coterie.web.thinned import Thinned
from coterie.wire.v1 import operator_pb2 as wire

__all__ = ["LiveRun"]

MOST_LINES = 120
"""Most lines of what happened."""
MOST_ROUNDS = 40
"""Most rounds whose steps are shown."""
MOST_PARTIES = 200
"""Most parties that are shown by name."""
MOST_ALERTS = 30
MOST_CURVES = 6
MOST_PAIRS = 400
MOST_RUNS = 50
_MOST_TEXT = 400
_SHORTEST_S = 0.1
"""Shortest time over which a rate is taken, seconds."""
_ENDED = (wire.RunPhase.RUN_PHASE_DONE, wire.RunPhase.RUN_PHASE_FAILED)
_GONE, _HERE = ("left", "lost"), ("joined", "returned", "lied")

Processes = Callable[[], Sequence[tuple[str, int]]]
"""Function that returns party and process id of the launcher's own processes."""


def _word(access: Access) -> str:
    return "" if not access.allowed else "own" if access.own_only else "all"


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 1] + "\N{HORIZONTAL ELLIPSIS}"


class LiveRun:
    """The parts of the live page for one run, kept current on a board; every part is bounded.

    Takes the same calls as the terminal's progress display: `stage` and `update`.  All methods may be called from any
    thread.

    Parameters
    ----------
    board : Board
        Receives the parts.
    settings : RunSettings
        Settings of the run.
    run_id : str
    headline : str
        One line about the run.
    references : mapping, optional
        Metrics of each baseline that is known beforehand, by its name.
    clock : callable
        Returns Unix seconds.
    """

    def __init__(
        self,
        board: Board,
        settings: RunSettings,
        run_id: str,
        headline: str,
        *,
        references: Mapping[str, Mapping[str, float]] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._board, self._clock = board, clock
        self._lock = threading.RLock()
        self._lines: deque[dict[str, Any]] = deque(maxlen=MOST_LINES)
        self._alerts: deque[dict[str, Any]] = deque(maxlen=MOST_ALERTS)
        self._curves: deque[dict[str, Any]] = deque(maxlen=MOST_CURVES)
        self._references = [
            {"label": name, "metrics": dict(metrics)} for name, metrics in (references or {}).items()
        ]
        self._seeds = len(settings.seeds)
        self._at = clock()
        self._figures = ProcessFigures()
        board.put("run", {"id": run_id, "headline": headline, "began": round(clock(), 1)})
        self.preview(settings)
        self._follow(settings, "")

    # --- what the progress display gets, too -----------------------------------------------------------------------

    def stage(self, text: str, settings: RunSettings | None = None) -> None:
        """Show what begins, and forget the last federation if another one follows."""
        with self._lock:
            if settings is not None:
                self._follow(settings, text)
            self._stage, self._at = text, self._clock()
            self._say("note", text)
            self._put_now()

    def update(self, seed: int, event: wire.WatchRunResponse) -> None:
        """Show one event."""
        with self._lock:
            self._seed, self._state, self._stage = seed, event.state, ""
            self._at = event.time_ms / 1000 if event.time_ms else self._clock()
            match event.WhichOneof("event"):
                case "progress":
                    self._count(event.progress)
                case "metrics":
                    self._measured(event.metrics)
                case "party":
                    self._came_or_went(event.party)
                case "round":
                    self._summed(event.round)
                case "phase":
                    self._began(event.phase)
                case "wait":
                    self._waits(event.wait.reason)
                case "grown":
                    self._say("good", came_later_words(event.grown))
                case "resumed":
                    self._say("warn", f"resumed after round {event.resumed.round}: {event.resumed.failure}")
            self._put_now()

    # --- what only a page shows ------------------------------------------------------------------------------------

    def measure(self, processes: Processes) -> None:
        """Show CPU and memory of the launcher's own processes."""
        rows = self._figures.read(processes())
        self._board.put("processes", rows)

    def list_runs(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show runs, newest first.

        Parameters
        ----------
        rows : sequence of mapping
            Run, system, secure_sum and state of each; dataset, started, seconds and metrics where they are known.
        """
        self._board.put("runs", [dict(row) for row in rows[:MOST_RUNS]])

    def preview(self, settings: RunSettings) -> None:
        """Show what the plan of a run lets each role see, as its system declares."""
        declared = matrix(settings.description.declared(settings.form, settings.secure_sum))
        rows = [
            {"kind": KINDS[kind], "roles": {role: _word(declared[role][kind]) for role in ROLES}}
            for kind in KINDS
            if any(declared[role][kind].allowed for role in ROLES)
        ]
        self._board.put("preview", {"roles": list(ROLES), "rows": rows})

    def network(self, pairs: Sequence[Mapping[str, Any]], without: Sequence[Mapping[str, Any]]) -> None:
        """Show median round trips between services.

        Parameters
        ----------
        pairs : sequence of mapping
            Source and target of each pair, and its median round trip ``ms``.
        without : sequence of mapping
            Each party that measured nothing, and why.
        """
        shown = [dict(pair) for pair in pairs[:MOST_PAIRS]]
        self._board.put(
            "network",
            {"at": round(self._clock(), 1), "pairs": shown, "without": [dict(one) for one in without[:20]]},
        )

    def goes_on(self) -> None:
        """Take back the end of a run that has failed and goes on."""
        self._board.put("end", None)

    def ended(self, report: Report, folder: str) -> None:
        """Show the end of a run that has a report: its result beside its baselines."""
        with self._lock:
            known = [
                {
                    "label": row_label(report, name),
                    "metrics": {key: one.mean for key, one in row.metrics.items()},
                }
                for name, row in report.reference.items()
            ]
            self._references = known or self._references
            self._put_quality()
            self._stage, self._at = "", self._clock()
            self._board.put(
                "end", {"ok": True, "text": [_shortened(one) for one in summary(report)], "report": folder}
            )
            self._say("good", "the report is written")
            self._put_now()

    def failed(self, message: str) -> None:
        """Show the end of a run that has no report."""
        with self._lock:
            self._stage, self._at = "", self._clock()
            self._board.put("end", {"ok": False, "text": [_shortened(message)], "report": ""})
            self._alert("bad", message)
            self._put_now()

    # --- from events to parts --------------------------------------------------------------------------------------

    def _follow(self, settings: RunSettings, label: str) -> None:
        self._unit = "pass" if settings.description.in_rounds else "epoch"
        self._epochs = settings.own.passes(settings)
        self._left = TimeLeft(self._epochs, lambda: self._at)
        self._direct = settings.driver is Driver.ASYNCHRONOUS
        self._windows = settings.driver is Driver.WINDOWS
        self._shown = settings.description.shown
        self._system = {
            "system": settings.description.title,
            "secure_sum": settings.secure_sum,
            "direct": self._direct or self._windows,
        }
        self._seed, self._state, self._stage = settings.seeds[0], wire.RunState(), label
        self._parties: dict[str, dict[str, Any]] = {}
        self._hidden = 0
        self._rounds: deque[dict[str, Any]] = deque(maxlen=MOST_ROUNDS)
        self._steps: dict[str, list[str]] = {}
        self._traffic = Thinned(240)
        self._counters = wire.ProgressEvent()
        self._before: tuple[float, int, int] | None = None
        self._rates = (0.0, 0.0)
        # The stage says which federation begins, then what is done: "seed 3: starting the services".
        which = label.rpartition(": ")[0] or "this run"
        self._curve: dict[str, Any] = {"label": which, "points": {}}
        self._kept: dict[str, Thinned] = {}
        self._totals: dict[str, float] = {
            "rounds": 0,
            "abandoned": 0,
            "dropped": 0,
            "refused": 0,
            "left_out": 0,
        }
        self._curves.append(self._curve)
        for name, value in (("round", None), ("rounds", []), ("parties", []), ("traffic", [])):
            self._board.put(name, value)
        self._put_quality()
        self._put_now()

    def _count(self, counters: wire.ProgressEvent) -> None:
        now, self._counters = self._at, counters
        self._put_round(counters.round)
        if self._before is not None and now - self._before[0] < _SHORTEST_S:
            return
        if self._before is not None and counters.bytes_in >= self._before[1]:
            since = now - self._before[0]
            self._rates = (
                (counters.bytes_in - self._before[1]) / since,
                (counters.bytes_out - self._before[2]) / since,
            )
            self._traffic.add([round(now, 1), round(self._rates[0]), round(self._rates[1])])
            self._board.put("traffic", self._traffic.points)
        self._before = (now, counters.bytes_in, counters.bytes_out)

    def _put_round(self, one: wire.RoundProgress) -> None:
        if one.round:
            known = self._steps.get(one.purpose, [])
            self._board.put(
                "round",
                {
                    "number": one.round,
                    "purpose": purpose_words(one.purpose),
                    "step": one.phase,
                    "steps": known if one.phase in known else [*known, one.phase],
                    "members": one.members,
                    "heard": one.answered,
                    "dropped": one.dropped,
                },
            )

    def _measured(self, metrics: wire.MetricsEvent) -> None:
        self._left.evaluated(metrics.epoch)
        for name, value in zip(metrics.names, metrics.means, strict=True):
            if value == value:  # not NaN
                self._kept.setdefault(name, Thinned(300)).add([metrics.epoch, round(value, 6)])
        self._curve["points"] = {name: kept.points for name, kept in self._kept.items()}
        if metrics.epsilon:
            self._totals["epsilon"] = round(metrics.epsilon, 4)
        if metrics.withheld:
            self._say("warn", f"{metrics.withheld} hosts withheld their sums of metrics: too few users")
        told = dict(zip(metrics.names, metrics.means, strict=True))
        shown = "  ".join(f"{name} {told[name]:.4f}" for name in self._shown if name in told)
        self._say("note", f"{self._unit} {metrics.epoch}/{self._epochs}  {shown}")
        self._put_quality()

    def _came_or_went(self, event: wire.PartyEvent) -> None:
        role, _, name = event.party.partition("/")
        if event.party not in self._parties and len(self._parties) >= MOST_PARTIES:
            self._hidden += event.change == "joined"
        else:
            state = "gone" if event.change in _GONE else "here" if event.change in _HERE else "late"
            self._parties[event.party] = {
                "party": event.party,
                "role": role,
                "name": name or role,
                "state": state,
                "change": event.change,
                "at": round(self._at, 1),
            }
            self._put_parties()
        if event.change == "joined":
            self._say("note", f"{event.party} joined")
        elif event.change == "returned":
            self._alert("good", f"{event.party} returned")
        else:
            self._alert("warn", f"{event.party} {event.change}")

    def _summed(self, one: wire.RoundEvent) -> None:
        self._steps[one.purpose] = list(one.phases)
        seconds = [round(value, 4) for value in one.seconds]
        self._rounds.append(
            {
                "number": one.round,
                "purpose": one.purpose,
                "steps": list(one.phases),
                "seconds": seconds,
                "users": one.users,
                "summed": one.summed,
                "members": one.members,
                "dropped": one.dropped,
                "refused": one.refused,
                "bytes": one.bytes_in,
                "reason": _shortened(one.reason),
            }
        )
        self._totals["rounds"] += 1
        self._totals["dropped"] += one.dropped
        self._totals["refused"] += one.refused
        self._totals["left_out"] += one.left_out
        which = f"round {one.round} ({one.purpose})"
        late = set(one.silent_owners)
        for party in self._parties.values():
            silent = party["role"] == "data-owner" and late & {party["name"], party["party"]}
            if party["state"] != "gone":
                # A sum without a dropout has heard everybody.
                party["state"] = "late" if silent or (party["state"] == "late" and one.dropped) else "here"
        if one.reason:
            self._totals["abandoned"] += 1
            self._alert("bad", f"{which} was abandoned: {one.reason}")
        if late:
            self._alert("warn", f"{which}: {', '.join(one.silent_owners)} said nothing of its items in time")
        if one.dropped and not one.reason:
            self._alert("warn", f"{which}: {one.dropped} of {one.members} members dropped out")
        if one.liars:
            self._alert("bad", f"{which}: {one.liars} members revealed wrong shares")
        if one.left_out:
            self._alert("warn", f"{which}: {one.left_out} members were left out of the sum")
        for cause in one.withdrawn:
            self._alert("warn", f"{which}: {cause}")
        self._board.put("rounds", list(self._rounds))
        self._put_parties()

    def _began(self, event: wire.PhaseEvent) -> None:
        self._say("note", ended_words(event.phase, self._unit, self._state.epoch, self._epochs))
        if event.phase == wire.RunPhase.RUN_PHASE_FAILED:
            self._alert("bad", f"the run has failed: {self._state.reason}")
        if event.phase in _ENDED:
            self._board.put("round", None)

    def _waits(self, reason: str) -> None:
        if reason:
            self._alert("warn", f"the run waits: {reason}")
        else:
            self._alert("good", "the run goes on")

    def _say(self, kind: str, text: str) -> None:
        prefix = f"seed {self._seed}: " if self._seeds > 1 else ""
        self._lines.append({"at": round(self._at, 1), "kind": kind, "text": _shortened(prefix + text)})
        self._board.put("lines", list(self._lines))

    def _alert(self, kind: str, text: str) -> None:
        self._say(kind, text)
        text = _shortened(text)
        self._alerts.append({"at": round(self._at, 1), "kind": kind, "text": text})
        self._board.put("alerts", list(self._alerts))

    def _put_parties(self) -> None:
        self._board.put("parties", list(self._parties.values()))

    def _put_quality(self) -> None:
        measured = {name for curve in self._curves for name in curve["points"]}
        names = [name for name in self._shown if name in measured]
        self._board.put(
            "quality",
            {
                "names": names + sorted(measured - set(names)),
                "unit": self._unit,
                "of": self._epochs,
                "curves": [curve for curve in self._curves if curve["points"]],
                "references": self._references,
            },
        )

    def _put_now(self) -> None:
        state, counters = self._state, self._counters
        self._board.put(
            "now",
            {
                **self._system,
                "phase": phase_words(state.phase) if state.phase else "",
                "code": wire.RunPhase.Name(state.phase) if state.phase in wire.RunPhase.values() else "",
                "stage": _shortened(self._stage),
                "seed": self._seed,
                "unit": self._unit,
                "done": state.epoch,
                "of": self._epochs,
                "left": "" if state.phase in _ENDED else self._left.words(state.epoch),
                "version": state.version,
                "owners": state.owners_alive,
                "hosts": state.hosts_alive,
                "users": state.users,
                "items": state.items,
                "waiting": _shortened(state.waiting),
                "reason": _shortened(state.reason),
                "bytes_in": counters.bytes_in,
                "bytes_out": counters.bytes_out,
                "rate_in": round(self._rates[0]),
                "rate_out": round(self._rates[1]),
                "hidden": self._hidden,
                "totals": self._totals,
            },
        )
