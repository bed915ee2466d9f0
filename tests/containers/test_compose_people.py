"""The compose files bring up ten people with an agent each: a run of theirs, and pages that only they reach."""

import contextlib
import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from .engine import DEPLOY
from .same_run import in_one_process
from .stack import Stack, compose_commands

pytestmark = pytest.mark.containers

FILE = "docker-compose.people.yml"
PEOPLE = tuple(f"host-{n}" for n in range(10))
PASSES = {"COTERIE_ROUNDS__PASSES": "12", "COTERIE_ROUNDS__EVALUATE_EVERY": "6"}


@dataclass(frozen=True)
class Trained:
    """A stack whose run has ended, and the run's report."""

    stack: Stack
    report: dict[str, Any]


@pytest.fixture(scope="module")
def settings(images):
    # The size of the data set is that of the run's own file.
    return {
        name: value for name, value in {**images, **PASSES}.items() if not name.startswith("COTERIE_DATA__")
    }


@pytest.fixture(scope="module")
def people(engine, settings, tmp_path_factory):
    stack = Stack(engine, settings, FILE)
    stack.compose("build", "host-0")
    try:
        stack.compose("up", "--detach", "operator")
        stack.until(lambda: not stack.state("operator")["Running"], "the run ends")
        assert stack.state("operator")["ExitCode"] == 0, stack.logs("operator")
        into = tmp_path_factory.mktemp("people")
        report = json.loads((stack.copy("operator", "/report", into) / "report.json").read_text())
        yield Trained(stack, report)
    finally:
        stack.compose("down", "--volumes", "--remove-orphans", "--timeout", "10")


class Page:
    """The page of one person, opened by the script beside the compose files."""

    def __init__(self, link: str) -> None:
        address, _, secret = link.partition("/#")
        self.host, self.port = address.removeprefix("http://").split(":")
        answer = self.asked("POST", "/session", json.dumps({"link": secret}))
        assert answer.status == 200, answer.read()
        self.cookie = (answer.headers["set-cookie"] or "").partition(";")[0]

    def asked(self, method: str, path: str, body: str | None = None, **more: str) -> Any:
        connection = http.client.HTTPConnection(self.host, int(self.port), timeout=60)
        origin = f"http://{self.host}:{self.port}"
        headers = {"content-type": "application/json", "origin": origin, **more}
        connection.request(method, path, body, headers)
        return connection.getresponse()

    def parts(self) -> dict[str, Any]:
        """Return what the page shows now: the first message of its stream."""
        answer = self.asked("GET", "/events", cookie=self.cookie)
        while not (line := answer.readline()).startswith(b"data: "):
            assert line, "the stream ended"
        answer.close()
        return json.loads(line.removeprefix(b"data: "))


@contextlib.contextmanager
def opened(stack: Stack, service: str) -> Iterator[Page]:
    """Yield the page of a person in a container."""
    command = [sys.executable, str(DEPLOY / "own-page.py"), service, "--project", stack.project]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=stack.environment) as script:
        assert script.stdout is not None
        try:
            yield Page(script.stdout.readline().removeprefix("own page: ").strip())
        finally:
            script.terminate()


def test_ten_people_train_together_with_one_device_each(people):
    report = people.report
    assert (report["system"], report["secure_sum"], report["form"]) == ("fpl", "masked", "hosts")
    assert report["dataset"]["users"] == len(PEOPLE)
    assert report["abandoned"] == 0
    assert report["history"][-1]["epoch"] == 12


def test_the_numbers_are_exactly_those_of_one_process(people, settings):
    alone = in_one_process("people", settings, sets=["secure_sum=clear"])
    found, wanted = (
        [(one["epoch"], one["version"], one["metrics"]) for one in history]
        for history in (people.report["history"], alone["history"])
    )
    assert found == wanted
    assert people.report["chosen"] == alone["chosen"]


def test_each_person_has_a_page_that_shows_what_left_the_own_device(people):
    users = set()
    for service in ("host-0", "host-3", "host-9"):
        with opened(people.stack, service) as page:
            shown = page.parts()
            stranger = page.asked("GET", "/events")
        assert stranger.status == 401
        users.add(shown["about"]["user"])
        kinds = {(one["recipient"], one["protection"].partition(" ")[0]) for one in shown["receipt"]["sent"]}
        assert any(recipient.startswith("cos") for recipient, _ in kinds), kinds
        assert any("masked" in one["protection"] for one in shown["receipt"]["sent"]), kinds
        assert shown["receipt"]["declined"] == []
    assert len(users) == 3


def test_the_image_is_that_of_a_client_with_the_packages_of_a_page(people, settings):
    images = people.stack.client.images
    agent, client = (images.get(f"coterie-{name}:{settings['COTERIE_TAG']}") for name in ("agent", "client"))
    assert agent.attrs["RootFS"]["Layers"][:-1] == client.attrs["RootFS"]["Layers"]
    assert 0 < agent.attrs["Size"] - client.attrs["Size"] < 20e6
    uncompiled = (
        "import os, sys, coterie.launch.agent, coterie_client.service, starlette.applications, uvicorn\n"
        "specs = [getattr(module, '__spec__', None) for module in list(sys.modules.values())]\n"
        "sources = [spec for spec in specs if spec and spec.has_location and spec.origin.endswith('.py')]\n"
        "print(len(sources) > 500, [spec.name for spec in sources if not os.path.exists(spec.cached)])"
    )
    assert people.stack.execute("host-0", "python3", "-c", uncompiled) == (0, "True []\n")


def test_a_page_cannot_be_reached_from_another_container(people):
    knock = (
        "import socket, sys\n"
        "with socket.socket() as s:\n"
        "    s.settimeout(5)\n"
        "    print(s.connect_ex((sys.argv[1], int(sys.argv[2]))))"
    )
    status, own = people.stack.execute("host-0", "python3", "-c", knock, "127.0.0.1", "8020")
    assert (status, own.strip()) == (0, "0")
    for port, open_port in ((8020, False), (7443, True)):
        status, said = people.stack.execute("host-1", "python3", "-c", knock, "host-0", str(port))
        assert status == 0
        assert (said.strip() == "0") is open_port


def test_the_script_names_what_is_not_there(people):
    for service, said in (("host-10", "0 running containers of host-10"), ("cos", "no link in its log")):
        ended = subprocess.run(
            [sys.executable, str(DEPLOY / "own-page.py"), service, "--project", people.stack.project],
            env=people.stack.environment,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 1
        assert said in ended.stderr


@pytest.mark.parametrize("command", [["docker", "compose"], ["docker-compose"]], ids=" ".join)
def test_every_host_is_an_agent_with_a_port_and_a_volume_of_its_own(command):
    if command not in compose_commands():
        pytest.skip("not installed")
    files = ["--file", "docker-compose.yml", "--file", FILE, "--file", "docker-compose.wan.yml"]
    said = subprocess.run(
        [*command, *files, "config"], cwd=DEPLOY, capture_output=True, text=True, check=True
    )
    services = yaml.safe_load(said.stdout)["services"]
    hosts = {name: one for name, one in services.items() if name.startswith("host-")}
    assert tuple(sorted(hosts)) == PEOPLE
    assert {one["image"] for one in hosts.values()} == {"coterie-agent:latest"}
    assert set(services["operator"]["depends_on"]) >= set(PEOPLE)
    asked = [str(one["command"]) for one in hosts.values()]
    assert len(set(asked)) == len(PEOPLE)
    for one in hosts.values():
        assert len(one["volumes"]) == 1
        assert "ports" not in one
