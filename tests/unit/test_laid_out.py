"""The list of a federation's processes, by which an interrupted run is taken up."""

import socket
from pathlib import Path

import pytest

from coterie.errors import PreflightError, RunError
from coterie.launch.children import Child, free_port
from coterie.launch.laid_out import LaidOut, clear_away, configured_address, laid_out_in, require_free


def made(folder: Path) -> LaidOut:
    """Lay out two processes in a folder."""
    children = (
        Child("thirdparty", "directory", folder / "thirdparty"),
        Child("client", "host-0", folder / "host-0"),
    )
    for child in children:
        child.configure({"listen": f"127.0.0.1:{free_port()}"})
    found = LaidOut(children, 2, 7)
    found.write(folder)
    return found


def test_a_federation_is_read_as_it_was_laid_out(tmp_path: Path) -> None:
    assert laid_out_in(tmp_path) is None
    assert laid_out_in(tmp_path / "none") is None
    assert made(tmp_path) == laid_out_in(tmp_path)


def test_a_federation_that_was_moved_or_whose_list_is_damaged_is_refused(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    made(here)
    here.rename(there)
    with pytest.raises(RunError, match=f"was moved: thirdparty/directory keeps its state in {here}"):
        laid_out_in(there)
    for content in ("{", "[]", '{"parties": [{"role": 1}]}'):
        (there / "federation.json").write_text(content)
        with pytest.raises(RunError, match="cannot be read"):
            laid_out_in(there)


def test_a_port_that_another_process_has_is_named(tmp_path: Path) -> None:
    found = made(tmp_path)
    require_free(found.children)
    host, _, port = configured_address(found.children[1]).rpartition(":")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((host, int(port)))
        other.listen()
        with pytest.raises(PreflightError, match=f"port {port} of client/host-0 cannot be used"):
            require_free(found.children)
    with pytest.raises(RunError, match="does not say where client/host-0 listens: no key 'enrol_listen'"):
        configured_address(found.children[1], "enrol_listen")


def test_what_parties_left_is_cleared_away_and_nothing_else(tmp_path: Path) -> None:
    made(tmp_path)
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (tmp_path / "host-1").symlink_to(outside)
    for name in ("shop.csv", "settings.json", "run.json"):
        (tmp_path / name).write_text("mine")
    clear_away(tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "host-1",
        "run.json",
        "settings.json",
        "shop.csv",
    ]
    assert outside.is_dir()
