"""A service does not start while others can read its stores, histories or keys; it says which file, and what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coterie.config.services import ClientSettings, DataOwnerSettings
from coterie.errors import PreflightError
from coterie.process.private_files import check_private, open_to_others, private_in
from coterie.store.engine import open_sqlite

from ..operators import KEYS

FILES = (
    "client.db",
    "client.db-wal",
    "contributions.bin",
    "transcript.bin",
    "private/p_u.npy",
    "metrics.csv",
    "keys/run.1.key",
    "tls/key.pem",
    "journal.json",
    "tokens.jsonl",
)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    for name in FILES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.chmod(0o600)
    (folder / "account.json").touch()
    (folder / "account.json").chmod(0o644)
    return folder


def test_files_of_the_owner_alone_are_taken(state: Path) -> None:
    check_private(state)
    assert {str(path.relative_to(state)) for path in private_in(state)} == set(FILES)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_file_that_others_can_use_is_refused_with_its_mode_and_the_remedy(
    state: Path, name: str, mode: int
) -> None:
    (state / name).chmod(mode)
    with pytest.raises(PreflightError) as raised:
        check_private(state)
    assert f"{state / name} has mode {mode:04o}, expected 0600" in raised.value.message
    assert f"chmod 600 {state / name}" in raised.value.hint
    (state / name).chmod(0o600)
    check_private(state)


def test_all_files_are_in_the_remedy_and_counted(state: Path) -> None:
    for name in FILES[:3]:
        (state / name).chmod(0o644)
    with pytest.raises(PreflightError, match="and so can they 2 other files") as raised:
        check_private(state)
    assert all(str(state / name) in raised.value.hint for name in FILES[:3])


def test_histories_and_attributes_and_features_that_the_configuration_names_are_checked(
    tmp_path: Path,
) -> None:
    given = {"name": "a", "state": tmp_path, "listen": "127.0.0.1:1", "cos": {"address": "127.0.0.1:1"}}
    histories, attributes, features = (tmp_path / f"{name}.csv" for name in ("h", "a", "f"))
    host = ClientSettings.model_construct(**given, histories=histories, attributes=attributes)
    assert host.private_files() == [histories, attributes]
    assert ClientSettings.model_construct(**given, histories=None, attributes=None).private_files() == []
    owners = [type("Owner", (), {"features": each}) for each in (features, None)]
    assert DataOwnerSettings.model_construct(**given, owners=owners).private_files() == [features]
    histories.touch()
    histories.chmod(0o644)
    with pytest.raises(PreflightError, match=r"h\.csv has mode 0644"):
        check_private(tmp_path / "state", host.private_files())


def test_links_and_files_that_are_gone_are_left_to_whoever_opens_them(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.touch()
    target.chmod(0o644)
    (tmp_path / "client.db").symlink_to(target)
    assert list(private_in(tmp_path)) == []
    assert open_to_others([tmp_path / "gone.csv"]) == []


def test_a_store_is_made_for_its_owner_alone_whatever_the_mask(tmp_path: Path) -> None:
    open_sqlite(tmp_path / "client.db", "client").dispose()
    assert open_to_others(private_in(tmp_path)) == []


CONFIG = """
name = "host-0"
state = "{folder}/state"
listen = "127.0.0.1:0"
histories = "{folder}/histories.csv"
run = "run"
operator_keys = ["{key}"]

[cos]
address = "127.0.0.1:1"
name = "cos"

[thirdparty]
address = "127.0.0.1:1"
name = "directory"
"""


def test_a_host_does_not_start_with_histories_that_others_can_read(tmp_path: Path) -> None:
    config, histories = tmp_path / "config.toml", tmp_path / "histories.csv"
    config.write_text(CONFIG.format(folder=tmp_path, key=KEYS[0]))
    histories.write_text("user,item,positive,time,part\nanna,ant,1,1,0\n")
    histories.chmod(0o644)
    command = [sys.executable, "-m", "coterie", "serve", "client", "--config", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == PreflightError.exit_code, ended.stderr
    assert f"{histories} has mode 0644, expected 0600" in ended.stderr
    assert f"chmod 600 {histories}" in ended.stderr
    assert not list(tmp_path.rglob("*.db"))
    assert "anna" not in ended.stdout + ended.stderr
