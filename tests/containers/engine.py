"""A Docker engine: the one of this machine, or one of our own that leaves nothing behind."""

import contextlib
import ipaddress
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
BASE_IMAGES = {"BASE_IMAGE": "python:3.11-slim-bookworm", "COMPILER_IMAGE": "python:3.11-bookworm"}
LOCAL_BASE_IMAGES = {"BASE_IMAGE": "coterie-base:local", "COMPILER_IMAGE": "coterie-compiler:local"}
"""Base images that deploy/base-image.sh makes here, under names that no registry has."""

BALANCER_IMAGE, LOCAL_BALANCER_IMAGE = "haproxy:2.6-bookworm", "coterie-haproxy:local"

WAIT_S = 120.0
"""How long a test waits for anything; a machine under load needs some of it."""

COMMAND_S = 1800.0
"""How long a command may take: one builds all images, and other tests have the processors meanwhile."""

_TABLES = {"filter": ("INPUT", "FORWARD", "OUTPUT"), "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING")}
"""Tables of the firewall that an engine writes to, with the chains that are always there."""


def eventually(wanted: Callable[[], Any], what: str, last_words: Callable[[], str] = str) -> Any:
    """Poll until something is true, and return it."""
    deadline = time.monotonic() + WAIT_S
    while not (found := wanted()):
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not within {WAIT_S:.0f} s\n{last_words()}")
        time.sleep(0.1)
    return found


def reachable(host: str | None) -> docker.DockerClient | None:
    """Return a client of the engine at an address, or of the usual one; None when nobody answers."""
    try:
        client = docker.DockerClient(base_url=host) if host else docker.from_env()
        client.ping()
    except docker.errors.DockerException:
        return None
    return client


@contextlib.contextmanager
def started_engine(folder: Path) -> Iterator[str]:
    """Run an engine with everything of its own below a folder; yield its address."""
    address = f"unix://{folder}/socket"
    command = ["dockerd", "--host", address, "--pidfile", str(folder / "pid")]
    command += ["--data-root", str(folder / "data"), "--exec-root", str(folder / "exec")]
    with (folder / "log").open("wb") as log, network_as_before():
        engine = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            eventually(
                lambda: reachable(address) or engine.poll() is not None,
                "the engine answers",
                lambda: (folder / "log").read_text()[-3000:],
            )
            if engine.poll() is not None:
                pytest.fail(f"dockerd ended:\n{(folder / 'log').read_text()[-3000:]}")
            yield address
        finally:
            engine.terminate()
            try:
                engine.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(engine.pid, signal.SIGKILL)
                engine.wait()
            for mounted in mounts_below(folder):
                subprocess.run(["umount", "--lazy", mounted], check=True)


@contextlib.contextmanager
def network_as_before() -> Iterator[None]:
    """Take away the bridges and firewall rules that an engine leaves when it stops."""
    forwarding = Path("/proc/sys/net/ipv4/ip_forward")
    there, rules, forwards = bridges(), firewall(), forwarding.read_text()
    try:
        yield
    finally:
        for bridge in bridges() - there:
            subprocess.run(["ip", "link", "delete", bridge], check=True)
        forwarding.write_text(forwards)
        if rules is not None:
            subprocess.run(["iptables-restore"], input=rules, text=True, check=True)


def bridges() -> set[str]:
    """Return the names of an engine's bridges."""
    links = [link.name for link in Path("/sys/class/net").iterdir()]
    return {name for name in links if name == "docker0" or name.startswith("br-")}


def free_network() -> ipaddress.IPv4Network:
    """Return 256 addresses that this machine has no way to yet: another engine's network may have been left."""
    routes = subprocess.run(["ip", "-4", "route"], check=True, capture_output=True, text=True).stdout
    taken = [
        ipaddress.IPv4Network(first)
        for first in (line.split()[0] for line in routes.splitlines())
        if first[0].isdigit()
    ]
    for network in ipaddress.IPv4Network("10.213.0.0/16").subnets(new_prefix=24):
        if not any(network.overlaps(other) for other in taken):
            return network
    pytest.fail(f"no free network: {routes}")


def firewall() -> str | None:
    """Return the firewall's rules, as they can be restored."""
    if shutil.which("iptables-save") is None:
        return None
    rules = subprocess.run(["iptables-save"], check=True, capture_output=True, text=True).stdout
    for table, chains in _TABLES.items():
        if f"*{table}\n" not in rules:  # never used: empty, and everything is accepted
            rules += f"*{table}\n" + "".join(f":{chain} ACCEPT [0:0]\n" for chain in chains) + "COMMIT\n"
    return rules


def mounts_below(folder: Path) -> list[str]:
    """Return what is mounted below a folder, the innermost first."""
    points = (line.split()[1] for line in Path("/proc/mounts").read_text().splitlines())
    return sorted((point for point in points if point.startswith(f"{folder}/")), reverse=True)


@dataclass(frozen=True)
class Engine:
    """A Docker engine, and how its command-line tools reach it."""

    client: docker.DockerClient
    environment: dict[str, str]

    def run(self, command: Sequence[str], last_words: Callable[[], str] = str, **options: Any) -> str:
        """Run a command with the engine in its environment and return what it prints; on failure show more."""
        ended = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=COMMAND_S, **options
        )
        if ended.returncode:
            said = f"{ended.stdout}\n{ended.stderr}\n{last_words()}"
            pytest.fail(f"{' '.join(command)} ended with {ended.returncode}:\n{said}")
        return ended.stdout

    def base_images(self) -> dict[str, str]:
        """Return images with Python, without and with a compiler: what is there, or pulled, or made from packages.

        They are given by the arguments of a build that name them.
        """
        if "BASE_IMAGE" in os.environ:
            return {name: os.environ.get(name, usual) for name, usual in BASE_IMAGES.items()}
        for images in (BASE_IMAGES, LOCAL_BASE_IMAGES):
            with contextlib.suppress(docker.errors.ImageNotFound):
                for image in images.values():
                    self.client.images.get(image)
                return images
        try:
            for image in BASE_IMAGES.values():
                self.client.images.pull(image)
        except docker.errors.APIError:  # no registry here
            self._make_images()
            return LOCAL_BASE_IMAGES
        return BASE_IMAGES

    def balancer_image(self) -> str:
        """Return an image with HAProxy: what is there, or pulled, or made from packages."""
        if "BALANCER_IMAGE" in os.environ:
            return os.environ["BALANCER_IMAGE"]
        for image in (BALANCER_IMAGE, LOCAL_BALANCER_IMAGE):
            with contextlib.suppress(docker.errors.ImageNotFound):
                self.client.images.get(image)
                return image
        try:
            self.client.images.pull(BALANCER_IMAGE)
        except docker.errors.APIError:  # no registry here
            self._make_images()
            return LOCAL_BALANCER_IMAGE
        return BALANCER_IMAGE

    def _make_images(self) -> None:
        """Make all local images at once: base images made again have other ids, and all is built on them again."""
        self.run([str(DEPLOY / "base-image.sh"), *LOCAL_BASE_IMAGES.values(), LOCAL_BALANCER_IMAGE])
