"""The files by which systemd and cron wake a person's device (deploy/device)."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.cli.main import app
from coterie.errors import PeerError
from coterie.process.wake import InVainError

FOLDER = Path(__file__).parents[2] / "deploy" / "device"
COMMAND = "/opt/coterie/bin/coterie"


def unit(name: str) -> configparser.ConfigParser:
    found = configparser.ConfigParser(strict=True, interpolation=None)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read_string((FOLDER / name).read_text())
    return found


def test_the_service_is_one_wake_and_knows_which_statuses_are_no_failure() -> None:
    service = unit("coterie-device.service")["Service"]
    assert service["Type"] == "oneshot"
    assert {int(status) for status in service["SuccessExitStatus"].split()} == {
        PeerError.exit_code,
        InVainError.exit_code,
    }
    assert service["TimeoutStartSec"] == "infinity"
    assert unit("coterie-device.timer")["Timer"]["OnUnitInactiveSec"] == "5min"


def _crontab() -> str:
    (line,) = [
        text
        for text in (FOLDER / "coterie-device.cron").read_text().splitlines()
        if text[:1] not in ("#", "")
    ]
    return line


@pytest.mark.parametrize("kind", ["systemd", "cron"])
def test_the_command_is_one_that_there_is(kind: str) -> None:
    if kind == "systemd":
        words = shlex.split(unit("coterie-device.service")["Service"]["ExecStart"])
    else:
        words = shlex.split(_crontab().partition(">>")[0])[6:]
        assert words[:3] == ["flock", "-n", "/var/lib/coterie/.wake"]
        words = words[3:]
    assert words[0] == COMMAND
    done = CliRunner().invoke(app, [*words[1:], "--set", "listen=nonsense"])
    # The command line is right; the configuration that it names is not here.
    assert done.exit_code != 2
    assert "/etc/coterie/client.toml" in str(done.exception)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="this machine has no systemd")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for path in FOLDER.glob("coterie-device.[st]*"):
        # Coterie is not installed there on this machine.
        (tmp_path / path.name).write_text(path.read_text().replace(COMMAND, "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *tmp_path.glob("*")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if "coterie-device" in line]
    assert (done.returncode, said) == (0, []), done.stderr
