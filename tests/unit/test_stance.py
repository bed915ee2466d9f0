"""What a person chooses beside the consent: kept in a file, never more than the consent, leaving for good."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from coterie_client.choice import Choice

from coterie.cli.main import invoke
from coterie.errors import ConfigError, DataError
from coterie.rounds.stance import STANCE, Stance, changed_stance, read_stance


def test_without_a_file_nothing_was_chosen(tmp_path: Path) -> None:
    assert read_stance(tmp_path) == Stance()
    assert Stance().objections(10_000) == []
    assert not list(tmp_path.iterdir())


def test_choices_are_kept_and_changed_one_by_one(tmp_path: Path) -> None:
    changed_stance(tmp_path, rounds_per_day=3)
    assert changed_stance(tmp_path, paused=True) == Stance(paused=True, rounds_per_day=3)
    assert read_stance(tmp_path).objections(0) == ["the user has paused"]
    again = changed_stance(tmp_path, paused=False)
    assert again.objections(2) == []
    assert again.objections(3) == ["a user has been in 3 rounds today; the user's own limit is 3"]
    assert (tmp_path / STANCE).stat().st_mode & 0o077 == 0


def test_changes_of_two_processes_at_once_are_all_kept(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from coterie.rounds.stance import changed_stance\n"
        "for turn in range(200): changed_stance(Path(sys.argv[1]), paused=turn % 2 == 0)"
    )
    other = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    limits = []
    for number in range(1, 201):
        changed_stance(tmp_path, rounds_per_day=number)
        limits.append(read_stance(tmp_path).rounds_per_day)
    changed_stance(tmp_path, left=True, forget=True)
    assert other.wait(120) == 0
    assert limits == list(range(1, 201))
    assert read_stance(tmp_path) == Stance(left=True, forget=True, rounds_per_day=200)


def test_leaving_is_for_good(tmp_path: Path) -> None:
    changed_stance(tmp_path, left=True, forget=True)
    with pytest.raises(ConfigError, match="has left the run, for good"):
        changed_stance(tmp_path, left=False)
    assert changed_stance(tmp_path, paused=False).objections(0) == ["the user has left the run"]


@pytest.mark.parametrize("value", [-1, 100_001, 2.0, True, "3"])
def test_a_limit_that_is_no_number_of_rounds_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(ConfigError, match="rounds a day"):
        changed_stance(tmp_path, rounds_per_day=value)
    assert read_stance(tmp_path) == Stance()


def test_nothing_is_forgotten_that_would_be_published_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="published again"):
        changed_stance(tmp_path, forget=True)


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", '{"paused": 1}', '{"left": null}', '{"left": []}', '{"paused": true, "more": 2}'),
        *('{"forget": true}', '{"rounds_per_day": -1}'),
    ],
)
def test_a_damaged_file_is_no_leave_to_take_part(tmp_path: Path, content: str) -> None:
    (tmp_path / STANCE).write_text(content)
    with pytest.raises(DataError, match="is damaged"):
        read_stance(tmp_path)
    with pytest.raises(DataError, match="is damaged"):
        changed_stance(tmp_path, paused=True)


def test_a_damaged_file_is_said_once_and_again_when_it_is_mended(tmp_path: Path) -> None:
    choice = Choice(tmp_path)
    with structlog.testing.capture_logs() as said:
        (tmp_path / STANCE).write_text("{")
        for _ in range(3):
            assert choice.objections()
        (tmp_path / STANCE).unlink()
        assert choice.objections() == []
    events = [line["event"] for line in said]
    assert events == ["takes part in nothing", "knows again what the person has chosen"]


CONFIG = """
name = "here"
state = "state"
listen = "127.0.0.1:1"
run = "r"
cos = {address = "127.0.0.1:1", name = "cos"}
thirdparty = {address = "127.0.0.1:1", name = "directory"}
operator_keys = ["%s"]
"""


def test_the_command_shows_and_changes_the_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "config.toml").write_text(CONFIG % ("a" * 64))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)

    def said(*options: str, status: int = 0) -> dict[str, object]:
        command = ["participate", "--config", str(tmp_path / "config.toml"), "--json", *options]
        assert invoke(command) == status
        found: dict[str, object] = json.loads(capsys.readouterr().out)
        return found

    assert said()["result"] == {"paused": False, "left": False, "rounds_per_day": 0, "forget": False}
    said("--pause", "--rounds-per-day", "4")
    assert read_stance(tmp_path / "state") == Stance(paused=True, rounds_per_day=4)
    said("--pause", "--resume", status=10)
    said("--rounds-per-day", "-3", status=10)
    said("--yes", status=10)
    said("--leave", "--pause", status=10)
    said("--resume", "--rounds-per-day", "0")
    # The first step tells only.
    assert said("--leave")["result"] == {"paused": False, "left": False, "rounds_per_day": 0, "forget": False}
    said("--leave", "--yes")
    assert read_stance(tmp_path / "state") == Stance(left=True, forget=True)
    said("--resume")
    assert read_stance(tmp_path / "state").left
