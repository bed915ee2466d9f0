"""The live page in a real browser: a real federation from start to report, and everything that others try on it."""

import contextlib
import http.server
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")

from coterie.config.page import PageSettings
from coterie.config.run import RunSettings
from coterie.errors import RunError
from coterie.launch.bootstrap import bootstrap
from coterie.launch.children import Child, free_port
from coterie.privacy.declarations import KINDS, ROLES
from coterie.privacy.visibility import matrix
from coterie.systems.registry import systems
from coterie.web.board import Board
from coterie.web.live_run import LiveRun
from coterie.web.passwords import save_password
from coterie.web.server import PageServer
from coterie.web.sessions import PageSessions
from coterie.wire.v1 import operator_pb2 as wire

from .looking import CHROMIUM, WAIT_S, Looked

EVENTS = runpy.run_path(str(Path(__file__).parents[1] / "live_events.py"))
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path"),
    pytest.mark.xdist_group("live page"),
]
RUN = """
name = "small"
system = "fedncf"
secure_sum = "masked"
output = "runs"
seeds = [0]
[rounds]
cohort = 100
group = 100
passes = 40
evaluate_every = 1
[federation]
hosts = 3
"""

ROUNDS = tomllib.loads(RUN)["rounds"]


# --- a real federation -------------------------------------------------------------------------------------------


def interruptible() -> None:
    """Let a child take SIGINT, which a shell ignores for what it starts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def started(folder: Path, *arguments: str) -> tuple["subprocess.Popen[str]", str, list[str]]:
    """Start a watched run and return its process, the page's link and the lines before it."""
    (folder / "run.toml").write_text(RUN)
    process = subprocess.Popen(
        [sys.executable, "-m", "coterie", "run", "run.toml", "--watch", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=interruptible,
    )
    assert process.stdout is not None
    before = []
    for line in process.stdout:
        before.append(line)
        if line.startswith("live page: "):
            return process, line.partition(": ")[2].strip(), before
    raise AssertionError("".join(before))


def test_a_real_run_is_followed_from_its_first_process_to_its_report(tmp_path: Path, look: Any) -> None:
    process, link, _ = started(tmp_path)
    wide = look()
    wide.page.goto(link)
    wide.state("open")
    assert wide.page.url == link.partition("#")[0]  # the secret has left the address
    wide.picture("1-starting")
    # A second browser, by a link that the first one makes.
    wide.page.click("#share")
    narrow = look(390, "dark")
    narrow.page.goto(wide.page.locator("#link code").inner_text())
    narrow.state("open")
    wide.until("lines", "client/host-2 joined")
    wide.until("now", "Rounds of training")
    wide.page.wait_for_selector("#steps li[aria-current]")
    drawn = wide.page.locator("#picture svg").get_attribute("aria-label")
    assert drawn.startswith("Orchestration server with 1 data owners; 3 client hosts. ")
    wide.until("processes", "client/host-1")
    assert re.search(r"client/host-1\s+\S+\s+\d+ MB", wide.text("processes"))
    # A service can be asked a few seconds after its start; until then the page says who was not reached.
    deadline = time.monotonic() + WAIT_S
    while "client/host-0" not in str(wide.page.locator("#network tbody").all_inner_texts()):
        assert time.monotonic() < deadline
        wide.page.click("#measure")
        wide.until("network", "Median round trips")
        wide.page.wait_for_timeout(500)
    assert float(wide.page.locator("#network tbody td").filter(has_text=".").first.inner_text()) > 0
    # A host that is killed is started again, and both pages say so.
    os.kill(_pid_of_host(tmp_path), signal.SIGKILL)
    wide.picture("2-training")
    narrow.picture("3-training-390-dark")
    for one in (wide, narrow):
        one.until("alerts", "client/host-1 was ended by SIGKILL")
    wide.picture("4-killed")
    for one in (wide, narrow):
        assert one.violations() == []
    for one in (wide, narrow):
        one.state("ended", 240)
        assert one.violations() == []
    wide.picture("5-ended")
    narrow.picture("6-ended-390-dark")
    rest = process.stdout.read() if process.stdout else ""
    assert process.wait(60) == 0, rest
    report = json.loads(next(tmp_path.glob("runs/*/report.json")).read_text())
    for one in (wide, narrow):
        assert "The run has ended" in one.text("now")
        assert report["run_id"] in one.text("title")
        last = report["history"][-1]["metrics"]["hit_ratio@10"]
        one.page.locator("#points").evaluate("node => node.parentElement.open = true")
        assert f"{last:.4f}" in one.text("points")
        assert "EASE, centralised" in one.text("legend")
        assert report["run_id"] in one.text("runs")
        assert one.said == []
        home = link.partition("#")[0]
        assert {url.startswith(home) for url in one.asked} == {True}
        widths = one.page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert widths[0] <= widths[1]


def _pid_of_host(folder: Path) -> int:
    """Return the process id of host-1: the process that has its store open."""
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = str(path.readlink())
        except OSError:
            continue
        if target.startswith(str(folder)) and "/host-1/state/" in target:
            return int(path.parts[2])
    raise AssertionError("host-1 has no process")


def test_a_run_that_is_interrupted_says_so_on_its_page(tmp_path: Path, look: Any) -> None:
    process, link, _ = started(tmp_path)
    one = look()
    one.page.goto(link)
    one.state("open")
    one.until("now", "Rounds of training")
    process.send_signal(signal.SIGINT)
    one.state("ended")
    assert "The run has failed" in one.text("now")
    assert "interrupted" in one.text("end")
    one.picture("7-interrupted")
    assert process.wait(60) == 130


def test_a_run_is_stopped_from_its_page_and_says_why(tmp_path: Path, look: Any) -> None:
    process, link, _ = started(tmp_path, "--set", "rounds.passes=300")
    one = look()
    one.page.goto(link)
    one.state("open")
    one.until("now", "Rounds of training")
    one.page.click("#stop")
    one.page.fill("#reason", "a mistake <b>in the data</b>")
    assert one.violations() == []
    one.picture("12-asked-to-stop")
    one.page.click("#asked-yes")
    one.state("ended", 2 * WAIT_S)
    assert "The run has failed" in one.text("now")
    assert "a mistake <b>in the data</b>" in one.text("end")
    assert process.wait(WAIT_S) == RunError.exit_code
    assert process.stdout is not None


class Standing:
    """A federation whose services run already, as `coterie bootstrap` prepared them, and its operator's folder."""

    def __init__(self, folder: Path) -> None:
        settings = RunSettings.model_validate({**tomllib.loads(RUN), "rounds": {**ROUNDS, "passes": 40}})
        names = ("thirdparty", "enrol", "cos", "owner-0", "host-0", "host-1", "host-2")
        addresses = {name: f"127.0.0.1:{free_port()}" for name in names}
        bootstrap(settings, folder, "standing", addresses=addresses)
        roles = {"thirdparty": "thirdparty", "cos": "cos", "owner": "data-owner", "host": "client"}
        self.operator, self.children = folder / "operator", []
        for name in (one for one in names if one != "enrol"):
            config = tomllib.loads((folder / name / "config.toml").read_text())
            child = Child(roles[name.partition("-")[0]], config["name"], folder / name)
            more = [f"enrol_listen={addresses['enrol']}"] if name == "thirdparty" else []
            child.start(f"listen={addresses[name]}", f"metrics=127.0.0.1:{free_port()}", *more)
            self.children.append(child)

    def stop(self) -> None:
        for child in reversed(self.children):
            child.kill()


def test_a_dashboard_previews_starts_stops_and_follows_a_run_of_a_federation_that_stands(
    tmp_path: Path, look: Any
) -> None:
    standing = Standing(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "coterie", "dashboard", "--config", str(standing.operator / "config.toml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=interruptible,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("live page: "), line + process.stdout.read()
        one = look()
        one.page.goto(line.partition(": ")[2].strip())
        one.state("open")
        one.page.wait_for_selector("#start:not([hidden])", timeout=WAIT_S * 1000)
        # Before anything is started: what the plan lets whom see, as the system declares it.
        one.page.locator("#preview").evaluate("node => node.parentElement.open = true")
        declared = matrix(systems()["fedncf"].declared("hosts", "masked"))
        for row in one.page.locator("#preview tbody tr").all():
            words = row.inner_text().split("\t")
            kind = next(key for key, about in KINDS.items() if about == words[0])
            assert [word in ("all", "own") for word in words[1:]] == [
                declared[role][kind].allowed for role in ROLES
            ]
        one.picture("13-before-the-start")
        assert one.violations() == []
        one.page.click("#start")
        one.picture("14-asked-to-start")
        one.page.click("#asked-no")
        assert one.page.locator("#runs tbody tr").count() == 0
        one.page.click("#start")
        one.page.click("#asked-yes")
        one.until("lines", "client/host-2 joined")
        one.until("now", "Rounds of training")
        one.until("runs", "standing")
        one.until("lines", "pass 1/40")
        one.picture("15-started")
        one.page.click("#stop")
        one.page.fill("#reason", "enough")
        one.page.click("#asked-yes")
        one.until("end", "stopped from the operator's page: enough")
        one.until("runs", "stopped from the operator's page: enough")
        assert one.violations() == []
        one.picture("16-stopped")
        process.send_signal(signal.SIGINT)
        one.state("ended")
        assert process.wait(WAIT_S) == 130
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        standing.stop()


# --- the page alone, by events that a test sends -------------------------------------------------------------------


class Shown:
    """A page's server with a run whose events a test sends."""

    def __init__(self, server: PageServer, board: Board, live: LiveRun) -> None:
        self.server, self.board, self.live = server, board, live


SETTINGS = RunSettings.model_validate({"system": "fedncf", "secure_sum": "masked", "rounds": {"passes": 9}})
HOSTILE = (
    "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>\u202egpj.exe\x1b[31m"
)


@pytest.fixture
def shown() -> Iterator[Shown]:
    board = Board()
    live = LiveRun(board, SETTINGS, "run-1", "fedncf, an example")
    with PageServer(board, page="live", sessions=PageSessions()) as server:
        yield Shown(server, board, live)


def sent(live: LiveRun, parties: int = 4) -> None:
    for event in EVENTS["events"](hosts=parties):
        live.update(0, event)


def test_a_link_opens_the_page_once_and_a_wrong_or_late_one_does_not(shown: Shown, look: Any) -> None:
    first, second, third, late = look(), look(), look(), look()
    old = shown.server.link(0.5)
    link = shown.server.link()
    first.page.goto(link)
    first.state("open")
    assert first.context.cookies()[0]["httpOnly"]
    assert first.context.cookies()[0]["sameSite"] == "Strict"
    assert first.page.evaluate("document.cookie") == ""
    first.page.reload()
    first.state("open")
    second.page.goto(link)
    second.state("outside")
    assert "used already" in second.text("entry-reason")
    second.picture("8-used-link")
    assert second.violations() == []
    third.page.goto(shown.server.address + "#" + "x" * 43)
    third.state("outside")
    assert "not one of this page" in third.text("entry-reason")
    time.sleep(0.5)
    late.page.goto(old)
    late.state("outside")
    assert "expired" in late.text("entry-reason")
    first.page.click("#leave")
    first.state("outside")


def test_a_password_opens_a_page_that_is_open_to_other_machines(browser: Any, tmp_path: Path) -> None:
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=page"
    files = ["-keyout", tmp_path / "key.pem", "-out", tmp_path / "chain.pem"]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    save_password(tmp_path / "passwords", "ada", "correct horse battery")
    settings = PageSettings(
        listen="0.0.0.0:0",
        names=("evil.example",),  # the name that leads here in this browser
        certificate_file=tmp_path / "chain.pem",
        key_file=tmp_path / "key.pem",
        passwords_file=tmp_path / "passwords",
    )
    board = Board()
    LiveRun(board, SETTINGS, "run-1", "example")
    with PageServer(board, page="live", settings=settings) as server:
        one = Looked(browser, ignore_https_errors=True)
        one.page.goto(server.link())
        one.state("outside")
        assert one.violations() == []
        one.page.fill("#name", "ada")
        one.page.fill("#password", "wrong")
        one.page.click("#password-form button")
        one.until("entry-error", "Name or password is wrong.")
        assert one.violations() == []
        one.picture("17-password")
        one.page.wait_for_timeout(1100)
        one.page.fill("#password", "correct horse battery")
        one.page.keyboard.press("Enter")
        one.state("open")
        one.until("title", "Run run-1")
        assert one.context.cookies()[0]["secure"]
        one.page.click("#share")
        one.until("link", "opened by passwords")
        one.page.click("#leave")
        one.state("outside")
        assert one.page.locator("#password-form").is_visible()
        one.context.close()


def test_another_site_can_neither_read_nor_change_anything(shown: Shown, look: Any, tmp_path: Path) -> None:
    one = look()
    one.page.goto(shown.server.link())
    one.state("open")
    home = shown.server.address
    # The other site is another port of this machine, or another name of it.
    (tmp_path / "index.html").write_text("<!doctype html><title>other</title><body>")
    handler = type(
        "Quiet",
        (http.server.SimpleHTTPRequestHandler,),
        {
            "log_message": lambda *_: None,
            "__init__": lambda self, *given, **named: http.server.SimpleHTTPRequestHandler.__init__(
                self, *given, directory=str(tmp_path), **named
            ),
        },
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        for name in ("127.0.0.1", "localhost", "evil.example"):
            other = one.context.new_page()
            other.goto(f"http://{name}:{site.server_port}/")
            tried = other.evaluate(
                """async home => {
                    const tried = {};
                    const attempt = async (name, make) => {
                        try { const answer = await make(); tried[name] = answer.type + answer.status; }
                        catch { tried[name] = 'refused'; }
                    };
                    const json = {'content-type': 'application/json'};
                    await attempt('read', () => fetch(home + 'session', {credentials: 'include'}));
                    const posted = {method: 'POST', credentials: 'include', body: '{}'};
                    await attempt('change', () => fetch(home + 'links', {...posted, headers: json}));
                    await attempt('leave', () => fetch(home + 'session', {method: 'DELETE', credentials: 'include'}));
                    await fetch(home + 'session', {...posted, mode: 'no-cors'}).catch(() => 0);
                    await new Promise(done => {
                        const source = new EventSource(home + 'events', {withCredentials: true});
                        source.onmessage = event => { tried.events = event.data; done(); };
                        source.onerror = () => { tried.events = 'refused'; source.close(); done(); };
                    });
                    await new Promise(done => {
                        const script = document.createElement('script');
                        script.src = home + 'assets/live/main.js';
                        script.onload = () => { tried.script = 'loaded'; done(); };
                        script.onerror = () => { tried.script = 'refused'; done(); };
                        document.body.append(script);
                    });
                    const frame = document.createElement('iframe');
                    frame.src = home;
                    document.body.append(frame);
                    await new Promise(done => setTimeout(done, 500));
                    tried.frame = 'refused';
                    try { if (frame.contentDocument !== null) tried.frame = 'read'; } catch { /* as it should */ }
                    return tried;
                }""",
                home,
            )
            assert tried == dict.fromkeys(("read", "change", "leave", "events", "script", "frame"), "refused")
            other.close()
        site.shutdown()
    # The browser's own session went on all the while.
    assert one.page.evaluate("fetch('/session').then(answer => answer.json())")["inside"]


def test_after_dns_rebinding_another_name_of_this_machine_gets_nothing(shown: Shown, look: Any) -> None:
    one = look()
    answer = one.page.goto(f"http://evil.example:{shown.server.port}/")
    assert answer is not None
    assert answer.status == 421
    assert one.page.evaluate("fetch('/session').then(answer => answer.status)") == 421
    assert one.page.evaluate("fetch('/events').then(answer => answer.status)") == 421


@pytest.mark.parametrize(
    ("width", "scheme"), [(1200, "light"), (390, "dark"), (390, "light"), (1200, "dark")]
)
def test_hostile_names_are_only_text(shown: Shown, look: Any, width: int, scheme: str) -> None:
    shown.live.stage(HOSTILE)
    sent(shown.live)
    party = wire.PartyEvent(party=f"client/{HOSTILE}", change=HOSTILE)
    shown.live.update(0, wire.WatchRunResponse(party=party))
    # A system's name, a user's name and an item's title, wherever a message could carry them.
    round_ = wire.RoundEvent(
        round=9, purpose=HOSTILE, reason=HOSTILE, phases=[HOSTILE], seconds=[1.0], members=3
    )
    shown.live.update(0, wire.WatchRunResponse(round=round_))
    state = wire.RunState(reason=HOSTILE, waiting=HOSTILE, phase=wire.RunPhase.RUN_PHASE_ROUNDS)
    metrics = wire.MetricsEvent(epoch=2, names=[HOSTILE], means=[0.5])
    shown.live.update(0, wire.WatchRunResponse(state=state, metrics=metrics))
    facts = dict.fromkeys(("run", "system", "secure_sum", "dataset", "started", "state"), HOSTILE)
    shown.live.list_runs([{**facts, "seconds": 3.0, "metrics": {HOSTILE: 0.5}}])
    one = look(width, scheme)
    one.page.goto(shown.server.link())
    one.state("open")
    for fold in one.page.locator("summary").all():
        fold.click()
    for part in ("now", "lines", "alerts", "rounds", "parties", "runs", "metric"):
        told = one.page.locator(f"#{part}").text_content()
        assert "<script>" in told, part
        assert "\u202e" not in told
        assert "\\u202egpj" in told
    one.page.wait_for_timeout(300)
    assert one.page.title() != "run"
    assert one.page.locator("img, body script").count() == 0
    assert one.said == []
    assert one.violations() == []
    widths = one.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert widths[0] <= widths[1]
    one.picture(f"9-hostile-{width}-{scheme}")


def test_a_browser_that_sleeps_and_comes_back_catches_up(shown: Shown, look: Any) -> None:
    one = look()
    one.page.goto(shown.server.link())
    one.state("open")
    sent(shown.live)
    one.until("lines", "pass 3/9")
    one.context.set_offline(True)
    # The connection breaks as it does when a computer sleeps; meanwhile the run goes on.
    one.page.evaluate("window.dispatchEvent(new Event('offline'))")
    for event in EVENTS["evaluations"](4, 8):
        shown.live.update(0, event)
    one.context.set_offline(False)
    one.until("lines", "pass 7/9")
    one.state("open")
    assert "7 of 9" in one.text("figures")


class Relay:
    """Connections to a server at the same port of another loopback address, which can go silent and stay open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._silent: list[threading.Event] = []
        self._listening = socket.create_server(("127.0.0.2", port))
        threading.Thread(target=self._accept, daemon=True).start()

    def silence(self) -> None:
        """Carry nothing any more on the connections that there are, and close none."""
        for one in self._silent:
            one.set()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far, silent = socket.create_connection(("127.0.0.1", self._port)), threading.Event()
                self._silent.append(silent)
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, target, silent), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, silent: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                if not silent.is_set():
                    target.sendall(data)
            if not silent.is_set():
                target.close()


def test_a_computer_that_slept_finds_out_that_its_connection_only_looks_alive(look: Any) -> None:
    board = Board()
    live = LiveRun(board, SETTINGS, "run-1", "example")
    one = look()
    with PageServer(board, page="live", settings=PageSettings(names=("127.0.0.2", "127.0.0.1"))) as server:
        relay = Relay(server.port)
        one.page.clock.install()
        one.page.goto(server.link().replace("127.0.0.1", "127.0.0.2"))
        one.state("open")
        live.stage("before it slept")
        one.until("now", "Before it slept")
        relay.silence()
        live.stage("while it slept")
        one.page.wait_for_timeout(1500)
        assert "Before it slept" in one.text("now")
        one.page.clock.fast_forward(60_000)
        one.page.clock.fast_forward(5_000)
        one.until("now", "While it slept")
        one.state("open")
        assert one.text("lines").count("before it slept") == 1
        relay.close()


def test_a_server_that_is_away_for_a_while_is_found_again(look: Any) -> None:
    board, sessions = Board(), PageSessions()
    live = LiveRun(board, SETTINGS, "run-1", "example")
    one = look()
    first = PageServer(board, page="live", sessions=sessions)
    with first:
        one.page.goto(first.link())
        one.state("open")
        # A crash: the streams break without a last word.
        first._server.force_exit = True
        first._server.should_exit = True
        one.state("lost")
        one.picture("10-lost")
        assert one.violations() == []
    live.stage("it went on meanwhile")
    with PageServer(
        board, page="live", sessions=sessions, settings=PageSettings(listen=f"127.0.0.1:{first.port}")
    ):
        one.until("now", "It went on meanwhile")
        one.state("open")
    one.state("ended")


@pytest.mark.parametrize(
    ("path", "arrives"),
    [
        ("/assets/live/main.js", False),
        ("/assets/live/charts.js", False),
        ("/assets/shared/base.css", False),
        ("/session", False),
        ("/session", True),
    ],
)
def test_a_page_opens_although_requests_are_lost_when_the_network_changes(
    shown: Shown, look: Any, path: str, arrives: bool
) -> None:
    """A browser gives up its requests when the machine's network changes, as when containers start."""
    looked, lost = look(), []

    def lose(route: Any) -> None:
        if len(lost) == 2:
            route.continue_()
            return
        lost.append(route.request.method)
        if arrives:
            route.fetch()  # only the answer is lost
        route.abort("connectionaborted")

    looked.page.route(f"**{path}", lose)
    looked.page.goto(shown.server.link())
    looked.state("open")
    deadline = time.monotonic() + WAIT_S
    while not looked.page.evaluate("getComputedStyle(document.body).getPropertyValue('--ink')"):
        assert time.monotonic() < deadline, "the page has no style"
        looked.page.wait_for_timeout(50)
    assert len(lost) == 2
    assert looked.page.evaluate("location.hash") == ""


def test_a_page_whose_script_never_loads_says_so_and_stops_trying(shown: Shown, look: Any) -> None:
    looked = look()
    looked.page.route("**/main.js", lambda route: route.abort("connectionaborted"))
    looked.page.add_init_script("window.setTimeout = (call) => queueMicrotask(call);")
    looked.page.goto(shown.server.link())
    looked.until("connection", "load the page again")
    tried = [address for address in looked.asked if address.endswith("/main.js")]
    assert len(tried) == 9


def test_the_page_is_used_by_keyboard(shown: Shown, look: Any) -> None:
    sent(shown.live)
    one = look()
    one.page.goto(shown.server.link())
    one.state("open")
    reached = []
    for _ in range(25):
        one.page.keyboard.press("Tab")
        reached.append(
            one.page.evaluate(
                """(node => node.id || node.getAttribute('aria-label') || node.textContent.trim())(
                    document.activeElement)"""
            )
        )
    for wanted in ("Skip to the run", "As a table", "metric", "Alerts", "What happened", "share", "leave"):
        assert wanted in reached, reached
    one.page.focus("#metric")
    before = one.page.locator("#quality svg").get_attribute("aria-label")
    one.page.keyboard.press("ArrowDown")
    one.page.wait_for_timeout(200)
    assert one.page.locator("#quality svg").get_attribute("aria-label") != before


@pytest.mark.parametrize("width", [1200, 390])
def test_nothing_moves_while_the_page_loads_and_events_arrive(shown: Shown, look: Any, width: int) -> None:
    one = look(width)
    one.page.add_init_script(
        """window.shifts = [];
        const seen = list => list.getEntries().forEach(one => one.hadRecentInput || window.shifts.push(one.value));
        new PerformanceObserver(seen).observe({type: 'layout-shift', buffered: true});"""
    )
    one.page.goto(shown.server.link())
    one.state("open")
    sent(shown.live)
    one.until("lines", "pass 3/9")
    one.page.wait_for_timeout(300)
    assert sum(one.page.evaluate("window.shifts")) == 0


def test_many_parties_are_drawn_as_a_few_and_a_number(shown: Shown, look: Any) -> None:
    sent(shown.live, parties=150)
    for event in EVENTS["lost"]("client/host-3"):
        shown.live.update(0, event)
    one = look()
    one.page.goto(shown.server.link())
    one.until("picture", "more")
    label = one.page.locator("#picture svg").get_attribute("aria-label")
    assert "150 client hosts (host-3 lost)" in label
    drawn = one.page.locator("#picture text").all_text_contents()
    assert {"host-3", "gone", "host-0", "+ 143 more"} <= set(drawn)
    assert "host-149" not in drawn
    assert one.violations() == []
    one.picture("11-many-parties")
