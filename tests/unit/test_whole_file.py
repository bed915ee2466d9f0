"""Files that a killed process leaves readable."""

from pathlib import Path

import pytest

from coterie.data.whole_file import cut_to_whole_lines, whole_file, whole_lines


def test_a_file_takes_its_place_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with whole_file(path) as beside:
        beside.write_text("one")
        assert not path.exists()
    with pytest.raises(UnicodeEncodeError), whole_file(path) as beside:
        beside.write_text("two \ud800")
    assert path.read_text() == "one"
    assert [one.name for one in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    ("content", "whole"),
    [("a,b\n1,2\n", "a,b\n1,2\n"), ("a,b\n1,2\n3", "a,b\n1,2\n"), ("a,", ""), ("", "")],
)
def test_what_a_killed_writer_left_of_a_line_is_dropped(tmp_path: Path, content: str, whole: str) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(content)
    assert whole_lines(path) == whole
    assert path.read_text() == content
    cut_to_whole_lines(path)
    assert path.read_text() == whole


def test_a_torn_character_is_dropped_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes("a\nü".encode()[:-1])
    assert whole_lines(path) == "a\n"


def test_a_missing_file_stays_missing(tmp_path: Path) -> None:
    cut_to_whole_lines(tmp_path / "none")
    assert not list(tmp_path.iterdir())
