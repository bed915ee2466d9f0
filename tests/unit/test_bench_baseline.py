"""`python -m bench --baseline FILE`: what moved since an earlier run; classes of processors and their targets."""

import json
import sys

import pytest

from bench.__main__ import _table, main
from bench.baseline import moved, read
from bench.rows import Row, machine
from bench.targets import CLASSES, processor_class, target


def written(tmp_path, *rows):
    path = tmp_path / "before.json"
    path.write_text(json.dumps({"machine": machine(), "rows": [vars(row) for row in rows]}))
    return path


def test_rows_that_moved_come_first_by_how_much(tmp_path):
    before = read(
        written(
            tmp_path,
            Row("steady", 1.0, 2.0, "ms", 2.0),
            Row("slower", 1.0, 4.0, "ms", 4.0),
            Row("larger", 100.0, None, "kB", None),
            Row("gone", 1.0, None, "ms", None),
            Row("none", 0.0, None, "ms", None),
        )
    )
    now = [
        # Twice the time at the same ratio is another machine, not another implementation.
        Row("steady", 2.0, 4.1, "ms", 2.05),
        Row("slower", 2.0, 4.0, "ms", 2.0),
        Row("larger", 120.0, None, "kB", None),
        Row("none", 3.0, None, "ms", None),
        Row("new", 1.0, None, "ms", None),
    ]
    found = moved(now, before)
    assert [(one.name, one.what, one.before, one.now) for one in found] == [
        ("slower", "ratio", 4.0, 2.0),
        ("larger", "kB", 100.0, 120.0),
    ]
    assert found[0].change == -0.5


def test_the_command_says_what_moved(tmp_path, monkeypatch, capsys):
    first = tmp_path / "first.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "sealed", "--smallest", "--json", str(first)])
    assert main() == 0
    content = json.loads(first.read_text())
    for row in content["rows"]:
        row["ours"] *= 1000
        row["ratio"] = row["ratio"] and row["ratio"] * 1000
    content["machine"]["class"] = "arm64" if machine()["class"] != "arm64" else "avx2"
    content["rows"].append(content["rows"][0] | {"name": "sealed.of.another.day"})
    first.write_text(json.dumps(content))
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "sealed", "--smallest", "--baseline", str(first)])
    assert main() == 0
    told = capsys.readouterr().out
    assert f"now {machine()['class']}" in told
    rows = len(content["rows"]) - 1
    assert f"{rows} of {rows} rows moved by a tenth or more; 0 are new" in told
    assert "(-100%)" in told


@pytest.mark.parametrize(
    "content", [None, "", "[]", "{}", '{"rows": []}', '{"machine": {}, "rows": [{"name": "x"}]}']
)
def test_a_file_that_is_no_baseline_is_refused(content, tmp_path, monkeypatch, capsys):
    path = tmp_path / "before.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "sealed", "--smallest", "--baseline", str(path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "architecture", "kind"),
    [
        ("sse4_2 avx2 vaes avx512f avx512bw", "x86_64", "avx512"),
        ("sse4_2 avx2 vaes avx512f", "x86_64", "avx2-vaes"),
        ("avx2 vaes", "x86_64", "avx2-vaes"),
        ("avx2 avx512f avx512bw", "x86_64", "avx2"),
        ("sse4_2", "x86_64", "other"),
        ("aes", "aarch64", "arm64"),
        ("avx2", "riscv64", "other"),
    ],
)
def test_a_processor_has_one_class(flags, architecture, kind):
    assert processor_class(frozenset(flags.split()), architecture) == kind
    assert kind in CLASSES


def test_the_table_says_whether_a_target_is_reached(monkeypatch):
    monkeypatch.setattr("bench.__main__.machine", lambda: {"class": "avx2"})
    aim = target("masked.mask.1m", "avx2")
    rows = [
        Row("masked.mask.1m", 1.0, 2.0, "ns", aim),
        Row("masked.mask.1m", 1.0, 2.0, "ns", aim - 0.1),
        Row("masked.mask.1m", 1.0, None, "ns", None),
        Row("another", 1.0, 2.0, "ns", 2.0),
    ]
    table = _table(rows)
    (column,) = [one for one in table.columns if one.header == "target"]
    assert list(column.cells) == [f"{aim:g}, reached", f"{aim:g}, missed", f"{aim:g}", ""]


def test_a_suite_whose_package_is_missing_keeps_no_other_from_running(monkeypatch, capsys):
    monkeypatch.setattr("bench.__main__.SUITES", {"local_step": "local_step:rows", "sealed": "sealed:rows"})
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "argv", ["bench", "--smallest"])
    assert main() == 0
    told = capsys.readouterr()
    assert "local_step is left out: torch is not installed" in told.err
    assert "sealed" in told.out
    monkeypatch.setattr(sys, "argv", ["bench", "--smallest", "--only", "local_step"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "the benchmark local_step needs torch" in capsys.readouterr().err
