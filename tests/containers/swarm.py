"""A swarm of several engines on this machine, each in a network of its own, that leaves nothing behind."""

import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .engine import eventually, reachable

_BLOCK = "10.99.7"


@dataclass(frozen=True)
class Node:
    """One engine of a swarm."""

    name: str
    address: str
    socket: str
    client: Any

    def docker(self, *words: str) -> str:
        """Run the command-line tool against this engine; return what it prints."""
        return _run("docker", "--host", self.socket, *words)

    def cut_off(self) -> Callable[[], None]:
        """Take the node off the network, as a machine that is gone; return what brings it back."""
        _run("ip", "link", "set", self.name, "down")

        def bring_back() -> None:
            _run("ip", "link", "set", self.name, "up")

        return bring_back


def _run(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, f"{' '.join(command)}: {ended.stdout}{ended.stderr}"
    return ended.stdout.strip()


@contextlib.contextmanager
def swarm(folder: Path, count: int) -> Iterator[list[Node]]:
    """Start engines and join them; the first is the manager.  Root only."""
    mark = f"ct{secrets.token_hex(2)}"
    with contextlib.ExitStack() as stack:
        undo = stack.callback

        _run("ip", "link", "add", mark, "type", "bridge")
        undo(_run, "ip", "link", "delete", mark)
        _run("ip", "link", "set", mark, "up")
        across = ("FORWARD", "--in-interface", mark, "--out-interface", mark, "--jump", "ACCEPT")
        _run("iptables", "--insert", *across)
        undo(_run, "iptables", "--delete", *across)
        nodes = [stack.enter_context(_node(folder / f"node-{n}", mark, n)) for n in range(count)]
        manager, *others = nodes
        manager.docker("swarm", "init", "--advertise-addr", manager.address)
        token = manager.docker("swarm", "join-token", "--quiet", "worker")
        for node in others:
            node.docker("swarm", "join", "--token", token, f"{manager.address}:2377")
        yield nodes


@contextlib.contextmanager
def _node(folder: Path, mark: str, number: int) -> Iterator[Node]:
    name, address = f"{mark}n{number}", f"{_BLOCK}.{number + 1}"
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        _run("ip", "netns", "add", name)
        stack.callback(_run, "ip", "netns", "delete", name)
        _run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", name, "master", mark, "up")
        _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        for link in ("eth0", "lo"):
            _run("ip", "-n", name, "link", "set", link, "up")
        # An engine looks for the way out, and none leads anywhere.
        _run("ip", "-n", name, "route", "add", "default", "via", f"{_BLOCK}.254", "dev", "eth0", "onlink")

        socket = f"unix://{folder}/socket"
        own = f"--pidfile {folder}/pid --data-root {folder}/data --exec-root {folder}/exec"
        # A name of its own, and no name server: this machine's cannot be reached from there.
        inside = f"hostname {name} && mount --bind /dev/null /etc/resolv.conf && exec dockerd --host {socket} {own}"
        command = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "--mount", "sh", "-c", inside]
        log = stack.enter_context((folder / "log").open("wb"))
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        stack.callback(_stop, process)
        client = eventually(
            lambda: reachable(socket), f"{name} answers", lambda: (folder / "log").read_text()[-3000:]
        )
        stack.callback(client.close)
        yield Node(name, address, socket, client)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
