"""Progress of a run in the terminal: phase, speed, loss, metrics, traffic and parties that are alive."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coterie.config.run import RunSettings
from coterie.systems.description import Driver
from coterie.telemetry.experiment import EXPERIMENT
from coterie.telemetry.quantities import volume
from coterie.telemetry.run_words import came_later_words, ended_words, phase_words, purpose_words
from coterie.telemetry.time_left import TimeLeft, whole_seconds
from coterie.wire.v1 import operator_pb2 as wire

__all__ = ["ProgressDisplay", "headline"]

_QUIET_S = 2.0
"""Seconds without a line after which one says what is going on; longer in a long run, by `_QUIET_SHARE`."""
_QUIET_SHARE = 0.05


def headline(settings: RunSettings) -> str:
    """Return one line that names a run's system, form and secure sum, and says where it is an experiment."""
    what = ", ".join(part for part in (settings.system, settings.own.variant) if part)
    parties = " as parties" if settings.description.in_rounds else ""
    experiment = f", an experiment: {EXPERIMENT}" if settings.floors_count_users else ""
    return f"{what}, {settings.form}{parties}, secure sum {settings.secure_sum}{experiment}"


class ProgressDisplay:
    """Progress display of a run: lines for phases and evaluations, and on a terminal a live table.

    Where there is no terminal, a line also says what is going on whenever nothing was said for 2 seconds, or in a long
    run for a twentieth of its time so far.

    Parameters
    ----------
    console : rich.console.Console
        Console to print on.
    settings : RunSettings
        Settings of the run, for its number of epochs or passes.
    """

    def __init__(self, console: Console, settings: RunSettings) -> None:
        self._console = console
        self._seeds = len(settings.seeds)
        self._begun = self._said = time.monotonic()
        self._begun_ms = time.time() * 1e3
        self._ended = threading.Event()
        self._heartbeat = threading.Thread(target=self._keep_beating, name="progress", daemon=True)
        self._follow(settings)
        self._stage, self._staged = "starting the services", self._begun
        self._live = (
            Live(console=console, get_renderable=self._shown_now, refresh_per_second=4, transient=True)
            if console.is_terminal
            else None
        )

    def _follow(self, settings: RunSettings) -> None:
        """Begin to show a federation, of which nothing is known yet."""
        in_rounds = settings.description.in_rounds
        self._unit = "pass" if in_rounds else "epoch"
        self._epochs = settings.own.passes(settings)
        self._shown = settings.description.shown
        # Phases that every epoch has are printed for the first epoch only; evaluations print the later ones.
        self._often = {wire.RunPhase.RUN_PHASE_EPOCH, wire.RunPhase.RUN_PHASE_VISIT}
        if settings.driver is Driver.WINDOWS:
            self._often.add(wire.RunPhase.RUN_PHASE_EVALUATE)
        self._seed = settings.seeds[0]
        self._state = wire.RunState()
        self._counters = wire.ProgressEvent()
        self._metrics: dict[str, float] = {}
        self._epsilon = 0.0
        self._speed = 0.0
        self._before: tuple[float, int] = (time.monotonic(), 0)
        self._left = TimeLeft(self._epochs, lambda: time.monotonic())
        self._round: wire.RoundEvent | None = None
        self._seconds: dict[str, float] = defaultdict(float)
        self._abandoned = 0

    def __enter__(self) -> Self:
        """Show the live table on a terminal; elsewhere begin to print lines."""
        if self._live is not None:
            self._live.start()
        else:
            self._heartbeat.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the live table, and print no further lines."""
        self._ended.set()
        if self._live is not None:
            self._live.stop()
        else:
            self._heartbeat.join()

    def stage(self, text: str, settings: RunSettings | None = None) -> None:
        """Show what begins.

        Parameters
        ----------
        text : str
            What begins, such as reading the data.
        settings : RunSettings, optional
            Settings of the federation that begins, whose events follow.
        """
        self._stage, self._staged = text, time.monotonic()
        if settings is not None:
            self._follow(settings)
            self._line(text)

    def update(self, seed: int, event: wire.WatchRunResponse) -> None:
        """Show one event."""
        self._seed, self._state, self._stage = seed, event.state, ""
        match event.WhichOneof("event"):
            case "progress":
                self._count(event.progress)
            case "metrics":
                self._metrics = dict(zip(event.metrics.names, event.metrics.means, strict=True))
                self._epsilon = event.metrics.epsilon
                # Of a run that is taken up, what happened before is told at once: it says nothing of the speed.
                if not 0 < event.time_ms < self._begun_ms:
                    self._left.evaluated(event.metrics.epoch)
                self._line(f"{self._unit} {event.metrics.epoch}/{self._epochs}  {self._quality()}")
            case "phase" if event.phase.phase not in self._often or event.phase.epoch <= 1:
                self._line(ended_words(event.phase.phase, self._unit, self._state.epoch, self._epochs))
            case "party" if event.party.change != "joined":
                self._line(f"{event.party.party} {event.party.change}")
            case "round":
                self._count_round(event.round)
            case "grown":
                self._line(came_later_words(event.grown))
            case "resumed":
                self._line(f"resumed after round {event.resumed.round}")
            case "wait":
                self._line(f"waiting: {event.wait.reason}" if event.wait.reason else "goes on")
        if event.WhichOneof("event") == "phase" and event.phase.phase == wire.RunPhase.RUN_PHASE_DONE:
            self._stage, self._staged = "stopping the services", time.monotonic()

    def _keep_beating(self) -> None:
        while not self._ended.wait(0.25):
            self.beat()

    def beat(self) -> None:
        """Print what is going on if nothing was printed for a while."""
        now = time.monotonic()
        if now - self._said >= max(_QUIET_S, _QUIET_SHARE * (now - self._begun)):
            self._line(self._going_on())

    def _going_on(self) -> str:
        """Return what is going on, in words."""
        if self._stage:
            since = round(time.monotonic() - self._staged)
            return f"{self._stage}, for {whole_seconds(since)}" if since else self._stage
        state, now = self._state, self._counters.round
        words = f"{self._unit} {state.epoch}/{self._epochs}"
        if state.waiting:
            return f"{words}: waiting: {state.waiting}"
        if now.round:
            words += f", round {now.round}: {purpose_words(now.purpose)}, {now.answered} of "
            words += f"{now.members - now.dropped} heard"
        else:
            words += f": {phase_words(state.phase)}"
        return words + (f", {left}" if (left := self._left.words(state.epoch)) else "")

    def _count(self, counters: wire.ProgressEvent) -> None:
        now = time.monotonic()
        at, interactions = self._before
        if now > at and counters.interactions >= interactions:
            self._speed = (counters.interactions - interactions) / (now - at)
        self._before = (now, counters.interactions)
        self._counters = counters

    def _count_round(self, one: wire.RoundEvent) -> None:
        """Record a round; print a line if it was abandoned or lacked members or owners."""
        self._round = one
        for name, seconds in zip(one.phases, one.seconds, strict=True):
            self._seconds[name] += seconds
        if one.reason:
            self._abandoned += 1
            self._line(f"round {one.round} ({one.purpose}) was abandoned: {one.reason}")
        elif one.silent_owners:
            self._line(
                f"round {one.round} ({one.purpose}): {', '.join(one.silent_owners)} said nothing of its items in time"
            )
        elif one.dropped:
            self._line(
                f"round {one.round} ({one.purpose}): {one.dropped} of {one.members} members dropped out, "
                f"{one.summed} of {one.users} users summed"
            )

    def _quality(self) -> str:
        shown = [f"{name} {self._metrics[name]:.4f}" for name in self._shown if name in self._metrics]
        if "train_loss" in self._metrics:
            shown.insert(0, f"loss {self._metrics['train_loss']:.4f}")
        if self._epsilon:
            shown.append(f"epsilon {self._epsilon:.4g}")
        return "  ".join(shown)

    def _line(self, text: str) -> None:
        self._said = time.monotonic()
        prefix = f"seed {self._seed}: " if self._seeds > 1 else ""
        self._console.print(prefix + text, markup=False)

    def _shown_now(self) -> RenderableType:
        """Return the live table; only what is going on outside of training."""
        return Text(self._going_on()) if self._stage else self._table()

    def _table(self) -> Table:
        state, counters = self._state, self._counters
        table = Table.grid(padding=(0, 2))
        rows = [
            (
                "phase",
                f"{phase_words(state.phase)}, {self._unit} {state.epoch}/{self._epochs}, seed {self._seed}"
                + (f", {left}" if (left := self._left.words(state.epoch)) else ""),
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
            # Text, never markup: brackets in names from files mean nothing, and the console may take no markup.
            table.add_row(Text(name, style="bold"), Text(value))
        return table

    def _round_rows(self) -> list[tuple[str, str]]:
        rows = []
        now = self._counters.round
        if now.round:
            rows.append(
                (
                    "round",
                    f"{now.round}: {purpose_words(now.purpose)}, {now.phase}, "
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
