"""Machines of a test: network namespaces with an address each, joined by a switch."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from .patience import WAIT_S

ROOT = Path(__file__).parents[2]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Network:
    """Machines with one address each, joined by a switch; nothing else is reached from them."""

    def __init__(self, folder: Path, machines: dict[str, str]) -> None:
        self.folder = folder
        self.machines = machines
        self.names = {machine: f"coterie-{os.getpid()}-{machine}" for machine in ["switch", *machines]}
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self):
        try:
            self.switch()
            for number, (machine, address) in enumerate(self.machines.items()):
                self.connect(machine, address, f"port{number}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def switch(self) -> None:
        ip("netns", "add", self.names["switch"])
        ip("-n", self.names["switch"], "link", "add", "bridge0", "type", "bridge")
        ip("-n", self.names["switch"], "link", "set", "bridge0", "up")

    def connect(self, machine: str, address: str, port: str) -> None:
        name, switch = self.names[machine], self.names["switch"]
        ip("netns", "add", name)
        ip("link", "add", port, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
        ip("-n", name, "addr", "add", f"{address}/8", "dev", "eth0")
        for device in ("eth0", "lo"):
            ip("-n", name, "link", "set", device, "up")
        folder = self.at(machine)
        folder.mkdir()
        (folder / "examples").symlink_to(ROOT / "examples")

    def at(self, machine: str) -> Path:
        """Return the folder in which commands are typed on a machine."""
        return self.folder / machine

    def start(self, machine: str, line: str, log: str = "log", **variables: str) -> subprocess.Popen[bytes]:
        """Type a command on a machine."""
        words = line.split()
        assert words[0] == "coterie"
        plain = {key: value for key, value in os.environ.items() if not key.startswith("COTERIE_")}
        with (self.at(machine) / log).open("ab") as out:
            process = subprocess.Popen(
                [
                    *("nsenter", f"--net=/run/netns/{self.names[machine]}"),
                    *(sys.executable, "-P", "-m", "coterie", *words[1:]),
                ],
                cwd=self.at(machine),
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                env=plain | {f"COTERIE_{key}": value for key, value in variables.items()},
            )
        self.processes.append(process)
        return process

    def type(self, machine: str, line: str, **variables: str) -> str:
        """Type a command on a machine, wait for its end, and return what it printed."""
        log = f"out-{len(self.processes)}"
        status = self.start(machine, line, log, **variables).wait(2 * WAIT_S)
        said = (self.at(machine) / log).read_text()
        assert status == 0, f"{line}\n{said}"
        return said

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            process.kill()
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def may_make_networks() -> bool:
    if not all(map(shutil.which, ("ip", "nsenter"))):
        return False
    name = f"coterie-{os.getpid()}-trial"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode == 0
    enters = ["nsenter", f"--net=/run/netns/{name}", "true"]
    works = made and subprocess.run(enters, check=False, capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return works
