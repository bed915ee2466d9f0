"""``coterie run`` as a user runs it: its streams, its report, its exit status, and that it leaves no process behind."""

import os
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from coterie.errors import RunError

from .command import CONFIG, Command, gone, is_running

LONG = ("--json", "--set", "drift.epochs=2000", "--set", "reference=false")
"""A run that does not end by itself while a test looks at it."""

of_finished_commands = pytest.mark.xdist_group("command")
"""Reads the fixtures `finished` and `churned`, each of which runs once."""

CHURN = """
name = "churn"
reference = false
[drift]
dim = 8
epochs = 10
[federation]
owners = 3
hosts = 1
[federation.churn]
owners = 1
join_at = 0.3
leave_at = 0.6
"""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class DataSet(Strict):
    name: str
    users: int
    items: int
    interactions: int
    notes: list[str]
    split_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class MeanStd(Strict):
    mean: float
    std: float | None


class Rpc(Strict):
    calls: int = Field(ge=1)
    errors: int = Field(ge=0)
    bytes_out: int = Field(ge=0)
    bytes_in: int = Field(ge=0)
    p50_ms: float = Field(gt=0)
    p99_ms: float = Field(gt=0)
    server_p50_ms: float | None
    network_p50_ms: float | None
    network_s: float = Field(ge=0)


class Cpu(Strict):
    total: float = Field(gt=0)
    start: float = Field(gt=0)
    security: float = Field(ge=0)
    activities: dict[str, float]


class Row(Strict):
    metrics: dict[str, MeanStd] = Field(min_length=1)
    history: list[dict[str, object]]
    label: str = Field(default="absent", min_length=1)
    note: str = Field(default="absent", min_length=1)


class Report(BaseModel):
    """Every key that a report must have, by its exact name."""

    model_config = ConfigDict(extra="allow", strict=True)

    run_id: str = Field(pattern=r"^command-\d{8}-\d{6}-[0-9a-f]{4}$")
    system: Literal["drift"]
    label: Literal["DRIFT"]
    form: Literal["published"]
    secure_sum: Literal["clear"]
    dataset: DataSet
    seeds: list[int] = Field(min_length=1)
    metrics: dict[str, MeanStd] = Field(min_length=1)
    reference: dict[str, Row] = Field(min_length=1)
    traffic: dict[str, Rpc] = Field(min_length=1)
    cpu_seconds: dict[str, Cpu]
    peak_rss_mb: dict[str, float]
    visibility: dict[str, dict[str, Literal["seen", "not seen"]]]
    versions: dict[str, str] = Field(min_length=1)


BESIDE = {
    "attacks",
    "counts",
    "duration_s",
    "events",
    "experiment",
    "format",
    "history",
    "machine",
    "network",
    "owners_timeline",
    "restarted",
    "settings",
    "staleness",
    "start_seconds",
    "started",
    "updates",
}
"""Keys of a report beside those that every report must have."""


@pytest.fixture
def command(tmp_path):
    """Return a function that starts the command."""
    started = []

    def start(*arguments, **options):
        started.append(Command(tmp_path, *arguments, **options))
        return started[-1]

    yield start
    for one in started:
        one.close()


# --- a run that ends well ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A command that has run to its end, with transcripts and attacks."""
    folder = tmp_path_factory.mktemp("command")
    run = Command(folder, "--json", "--set", "federation.attacks=true", "--set", "drift.theta=2")
    try:
        run.wait()
        yield run
    finally:
        run.close()


@of_finished_commands
def test_with_json_a_run_writes_one_envelope_to_standard_output_and_prose_to_standard_error(finished):
    assert finished.process.returncode == 0, finished.err
    envelope = finished.envelope()
    assert envelope.keys() == {"ok", "command", "result"}
    assert (envelope["ok"], envelope["command"]) == (True, "run")
    assert envelope["result"] == {"folder": str(finished.run), "report": finished.report()}
    for prose in ("run command-", "interactions arrive", "epoch 4/4", "System", "SAROS", "report: "):
        assert prose in finished.err


@of_finished_commands
def test_the_report_has_exactly_the_documented_keys_with_sensible_values(finished):
    report = Report.model_validate(finished.report())
    assert report.model_extra.keys() == BESIDE
    owners = {f"data-owner/{path.name.removeprefix('owner-')}" for path in finished.run.glob("owner-*")}
    services = {"cos/cos", "thirdparty/directory", "client/host-0", "client/host-1", *owners}
    assert len(owners) == 2
    assert services == set(report.cpu_seconds) == set(report.peak_rss_mb) == set(report.visibility)
    assert all(10 < megabytes < 2000 for megabytes in report.peak_rss_mb.values())
    assert report.dataset.model_dump(exclude={"split_sha256"}) == {
        "name": "synthetic",
        "users": 60,
        "items": 120,
        "interactions": 3000,
        "notes": [],
    }
    names = ("map@10", "ndcg@10", "map_test_items@10", "ndcg_test_items@10")
    own = {"saros", "random", "popularity", "positive_share"}
    assert report.reference.keys() == {*own, "item_knn", "ease_central"}
    for row in (report.metrics, *(row.metrics for row in report.reference.values())):
        assert all(0 <= row[name].mean <= 1 and row[name].std is None for name in names)
    random = report.reference["random"].metrics
    assert report.metrics["ndcg_test_items@10"].mean > random["ndcg_test_items@10"].mean
    assert {"coterie", "grpcio", "numpy"} <= report.versions.keys()


@of_finished_commands
def test_the_documents_describe_every_key_of_a_report(finished):
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    table = page.partition("## report.json")[2].partition("\n### ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert finished.report().keys() <= {name for cell in cells for name in re.findall("`([^`]+)`", cell)}


@of_finished_commands
def test_the_report_accounts_for_every_rpc_and_for_the_time_spent_on_security(finished):
    report = Report.model_validate(finished.report())
    assert report.traffic.keys() >= {"Register", "Poll", "Fetch", "Submit", "ExchangeMany"}
    assert report.traffic.keys() >= {"SubmitInteractions", "OwnerInfo", "Lookup", "Revocations"}
    assert 0 < report.traffic["ExchangeMany"].calls < report.model_extra["updates"]
    for rpc in report.traffic.values():
        assert rpc.p50_ms <= rpc.p99_ms
    for party, one in report.cpu_seconds.items():
        assert 0 <= one.security <= one.total, party
        assert 0 < one.start < one.total
        assert sum(one.activities.values()) <= one.total
    for host in ("client/host-0", "client/host-1"):
        assert report.cpu_seconds[host].activities.keys() >= {"seal", "key agreement", "evaluate"}


class Loads(HTMLParser):
    """Collects what a page would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("src", "srcset", "data", "action") or (name == "href" and tag == "link"):
                self.found.append(value or "")
            if name == "style":
                self.handle_data(value or "")

    def handle_data(self, data):
        self.found += re.findall(r"url\(\s*[\"']?([^\"')]+)", data) + re.findall("@import[^;]*", data)


@of_finished_commands
def test_the_report_page_loads_nothing_from_elsewhere(finished):
    page = (finished.run / "report.html").read_text()
    assert page.count("<svg") >= 3
    loads = Loads()
    loads.feed(page)
    assert [one for one in loads.found if not one.startswith(("data:", "#"))] == []
    assert finished.report()["run_id"] in page


@of_finished_commands
def test_the_attacks_on_a_published_run_do_far_better_than_popularity(finished):
    attacks = finished.report()["attacks"]
    for attack in attacks.values():
        assert attack["auc_with_popularity"] > attack["popularity_auc"] + 0.15
    assert attacks["gradient_sign"]["flag_accuracy"] > attacks["gradient_sign"]["majority_accuracy"] + 0.1


@of_finished_commands
def test_no_process_is_left_behind(finished):
    assert len(finished.children) >= 6
    assert not any(map(is_running, finished.children))


# --- owners join and leave ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def churned(tmp_path_factory):
    """A command without ``--json``, on a data set in a folder: one owner comes late and leaves early."""
    folder = tmp_path_factory.mktemp("churn")
    size = ("--users", "60", "--items", "120", "--interactions", "3000")
    generate = [sys.executable, "-P", "-m", "coterie", "data", "generate", "films", *size]
    subprocess.run(generate, cwd=folder, check=True, capture_output=True)
    run = Command(folder, "--data", "films", config=CHURN)
    try:
        run.until_it_says("epoch 1/10")
        services = {path.name: run.child(path.name) for path in run.run.glob("owner-*")}
        (late,) = (name for name, pid in services.items() if pid is None)
        present = next(pid for pid in services.values() if pid is not None)
        # Epochs are short beside the start of a process: the run waits for it.
        run.until(lambda: run.child(late), "start of the late owner")
        os.kill(present, signal.SIGSTOP)
        run.until(lambda: '"joined"' in (run.run / late / "log.jsonl").read_text(), "late owner that joins")
        os.kill(present, signal.SIGCONT)
        run.wait()
        yield run, f"data-owner/{late.removeprefix('owner-')}"
    finally:
        run.close()


@of_finished_commands
def test_without_json_a_run_prints_its_progress_and_a_table_with_the_numbers_of_its_report(churned):
    run, late = churned
    assert (run.process.returncode, run.err) == (0, "")
    report = run.report()
    assert report["dataset"]["name"] == "films"
    lines = run.out.splitlines()
    assert lines[1].startswith(f"run {report['run_id']}: drift, published, secure sum clear")
    assert f"{late} left" in lines
    assert f"report: {run.run / 'report.html'}" in lines
    title = lines.index("DRIFT on films")
    row = next(cells for line in lines[title + 1 :] if (cells := line.split())[:1] == ["DRIFT"])
    for name in ("ndcg@10", "ndcg_test_items@10"):
        assert f"{report['metrics'][name]['mean']:.4f}" in row


@of_finished_commands
def test_the_report_shows_quality_over_time_while_owners_join_at_30_and_leave_at_60_percent(churned):
    run, late = churned
    report = run.report()
    assert "attacks" not in report
    assert "reference" in report
    assert set(report["visibility"]["cos/cos"].values()) == {"may see", "may not see"}
    history = report["history"]
    assert [entry["epoch"] for entry in history] == list(range(1, 11))
    times = [entry["time_s"] for entry in history]
    assert times == sorted(times)
    assert all(0 < entry["metrics"]["ndcg@10"] <= 1 for entry in history)
    owners = [entry["owners"] for entry in report["owners_timeline"] if entry["owners"]]
    assert [n for n, before in zip(owners, [0, *owners], strict=False) if n != before][-3:] == [2, 3, 2]
    joined = next(entry for entry in history if entry["owners"] == 3)["epoch"]
    assert 3 < joined <= 6
    assert history[-1]["owners"] == 2
    events = [event["text"] for event in report["events"]]
    assert events.index(f"{late} joined") < events.index(f"{late} left")
    assert late in (run.run / "report.html").read_text()


@of_finished_commands
def test_a_run_records_nothing_of_what_it_received_unless_it_is_told_to(churned, finished):
    run, _ = churned
    assert list(run.run.rglob("transcript*")) == []
    assert len(list(finished.run.rglob("transcript*.bin"))) == 6


# --- runs that end before their time -----------------------------------------------------------------------------


def ended(run, status, code):
    """Check exit status and envelope of a run that failed; return message and hint."""
    assert run.wait() == status, run.err
    envelope = run.envelope()
    assert envelope.keys() == {"ok", "command", "error"}
    assert (envelope["ok"], envelope["command"]) == (False, "run")
    assert (envelope["error"]["code"], envelope["error"]["exit_code"]) == (code, status)
    assert "Traceback" not in run.err
    return envelope["error"]["message"], envelope["error"]["hint"]


def test_ctrl_c_stops_every_child_and_ends_with_status_130(command):
    run = command(*LONG)
    run.until_it_says("epoch 2/")
    os.kill(run.pid, signal.SIGINT)
    ended(run, 130, "interrupted")
    assert f"stores and logs of the run so far are in runs/{run.run.name}" in run.err
    assert not any(map(is_running, run.children))
    for log in run.run.glob("*/log.jsonl"):
        assert '"stopped"' in log.read_text().splitlines()[-1], log


def test_ctrl_c_twice_leaves_no_process_either(command):
    run = command(*LONG)
    run.until_it_says("interactions arrive")
    os.kill(run.pid, signal.SIGINT)
    run.until(lambda: not all(map(is_running, run.children)), "process that has stopped")
    os.kill(run.pid, signal.SIGINT)
    ended(run, 130, "interrupted")
    assert gone(run.children, within_s=20)


@pytest.mark.parametrize("moment", ["run command-", "interactions arrive"])
def test_children_of_a_launcher_that_was_killed_stop_by_themselves(moment, command):
    run = command(*LONG)
    run.until_it_says(moment)
    run.until(lambda: len(run.children) >= 6, "six children")
    os.kill(run.pid, signal.SIGKILL)
    assert gone(run.children, within_s=30)


def test_a_phase_that_takes_too_long_ends_the_command_with_status_60(command):
    run = command(*LONG, "--set", "federation.phase_timeout_s=0.02")
    message, hint = ended(run, 60, "run")
    late = r"gather took too long; waiting for: [0-2] of 2 data owners and \d+ of 60 users came"
    slow = r"train took too long; waiting for: (data-owner|client)/.*"
    assert re.fullmatch(f"the run ended before its time: ({late}|{slow})", message)
    assert str(run.run) in hint
    assert not any(map(is_running, run.children))


def test_a_service_that_is_killed_is_started_again_and_the_run_goes_on(command):
    run = command("--set", "drift.epochs=30")
    run.until_it_says("interactions arrive")
    (owner, _) = sorted(path.name for path in run.run.glob("owner-*"))
    party = f"data-owner/{owner.removeprefix('owner-')}"
    os.kill(run.child(owner), signal.SIGKILL)
    run.until_it_says(f"{party} was ended by SIGKILL, and is started again")
    run.wait()
    assert run.process.returncode == 0, run.err
    told = [event["text"] for event in run.report()["events"]]
    assert f"{party} was ended by SIGKILL, and was started again" in told
    assert run.report()["restarted"] == {party: 1}
    assert f"of {party} only since the last start" in " ".join((run.out + run.err).split())
    assert len(run.report()["history"]) == 30


def test_a_service_that_is_killed_too_often_ends_the_command_which_names_the_signal(command):
    run = command(*LONG, "--set", "federation.restarts=0")
    run.until_it_says("interactions arrive")
    (owner, _) = sorted(path.name for path in run.run.glob("owner-*"))
    os.kill(run.child(owner), signal.SIGKILL)
    message, hint = ended(run, 60, "run")
    named = f"data-owner/{owner.removeprefix('owner-')} was ended from outside, by SIGKILL"
    assert message == f"{named}; the system does that when memory runs out"
    assert str(run.run / owner / "log.jsonl") in hint
    assert not any(map(is_running, run.children))


def test_a_service_that_crashes_ends_the_command_and_is_not_started_again(command):
    run = command(*LONG)
    run.until_it_says("interactions arrive")
    (owner, _) = sorted(path.name for path in run.run.glob("owner-*"))
    os.kill(run.child(owner), signal.SIGSEGV)
    message, hint = ended(run, 60, "run")
    assert message.startswith(f"data-owner/{owner.removeprefix('owner-')} crashed, by SIGSEGV")
    assert str(run.run / owner / "log.jsonl") in hint
    assert "is started again" not in run.err
    assert not any(map(is_running, run.children))


async def start_and_finish(running):
    await running.start()
    await running.finish()


@pytest.mark.parametrize("party", ["thirdparty/directory", "cos/cos", "client/host-0"])
async def test_a_service_that_cannot_start_ends_the_run_with_what_it_said(party, small, federation):
    async with federation(small(), keys={party: {"listn": "127.0.0.1:1"}}) as running:
        running.watched = True
        with pytest.raises(RunError, match=f"{party} ended with status 10: error: .*listn.*listen") as raised:
            await start_and_finish(running)
        assert str(running.children[party].log) in raised.value.hint
    assert not any(child.alive for child in running.children.values())


@pytest.mark.parametrize(
    ("changes", "status", "code", "message"),
    [
        ({"min_users = 20": "min_usrs = 20"}, 10, "config", "min_usrs.*min_users"),
        ({"epochs = 4": "epochs = 0"}, 10, "config", "drift.epochs"),
        ({"[drift]": "[drift"}, 10, "config", "line 7"),
        ({"users = 60": "users = 1"}, 10, "config", "data.synthetic.users"),
    ],
)
def test_a_wrong_configuration_is_named_and_starts_nothing(changes, status, code, message, command):
    config = CONFIG
    for old, new in changes.items():
        config = config.replace(old, new)
    run = command("--json", config=config)
    said, _ = ended(run, status, code)
    assert re.search(message, said, re.DOTALL)
    assert not run.children
    assert not (run.folder / "runs").exists()


def test_a_data_set_that_is_not_there_ends_the_command_with_status_20(command):
    run = command("--json", "--data", "nowhere")
    said, _ = ended(run, 20, "data")
    assert "nowhere" in said
    assert not list(run.folder.rglob("log.jsonl")), "a service was started"
