"""The compose files bring a federation up whose runs are in PostgreSQL, and the database may go and come back."""

import os

import pytest

from .database_image import database_image
from .stack import Stack

pytestmark = [
    pytest.mark.containers,
    pytest.mark.skipif(
        not os.environ.get("COTERIE_CONTAINERS_POSTGRES"),
        reason="two minutes with its images: COTERIE_CONTAINERS_POSTGRES=1 runs it",
    ),
]


@pytest.fixture
def stack(engine, images):
    base = database_image(engine, images["BASE_IMAGE"])
    settings = {
        **images,
        "COTERIE_POSTGRES_IMAGE": base,
        "COTERIE_REFERENCE": "false",
        "COTERIE_DRIFT__EPOCHS": "12",
    }
    one = Stack(engine, settings, "docker-compose.postgres.yml")
    one.compose("build", "cos")
    try:
        yield one
    finally:
        one.compose("down", "--volumes", "--remove-orphans", "--timeout", "10")


def test_a_run_goes_on_when_its_database_is_killed_and_comes_back(stack):
    stack.compose("up", "--detach", "operator")
    stack.until(lambda: stack.healthy("cos"), "the COS is healthy")
    stack.until(lambda: "epoch" in stack.logs("operator"), "the run trains")
    cos = stack.state("cos")["Pid"]
    stack.crash("database")
    stack.until(lambda: "the store takes no writes" in stack.logs("cos"), "the COS notices")
    stack.until(lambda: not stack.state("operator")["Running"], "the run ends")
    assert stack.state("operator")["ExitCode"] == 0, stack.logs("operator")
    assert stack.state("cos")["Pid"] == cos
    status, listed = stack.execute("cos", "sh", "-c", "ls /party/state")
    assert status == 0
    assert "cos.db" not in listed.split()
    assert stack.container("database").attrs["HostConfig"]["NetworkMode"] == "none"
