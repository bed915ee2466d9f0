"""Audit logs: the chain of their records, what breaks it, their size, and what a full disk or a kill leaves."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import structlog

from coterie.cli.main import invoke
from coterie.errors import StoreError
from coterie.telemetry import audit_log, logs
from coterie.telemetry.audit_log import AUDITED, FOLDER, KINDS, AuditLog, verify

ROOT = Path(__file__).parents[2]


def log_of(state, records=5, most=1 << 20):
    log = AuditLog(state, "cos/cos", most)
    for number in range(records):
        log.record("round", {"run": "mine", "round": number})
    log.close()
    return state / FOLDER / "current.jsonl"


def segments_of(state):
    return sorted((state / FOLDER).glob("[0-9]*.jsonl"))


def refuse(error, calls=None):
    """Return a function that raises an error, and counts its calls in a list."""

    def refusing(*_arguments, **_named):
        if calls is not None:
            calls.append(error)
        raise error

    return refusing


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_are_numbered_and_each_names_the_line_before(tmp_path):
    path = log_of(tmp_path)
    log_of(tmp_path, 2)
    records = lines_of(path)
    assert [one["n"] for one in records] == list(range(1, 8))
    assert records[0].keys() == {"n", "time", "service", "kind", "run", "round", "prev"}
    assert path.stat().st_mode & 0o777 == 0o600
    found = verify(tmp_path)
    assert (found.first, found.last, found.problems, found.kinds) == (1, 7, [], {"round": 7})


CHANGES = {
    "changed": lambda lines: [*lines[:2], lines[2].replace(b'"round": 2', b'"round": 9'), *lines[3:]],
    "taken out": lambda lines: [*lines[:2], *lines[3:]],
    "put in": lambda lines: [*lines[:2], lines[1], *lines[2:]],
    "in another order": lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
    "no record": lambda lines: [*lines[:2], b"nonsense\n", *lines[3:]],
    "its beginning taken out": lambda lines: lines[2:],
    "cut short": lambda lines: [*lines[:-1], lines[-1][:-20]],
}


REMOVED = b'{"n": 3, "prev": "", "kind": "segment-removed", "up_to": %s}\n'
NO_RECORDS = {
    "removed up to null": REMOVED % b"null",
    "removed up to infinity": REMOVED % b"Infinity",
    "removed up to nothing": b'{"n": 3, "prev": "", "kind": "segment-removed"}\n',
    "number infinite": b'{"n": Infinity, "prev": "", "kind": "round"}\n',
    "number too long": b'{"n": 1e300, "prev": "", "kind": "round"}\n',
    "number below 0": b'{"n": -3, "prev": "", "kind": "round"}\n',
    "too many brackets": b"[" * 100_000 + b"\n",
    "not UTF-8": b"\xff\xfe\n",
}


@pytest.mark.parametrize("line", NO_RECORDS.values(), ids=NO_RECORDS)
def test_a_line_written_by_hand_is_a_finding_and_the_service_goes_on_logging(tmp_path, line, capsys):
    path = log_of(tmp_path, 2)
    with path.open("ab") as file:
        file.write(line)
    log_of(tmp_path, 2)
    assert [one.count(b'"round": 1') for one in path.read_bytes().splitlines()].count(1) == 2
    assert verify(tmp_path).problems
    assert invoke(["audit", "verify", str(tmp_path)]) == 40
    assert "does not hold" in capsys.readouterr().err


def test_whatever_goes_wrong_with_a_record_it_counts_as_lost_and_the_service_goes_on(tmp_path):
    class Unprintable:
        def __str__(self):
            raise ValueError

    log = AuditLog(tmp_path, "cos/cos", 1 << 20)
    log.record("round", {"run": Unprintable()})
    log.record("round", {"run": "mine"})
    log.close()
    assert verify(tmp_path).kinds == {"records-lost": 1, "round": 1}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_log_that_was_altered_does_not_hold(tmp_path, change, capsys):
    path = log_of(tmp_path)
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    assert verify(tmp_path).problems
    assert invoke(["audit", "verify", str(tmp_path)]) == 40
    assert "does not hold" in capsys.readouterr().err


def test_an_end_that_was_cut_off_shows_against_a_head_noted_earlier(tmp_path, capsys):
    path = log_of(tmp_path)
    assert invoke(["audit", "verify", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["result"]
    head = f"{told['last']}:{told['head']}"
    log_of(tmp_path, 2)
    assert invoke(["audit", "verify", str(tmp_path), "--head", head]) == 0
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    assert verify(tmp_path).problems == []
    assert invoke(["audit", "verify", str(tmp_path), "--head", head]) == 40
    assert "record 5 is missing, by the head that was noted" in " ".join(capsys.readouterr().err.split())
    # Written anew as a whole, with as many records.
    path.unlink()
    log_of(tmp_path, 5)
    assert invoke(["audit", "verify", str(tmp_path), "--head", head]) == 40
    assert invoke(["audit", "verify", str(tmp_path), "--head", "five"]) == 10
    with pytest.raises(StoreError, match="there is no audit log in"):
        verify(tmp_path / "elsewhere")


def test_old_files_are_removed_beyond_the_size_and_the_chain_goes_on(tmp_path):
    path = log_of(tmp_path, 200, most=8000)
    folder = tmp_path / FOLDER
    assert sum(file.stat().st_size for file in folder.iterdir()) < 9000
    segments = sorted(folder.glob("[0-9]*.jsonl"))
    assert len(segments) == 3
    found = verify(tmp_path)
    assert found.problems == []
    assert found.first > 100
    log_of(tmp_path, 1, most=8000)
    assert verify(tmp_path).problems == []
    # A file removed by hand is none that the log removed.
    segments[0].unlink()
    assert "no record says that they were removed" in verify(tmp_path).problems[0]
    segments[2].unlink()
    assert any("records are missing before" in problem for problem in verify(tmp_path).problems)
    assert path.exists()


def test_a_kill_before_a_file_is_removed_leaves_a_log_that_holds_and_the_next_start_removes_it(tmp_path):
    program = (
        "import os, sys; from pathlib import Path; from coterie.telemetry.audit_log import AuditLog\n"
        "unlink, removed = Path.unlink, []\n"
        "def kill(path, **named):\n"
        "    removed.append(path)\n"
        "    os._exit(9) if len(removed) == 3 else unlink(path, **named)\n"
        "Path.unlink = kill\n"
        "log = AuditLog(Path(sys.argv[1]), 'cos/cos', 8000)\n"
        "while True: log.record('round', {'run': 'mine'})\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == 9
    (left, *others) = segments_of(tmp_path)
    assert len(others) == 3
    found = verify(tmp_path)
    assert (found.problems, found.kinds["segment-removed"] > 0) == ([], True)
    log_of(tmp_path, 1, most=8000)
    assert segments_of(tmp_path) == others
    assert not left.exists()
    assert verify(tmp_path).problems == []


@pytest.mark.parametrize("at", ["oldest", "current"])
def test_a_check_while_the_service_goes_on_in_a_new_file_finds_nothing(tmp_path, monkeypatch, at):
    path = log_of(tmp_path, 200, most=8000)
    log = AuditLog(tmp_path, "cos/cos", 8000)
    log.record("round", {"round": 0})
    chosen, reopened, number = path if at == "current" else segments_of(tmp_path)[0], Path.open, [0]

    def rotate_before(self, *arguments, **named):
        if self == chosen and not number[0]:
            before = segments_of(tmp_path)[-1]
            while segments_of(tmp_path)[-1] == before:
                number[0] += 1
                log.record("round", {"round": number[0]})
        return reopened(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", rotate_before)
    assert verify(tmp_path).problems == []
    assert number[0]
    log.close()


def test_a_check_while_a_line_is_half_written_finds_nothing(tmp_path, monkeypatch):
    path, reopened, opened = log_of(tmp_path, 3), Path.open, []
    content = path.read_bytes()
    path.write_bytes(content[:-20])

    def finish_before_the_second(self, *arguments, **named):
        opened.append(self)
        if len(opened) == 2:
            with reopened(path, "ab") as file:
                file.write(content[-20:])
        return reopened(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", finish_before_the_second)
    found = verify(tmp_path)
    assert (found.problems, found.last) == ([], 3)


def test_a_full_file_is_made_durable_by_a_thread_and_before_the_service_stops(tmp_path, monkeypatch):
    real, synced = os.fsync, []

    def fsync(file):
        synced.append((threading.current_thread() is threading.main_thread(), os.fstat(file).st_ino))
        real(file)

    monkeypatch.setattr(audit_log.os, "fsync", fsync)
    log = AuditLog(tmp_path, "cos/cos", 40_000)
    while len(segments_of(tmp_path)) < 2:
        log.record("round", {"run": "mine"})
    log.close()
    files = [path.stat().st_ino for path in (*segments_of(tmp_path), tmp_path / FOLDER / "current.jsonl")]
    assert sorted(synced) == sorted([(False, files[0]), (False, files[1]), (True, files[2])])


def read_so_far():
    """Return how many bytes this process has read."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_little_of_a_long_log_is_read_at_the_start_and_nothing_when_a_file_is_full(tmp_path):
    size = log_of(tmp_path, 4000, most=16 << 20).stat().st_size
    assert size > 600_000
    before = read_so_far()
    log = AuditLog(tmp_path, "cos/cos", 4 * (size + 4000))
    while not segments_of(tmp_path):
        log.record("round", {"run": "mine"})
    log.record("round", {"run": "mine"})
    assert read_so_far() - before < 100_000
    log.close()
    assert verify(tmp_path).problems == []


def test_a_last_line_longer_than_what_is_read_first_is_found_whole(tmp_path):
    log = AuditLog(tmp_path, "cos/cos", 16 << 20)
    log.record("round", {"run": "mine"})
    log.record("no-consent", {"reasons": ["\N{PILE OF POO}" * 500] * 20})
    log.close()
    path = log_of(tmp_path, 1)
    assert len(path.read_bytes().splitlines()[1]) > 100_000
    with path.open("ab") as file:
        file.write(b"x" * 300_000)
    log_of(tmp_path, 1)
    found = verify(tmp_path)
    assert (found.problems, found.last, found.kinds["torn-line"]) == ([], 5, 1)


@pytest.mark.parametrize("function", ["fsync", "rename", "unlink"])
def test_no_record_is_lost_where_a_full_file_cannot_be_closed_or_removed(tmp_path, monkeypatch, function):
    now, calls = [0.0], []
    monkeypatch.setattr(audit_log.time, "monotonic", lambda: now[0])
    log = AuditLog(tmp_path, "cos/cos", 8000)
    with monkeypatch.context() as broken:
        owner = audit_log.os if function == "fsync" else Path
        broken.setattr(owner, function, refuse(OSError(errno.EIO, "Input/output error"), calls))
        for number in range(100):
            log.record("round", {"round": number})
        # Not with every record.
        assert function == "fsync" or len(calls) == 1
    now[0] = 61.0
    log.record("round", {"round": 100})
    log.close()
    assert len(segments_of(tmp_path)) <= 3
    found = verify(tmp_path)
    assert found.problems == []
    assert "records-lost" not in found.kinds
    assert function != "rename" or found.kinds["round"] == 101


def test_what_a_full_disk_kept_out_is_counted_when_there_is_room_again(tmp_path, monkeypatch):
    log = AuditLog(tmp_path, "cos/cos", 1 << 20)
    log.record("round", {"round": 1})
    real, room = os.write, [10]

    def write(file, data):
        # The volume takes a part of the line before it is full.
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken, room[0] = min(room[0], len(data)), 0
        return real(file, data[:taken])

    monkeypatch.setattr(audit_log.os, "write", write)
    log.record("round", {"round": 2})
    log.record("round", {"round": 3})
    monkeypatch.setattr(audit_log.os, "write", real)
    log.record("round", {"round": 4})
    log.close()
    assert verify(tmp_path).problems == []
    records = lines_of(tmp_path / FOLDER / "current.jsonl")
    assert [(one["kind"], one.get("round"), one.get("records")) for one in records] == [
        ("round", 1, None),
        ("records-lost", None, 2),
        ("round", 4, None),
    ]


def test_records_that_were_lost_last_are_counted_when_the_service_stops(tmp_path, monkeypatch):
    log = AuditLog(tmp_path, "cos/cos", 1 << 20)
    log.record("round", {"round": 1})
    with monkeypatch.context() as full:
        full.setattr(audit_log.os, "write", refuse(OSError(errno.ENOSPC, "No space left on device")))
        log.record("round", {"round": 2})
    log.close()
    assert verify(tmp_path).kinds == {"round": 1, "records-lost": 1}


def test_a_line_that_can_be_neither_finished_nor_cut_off_is_cut_off_by_the_next_record(tmp_path, monkeypatch):
    log = AuditLog(tmp_path, "cos/cos", 1 << 20)
    log.record("round", {"round": 1})
    real, taken = os.write, []

    def write(file, data):
        if taken:
            raise OSError(errno.EIO, "Input/output error")
        taken.append(real(file, data[:10]))
        return taken[0]

    with monkeypatch.context() as broken:
        broken.setattr(audit_log.os, "write", write)
        broken.setattr(audit_log.os, "ftruncate", refuse(OSError(errno.EIO, "Input/output error")))
        log.record("round", {"round": 2})
    log.record("round", {"round": 3})
    log.close()
    found = verify(tmp_path)
    assert (found.problems, found.kinds) == ([], {"round": 2, "torn-line": 1, "records-lost": 1})


def test_a_file_that_cannot_be_read_takes_one_descriptor_and_no_more(tmp_path):
    log_of(tmp_path, 20, most=8000)
    # A folder in the place of the newest closed file: opening current.jsonl succeeds, reading on does not.
    (tmp_path / FOLDER / "current.jsonl").unlink()
    (tmp_path / FOLDER / "000000999999.jsonl").mkdir()
    before = len(list(Path("/proc/self/fd").iterdir()))
    log = AuditLog(tmp_path, "cos/cos", 8000)
    for _ in range(10):
        log.record("round", {})
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    (tmp_path / FOLDER / "000000999999.jsonl").rmdir()
    log.record("round", {})
    log.close()
    assert lines_of(tmp_path / FOLDER / "current.jsonl")[0]["records"] == 10


def test_a_process_killed_at_any_moment_leaves_a_log_that_goes_on(tmp_path):
    program = (
        "import sys; from pathlib import Path; from coterie.telemetry.audit_log import AuditLog\n"
        "log = AuditLog(Path(sys.argv[1]), 'cos/cos', 1 << 24)\n"
        "while True: log.record('round', {'run': 'mine'})\n"
    )
    path = tmp_path / FOLDER / "current.jsonl"
    for written in (1, 20_000):
        process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
        before, until = path.stat().st_size if path.exists() else 0, time.monotonic() + 60
        while not path.exists() or path.stat().st_size < before + written:
            assert time.monotonic() < until
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    # As a kill, or a power loss, in the middle of a line leaves it.
    with path.open("ab") as file:
        file.write(b'{"n": 7, "ti')
    log_of(tmp_path, 1, most=1 << 24)
    found = verify(tmp_path)
    assert found.problems == []
    assert found.kinds["torn-line"] == 1
    assert lines_of(path)[-2]["bytes"] == 12


@pytest.fixture
def now(monkeypatch):
    """Return the time of the audit log in a list, to be changed."""
    now = [0.0]
    monkeypatch.setattr(audit_log.time, "monotonic", lambda: now[0])
    return now


def test_refusals_cannot_push_other_records_out(tmp_path, now):
    log = AuditLog(tmp_path, "cos/cos", 1 << 20)
    for _ in range(100):
        log.record("refusal", {"reason": "BAD_TOKEN"})
    log.record("operator", {"command": "start"})
    now[0] = 61.0
    log.record("refusal", {"reason": "BAD_TOKEN"})
    log.close()
    records = lines_of(tmp_path / FOLDER / "current.jsonl")
    assert [one["kind"] for one in records] == ["refusal"] * 10 + ["operator", "refusals-omitted", "refusal"]
    assert records[-2]["refusals"] == 90
    assert "registrations" not in records[-2]


def test_one_peer_s_refusals_do_not_hide_those_of_another_or_for_another_reason(tmp_path, now):
    log = AuditLog(tmp_path, "cos/cos", 1 << 20)
    for _ in range(100):
        log.record("refusal", {"reason": "BAD_TOKEN", "peer": "client/a"})
        log.record("refusal", {"limit": "resets_per_s", "peer": "client/a"})
    log.record("refusal", {"reason": "BAD_TOKEN", "peer": "client/b"})
    log.record("refusal", {"reason": "REVOKED", "peer": "client/a"})
    # Late parties get it in any run.
    log.record("refusal", {"reason": "STALE", "peer": "client/b"})
    log.close()
    records = lines_of(tmp_path / FOLDER / "current.jsonl")
    assert [(one.get("reason"), one.get("peer")) for one in records[20:]] == [
        ("BAD_TOKEN", "client/b"),
        ("REVOKED", "client/a"),
        (None, None),
    ]
    assert records[-1]["refusals"] == 180


def test_many_peers_cannot_push_other_records_out_either(tmp_path, now):
    log = AuditLog(tmp_path, "cos/cos", 1 << 24)
    for number in range(20_000):
        log.record("refusal", {"reason": "BAD_TOKEN", "peer": f"client/{number}"})
    log.record("registration", {"party": "client/late"})
    log.close()
    kinds = verify(tmp_path).kinds
    assert kinds == {"refusal": 300, "registration": 1, "refusals-omitted": 1}


def test_a_party_that_registers_again_and_again_does_not_hide_those_that_register_once(tmp_path, now):
    log = AuditLog(tmp_path, "cos/cos", 1 << 20)
    for _ in range(100):
        log.record("registration", {"party": "client/again"})
    for number in range(1000):
        log.record("registration", {"party": f"client/{number}"})
    now[0] = 61.0
    # Any record tells what was left out before it.
    log.record("round", {"round": 1})
    log.close()
    records = lines_of(tmp_path / FOLDER / "current.jsonl")
    assert len({one["party"] for one in records if one["kind"] == "registration"}) == 1001
    assert [one["kind"] for one in records[1010:]] == ["refusals-omitted", "round"]
    assert (records[-2]["refusals"], records[-2]["registrations"]) == (0, 90)


def test_other_authorities_are_in_the_log_and_why_a_service_ended_is_only_a_kind(tmp_path):
    audit_log.start(tmp_path, "client/host", 1 << 20)
    try:
        audit_log.audited({"event": "took up other authorities", "authorities": 2})
        audit_log.audited(
            {
                "event": "other authorities are not taken up",
                "error": "of no known authority",
                "file": "tls/ca.pem",
            }
        )
        message = "ratings: user 'anna' and item 'Alien' occur together in two rows; expected every pair once"
        audit_log.audited({"event": "cannot go on", "error": "data", "message": message})
    finally:
        audit_log.stop()
    own = [
        {key: value for key, value in one.items() if key not in ("n", "time", "service", "prev")}
        for one in lines_of(tmp_path / FOLDER / "current.jsonl")
    ]
    assert own == [
        {"kind": "authority", "authorities": 2},
        {"kind": "authority", "error": "of no known authority"},
        {"kind": "give-up", "error": "data"},
    ]


def test_messages_of_the_log_are_records_with_the_fields_that_are_listed(tmp_path, capsys):
    before = structlog.get_config()
    audit_log.start(tmp_path, "client/host", 1 << 20)
    try:
        # Whatever is logged, the records are the same.
        logs.configure("error", service="client/host")
        structlog.get_logger("x").info("joined", run="mine", users=3, history=[1, 2])
        structlog.get_logger("x").info("something else", run="mine")
    finally:
        audit_log.stop()
        structlog.configure(**before)
    (record,) = lines_of(tmp_path / FOLDER / "current.jsonl")
    assert (record["kind"], record["run"]) == ("consent", "mine")
    assert "history" not in record
    assert capsys.readouterr().err == ""


def test_every_message_that_is_a_record_is_logged_somewhere_and_every_kind_is_described():
    sources = [*(ROOT / "coterie").rglob("*.py"), *(ROOT / "services").rglob("*.py")]
    text = " ".join(path.read_text() for path in sources if path.name != "audit_log.py")
    assert [message for message in AUDITED if f'"{message}"' not in text] == []
    page = (ROOT / "docs" / "audit-log.md").read_text().partition("| kind | written by |")[2]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)) == KINDS
