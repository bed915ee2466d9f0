"""`tests.spent`: what each test takes of processors, with the processes that it starts."""

import json
import subprocess
import sys
from pathlib import Path

from .. import spent

ROOT = Path(__file__).parents[2]
BURN = "import time\nwhile time.process_time() < {0}: pass\nprint('burnt', flush=True)\ninput()"


def test_what_processes_of_a_test_take_is_counted_while_they_run_and_after_they_ended(tmp_path):
    def burning(seconds):
        process = subprocess.Popen(
            [sys.executable, "-c", BURN.format(seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout.readline() == b"burnt\n"
        return process

    before = spent.processor_s()
    running = burning(0.3)
    meanwhile = spent.processor_s()
    assert meanwhile - before > 0.25
    running.communicate(b"\n")
    assert spent.processor_s() >= meanwhile - 0.02, "in hundredths of a second"
    # A process below another one.
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN.format(0.3)!r}])"
    before = spent.processor_s()
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout.readline() == b"burnt\n"
    assert spent.processor_s() - before > 0.25
    parent.communicate(b"\n")


def test_tests_in_several_workers_are_kept_and_told_by_folder_and_by_file(tmp_path):
    for name, count in (("a", 1), ("b", 3)):
        tests = [f"def test_{number}():\n    pass\n" for number in range(count)]
        (tmp_path / f"test_{name}.py").write_text("".join(tests))
    kept = tmp_path / "kept"
    options = ["-q", "-n", "2", "-p", "tests.spent", f"--spent={kept}", "-p", "no:cacheprovider"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--rootdir={tmp_path}", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    lines = [json.loads(line) for file in kept.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert len(lines) == 4
    assert all(clock_s >= 0 and processor_s >= 0 for _, clock_s, processor_s in lines)
    _, by_file = spent.read([kept])
    assert {file: took.tests for file, took in by_file.items()} == {"test_a.py": 1, "test_b.py": 3}
    _, folder, _, *files = spent.table([kept], 1).splitlines()
    assert folder.split()[2:] == ["4"], "all files lie in the same"
    assert [line.split()[2:] for line in files] in ([["1", "test_a.py"]], [["3", "test_b.py"]])


def test_a_folder_without_tests_is_an_empty_table(tmp_path):
    assert spent.table([tmp_path], 5).split() == ["CPU", "s", "clock", "s", "tests"]
