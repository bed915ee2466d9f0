"""`--watch` and `--page` of commands: what a page may cost, what is refused, and what it never shows."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import invoke
from coterie.config.run import RunSettings
from coterie.privacy.visibility import matrix
from coterie.studies import experiment
from coterie.studies.run_data import load
from coterie.systems.registry import systems
from coterie.web.board import Board
from coterie.web.live_run import LiveRun

RUN = """
system = "fedncf"
output = "runs"
reference = false
[data.synthetic]
users = 60
items = 40
interactions = 700
[rounds]
passes = 1
cohort = 60
group = 60
[federation]
hosts = 3
"""
WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"starlette", "uvicorn"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from coterie.cli.main import invoke
sys.exit(invoke(sys.argv[1:]))
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def test_without_the_packages_of_pages_a_run_goes_on_without_its_page(file: Path) -> None:
    words = ["run", str(file), "--in-process", "--watch", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"]
    assert "warning: no live page: a page needs the package starlette" in done.stderr
    assert "pip install 'coterie[web]'" in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('listen = "0.0.0.0:0"', "opens the page to other machines, which takes TLS and passwords"),
        ('listen = "8080"', "listen"),
        ('key_file = "key.pem"', "go together"),
        ('passwords_file = "nothing"', "cannot read the password file"),  # pragma: allowlist secret
        ('certificate_file = "a.pem"\nkey_file = "b.pem"', "cannot be used"),
        ('password = "x"', "passwords_file"),
    ],
)
def test_a_page_that_cannot_be_served_as_asked_is_refused_before_the_run(
    file: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    page = file.parent / "page.toml"
    page.write_text(text)
    assert invoke(["run", str(file), "--in-process", "--page", str(page)]) == 10
    assert words in capsys.readouterr().err
    assert not (file.parent / "runs").exists()


def test_an_address_in_use_is_refused_before_the_run(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        page = file.parent / "page.toml"
        page.write_text(f'listen = "127.0.0.1:{taken.getsockname()[1]}"')
        assert invoke(["run", str(file), "--in-process", "--page", str(page)]) == 11
    assert "cannot listen on" in capsys.readouterr().err
    assert not (file.parent / "runs").exists()


def test_a_password_is_kept_as_a_hash_and_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    from coterie.web.passwords import PasswordFile

    path = tmp_path / "passwords"
    for name, password in (
        ("ada", "the first password"),
        ("bob", "another password"),
        ("ada", "the second password"),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO(password + "\n"))
        assert invoke(["certs", "password", str(path), name]) == 0
    known = PasswordFile(path)
    assert known.matches("ada", "the second password")
    assert not known.matches("ada", "the first password")
    assert known.matches("bob", "another password")
    assert path.stat().st_mode & 0o777 == 0o600
    assert "password" not in path.read_text()
    monkeypatch.setattr(sys, "stdin", io.StringIO("short\n"))
    assert invoke(["certs", "password", str(path), "eve"]) == 10
    assert "expected at least 12" in capsys.readouterr().err


class Recorded(Board):
    """A board that remembers everything that it was ever told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def put(self, name: str, value: Any) -> None:
        self.told.append(json.dumps(value))
        super().put(name, value)


def test_the_page_of_a_run_names_no_user_and_no_item(file: Path) -> None:
    settings = RunSettings.model_validate({**_values(), "output": str(file.parent / "runs")})
    dataset = load(settings)
    board = Recorded()
    live = LiveRun(board, settings, "run-1", "example")
    report, folder = asyncio.run(
        experiment.run(settings, "run-1", live.update, None, stage=live.stage, dataset=dataset)
    )
    live.ended(report, str(folder / "report.html"))
    told = "\n".join(board.told)
    assert "hit_ratio@10" in told
    for names in (dataset.users, dataset.items):
        assert len(names) >= 40
        assert [name for name in names if f'"{name}"' in told or f" {name} " in told] == []


def _values() -> dict[str, Any]:
    import tomllib

    return tomllib.loads(RUN)


def test_everything_that_a_page_is_made_of_may_be_seen_by_operators() -> None:
    # Events and states are `run_state`, the settings are the plan's, curves are averages over everybody.
    for system in systems().values():
        for form in system.forms:
            for secure_sum in system.sums:
                declared = matrix(system.declared(form, secure_sum))["operator"]
                for kind in ("run_state", "plan", "metric_mean"):
                    assert declared[kind].allowed, (system.name, kind)
