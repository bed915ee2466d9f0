"""Progress of a run in the terminal: phase, speed, loss, metrics, traffic and parties that are alive."""

from __future__ import annotations

import time
from collections import defaultdict
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from coterie.config.run import RunSettings
from coterie.systems.description import Driver
from coterie.telemetry.experiment import EXPERIMENT
from coterie.telemetry.quantities import volume
from coterie.wire.v1 import operator_pb2 as wire

__all__ = ["ProgressDisplay", "headline"]

_PHASES = {
    wire.RunPhase.RUN_PHASE_GATHER: "gathering parties",
    wire.RunPhase.RUN_PHASE_INTAKE: "interactions arrive, owners train",
    wire.RunPhase.RUN_PHASE_FLUSH: "owners finish trailing blocks",
    wire.RunPhase.RUN_PHASE_EPOCH: "owners pass over their blocks",
    wire.RunPhase.RUN_PHASE_EVALUATE: "clients evaluate",
    wire.RunPhase.RUN_PHASE_SUPPORTS: "groups are asked for their items",
    wire.RunPhase.RUN_PHASE_ROUNDS: "rounds of training",
    wire.RunPhase.RUN_PHASE_VISIT: "users visit data owners",
    wire.RunPhase.RUN_PHASE_DONE: "done",
    wire.RunPhase.RUN_PHASE_FAILED: "failed",
}
_PURPOSES = {
    "supports": "a group is asked for its items",
    "evaluate": "all users evaluate",
    "train": "a cohort trains",
    "window": "owners hand over their sums",
}


def headline(settings: RunSettings) -> str:
    """Return one line that names a run's system, form and secure sum, and says where it is an experiment."""
    what = ", ".join(part for part in (settings.system, settings.own.variant) if part)
    parties = " as parties" if settings.description.in_rounds else ""
    experiment = f", an experiment: {EXPERIMENT}" if settings.floors_count_users else ""
    return f"{what}, {settings.form}{parties}, secure sum {settings.secure_sum}{experiment}"


def _words(phase: wire.RunPhase.ValueType) -> str:
    """Return a phase in words; a newer server's unknown phase by its number."""
    return _PHASES.get(phase) or f"phase {phase}"


class ProgressDisplay:
    """Progress display of a run: lines for phases and evaluations, and on a terminal a live table.

    Parameters
    ----------
    console : rich.console.Console
        Console to print on.
    settings : RunSettings
        Settings of the run, for its number of epochs or passes.
    """

    def __init__(self, console: Console, settings: RunSettings) -> None:
        self._console = console
        in_rounds = settings.description.in_rounds
        self._unit = "pass" if in_rounds else "epoch"
        self._epochs = settings.own.passes(settings)
        self._shown = settings.description.shown
        # Phases that every epoch has are printed for the first epoch only; evaluations print the later ones.
        self._often = {wire.RunPhase.RUN_PHASE_EPOCH, wire.RunPhase.RUN_PHASE_VISIT}
        if settings.driver is Driver.WINDOWS:
            self._often.add(wire.RunPhase.RUN_PHASE_EVALUATE)
        self._seeds = len(settings.seeds)
        self._live = (
            Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        )
        self._state = wire.RunState()
        self._counters = wire.ProgressEvent()
        self._metrics: dict[str, float] = {}
        self._epsilon = 0.0
        self._speed = 0.0
        self._before: tuple[float, int] = (time.monotonic(), 0)
        self._round: wire.RoundEvent | None = None
        self._seconds: dict[str, float] = defaultdict(float)
        self._abandoned = 0

    def __enter__(self) -> Self:
        """Show the live table, on a terminal."""
        if self._live is not None:
            self._live.start()
            self._live.update("starting the services")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the live table."""
        if self._live is not None:
            self._live.stop()

    def update(self, seed: int, event: wire.WatchRunResponse) -> None:
        """Show one event."""
        self._state = event.state
        match event.WhichOneof("event"):
            case "progress":
                self._count(event.progress)
            case "metrics":
                self._metrics = dict(zip(event.metrics.names, event.metrics.means, strict=True))
                self._epsilon = event.metrics.epsilon
                self._line(f"{self._unit} {event.metrics.epoch}/{self._epochs}  {self._quality()}", seed)
            case "phase" if event.phase.phase not in self._often or event.phase.epoch <= 1:
                self._line(_words(event.phase.phase), seed)
            case "party" if event.party.change in ("lost", "returned", "left"):
                self._line(f"{event.party.party} {event.party.change}", seed)
            case "round":
                self._ended(event.round, seed)
            case "resumed":
                self._line(f"resumed after round {event.resumed.round}", seed)
            case "wait":
                self._line(f"waiting: {event.wait.reason}" if event.wait.reason else "goes on", seed)
        if self._live is not None:
            self._live.update(self._table(seed))

    def _count(self, counters: wire.ProgressEvent) -> None:
        now = time.monotonic()
        at, interactions = self._before
        if now > at and counters.interactions >= interactions:
            self._speed = (counters.interactions - interactions) / (now - at)
        self._before = (now, counters.interactions)
        self._counters = counters

    def _ended(self, one: wire.RoundEvent, seed: int) -> None:
        """Record a round; print a line if it was abandoned or lacked members or owners."""
        self._round = one
        for name, seconds in zip(one.phases, one.seconds, strict=True):
            self._seconds[name] += seconds
        if one.reason:
            self._abandoned += 1
            self._line(f"round {one.round} ({one.purpose}) was abandoned: {one.reason}", seed)
        elif one.silent_owners:
            self._line(
                f"round {one.round} ({one.purpose}): {', '.join(one.silent_owners)} said nothing of its items in time",
                seed,
            )
        elif one.dropped:
            self._line(
                f"round {one.round} ({one.purpose}): {one.dropped} of {one.members} members dropped out, "
                f"{one.summed} of {one.users} users summed",
                seed,
            )

    def _quality(self) -> str:
        shown = [f"{name} {self._metrics[name]:.4f}" for name in self._shown if name in self._metrics]
        if "train_loss" in self._metrics:
            shown.insert(0, f"loss {self._metrics['train_loss']:.4f}")
        if self._epsilon:
            shown.append(f"epsilon {self._epsilon:.4g}")
        return "  ".join(shown)

    def _line(self, text: str, seed: int) -> None:
        prefix = f"seed {seed}: " if self._seeds > 1 else ""
        self._console.print(prefix + text, markup=False)

    def _table(self, seed: int) -> Table:
        state, counters = self._state, self._counters
        table = Table.grid(padding=(0, 2))
        rows = [
            (
                "phase",
                f"{_words(state.phase)}, {self._unit} {state.epoch}/{self._epochs}, seed {seed}",
            ),
            (
                "alive",
                f"{state.owners_alive} data owners, {state.hosts_alive} client hosts, {state.users} users",
            ),
        ]
        if state.waiting:
            rows.append(("waiting", state.waiting))
        if state.plan.HasField("rounds"):
            rows += self._round_rows()
        else:
            rows.append(("model", f"version {state.version:,}, {self._speed:,.0f} interactions/s"))
        rows += [
            ("quality", self._quality()),
            ("COS traffic", f"{volume(counters.bytes_in)} in, {volume(counters.bytes_out)} out"),
        ]
        if state.plan.rounds.experiment:
            rows.append(("experiment", EXPERIMENT))
        for name, value in rows:
            table.add_row(f"[bold]{name}[/bold]", value)
        return table

    def _round_rows(self) -> list[tuple[str, str]]:
        rows = []
        now = self._counters.round
        if now.round:
            rows.append(
                (
                    "round",
                    f"{now.round}: {_PURPOSES.get(now.purpose, now.purpose)}, {now.phase}, "
                    f"{now.answered} of {now.members - now.dropped} heard"
                    + (f", {now.dropped} dropped" if now.dropped else ""),
                )
            )
        rows.append(
            (
                "model",
                f"version {self._state.version:,}"
                + (f", {self._abandoned} rounds abandoned" if self._abandoned else ""),
            )
        )
        if self._round is not None and self._round.members:
            last = self._round
            rows.append(
                (
                    "last round",
                    f"{last.summed} of {last.users} users in the sum, {last.dropped} of {last.members} members "
                    f"dropped, {volume(last.bytes_in / last.members)} from each",
                )
            )
        if total := sum(self._seconds.values()):
            spent = sorted(self._seconds.items(), key=lambda one: -one[1])
            rows.append(("time", "  ".join(f"{name} {seconds / total:.0%}" for name, seconds in spent)))
        return rows
