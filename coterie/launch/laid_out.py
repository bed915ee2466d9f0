"""List of the processes of a federation in a folder, by which an interrupted run is taken up.

It is written last while a federation is laid out: with it every party's files are complete.
"""

from __future__ import annotations

import json
import shutil
import socket
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coterie.data.whole_file import whole_file
from coterie.errors import PreflightError, RunError
from coterie.launch.children import Child

__all__ = ["LaidOut", "clear_away", "configured_address", "laid_out_in", "require_free"]

_LIST = "federation.json"
_PARTIES = ("thirdparty", "cos", "operator", "owner-*", "host-*", "key-*")
"""Folders of parties in the folder of a federation."""


@dataclass(frozen=True)
class LaidOut:
    """A federation whose files are complete.

    Attributes
    ----------
    children : tuple of Child
        Its processes, none of them started.
    owners, users : int
        Data owners and users that the server waits for.
    """

    children: tuple[Child, ...]
    owners: int
    users: int

    def write(self, folder: Path) -> None:
        """Write the list into the folder of the federation."""
        parties = [
            {"role": one.role, "name": one.name, "folder": str(one.folder.relative_to(folder))}
            for one in self.children
        ]
        with whole_file(folder / _LIST) as beside:
            beside.write_text(
                json.dumps({"owners": self.owners, "users": self.users, "parties": parties}, indent=1)
            )


def laid_out_in(folder: Path) -> LaidOut | None:
    """Return the federation of a folder; None where it was not laid out to the end.

    Raises
    ------
    RunError
        The list is damaged, or the folder was moved: the parties' files name each other with their whole paths.
    """
    path = folder / _LIST
    try:
        content = json.loads(path.read_bytes())
        children = tuple(
            Child(str(one["role"]), str(one["name"]), folder / str(one["folder"]))
            for one in content["parties"]
        )
        found = LaidOut(children, int(content["owners"]), int(content["users"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    for child in children:
        if (state := _setting(child, "state")) != str(child.state):
            raise RunError(
                f"the run was moved: {child.party} keeps its state in {state}",
                hint=f"move the folder back, or run it anew; it lies in {folder} now",
            )
    return found


def require_free(children: Sequence[Child]) -> None:
    """Check that the ports of a federation are free.

    Raises
    ------
    PreflightError
        Another process listens on a port.
    """
    for child in children:
        for key in ("listen", "enrol_listen"):
            address = _setting(child, key)
            if address is None:
                continue
            host, _, port = address.rpartition(":")
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, int(port)))
                    probe.listen()
                except OSError as error:
                    raise PreflightError(
                        f"port {port} of {child.party} cannot be used: {error.strerror}",
                        hint="parties of this run know each other by their ports: end the process that has it",
                    ) from error


def configured_address(child: Child, key: str = "listen") -> str:
    """Return an address on which a process is configured to listen.

    Raises
    ------
    RunError
        The configuration does not say.
    """
    found = _setting(child, key)
    if found is None:
        raise RunError(
            f"{child.folder / 'config.toml'} does not say where {child.party} listens: no key {key!r}"
        )
    return found


def clear_away(folder: Path) -> None:
    """Remove what the parties of a federation left in its folder, so that it can be laid out anew."""
    (folder / _LIST).unlink(missing_ok=True)
    for pattern in _PARTIES:
        for one in folder.glob(pattern):
            if one.is_dir() and not one.is_symlink():
                shutil.rmtree(one)


def _setting(child: Child, key: str) -> str | None:
    path = child.folder / "config.toml"
    try:
        found = tomllib.loads(path.read_text()).get(key)
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    return None if found is None else str(found)
