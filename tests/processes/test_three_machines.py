"""The tutorial of three machines, word for word: each machine is a network namespace with the address of the page."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .networks import Network, may_make_networks
from .patience import PAUSE_S, WAIT_S
from .test_tutorial import stems

PAGE = (Path(__file__).parents[2] / "docs" / "three-machines.md").read_text(encoding="utf-8")
MACHINES = {"first": "10.0.0.1", "second": "10.0.0.2", "third": "10.0.0.3"}
SCP = """#!/bin/sh
# Copies a folder to another machine, as the scp of the page does.
exec cp -r "$2" "$MACHINES/${3%:}/"
"""


def steps() -> Iterator[tuple[str, str, str]]:
    """Yield the machine, the commands and the output shown for them, after the installation."""
    part = PAGE.partition("## 2. ")[2]
    text = part.replace("\n", " ")
    for found in re.finditer(
        r"```sh\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", part, re.MULTILINE | re.DOTALL
    ):
        said = re.findall(r"[Oo]n the (first|second|third) machine", text[: found.start()])
        yield said[-1], found[1], found[2] or ""


def words(output: str) -> list[str]:
    """Return what stands in each line before its first digit, and before keys and fingerprints."""
    return stems(re.sub(r"[0-9a-f]{64}|[0-9a-f]{8}\.\.\.[0-9a-f]{8}", "0", output))


class Terminals:
    """A terminal at each machine, in which the commands of the page are typed."""

    def __init__(self, network: Network, programs: Path) -> None:
        self.network = network
        programs.mkdir()
        (programs / "scp").write_text(SCP)
        (programs / "scp").chmod(0o755)
        places = programs / "machines"
        places.mkdir()
        for machine, address in MACHINES.items():
            (places / address).symlink_to(network.at(machine))
        plain = {key: one for key, one in os.environ.items() if not key.startswith(("COTERIE_", "COLUMNS"))}
        path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = plain | {"PATH": path, "MACHINES": str(places)}

    def type(self, machine: str, commands: str) -> str:
        """Return what commands print; what they leave running stays."""
        out = self.network.at(machine) / "terminal"
        with out.open("wb") as printed:
            done = subprocess.run(
                ["nsenter", f"--net=/run/netns/{self.network.names[machine]}", "bash", "-euc", commands],
                cwd=self.network.at(machine),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                timeout=3 * WAIT_S,
                check=False,
            )
        said = out.read_text()
        assert done.returncode == 0, f"{commands}\n{said}\n{self.logs(machine)}"
        return said

    def logs(self, machine: str) -> str:
        """Return the ends of the logs of a machine's services."""
        return "\n".join(log.read_text()[-2000:] for log in self.network.at(machine).glob("*.log"))

    def close(self) -> None:
        """End all services, as at a shutdown."""
        for machine in MACHINES:
            name = self.network.names[machine]
            deadline = time.monotonic() + 15
            while running := self.running(name):
                for process in running:
                    late = time.monotonic() > deadline
                    os.kill(process, signal.SIGKILL if late else signal.SIGTERM)
                time.sleep(PAUSE_S)

    @staticmethod
    def running(name: str) -> list[int]:
        """Return the ids of the processes of a network namespace."""
        listed = subprocess.run(["ip", "netns", "pids", name], check=True, capture_output=True, text=True)
        return [int(one) for one in listed.stdout.split()]


def test_every_command_of_the_page_has_a_machine() -> None:
    machines = [machine for machine, _, _ in steps()]
    assert machines == ["first", "first", "first", "first", "second", "third", "first", "first", "second"]


@pytest.mark.long
@pytest.mark.xdist_group("networks")
def test_the_commands_of_the_page_print_what_it_shows(tmp_path: Path) -> None:
    if not may_make_networks():
        pytest.skip("takes network namespaces, which need root")
    (run,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    folder = tmp_path / "machines"
    folder.mkdir()
    with Network(folder, MACHINES) as network:
        (network.at("first") / "three.toml").write_text(run)
        terminals = Terminals(network, tmp_path / "programs")
        try:
            fingerprint = ""
            for machine, commands, shown in steps():
                printed = terminals.type(machine, commands.replace("FINGERPRINT", fingerprint))
                if found := re.search(r"fingerprint +([0-9a-f]{64})", printed):
                    fingerprint = found[1]
                missing = [stem for stem in words(shown) if stem not in set(words(printed))]
                assert missing == [], f"{commands}\n{printed}"
            # Ratings of the second machine's users are on that machine only.
            kept = (network.at("second") / "host-1" / "histories.csv").read_bytes()
            for machine in ("first", "third"):
                others = [path for path in network.at(machine).rglob("*") if path.is_file()]
                assert all(path.read_bytes() != kept for path in others)
        finally:
            terminals.close()
            shutil.rmtree(tmp_path / "programs")
