"""The stack of deploy/docker-compose.yml for real: an engine, images, and projects that leave nothing behind."""

import contextlib
import io
import os
import secrets
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BASE_IMAGE = "python:3.11-slim-bookworm"
LOCAL_BASE_IMAGE = "coterie-base:local"
"""What deploy/base-image.sh makes here, so that it cannot be taken for the one of a registry."""

OWNERS = ("owner-0", "owner-1", "owner-2")
HOSTS = ("host-0", "host-1")
SERVICES = ("thirdparty", "cos", *OWNERS, *HOSTS)

WAIT_S = 120.0
"""How long a test waits for anything; a machine under load needs some of it."""

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


# --- an engine ---------------------------------------------------------------------------------------------------


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

    def run(self, command: Sequence[str], **options: Any) -> str:
        """Run a command with the engine in its environment and return what it prints."""
        ended = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=900, **options
        )
        if ended.returncode:
            pytest.fail(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
        return ended.stdout

    def base_image(self) -> str:
        """Return an image with Python: what is there, or pulled, or made from Debian packages."""
        if named := os.environ.get("BASE_IMAGE"):
            return named
        for image in (BASE_IMAGE, LOCAL_BASE_IMAGE):
            with contextlib.suppress(docker.errors.ImageNotFound):
                self.client.images.get(image)
                return image
        try:
            self.client.images.pull(BASE_IMAGE)
        except docker.errors.APIError:  # no registry here
            self.run([str(DEPLOY / "base-image.sh"), LOCAL_BASE_IMAGE])
            return LOCAL_BASE_IMAGE
        return BASE_IMAGE


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """The engine of this machine, or one of our own where none runs."""
    if compose_command() is None:
        pytest.skip("neither `docker compose` nor `docker-compose` is installed")
    if (client := reachable(None)) is not None:
        yield Engine(client, dict(os.environ))
        return
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("no Docker engine can be reached, and to start one takes root and dockerd")
    folder = Path(tempfile.mkdtemp(prefix="coterie-engine-"))  # short: a socket's path has an end
    try:
        with started_engine(folder) as address:
            client = reachable(address)
            assert client is not None
            yield Engine(client, {**os.environ, "DOCKER_HOST": address})
            client.close()
        assert not mounts_below(folder)
    finally:
        shutil.rmtree(folder)


# --- the stack ---------------------------------------------------------------------------------------------------


def compose_command() -> list[str] | None:
    """Return how compose is called here: the plugin where it is, else the program of old."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if (
            shutil.which(command[0])
            and not subprocess.run([*command, "version"], capture_output=True).returncode
        ):
            return command
    return None


class Stack:
    """One project of the compose file."""

    def __init__(self, engine: Engine, settings: dict[str, str]) -> None:
        self.project = f"coterie-{secrets.token_hex(4)}"
        self.client = engine.client
        self._engine = Engine(engine.client, {**engine.environment, **settings})

    def compose(self, *arguments: str) -> str:
        command = compose_command()
        assert command is not None
        files = ["--project-name", self.project, "--file", str(DEPLOY / "docker-compose.yml")]
        return self._engine.run([*command, *files, *arguments], cwd=DEPLOY)

    def container(self, service: str) -> Any:
        """Return the container of a service, running or not, as it is now."""
        labels = [f"com.docker.compose.project={self.project}", f"com.docker.compose.service={service}"]
        (found,) = self.client.containers.list(all=True, filters={"label": labels})
        return found

    def state(self, service: str) -> dict[str, Any]:
        return self.container(service).attrs["State"]

    def healthy(self, service: str) -> bool:
        return self.state(service)["Health"]["Status"] == "healthy"

    def logs(self, service: str) -> str:
        return self.container(service).logs().decode()

    def execute(self, service: str, *command: str) -> tuple[int, str]:
        """Run a command in a running container; return its status and what it printed."""
        status, output = self.container(service).exec_run(list(command))
        return status, output.decode()

    def copy(self, service: str, path: str, into: Path) -> Path:
        """Copy a folder out of a container, running or not."""
        stream, _ = self.container(service).get_archive(path)
        with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as archive:
            archive.extractall(into, filter="data")
        return into / Path(path).name

    def until(self, wanted: Callable[[], Any], what: str) -> Any:
        """Wait for something to come true; on failure show what the stack logged."""
        return eventually(wanted, what, lambda: self.compose("logs", "--no-color", "--tail=30"))

    def crash(self, service: str) -> None:
        """Kill the main process as a crash would: `docker kill` counts as the user's wish to stop it."""
        os.kill(self.state(service)["Pid"], signal.SIGKILL)

    def came_back(self, service: str) -> bool:
        """Whether the engine has started a container again, and it is healthy."""
        container = self.container(service)
        return (
            container.attrs["RestartCount"] > 0
            and container.attrs["State"].get("Health", {}).get("Status") == "healthy"
        )


TRAINING = {
    "COTERIE_NAME": "containers",
    "COTERIE_DATA__SYNTHETIC__USERS": "120",
    "COTERIE_DATA__SYNTHETIC__ITEMS": "200",
    "COTERIE_DATA__SYNTHETIC__INTERACTIONS": "8000",
    "COTERIE_DRIFT__DIM": "8",
    "COTERIE_DRIFT__EPOCHS": "6",
}
"""Small enough for a minute, long enough to be disturbed."""


@pytest.fixture(scope="session")
def images(engine: Engine) -> dict[str, str]:
    """What compose needs in its environment to build and find the images, which are built."""
    settings = {
        "BASE_IMAGE": engine.base_image(),
        "COTERIE_TAG": "test",
        "COTERIE_HEALTH_INTERVAL": "1s",
        **TRAINING,
    }
    Stack(engine, settings).compose("build")
    return settings


@pytest.fixture(scope="session")
def stack(engine: Engine, images: dict[str, str]) -> Iterator[Stack]:
    """The services, started and waiting for their operator."""
    stack = Stack(engine, images)
    try:
        stack.compose("up", "--detach", *OWNERS, *HOSTS)
        yield stack
    finally:
        stack.compose("down", "--volumes", "--remove-orphans", "--timeout", "10")
        left = {"label": f"com.docker.compose.project={stack.project}"}
        assert not stack.client.containers.list(all=True, filters=left)
        assert not stack.client.volumes.list(filters=left)
