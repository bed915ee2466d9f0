"""A federation across machines, each a folder and an address of its own: laid out, joined by invitations, operated."""

import asyncio
import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import invoke
from coterie.config.load import load
from coterie.config.operate import OperateSettings
from coterie.config.run import RunSettings
from coterie.launch.bootstrap import bootstrap
from coterie.launch.children import Child, free_port
from coterie.launch.operation import operate
from coterie.launch.order import Order

from .patience import PAUSE_S, WAIT_S

ROLES = {
    "thirdparty": "thirdparty",
    "cos": "cos",
    "owner": "data-owner",
    "host": "client",
    "key": "decrypting-client",
}


class Machines:
    """Parties of one run; ``prepared`` is the machine of the authority, every other folder one of a party.

    Parameters
    ----------
    settings : RunSettings
    folder : Path
    names : list of str
        Folders of the parties beside the third party and the operator, as bootstrap names them.
    hosts : dict
        Address of a party where it is not ``127.0.0.1``; an IPv6 one in brackets.
    invitations : bool
        Whether parties join by invitations; otherwise each gets its folder whole.
    """

    def __init__(
        self,
        settings: RunSettings,
        folder: Path,
        names: list[str],
        *,
        hosts: dict[str, str] | None = None,
        invitations: bool = True,
    ) -> None:
        self.folder = folder
        self.prepared = folder / "prepared"
        hosts = hosts or {}
        self.addresses = {
            name: f"{hosts.get('thirdparty' if name == 'enrol' else name, '127.0.0.1')}:{free_port()}"
            for name in ("thirdparty", "enrol", *names)
        }
        self.order: Order = bootstrap(
            settings, self.prepared, "test", addresses=self.addresses, invitations=invitations
        )
        self.invitations = invitations
        self.children: dict[str, Child] = {}
        self.outputs: dict[str, Any] = {}
        self.add("thirdparty", self.prepared / "thirdparty")
        self.names = names

    def add(self, name: str, folder: Path) -> Child:
        """Take up a party whose folder has a configuration."""
        role = ROLES[name.partition("-")[0]]
        config = (folder / "config.toml").read_text().splitlines()
        named = json.loads(next(line for line in config if line.startswith("name = ")).partition(" = ")[2])
        child = self.children[name] = Child(role, named, folder)
        return child

    def start(self, name: str, *sets: str) -> None:
        """Start a party at its address."""
        own = [f"listen={self.addresses[name]}", f"metrics=127.0.0.1:{free_port()}"]
        if name == "thirdparty":
            own.append(f"enrol_listen={self.addresses['enrol']}")
        self.children[name].start(*own, *sets)

    def take(self, name: str) -> Path:
        """Bring a party what was prepared for it, and let it join; return its folder."""
        sent = self.folder / "sent" / name
        shutil.copytree(self.prepared / name, sent)
        if not self.invitations:
            return sent
        folder = self.folder / "machines" / name
        assert invoke(["enrol", str(sent / "invitation"), "--into", str(folder)]) == 0
        return folder

    def join(self, *late: str) -> None:
        """Start the third party, let everybody join, and start all but who comes late."""
        self.start("thirdparty")
        for name in self.names:
            self.add(name, self.take(name))
        for name in self.names:
            if name not in late:
                self.start(name)
        self.operator = self.take("operator")

    def move(self, host: str, *late: str) -> list[str]:
        """End every process as a crash would, and start all but who comes late at other addresses.

        Returns
        -------
        list of str
            What everybody has to be told.
        """
        for child in self.children.values():
            child.kill()
        self.addresses = {name: f"{host}:{free_port()}" for name in self.addresses}
        told = [f"{peer}.address={self.addresses[peer]}" for peer in ("thirdparty", "enrol", "cos")]
        for name in self.children:
            if name not in late:
                self.start(name, *self.told(name, told))
        return told

    def told(self, name: str, peers: list[str]) -> list[str]:
        """Return what a party is told of the new addresses of its peers."""
        mine = [one for one in peers if not (name == "thirdparty" or one.startswith(f"{name}."))]
        return [*mine, f"advertise={self.addresses[name]}"] if name.startswith("owner") else mine

    async def logs(self, name: str, event: str) -> None:
        """Wait until a party has logged an event."""
        log = self.children[name].log
        try:
            async with asyncio.timeout(WAIT_S):
                while not (log.exists() and f'"event": "{event}"' in log.read_text()):
                    await asyncio.sleep(PAUSE_S)
        except TimeoutError:
            pytest.fail(
                f"{name} has not logged {event!r} within {WAIT_S} s: {self.children[name].last_words()}"
            )

    async def operate(self, *sets: str) -> dict[str, Any]:
        """Carry out the order, and return the report."""
        config = self.operator / "config.toml"
        settings = load(OperateSettings, config, sets=sets, environ={}, relative_to=config.parent).settings
        return await operate(settings, Order.load(settings.order), lambda event: None)

    async def stop(self) -> None:
        """Stop every process, the third party last."""
        for name in [*self.names, "thirdparty"]:
            if name in self.children:
                with contextlib.suppress(ProcessLookupError):
                    await self.children[name].stop()

    def run(self) -> dict[str, Any]:
        """Join, carry out the order, stop; return the report."""

        async def carried_out() -> dict[str, Any]:
            try:
                return await self.operate()
            finally:
                await self.stop()

        try:
            self.join()
        except BaseException:
            asyncio.run(self.stop())
            raise
        return asyncio.run(carried_out())
