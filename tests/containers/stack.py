"""One project of the compose file, and what a test does to it."""

import functools
import io
import os
import secrets
import shutil
import signal
import subprocess
import tarfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..callers import metric_sum
from .engine import DEPLOY, Engine, eventually

OWNERS = ("owner-0", "owner-1", "owner-2")
HOSTS = ("host-0", "host-1")
PARTIES = ("thirdparty", "cos", *OWNERS, *HOSTS)


@functools.cache  # the older one takes a second to say its version
def compose_commands() -> list[list[str]]:
    """Return how compose can be called here, the plugin first."""
    return [
        command
        for command in (["docker", "compose"], ["docker-compose"])
        if shutil.which(command[0])
        and not subprocess.run([*command, "version"], capture_output=True).returncode
    ]


def compose_command() -> list[str] | None:
    """Return how compose is called here: the plugin where it is, else the program of old."""
    return next(iter(compose_commands()), None)


class Stack:
    """One project of the compose file, and of files beside it."""

    def __init__(self, engine: Engine, settings: dict[str, str], *beside: str | Path) -> None:
        self.project = f"coterie-{secrets.token_hex(4)}"
        self.client = engine.client
        self._files = ["docker-compose.yml", *beside]  # those of deploy/, and absolute paths
        self._engine = Engine(engine.client, {**engine.environment, **settings})

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the commands that reach this engine."""
        return self._engine.environment

    def compose(self, *arguments: str) -> str:
        command = compose_command()
        assert command is not None
        files = [word for name in self._files for word in ("--file", str(DEPLOY / name))]
        project = [*command, "--project-name", self.project, *files]
        said = self._logged if arguments[0] == "up" else str
        return self._engine.run([*project, *arguments], last_words=said, cwd=DEPLOY)

    def _logged(self) -> str:
        return self.compose("logs", "--no-color", "--tail=30")

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
        return eventually(wanted, what, self._logged)

    def address(self, service: str) -> str:
        """Return the address of a running container in the federation's network."""
        (attached,) = self.container(service).attrs["NetworkSettings"]["Networks"].values()
        return str(attached["IPAddress"])

    def metric(self, service: str, name: str, **labels: str) -> float:
        """Return the sum of a metric over all its lines that carry these labels.

        Services show their metrics to the federation's network where `COTERIE_METRICS` says so.
        """
        with urllib.request.urlopen(f"http://{self.address(service)}:9464/metrics", timeout=10) as page:
            return metric_sum(page.read().decode(), name, labels)

    def cut_off(self, service: str) -> Callable[[], None]:
        """Take a container off the network; return what brings it back, under its name and address of before."""
        container, address = self.container(service), self.address(service)
        (network,) = self.client.networks.list(names=list(container.attrs["NetworkSettings"]["Networks"]))
        network.disconnect(container, force=True)
        return lambda: network.connect(container, aliases=[service], ipv4_address=address)

    def hold_still(self, service: str) -> Callable[[], None]:
        """Stop the main process of a container; return what lets it go on.

        The engine's own pause gives up on a container that is held back for having used its processors.
        """
        process = self.state(service)["Pid"]
        os.kill(process, signal.SIGSTOP)
        return lambda: os.kill(process, signal.SIGCONT)

    def slow_down(self, service: str, share: float) -> Callable[[], None]:
        """Leave a container this share of a processor; return what gives it back what it had."""
        container = self.container(service)
        had = container.attrs["HostConfig"]["NanoCpus"] / 1e9

        def give(processors: float) -> None:
            # The library cannot change a limit that compose has set.
            self._engine.run(["docker", "update", "--cpus", str(processors), container.id])

        give(share)
        return lambda: give(had)

    def crash(self, service: str) -> None:
        """Kill the main process as a crash would: `docker kill` counts as the user's wish to stop it."""
        os.kill(self.state(service)["Pid"], signal.SIGKILL)

    def restarts(self, service: str) -> int:
        """Return how often the engine has started a container again."""
        return int(self.container(service).attrs["RestartCount"])

    def came_back(self, service: str, before: int = 0) -> bool:
        """Whether the engine has started a container more often than before, and it is healthy."""
        return (
            self.restarts(service) > before
            and self.state(service).get("Health", {}).get("Status") == "healthy"
        )
