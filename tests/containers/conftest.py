"""An engine, the images, and the stack of deploy/docker-compose.yml for real."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .engine import Engine, mounts_below, reachable, started_engine
from .stack import HOSTS, OWNERS, Stack, compose_command

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


@pytest.fixture(scope="session")
def images(engine: Engine) -> dict[str, str]:
    """Build the images, and return the environment that compose needs to find them."""
    settings = {
        **engine.base_images(),
        "COTERIE_TAG": os.environ.get("COTERIE_TAG", "test"),
        "COTERIE_HEALTH_INTERVAL": "2s",
        **TRAINING,
    }
    Stack(engine, settings, "docker-compose.privmvmf.yml").compose("build")
    return settings


@pytest.fixture(scope="module")
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
