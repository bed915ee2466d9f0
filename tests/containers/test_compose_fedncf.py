"""The compose files bring FedNCF up on DRIFT's services: under the masked sum, and under a key that hosts share."""

import json

import pytest

from .stack import Stack

pytestmark = pytest.mark.containers

SETTINGS = {
    "COTERIE_REFERENCE": "false",
    "COTERIE_ROUNDS__PASSES": "4",
    "COTERIE_ROUNDS__COHORT": "30",
    "COTERIE_ROUNDS__GROUP": "30",
}


@pytest.fixture(scope="module", params=["masked", "shared-key"])
def trained(engine, images, tmp_path_factory, request):
    """Train; return the stack and the report."""
    settings = {**SETTINGS, "COTERIE_SECURE_SUM": request.param}
    stack = Stack(engine, {**images, **settings}, "docker-compose.fedncf.yml")
    try:
        stack.compose("up", "--detach", "operator")
        stack.until(lambda: not stack.state("operator")["Running"], "the run ends")
        assert stack.state("operator")["ExitCode"] == 0, stack.logs("operator")
        report = stack.copy("operator", "/report", tmp_path_factory.mktemp("parties"))
        yield stack, json.loads((report / "report.json").read_text()), request.param
    finally:
        stack.compose("down", "--volumes", "--remove-orphans", "--timeout", "10")


def test_a_run_trains_and_leaves_its_report(trained):
    stack, report, secure_sum = trained
    assert (report["system"], report["secure_sum"], report["form"]) == ("fedncf", secure_sum, "hosts")
    assert report["abandoned"] == 0
    assert [one["epoch"] for one in report["history"]][-1] == 4
    assert f"Secure sum: {secure_sum}" in stack.logs("operator")
    if secure_sum == "masked":
        assert report["protection"]["devices"] == {"count": 2, "curious": 0, "lost": 0}
    else:
        assert {"confirm", "decrypt", "compare models"} <= set(report["rounds"][-2]["seconds"])


def test_owners_that_have_nothing_to_do_end_at_once_and_well(trained):
    stack, _, _ = trained
    for owner in ("owner-1", "owner-2"):
        state = stack.state(owner)
        assert not state["Running"]
        assert state["ExitCode"] == 0
    assert stack.state("owner-0")["Running"]
