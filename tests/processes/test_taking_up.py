"""``coterie runs resume``: a run whose launcher and services were killed comes to the figures of an undisturbed one."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from coterie.cli.main import invoke
from coterie.launch.kept_runs import KeptRun

from .command import Command, gone, is_running
from .patience import ANOTHER_FORM, WAIT_S

CONFIG = """
name = "killed"
system = "fedncf"
reference = false
seeds = [0, 1]
[data]
path = "{data}"
[rounds]
cohort = 20
group = 20
passes = 30
evaluate_every = 10
patience = 0
min_cohort = 10
min_sum = 10
[federation]
hosts = 2
"""

SAME = ("metrics", "history", "rounds", "chosen", "per_seed", "dataset", "seeds", "abandoned", "updates")
"""Keys of a report that are figures of learning."""

VARYING = ("time_s", "seconds", "bytes_in", "cpu_seconds", "start_seconds", "dropped")
"""Keys that are times and bytes, wherever they stand; and members that were away while a sum was in progress."""


def figures(report):
    """Return what a report says of learning, without times."""

    def without(value):
        if isinstance(value, dict):
            return {key: without(one) for key, one in value.items() if key not in VARYING}
        return [without(one) for one in value] if isinstance(value, list) else value

    return {key: without(report[key]) for key in SAME}


@pytest.fixture
def killed(tmp_path):
    """Return a function that starts a run, and kills launcher and services in the midst of the second seed."""
    started = []

    def make(*sets):
        assert (
            invoke(
                [
                    "data",
                    "generate",
                    str(tmp_path / "data"),
                    "--users=50",
                    "--items=60",
                    "--interactions=1200",
                ]
            )
            == 0
        )
        config = CONFIG.format(data=tmp_path / "data")
        command = Command(tmp_path, *(f"--set={one}" for one in sets), config=config)
        started.append(command)

        def trains():
            second = (command.folder / "runs").glob("*/seed-1/federation.json")
            return any(second) and "pass 10/30" in seed_1(command.out)

        command.until(trains, "training of the second seed")
        os.kill(command.pid, signal.SIGKILL)
        for pid in command.children:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        command.process.wait()
        assert gone(command.children, WAIT_S)
        return command

    yield make
    for one in started:
        one.close()


def seed_1(out):
    """Return what a command said after the first seed had finished."""
    return out.rpartition("done\n")[2]


def runs(command, *arguments):
    """Run ``coterie runs`` where the command ran; return exit status, envelope and prose."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "coterie", "runs", *arguments, "--json"],
        cwd=command.folder,
        capture_output=True,
        text=True,
        timeout=4 * WAIT_S,
        env={key: value for key, value in os.environ.items() if not key.startswith("COTERIE_")},
        check=False,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("secure_sum", "goes_on"),
    [pytest.param("clear", True, marks=ANOTHER_FORM), ("masked", False)],
    ids=["clear", "masked"],
)
def test_a_run_whose_processes_were_all_killed_is_taken_up_and_comes_to_the_same_figures(
    secure_sum, goes_on, killed, tmp_path
):
    command = killed(f"secure_sum={secure_sum}")
    folder = command.run
    _, listed, _ = runs(command, "list")
    assert [one["status"] for one in listed["result"]["runs"]] == ["interrupted"]
    first = (folder / "seed-0" / "course.json").stat().st_mtime_ns
    laid = (folder / "seed-1" / "federation.json").stat().st_mtime_ns
    stores = {path: path.stat().st_ino for path in folder.glob("seed-1/*/state/*.db")}
    assert stores

    status, found, said = runs(command, "resume", "newest")
    assert status == 0, (found, said)
    report = found["result"]["report"]
    assert ("goes on from its stores" in said) == goes_on
    # What had finished was not trained again; the second seed's stores were used again, or made anew.
    assert (folder / "seed-0" / "course.json").stat().st_mtime_ns == first
    again = {path: path.stat().st_ino for path in folder.glob("seed-1/*/state/*.db")}
    assert (again == stores) == goes_on
    assert ((folder / "seed-1" / "federation.json").stat().st_mtime_ns == laid) == goes_on
    assert len(report["taken_up"]) == 1

    other = tmp_path / "undisturbed"
    other.mkdir()
    undisturbed = Command(
        other, f"--set=secure_sum={secure_sum}", "--json", config=CONFIG.format(data=tmp_path / "data")
    )
    assert undisturbed.wait() == 0, undisturbed.err
    assert figures(report) == figures(undisturbed.report())
    undisturbed.close()

    assert KeptRun(folder).status == "finished"
    status, found, said = runs(command, "resume", folder.name)
    assert (status, found["result"]["status"]) == (0, "finished")
    assert "has finished" in said


def test_a_run_that_is_going_and_one_with_other_data_are_refused(killed, tmp_path):
    command = killed("secure_sum=masked")
    changed = tmp_path / "data" / "ratings.csv"
    before = changed.read_bytes()
    changed.write_bytes(before.replace(b"5", b"4", 1))
    status, found, _ = runs(command, "resume", "newest")
    assert status == 20
    assert f"{changed} has changed" in found["error"]["message"]
    changed.write_bytes(before)

    going = subprocess.Popen(
        [sys.executable, "-P", "-m", "coterie", "runs", "resume", "newest"],
        cwd=command.folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # A shell ignores SIGINT for what it starts in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + WAIT_S
        while KeptRun(command.run).status != "running":
            assert going.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # It comes to no end while it is asked about.
        going.send_signal(signal.SIGSTOP)
        status, found, _ = runs(command, "resume", "newest")
        assert status == 60
        assert "is still going" in found["error"]["message"]
        status, found, _ = runs(command, "prune", "--keep", "0", "--yes")
        assert (status, found["result"]["removed"]) == (0, [])
        going.send_signal(signal.SIGINT)
        going.send_signal(signal.SIGCONT)
        assert going.wait(WAIT_S) == 130
        assert KeptRun(command.run).status == "interrupted"
    finally:
        going.kill()
        going.wait()
