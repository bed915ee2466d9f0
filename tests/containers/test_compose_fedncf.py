"""The compose files bring FedNCF up: under the masked sum on four hosts, and under a key that two hosts share."""

import json

import pytest

from .same_run import in_one_process
from .stack import Stack

pytestmark = pytest.mark.containers

SETTINGS = {
    "COTERIE_REFERENCE": "false",
    "COTERIE_ROUNDS__PASSES": "4",
    "COTERIE_ROUNDS__COHORT": "30",
    "COTERIE_ROUNDS__GROUP": "30",
    "COTERIE_ROUNDS__EVALUATE_EVERY": "1",
}
BESIDE = {"masked": ["docker-compose.scale.yml"], "shared-key": []}
HOSTS = {"masked": 4, "shared-key": 2}


@pytest.fixture(scope="module", params=["masked", "shared-key"])
def trained(engine, images, tmp_path_factory, request):
    """Train; return the stack, the report and what was asked for."""
    settings = {**images, **SETTINGS, "COTERIE_SECURE_SUM": request.param}
    stack = Stack(engine, settings, "docker-compose.fedncf.yml", *BESIDE[request.param])
    try:
        stack.compose("up", "--detach", "operator")
        stack.until(lambda: not stack.state("operator")["Running"], "the run ends")
        assert stack.state("operator")["ExitCode"] == 0, stack.logs("operator")
        report = stack.copy("operator", "/report", tmp_path_factory.mktemp("parties"))
        yield stack, json.loads((report / "report.json").read_text()), settings
    finally:
        stack.compose("down", "--volumes", "--remove-orphans", "--timeout", "10")


def test_a_run_trains_and_leaves_its_report(trained):
    stack, report, settings = trained
    secure_sum = settings["COTERIE_SECURE_SUM"]
    assert (report["system"], report["secure_sum"], report["form"]) == ("fedncf", secure_sum, "hosts")
    assert report["abandoned"] == 0
    assert [one["epoch"] for one in report["history"]][-1] == 4
    assert f"Secure sum: {secure_sum}" in stack.logs("operator")
    if secure_sum == "masked":
        assert report["protection"]["devices"]["count"] == HOSTS[secure_sum]
    else:
        assert {"confirm", "decrypt", "compare models"} <= set(report["rounds"][-2]["seconds"])


def test_the_numbers_are_exactly_those_of_one_process(trained):
    _, report, settings = trained
    secure_sum = settings["COTERIE_SECURE_SUM"]
    alone = in_one_process(
        "fedncf", settings, sets=[f"federation.hosts={HOSTS[secure_sum]}", "secure_sum=clear"]
    )
    found, wanted = (
        [(one["epoch"], one["version"], one["metrics"]) for one in history]
        for history in (report["history"], alone["history"])
    )
    assert found == wanted
    assert len(found) == 5
    assert report["chosen"] == alone["chosen"]


def test_owners_that_have_nothing_to_do_end_at_once_and_well(trained):
    stack, _, _ = trained
    for owner in ("owner-1", "owner-2"):
        state = stack.state(owner)
        assert not state["Running"]
        assert state["ExitCode"] == 0
    assert stack.state("owner-0")["Running"]
