"""Measure the live page in Chromium: bytes, first paint, layout shift, events that it takes, memory of its tab.

Takes ``playwright`` and a Chromium on the path.  All processes share one machine, so the browser's times hold those of
the server, too.
"""

from __future__ import annotations

import gzip
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.rows import Ask, Row, higher, lower
from coterie.config.run import RunSettings
from coterie.web import application
from coterie.web.application import STATIC
from coterie.web.board import Board
from coterie.web.live_run import LiveRun
from coterie.web.server import PageServer
from coterie.wire.v1 import operator_pb2 as wire
from coterie.wire.v1.orchestrator_pb2 import RoundsPlan, RunPlan

_USERS, _HOSTS = 10_000, 100
_STEPS = ("advertise", "share", "submit", "confirm", "unmask", "unmask sum", "apply sum")
_HOURS = 8.0
_PASSES = 480
"""One pass over all users a minute."""
_ROUND_S, _COUNT_S = 2.0, 0.25
"""Simulated seconds of a round, and between two counts: the COS sends several counts a second at most."""
_LOADS = 7
_SHOWN_S = 60.0
"""Seconds within which a line is on the screen, however busy the machine is; above, the page has stopped drawing."""


@dataclass
class _Simulated:
    """A run of 10,000 users at 100 hosts, whose events carry a clock of their own."""

    seconds: float = 0.0
    number: int = 0
    received: int = 0

    def state(self) -> wire.RunState:
        """Return the run's state."""
        return wire.RunState(
            plan=RunPlan(run_id="bench", rounds=RoundsPlan(cohort=_USERS)),
            phase=wire.RunPhase.RUN_PHASE_ROUNDS,
            epoch=1 + int(self.seconds // 60),
            version=self.number,
            owners_alive=1,
            hosts_alive=_HOSTS,
            users=_USERS,
            items=20_000,
        )

    def event(self, **kind: Any) -> wire.WatchRunResponse:
        """Return an event at the present time."""
        return wire.WatchRunResponse(time_ms=round(1.8e12 + self.seconds * 1000), state=self.state(), **kind)

    def joined(self) -> Iterator[wire.WatchRunResponse]:
        """Yield the arrival of all parties."""
        for name in ("data-owner/catalogue", *(f"client/host-{one}" for one in range(_HOSTS))):
            yield self.event(party=wire.PartyEvent(party=name, change="joined"))

    def events(self) -> Iterator[wire.WatchRunResponse]:
        """Yield counts, rounds, evaluations, and now and then a host that goes and comes back, for ever."""
        counts = round(_ROUND_S / _COUNT_S)
        while True:
            self.number += 1
            for part in range(counts):
                self.seconds += _COUNT_S
                self.received += 400_000 + 100_000 * (self.number % 7)
                now = wire.RoundProgress(
                    round=self.number,
                    purpose="train",
                    phase=_STEPS[part % len(_STEPS)],
                    members=_HOSTS,
                    answered=_HOSTS * part // counts,
                )
                progress = wire.ProgressEvent(
                    updates=self.number, bytes_in=self.received, bytes_out=self.received, round=now
                )
                yield self.event(progress=progress)
            yield self.event(
                round=wire.RoundEvent(
                    round=self.number,
                    purpose="train",
                    users=_USERS,
                    members=_HOSTS,
                    summed=_USERS,
                    dropped=self.number % 50 == 0,
                    phases=_STEPS,
                    seconds=[0.05 * (1 + (self.number + one) % 6) for one in range(len(_STEPS))],
                    bytes_in=3_000_000,
                )
            )
            if self.number % round(60 / _ROUND_S) == 0:
                quality = 1 - 1 / (1 + self.seconds / 3600)
                metrics = wire.MetricsEvent(
                    epoch=int(self.seconds // 60),
                    names=["hit_ratio@10", "ndcg@10", "hit_ratio_all@10", "ndcg_all@10"],
                    means=[quality, quality / 2, quality / 3, quality / 4],
                )
                yield self.event(metrics=metrics)
            if self.number % 200 == 0:
                for change in ("lost", "returned"):
                    yield self.event(party=wire.PartyEvent(party="client/host-7", change=change))


def _settings() -> RunSettings:
    return RunSettings.model_validate(
        {"system": "fedncf", "secure_sum": "masked", "rounds": {"passes": _PASSES}}
    )


def rows(ask: Ask) -> Iterator[Row]:
    """Yield the figures of the page."""
    yield from _bytes()
    yield from _server(ask)
    yield from _browser(ask)


def _bytes() -> Iterator[Row]:
    texts = [path.read_bytes() for folder in ("shared", "live") for path in (STATIC / folder).iterdir()]
    packed = sum(len(gzip.compress(text)) for text in texts)
    plain = sum(map(len, texts))
    yield lower("live_page.bytes", plain / 1000, None, "kB", f"all {len(texts)} files, as they are served")
    yield lower(
        "live_page.bytes.compressed", packed / 1000, None, "kB", "each file with gzip; target: 300 kB"
    )


def _server(ask: Ask) -> Iterator[Row]:
    """Yield what an event costs the command, without a browser."""
    board, run = Board(), _Simulated()
    live = LiveRun(board, _settings(), "bench", "bench")
    for event in run.joined():
        live.update(0, event)
    count = ask.size(20_000, 200)
    made = [event for event, _ in zip(run.events(), range(count), strict=False)]
    began = time.process_time()
    for event in made:
        live.update(0, event)
    spent = time.process_time() - began
    note = f"{count:,} events of {_USERS:,} users at {_HOSTS} hosts; a COS sends about 5 a second"
    yield higher("live_page.events", count / spent, None, "events/s", note)


def _browser(ask: Ask) -> Iterator[Row]:
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        raise RuntimeError("live_page takes a Chromium on the path")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield from _paint(browser, ask)
        yield from _lag(browser, ask)
        yield from _memory(browser, ask)
        browser.close()


_SHIFTS = """window.shifts = 0;
new PerformanceObserver(list => { for (const one of list.getEntries()) window.shifts += one.value; })
    .observe({type: 'layout-shift', buffered: true});"""


def _paint(browser: Any, ask: Ask) -> Iterator[Row]:
    board, run = Board(), _Simulated()
    live = LiveRun(board, _settings(), "bench", "bench")
    for event in run.joined():
        live.update(0, event)
    paints, shifts = [], []
    with PageServer(board, page="live") as server:
        for _ in range(ask.size(_LOADS, 1)):
            context = browser.new_context(viewport={"width": 1200, "height": 900})
            page = context.new_page()
            page.add_init_script(_SHIFTS)
            page.goto(server.link())
            page.wait_for_selector("body[data-state=open]")
            for event, _ in zip(run.events(), range(60), strict=False):
                live.update(0, event)
            page.wait_for_timeout(600)
            paints.append(
                page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            )
            shifts.append(page.evaluate("window.shifts"))
            context.close()
    note = f"median of {len(paints)} first loads, slowest {max(paints):.0f} ms; target: 500 ms"
    yield lower("live_page.first_paint", float(statistics.median(paints)), None, "ms", note)
    yield lower("live_page.layout_shift", float(max(shifts)), None, "score", "most of these loads; target: 0")


def _lag(browser: Any, ask: Ask) -> Iterator[Row]:
    """Yield how long an event takes to the screen while others come at a rate far above a COS's."""
    for rate in ask.size((50, 500), (5,)):
        board, run = Board(), _Simulated()
        live = LiveRun(board, _settings(), "bench", "bench")
        for event in run.joined():
            live.update(0, event)
        over = threading.Event()

        def feed(
            rate: int = rate,
            run: _Simulated = run,
            live: LiveRun = live,
            over: threading.Event = over,
        ) -> None:
            # What a busy machine was late for is left out: a burst would push the marks off the page's list.
            for event in run.events():
                live.update(0, event)
                if over.wait(1 / rate):
                    return

        with PageServer(board, page="live") as server:
            context = browser.new_context(viewport={"width": 1200, "height": 900})
            page = context.new_page()
            page.goto(server.link())
            page.wait_for_selector("body[data-state=open]")
            page.evaluate(
                """window.long = 0; window.seen = {};
                new PerformanceObserver(list => { for (const one of list.getEntries()) window.long += one.duration; })
                    .observe({type: 'longtask'});
                new MutationObserver(() => { for (const line of document.querySelectorAll('#lines li span')) {
                    const found = line.textContent.match(/^mark (\\d+)/);
                    if (found && !(found[1] in window.seen)) window.seen[found[1]] = Date.now(); } })
                    .observe(document.getElementById('lines'), {childList: true});"""
            )
            feeding = threading.Thread(target=feed, daemon=True)
            feeding.start()
            waits, seconds = [], ask.size(15, 2)
            began = time.monotonic()
            for mark in range(seconds):
                live.stage(f"mark {mark}")
                at = time.time()
                # The page's policy allows no predicate that is evaluated in it.
                while not page.evaluate(f"{mark} in window.seen"):
                    if time.time() - at > _SHOWN_S:
                        over.set()
                        raise RuntimeError(f"the page has not shown line {mark} within {_SHOWN_S:g} s")
                    page.wait_for_timeout(20)
                waits.append(page.evaluate(f"window.seen[{mark}]") - at * 1000)
                page.wait_for_timeout(700)
            busy = page.evaluate("window.long") / 1000 / (time.monotonic() - began)
            over.set()
            feeding.join()
            context.close()
        note = (
            f"up to {rate} events/s for {seconds} marks, slowest {max(waits):.0f} ms; tasks above 50 ms took "
            f"{busy:.0%} of the time; the server looks every 200 ms"
        )
        yield lower(f"live_page.delay.{rate}", float(statistics.median(waits)), None, "ms", note)


def _memory(browser: Any, ask: Ask) -> Iterator[Row]:
    """Yield the tab's memory after the events of some hours, sent as fast as the page draws them."""
    board, run = Board(), _Simulated()
    live = LiveRun(board, _settings(), "bench", "bench")
    for event in run.joined():
        live.update(0, event)
    usual, application._LOOK_S = application._LOOK_S, 0.01
    try:
        with PageServer(board, page="live") as server:
            context = browser.new_context(viewport={"width": 1200, "height": 900})
            page = context.new_page()
            tools = context.new_cdp_session(page)
            page.goto(server.link())
            page.wait_for_selector("body[data-state=open]")
            page.evaluate(
                """window.drawn = 0; new MutationObserver(() => { window.drawn += 1; })
                    .observe(document.getElementById('figures'), {childList: true});"""
            )
            heaps, nodes, events = [], [], run.events()
            hours, parts = ask.size((_HOURS, 8), (0.25, 2))
            pace = ask.size(4, 600)
            sent = 0
            for part in range(1, parts + 1):
                while run.seconds < hours * 3600 * part / parts:
                    for _ in range(pace):
                        live.update(0, next(events))
                        sent += 1
                    time.sleep(0.002)
                page.wait_for_timeout(500)
                for _ in range(2):
                    tools.send("HeapProfiler.collectGarbage")
                heaps.append(page.evaluate("performance.memory.usedJSHeapSize") / 1e6)
                counted = tools.send("Memory.getDOMCounters")
                nodes.append(counted["nodes"])
            drawn = page.evaluate("window.drawn")
            context.close()
    finally:
        application._LOOK_S = usual
    note = (
        f"{sent:,} events of {hours:g} simulated hours, {drawn:,} times drawn; by part: "
        f"{', '.join(f'{one:.1f}' for one in heaps)} MB; {nodes[0]:,} nodes, then {nodes[-1]:,}"
    )
    yield lower("live_page.heap", heaps[-1], None, "MB", note)
