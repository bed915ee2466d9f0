"""``coterie run`` as a command: its report, its streams, its exit status, and that it leaves no process behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

WAIT_S = 60.0
CONFIG = """
name = "command"
[data.synthetic]
users = 60
items = 120
interactions = 3000
[drift]
dim = 8
epochs = 4
[federation]
owners = 2
hosts = 2
min_users = 20
"""


class Strict(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class DataSet(Strict):
    name: str
    users: int
    items: int
    interactions: int
    split_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class MeanStd(Strict):
    mean: float
    std: float | None


class Rpc(Strict):
    calls: int
    bytes_out: int
    bytes_in: int
    p50_ms: float
    p99_ms: float
    server_p50_ms: float | None
    network_p50_ms: float | None


class Cpu(Strict):
    total: float
    security: float
    activities: dict[str, float]


class Row(Strict):
    metrics: dict[str, MeanStd]


class Report(Strict):
    """Every key that a report must have."""

    run_id: str
    system: Literal["drift"]
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


class Command:
    """``coterie run`` as a child of the test, in a session of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        config = folder / "run.toml"
        config.write_text(CONFIG)
        self.out, self.err = folder / "out", folder / "err"
        command = [sys.executable, "-P", "-m", "coterie", "run", str(config), "--json"]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*command, "--set", f"output={str(folder / 'runs')!r}", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.pid = self.process.pid
        self.children: set[int] = set()

    def until_it_says(self, text: str, processes: Any) -> None:
        """Wait for a line of progress, and take down all processes below on the way."""
        deadline = time.monotonic() + WAIT_S
        while text not in self.err.read_text():
            self.children.update(processes.descendants(self.pid))
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{self.process.returncode}: {self.err.read_text()} {self.out.read_text()}")
            time.sleep(0.02)

    def wait(self, processes: Any) -> int:
        """Wait for its end and return the exit status."""
        deadline = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            self.children.update(processes.descendants(self.pid))
            if time.monotonic() > deadline:
                pytest.fail(f"it does not end: {self.err.read_text()}")
            time.sleep(0.02)
        return self.process.returncode

    def envelope(self) -> dict[str, Any]:
        """Return the one line on standard output."""
        (line,) = self.out.read_text().splitlines()
        return json.loads(line)

    def close(self, processes: Any) -> None:
        """End what is left, by id."""
        for pid in (*self.children, *processes.descendants(self.pid), self.pid):
            if processes.is_running(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def command(tmp_path, processes):
    """Return a function that starts the command."""
    started = []

    def start(*arguments):
        started.append(Command(tmp_path, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.close(processes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, processes):
    """A command that has run to its end, with transcripts and attacks."""
    run = Command(
        tmp_path_factory.mktemp("command"), "--set", "federation.attacks=true", "--set", "drift.theta=2"
    )
    try:
        run.wait(processes)
        yield run
    finally:
        run.close(processes)


def test_a_run_ends_with_status_0_and_one_envelope_on_standard_output(finished):
    assert finished.process.returncode == 0, finished.err.read_text()
    envelope = finished.envelope()
    assert (envelope["ok"], envelope["command"]) == (True, "run")
    assert "run command-" in finished.err.read_text()


def test_the_report_has_every_key_with_values_of_the_right_kind(finished):
    result = finished.envelope()["result"]
    on_disk = json.loads((Path(result["folder"]) / "report.json").read_text())
    assert on_disk == result["report"]
    report = Report.model_validate(on_disk)
    services = {"cos/cos", "thirdparty/directory", "client/host-0", "client/host-1"}
    assert services < set(report.cpu_seconds) == set(report.peak_rss_mb) == set(report.visibility)
    assert sum(party.startswith("data-owner/") for party in report.cpu_seconds) == 2
    assert {"Register", "Poll", "Exchange", "SubmitInteractions", "Lookup", "Enrol"} <= set(report.traffic)
    assert (report.dataset.users, report.dataset.items, report.dataset.interactions) == (60, 120, 3000)
    for one in report.cpu_seconds.values():
        assert 0 <= one.security <= one.total


def test_the_report_page_loads_nothing_from_elsewhere(finished):
    page = (Path(finished.envelope()["result"]["folder"]) / "report.html").read_text()
    assert "<html" in page
    loaded = re.findall(r"""(?:src|href)\s*=\s*["']([^"'#][^"']*)["']|url\(\s*["']?([^"')]+)|@import""", page)
    assert [one for pair in loaded for one in pair if one and not one.startswith(("data:", "#"))] == []


def test_the_attacks_of_a_published_run_do_far_better_than_popularity(finished):
    attacks = finished.envelope()["result"]["report"]["attacks"]
    for attack in attacks.values():
        assert attack["auc_with_popularity"] > attack["popularity_auc"] + 0.15
    assert attacks["gradient_sign"]["flag_accuracy"] > attacks["gradient_sign"]["majority_accuracy"] + 0.1


def test_no_process_is_left_behind(finished, processes):
    assert len(finished.children) >= 6
    assert processes.gone(finished.children, within_s=1)


def test_ctrl_c_stops_every_child_and_ends_with_status_130(command, processes):
    run = command("--set", "drift.epochs=500", "--set", "reference=false")
    run.until_it_says("interactions arrive", processes)
    os.kill(run.pid, signal.SIGINT)
    assert run.wait(processes) == 130
    assert processes.gone(run.children, within_s=1)
    assert run.envelope()["error"]["code"] == "interrupted"


@pytest.mark.parametrize("moment", ["run command-", "interactions arrive"])
def test_children_of_a_launcher_that_was_killed_stop_by_themselves(moment, command, processes):
    run = command("--set", "drift.epochs=500", "--set", "reference=false")
    run.until_it_says(moment, processes)
    while len(run.children) < 6:
        run.until_it_says(moment, processes)
        run.children.update(processes.descendants(run.pid))
    os.kill(run.pid, signal.SIGKILL)
    assert processes.gone(run.children, within_s=20)


def test_a_phase_that_takes_too_long_ends_the_command_with_status_60(command, processes):
    run = command("--set", "federation.phase_timeout_s=0.3", "--set", "reference=false")
    assert run.wait(processes) == 60
    error = run.envelope()["error"]
    assert error["code"] == "run"
    assert re.search(r"(gather|train) took too long; waiting for: .*data.owner", error["message"])
    assert processes.gone(run.children, within_s=1)
