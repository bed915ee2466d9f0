"""Processes that are forked from one that has imported everything are as those that are started alone."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from coterie.crypto.authority import Authority, new_token
from coterie.launch import children
from coterie.launch.fork_server import Forked, ForkServer

PLAIN = {key: value for key, value in os.environ.items() if not key.startswith("COTERIE_")}
LONG_S = 60.0
"""Bound for what takes a second or two on a machine without load."""


@pytest.fixture(scope="module")
def fork_server():
    one = ForkServer(PLAIN)
    yield one
    one.close()


def waiting(fork_server: ForkServer, folder: Path) -> Forked:
    """Start a service that waits for somebody who never comes."""
    # Without the files it would end by itself at once.
    (folder / "ca.pem").write_bytes(Authority.create("test", 1).certificate_pem)
    (folder / "token").write_text(new_token("cos", "cos", int(time.time()) + 3600, 1)[0])
    (folder / "cos.toml").write_text(
        f"name = 'cos'\nstate = '{folder}/state'\nlisten = '127.0.0.1:0'\n"
        "[thirdparty]\naddress = '127.0.0.1:1'\nname = 'directory'\n"
        f"[enrol]\naddress = '127.0.0.1:1'\nca_file = '{folder}/ca.pem'\ntoken_file = '{folder}/token'\n"
        f"timeout_s = {LONG_S}\n"
    )
    return fork_server.start(["serve", "cos", "--config", str(folder / "cos.toml")], PLAIN, folder / "log")


@pytest.fixture
def sleeper(fork_server: ForkServer, tmp_path: Path):
    return waiting(fork_server, tmp_path)


def is_there(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition, what: str) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def finished(started: Forked) -> int:
    return started.wait(LONG_S)


def test_a_command_runs_in_the_folder_and_with_the_environment_of_its_start_and_appends_to_its_log(
    fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text("name = 'day'\n")
    log = tmp_path / "log"
    log.write_text("before\n")
    monkeypatch.chdir(tmp_path)
    command = ["config", "show", "run.toml", "--json"]
    assert finished(fork_server.start(command, PLAIN, log)) == 0
    assert finished(fork_server.start(command, {**PLAIN, "COTERIE_NAME": "night"}, log)) == 0
    # And nothing of the one before is left in the next.
    assert finished(fork_server.start(command, PLAIN, log)) == 0
    first, *said = log.read_text().splitlines()
    assert first == "before"
    found = [json.loads(line)["result"]["values"] for line in said if line.startswith("{")]
    names = [values["name"]["value"] for values in found]
    assert names == ["day", "night", "day"]


def test_the_status_of_a_command_that_fails_is_told_and_stays(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    failed = fork_server.start(["serve", "nobody"], PLAIN, tmp_path / "log")
    assert finished(failed) == 10
    assert failed.poll() == failed.wait() == failed.returncode == 10
    assert "'nobody' is no role" in (tmp_path / "log").read_text()
    # What has ended takes no signal any more.
    failed.kill()


def test_a_process_that_is_killed_says_by_what(sleeper: Forked) -> None:
    assert sleeper.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.05)
    sleeper.kill()
    assert finished(sleeper) == -signal.SIGKILL


def test_a_process_leads_a_session_of_its_own_and_carries_its_role(
    fork_server: ForkServer, sleeper: Forked
) -> None:
    until(lambda: os.getsid(sleeper.pid) == sleeper.pid, "a session")
    assert int(Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[1]) == fork_server.pid
    until(lambda: Path(f"/proc/{sleeper.pid}/comm").read_text() == "coterie cos\n", "a name")
    sleeper.kill()
    finished(sleeper)


def test_a_process_holds_nothing_open_of_its_fork_server_or_of_its_siblings(
    fork_server: ForkServer, sleeper: Forked, tmp_path: Path
) -> None:
    folder = tmp_path / "second"
    folder.mkdir()
    second = waiting(fork_server, folder)
    until(lambda: Path(f"/proc/{second.pid}/fd/1").readlink() == folder / "log", "its log")
    held = [str(place.readlink()) for place in Path(f"/proc/{second.pid}/fd").iterdir()]
    assert str(tmp_path / "log") not in held
    own = {str(place.readlink()) for place in Path(f"/proc/{fork_server.pid}/fd").iterdir()}
    assert not {one for one in held if one.startswith("socket:")} & own
    for one in (sleeper, second):
        one.kill()
        finished(one)


def test_a_fork_server_that_is_gone_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ForkServer(PLAIN)
    orphan = waiting(gone, tmp_path)
    os.kill(gone.pid, signal.SIGKILL)
    # Nobody is left to say how it ended.
    assert finished(orphan) == -signal.SIGHUP
    os.kill(orphan.pid, signal.SIGKILL)
    with pytest.raises(ConnectionError):
        gone.start(["version"], PLAIN, tmp_path / "log")
    for there in (gone, None):
        monkeypatch.setattr(children, "fork_server", lambda there=there: there)
        started = children.start(["version"], tmp_path / "log")
        assert isinstance(started, subprocess.Popen)
        assert started.wait(LONG_S) == 0
    said = (tmp_path / "log").read_text().splitlines()
    assert len([line for line in said if line.startswith("coterie 0")]) == 2
    gone.close()


def test_a_fork_server_ends_with_its_launcher_and_so_does_what_it_forked(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("")
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\n"
            "from pathlib import Path\n"
            "from coterie.launch.children import start\n"
            "from coterie.launch.fork_server import fork_server\n"
            "one = start(['serve', 'thirdparty', '--set=listen=127.0.0.1:0', '--set=enrol_listen=127.0.0.1:0',\n"
            "    '--set=name=directory', '--set=state=state'], Path('log'))\n"
            "print(fork_server().pid, one.pid, flush=True)\n"
            "time.sleep(1000)\n",
        ],
        stdout=subprocess.PIPE,
        cwd=tmp_path,
    )
    assert launcher.stdout is not None
    pids = [int(word) for word in launcher.stdout.readline().split()]
    assert all(is_there(pid) for pid in pids)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    until(lambda: not any(is_there(pid) for pid in pids), "an end")


def test_the_end_of_a_process_that_two_threads_ask_for_is_known_to_both(
    fork_server: ForkServer, sleeper: Forked, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper.kill()
    until(lambda: not is_there(sleeper.pid), "the process has ended")
    told = fork_server.status_of

    def told_another_thread(pid: int) -> int | None:
        # Between the look of the first thread and its answer.
        monkeypatch.undo()
        other = threading.Thread(target=sleeper.wait, kwargs={"timeout": LONG_S})
        other.start()
        other.join()
        return told(pid)

    monkeypatch.setattr(fork_server, "status_of", told_another_thread)
    assert sleeper.poll() == -signal.SIGKILL
    assert sleeper.wait(timeout=LONG_S) == -signal.SIGKILL
