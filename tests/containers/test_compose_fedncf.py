"""The compose files bring FedNCF up on the services of DRIFT's, under the masked sum."""

import json

import pytest

from .stack import Stack

pytestmark = pytest.mark.containers

SETTINGS = {
    "COTERIE_SECURE_SUM": "masked",
    "COTERIE_REFERENCE": "false",
    "COTERIE_ROUNDS__PASSES": "4",
    "COTERIE_ROUNDS__COHORT": "30",
    "COTERIE_ROUNDS__GROUP": "30",
}


@pytest.fixture(scope="module")
def trained(engine, images, tmp_path_factory):
    """Train; return the stack and the report."""
    stack = Stack(engine, {**images, **SETTINGS}, "docker-compose.fedncf.yml")
    try:
        stack.compose("up", "--detach", "operator")
        stack.until(lambda: not stack.state("operator")["Running"], "the run ends")
        assert stack.state("operator")["ExitCode"] == 0, stack.logs("operator")
        report = stack.copy("operator", "/report", tmp_path_factory.mktemp("parties"))
        yield stack, json.loads((report / "report.json").read_text())
    finally:
        stack.compose("down", "--volumes", "--remove-orphans", "--timeout", "10")


def test_a_masked_run_trains_and_leaves_its_report(trained):
    stack, report = trained
    assert (report["system"], report["secure_sum"], report["form"]) == ("fedncf", "masked", "hosts")
    assert report["abandoned"] == 0
    assert [one["epoch"] for one in report["history"]][-1] == 4
    assert report["protection"]["devices"] == {"count": 2, "curious": 0, "lost": 0}
    assert "Secure sum: masked" in stack.logs("operator")


def test_owners_that_have_nothing_to_do_end_at_once_and_well(trained):
    stack, _ = trained
    for owner in ("owner-1", "owner-2"):
        state = stack.state(owner)
        assert not state["Running"]
        assert state["ExitCode"] == 0
    assert stack.state("owner-0")["Running"]
